"""Virtual time, and simulated connections: they carry frames in order and with a delay, until they are cut."""

from __future__ import annotations

import heapq
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from relay.core.budget import Budget, cut
from relay.core.connection import Delivery
from relay.core.ports import Held

WINDOW_BYTES: Final = 32 << 10
"""Bytes that a connection holds before its port must queue, as the buffers of two kernels do."""


class Clock:
    """The planned events, by (virtual time, serial). Events of the same time happen in the order of planning."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events = 0
        """Number of events so far."""
        self.digest = 0
        """Hash of every frame that was sent, in order."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, when_us: int, call: Callable[..., None], *args: Any) -> None:
        """Plan `call(*args)` at `when_us`, or now if that is past."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when_us, self.now_us), self._serial, call, args))

    def after(self, delay_us: int, call: Callable[..., None], *args: Any) -> None:
        """Plan `call(*args)` in `delay_us`."""
        self.at(self.now_us + delay_us, call, *args)

    def run(self, until_us: int, check: Callable[[], None] | None = None) -> None:
        """Run all events up to `until_us`, which is the time afterwards. `check` is called after every event."""
        heap = self._heap
        while heap and heap[0][0] <= until_us:
            self.now_us, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
            if check is not None:
                check()
        self.now_us = until_us


class Pipe:
    """One direction of a connection. Frames arrive in order, or are lost with the pipe."""

    def __init__(
        self, clock: Clock, rng: random.Random, delay_us: int, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.delay_us = delay_us
        self.window_bytes = window_bytes
        self.jitter_us = delay_us // 4
        self.deliver: Callable[[bytes], None] = _nowhere
        self.ended: Callable[[], None] = _nobody
        """Called when the peer has closed, after all its frames have arrived."""
        self.drained: Callable[[], None] = _nobody
        """Called when a frame has arrived, so that there is room."""
        self.flying: deque[tuple[int, bytes | None, int]] = deque()
        """Frames in transit: (due, frame or None for the end, when it was created)."""
        self.bytes = 0
        self.stops = 0
        """Number of reasons why nothing arrives: a dead wire, a frozen or stalled reader."""
        self.closed = False
        self.slowest_us = 0
        """Longest transit of a frame so far."""

    def put(self, frame: bytes, since_us: int | None = None) -> None:
        """Send a frame that its sender created at `since_us`."""
        delay_us = self.delay_us + (self.rng.randrange(self.jitter_us) if self.jitter_us else 0)
        self._put(frame, delay_us, self.clock.now_us if since_us is None else since_us)
        if not self.closed:
            self.bytes += len(frame)
            self.clock.digest = zlib.crc32(frame, self.clock.digest)

    def hang_up(self, delay_us: int | None = None) -> None:
        """Notify the peer, after all frames in transit, that nothing follows."""
        self._put(None, self.delay_us if delay_us is None else delay_us, 0)

    def _put(self, frame: bytes | None, delay_us: int, since_us: int) -> None:
        if self.closed:
            return
        due_us = max(self.clock.now_us + delay_us, self.flying[-1][0] if self.flying else 0)
        self.flying.append((due_us, frame, since_us))
        self.clock.at(due_us, self._arrive)

    def lose(self, keep: int) -> None:
        """Lose the frames in transit, except the first `keep`."""
        while len(self.flying) > keep:
            _, frame, _ = self.flying.pop()
            self.bytes -= len(frame or b"")

    def stop(self) -> None:
        """Let nothing arrive until `go` was called as often as this."""
        self.stops += 1

    def go(self) -> None:
        """End one `stop`."""
        self.stops -= 1
        if not self.stops and self.flying:
            self.clock.after(0, self._arrive)

    def close(self) -> None:
        """Let nothing arrive any more."""
        self.closed = True
        self.flying.clear()
        self.bytes = 0

    def _arrive(self) -> None:
        now_us = self.clock.now_us
        flying = self.flying
        while flying and flying[0][0] <= now_us and not self.stops and not self.closed:
            _, frame, since_us = flying.popleft()
            if frame is None:
                self.ended()
                return
            self.bytes -= len(frame)
            self.slowest_us = max(self.slowest_us, now_us - since_us)
            self.deliver(frame)
        self.drained()


def _nowhere(frame: bytes) -> None:
    raise AssertionError("a frame came out of a pipe that leads nowhere")


def _nobody() -> None:
    """Do nothing."""


def _never() -> bool:
    return False


class SimPort:
    """A relay's port for its Router: a queue, bounded in bytes, in front of a pipe.

    `sent` is called with every frame that is accepted.
    """

    def __init__(self, pipe: Pipe, limit_bytes: int, budget: Budget | None = None) -> None:
        """`budget`: the relay's budget for all its ports, None if they are unlimited."""
        self.pipe = pipe
        self.budget = budget or Budget(sys.maxsize)
        self.key_of: Callable[[int], Delivery | None] = _unknown
        """Returns the address that an alias stands for."""
        self.emptied: Callable[[], None] = _nobody
        """Called when the queue is empty."""
        self.dropped: Callable[[Delivery, int], None] = _ignore
        """Called when queued messages are dropped to make room."""
        self.limit_bytes = limit_bytes
        self.held_messages = 0
        self.queued_bytes = 0
        self.total_bytes = 0
        """Bytes accepted so far."""
        self.total_frames = 0
        self.aborted = ""
        self.finishing = False
        self.closed = False
        self.writable: Callable[[], None] = _nobody
        """Called when there is room again after a refusal."""
        self.on_abort: Callable[[], None] = _nobody
        self.paused: Callable[[], bool] = _never
        """Returns whether the process is frozen, so that the queue is not sent."""
        self.sent: Callable[[bytes], None] = _ignored
        self._refused = False
        self._room_bytes = limit_bytes // 2
        self._queue: deque[tuple[bytes, int, Held | None, int]] = deque()
        pipe.drained = self.pump

    # -- what the Router calls -------------------------------------------------------------------------------

    unread = False

    def has_room(self, size: int) -> bool:
        budget = self.budget
        if not self.closed and self.queued_bytes + size <= self.limit_bytes:
            if budget.bytes + size <= budget.limit_bytes or not self._queue:
                return True
            if budget.make_room(self, size):
                return True
            self._room_bytes = min(self._room_bytes, self.queued_bytes // 2)
        self._refused = True
        return False

    @property
    def crowded(self) -> bool:
        waiting, budget = self.queued_bytes, self.budget
        return waiting > self.limit_bytes // 4 or (
            waiting > 0 and 2 * budget.bytes > budget.limit_bytes
        )

    @property
    def waiting_bytes(self) -> int:
        return self.queued_bytes

    def shed(self, wanted_bytes: int) -> int:
        if self.closed:
            return 0
        newest = ((frame, count, held) for frame, count, held, _ in reversed(self._queue))
        kept, lost, read, freed = cut(newest, wanted_bytes, self.key_of)
        if freed <= 0:
            return 0
        for _ in range(read):
            self._queue.pop()
        self._queue.extend((*entry, self.pipe.clock.now_us) for entry in kept)
        self.queued_bytes -= freed
        self.budget.released(freed)
        for delivery, count in lost:
            self.held_messages -= count
            self.budget.shed += count
            self.dropped(delivery, count)
        return freed

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        if not self.has_room(end - start):
            return False
        self._take(bytes(buf[start:end]), count, None)
        return True

    def send(self, frame: bytes, count: int) -> bool:
        if not self.has_room(len(frame)):
            return False
        self._take(frame, count, None)
        return True

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        size = end - start
        if self.closed or self.queued_bytes + size > 2 * self.limit_bytes:
            return False
        budget = self.budget
        if budget.bytes + size > budget.limit_bytes and not budget.make_room(self, size, own=True):
            return False
        held.bytes += size
        self._take(bytes(buf[start:end]), 1, held)
        return True

    def discard(self, held: Held) -> int:
        kept = [entry for entry in self._queue if entry[2] is not held]
        lost = len(self._queue) - len(kept)
        if lost:
            self._queue = deque(kept)
            self._released(held.bytes)
            self.held_messages -= lost
        held.bytes = 0
        return lost

    def control(self, frame: bytes) -> None:
        if not self.closed:
            self._take(frame, 0, None)

    def finish(self) -> None:
        if not self.finishing:
            self.finishing = True
            self.pump()

    def abort(self, reason: str) -> None:
        if not self.aborted:
            self.aborted = reason
            self.on_abort()

    # -- moving ----------------------------------------------------------------------------------------------

    def _take(self, frame: bytes, count: int, held: Held | None) -> None:
        self.sent(frame)
        self.total_bytes += len(frame)
        self.total_frames += 1
        pipe = self.pipe
        if not self._queue and pipe.bytes < pipe.window_bytes and not (self.finishing or self.paused()):  # fmt: skip
            pipe.put(frame)
            if self._refused:
                self.pump()
            return
        self._queue.append((frame, count, held, pipe.clock.now_us))
        self.queued_bytes += len(frame)
        self.budget.bytes += len(frame)
        self.budget.waiting[self] = None
        self.held_messages += count
        self.pump()

    def pump(self) -> None:
        """Send queued frames while the connection accepts them."""
        if not self._queue and not self._refused and not self.finishing:
            return
        if self.closed or self.paused():
            return
        queue, pipe = self._queue, self.pipe
        while queue and pipe.bytes < pipe.window_bytes:
            frame, count, held, since_us = queue.popleft()
            self._released(len(frame))
            self.held_messages -= count
            if held is not None:
                held.bytes -= len(frame)
            pipe.put(frame, since_us)
        if self.finishing and not queue:
            self.close()
            pipe.hang_up()
        elif self._refused and self.queued_bytes <= self._room_bytes:
            self._refused = False
            self._room_bytes = self.limit_bytes // 2
            self.writable()

    def close(self) -> int:
        """Close the port; return how many accepted messages are lost."""
        lost, self.held_messages = self.held_messages, 0
        self.closed = True
        for frame, _, held, _ in self._queue:
            if held is not None:
                held.bytes -= len(frame)
        self._queue.clear()
        self._released(self.queued_bytes)
        return lost

    def _released(self, size: int) -> None:
        self.queued_bytes -= size
        self.budget.released(size)
        if not self.queued_bytes:
            self.budget.ended(self)
            self.emptied()


def _unknown(alias: int) -> Delivery | None:
    """Return None: no alias is known."""
    return None


def _ignore(delivery: Delivery, count: int) -> None:
    """Do nothing."""


def _ignored(frame: bytes) -> None:
    """Do nothing."""
