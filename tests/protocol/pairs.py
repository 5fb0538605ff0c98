"""Socket pairs in memory, for sessions and relays back to back. See `protocol.kit`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from protocol.kit import Host, Network

from iris.core.tunnel import TunnelEnd


class MemoryPair:
    """A socket pair, for the relay and the two sessions that fetch its ends."""

    def __init__(self, pairs: MemoryPairs, number: int) -> None:
        self.pairs = pairs
        self.tokens = bytes([0, number] * 8), bytes([1, number] * 8)
        self.ways: list[MemoryWay | None] = [None, None]
        self.queues: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        """Bytes in transit to each end."""
        self.over = False

    def end(self) -> None:
        """Shut the pair down. Bytes in it can still be read."""
        self.over = True
        for token in self.tokens:
            self.pairs.waiting.pop(token, None)


class MemoryWay:
    """One end of a pair. It accepts `room` records until the other end reads."""

    def __init__(self, pair: MemoryPair, side: int, host: Host, end: TunnelEnd) -> None:
        self.pair = pair
        self.side = side
        self.host = host
        self.end = end
        self.room = 4
        self.waiting: deque[bytes] = deque()
        self.reading = self.closed = self.lost = False
        self.then: Callable[[], None] | None = None
        self.queued_bytes = 0
        self.sent_records = self.sent_bytes = 0
        self.received_records = self.received_bytes = 0

    @property
    def full(self) -> bool:
        return bool(self.waiting)

    def send(self, record: bytes) -> None:
        self.waiting.append(record)
        self.queued_bytes += len(record)
        self.sent_records += 1
        self.sent_bytes += len(record)

    def flush(self) -> None:
        there = self.pair.queues[1 - self.side]
        while self.waiting and len(there) < self.room and not self.pair.over:
            record = self.waiting.popleft()
            self.queued_bytes -= len(record)
            there.append(record)
        if self.pair.over:
            self.waiting.clear()
            self.queued_bytes = 0
        if not self.waiting and self.then is not None:
            then, self.then = self.then, None
            then()

    def finish(self, then: Callable[[], None]) -> None:
        self.then = then
        self.flush()

    def read(self) -> None:
        self.reading = True

    def drain(self) -> None:
        here = self.pair.queues[self.side]
        while here and not self.closed:
            record = here.popleft()
            self.received_records += 1
            self.received_bytes += len(record)
            self.end.arrived(memoryview(record))

    def close(self) -> None:
        self.closed = True

    def turn(self) -> bool:
        """Do the work of one turn of the event loop; return whether there was any."""
        if self.closed:
            return False
        before = (self.received_records, len(self.waiting), self.lost)
        self.flush()
        if self.reading:
            self.drain()
            if self.pair.over and not self.closed and not self.lost:
                self.lost = True
                self.host.session.tunnels.pair_lost(self.end)
        return before != (self.received_records, len(self.waiting), self.lost)


class MemoryPairs:
    """Creates the pairs of a network's first relay, which can pass descriptors to `hosts`."""

    def __init__(self, net: Network, *hosts: Host) -> None:
        self.net = net
        self.waiting: dict[bytes, tuple[MemoryPair, int]] = {}
        self.pairs: list[MemoryPair] = []
        self.ways: list[MemoryWay] = []
        self.out_of_descriptors = False
        net.router.direct.maker = self
        for host in hosts:
            self.admit(host)

    def admit(self, host: Host) -> None:
        """Let the relay pass descriptors to a host, and the host fetch them."""
        host.peer.takes_descriptors = True
        host.session.tunnels.fetch = lambda token, end: self.fetch(host, token, end)

    def make(self, opener: str, member: str) -> MemoryPair | None:
        if self.out_of_descriptors:
            return None
        pair = MemoryPair(self, len(self.pairs))
        self.pairs.append(pair)
        for side, token in enumerate(pair.tokens):
            self.waiting[token] = pair, side
        return pair

    def fetch(self, host: Host, token: bytes, end: TunnelEnd) -> None:
        """Let a host fetch an end at once."""
        found = self.waiting.pop(token, None)
        if found is None:
            return
        pair, side = found
        way = pair.ways[side] = MemoryWay(pair, side, host, end)
        self.ways.append(way)
        host.session.tunnels.attach_pair(end, way)

    def run(self) -> None:
        """Move bytes through relay and pairs until none are left to send."""
        busy = True
        while busy:
            self.net.run()
            busy = any([way.turn() for way in self.ways])  # noqa: C419 - each has its turn
