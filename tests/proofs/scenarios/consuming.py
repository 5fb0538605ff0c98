"""Scenarios for readers and consumers: memory that does not grow with the log, and workers that may be
killed.

Each has a count and a seed, and returns an `Outcome`, as those of `streams`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

from support.stores import PATIENCE_S, Outcome, Rig, WallClock

from iris.streams import StreamMessage
from proofs.scenarios.stream_worker import CONSUMER, STREAM

HERE = Path(__file__).parent
CHUNK = 20_000
GROWTH_MB = 64
"""Allowed growth of a reader or store between the first tenth and the end of a long read: allocators keep some."""
POISON = 97
"""One of this many messages cannot be handled by any worker."""


def resident_mb(pid: int | str) -> float:
    """Return the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def long_read(rig: Rig, count: int, seed: int) -> Outcome:
    """Append `count` messages, read all of them, and measure the memory of reader and store."""
    outcome = Outcome(seed)
    rig.start_relay()
    await rig.serve()
    async with rig.client() as client:
        await client.streams.create(STREAM, timeout=PATIENCE_S)
        begin_s = time.monotonic()
        for first in range(0, count, CHUNK):
            numbers = range(first, min(count, first + CHUNK))
            await client.streams.append_many(
                STREAM, [b"%d" % number for number in numbers], timeout=PATIENCE_S
            )
        append_s = time.monotonic() - begin_s
    store = rig.store_pid
    samples: list[tuple[int, float, float]] = []
    wrong = 0
    async with rig.client() as client:
        at = 0
        begin_s = time.monotonic()
        async with client.streams.read(STREAM, follow=False) as reader:
            async for batch in reader.batches():
                for message in batch:
                    wrong += message.offset != at or int(message.payload) != at
                    at += 1
                if not samples or at - samples[-1][0] >= count // 50:
                    samples.append((at, resident_mb("self"), resident_mb(store)))
        read_s = time.monotonic() - begin_s
    outcome.expect(
        f"every message is read once and in order ({wrong} were not)", at == count and not wrong
    )
    outcome.expect("nothing is missing", not reader.gaps)
    early = [sample for sample in samples if sample[0] <= count // 10] or samples[:1]
    for column, what in ((1, "reader"), (2, "store")):
        before, after = max(s[column] for s in early), max(s[column] for s in samples)
        outcome.figures[f"memory of the {what}"] = (
            f"{before:.0f} MB in the first tenth, {after:.0f} MB at most"
        )
        outcome.expect(
            f"the {what} does not grow ({before:.0f} to {after:.0f} MB)", after < before + GROWTH_MB
        )
    outcome.figures["messages"] = (
        f"{count:,}; {count / append_s:,.0f}/s appended, {count / read_s:,.0f}/s read"
    )
    return outcome


async def workers(rig: Rig, count: int, kills: int, seed: int) -> Outcome:
    """Let workers handle `count` messages while `kills` of them are killed. Messages that fail become
    dead letters.
    """
    outcome = Outcome(seed)
    rng = random.Random(seed)
    rig.start_relay()
    await rig.serve()
    poison = {n for n in range(count) if n % POISON == POISON - 1}
    files = rig.directory / "handled"
    files.mkdir()
    running: list[subprocess.Popen[bytes]] = []
    started = 0

    def launch() -> None:
        nonlocal started
        environ = {**rig.environ, "PYTHONPATH": str(HERE.parents[1])}
        command = [
            sys.executable,
            str(HERE / "stream_worker.py"),
            str(rig.socket),
            str(files / str(started)),
        ]
        with (rig.directory / "workers.log").open("ab") as log:
            running.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )
        started += 1

    async with rig.client() as client:
        await client.streams.create(STREAM, timeout=PATIENCE_S)
        try:
            for _ in range(3):
                launch()

            async def append() -> None:
                for n in range(count):
                    payload = b"poison %d" % n if n in poison else b"%d" % n
                    # Each message is a separate record; a few share a key.
                    key = f"customer {n % 50}" if n % 3 == 0 else None
                    await client.streams.append(STREAM, payload, key=key, timeout=PATIENCE_S)

            appending = asyncio.create_task(append())
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                victim = running.pop(rng.randrange(len(running)))
                victim.kill()
                victim.wait(PATIENCE_S)
                launch()
            await appending
            until_s = time.monotonic() + PATIENCE_S + kills
            while True:
                found = [c for c in await client.streams.consumers(STREAM) if c.name == CONSUMER]
                if found and not found[0].lag and not found[0].dead and found[0].position == count:
                    break
                if time.monotonic() > until_s:
                    outcome.break_(f"it is not all settled: {found}")
                    break
                await asyncio.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait(PATIENCE_S)
        handled: Counter[int] = Counter()
        again = 0
        for file in files.iterdir():
            for line in file.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # otherwise it was killed within a line
                    offset, payload, deliveries = line.split()
                    outcome.expect("a worker is handed what was appended", offset == payload)
                    handled[int(payload)] += 1
                    again += int(deliveries) > 1
        dead: Counter[int] = Counter()
        async with client.streams.read(f"{STREAM}.dead", follow=False) as reader:
            async for letter in reader:
                assert letter.dead is not None
                dead[letter.dead.offset] += 1
                if letter.dead.offset in poison:
                    outcome.expect(
                        "a dead letter names the reason",
                        letter.dead.reason == "poison" or kills > 0,
                    )
                    outcome.expect(
                        "and shows the message", letter.payload == b"poison %d" % letter.dead.offset
                    )
    missing = [n for n in range(count) if n not in poison and not handled[n] and not dead[n]]
    outcome.expect(
        f"every message is handled or a dead letter ({len(missing)} are not: {missing[:5]})",
        not missing,
    )
    lost = [n for n in poison if dead[n] != 1]
    outcome.expect(f"each poison is one dead letter ({len(lost)} are not: {lost[:5]})", not lost)
    good = [n for n in dead if n not in poison]
    outcome.expect(f"nothing else is dead ({len(good)} are: {good[:5]})", not good)
    outcome.figures["messages"] = (
        f"{count:,}, {len(poison):,} of them poison; {started:,} workers, {kills:,} killed"
    )
    twice = sum(n - 1 for n in handled.values() if n > 1)
    outcome.figures["handled"] = (
        f"{sum(handled.values()):,} times; {twice:,} twice, by workers killed before their ack arrived; {again:,} redelivered"
    )
    outcome.figures["dead letters"] = f"{sum(dead.values()):,}, {len(good):,} of them good messages"
    return outcome


async def clock_steps(rig: Rig, count: int, seed: int, shim: Path) -> Outcome:
    """Set the store's clock `count` times, an hour and more forward or back, while workers hold, refuse and await
    messages.
    """
    outcome = Outcome(seed)
    rng = random.Random(seed)
    clock = WallClock(shim, rig.directory)
    rig.start_relay()
    await rig.serve(**clock.environ)
    lease_s, delay_s = 3.0, 0.5
    late: list[float] = []
    async with rig.client() as client:
        await client.streams.create(STREAM, timeout=PATIENCE_S)
        async with client.streams.consumer(
            STREAM, CONSUMER, shared=True, ack_timeout=lease_s, max_deliver=2
        ) as worker:

            async def due(
                what: str, payload: bytes, since_s: float, after_s: float
            ) -> StreamMessage:
                """Return the next message. It must be `payload`, and come at least `after_s` after `since_s`."""
                try:
                    async with asyncio.timeout(PATIENCE_S / 2):
                        message = await anext(worker)
                except TimeoutError:
                    raise RuntimeError(f"{what} did not come for {PATIENCE_S / 2} s") from None
                took_s = time.monotonic() - since_s
                outcome.expect(f"{what} comes: {message.payload!r}", message.payload == payload)
                outcome.expect(f"{what} is not early: {took_s:.2f} s", took_s > after_s - 0.02)
                late.append(took_s - after_s)
                return message

            async def append(payload: bytes, after_s: float) -> None:
                """Append a message that is due in `after_s` by the store's clock."""
                at = datetime.now(UTC) + timedelta(seconds=clock.ahead_s + after_s)
                await client.streams.append(STREAM, payload, deliver_at=at, timeout=PATIENCE_S)

            for turn in range(count):
                hours = (1, -1)[turn] if turn < 2 else rng.choice((-2, -1, 1, 2))
                # Start each clock before the action that it measures, so that a busy machine makes nothing look early.
                held_s = time.monotonic()
                await client.streams.append(STREAM, b"work", timeout=PATIENCE_S)
                held = await due("what was appended", b"work", time.monotonic(), 0.0)
                if hours < 0:
                    before_s = time.monotonic()
                    await append(b"deferred before", delay_s)
                clock.set_by(3600 * hours)
                if hours < 0:
                    worker.ack(
                        await due(
                            "what was deferred before the clock was set",
                            b"deferred before",
                            before_s,
                            delay_s,
                        )
                    )
                deferred_s = time.monotonic()
                await append(b"deferred", delay_s)
                worker.ack(
                    await due("what is deferred after it was set", b"deferred", deferred_s, delay_s)
                )
                # The lease of the first message ends at its time, and not because of the clock.
                again = await due("what was not acknowledged", b"work", held_s, lease_s)
                outcome.expect(
                    "it was handed out twice", (held.deliveries, again.deliveries) == (1, 2)
                )
                worker.ack(again)
                await client.streams.append(STREAM, b"failed", timeout=PATIENCE_S)
                failed = await due("what was appended", b"failed", time.monotonic(), 0.0)
                refused_s = time.monotonic()
                worker.nack(failed, delay=delay_s)
                await worker.flush()
                clock.set_by(3600 * rng.choice((-2, -1, 1, 2)))
                worker.ack(await due("what was refused", b"failed", refused_s, delay_s))
                await worker.flush()
        found = [c for c in await client.streams.consumers(STREAM) if c.name == CONSUMER]
        outcome.expect(f"nothing is dead or left: {found}", not (found[0].dead or found[0].lag))
    said = (rig.directory / "store.log").read_text().count('"store.clock_stepped"')
    outcome.expect(f"each step is logged once: {said} of {2 * count}", said == 2 * count)
    outcome.figures["steps of the clock"] = f"{2 * count}, of one or two hours"
    outcome.figures["latest delivery"] = f"{max(late):.2f} s after its time"
    return outcome
