"""Scenarios for durable streams when a process or the power fails, each with a count and a seed.

    kills        the store is killed repeatedly under load
    power        its disk loses all writes without a sync
    restarts     the relay and the store end and restart, in any order

`disks.py` covers damage and a full disk, `batches.py` kills while batches are staged and committed.

`make proof AREA=streams N=…` runs them at large counts, `tests/adversity/test_store_crashes.py` at small ones. Each
returns an `Outcome`: its counts, and the broken promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.stores import (
    PATIENCE_S,
    POWER_LOST,
    Appender,
    Audit,
    Outcome,
    Publisher,
    Rig,
    lossy,
    make_message,
    streams_listed,
)

import iris
from iris.errors import IrisError, StreamError
from iris.streams import StreamGap

ORDERS = "orders"
NEWS = "news"
TOPIC = "news.world"
PUBLISHER = 9


class Load:
    """Two producers of one stream and a publisher whose topic another stream records, with their results."""

    def __init__(self, reader: iris.Client, appenders: Sequence[Appender], publisher: Publisher, outcome: Outcome) -> None:  # fmt: skip
        self.reader = reader
        self.appenders = appenders
        self.publisher = publisher
        self.outcome = outcome
        self.orders = Audit(ORDERS, outcome.break_)
        self.news = Audit(NEWS, outcome.break_)

    async def check(self) -> None:
        """Read on, and compare with the messages acknowledged before."""
        acked = {appender.writer: dict(appender.acked) for appender in self.appenders}
        await self.orders.look(self.reader)
        for writer, known in acked.items():
            self.orders.check(writer, known)
        await self.news.look(self.reader, tells=True)

    async def resumes(self) -> None:
        """Return when appends are acknowledged again."""
        try:
            await asyncio.gather(*(appender.progress() for appender in self.appenders))
        except TimeoutError:
            self.outcome.break_(f"appends did not resume within {PATIENCE_S:g} s")

    async def finish(self) -> None:
        """End the load, and check everything once more from the start."""
        for appender in self.appenders:
            await appender.finish()
        await self.publisher.stop()
        # The latest publication may be lost, which only a later one reveals.
        end = self.publisher.sent
        until_s = time.monotonic() + PATIENCE_S
        while True:
            await self.publisher.publish()
            await asyncio.sleep(0.05)
            await self.check()
            if any(number >= end for _, number in self.news.found):
                break
            if time.monotonic() > until_s:
                self.outcome.break_("publications were not recorded again")
                break
        whole = Audit(ORDERS, self.outcome.break_)
        await whole.look(self.reader)
        for appender in self.appenders:
            whole.check(appender.writer, appender.acked)
            if appender.refused:
                number, why = next(iter(appender.refused.items()))
                self.outcome.break_(
                    f"{len(appender.refused)} appends of {appender.writer} were refused, first {number}: {why}"
                )
            for number in appender.refused:
                if (appender.writer, number) in whole.found:
                    self.outcome.break_(f"append {number} was refused, and is there")
        again = Audit(NEWS, self.outcome.break_)
        await again.look(self.reader, tells=True)
        self.outcome.expect(
            "a second read shows the same",
            (whole.found, whole.at) == (self.orders.found, self.orders.at)
            and self.news.found.items() <= again.found.items(),
        )
        self.outcome.expect("only publications have gaps", not whole.gaps)
        news = self.news
        unsure = sum(len(appender.unsure) for appender in self.appenders)
        self.outcome.figures |= {
            "appends acknowledged": f"{sum(len(a.acked) for a in self.appenders):,}; "
            f"{unsure} reported as unsure",
            "publications": f"{self.publisher.sent:,}, {len(news.found):,} recorded, {news.missing:,} missing in "
            f"{len(news.gaps):,} gaps",
        }


@asynccontextmanager
async def load(rig: Rig, outcome: Outcome, rng: random.Random) -> AsyncIterator[Load]:
    """Run two producers and a publisher on new streams."""
    async with rig.client() as first, rig.client() as second, rig.client() as publishing, rig.client() as reader:  # fmt: skip
        await _make_streams(reader)
        seeds = [rng.getrandbits(32) for _ in range(2)]
        appenders = [
            Appender(client, ORDERS, number, random.Random(seed))
            for number, (client, seed) in enumerate(zip((first, second), seeds, strict=True))
        ]
        publisher = Publisher(publishing, TOPIC, PUBLISHER)
        try:
            yield Load(reader, appenders, publisher, outcome)
        finally:
            await publisher.stop()
            for appender in appenders:
                await appender.stop()
            if outcome.broken:  # lost messages would never arrive
                first.streams.end()
                second.streams.end()


async def _make_streams(client: iris.Client) -> None:
    await client.streams.create(ORDERS, timeout=PATIENCE_S)
    await client.streams.create(NEWS, topic="news.>", timeout=PATIENCE_S)


# -- killed -----------------------------------------------------------------------------------------------


async def kills(rig: Rig, count: int, seed: int) -> Outcome:
    """Kill the store `count` times under load, sometimes while it starts."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve()
    starting = 0
    async with load(rig, outcome, rng) as work:
        await work.resumes()
        for _ in range(count):
            await asyncio.sleep(rng.uniform(0, 0.4))
            rig.end_store(signal.SIGKILL)
            while rng.random() < 0.2:
                rig.start_store()
                await asyncio.sleep(rng.uniform(0, 0.6))
                rig.end_store(signal.SIGKILL)
                starting += 1
            await rig.serve()
            await work.resumes()
            await work.check()
            if outcome.broken:
                break
        await work.finish()
    outcome.figures = {
        "SIGKILL of the store": f"{count} under load, {starting} while it started"
    } | outcome.figures
    return outcome


# -- power ------------------------------------------------------------------------------------------------


async def power(rig: Rig, count: int, seed: int, shim: Path, *, lie: bool = False) -> Outcome:
    """Cut the power of the disk `count` times, half of them while the store starts. `lie`: syncs do nothing."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve(**lossy(shim, rig))
    async with rig.client() as client:
        await _make_streams(client)
    rig.end_store(signal.SIGTERM)
    starting = 0
    made: set[str] = set()

    def environ(at: int) -> dict[str, str]:
        # In every other cycle all unsynced writes are lost; in the others some stay, torn.
        keep = rng.getrandbits(31) | 1 if rng.random() < 0.5 and not lie else 0
        return lossy(shim, rig, at=at, after=rng.randrange(1, 16), keep=keep, lie=lie)

    await rig.serve(**environ(0))
    async with load(rig, outcome, rng) as work:
        await work.resumes()
        for cycle in range(count):
            await asyncio.sleep(rng.uniform(0, 0.4))
            making = asyncio.create_task(_make(work.reader, f"made-{cycle}"))
            await asyncio.sleep(rng.choice((0, 0.05, 0.2, 0.4)))
            rig.signal_store(signal.SIGUSR2)
            await _power_lost(rig, outcome)
            if rng.random() < 0.5:
                rig.start_store(**environ(at=int(math.exp(rng.uniform(0, math.log(400))))))
                if await rig.attached():
                    rig.signal_store(signal.SIGUSR2)
                else:
                    starting += 1
                await _power_lost(rig, outcome)
            await rig.serve(**environ(0))
            if not lie:  # otherwise its producers would wait for lost messages
                await work.resumes()
            await work.check()
            if outcome.broken:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                break
            if await making:
                made.add(f"made-{cycle}")
        else:
            await work.finish()
            listed = {info.name for info in (await streams_listed(work.reader)).values()}
            outcome.expect(f"streams that were made are gone: {made - listed}", made <= listed)
    outcome.figures = {
        "power lost": f"{count} times under load, {starting} while the store started; {len(made)} streams made meanwhile"
    } | outcome.figures
    return outcome


async def first_power(rig: Rig, seed: int, shim: Path) -> Outcome:
    """Cut the power in the first minute of a data directory. Acknowledged messages must be stored then, too."""
    outcome = Outcome(seed)
    rig.start_relay()
    await rig.serve(**lossy(shim, rig))
    async with rig.client(drain_timeout_s=0.1) as client:
        await client.streams.create(ORDERS, timeout=PATIENCE_S)
        acked = {
            n: await client.streams.append(ORDERS, make_message(0, n, 100), timeout=PATIENCE_S)
            for n in range(5)
        }
        rig.signal_store(signal.SIGUSR2)
        with contextlib.suppress(StreamError):
            await client.streams.append(ORDERS, make_message(0, 5, 100), timeout=2)
        await _power_lost(rig, outcome)
    await rig.serve()
    async with rig.client() as client:
        audit = Audit(ORDERS, outcome.break_)
        await audit.look(client)
        audit.check(0, acked)
    outcome.figures = {"power lost in a new directory": f"{len(acked)} appends acknowledged"}
    return outcome


async def _make(client: iris.Client, name: str) -> bool:
    """Create a stream; return whether that was confirmed."""
    try:
        await client.streams.create(name, timeout=PATIENCE_S)
    except IrisError:
        return False
    return True


async def _power_lost(rig: Rig, outcome: Outcome) -> None:
    code = await rig.store_ended(PATIENCE_S)
    outcome.expect(f"the power was to end the store, not {code}", code == POWER_LOST)
    rig.end_store(signal.SIGKILL)


# -- restarts ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Follower:
    """A reader that follows the stream for the whole time."""

    audit: Audit

    async def run(self, client: iris.Client) -> None:
        gaps: list[StreamGap] = []
        async with client.streams.read(
            ORDERS, 0, patience=2 * PATIENCE_S, on_gap=gaps.append
        ) as reader:
            async for messages in reader.batches():
                items = [(g.first, g.end, g) for g in gaps]
                gaps.clear()
                self.audit.take(
                    sorted([*items, *((m.offset, m.offset + 1, m) for m in messages)], key=lambda i: i[:2])
                )  # fmt: skip


async def restarts(rig: Rig, count: int, seed: int) -> Outcome:
    """Kill or stop the relay or the store `count` times, while the other one runs."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve()
    done: Counter[str] = Counter()
    async with load(rig, outcome, rng) as work, rig.client() as client:
        follower = Follower(Audit(ORDERS, outcome.break_))
        following = asyncio.create_task(follower.run(client))
        await work.resumes()
        for cycle in range(count):
            await asyncio.sleep(rng.uniform(0, 0.4))
            number = rng.choice((signal.SIGKILL, signal.SIGTERM))
            which = ("relay", "store")[cycle % 2]
            done[f"{which} by {number.name}"] += 1
            if which == "relay":
                rig.mark_said()
                await asyncio.to_thread(rig.end_relay, number)
                await asyncio.sleep(rng.choice((0, 0.2)))
                await asyncio.to_thread(rig.start_relay)
                outcome.expect("the store outlives its relay", await rig.attached())
            else:
                await asyncio.to_thread(rig.end_store, number)
                await rig.serve()
            await work.resumes()
            await work.check()
            if outcome.broken:
                break
        await work.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while follower.audit.at < work.orders.at and not following.done():  # noqa: ASYNC110 - a task reads
                    await asyncio.sleep(0.01)
        if following.done():
            outcome.break_(f"the reader ended: {following.exception()!r}")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        outcome.expect(
            "a reader that stays gets everything once",
            follower.audit.found == work.orders.found,
        )
    ended = ", ".join(f"{number} {what}" for what, number in sorted(done.items()))
    outcome.figures = {"ended and started again": ended} | outcome.figures
    return outcome
