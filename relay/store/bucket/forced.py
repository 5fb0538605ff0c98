"""The list in a bucket of `disk` streams that were lost and made again of their copies.

    forced/000000000001   log A of a store that was gone is log B of another store from now on
    forced/000000000002   log C is log D
    forced/000000000003   log B is log E, because the other store was lost, too

Each number is created once, so all stores read the same list. The first entry of a log counts. So of two orders for
one log at the same time one is carried out, and a store that comes back with a lost log knows that it must not serve
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from relay.store.bucket.history import AHEAD, MOST_AHEAD
from relay.store.bucket.objects import Objects
from relay.store.bucket.sealing import Forced, ObjectDamaged, Sealer, forced_key
from relay.store.bucket.whole import fetch_all
from relay.store.errors import Refuse

MAX_FORCED: Final = 4096
"""Entries of one bucket. Each takes a few hundred bytes in the memory of each store."""


class ForcedList:
    """The list as one store has read it so far."""

    def __init__(self, objects: Objects, sealer: Sealer) -> None:
        self._objects = objects
        self._sealer = sealer
        self._number = 1
        """The next number to read."""
        self._by_lost: dict[bytes, Forced] = {}
        self._by_made: dict[bytes, Forced] = {}

    @property
    def entries(self) -> Iterable[Forced]:
        """The entries that count."""
        return self._by_lost.values()

    def of(self, uuid: bytes) -> Forced | None:
        """Return by which log this one was replaced; None if it was not."""
        return self._by_lost.get(uuid)

    def made(self, uuid: bytes) -> Forced | None:
        """Return which log this one has replaced; None if it is not in the list."""
        return self._by_made.get(uuid)

    def last_of(self, uuid: bytes) -> Forced | None:
        """Return the last entry of the chain that begins with this log; None if it was not replaced."""
        found = None
        while (entry := self._by_lost.get(uuid)) is not None:
            found, uuid = entry, entry.made
        return found

    async def read(self) -> None:
        """Read what was added since. Raises BucketError, ObjectDamaged."""
        ahead = 1  # most of the time there is nothing new
        while True:
            keys = [forced_key(self._number + index) for index in range(ahead)]
            ahead = AHEAD if ahead < AHEAD else min(2 * ahead, MOST_AHEAD)
            for key, sealed in await fetch_all(self._objects, self._sealer, keys):
                if sealed is None:
                    return
                entry = self._sealer.open(key, sealed)
                if not isinstance(entry, Forced):
                    raise ObjectDamaged(f"object {key}: it is not what its key says; restore it from a backup")  # fmt: skip
                self._number += 1
                # A log that is in the list already would close a circle.
                if entry.lost not in self._by_lost and not self._knows(entry.made) and entry.made != entry.lost:  # fmt: skip
                    self._by_lost[entry.lost] = entry
                    self._by_made[entry.made] = entry

    async def decide(self, entry: Forced) -> Forced:
        """Add an entry, unless its lost log has one; return the entry that counts.

        Raises:
            BucketError: it may be repeated.
            ObjectDamaged: the same as `read`.
            Refuse: the list is full, or the new log is in it already.
        """
        while True:
            await self.read()
            if (there := self.of(entry.lost)) is not None:
                return there
            if self._knows(entry.made) or entry.made == entry.lost:
                raise Refuse("order", "another log has this uuid; repeat the order with a new uuid")
            if self._number > MAX_FORCED:
                raise Refuse("full", f"{MAX_FORCED} streams of this bucket were moved by force, which is the limit; use another bucket")  # fmt: skip
            key = forced_key(self._number)
            await self._objects.create(key, self._sealer.seal(key, entry))
            # Whatever the answer was: what stands there now decides.

    def _knows(self, uuid: bytes) -> bool:
        return uuid in self._by_lost or uuid in self._by_made
