"""Calls of one session that wait for an outcome: requests, surveys and pushes. Each ends exactly once (sans-IO)."""

from __future__ import annotations

from typing import Final

import msgspec

from iris.core.bundle import Headers, decode_single
from iris.core.faults import error_of_fault
from iris.core.inbound import InFlow
from iris.core.interfaces import Loss, SurveySink, Waiter
from iris.core.message import Message
from iris.core.session_base import SessionBase
from iris.crypto.keys import ClusterKey
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    NoMembers,
    OpenError,
    Overloaded,
    PeerProtocolError,
    RelayError,
    RequestError,
    RequestTimeout,
    ran_before,
    with_deadline,
)  # fmt: skip
from iris.wire import frames
from iris.wire.codec import ALIAS, ALIAS_AT, BODY_AT, END_AT, HOP, answer_suffix
from iris.wire.frames import MAX_CREDIT
from iris.wire.kinds import (
    FAULT,
    NEVER_US,
    PUSH,
    REPLY,
    REQUEST,
    STALE,
    Cause,
)
from iris.wire.names import split_site
from iris.wire.runs import read_answers, single_end

MAX_PENDING: Final = 65_536
ATTEMPTS: Final = 3
SEEN_MS: Final = 10_000
"""An idempotent call waits for members until its deadline if the last one left less than this ago."""
FIRST_PAUSE_US: Final = 100_000
MAX_PAUSE_US: Final = 1_000_000
"""Pauses of such a call between attempts; each is twice the one before."""


class Pending(msgspec.Struct, eq=False):
    """A request or survey that has not ended."""

    kind: int
    name: str
    """Name of the cluster, with a site before it if the caller named one."""
    key: ClusterKey
    payload: bytes
    headers: Headers | None
    packed: bool
    timeout_ms: int
    deadline_us: int
    waiter: Waiter | None
    survey: SurveySink | None
    idempotent: bool
    member: str
    """Id of the one member that it is for; empty if the relays choose one."""
    method: str
    """The method that it calls; empty if it names none."""
    attempts: int = 1
    ran: bool = False
    """Whether an earlier attempt may have run."""
    hop: int = 0
    counter: int = 0
    sender_id: bytes = b""
    pause_us: int = 0
    """The last pause of a call that waits for members; 0 before the first."""


class Requests:
    """Unfinished requests and surveys of one session, and its latest pushes."""

    __slots__ = ("_pausing", "_pending", "_pushes", "_session", "left", "routed", "senders")

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._pending: dict[int, Pending] = {}
        self._pausing: dict[Pending, tuple[int, RequestError]] = {}
        """Idempotent calls without members, which were there a moment ago: call -> (when it is sent again, the error
        if it is too late then)."""
        self.left: list[int] = []
        """Hop ids of calls that this side gave up in this turn."""
        self.routed = 0
        """Last hop id up to which the relay has routed everything."""
        self._pushes: dict[int, tuple[str, int]] = {}
        """The latest pushes: hop id -> (cluster, deadline, method), so that a report of a failure can name them."""
        self.senders: dict[int, Waiter] = {}
        """Pushes whose sender waits for a failure, by hop id. A failure is set there instead of being reported."""

    def __len__(self) -> int:
        return len(self._pending)

    def send(
        self, kind: int, name: str, key: ClusterKey, payload: bytes, headers: Headers | None, packed: bool, *,
        timeout_ms: int, waiter: Waiter | None = None, survey: SurveySink | None = None, idempotent: bool = False,
        member: str = "", method: str = "",
    ) -> Pending:  # fmt: skip
        """Send a request or survey; with `member`, a request to the one member with this id.

        Raises Overloaded if `MAX_PENDING` are in flight.
        """
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(
                name,
                f"this client has {MAX_PENDING} requests in flight, which is the limit; wait for some to end",
            )
        deadline = self._session.mono_us + 1000 * timeout_ms
        pending = Pending(
            kind,
            name,
            key,
            payload,
            headers,
            packed,
            timeout_ms,
            deadline,
            waiter,
            survey,
            idempotent,
            member,
            method,
        )
        if deadline < self._session.deadline_us:
            self._session.deadline_us = deadline
        self._send(pending)
        return pending

    def _send(self, pending: Pending) -> None:
        session = self._session
        out = session.out
        kind = pending.kind
        if pending.member:
            flow = out.flow_to(kind, pending.name, pending.key, pending.member)
        else:
            flow = out.flow(kind, pending.name, pending.key)
        if kind == REQUEST:
            hop, counter = out.call(
                flow, pending.payload, pending.headers, pending.packed, pending.deadline_us, pending.timeout_ms,
                pending.method,
            )  # fmt: skip
        else:
            hop = session.next_hop()
            counter = out.single(
                flow, pending.payload, pending.headers, pending.packed, hop, pending.deadline_us, pending.timeout_ms,
                method=pending.method,
            )  # fmt: skip
        pending.hop, pending.counter, pending.sender_id = hop, counter, flow.sender_id
        self._pending[hop] = pending

    def push(
        self,
        name: str,
        key: ClusterKey,
        payload: bytes,
        headers: Headers | None,
        packed: bool,
        timeout_ms: int,
        member: str = "",
        method: str = "",
    ) -> int:
        """Send a push and return its hop id. Only a failure comes back; the owner gets it (`Owner.lost`)."""
        session = self._session
        out = session.out
        deadline_us = session.mono_us + 1000 * timeout_ms
        flow = out.flow_to(PUSH, name, key, member) if member else out.flow(PUSH, name, key)
        hop, _ = out.call(flow, payload, headers, packed, deadline_us, timeout_ms, method)
        self._pushes[hop] = (name, deadline_us)
        if len(self._pushes) > MAX_PENDING:
            del self._pushes[next(iter(self._pushes))]
        return hop

    def forget(self, pending: Pending) -> None:
        """Forget a call whose caller no longer waits. A later answer is dropped and counted.

        The relay is told at the end of the turn, because its handler may end with its caller.
        """
        if (
            self._pausing.pop(pending, None) is None
            and self._pending.pop(pending.hop, None) is not None
        ):
            self.left.append(pending.hop)

    def flush(self) -> None:
        """Report the calls that were given up."""
        left, self.left = self.left, []
        for at in range(0, len(left), MAX_CREDIT):
            self._session.control(frames.CallerLeft(left[at : at + MAX_CREDIT]))

    def answered(self, buf: memoryview, start: int, end: int) -> None:
        """Handle a REPLY, FAULT or ANSWER to a request or survey of this session."""
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        _, kind, _, alias, hop, _ = HOP.unpack_from(buf, start)
        self._session.received_alone += 1
        flow = self._session.flow(alias, kind)
        metadata = flow.prefix + buf[start + END_AT : start + BODY_AT]
        self._answered(flow, hop, buf[start + BODY_AT : end], metadata)

    def answered_run(self, buf: memoryview, start: int, end: int) -> None:
        """Handle an ANSWERS frame: replies to several requests of this session."""
        at, hops, sizes = read_answers(buf, start, end)
        (alias,) = ALIAS.unpack_from(buf, start + ALIAS_AT)
        self._session.received_alone += len(hops)
        flow = self._session.flow(alias, REPLY)
        metadata = flow.prefix + single_end(buf, start)
        for hop, size in zip(hops, sizes, strict=True):
            self._answered(flow, hop, buf[at : at + size], metadata)
            at += size

    def _answered(self, flow: InFlow, hop: int, body: memoryview, metadata: bytes) -> None:
        pending = self._pending.get(hop)
        if pending is None:
            self._session.drop("late answers")
            return
        assert flow.opener is not None
        try:
            key = pending.key
            if flow.name != pending.name and flow.name != split_site(pending.name)[1]:
                raise OpenError(
                    f"it was sealed for the address {flow.name!r}, not {pending.name!r}"
                )
            if flow.key is not key and flow.key.key_id != key.key_id:
                raise OpenError("it was sealed under another key than the request")
            _, plain = flow.opener.open(
                body, metadata + answer_suffix(pending.sender_id, pending.counter)
            )
            payload, headers, packed, method = decode_single(plain)
            if method:
                raise DecodeError("an answer names a method; only calls do")
        except (OpenError, DecodeError) as err:
            self._session.drop("unreadable")
            if pending.survey is None:
                self._resolve(
                    hop,
                    pending,
                    error=ConnectionLost(pending.name, f"the reply cannot be read: {err}"),
                )
            return
        message = Message(payload, flow.name, headers, packed, flow.sender_id)
        if pending.survey is not None:
            if flow.kind == FAULT:
                member = (message.headers or {}).get("member", "")
                pending.survey.fault(member, error_of_fault(pending.name, message))
            else:
                pending.survey.answer(message)
        elif flow.kind == FAULT:
            self._resolve(hop, pending, error=error_of_fault(pending.name, message))
        else:
            del self._pending[hop]
            waiter = pending.waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(message)

    def not_ours(self, hop: int) -> None:
        """End a request whose answer came under a key that this process does not have.

        A survey goes on: others may answer.
        """
        pending = self._pending.get(hop)
        if pending is not None and pending.survey is None:
            detail = "the reply was sealed under a key that this client does not have"
            self._resolve(hop, pending, error=ConnectionLost(pending.name, detail))

    def _resolve(self, hop: int, pending: Pending, *, error: IrisError) -> None:
        del self._pending[hop]
        self._fail(pending, error)

    @staticmethod
    def _fail(pending: Pending, error: IrisError) -> None:
        if pending.ran and isinstance(error, RequestError):
            ran_before(error)
        if pending.survey is not None:
            pending.survey.done([], error)
        elif pending.waiter is not None and not pending.waiter.done():
            pending.waiter.set_exception(error)

    def failed(self, fail: frames.Fail) -> None:
        """Handle FAIL, by which a relay ends a call. Only an idempotent call is sent again, whatever the relay says."""
        pending = self._pending.get(fail.hop)
        if pending is None:
            push = self._pushes.pop(fail.hop, None)
            if push is not None:
                name, _ = push
                error = error_of(name, fail)
                sender = self.senders.pop(fail.hop, None)
                if sender is not None and not sender.done():
                    sender.set_exception(error)
                    return
                self._session.owner.lost(
                    Loss("push", name, b"", 1, fail.detail or "the relay refused it", error)
                )
            return
        again = (
            pending.idempotent
            and pending.attempts < ATTEMPTS
            and pending.deadline_us > self._session.mono_us
        )
        if again and (fail.cause == Cause.LOST or is_stale(fail)):
            # It is sealed again: a counter is never used for two sends.
            del self._pending[fail.hop]
            pending.attempts += 1
            pending.ran = pending.ran or fail.may_have_run or is_stale(fail)
            self._send(pending)
            return
        error = error_of(pending.name, fail)
        if not self._pauses(pending, fail, error):
            self._resolve(fail.hop, pending, error=error)

    def _pauses(self, pending: Pending, fail: frames.Fail, error: RequestError) -> bool:
        """Let an idempotent call wait if its members were there a moment ago. Returns whether it does."""
        seen = isinstance(fail.seen_ms, int) and fail.seen_ms < SEEN_MS
        if (
            fail.cause != Cause.NO_MEMBERS
            or not pending.idempotent
            or not (seen or pending.pause_us)
        ):
            return False
        session = self._session
        if pending.deadline_us <= session.mono_us or len(self._pausing) >= MAX_PENDING:
            return False
        del self._pending[fail.hop]
        pending.pause_us = min(2 * pending.pause_us or FIRST_PAUSE_US, MAX_PAUSE_US)
        again_us = min(session.mono_us + pending.pause_us, pending.deadline_us)
        self._pausing[pending] = (again_us, error)
        session.deadline_us = min(session.deadline_us, again_us)
        return True

    def roster(self, roster: frames.Roster) -> None:
        """Handle ROSTER: the members to which a survey was dispatched."""
        pending = self._pending.get(roster.hop)
        if pending is not None and pending.survey is not None:
            pending.survey.roster(roster.members)

    def done(self, done: frames.Done) -> None:
        """Handle DONE: no more answers will come for a survey."""
        pending = self._pending.get(done.hop)
        if pending is not None and pending.survey is not None:
            del self._pending[done.hop]
            pending.survey.done(done.lost, None)

    def expire(self, mono_us: int) -> int:
        """End calls whose deadline has passed; return the next deadline."""
        soonest = NEVER_US
        for pending, (again_us, error) in list(self._pausing.items()):
            if pending.deadline_us <= mono_us:
                del self._pausing[pending]
                self._fail(pending, error)
            elif again_us <= mono_us:
                del self._pausing[pending]
                self._send(pending)
            else:
                soonest = min(soonest, again_us)
        late = []
        for hop, pending in self._pending.items():
            if pending.deadline_us <= mono_us:
                late.append(hop)
            elif pending.deadline_us < soonest:
                soonest = pending.deadline_us
        self.left += late
        for hop in late:
            pending = self._pending[hop]
            if pending.survey is not None:
                del self._pending[hop]
                pending.survey.done([], None)
            else:
                timeout = pending.timeout_ms / 1000
                error = RequestTimeout(pending.name, f"no reply within {timeout:g} s")
                self._resolve(hop, pending, error=with_deadline(error, "no reply", timeout))
        return soonest

    def end(self, reason: str, *, routed: bool) -> None:
        """End all calls because the connection has ended. `routed`: the relay has routed everything that was sent."""
        pending, self._pending = self._pending, {}
        self.left.clear()
        pausing, self._pausing = self._pausing, {}
        for item in pausing:
            self._fail(item, ConnectionLost(item.name, reason, may_have_run=False))
        for item in pending.values():
            lost = ConnectionLost(item.name, reason)
            if item.survey is not None:
                item.survey.done([], lost)
            elif item.waiter is not None and not item.waiter.done():
                item.waiter.set_exception(lost)
        pushes, self._pushes = self._pushes, {}
        # A push that the relay has routed is at a member; one past its deadline has started or was refused.
        unsure = {
            name
            for hop, (name, deadline_us) in pushes.items()
            if hop > self.routed and deadline_us > self._session.mono_us
        }
        for name in () if routed else sorted(unsure):
            self._session.owner.lost(Loss("push", name, b"", None, reason))


def is_stale(fail: frames.Fail) -> bool:
    """Return whether a message was too old to distinguish from a replay.

    Then it may have run, whatever else the relay says.
    """
    return fail.cause == Cause.REFUSED and fail.detail == STALE


def error_of(name: str, fail: frames.Fail) -> RequestError:
    """Return the error that a relay's FAIL means for the caller."""
    if fail.cause == Cause.NO_MEMBERS:
        return NoMembers(name, fail.detail or "no member serves it")
    if fail.cause == Cause.OVERLOADED:
        return Overloaded(name, fail.detail or "all members are at capacity")
    if fail.cause == Cause.EXPIRED:
        late = RequestTimeout(
            name, fail.detail or "the member did not start it before the deadline"
        )
        late.may_have_run = fail.may_have_run
        return late
    if fail.cause == Cause.LOST:
        return ConnectionLost(
            name, fail.detail or "the member disconnected", may_have_run=fail.may_have_run
        )
    ran = fail.may_have_run or is_stale(fail)
    return RelayError(name, fail.detail or "the relay refused it", may_have_run=ran)
