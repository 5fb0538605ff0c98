"""Calls of stores: what a session asked of the streams that it reads and writes, until each call ends (sans-IO).

Calls are like requests (`asks`), but their bodies are in clear: each record in them is sealed on its own, by its sender and
for its readers. A channel (`channels`) authenticates calls of a stream and their answers. An answer that a relay makes up ends
the call as lost; it is never used as the store's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from iris.core.channels import MAX_LINES, Line, Place
from iris.core.medium import Medium
from iris.core.parties import Waiter
from iris.core.requests import MAX_PENDING, error_of
from iris.crypto.channel import MARK
from iris.crypto.keys import ClusterKey
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    OpenError,
    Overloaded,
    PeerProtocolError,
    RequestTimeout,
)
from iris.wire import frames
from iris.wire.codec import BODY_AT, END, END_AT, HOP
from iris.wire.kinds import NEVER_US
from iris.wire.streams import Refused, decode_answer

GRACE_US: Final = 1_000_000
"""The relay and the store end a call at its deadline; we wait so much longer for their word."""


@dataclass(slots=True)
class Called:
    """A call that has not ended. `hop` is its hop id, `timeout_ms` the timeout in its frame."""

    name: str
    hop: int
    deadline_us: int
    timeout_ms: int
    waiter: Waiter
    writes: bool
    line: Line | None = None
    """The channel that it uses; None for a call without one."""
    counter: int = -1
    """Its counter in that channel, once it was sent."""
    body: bytes = b""
    """Kept until it is sent; if the call changes nothing, until it is answered or sent again."""
    again: bool = False

    @property
    def sent(self) -> bool:
        """Whether it may have reached the store."""
        return self.line is None or self.counter >= 0


class StoreCalls:
    """The unfinished calls of one session, and its channels."""

    __slots__ = ("_lines", "_pending", "_session", "writes")

    def __init__(self, session: Medium) -> None:
        self._session = session
        self._pending: dict[int, Called] = {}
        self._lines: dict[Place, Line] = {}
        self.writes = 0
        """How many of them write: a session that is left waits for those."""

    def send(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str = "",
        writes: bool = False, own: bool = False,
    ) -> Called:  # fmt: skip
        """Send a call to the address `name`; its decoded answer resolves `waiter`. Errors name it `shown`.

        With a `key` it uses a channel to the stream that has the key. With `own` as well, it uses a channel to the store whose id
        is `name`.
        """
        called = self._call(shown or name, timeout_ms, waiter, writes)
        if key is None:
            self._frame(name, None, b"", body, called)
        else:
            called.body = body
            self._route(called, (name, key.key_id, own), key)
        return called

    def _route(self, called: Called, place: Place, key: ClusterKey) -> None:
        """Send a call through the channel of its address, or let it wait until the channel is open."""
        line = self._lines.get(place)
        if line is None:
            if len(self._lines) >= MAX_LINES:
                del self._lines[next(iter(self._lines))]
            line = self._lines[place] = Line(self, place[0], key, called.name, own=place[2])
            called.line = line
            line.held[called.hop] = called
            line.knock()
            return
        called.line = line
        if line.channel is None:
            line.held[called.hop] = called
        else:
            self._seal(line, called)

    def _call(self, shown: str, timeout_ms: int, waiter: Waiter, writes: bool) -> Called:
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(
                shown,
                f"this client has {MAX_PENDING} store calls in flight, which is the limit; wait for some to end",
            )
        session = self._session
        deadline_us = session.mono_us + 1000 * timeout_ms
        called = Called(shown, session.next_hop(), deadline_us, timeout_ms, waiter, writes)
        self._pending[called.hop] = called
        self.writes += writes
        session.deadline_us = min(session.deadline_us, deadline_us + GRACE_US)
        return called

    def _seal(self, line: Line, called: Called) -> None:
        channel = line.channel
        assert channel is not None
        called.counter = channel.next
        channel.next += 1
        end = END.pack(self._session.out.now_us, called.timeout_ms, 1, 0)
        body = called.body
        if called.writes or called.again:
            called.body = b""
        head = channel.seal(called.counter, end, body)
        self._session.out.store_call(
            line.address, line.key, end, head, body, called.hop, called.deadline_us
        )

    def _frame(
        self, name: str, key: ClusterKey | None, head: bytes, body: bytes, called: Called
    ) -> None:
        out = self._session.out
        end = END.pack(out.now_us, called.timeout_ms, 1, 0)
        out.store_call(name, key, end, head, body, called.hop, called.deadline_us)

    # -- channels --------------------------------------------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return our key with this id."""
        return self._session.owner.find_key(key_id)

    def entropy(self, size: int) -> bytes:
        """Return random bytes."""
        return self._session.entropy(size)

    def plain(
        self, name: str, key: ClusterKey | None, body: bytes, *, timeout_ms: int, waiter: Waiter, shown: str
    ) -> Called:  # fmt: skip
        """Send a call that opens a channel."""
        called = self._call(shown, timeout_ms, waiter, False)
        self._frame(name, key, b"", body, called)
        return called

    def opened(self, line: Line, held: Iterable[Called]) -> None:
        """Send the waiting calls in order, except those that have ended."""
        for called in held:
            if self._pending.get(called.hop) is called:
                self._seal(line, called)

    def failed_to_open(
        self, line: Line, held: Iterable[Called], failure: Refused | IrisError
    ) -> None:
        """End the waiting calls. None of them was sent."""
        self._drop_line(line)
        for called in held:
            if self._pending.get(called.hop) is called:
                self._take(called.hop)
                if called.waiter.done():
                    continue
                if isinstance(failure, Refused):
                    called.waiter.set_result(failure)
                else:
                    called.waiter.set_exception(failure)

    def _drop_line(self, line: Line) -> None:
        if self._lines.get(line.place) is line:
            del self._lines[line.place]

    def _unsealed(
        self, called: Called, line: Line, end: memoryview, body: memoryview
    ) -> memoryview | None:
        """Return the store's authenticated answer to this call; None if there is none, and the call was ended or sent again."""
        channel = line.channel
        if channel is not None and called.counter >= 0 and len(body):
            if body[0] == MARK:
                try:
                    counter, answer = channel.open(end, body)
                except OpenError:
                    counter = -1
                if counter == called.counter:
                    return answer
            elif self._refused(body):
                # The store does not know the channel, or a relay claims that. Nobody knows whether the call was carried out.
                self._drop_line(line)
                self._again(called, line)
                return None
        self._session.drop("unauthenticated")
        detail = "an answer was dropped because the store did not authenticate it; check whether the call was carried out"
        called.waiter.set_exception(ConnectionLost(called.name, detail, may_have_run=called.sent))
        return None

    def _refused(self, body: memoryview) -> bool:
        try:
            return isinstance(decode_answer(body), Refused)
        except DecodeError:
            return False

    def _again(self, called: Called, line: Line) -> None:
        """Send a call once more through a new channel if it changes nothing; otherwise end it, and let its caller decide."""
        if not called.body:
            detail = (
                "the store no longer knows the channel, because the store or its relay restarted; "
                "check whether the call was carried out, then repeat it"
            )
            called.waiter.set_exception(ConnectionLost(called.name, detail))
            return
        called.again, called.counter = True, -1
        called.hop = self._session.next_hop()
        self._pending[called.hop] = called
        self._route(called, line.place, line.holder)

    def forget(self, called: Called) -> None:
        """The caller no longer waits; an answer that comes is dropped and counted."""
        self._take(called.hop)

    def _take(self, hop: int) -> Called | None:
        called = self._pending.pop(hop, None)
        if called is not None:
            self.writes -= called.writes
            if called.line is not None:
                called.line.held.pop(hop, None)
        return called

    def answered(self, buf: memoryview, start: int, end: int) -> None:
        """A store's answer."""
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        _, _, _, alias, hop, _ = HOP.unpack_from(buf, start)
        if alias not in self._session.replies:
            raise PeerProtocolError(f"alias {alias} was not declared for STREAM_REPLY")
        self._session.received_alone += 1
        called = self._take(hop)
        if called is None:
            self._session.drop("late answers")
            return
        if called.waiter.done():
            return
        answer = buf[start + BODY_AT : end]
        if called.line is not None:
            fields = buf[start + END_AT : start + BODY_AT]
            opened = self._unsealed(called, called.line, fields, answer)
            if opened is None:
                return
            answer = opened
        try:
            called.waiter.set_result(decode_answer(answer))
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
            if (called := self._pending.get(hop)) is not None:
                detail = f"the store did not answer within {called.timeout_ms / 1000:g} s"
                self._end(hop, RequestTimeout(called.name, detail))
        soonest = min((c.deadline_us for c in self._pending.values()), default=NEVER_US)
        return soonest + GRACE_US if self._pending else NEVER_US

    def end(self, reason: str) -> None:
        """The connection is gone."""
        for hop, called in list(self._pending.items()):
            self._end(hop, ConnectionLost(called.name, reason, may_have_run=called.sent))

    def _end(self, hop: int, error: IrisError) -> None:
        called = self._take(hop)
        if called is not None and not called.waiter.done():
            called.waiter.set_exception(error)
