"""The queue of a subscription whose coroutine handler runs several times at once.

Bundles of one publisher and topic form a lane. At most one bundle of a lane is at the handler, so that the
messages of a lane are handled in order.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from iris.core.message import Message

Lane = tuple[bytes, str]
"""(publisher's sender id, topic)"""


class Waiting:
    """A queued bundle: its messages, all of one lane, and their size in bytes."""

    __slots__ = ("lane", "messages", "size")

    def __init__(self, lane: Lane, messages: list[Message], size: int) -> None:
        self.lane = lane
        self.messages = messages
        self.size = size


class Lanes:
    """The queued bundles of one subscription, by lane and in the order of arrival."""

    __slots__ = ("_all", "_lanes", "_ready", "_running")

    def __init__(self) -> None:
        self._all: OrderedDict[Waiting, None] = OrderedDict()
        """All queued bundles, oldest first. Not a deque, because bundles are removed from the middle."""
        self._lanes: dict[Lane, deque[Waiting]] = {}
        """Queued bundles of each lane that has any."""
        self._ready: deque[Lane] = deque()
        """Lanes with a queued bundle and none at a handler, longest waiting first."""
        self._running: set[Lane] = set()
        """Lanes with a bundle at a handler."""

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def ready(self) -> bool:
        """Whether `take` would return a bundle."""
        return bool(self._ready)

    def put(self, messages: list[Message], size: int) -> None:
        """Queue a bundle: `messages` of one publisher and topic, `size` bytes together."""
        first = messages[0]
        lane = (first.source, first.name)
        waiting = Waiting(lane, messages, size)
        self._all[waiting] = None
        queued = self._lanes.get(lane)
        if queued is not None:
            queued.append(waiting)
            return
        self._lanes[lane] = deque((waiting,))
        if lane not in self._running:
            self._ready.append(lane)

    def take(self) -> Waiting | None:
        """Remove and return a bundle for a handler; its lane waits until `done`.

        Return None if no bundle is queued, or each lane with queued bundles has one at a handler.
        """
        if not self._ready:
            return None
        lane = self._ready.popleft()
        self._running.add(lane)
        return self._next(lane)

    def done(self, waiting: Waiting) -> None:
        """Release the lane of a bundle that was handled."""
        lane = waiting.lane
        self._running.discard(lane)
        if lane in self._lanes:
            self._ready.append(lane)

    def drop_oldest(self) -> tuple[list[Message], int] | None:
        """Remove the oldest queued bundle and return its messages and size; None if no bundle is queued."""
        if not self._all:
            return None
        lane = next(iter(self._all)).lane
        waiting = self._next(lane)  # the oldest bundle is also the oldest of its lane
        if lane not in self._lanes and lane not in self._running:
            self._ready.remove(lane)
        return waiting.messages, waiting.size

    def _next(self, lane: Lane) -> Waiting:
        """Remove and return the oldest queued bundle of a lane."""
        queued = self._lanes[lane]
        waiting = queued.popleft()
        del self._all[waiting]
        if not queued:
            del self._lanes[lane]
        return waiting
