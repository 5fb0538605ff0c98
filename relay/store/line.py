"""Workers of a consumer that is not shared, in order of arrival: the first is active, the others stand by (sans-IO).

    join ─► at the end ─► first: active ─► leave, hand_over, or its lease ends ─► the next one is active

A worker keeps its place as long as its lease is renewed. One lease is of all workers of a client at a store. If
nobody renews, the first worker keeps its place: others would be no better, and it is the store or a relay that stands
still.

Nothing here outlives the store's process. When a log is opened, the worker that was active before has `LEASE_US` to
come back, before the first of the others becomes active.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from iris.errors import IrisError
from iris.wire.consumers import MAX_PLACES

LEASE_US: Final = 4_000_000
"""A lease that was not renewed for this long has ended. Clients renew it every second."""
FRESH_US: Final = 2_000_000
"""A lease that was renewed in this time is of a client that can be reached: it missed one renewal at most."""
RETURN_US: Final = 1_000_000
"""What is left of a lease when the relay says that its client's connection is lost: the client may come back."""
MAX_LINE: Final = 64
"""Workers in one line. One more is refused."""
MAX_OF_LEASE: Final = 8
"""Workers of one client in one line. One more is refused."""


class LineFull(IrisError):
    """No more workers can stand by."""


class Lease:
    """The lease of a client's workers at this store. `until_us` is in time that the store was awake."""

    __slots__ = ("changed", "id", "places", "until_us")

    def __init__(self, id: bytes, awake_us: int) -> None:
        self.id = id
        self.places: dict[bytes, Place] = {}
        """Worker -> its place."""
        self.changed = False
        """A place of it has changed since the client was told."""
        self.renew(awake_us)

    def renew(self, awake_us: int) -> None:
        """Let it last for `LEASE_US` from now on."""
        self.until_us = awake_us + LEASE_US

    def lost(self, awake_us: int) -> None:
        """The client's connection is lost: it has `RETURN_US` to come back."""
        self.until_us = min(self.until_us, awake_us + RETURN_US)


class Place:
    """A worker's place in a line."""

    __slots__ = ("label", "lease", "line", "worker")

    def __init__(self, worker: bytes, lease: Lease, label: str, line: Line) -> None:
        self.worker = worker
        self.lease = lease
        self.label = label
        """What people are shown of the worker."""
        self.line = line

    @property
    def number(self) -> int:
        """0 if the worker is active, else how many workers are before it; at least 1."""
        if self.line.active == self.worker:
            return 0
        return max(1, list(self.line).index(self))


class Line:
    """The places of one consumer's workers."""

    def __init__(self) -> None:
        self.active: bytes | None = None
        """The worker that receives messages; None if there is none, or the former one may still come back."""
        self._places: dict[bytes, Place] = {}
        self._hold_until_us = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    def hold(self, until_us: int) -> None:
        """Let only a worker that was active before be active until then: this store does not know who was."""
        self._hold_until_us = until_us

    def join(
        self, worker: bytes, lease: Lease, label: str, awake_us: int, *, was_active: bool = False
    ) -> list[bytes]:
        """Give a worker the last place, unless it has one; return the workers that were taken out as by `expire`.

        `was_active`: it was active when it last heard of this line.

        Raises:
            LineFull: the line, or the share of this client, is full.
            ValueError: another client has a worker of this id.
        """
        over: list[bytes] = []
        place = self._places.get(worker)
        if place is None:
            over = self.expire(awake_us)
            self._check_room(lease)
            self._places[worker] = lease.places[worker] = Place(worker, lease, label, self)
            lease.changed = True
        elif place.lease is not lease:
            raise ValueError("worker: a worker of another client has this id")
        if was_active and self.active is None:
            self._places = {worker: self._places.pop(worker), **self._places}
            self._hold_until_us = 0
        self._advance(awake_us)
        return over + self.expire(awake_us)

    def _check_room(self, lease: Lease) -> None:
        if len(self._places) >= MAX_LINE:
            raise LineFull(
                f"{MAX_LINE} workers are active or stand by, which is the limit; stop some of them, or let them share the "
                "messages of another consumer with shared=True"
            )
        if len(lease.places) >= MAX_PLACES:
            raise LineFull(
                f"this client has {MAX_PLACES} workers at the store, which is the limit; use another client for the others"
            )
        if sum(place.lease is lease for place in self) >= MAX_OF_LEASE:
            raise LineFull(
                f"{MAX_OF_LEASE} workers of this client are active or stand by, which is the limit for one client; use one"
            )

    def renew(self, worker: bytes, awake_us: int) -> None:
        """Renew the lease of a worker that made a call, if it has a place."""
        place = self._places.get(worker)
        if place is not None:
            place.lease.renew(awake_us)

    def leave(self, worker: bytes, awake_us: int) -> None:
        """Take a worker out of the line."""
        place = self._places.pop(worker, None)
        if place is not None:
            place.lease.places.pop(worker, None)
            place.lease.changed = True
            self._advance(awake_us)

    def expire(self, awake_us: int) -> list[bytes]:
        """Take workers out whose lease has ended, and return them.

        The first one stays if nobody else has renewed a lease in `FRESH_US`.
        """
        over = [place for place in self if place.lease.until_us <= awake_us]
        if over and over[0] is next(iter(self)):
            fresh_us = awake_us + LEASE_US - FRESH_US
            if not any(place.lease.until_us > fresh_us for place in self):
                del over[0]
        for place in over:
            self.leave(place.worker, awake_us)
        self._advance(awake_us)
        return [place.worker for place in over]

    def hand_over(self, awake_us: int) -> bool:
        """Let the next worker be active, and the active one stand by as the last; return whether there is another."""
        if len(self._places) < 2 or self.active is None:
            return False
        place = self._places.pop(self.active)
        self._places[place.worker] = place
        self._advance(awake_us)
        return True

    def clear(self) -> None:
        """Take out all workers, because the consumer or its log is closed."""
        for place in self:
            place.lease.places.pop(place.worker, None)
            place.lease.changed = True
        self._places.clear()
        self.active = None

    def _advance(self, awake_us: int) -> None:
        """Let the first be active."""
        first = next(iter(self._places), None)
        if first == self.active or (self.active is None and awake_us < self._hold_until_us):
            return
        for worker in (self.active, first):
            if worker in self._places:
                self._places[worker].lease.changed = True
        self.active = first
        self._hold_until_us = 0
