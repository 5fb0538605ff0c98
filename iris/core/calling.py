"""Calls of stores: what a session asked of the streams it reads and writes, until each ends in one way (sans-IO).

As requests (`asks`), but their bodies are in clear: the records in them are sealed singly, by and for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from iris.core.asks import MAX_PENDING, NEVER_US, error_of
from iris.core.parties import Waiter
from iris.crypto.keys import ClusterKey
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    Overloaded,
    PeerProtocolError,
    RequestTimeout,
)
from iris.wire import frames
from iris.wire.codec import BODY_AT, HOP
from iris.wire.streams import decode_answer

if TYPE_CHECKING:
    from iris.core.session import Session

GRACE_US: Final = 1_000_000
"""The relay and the store end a call at its deadline; we wait so much longer for their word."""


@dataclass(slots=True)
class Called:
    """A call on the way."""

    name: str
    deadline_us: int
    waiter: Waiter
    writes: bool


class Calling:
    """The calls of one session that have not ended."""

    __slots__ = ("_pending", "_session", "writes")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: dict[int, Called] = {}
        self.writes = 0
        """How many of them write: a session that is left waits for those."""

    def send(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str = "",
        writes: bool = False,
    ) -> int:  # fmt: skip
        """Send a call to the address `name`; its decoded answer resolves `waiter`. Errors call it `shown`. Return its hop id."""
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(shown or name, f"{MAX_PENDING} calls of this client are in flight")
        session = self._session
        hop = session.next_hop()
        deadline_us = session.mono_us + 1000 * timeout_ms
        session.out.call(name, key, body, hop, deadline_us, timeout_ms)
        self._pending[hop] = Called(shown or name, deadline_us, waiter, writes)
        self.writes += writes
        session.deadline_us = min(session.deadline_us, deadline_us + GRACE_US)
        return hop

    def forget(self, hop: int) -> None:
        """The caller no longer waits; an answer that comes is dropped and counted."""
        self._take(hop)

    def _take(self, hop: int) -> Called | None:
        called = self._pending.pop(hop, None)
        if called is not None:
            self.writes -= called.writes
        return called

    def answered(self, buf: memoryview, start: int, end: int) -> None:
        """A store's answer."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        _, _, _, alias, hop, _ = HOP.unpack_from(buf, start)
        if alias not in self._session.replies:
            raise PeerProtocolError(f"alias {alias} was not declared for STREAM_REPLY")
        self._session.received_messages += 1
        called = self._take(hop)
        if called is None:
            self._session.drop("late answers")
            return
        if called.waiter.done():
            return
        try:
            called.waiter.set_result(decode_answer(buf[start + BODY_AT : end]))
        except DecodeError as err:
            self._session.drop("unreadable")
            called.waiter.set_exception(ConnectionLost(called.name, str(err)))

    def failed(self, fail: frames.Fail) -> None:
        """The relay answered itself: there is no other answer."""
        called = self._take(fail.hop)
        if called is not None and not called.waiter.done():
            called.waiter.set_exception(error_of(called.name, fail))

    def expire(self, mono_us: int) -> int:
        """End what is past its deadline; return the next deadline."""
        late = [h for h, c in self._pending.items() if c.deadline_us + GRACE_US <= mono_us]
        for hop in late:
            self._end(
                hop, RequestTimeout(self._pending[hop].name, "the store did not answer in time")
            )
        soonest = min((c.deadline_us for c in self._pending.values()), default=NEVER_US)
        return soonest + GRACE_US if self._pending else NEVER_US

    def end(self, reason: str) -> None:
        """The connection is gone."""
        for hop in list(self._pending):
            self._end(hop, ConnectionLost(self._pending[hop].name, reason))

    def _end(self, hop: int, error: IrisError) -> None:
        called = self._take(hop)
        if called is not None and not called.waiter.done():
            called.waiter.set_exception(error)
