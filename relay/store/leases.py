"""Leases of clients whose workers have places in lines of this store, and the Attend calls that renew them (sans-IO).

A lease exists as long as one of its workers has a place (`relay.store.line`), so the bounds of the lines are those of
leases, too. One call of each lease waits at most: a newer one takes the place of the one before, which is answered.
"""

from __future__ import annotations

from collections.abc import Set

from iris.wire.consumers import MAX_PLACES, Attend, Attended, Placed
from relay.store.clock import Clock
from relay.store.line import Lease
from relay.store.session import IncomingCall


class Leases:
    """All leases of one store. They run in the time that the store was awake."""

    def __init__(self, store: bytes, clock: Clock) -> None:
        """`store` is the store's id."""
        self._store = store
        self._clock = clock
        self._leases: dict[bytes, Lease] = {}
        self._waiting: dict[bytes, tuple[IncomingCall, int]] = {}
        """Lease -> the call that waits, and until when."""

    def __len__(self) -> int:
        return len(self._leases)

    def renewed(self, id: bytes) -> Lease:
        """Return the lease, renewed. One that gets no place is forgotten by `tend`."""
        lease = self._leases.get(id)
        if lease is None:
            lease = self._leases[id] = Lease(id, self._clock.awake_us)
        lease.renew(self._clock.awake_us)
        return lease

    def attend(self, incoming: IncomingCall, call: Attend, *, wait: bool = True) -> None:
        """Renew a lease; answer when a place of it changes, or when the wait is over, without `wait` at once."""
        self._answer_waiting(call.lease)
        lease = self._leases.get(call.lease)
        if lease is None:
            incoming.answer(Attended(self._store))
            return
        lease.renew(self._clock.awake_us)
        self._waiting[call.lease] = (incoming, self._clock.awake_us + 1000 * call.wait_ms)
        if lease.changed or not call.wait_ms or not wait:
            self._answer_waiting(call.lease)

    def tend(self) -> None:
        """Answer what need not wait longer, and forget leases without a place."""
        now_us = self._clock.awake_us
        for lease in list(self._leases.values()):
            waiting = self._waiting.get(lease.id)
            if waiting is not None and (lease.changed or waiting[1] <= now_us):
                self._answer_waiting(lease.id)
            if not lease.places:
                self._answer_waiting(lease.id)
                del self._leases[lease.id]

    def callers_left(self, hops: Set[int]) -> None:
        """The clients of these calls, by hop id, have left, or their connections are lost."""
        for id, (incoming, _) in list(self._waiting.items()):
            if incoming.hop in hops:
                del self._waiting[id]
                self._leases[id].lost(self._clock.awake_us)

    def refuse_waiting(self, reason: str) -> None:
        """Refuse all waiting calls. The leases stay."""
        for incoming, _ in self._waiting.values():
            incoming.refuse("leaving", reason)
        self._waiting.clear()

    def detached(self) -> None:
        """The session has ended, and its calls with it."""
        self._waiting.clear()

    def attached(self) -> None:
        """A new session has begun. Nobody could renew a lease before."""
        for lease in self._leases.values():
            lease.renew(self._clock.awake_us)

    def _answer_waiting(self, id: bytes) -> None:
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            lease = self._leases[id]
            lease.changed = False
            places = [Placed(place.worker, place.number) for place in lease.places.values()]
            waiting[0].answer(Attended(self._store, places[:MAX_PLACES]))
