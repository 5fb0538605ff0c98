"""Rate quotas: how many messages and bytes a session, and all sessions together to one address, may send a second.

Quotas count what sessions of this relay send, never what arrives over links: each relay limits its own sessions.
Answers, tunnel records and calls to stores are not counted.

    calls     are refused with the name of the quota; nothing ran
    casts     are dropped, and the sender gets UNROUTED with the name of the quota
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from iris.wire.codec import KIND_AT
from iris.wire.frames import Fail, Unrouted
from iris.wire.kinds import Cause, Kind
from iris.wire.names import matches
from relay.core.buckets import Bucket, Rate
from relay.core.heads import CASTS, made
from relay.core.neighbor import Route
from relay.core.ports import Accounts
from relay.core.quotas import RELAYS_STORE
from relay.core.session import Session

COUNTED: Final = (*CASTS, Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.CALLS)
MAX_CACHED: Final = 4096
"""Addresses whose quotas are cached; over it, the cache is cleared."""

Entry = Callable[[Any, memoryview, int, int], object]
"""Handler of one kind of frames of a session. It returns True after a frame that cost more than its length tells."""


class Rates:
    """The rate quotas of one relay: `session` for each session, `addresses` for all sessions of this relay together.

    `addresses` are (filter, rate). Such a quota is shared by all topics and clusters that the filter matches.
    """

    def __init__(
        self, accounts: Accounts, session: Rate, addresses: Sequence[tuple[str, Rate]]
    ) -> None:
        self._accounts = accounts
        self._session = session
        self._addresses = [
            (pattern, Bucket(f"quota of {pattern!r} (address_rate)", rate, 0))
            for pattern, rate in addresses
        ]
        self._cache: dict[str, list[Bucket]] = {}
        """Name of an address -> quotas that apply to it."""
        self._sessions_refused = 0

    def __bool__(self) -> bool:
        return bool(self._session or self._addresses)

    def new_session(self, session: Session, now_us: int) -> None:
        """Give a new session its own quota, if sessions have one."""
        if self._session:
            session.rate = Bucket("session quota (session_rate)", self._session, now_us)

    def limited(self, table: Sequence[Entry], clock: Callable[[], int]) -> list[Entry]:
        """Return the table of handlers of sessions' frames, where those of `COUNTED` frames check the quotas first."""
        limited = list(table)
        for kind in COUNTED:
            limited[kind] = self._counting(table[kind], clock)
        return limited

    def _counting(self, handle: Entry, clock: Callable[[], int]) -> Entry:
        def frame(session: Session, buf: memoryview, start: int, end: int) -> object:
            head = made(session, buf, start, end)
            if head is None or session.user == RELAYS_STORE:
                return handle(session, buf, start, end)
            route, count, hop = head
            mine = session.rate
            buckets = self._of(route.name) if mine is None else [mine, *self._of(route.name)]
            now_us = clock()
            empty = [bucket for bucket in buckets if bucket.is_empty(now_us)]
            if empty:
                refuse(
                    self._accounts, session, buf[start + KIND_AT], route, count, hop,
                    "over quota", Cause.OVERLOADED, empty[0].refuse(count),
                )  # fmt: skip
                if empty[0] is mine:
                    self._sessions_refused += count
                return True
            for bucket in buckets:
                bucket.take(count, end - start)
            return handle(session, buf, start, end)

        return frame

    def _of(self, name: str) -> list[Bucket]:
        found = self._cache.get(name)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = [bucket for pattern, bucket in self._addresses if matches(pattern, name)]
            self._cache[name] = found
        return found

    def status(self) -> dict[str, object]:
        """Return the quotas and what each has refused, in messages; ready for JSON."""
        shown: dict[str, object] = {}
        if self._session:
            shown["session_rate"] = {"quota": str(self._session), "refused": self._sessions_refused}
        for pattern, bucket in self._addresses:
            shown[pattern] = {"quota": str(bucket.rate), "refused": bucket.refused}
        return shown


def refuse(
    accounts: Accounts, session: Session, kind: int, route: Route, count: int, hop: int, drop: str, cause: Cause, why: str
) -> None:  # fmt: skip
    """Refuse the calls of a frame, from hop id `hop` on, or drop its casts as `drop`, and notify the sender."""
    accounts.in_ += count
    if kind in CASTS:
        accounts.drop(drop, count)
        session.control(Unrouted(kind, route.name, route.key_id, count, why))
        return
    accounts.refused += count
    for number in range(hop, hop + count):
        session.control(Fail(number, cause, why))
