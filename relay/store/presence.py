"""Which stores our relay knows, its own and those of linked relays, by address."""

from __future__ import annotations

from typing import Final

from iris.wire.frames import Members, Membership
from iris.wire.kinds import NO_KEY, STORES
from relay.store.session import StoreSession

ASK_US: Final = 500_000
STALE_US: Final = 2_000_000
"""An answer is believed this long. A relay that hangs says nothing about other stores."""


class Presence:
    """The stores that our relay knows, asked for again and again."""

    def __init__(self) -> None:
        self._session: StoreSession | None = None
        self._asked = 0
        self._next_us = 0
        self._found: set[str] = set()
        self._addresses: set[str] = set()
        self._answered_us: int | None = None

    def attach(self, session: StoreSession) -> None:
        """Start with a new session."""
        self.detach()
        self._session = session
        session.on_membership = self._answered

    def detach(self) -> None:
        """The session has ended."""
        self._session, self._answered_us, self._next_us = None, None, 0

    def tend(self, now_us: int, *, succeeding: bool) -> None:
        """Ask again when it is time. `now_us` is a clock that is never set.

        `succeeding`: whether this store may take over from one that is gone. Calls of unknown streams then wait.
        """
        if self._session is not None and now_us >= self._next_us:
            self._next_us = now_us + ASK_US
            self._asked += 1
            self._found = set()
            self._session.control(Members(self._asked, STORES, [NO_KEY], False, True, succeeding))

    def addresses(self, now_us: int) -> set[str] | None:
        """Return the addresses of all stores; None while the relay does not say."""
        if self._answered_us is None or now_us - self._answered_us > STALE_US:
            return None
        return self._addresses

    def _answered(self, membership: Membership) -> None:
        if membership.id != self._asked:
            return
        self._found |= {joined.tag for joined in membership.joined}
        if not membership.more:
            self._addresses = self._found
            self._answered_us = self._next_us - ASK_US
