"""N relays in full mesh with 100 memberships each: the time until they agree, traffic per link, memory per relay.

Real Routers in virtual time, with ports in memory. The traffic between two relays of a mesh depends only on these
two, as no relay sends the interest of a third. So above `WHOLE` relays only the links of `WATCHED` relays are
simulated, complete at both ends, and each waits for its turn among the links that its peer would make meanwhile.
Processor time is a model with fixed times for a handshake, a frame and an entry. The last two are also measured
here; the figures of the model are rounded up. Handshakes are paced, so that beats are sent between them.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from iris.wire import frames
from iris.wire.codec import KIND_AT, decode_control, encode_control
from iris.wire.frames import Serving
from iris.wire.kinds import PROTOCOL_VERSION, SERVED_KINDS, Kind
from iris.wire.link_frames import LinkHello
from proofs.common import Proof
from relay.core.ports import Held
from relay.core.router import Router

MEMBERSHIPS = 100
"""Cluster memberships of each relay, spread over `SESSIONS` processes."""
SESSIONS = 10
CLUSTERS = 1_000
WHOLE = 120
WATCHED = 3
DELAY_US = 200
"""Delay in one direction, on a LAN."""
START_US = 1_000_000
"""Time within which all relays start."""
FOUND_US = 500_000
"""Time within which two running relays discover each other."""
HANDSHAKE_US = 6_000
"""A TLS 1.3 handshake with two certificates, at each end."""
FRAME_US = 40
QUEUE_US = 50_000
"""A relay with this much queued work does not begin a handshake."""
SEND_US = 20
"""Sending a frame, with its share of TLS."""
WALK_US = 0.8
"""Visiting a link when beats are due."""
ENTRY_US = 12
"""Decoding, checking and adding a membership from a snapshot or change."""
LINK_US = HANDSHAKE_US + 4 * (FRAME_US + SEND_US) + MEMBERSHIPS * ENTRY_US
"""Total work of a relay for one link until both agree."""
KEY = bytes(16)
KINDS = {int(kind): Serving(8, 64 << 20) for kind in SERVED_KINDS - {Kind.STREAM}}
LIMIT_S = 30.0
"""Limit within which a site of any size must agree."""
LIMIT_MB = 512.0


class MemoryPort:
    """A port that accepts all frames and passes each to `out`."""

    held_messages = 0
    crowded = False

    def __init__(self, out: Callable[[bytes], None]) -> None:
        self.out = out
        self.bytes = 0
        self.frames = 0

    unread = False

    def has_room(self, size: int) -> bool:
        return True

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        return self.send(bytes(buf[start:end]), count)

    def send(self, frame: bytes, count: int) -> bool:
        self.control(frame)
        return True

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        return self.forward(buf, start, end, 1)

    def discard(self, held: Held) -> int:
        return 0

    def control(self, frame: bytes) -> None:
        self.bytes += len(frame)
        self.frames += 1
        self.out(frame)

    def finish(self) -> None: ...

    def abort(self, reason: str) -> None:
        raise AssertionError(f"a link was aborted: {reason}")


class End:
    """One end of a link."""

    __slots__ = ("dialled", "entry", "link", "other", "port", "relay", "unread")

    def __init__(self, relay: Relay, dialled: bool) -> None:
        self.relay = relay
        self.dialled = dialled
        self.other: End
        self.link: Any = None
        self.entry: Any = None
        self.unread: list[bytes] = []
        self.port = MemoryPort(self._out)

    def _out(self, frame: bytes) -> None:
        relay = self.relay
        relay.work(SEND_US)
        relay.site.at(relay.busy_us + DELAY_US, self.other.arrived, frame)

    def hello(self) -> None:
        relay = self.relay
        if self.dialled and relay.busy_us > relay.site.now_us + QUEUE_US:
            relay.site.at(relay.busy_us - QUEUE_US // 2, self.hello)
            return
        relay.work(HANDSHAKE_US)
        relay.router.now_us = relay.busy_us
        self.port.control(encode_control(relay.router.hello(relay.busy_us if self.dialled else 0)))

    def arrived(self, frame: bytes) -> None:
        if self.link is not None:
            self.read(frame)
            return
        self.unread.append(frame)
        if len(self.unread) == 1:
            self.begin()

    def begin(self) -> None:
        """Read the received frames, HELLO first, when there is time for a handshake."""
        relay = self.relay
        if not self.dialled and relay.busy_us > relay.site.now_us + QUEUE_US:
            relay.site.at(relay.busy_us - QUEUE_US // 2, self.begin)
            return
        for frame in self.unread:
            self.read(frame)
        self.unread.clear()

    def read(self, frame: bytes) -> None:
        relay = self.relay
        entries = 0
        if frame[KIND_AT] == Kind.INTEREST:
            entries = (len(frame) - 60) // relay.site.entry_bytes
        relay.work(FRAME_US + ENTRY_US * max(0, entries))
        relay.router.now_us = relay.busy_us
        if self.link is None:
            hello = decode_control(memoryview(frame), 0, len(frame))
            assert isinstance(hello, LinkHello)
            if not self.dialled:
                self.hello()
                relay.router.now_us = relay.busy_us
            self.link = relay.router.link_up(self.port, hello)
            self.entry = relay.router.entry(self.link)
        else:
            self.entry(memoryview(bytearray(frame)), 0, len(frame))
            if frame[KIND_AT] == Kind.INTEREST:
                relay.site.heard_us = max(relay.site.heard_us, relay.busy_us)
        relay.arm()


class Relay:
    """A Router, and the time until which its process is busy."""

    def __init__(self, site: Site, number: int) -> None:
        self.site = site
        self.number = number
        self.busy_us = site.rng.randrange(START_US)
        self.started_us = self.busy_us
        self.worked_us = 0.0
        self.ends: list[End] = []
        self.armed_us = 0
        self.router = Router(
            site.rng.randbytes(16), entropy=site.rng.randbytes, message_limit=1 << 20, site="scale"
        )
        self.router.now_us = self.busy_us
        self.sessions: list[Callable[[frames.Control], None]] = []
        for index in range(SESSIONS):
            self.sessions.append(self._attach(f"worker-{number}-{index}"))
        for index in range(MEMBERSHIPS):
            self.join(self.sessions[index % SESSIONS], site.rng.randrange(CLUSTERS))

    def _attach(self, label: str) -> Callable[[frames.Control], None]:
        session = self.router.session_up(MemoryPort(lambda frame: None))
        entry = self.router.entry(session)

        def say(body: frames.Control) -> None:
            frame = encode_control(body)
            entry(memoryview(bytearray(frame)), 0, len(frame))

        say(frames.Hello(PROTOCOL_VERSION, 0, label, 1))
        session.proven.add(KEY)
        return say

    def join(self, say: Callable[[frames.Control], None], cluster: int) -> None:
        say(frames.Join(1, f"cluster-{cluster}", [KEY], KINDS))

    def members(self) -> set[int]:
        """Return the serials of its members."""
        return {serial for session in self.router.sessions.values() for serial in session.members}

    def work(self, cost_us: float) -> None:
        """Add work of `cost_us` to the queue of the process."""
        self.worked_us += cost_us
        self.busy_us = max(self.busy_us, self.site.now_us) + round(cost_us)

    def arm(self) -> None:
        due_us = self.router.deadline_us
        if not self.armed_us or due_us < self.armed_us:
            self.armed_us = due_us
            self.site.at(due_us, self.expire, due_us)

    def expire(self, due_us: int) -> None:
        if due_us != self.armed_us:
            return
        self.armed_us = 0
        self.work(
            FRAME_US * max(1, len(self.ends)) * 0.1
        )  # a beat is made once, and written to each
        self.router.now_us = self.busy_us
        if self.router.deadline_us <= self.busy_us:
            self.router.expire()
        self.arm()


class Site:
    """All relays, and the queue of events."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_us = 0
        self.heard_us = 0
        """Time at which interest was received last."""
        self.entry_bytes = 1 << 30
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self.count = count
        watched = count if count <= WHOLE else WATCHED
        self.relays = [Relay(self, number) for number in range(count)]
        self.watched = self.relays[:watched]
        one = Relay(self, count)
        first, second = one, self.relays[0]
        self.entry_bytes = self._entry_bytes(first, second)
        for a in range(watched):
            for b in range(a + 1, count):
                self._pair(self.relays[a], self.relays[b])

    def _entry_bytes(self, one: Relay, other: Relay) -> int:
        """Return the size of one membership in a snapshot, in bytes."""
        sizes: list[int] = []
        port = MemoryPort(lambda frame: sizes.append(len(frame)))
        link = one.router.link_up(port, other.router.hello(0))
        one.router.link_down(link)
        return max(sizes) // MEMBERSHIPS

    def _pair(self, one: Relay, other: Relay) -> None:
        dialler, accepter = self.rng.sample((one, other), 2)
        ends = End(dialler, True), End(accepter, False)
        ends[0].other, ends[1].other = ends[1], ends[0]
        dialler.ends.append(ends[0])
        accepter.ends.append(ends[1])
        when_us = max(one.started_us, other.started_us) + self.rng.randrange(FOUND_US)
        if other.number >= len(self.watched):
            # Its other links are not made: this one takes its turn among them.
            when_us += self.rng.randrange(LINK_US * self.count)
        self.at(when_us, ends[0].hello)

    def at(self, when_us: int, call: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(when_us, self.now_us), self._serial, call, args))

    def run(self, until_us: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_us:
            self.now_us, _, call, args = heapq.heappop(heap)
            call(*args)
        self.now_us = until_us

    def converged(self) -> bool:
        """Return whether every watched relay and all others know each other's members."""
        return all(
            end.link is not None
            and end.link.replica.known
            and end.link.copy.members.keys() == end.other.relay.members()
            for relay in self.watched
            for mine in relay.ends
            for end in (mine, mine.other)
        )


def size_of(root: object) -> int:
    """Return the bytes of all objects that an object refers to, without code, ports and what only ports refer to."""
    skipped = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, MemoryPort, random.Random)  # fmt: skip
    seen: set[int] = set()
    todo = [root]
    total = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, skipped):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        todo += gc.get_referents(thing)
    return total


def measured_us() -> tuple[float, float]:
    """Return the µs for a beat, and for each membership of a snapshot, on this machine."""
    site = Site(2, 1)
    site.run(START_US + FOUND_US + 1_000_000)
    end = site.relays[0].ends[0]
    beat = encode_control(frames.Beat(end.relay.router.now_us, 1, 1, end.link.replica.version))
    snapshot: list[bytes] = []
    other = site.relays[1]
    other.router.link_up(MemoryPort(snapshot.append), site.relays[0].router.hello(0))
    found = []
    for frame, repeats in ((beat, 2_000), (max(snapshot, key=len), 50)):
        begin_s = time.process_time()
        for _ in range(repeats):
            end.entry(memoryview(bytearray(frame)), 0, len(frame))
        found.append((time.process_time() - begin_s) / repeats * 1e6)
    return found[0], (found[1] - found[0]) / MEMBERSHIPS


def run(count: int, seed: int) -> Proof:
    """Run it with `count` relays."""
    proof = Proof()
    begin_s = time.monotonic()
    frame_us, entry_us = measured_us()
    site = Site(max(count, 2), seed)
    relay = site.watched[0]
    alone = size_of(relay.router)
    until_us = START_US + FOUND_US
    while not site.converged() and until_us < 10 * LIMIT_S * 1e6:
        site.run(until_us)
        until_us += 100_000
    agreed_us = site.heard_us
    proof.promise("all know all", site.converged())
    ports = [end.port for mine in relay.ends for end in (mine, mine.other)]
    snapshot_bytes = sum(port.bytes for port in ports) / len(ports)
    linked = size_of(relay.router)
    worked_us = relay.worked_us

    # At rest only beats are sent.
    site.run(site.now_us + 2_000_000)
    before, before_us = sum(port.bytes for port in ports), relay.worked_us
    site.run(site.now_us + 10_000_000)
    idle_bytes = (sum(port.bytes for port in ports) - before) / len(ports) / 10
    idle_share = (relay.worked_us - before_us) / 10e6

    # Add one member.
    site.heard_us = 0
    joined_us = site.now_us
    relay.work(FRAME_US)
    relay.router.now_us = relay.busy_us
    relay.join(relay.sessions[0], 7)
    relay.arm()
    site.run(site.now_us + 2_000_000)
    known_us = site.heard_us - joined_us
    proof.promise("all know of the new member", site.converged())

    links = len(relay.ends)
    proof.figures = {
        "relays": f"{site.count:,} in full mesh, {site.count * (site.count - 1) // 2:,} links",
        "of these simulated": f"all links of {len(site.watched):,} relays, both ends: {sum(len(r.ends) for r in site.relays) // 2:,}",
        "memberships": f"{site.count * MEMBERSHIPS:,}, {MEMBERSHIPS} at each relay, in {CLUSTERS:,} clusters",
        "model": f"{DELAY_US} µs one way; {HANDSHAKE_US} µs a handshake and end, {FRAME_US} µs a frame read, {SEND_US} µs one written, {ENTRY_US} µs a membership "
        f"(measured here: {frame_us:.0f} and {entry_us:.1f} µs)",
        "cold start": f"all started within {START_US / 1e6:.1f} s, found each other within {FOUND_US / 1e6:.1f} s more; all agree "
        f"after {agreed_us / 1e6:.2f} s (virtual)",
        "processor time of a relay until then": f"{worked_us / 1e6:.2f} s, {links * HANDSHAKE_US / 1e6:.2f} s of it handshakes",
        "a link until then, one way": f"{snapshot_bytes:,.0f} bytes",
        "a link at rest, one way": f"{idle_bytes:.0f} bytes/s; all links of a relay, both ways, {2 * links * idle_bytes / 1e3:,.0f} kB/s",
        "a relay at rest": f"{idle_share:.1%} of a processor (beats)",
        "a member joins": f"all relays know after {known_us / 1e3:.1f} ms",
        "memory of a relay": f"{linked / 1e6:.1f} MB, {alone / 1e6:.2f} MB of it its own members and sessions",
        "memory of a link": f"{(linked - alone) / links / 1e3:.1f} kB with the {MEMBERSHIPS} memberships behind it",
        "took": f"{time.monotonic() - begin_s:.0f} s",
    }
    proof.promise(f"all agree within {LIMIT_S:.0f} s", agreed_us < LIMIT_S * 1e6)
    proof.promise(f"a relay keeps under {LIMIT_MB:.0f} MB", linked < LIMIT_MB * 1e6)
    return proof
