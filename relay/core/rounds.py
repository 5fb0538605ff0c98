"""Things of many owners that are looked at again and again: a few at a time, and the owners in turn.

    `add` ──► due after `LOOK_US`, or at once when the interest has changed ──► `step` looks at a few ──► rests

What one owner has must not keep the relay busy, and must not delay the look at what others have. So a step does a
bounded amount of work, the rest after it is longer the more it did, and each owner has rounds of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from iris.wire.kinds import NEVER_US

LOOK_US: Final = 50_000
"""Interval at which everything is looked at, if that takes no longer and the interest does not change."""
STEP: Final = 1024
"""Work of one step, about a millisecond: a look at an owner of whom nothing is due is 1."""
LOOK: Final = 32
"""Work of a look at one thing; the look itself may return more."""
REST_US_EACH: Final = 6
"""Rest after a step for each unit of its work, so that looks take a small part of the relay's time."""
T = TypeVar("T", bound=Hashable)


class _Owned(Generic[T]):
    """What one owner has, in the order of the next looks."""

    __slots__ = ("begun_us", "left", "things", "version")

    def __init__(self, version: int, now_us: int) -> None:
        self.things: OrderedDict[T, None] = OrderedDict()
        self.left = 0
        """Looks until everything was looked at in this round."""
        self.begun_us = now_us
        self.version = version


class Rounds(Generic[T]):
    """Things by owner. `look` is called for each one that is due, and returns the work beyond `LOOK`."""

    def __init__(self, look: Callable[[T, int], int]) -> None:
        self._look = look
        self._owned: OrderedDict[int, _Owned[T]] = OrderedDict()
        """Owner -> what it has; the first is next."""
        self.total = 0
        """Number of things, of all owners."""
        self._version = 0
        """Version of the interest at the last step."""
        self._due_us = NEVER_US
        self._rest_until_us = 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[T]:
        for owned in self._owned.values():
            yield from owned.things

    def count(self, owner: int) -> int:
        """Return how many things an owner has."""
        owned = self._owned.get(owner)
        return 0 if owned is None else len(owned.things)

    def has(self, owner: int, thing: T) -> bool:
        """Whether a thing of an owner is looked at."""
        owned = self._owned.get(owner)
        return owned is not None and thing in owned.things

    def add(self, owner: int, thing: T, version: int, now_us: int) -> None:
        """Look at a thing from now on; it may be there already. `version` is that of the interest."""
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = _Owned(version, now_us)
        if thing not in owned.things:
            if not self.total:
                self._version = version
            owned.things[thing] = None
            self.total += 1
            self._due_us = min(self._due_us, now_us + LOOK_US)

    def discard(self, owner: int, thing: T) -> bool:
        """Do not look at a thing any more. Returns False if it is not there."""
        owned = self._owned.get(owner)
        if owned is None or thing not in owned.things:
            return False
        del owned.things[thing]
        self.total -= 1
        if not owned.things:
            del self._owned[owner]
        if not self.total:
            self._due_us = NEVER_US
        return True

    def deadline_us(self, version: int) -> int:
        """Return when a step is due; `version` is that of the interest, whose changes make everything due."""
        if self.total and version != self._version:
            return self._rest_until_us
        return self._due_us

    def step(self, version: int, now_us: int) -> None:
        """Look at some of what is due, one thing of each owner after the other."""
        if now_us < self._rest_until_us:
            return
        self._version = version
        owned_by = self._owned
        work = idle = 0
        due_us = NEVER_US
        while work < STEP and idle < len(owned_by):
            owner = next(iter(owned_by))
            owned = owned_by[owner]
            owned_by.move_to_end(owner)
            if owned.version != version or (not owned.left and now_us >= owned.begun_us + LOOK_US):
                owned.version, owned.begun_us = version, now_us
                owned.left = len(owned.things)
            if not owned.left:
                idle += 1
                work += 1
                due_us = min(due_us, owned.begun_us + LOOK_US)
                continue
            idle = 0
            due_us = NEVER_US
            owned.left -= 1
            thing = next(iter(owned.things))
            owned.things.move_to_end(thing)
            work += LOOK + self._look(thing, now_us)
        self._rest_until_us = now_us + REST_US_EACH * work
        if not owned_by:
            self._due_us = NEVER_US
        else:
            done = idle >= len(owned_by)
            self._due_us = max(due_us if done else 0, self._rest_until_us)
