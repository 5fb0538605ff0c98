"""What durable streams promise when something ends that should not: scenarios, each with a count and a seed.

    kills        the store is killed, over and over, under load
    power        its disk forgets what no sync covered
    damage       a bit of its files is flipped, or a file cut
    full_disk    there is no room left
    restarts     the relay and the store end and come back, in any order
    batches      the store is killed, over and over, while batches are staged and committed

`make proof AREA=streams N=…` runs them at large counts, `tests/adversity/test_store_crashes.py` at small ones. Each returns an `Outcome`:
what it counted, and what was broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
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
    read_message,
    small_disk,
    streams_listed,
)

import iris
from iris.errors import IrisError, NoStream, StreamDamaged, StreamError, StreamUnavailable
from iris.streams import CommitInfo, StagedAttempt, StreamGap

ORDERS = "orders"
NEWS = "news"
TOPIC = "news.world"
PUBLISHER = 9


class Load:
    """Two producers of one stream and a publisher that another one records, and what became of it all."""

    def __init__(self, reader: iris.Client, appenders: Sequence[Appender], publisher: Publisher, outcome: Outcome) -> None:  # fmt: skip
        self.reader = reader
        self.appenders = appenders
        self.publisher = publisher
        self.outcome = outcome
        self.orders = Audit(ORDERS, outcome.break_)
        self.news = Audit(NEWS, outcome.break_)

    async def check(self) -> None:
        """Read on, and compare with what was acknowledged before."""
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
        # The last that was published may be lost; what comes after it tells.
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
            f"{unsure} told as unsure",
            "publications": f"{self.publisher.sent:,}, {len(news.found):,} recorded, {news.missing:,} missing in "
            f"{len(news.gaps):,} gaps",
        }


@asynccontextmanager
async def load(rig: Rig, outcome: Outcome, rng: random.Random) -> AsyncIterator[Load]:
    """Two producers and a publisher at work, on new streams."""
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
            if outcome.broken:  # what is gone is not waited for
                first.streams.end()
                second.streams.end()


async def _make_streams(client: iris.Client) -> None:
    await client.streams.create(ORDERS, timeout=PATIENCE_S)
    await client.streams.create(NEWS, topic="news.>", timeout=PATIENCE_S)


# -- 1: killed -----------------------------------------------------------------------------------------------


async def kills(rig: Rig, count: int, seed: int) -> Outcome:
    """Kill the store `count` times under load, now and then while it starts."""
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


# -- 2: power ------------------------------------------------------------------------------------------------


async def power(rig: Rig, count: int, seed: int, shim: Path, *, lie: bool = False) -> Outcome:
    """Take the power from the disk `count` times, half of them while the store starts. `lie`: syncs do nothing."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve(**lossy(shim, rig))
    async with rig.client() as client:
        await _make_streams(client)
    rig.end_store(signal.SIGTERM)
    starting = 0
    made: set[str] = set()

    def environ(at: int) -> dict[str, str]:
        # In every other cycle all goes that no sync covered, in the others some of it stays, torn.
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
            if not lie:  # its producers would wait for what is gone
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
    """Take the power in the first minute of a data directory: what was acknowledged there is there, too."""
    outcome = Outcome(seed)
    rig.start_relay()
    await rig.serve(**lossy(shim, rig))
    async with rig.client() as client:
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
    """Whether a new stream was made, as far as we were told."""
    try:
        await client.streams.create(name, timeout=PATIENCE_S)
    except IrisError:
        return False
    return True


async def _power_lost(rig: Rig, outcome: Outcome) -> None:
    code = await rig.store_ended(PATIENCE_S)
    outcome.expect(f"the power was to end the store, not {code}", code == POWER_LOST)
    rig.end_store(signal.SIGKILL)


# -- 3: damage -----------------------------------------------------------------------------------------------

VICTIMS = 5
HEALTHY = 2
EACH = 60


async def damage(rig: Rig, count: int, seed: int) -> Outcome:
    """Flip a bit or cut a file of `count` logs that were closed, several a start, each in another way."""
    outcome, rng = Outcome(seed), random.Random(seed)
    names = [f"stream-{number}" for number in range(VICTIMS + HEALTHY)]
    uuids: dict[str, str] = {}
    rig.start_relay()
    await rig.serve()
    async with rig.client() as client:
        for half in range(2):
            if half:  # what is there goes from the write-ahead log to tables
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
        "damage that nobody was told of by describe or list": f"{len(silent)}",
    }
    for text in silent[:3]:
        outcome.break_(text)
    return outcome


def _harm(folder: Path, rng: random.Random) -> str:
    """Flip a bit or cut a file somewhere in a log; return what was done."""
    # All but the text that RocksDB writes for people: nothing reads it.
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
    """Return how many messages could be read from the start without a break, and what came of it."""
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
        return at, "told while reading"
    except NoStream:
        return 0, "not served"
    except StreamError as err:
        outcome.break_(f"{name}: {type(err).__name__}: {err}")
        return at, "refused"
    if gaps:
        outcome.break_(f"{name}: {gaps[0]}")
    return at, "whole" if at == EACH else "short"


async def _reported(client: iris.Client, name: str, uuid: str, listed: dict[str, object]) -> bool:
    """Whether describe or list says that something is wrong with it."""
    if getattr(listed.get(uuid), "failed", ""):
        return True
    try:
        return bool((await client.streams.describe(name, timeout=PATIENCE_S)).failed)
    except StreamDamaged:
        return True
    except IrisError:
        return False


# -- 4: full -------------------------------------------------------------------------------------------------

DISK_MB = 64
LARGE = 200_000
TRIES = 600


async def full_disk(directory: Path, seed: int) -> Outcome:
    """Fill the store's disk, look at what goes on, and make room. Raises PermissionError if nothing can be mounted."""
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

    def hear(message: iris.Message) -> None:
        live.append(read_message(message.payload)[1])

    published = 0

    async def publish(times: int) -> None:
        nonlocal published
        for _ in range(times):
            await other.publish(TOPIC, make_message(PUBLISHER, published, LARGE))
            published += 1
        await other.flush(timeout=PATIENCE_S)

    async with client.subscribe(TOPIC, hear):
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
            if (await streams.describe(NEWS, timeout=PATIENCE_S)).lost:
                break
        lost = (await streams.describe(NEWS, timeout=PATIENCE_S)).lost
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
    outcome.expect("subscribers hear every publication", live == [*range(published)])
    outcome.expect("what is lost is told with its number", 0 < news.missing == news.told)
    outcome.expect("the store is not started again for it", started == rig.starts == 1)
    outcome.figures = {
        "full": f"{full} appends refused ({refused[0] if refused else 'none'}); "
        f"{looks} reads of all that was there, {published} publications heard live",
        "room again": f"appends after {mended_s:.1f} s; {news.missing} publications not recorded, {news.told} told",
        "appends": f"{len(acked)} acknowledged; {len(stored) - len(acked)} that were refused are there too",
    }


# -- 5: restarts ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Follower:
    """A reader that stays on for the whole time."""

    audit: Audit

    async def run(self, client: iris.Client) -> None:
        gaps: list[StreamGap] = []
        async with client.streams.read(
            ORDERS, 0, patience=2 * PATIENCE_S, on_gap=gaps.append
        ) as reader:
            async for messages in reader.batches():
                items = [(g.first, g.next, g) for g in gaps]
                gaps.clear()
                self.audit.take(
                    sorted([*items, *((m.offset, m.offset + 1, m) for m in messages)], key=lambda i: i[:2])
                )  # fmt: skip


async def restarts(rig: Rig, count: int, seed: int) -> Outcome:
    """End the relay or the store `count` times, in either way, while the other one runs."""
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


# -- 6: batches ----------------------------------------------------------------------------------------------

WRITER = "etl"
WINNER = 3
LOSER = 4


class Batches:
    """A writer of batches: their parts are staged by several clients, some in vain, and one commits, now and then twice."""

    def __init__(self, clients: Sequence[iris.Client], rng: random.Random, outcome: Outcome) -> None:  # fmt: skip
        self.committed = 0
        self.sent = 0
        """Messages of the batches until now."""
        self.ends = {0}
        """Numbers at which a batch begins or ends."""
        self.acked: dict[int, int] = {}
        """Number -> offset."""
        self.again: Counter[str] = Counter()
        self._clients = clients
        self._rng = rng
        self._outcome = outcome
        self._ending = False
        self._running = asyncio.create_task(self._run(), name="batches")

    async def _run(self) -> None:
        while not self._ending:
            await self._batch()

    async def _batch(self) -> None:
        rng = self._rng
        first = self.sent
        parts: list[range] = []
        for _ in range(rng.choice((0, 1, 2, 3, 3))):
            parts.append(range(self.sent, self.sent + rng.choice((0, 1, 20, 200, 1000))))
            self.sent = parts[-1].stop
        winners = [self._stage(WINNER, part) for part in parts]
        losers = [self._stage(LOSER, part) for part in parts if rng.random() < 0.3]
        attempts = (await asyncio.gather(*winners, *losers))[: len(parts)]
        self.ends.add(self.sent)
        info = await self._commit(attempts)
        if (info.first, info.next) == (None, None):
            self._outcome.break_(f"batch {self.committed} is below the last one")
            return
        assert info.first is not None
        self._outcome.expect(f"batch {self.committed} is {info}", info.next == info.first + self.sent - first)  # fmt: skip
        self.acked |= {n: info.first + n - first for n in range(first, self.sent)}
        if rng.random() < 0.3:
            self.again["commits replayed"] += 1
            other = [] if rng.random() < 0.5 else attempts
            again = await self._commit(other)
            same = (again.first, again.next, again.replayed) == (info.first, info.next, True)
            self._outcome.expect(f"batch {self.committed} is {again} when {info} is replayed", same)
        self.committed += 1

    async def _stage(self, writer: int, numbers: range) -> StagedAttempt:
        client = self._rng.choice(self._clients)
        while True:
            try:
                async with client.streams.stage(
                    ORDERS, writer=WRITER, batch=self.committed, timeout=2 * PATIENCE_S
                ) as staging:
                    for number in numbers:
                        size = random.Random(number).choice((8, 200, 900, 3000))
                        await staging.append(make_message(writer, number, size))
                    return await staging.finish()
            except StreamUnavailable:
                self.again["attempts that failed"] += 1

    async def _commit(self, attempts: Sequence[StagedAttempt]) -> CommitInfo:
        client = self._rng.choice(self._clients)
        while True:
            try:
                return await client.streams.commit(
                    ORDERS, writer=WRITER, batch=self.committed, attempts=attempts, timeout=2 * PATIENCE_S
                )  # fmt: skip
            except StreamUnavailable:
                self.again["commits that failed"] += 1

    async def progress(self) -> None:
        """Return when two more batches were committed; raises TimeoutError, or why it ended."""
        until = self.committed + 2
        async with asyncio.timeout(PATIENCE_S):
            while self.committed < until:
                if self._running.done():
                    self._running.result()
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """End with the batch that is under way. Raises why it ended before."""
        self._ending = True
        async with asyncio.timeout(3 * PATIENCE_S):
            await self._running

    async def stop(self) -> None:
        """End at once."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


async def batches(rig: Rig, count: int, seed: int) -> Outcome:
    """Kill the store `count` times while batches are staged and committed."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve()
    async with rig.client() as one, rig.client() as two, rig.client() as reader:
        await reader.streams.create(ORDERS, timeout=PATIENCE_S)
        for client in (one, two):
            await client.streams.describe(ORDERS, timeout=PATIENCE_S)
        audit = Audit(ORDERS, outcome.break_)
        work = Batches((one, two), random.Random(rng.getrandbits(32)), outcome)

        async def look(audit: Audit) -> None:
            acked = dict(work.acked)
            await audit.look(reader)
            audit.check(WINNER, acked)
            seen = max((number for _, number in audit.found), default=-1) + 1
            outcome.expect(f"part of a batch is seen, until {seen}", seen in work.ends)
            lost = [number for writer, number in audit.found if writer != WINNER]
            outcome.expect(f"{len(lost)} messages of attempts that lost are seen", not lost)

        try:
            for _ in range(count):
                await asyncio.sleep(rng.uniform(0, 0.4))
                rig.end_store(signal.SIGKILL)
                await rig.serve()
                await work.progress()
                await look(audit)
                if outcome.broken:
                    break
            await work.finish()
            await look(audit)
            again = Audit(ORDERS, outcome.break_)
            await look(again)
            outcome.expect("a second read shows the same", again.found == audit.found)
            numbers = [number for _, number in again.found]
            outcome.expect("every batch is there once, in order", numbers == [*range(work.sent)])
            outcome.expect("there is nothing else", not again.gaps and again.at == work.sent)
        except (TimeoutError, IrisError) as err:
            outcome.break_(f"batches ended: {type(err).__name__}: {err}")
        finally:
            await work.stop()
    outcome.figures = {
        "SIGKILL of the store": f"{count} while batches were staged and committed",
        "batches": f"{work.committed} of {work.sent:,} messages",
        "again": ", ".join(f"{times} {what}" for what, times in sorted(work.again.items())),
    }
    return outcome
