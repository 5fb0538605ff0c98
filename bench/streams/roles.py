"""One process of a run: `python -m streams.roles PEER ROLE OPTIONS-AS-JSON`. The loads are the same for every
system.

A message begins with its number and, in the live loads, the time at which it was due. Each role prints one line of
JSON at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import harness
import uvloop
from harness import Result
from peers import TOPIC
from roles import END, LONGEST_S, PROBE, PROBE_S, Check, encoded, exact_timer

from streams import LOG, WARM, Appender, Durable, State, durable_class

NUMBER: Final = struct.Struct("<Q")
STAMPED: Final = struct.Struct("<QQ")
KEPT_PART: Final = 4
"""A log keeps 1 / this of what is written, so by the end it was overwritten one time less."""
LEAST: Final = 1000
"""Least number of messages written to a log, however slow it is; a record of Iris holds some 60 of them."""
WARM_PART: Final = 0.2
WARM_MAX_S: Final = 1.0
PATIENCE: Final = 3
"""Time limit of a load, as a multiple of its seconds, if it becomes slower."""
QUIET_S: Final = 0.5
SETTLE_S: Final = 10.0
POLL_S: Final = 0.1
TICK_NS: Final = 50_000
BURST: Final = 256
END_S: Final = 0.02
TRICKLE_S: Final = 0.002
DISK_BYTES: Final = 1 << 20


# -- appends -------------------------------------------------------------------------------------------------


async def _write(out: Appender, size: int, total: int, limit_s: float) -> Result:
    """Append numbered messages, several batches in flight, until there are `total` or the time is over."""
    filler, pack = bytes(size - NUMBER.size), NUMBER.pack
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(limit_s * 1e9)
    taken = acknowledged = 0

    async def work() -> None:
        nonlocal taken, acknowledged
        while taken < total and time.monotonic_ns() < end_ns:
            first, taken = taken, min(total, taken + out.BATCH)
            stored = await out.append_many([pack(n) + filler for n in range(first, taken)])
            acknowledged += stored  # in two lines, because other tasks add to it during the await

    async with asyncio.TaskGroup() as group:
        for _ in range(out.INFLIGHT):
            group.create_task(work())
    spent_s = (time.monotonic_ns() - begin_ns) / 1e9
    return {"sent": taken, "acknowledged": acknowledged, "spent_s": spent_s}


async def appender(peer: Durable, size: int, seconds: float) -> Result:
    """Find the rate on one log, then write to another, which keeps a quarter of it, for about `seconds`."""
    await peer.create(WARM)
    warm = await _write(
        await peer.appender(WARM), size, 1 << 62, min(WARM_MAX_S, seconds * WARM_PART)
    )
    await peer.delete(WARM)
    total = max(LEAST, int(warm["sent"] / warm["spent_s"] * seconds))
    keep = total // KEPT_PART
    await peer.create(LOG, keep=keep, size=size)
    cued = harness.next_cue()
    harness.say_ready()  # processor time counts from the cue
    await cued.wait()
    cpu_s = time.process_time()
    done = await _write(
        await peer.appender(LOG, keep=keep), size, total, max(1.0, seconds * PATIENCE)
    )
    state = await peer.state(LOG)
    rate = done["acknowledged"] / done["spent_s"]
    return {
        **done,
        "rate": rate,
        "mb_s": rate * size / 1e6,
        "asked_to_keep": keep,
        "kept": state.kept,
        "kept_bytes": state.size_bytes,
        "written": state.written,
        "overwritten_times": round(state.written / max(1, state.kept) - 1, 2),
        "cpu_s": round(time.process_time() - cpu_s, 3),
    }


async def single(peer: Durable, size: int, seconds: float, pause_s: float = 0.0) -> Result:
    """Append one message after the other, each `pause_s` after the one before was acknowledged."""
    await peer.create(LOG)
    out = await peer.appender(LOG)
    filler, pack = bytes(size - NUMBER.size), NUMBER.pack
    samples_ns = array("q")
    sent = 0
    for part_s in (min(WARM_MAX_S, seconds * WARM_PART), seconds):
        del samples_ns[:]
        end_ns = time.monotonic_ns() + int(part_s * 1e9)
        while (begin_ns := time.monotonic_ns()) < end_ns:
            await out.append(pack(sent) + filler)
            samples_ns.append(time.monotonic_ns() - begin_ns)
            sent += 1
            if pause_s:
                await asyncio.sleep(pause_s)
    state = await peer.state(LOG)
    return {"sent": sent, "written": state.written, "latency": encoded(samples_ns)}


async def trickle(peer: Durable, size: int, seconds: float, rate: float) -> Result:
    """Append `rate` messages each second, evenly, whatever waits."""
    await peer.create(LOG)
    out = await peer.appender(LOG)
    payload = bytes(size)
    begin_s = time.monotonic()
    sent = 0
    async with asyncio.TaskGroup() as group:
        while (spent_s := time.monotonic() - begin_s) < seconds:
            while sent < rate * spent_s:
                group.create_task(out.append(payload))
                sent += 1
            await asyncio.sleep(TRICKLE_S)
    return {"sent": sent, "spent_s": time.monotonic() - begin_s}


# -- reading -------------------------------------------------------------------------------------------------


async def filler(peer: Durable, size: int, messages: int, limit_s: float) -> Result:
    """Write the log that is read later."""
    await peer.create(LOG)
    return await _write(await peer.appender(LOG), size, messages, limit_s)


async def delete(peer: Durable) -> Result:
    """Delete the log."""
    await peer.delete(LOG)
    return {}


async def look(peer: Durable) -> Result:
    """Ask for the log's state, which shows that its servers are up."""
    return {"state": asdict(await peer.state(LOG))}


async def reader(peer: Durable, size: int, settle: bool = False) -> Result:
    """Read the log from its first message on, and check every number. With `settle`, wait until it stops growing;
    then delete it."""
    state = await _settled(peer) if settle else await peer.state(LOG)
    numbers = array("Q")
    length = 0

    def took(payloads: Sequence[bytes]) -> None:
        nonlocal length
        number_of = NUMBER.unpack_from
        numbers.extend([number_of(payload)[0] for payload in payloads])
        length += sum(map(len, payloads))

    begin_ns = time.monotonic_ns()
    missing = await peer.replay(LOG, took)
    spent_s = (time.monotonic_ns() - begin_ns) / 1e9
    if settle:
        await peer.delete(LOG)
    ours = [number for number in numbers if number < END]
    last = -1
    inversions = 0
    for number in ours:
        inversions += number < last
        last = number
    wrong = len(ours) - len(set(ours)) + (inversions if peer.ordered else 0)
    return {
        "messages": len(ours),
        "highest": max(ours, default=-1),
        "wrong": wrong,
        "short": size * len(ours) > length,
        "spent_s": spent_s,
        "rate": len(numbers) / spent_s,
        "mb_s": length / spent_s / 1e6,
        "state": asdict(state),
        "missing": asdict(missing),
    }


async def _settled(peer: Durable) -> State:
    """Return what the log holds when it has not grown for a while."""
    until_s = time.monotonic() + SETTLE_S
    state = await peer.state(LOG)
    since_s = time.monotonic()
    while (now_s := time.monotonic()) < until_s and now_s - since_s < QUIET_S:
        await asyncio.sleep(POLL_S)
        found = await peer.state(LOG)
        if found.written != state.written:
            state, since_s = found, time.monotonic()
    return state


# -- live delivery -------------------------------------------------------------------------------------------


class Timed(Check):
    """Counts of a subscriber, and the latencies from when each message was due."""

    def __init__(self) -> None:
        super().__init__()
        self.samples_ns = array("q")

    def took(self, payload: bytes) -> None:
        now_ns = time.monotonic_ns()
        number, due_ns = STAMPED.unpack_from(payload)
        if number < END:
            self.samples_ns.append(now_ns - due_ns)
        super().took(payload)


async def subscriber(peer: Durable) -> Result:
    check = Timed()
    await peer.subscriber(check.took)
    harness.say_ready()
    return {**await check.result(), "latency": encoded(check.samples_ns)}


async def publisher(peer: Durable, size: int, seconds: float, rate: float, record: bool) -> Result:
    """Publish `rate` messages/s at fixed times; before the cue, send probes. With `record`, a log records them."""
    if record:
        await peer.create(LOG, topic=TOPIC)
    out = await peer.offering()
    cued = harness.next_cue()
    rest = bytes(size - STAMPED.size)
    while not cued.is_set():
        await out.offer([STAMPED.pack(PROBE, 0) + rest])
        await asyncio.sleep(PROBE_S)
    stop = asyncio.create_task(harness.stop_signal())
    total = max(1, int(rate * seconds))
    begin_ns = time.monotonic_ns() + 50_000_000
    ticked = asyncio.Event()
    sent = late_ns = 0
    with exact_timer(begin_ns, max(TICK_NS, int(1e9 / rate))) as timer:

        def tick() -> None:
            os.read(timer, 8)
            ticked.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(timer, tick)
        while sent < total:
            await ticked.wait()
            ticked.clear()
            now_ns = time.monotonic_ns()
            due = min(total, int((now_ns - begin_ns) * rate / 1e9) + 1)
            late_ns = max(late_ns, now_ns - begin_ns - int(sent * 1e9 / rate))
            while sent < due:
                count = min(BURST, due - sent)
                stamped = [
                    STAMPED.pack(n, begin_ns + int(n * 1e9 / rate)) + rest
                    for n in range(sent, sent + count)
                ]
                await out.offer(stamped)
                sent += count
                if sent < due:
                    await asyncio.sleep(0)
        loop.remove_reader(timer)
    spent_s = (time.monotonic_ns() - begin_ns) / 1e9
    harness.say_ready()
    while not stop.done():
        await out.offer([STAMPED.pack(END, 0) + rest])
        await asyncio.wait([stop], timeout=END_S)
    return {
        "sent": sent,
        "sent_rate": sent / spent_s,
        "latest_us": late_ns / 1000,
    }


# -- floors --------------------------------------------------------------------------------------------------


def disk(directory: Path, seconds: float) -> Result:
    """Write 1 MiB to one file and sync it, repeatedly."""
    block = os.urandom(DISK_BYTES)
    path = directory / "floor.disk"
    count = 0
    with path.open("wb", buffering=0) as file:
        begin_s = time.monotonic()
        while (spent_s := time.monotonic() - begin_s) < seconds or not count:
            file.write(block)
            os.fdatasync(file.fileno())
            count += 1
    path.unlink()
    return {"mb_s": count * DISK_BYTES / spent_s / 1e6 if spent_s else 0.0, "writes": count}


def put(directory: Path, seconds: float, size: int) -> Result:
    """Put messages into a RocksDB, one after the other, each synced."""
    from rocksdict import Options, Rdict, WriteOptions

    path = directory / "floor.rocksdb"
    database = Rdict(str(path), Options(raw_mode=True))
    synced = WriteOptions()
    synced.sync = True
    rest = os.urandom(size - NUMBER.size)
    samples_ns = array("q")
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    number = 0
    while (begin_ns := time.monotonic_ns()) < end_ns:
        database.put(number.to_bytes(8, "big"), NUMBER.pack(number) + rest, write_opt=synced)
        samples_ns.append(time.monotonic_ns() - begin_ns)
        number += 1
    database.close()
    Rdict.destroy(str(path))
    return {"puts": number, "latency": encoded(samples_ns)}


ROLES: Final = {
    "appender": appender,
    "single": single,
    "trickle": trickle,
    "delete": delete,
    "filler": filler,
    "look": look,
    "reader": reader,
    "subscriber": subscriber,
    "publisher": publisher,
}
FLOORS: Final = {"disk": disk, "put": put}


def main() -> None:
    name, role, text = sys.argv[1:]
    given: dict[str, Any] = json.loads(text)
    signal.alarm(LONGEST_S)  # ends this role even if the bench is killed
    if role not in FLOORS:
        durable_class(name)
    begin_s = time.process_time()
    if role in FLOORS:
        directory = Path(given["setup"]["directory"])
        result = FLOORS[role](directory, **given["options"])  # type: ignore[operator]
    else:
        peer = durable_class(name)(given["setup"])
        result = uvloop.run(ROLES[role](peer, **given["options"]))  # type: ignore[operator]
    spent_s = round(time.process_time() - begin_s, 3)  # without the start of the interpreter
    harness.report(role, {"cpu_s": spent_s, **result, "peak_bytes": harness.peak_bytes("self")})
    os._exit(0)  # threads that the systems leave running do not matter here


if __name__ == "__main__":
    main()
