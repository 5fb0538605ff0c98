"""Finds the stores of a bucket that are gone, and the journals that they hold."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Set
from typing import Final

from iris.crypto.keys import public_id
from iris.errors import IrisError
from relay.store.bucket.history import End, Registration, end_of, registrations
from relay.store.bucket.objects import Objects, each_of
from relay.store.bucket.sealing import Registered, Sealer
from relay.store.bucket.seen import Seen

log = logging.getLogger(__name__)

FAILOVER_S: Final = 5.0
"""How long a store must be gone until its streams are taken over."""
UNSEEN_S: Final = 60.0
"""The same for a store that this one has never seen: after a power cut of the whole site it may be about to start."""
EMPTY_MAX_S: Final = 900.0
"""Longest pause between two looks at a journal of a store that is gone and that has no objects. A bucket has many such
journals: those that checkpoints cover. The first pause is `UNSEEN_S`."""


class Lookout:
    """What one store knows of the others. Call `see`, and then `find` if it returned True."""

    def __init__(
        self, objects: Objects, sealer: Sealer, seen: Seen, store: bytes, failover_s: float, now_s: float,
        warn: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """`store` is this store's public key. `now_s` is of a clock that is never set."""
        self._objects = objects
        self._sealer = sealer
        self._seen = seen
        self._store = store
        self._failover_s = failover_s
        self._warn = warn
        self._now_s = self._began_s = self._looked_s = now_s
        self._visible: set[str] = set()
        self._seen_s: dict[str, float] = {}
        """Address of a store -> when it was seen last; not of those whose streams were taken."""
        self._known: list[Registration] = []
        self._done: set[str] = set()
        """Journals that somebody has taken."""
        self._empty: dict[str, tuple[float, float]] = {}
        """Journal without objects -> when it was looked at, and the pause before it is again."""
        self._read = True
        """Whether every journal could be read that `find` looked at last."""

    def see(self, visible: set[str] | None, now_s: float) -> bool:
        """Note which stores can be seen; return False if nothing is known, because we have no relay."""
        self._now_s = now_s
        if visible is None:
            self._began_s = now_s
            self._seen_s = dict.fromkeys(self._seen_s, now_s)
            return False
        for address in sorted(visible - self._seen_s.keys() - {public_id(self._store).hex()}):
            log.info("store.peer_seen", extra={"fields": {"store": address}})
        self._visible = visible
        self._seen_s |= dict.fromkeys(visible, now_s)
        return True

    def sees(self, store: bytes) -> bool:
        """Return whether another store, with this key, could be seen when we last looked."""
        return store != self._store and public_id(store).hex() in self._visible

    async def find(self) -> tuple[dict[bytes, list[str]], Set[bytes]]:
        """Return what stores that are gone hold: store -> its journals; and the stores that may hold them meanwhile.

        Raises BucketError, ObjectDamaged.
        """
        now_s = self._now_s
        late = any(now_s - at_s >= self._failover_s for at_s in self._seen_s.values())
        if not self._known or late or now_s - self._looked_s >= UNSEEN_S:
            self._known += await registrations(self._objects, self._sealer, len(self._known) + 1)
            self._seen.note_registered(self._known[-1:])
            self._looked_s = now_s
        gone = [
            one
            for one in self._known
            if one.registered.journal not in self._done
            and self._is_gone(one.registered)
            and self._may_hold(one.registered)
        ]
        stores = {self._store, *(one.registered.store for one in gone)}
        return await self._held(gone), stores

    @property
    def missing(self) -> bool:
        """Whether a store was seen within `UNSEEN_S`, is gone, and what it held has not been taken."""
        return any(
            address not in self._visible and self._now_s - at_s < UNSEEN_S
            for address, at_s in self._seen_s.items()
        )

    def taken(self) -> None:
        """Everything that `find` returned was taken: until they are seen again, those stores are not looked for."""
        if self._read:
            self._seen_s = {
                address: at_s
                for address, at_s in self._seen_s.items()
                if self._now_s - at_s < self._failover_s
            }

    async def _held(self, gone: Sequence[Registration]) -> dict[bytes, list[str]]:
        """Return what these journals hold, by store. One that cannot be read is not in the way of the others."""
        held: dict[bytes, list[str]] = {}
        self._read = True
        for one, end in zip(gone, await each_of(gone, self._end_of), strict=True):
            name = one.registered.journal
            _, pause_s = self._empty.pop(name, (0.0, UNSEEN_S / 2))
            if end is None:
                self._read = False
            elif end.fence is not None:
                self._done.add(name)
            elif not end.number:
                pause_s = min(2 * pause_s, EMPTY_MAX_S)
                self._empty[name] = self._now_s, pause_s
            else:
                held.setdefault(one.registered.store, []).append(name)
        return held

    async def _end_of(self, one: Registration) -> End | None:
        """Return the end of a journal; None if it cannot be read."""
        try:
            return await end_of(self._objects, self._sealer, one)
        except (IrisError, OSError) as err:
            self._warn(err)
            return None

    def _may_hold(self, registered: Registered) -> bool:
        """Return whether a journal may have objects: it had some, or its store may have gone on since."""
        looked_s, pause_s = self._empty.get(registered.journal, (-math.inf, 0.0))
        seen_s = self._seen_s.get(public_id(registered.store).hex(), -math.inf)
        return looked_s <= seen_s or self._now_s >= looked_s + pause_s

    def _is_gone(self, registered: Registered) -> bool:
        """Return whether the store of a journal was not seen for long enough."""
        address = public_id(registered.store).hex()
        if registered.store == self._store or address in self._visible:
            return False
        last_s = self._seen_s.get(address)
        if last_s is not None:
            return self._now_s - last_s >= self._failover_s
        return self._now_s - self._began_s >= UNSEEN_S
