"""One process of a run: `python bench/roles.py PEER ROLE OPTIONS-AS-JSON`. The loads are the same for every system.

A message begins with its number. Receiving roles print "ready" when they receive, and a subscriber again when a
probe has arrived; a publisher sends probes until its cue. Each role prints one line of JSON at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import harness
import uvloop
from harness import Result
from peers import NotOffered, Peer, Requester, peer_class

NUMBER: Final = struct.Struct("<Q")
PROBE: Final = (1 << 64) - 1
END: Final = (1 << 64) - 2
PROBE_S: Final = 0.01
END_S: Final = 0.02
BURST: Final = 64
"""Messages that a publisher sends between two turns of the event loop."""
PACE_S: Final = 0.001
WARM_S: Final = 0.2
DRAIN_S: Final = 2.0
"""Time after the end of an open loop at which a request without an answer counts as unanswered."""
MAX_OUTSTANDING: Final = 50_000
LONGEST_S: Final = 300
KEPT_BITS: Final = 12
"""Bits of a sample that are kept, more than the three digits of an HDR histogram keep (2,048 steps in each power of
two)."""


class Check:
    """Count the messages of one receiver and those out of order; may be called from a thread."""

    def __init__(self) -> None:
        self.received = 0
        self.wrong = 0
        self.last_ns = 0
        self.done = asyncio.Event()
        self._next = 0
        self._probed = False
        self._loop = asyncio.get_running_loop()

    def took(self, payload: bytes) -> None:
        (number,) = NUMBER.unpack_from(payload)
        if number >= END:
            self._told(number)
            return
        self.received += 1
        if number < self._next:
            self.wrong += 1
        self._next = number + 1
        self.last_ns = time.monotonic_ns()

    def _told(self, number: int) -> None:
        if number == END:
            self._loop.call_soon_threadsafe(self.done.set)
        elif not self._probed:
            self._probed = True
            harness.say_ready()

    async def result(self) -> Result:
        """Return the counts when the end was received or the bench stops waiting."""
        stop = asyncio.create_task(harness.stop_signal())
        done = asyncio.create_task(self.done.wait())
        await asyncio.wait([stop, done], return_when=asyncio.FIRST_COMPLETED)
        return {"received": self.received, "wrong": self.wrong, "last_ns": self.last_ns}


# -- publish -------------------------------------------------------------------------------------------------


async def subscriber(peer: Peer) -> Result:
    check = Check()
    await peer.subscriber(check.took)
    harness.say_ready()
    return await check.result()


async def publisher(peer: Peer, size: int, seconds: float, rate: float) -> Result:
    """Publish for `seconds` at full speed, or `rate` messages/s; before the cue, send probes."""
    out = await peer.publisher()
    cued = harness.next_cue()
    while not cued.is_set():
        await out.burst([NUMBER.pack(PROBE)])
        await asyncio.sleep(PROBE_S)
    stop = asyncio.create_task(harness.stop_signal())
    filler, pack = bytes(size - NUMBER.size), NUMBER.pack
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(seconds * 1e9)
    sent = 0
    while (now_ns := time.monotonic_ns()) < end_ns:
        count = BURST
        if rate:
            count = int((now_ns - begin_ns) * rate / 1e9) + 1 - sent
            if count <= 0:
                await asyncio.sleep(PACE_S)
                continue
        # Messages that are late are not sent as one burst, which no user would send.
        count = min(count, BURST)
        await out.burst([pack(number) + filler for number in range(sent, sent + count)])
        sent += count
        await asyncio.sleep(0)
    spent_ns = time.monotonic_ns() - begin_ns
    await out.flush()
    harness.say_ready()
    while not stop.done():  # repeated, because a system that loses messages may lose this one, too
        await out.burst([pack(END)])
        await asyncio.wait([stop], timeout=END_S)
    return {"sent": sent, "sent_rate": sent / spent_ns * 1e9, "begin_ns": begin_ns}


# -- request -------------------------------------------------------------------------------------------------


async def replier(peer: Peer) -> Result:
    await peer.replier()
    harness.say_ready()
    await harness.stop_signal()
    return {}


async def closed(peer: Peer, size: int, seconds: float, inflight: int) -> Result:
    """Keep `inflight` requests in flight: each task sends its next when it is answered."""
    requester = await peer.requester()
    numbers = iter(range(END))
    filler = bytes(size - NUMBER.size)
    samples_ns = array("q")
    wrong = 0

    async def work(end_ns: int) -> None:
        nonlocal wrong
        while (begin_ns := time.monotonic_ns()) < end_ns:
            payload = NUMBER.pack(next(numbers)) + filler
            if await requester.request(payload) != payload:
                wrong += 1
            samples_ns.append(time.monotonic_ns() - begin_ns)

    def exchanges(end_ns: int) -> bool:
        nonlocal wrong
        while (begin_ns := time.monotonic_ns()) < end_ns:
            payloads = [NUMBER.pack(next(numbers)) + filler for _ in range(inflight)]
            replies = requester.exchange(payloads)
            if replies is None:
                return False
            wrong += replies != payloads
            samples_ns.extend([time.monotonic_ns() - begin_ns] * inflight)
        return True

    async def run(run_s: float) -> float:
        del samples_ns[:]
        begin_ns = time.monotonic_ns()
        end_ns = begin_ns + int(run_s * 1e9)
        if not (inflight > 1 and exchanges(end_ns)):
            if inflight > 1 and peer.blocking:
                raise NotOffered("it has one request in flight at a time")
            await asyncio.gather(*(work(end_ns) for _ in range(inflight)))
        return (time.monotonic_ns() - begin_ns) / 1e9

    await run(WARM_S)
    spent_s = await run(seconds)
    figures = {"rate": len(samples_ns) / spent_s, "requests": len(samples_ns), "wrong": wrong}
    return {**figures, "uncorrected": encoded(samples_ns)}


async def open_loop(peer: Peer, size: int, seconds: float, rate: float, connections: int) -> Result:
    """Send `rate` requests a second, even if earlier ones are unanswered, over the connections in turn. Latencies
    count from when a request was due ("corrected") and from when it was sent ("uncorrected")."""
    requesters = [await peer.requester() for _ in range(connections)]
    filler = bytes(size - NUMBER.size)
    for number, requester in enumerate(requesters):
        await requester.request(NUMBER.pack(number) + filler)
    corrected, uncorrected = array("q"), array("q")
    errors: Counter[str] = Counter()
    waiting: dict[asyncio.Task[None], int] = {}
    wrong = 0

    async def ask(requester: Requester, number: int, due_ns: int) -> None:
        nonlocal wrong
        payload = NUMBER.pack(number) + filler
        sent_ns = time.monotonic_ns()
        try:
            reply = await requester.request(payload)
        except asyncio.CancelledError:
            raise
        except Exception as err:  # any error of the system counts as a missing answer
            errors[type(err).__name__] += 1
            return
        now_ns = time.monotonic_ns()
        if reply != payload:
            wrong += 1
        corrected.append(now_ns - due_ns)
        uncorrected.append(now_ns - sent_ns)

    loop = asyncio.get_running_loop()
    finished = asyncio.Event()
    total = int(rate * seconds)
    begun = unsent = 0
    begin_ns = time.monotonic_ns() + 50_000_000

    def tick() -> None:
        nonlocal begun, unsent
        os.read(timer, 8)
        due = min(total, int((time.monotonic_ns() - begin_ns) * rate / 1e9) + 1)
        while begun < due:
            due_ns = begin_ns + int(begun * 1e9 / rate)
            if len(waiting) < MAX_OUTSTANDING:
                task = loop.create_task(ask(requesters[begun % connections], begun, due_ns))
                waiting[task] = due_ns
                task.add_done_callback(waiting.pop)
            else:
                unsent += 1
            begun += 1
        if begun == total:
            finished.set()

    with exact_timer(begin_ns, int(1e9 / rate)) as timer:
        loop.add_reader(timer, tick)
        await finished.wait()
        loop.remove_reader(timer)
    sent_s = (time.monotonic_ns() - begin_ns) / 1e9
    if waiting:
        await asyncio.wait(waiting, timeout=DRAIN_S)
    now_ns = time.monotonic_ns()
    unanswered = len(waiting) + unsent
    answered = len(corrected)
    # Unanswered requests have taken at least this long.
    corrected.extend(now_ns - due_ns for due_ns in waiting.values())
    corrected.extend([now_ns - begin_ns] * unsent)
    for task in [*waiting]:
        task.cancel()
    return {
        "asked_rate": rate,
        "sent_rate": (total - unsent) / sent_s,
        "requests": total,
        "answered": answered,
        "unanswered": unanswered,
        "errors": errors.total(),
        "errors_by_name": errors,
        "wrong": wrong,
        "corrected": encoded(corrected),
        "uncorrected": encoded(uncorrected),
    }


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


@contextlib.contextmanager
def exact_timer(begin_ns: int, period_ns: int) -> Any:
    """Return a timerfd(2), readable at `begin_ns` (CLOCK_MONOTONIC) and every period after; event loops round to a
    millisecond."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    try:
        pairs = [divmod(nanoseconds, 10**9) for nanoseconds in (period_ns, begin_ns)]
        spec = _TimerSpec(*((ctypes.c_long * 2)(*pair) for pair in pairs))
        absolute = 1
        if libc.timerfd_settime(descriptor, absolute, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        yield descriptor
    finally:
        os.close(descriptor)


def encoded(samples_ns: Sequence[int]) -> str:
    """Return the samples as an HDR histogram, base64."""
    histogram = harness.new_histogram()
    # Samples are rounded to the bits that the histogram keeps; a call for each would take longer than the load.
    rounded = Counter(
        value >> shift << shift if (shift := value.bit_length() - KEPT_BITS) > 0 else value
        for value in samples_ns
    )
    for value, count in rounded.items():
        histogram.record_value(value, count)
    text: bytes = histogram.encode()
    return text.decode()


# -- streams -------------------------------------------------------------------------------------------------


async def receiver(peer: Peer) -> Result:
    check = Check()
    await peer.receiver(check.took)
    harness.say_ready()
    return await check.result()


async def sender(peer: Peer, size: int, seconds: float) -> Result:
    """Send one ordered stream for `seconds`, waiting for the receiver whenever it is behind."""
    out = await peer.sender()
    filler, pack = bytes(size - NUMBER.size), NUMBER.pack
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(seconds * 1e9)
    sent = 0
    while time.monotonic_ns() < end_ns:
        await out.send(pack(sent) + filler)
        sent += 1
    await out.send(pack(END))
    await out.finish()
    harness.say_ready()
    await harness.stop_signal()  # the connection stays open until the receiver has everything
    return {"sent": sent, "begin_ns": begin_ns}


ROLES: Final = {
    "subscriber": subscriber,
    "publisher": publisher,
    "replier": replier,
    "closed": closed,
    "open": open_loop,
    "receiver": receiver,
    "sender": sender,
}


async def play(peer_name: str, role: str, setup: Result, options: Result) -> Result:
    """Run one role; `not_offered` is the reason if the system does not have it."""
    try:
        return await ROLES[role](peer_class(peer_name)(setup), **options)  # type: ignore[operator]
    except NotOffered as err:
        return {"not_offered": str(err)}


def main() -> None:
    peer_name, role, text = sys.argv[1:]
    given = json.loads(text)
    signal.alarm(LONGEST_S)  # ends this role even if the bench is killed
    result = uvloop.run(play(peer_name, role, given["setup"], given["options"]))
    harness.report(role, {**result, "peak_bytes": harness.peak_bytes("self")})
    os._exit(0)  # threads that the systems leave running do not matter here


if __name__ == "__main__":
    main()
