"""Scenarios for durable streams on a faulty disk: a bit of a file is flipped, a file is truncated, or there is no
room left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from support.stores import (
    PATIENCE_S,
    Audit,
    Outcome,
    Rig,
    make_message,
    read_message,
    small_disk,
    streams_listed,
)

import iris
from iris.errors import IrisError, NoStream, StreamDamaged, StreamError
from iris.streams import StreamGap
from proofs.scenarios.streams import NEWS, ORDERS, PUBLISHER, TOPIC

VICTIMS = 5
HEALTHY = 2
EACH = 60


async def damage(rig: Rig, count: int, seed: int) -> Outcome:
    """Damage `count` closed logs, several before each start: flip a bit or truncate a file, each in another way."""
    outcome, rng = Outcome(seed), random.Random(seed)
    names = [f"stream-{number}" for number in range(VICTIMS + HEALTHY)]
    uuids: dict[str, str] = {}
    rig.start_relay()
    await rig.serve()
    async with rig.client() as client:
        for half in range(2):
            if half:  # move the records from the write-ahead log to tables
                rig.end_store(signal.SIGTERM)
                await rig.serve()
            for writer, name in enumerate(names):
                made = await client.streams.create(name, timeout=PATIENCE_S)
                uuids[name] = made.uuid
                for first in range(half * EACH // 2, (half + 1) * EACH // 2, 5):
                    batch = [make_message(writer, n, 1200) for n in range(first, first + 5)]
                    await client.streams.append_many(name, batch, timeout=PATIENCE_S)
    rig.end_store(signal.SIGTERM)
    kept = rig.directory / "kept"
    rig.data.rename(kept)
    seen: Counter[str] = Counter()
    silent: list[str] = []
    done = 0
    while done < count and len(outcome.broken) < 5:
        shutil.copytree(kept, rig.data)
        victims = rng.sample(names, min(VICTIMS, count - done))
        what = {name: _harm(rig.data / "streams" / uuids[name], rng) for name in victims}
        done += len(victims)
        await rig.serve()
        async with rig.client() as client:
            listed = await streams_listed(client)
            for writer, name in enumerate(names):
                found, verdict = await _read_damaged(client, name, writer, outcome)
                if name not in victims:
                    outcome.expect(
                        f"{name}, which is whole, is served whole beside {what}: {verdict}",
                        verdict == "whole",
                    )
                    at = await client.streams.append(name, b"more", timeout=PATIENCE_S)
                    outcome.expect(f"{name} takes appends", at == EACH)
                    continue
                seen[verdict] += 1
                if verdict == "whole":
                    outcome.expect(f"{what[name]}: {found} of {EACH}", found == EACH)
                elif not await _reported(client, name, uuids[name], listed):
                    silent.append(f"{what[name]}: {verdict}, and neither describe nor list say so")
        rig.end_store(signal.SIGTERM)
        shutil.rmtree(rig.data)
    outcome.figures = {
        "damaged logs": f"{done}: "
        + ", ".join(f"{number} {verdict}" for verdict, number in sorted(seen.items())),
        "damage that neither describe nor list reported": f"{len(silent)}",
    }
    for text in silent[:3]:
        outcome.break_(text)
    return outcome


def _harm(folder: Path, rng: random.Random) -> str:
    """Flip a bit or truncate a file somewhere in a log; return a description."""
    # All files except RocksDB's text for people, which no program reads.
    files = sorted(
        file for file in folder.iterdir() if file.stat().st_size and not file.name.startswith("LOG")
    )
    file = rng.choices(files, [file.stat().st_size ** 0.5 for file in files])[0]
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if rng.random() < 0.6:
        bit = rng.randrange(8)
        data[at] ^= 1 << bit
        done = f"bit {bit} of byte {at} of {len(data)} flipped in {file.name}"
    else:
        done = f"{file.name} cut at {at} of {len(data)}"
        del data[at:]
    file.write_bytes(data)
    return done


async def _read_damaged(client: iris.Client, name: str, writer: int, outcome: Outcome) -> tuple[int, str]:  # fmt: skip
    """Return how many messages could be read from the start without a break, and the outcome."""
    gaps: list[StreamGap] = []
    at = 0
    try:
        async with client.streams.read(
            name, 0, follow=False, patience=PATIENCE_S, on_gap=gaps.append
        ) as reader:
            async for message in reader:
                try:
                    wrote = read_message(message.payload)
                except ValueError as err:
                    outcome.break_(f"{name}, offset {message.offset}: {err}")
                    wrote = (writer, message.offset)
                right = wrote == (writer, message.offset) and message.offset == at
                outcome.expect(
                    f"{name}: {wrote} at {message.offset}, where {(writer, at)} is due", right
                )
                at = message.offset + 1
    except StreamDamaged:
        return at, "reported while reading"
    except NoStream:
        return 0, "not served"
    except StreamError as err:
        outcome.break_(f"{name}: {type(err).__name__}: {err}")
        return at, "refused"
    if gaps:
        outcome.break_(f"{name}: {gaps[0]}")
    return at, "whole" if at == EACH else "short"


async def _reported(client: iris.Client, name: str, uuid: str, listed: dict[str, object]) -> bool:
    """Return whether describe or list reports the damage."""
    if getattr(listed.get(uuid), "failed", ""):
        return True
    try:
        return bool((await client.streams.describe(name, timeout=PATIENCE_S)).failed)
    except StreamDamaged:
        return True
    except IrisError:
        return False


DISK_MB = 64
LARGE = 200_000
TRIES = 600


async def full_disk(directory: Path, seed: int) -> Outcome:
    """Fill the store's disk, check what still works, and make room. Raises PermissionError if it cannot mount."""
    outcome = Outcome(seed)
    with small_disk(directory / "small", DISK_MB) as disk, Rig(directory, disk / "data") as rig:
        rig.start_relay()
        await rig.serve()
        async with rig.client() as client, rig.client() as other:
            await _full(rig, disk, client, other, outcome)
    return outcome


async def _full(rig: Rig, disk: Path, client: iris.Client, other: iris.Client, outcome: Outcome) -> None:  # fmt: skip
    live: list[int] = []
    streams = client.streams
    await streams.create(ORDERS, timeout=PATIENCE_S)
    await streams.create(NEWS, topic="news.>", timeout=PATIENCE_S)
    acked: dict[int, int] = {}
    refused: list[str] = []
    number = 0

    async def append(size: int) -> bool:
        nonlocal number
        payload = make_message(1, number, size)
        number += 1
        try:
            acked[number - 1] = await streams.append(ORDERS, payload, timeout=PATIENCE_S)
        except StreamError as err:
            refused.append(f"{type(err).__name__}: {err}")
            return False
        return True

    def receive(message: iris.Message) -> None:
        live.append(read_message(message.payload)[1])

    published = 0

    async def publish(times: int) -> None:
        nonlocal published
        for _ in range(times):
            await other.publish(TOPIC, make_message(PUBLISHER, published, LARGE))
            published += 1
        await other.flush(timeout=PATIENCE_S)

    async with client.subscribe(TOPIC, receive):
        for _ in range(20):
            await append(2000)
        await publish(5)
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(1 << 16)):
                pass
        tries = 0
        while tries < TRIES and await append(LARGE):
            tries += 1
        outcome.expect("a full disk refuses appends", bool(refused))
        outcome.expect(
            f"the refusal names the reason: {refused[:1]}",
            any("space" in text.lower() for text in refused),
        )
        for _ in range(TRIES):
            await publish(1)
            if (await streams.describe(NEWS, timeout=PATIENCE_S)).lost_messages:
                break
        lost = (await streams.describe(NEWS, timeout=PATIENCE_S)).lost_messages
        outcome.expect("describe counts what is not recorded", lost > 0)
        # While it stays full, the store tries again and again; whatever that does, what is there can be read.
        began_s = time.monotonic()
        looks = 0
        while time.monotonic() < began_s + 5:
            audit = Audit(ORDERS, outcome.break_)
            known = dict(acked)
            await audit.look(client)
            audit.check(1, known)
            looks += 1
            if outcome.broken:
                break
            await publish(1)
            await append(LARGE)
            await asyncio.sleep(0.1)
        started = rig.starts
        (disk / "ballast").unlink()
        until_s = time.monotonic() + PATIENCE_S
        full = len(refused)
        while not await append(2000):
            if time.monotonic() > until_s:
                outcome.break_(f"with room again, appends are refused: {refused[-1]}")
                break
            await asyncio.sleep(0.2)
        mended_s = time.monotonic() - until_s + PATIENCE_S
        news = Audit(NEWS, outcome.break_)
        until_s = time.monotonic() + PATIENCE_S
        while (PUBLISHER, published - 1) not in news.found and time.monotonic() < until_s:
            await publish(1)
            await asyncio.sleep(0.2)
            await news.look(client, tells=True)
        audit = Audit(ORDERS, outcome.break_)
        await audit.look(client)
        audit.check(1, acked)
        stored = {number for _, number in audit.found}
        async with asyncio.timeout(PATIENCE_S):
            while len(live) < published:  # noqa: ASYNC110 - a callback fills it
                await asyncio.sleep(0.01)
    outcome.expect("subscribers receive every publication", live == [*range(published)])
    outcome.expect("losses are reported with their number", 0 < news.missing == news.reported)
    outcome.expect("the store is not started again for it", started == rig.starts == 1)
    outcome.figures = {
        "full": f"{full} appends refused ({refused[0] if refused else 'none'}); "
        f"{looks} reads of all that was there, {published} publications received live",
        "room again": f"appends after {mended_s:.1f} s; {news.missing} publications not recorded, {news.reported} reported",
        "appends": f"{len(acked)} acknowledged; {len(stored) - len(acked)} that were refused are there too",
    }
