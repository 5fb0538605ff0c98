"""Bundles that wait for a coroutine handler which runs several at once: those of one publisher and topic stay in order."""

from __future__ import annotations

from collections import OrderedDict, deque

from iris.core.message import Message

Lane = tuple[bytes, str]
"""Publisher and topic."""


class Waiting:
    """One bundle. All its messages are of one publisher and topic."""

    __slots__ = ("lane", "messages", "size")

    def __init__(self, lane: Lane, messages: list[Message], size: int) -> None:
        self.lane = lane
        self.messages = messages
        self.size = size


class Lanes:
    """The queue of one subscription: by lane, and in the order of arrival."""

    __slots__ = ("_all", "_lanes", "_ready", "_running")

    def __init__(self) -> None:
        self._all: OrderedDict[Waiting, None] = OrderedDict()
        """What waits, the oldest first. Not a deque: what was taken goes from the middle, however long its neighbors stay."""
        self._lanes: dict[Lane, deque[Waiting]] = {}
        """Of each lane that has something waiting."""
        self._ready: deque[Lane] = deque()
        """Lanes that have something waiting and nothing at a handler, the longest waiting first."""
        self._running: set[Lane] = set()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def ready(self) -> bool:
        """Whether `take` has something."""
        return bool(self._ready)

    def put(self, messages: list[Message], size: int) -> None:
        """Take a bundle."""
        first = messages[0]
        lane = (first.source, first.name)
        waiting = Waiting(lane, messages, size)
        self._all[waiting] = None
        known = self._lanes.get(lane)
        if known is not None:
            known.append(waiting)
            return
        self._lanes[lane] = deque((waiting,))
        if lane not in self._running:
            self._ready.append(lane)

    def take(self) -> Waiting | None:
        """Return a bundle for a handler, whose lane waits until `done`; None if every lane with bundles has one at a handler."""
        if not self._ready:
            return None
        lane = self._ready.popleft()
        self._running.add(lane)
        return self._next(lane)

    def done(self, waiting: Waiting) -> None:
        """A handler is through with a bundle: the next of its lane may go."""
        lane = waiting.lane
        self._running.discard(lane)
        if lane in self._lanes:
            self._ready.append(lane)

    def drop_oldest(self) -> tuple[list[Message], int] | None:
        """Remove and return what waits for the longest time; None if nothing waits."""
        if not self._all:
            return None
        lane = next(iter(self._all)).lane
        waiting = self._next(lane)  # the oldest of all is the oldest of its lane
        if lane not in self._lanes and lane not in self._running:
            self._ready.remove(lane)
        return waiting.messages, waiting.size

    def _next(self, lane: Lane) -> Waiting:
        known = self._lanes[lane]
        waiting = known.popleft()
        del self._all[waiting]
        if not known:
            del self._lanes[lane]
        return waiting
