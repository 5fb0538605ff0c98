"""The member's side of a session with its relay: ids, deadlines, answers, dispatch (sans-IO).

Lifecycle: `connecting` (HELLO sent) -> `up` (WELCOME came) -> `leaving` (BYE sent) -> `ended`. The shell feeds frames to
`frame`, calls `turn` with the time before it lets user code run and `flush` after, writes `out.chunks`, and calls
`expire` no later than `deadline_us`. What comes in goes to the owner's bindings and sinks by plain calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from iris.core.bundle import Headers, decode_bundle
from iris.core.guard import Guard
from iris.core.guard import Sequence as Expected
from iris.core.inbound import Inbound, InFlow
from iris.core.message import Message
from iris.core.outbound import Outbound
from iris.core.tunnel import TunnelEnd
from iris.crypto.keys import ClusterKey
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    NoMembers,
    OpenError,
    Overloaded,
    PeerProtocolError,
    RelayUnavailable,
    RemoteError,
    Replayed,
    RequestTimeout,
    Stale,
)  # fmt: skip
from iris.wire import frames
from iris.wire.codec import (
    BODY_AT,
    BUNDLE,
    CALL,
    END_AT,
    FLAGS_AT,
    HOP,
    KIND_AT,
    TUNNEL_BODY_AT,
    answer_suffix,
    decode_control,
)  # fmt: skip
from iris.wire.frames import FLAG_REFUSED, PROTOCOL_MINOR, PROTOCOL_VERSION, Cause, Kind, Refusal

NEVER_US: Final = 1 << 62
MAX_PENDING: Final = 65_536
MAX_HALF_OPEN: Final = 1024
HALF_OPEN_US: Final = 5_000_000
RETRIES: Final = 3


class Waiter(Protocol):
    """What a request resolves; asyncio.Future is one."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class Binding(Protocol):
    """A service that joined through this session, as the session sees it. `number` is its own for good."""

    @property
    def number(self) -> int: ...

    def admit(self, kind: int, size: int) -> Refusal | None: ...
    def take(self, delivery: Delivery) -> None: ...
    def broadcast(self, messages: list[Message], size: int) -> None: ...
    def tunnel(self, end: TunnelEnd) -> None: ...
    def gap(self, gap: Lost) -> None: ...


class Sink(Protocol):
    """A subscription as the session sees it."""

    def deliver(self, messages: list[Message], size: int) -> None: ...
    def gap(self, gap: Lost) -> None: ...


class Owner(Protocol):
    """Who the session works for: the client."""

    def find_key(self, key_id: bytes) -> ClusterKey | None: ...
    def binding(self, flow: InFlow) -> Binding | None:
        """Return the service that a flow is for; None if it did not join the flow's address, whatever the relay says."""

    def sinks(self, flow: InFlow) -> Sequence[Sink]: ...
    def draining(self) -> None: ...
    def lost(self, lost: Lost) -> None: ...
    def out_full(self) -> None: ...


class Lost:
    """Messages that did not arrive: `count` of them, None if nobody can know, and why.

    `error` is what a request would have raised, for a push that failed.
    """

    __slots__ = ("cause", "count", "error", "kind", "name", "source")

    def __init__(
        self, kind: str, name: str, source: bytes, count: int | None, cause: str, error: IrisError | None = None
    ) -> None:  # fmt: skip
        self.kind = kind
        self.name = name
        self.source = source
        self.count = count
        self.cause = cause
        self.error = error

    def __repr__(self) -> str:
        return f"Lost({self.kind} {self.name!r}: {'?' if self.count is None else self.count}, {self.cause})"


@dataclass(slots=True)
class Pending:
    """A request or survey on the way."""

    kind: int
    name: str
    key: ClusterKey
    payload: bytes
    headers: Headers | None
    packed: bool
    timeout_ms: int
    deadline_us: int
    waiter: Waiter | None
    survey: SurveySink | None
    idempotent: bool
    attempts: int = 1
    hop: int = 0
    counter: int = 0
    sender_id: bytes = b""


class SurveySink(Protocol):
    """Who hears the answers of one survey."""

    def roster(self, members: list[str]) -> None: ...
    def answer(self, message: Message) -> None: ...
    def fault(self, member: str, detail: str) -> None: ...
    def done(self, lost: list[str], error: IrisError | None) -> None: ...


class Delivery:
    """A request, push or survey that was accepted for running; ends by exactly one of its methods."""

    __slots__ = ("counter", "deadline_us", "flow", "hop", "message", "session", "size")

    def __init__(
        self,
        session: Session,
        flow: InFlow,
        hop: int,
        deadline_us: int,
        counter: int,
        message: Message,
        size: int,
    ) -> None:
        self.session = session
        self.flow = flow
        self.hop = hop
        self.deadline_us = deadline_us
        self.counter = counter
        self.message = message
        self.size = size

    def reply(self, payload: bytes, headers: Headers | None, packed: bool) -> None:
        """Answer it (request, survey)."""
        kind = Kind.ANSWER if self.flow.kind == Kind.SURVEY else Kind.REPLY
        self.session.answer(self, kind, payload, headers, packed)

    def fault(self, detail: str, *, may_have_run: bool, member: str = "") -> None:
        """Answer it with an error; `detail` reaches the caller."""
        headers = {"may-have-run": "1" if may_have_run else "0", "member": member}
        text = detail[:4096].encode(errors="backslashreplace")  # a file name may hold surrogates
        self.session.answer(self, Kind.FAULT, text, headers, False)

    def finish(self) -> None:
        """It is done with (push): its credit goes back with the turn's."""
        self.session.credit(self.flow.member, self.flow.kind, 1, self.size)


class Session:
    """One connection's conversation. See the module's text for how it is driven."""

    def __init__(
        self, owner: Owner, guard: Guard, entropy: Callable[[int], bytes], *, label: str, pid: int, message_limit: int
    ) -> None:  # fmt: skip
        self.owner = owner
        self.state = "connecting"
        self.now_us = 0
        self.mono_us = 0
        self._oldest_us = self._newest_us = 0
        self.deadline_us = NEVER_US
        self.subscriptions_version = 0
        self.message_limit = message_limit
        self.received_messages = 0
        self.dropped: dict[str, int] = {}
        self.relay_id = b""
        self.session_id = b""
        self.tunnels: dict[int, TunnelEnd] = {}
        self.members: list[int] = []
        """The members of ours that joined through this session."""
        self.registered: set[object] = set()
        """What our owner registered through this session, by whatever it tells registrations apart."""
        self.on_welcome: Waiter | None = None
        self.greeting = frames.Hello(PROTOCOL_VERSION, PROTOCOL_MINOR, label[:64], pid)
        self.out: Outbound
        self._entropy = entropy
        self._inbound = Inbound(owner.find_key)
        self._guard = guard
        self._next_hop = 1
        self._next_id = 1
        self._pending: dict[int, Pending] = {}
        self._pushes: dict[int, str] = {}
        """hop id -> cluster of the latest pushes, so that a failure can be told by name."""
        self._acks: dict[int, tuple[type, Waiter]] = {}
        """By id: which frame answers, and who waits."""
        self._watches: dict[int, Callable[[frames.Membership], None]] = {}
        self._credits: dict[tuple[int, int], list[int]] = {}
        self._dirty_tunnels: list[TunnelEnd] = []
        self._half_open: dict[int, int] = {}
        table: list[Callable[[memoryview, int, int], None]] = [self._control] * 256
        table[Kind.PUBLISH] = self._publish
        table[Kind.REQUEST] = table[Kind.PUSH] = table[Kind.SURVEY] = self._incoming
        table[Kind.REPLY] = table[Kind.FAULT] = table[Kind.ANSWER] = self._answered
        table[Kind.BROADCAST] = self._broadcast
        table[Kind.TUNNEL_OPEN] = self._tunnel_open
        table[Kind.TUNNEL_ACCEPT] = table[Kind.TUNNEL_DATA] = table[Kind.TUNNEL_END] = self._tunnel
        self._table = table
        self._controls: dict[type, Callable[[Any], None]] = {
            frames.Welcome: self._on_welcome,
            frames.Error: self._on_error,
            frames.Bye: self._on_bye,
            frames.Drain: lambda _: self.owner.draining(),
            frames.Ack: self._on_ack,
            frames.Declare: self._inbound.declare,
            frames.Gap: self._on_gap,
            frames.Fail: self._on_fail,
            frames.Roster: self._on_roster,
            frames.Done: self._on_done,
            frames.Membership: self._on_membership,
            frames.Report: self._on_ack,
            frames.Pong: self._on_ack,
            frames.Ping: lambda ping: self.out.control(frames.Pong(ping.id)),
        }

    # -- driving ---------------------------------------------------------------------------------------------

    def frame(self, buf: memoryview, start: int, end: int) -> None:
        """Take one whole frame; raises PeerProtocolError if the relay broke the protocol."""
        self._table[buf[start + KIND_AT]](buf, start, end)

    def turn(self, now_us: int, mono_us: int) -> None:
        """Tell the time: µs since 1970, and µs of CLOCK_MONOTONIC."""
        self.now_us = now_us
        self.mono_us = mono_us
        self._oldest_us = now_us - self._guard.freshness_us
        self._newest_us = now_us + self._guard.freshness_us
        if self.state == "up":
            self.out.now_us = now_us

    def flush(self) -> None:
        """Seal what the turn collected and give back its credit."""
        if self.state != "up":
            return
        self.out.flush()
        if self._dirty_tunnels:
            for end in self._dirty_tunnels:
                end.flush()
            self._dirty_tunnels.clear()
        if self._credits:
            for (member, kind), (messages, size) in self._credits.items():
                self.out.control(frames.Credit(member, kind, messages, size))
            self._credits.clear()

    def expire(self, mono_us: int) -> None:
        """End what is past its deadline."""
        self.mono_us = mono_us
        soonest = NEVER_US
        late = []
        for hop, pending in self._pending.items():
            if pending.deadline_us <= mono_us:
                late.append(hop)
            elif pending.deadline_us < soonest:
                soonest = pending.deadline_us
        for hop in late:
            pending = self._pending.pop(hop)
            if pending.survey is not None:
                pending.survey.done([], None)
            elif pending.waiter is not None and not pending.waiter.done():
                pending.waiter.set_exception(
                    RequestTimeout(pending.name, f"no reply within {pending.timeout_ms / 1000:g} s")
                )
        for hop, until in list(self._half_open.items()):
            if until <= mono_us:
                del self._half_open[hop]
                self._break(hop, "the other side did not finish the handshake")
            elif until < soonest:
                soonest = until
        self.deadline_us = soonest

    def end(self, reason: str, *, routed: bool = False) -> None:
        """The connection is gone: everything in flight ends now, and says so. `routed`: the relay took all we sent."""
        if self.state == "ended":
            return
        self.state = "ended"
        pending, self._pending = self._pending, {}
        for item in pending.values():
            if item.survey is not None:
                item.survey.done([], ConnectionLost(item.name, reason))
            elif item.waiter is not None and not item.waiter.done():
                item.waiter.set_exception(ConnectionLost(item.name, reason))
        pushes, self._pushes = self._pushes, {}
        for name in () if routed else sorted(set(pushes.values())):
            self.owner.lost(Lost("push", name, b"", None, reason))
        tunnels, self.tunnels = self.tunnels, {}
        for end in tunnels.values():
            end.fail(reason, tell=False)
        acks, self._acks = self._acks, {}
        for _, waiter in acks.values():
            if not waiter.done():
                waiter.set_exception(ConnectionLost("relay", reason))

    # -- sending ---------------------------------------------------------------------------------------------

    def ask(self, build: Callable[[int], frames.Control], waiter: Waiter) -> None:
        """Send the control frame that `build` makes of an id; its Ack, Report or Pong resolves `waiter`."""
        number = self._next_id
        self._next_id += 1
        body = build(number)
        self._acks[number] = _ANSWERS.get(type(body), frames.Ack), waiter
        self.out.control(body)

    def watch(
        self,
        name: str,
        key_ids: list[bytes],
        heard: Callable[[frames.Membership], None],
        *,
        stay: bool,
    ) -> int:
        """Ask who serves `name`; `heard` gets the answer, and the changes if `stay`."""
        number = self._next_id
        self._next_id += 1
        self._watches[number] = heard
        self.out.control(frames.Members(number, name, key_ids, stay))
        return number

    def unwatch(self, number: int) -> None:
        """End a watch."""
        if self._watches.pop(number, None) is not None and self.state == "up":
            self.out.control(frames.Unwatch(number))

    def send_to_one(
        self, kind: int, name: str, key: ClusterKey, payload: bytes, headers: Headers | None, packed: bool, *,
        timeout_ms: int, waiter: Waiter | None = None, survey: SurveySink | None = None, idempotent: bool = False,
    ) -> Pending:  # fmt: skip
        """Send a request or a survey. Raises Overloaded when too many are in flight."""
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(name, f"{MAX_PENDING} requests of this client are in flight")
        deadline = self.mono_us + 1000 * timeout_ms
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
        )
        if deadline < self.deadline_us:
            self.deadline_us = deadline
        self._send(pending)
        return pending

    def _send(self, pending: Pending) -> None:
        pending.hop = hop = self._next_hop
        self._next_hop = hop + 1
        out = self.out
        flow = out.flow(pending.kind, pending.name, pending.key)
        pending.counter = out.single(
            flow,
            pending.payload,
            pending.headers,
            pending.packed,
            hop,
            pending.deadline_us,
            pending.timeout_ms,
        )
        pending.sender_id = flow.sender_id
        self._pending[hop] = pending

    def push(
        self,
        name: str,
        key: ClusterKey,
        payload: bytes,
        headers: Headers | None,
        packed: bool,
        timeout_ms: int,
    ) -> None:
        """Send a push: nothing comes back but a failure, which the owner hears as lost."""
        hop = self._next_hop
        self._next_hop = hop + 1
        out = self.out
        deadline_us = self.mono_us + 1000 * timeout_ms
        out.single(
            out.flow(Kind.PUSH, name, key), payload, headers, packed, hop, deadline_us, timeout_ms
        )
        self._pushes[hop] = name
        if len(self._pushes) > MAX_PENDING:
            del self._pushes[next(iter(self._pushes))]

    def forget(self, pending: Pending) -> None:
        """The caller no longer waits; an answer that comes is dropped and counted."""
        self._pending.pop(pending.hop, None)

    def answer(
        self, delivery: Delivery, kind: int, payload: bytes, headers: Headers | None, packed: bool
    ) -> None:
        """Seal and send the answer of a delivery, bound to its request."""
        if self.state != "up":
            self._drop("late answers")
            return
        flow = delivery.flow
        self.out.single(
            self.out.flow(kind, flow.name, flow.key), payload, headers, packed, delivery.hop, 0, 0,
            answer_suffix(flow.sender_id, delivery.counter),
        )  # fmt: skip

    def credit(self, member: int, kind: int, messages: int, size: int) -> None:
        """Give back credit with the end of the turn."""
        held = self._credits.setdefault((member, kind), [0, 0])
        held[0] += messages
        held[1] += size

    def open_tunnel(
        self, name: str, key: ClusterKey, headers: Headers | None, timeout_ms: int
    ) -> TunnelEnd:
        """Start a tunnel; the end is `open` once the member accepted."""
        hop = self._next_hop
        self._next_hop += 1
        tunnel_id = self._entropy(16)
        end = self._tunnel_end(name, key, tunnel_id, hop, initiator=True, opening=headers)
        self.tunnels[hop] = end
        self.out.opening(
            name, key, tunnel_id, end.hello(), hop, self.mono_us + 1000 * timeout_ms, timeout_ms
        )
        return end

    def _tunnel_end(
        self,
        name: str,
        key: ClusterKey,
        tunnel_id: bytes,
        hop: int,
        *,
        initiator: bool,
        opening: Headers | None = None,
    ) -> TunnelEnd:
        return TunnelEnd(
            name, key, tunnel_id, hop, initiator=initiator, ephemeral=self._entropy(32),
            emit=self._emit_tunnel, mark_dirty=self._dirty_tunnels.append, opening=opening,
        )  # fmt: skip

    def _emit_tunnel(self, frame: bytes) -> None:
        if frame[KIND_AT] == Kind.TUNNEL_END:  # nothing more comes, not even an answer to it
            self.tunnels.pop(HOP.unpack_from(frame)[4], None)
        if self.state == "up":
            if frame[KIND_AT] != Kind.TUNNEL_END:
                self.out.sent_messages += 1
            else:  # no message: relays make it, too; and the last word on this hop id
                self.tunnels.pop(HOP.unpack_from(frame)[4], None)
            self.out.raw(frame)

    # -- what comes in: casts --------------------------------------------------------------------------------

    def _publish(self, buf: memoryview, start: int, end: int) -> None:
        flow, messages = self._bundle(buf, start, end)
        if messages:
            if flow.version != self.subscriptions_version:
                flow.sinks = self.owner.sinks(flow)
                flow.version = self.subscriptions_version
            size = end - start
            for sink in flow.sinks:
                sink.deliver(messages, size)
            if not flow.sinks:
                self._drop("unwanted", len(messages))

    def _broadcast(self, buf: memoryview, start: int, end: int) -> None:
        flow, messages = self._bundle(buf, start, end)
        if messages:
            binding = self.owner.binding(flow)
            if binding is None:
                self._drop("unwanted", len(messages))
            else:
                binding.broadcast(messages, end - start)

    def _bundle(self, buf: memoryview, start: int, end: int) -> tuple[InFlow, list[Message]]:
        """Open a bundle and hold it to its sender's sequence; the list is empty when it was dropped."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        kind, alias, sent_us, count, first = BUNDLE.unpack_from(buf, start)
        flow = self._inbound.flow(alias, kind)
        self.received_messages += count
        if not self._oldest_us < sent_us < self._newest_us:
            self._lose(flow, count, f"sent {(self.now_us - sent_us) / 1e6:+.0f} s from our clock")
            return flow, []
        assert flow.opener is not None
        try:
            _, plain = flow.opener.open(
                buf[start + BODY_AT : end], flow.prefix + buf[start + END_AT : start + BODY_AT]
            )
            payloads, headers, packed = decode_bundle(plain)
            if len(payloads) != count:
                raise DecodeError(f"{len(payloads)} messages in a bundle of {count}")
        except (OpenError, DecodeError) as err:
            self._lose(flow, count, str(err))
            return flow, []
        expected = flow.expected or self._expected(flow)
        if expected is None:
            self._lose(flow, count, "too many senders to keep apart")
            return flow, []
        if first != expected.next:
            if first < expected.next:
                self._drop("late or repeated", count)
                return flow, []
            if expected.known and flow.plain:
                self._lose(flow, first - expected.next, "missing on the way")
        expected.next = first + count
        expected.known = True
        expected.used_us = self.now_us
        name, source = flow.name, flow.sender_id
        if count == 1:
            only = headers[0] if headers is not None else None
            return flow, [Message(payloads[0], name, only, packed, source)]
        if headers is None:
            return flow, [Message(p, name, None, packed, source) for p in payloads]
        return flow, [
            Message(p, name, h, packed, source) for p, h in zip(payloads, headers, strict=True)
        ]

    def _expected(self, flow: InFlow) -> Expected | None:
        """Return the flow's sequence entry, made at the first message that opened; None when the table is full.

        A service keeps its entry when a reconnect makes it another member, so nothing reaches it twice.
        """
        if flow.expected is None:
            binding = self.owner.binding(flow) if flow.member else None
            receiver = binding.number if binding is not None else 0
            place = (flow.kind, receiver, flow.name, flow.key.key_id, flow.sender_id)
            flow.expected = self._guard.sequence(place, self.now_us)
        return flow.expected

    def _lose(self, flow: InFlow, count: int | None, cause: str) -> None:
        """Tell whoever wanted the messages of a flow that some are lost."""
        lost = Lost(Kind(flow.kind).name.lower(), flow.name, flow.sender_id, count, cause)
        self._drop("lost", count or 0)
        if flow.kind == Kind.BROADCAST:
            binding = self.owner.binding(flow)
            if binding is not None:
                binding.gap(lost)
        else:
            for sink in self.owner.sinks(flow):
                sink.gap(lost)
        self.owner.lost(lost)

    def _drop(self, cause: str, count: int = 1) -> None:
        self.dropped[cause] = self.dropped.get(cause, 0) + count

    # -- what comes in: one to one ---------------------------------------------------------------------------

    def _incoming(self, buf: memoryview, start: int, end: int) -> None:
        """A request, push or survey for one of our members."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        kind, flags, alias, hop, deadline_us, sent_us, count = CALL.unpack_from(buf, start)
        if flags & FLAG_REFUSED:
            raise PeerProtocolError("a refused message came to a session")
        self.received_messages += 1
        flow = self._inbound.flow(alias, kind)
        size = end - start
        binding = self.owner.binding(flow)
        refusal = Refusal.LEAVING if binding is None else binding.admit(kind, size)
        if refusal is None and deadline_us and deadline_us < self.mono_us:
            refusal = Refusal.EXPIRED
        if refusal is not None or binding is None:
            self._refuse(buf, start, end, refusal or Refusal.LEAVING)
            return
        assert flow.opener is not None
        try:
            counter, plain = flow.opener.open(
                buf[start + BODY_AT : end], flow.prefix + buf[start + END_AT : start + BODY_AT]
            )
            payloads, headers, packed = decode_bundle(plain)
            if len(payloads) != 1 or count != 1:
                raise DecodeError("one message at a time")
        except (OpenError, DecodeError):
            self._drop("unreadable")
            self._refuse(buf, start, end, Refusal.UNREADABLE)
            return
        message = Message(
            payloads[0], flow.name, headers[0] if headers else None, packed, flow.sender_id
        )
        delivery = Delivery(self, flow, hop, deadline_us, counter, message, size)
        if not self._oldest_us < sent_us < self._newest_us:
            self._drop("too old")
            if kind == Kind.PUSH:  # it takes no answer: its relay tells the sender
                self._refuse(buf, start, end, Refusal.UNREADABLE)
            else:
                age_s = (self.now_us - sent_us) / 1e6
                delivery.fault(
                    f"refused: sent {age_s:+.1f} s from the member's clock; set the clocks",
                    may_have_run=False,
                    member=f"{self.relay_id.hex()}.{flow.member}",
                )
            return
        receiver = binding.number if kind == Kind.SURVEY else 0
        sender = self._guard.sender(flow.key.key_id, flow.sender_id, self.now_us, receiver)
        if sender is None:
            self._refuse(buf, start, end, Refusal.FULL)
            return
        try:
            sender.window.check(counter)
        except (Replayed, Stale) as err:
            self._drop("replayed" if isinstance(err, Replayed) else "stale")
            self._refuse(
                buf, start, end, Refusal.REPLAYED if isinstance(err, Replayed) else Refusal.STALE
            )
            return
        sender.window.mark(counter)
        sender.used_us = self.now_us
        binding.take(delivery)

    def _refuse(self, buf: memoryview, start: int, end: int, reason: Refusal) -> None:
        """Send the frame itself back, so that the relay can try another member without keeping bodies."""
        frame = bytearray(buf[start:end])
        frame[FLAGS_AT] = FLAG_REFUSED | reason << 4
        self._drop(f"refused: {reason.name.lower()}")
        self.out.sent_messages += 1
        self.out.raw(bytes(frame))

    def _answered(self, buf: memoryview, start: int, end: int) -> None:
        """A reply, fault or answer to one of our requests or surveys."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        _, kind, _, alias, hop, _ = HOP.unpack_from(buf, start)
        self.received_messages += 1
        flow = self._inbound.flow(alias, kind)
        pending = self._pending.get(hop)
        if pending is None:
            self._drop("late answers")
            return
        assert flow.opener is not None
        try:
            if flow.name != pending.name or flow.key.key_id != pending.key.key_id:
                raise OpenError("an answer from another address")
            _, plain = flow.opener.open(
                buf[start + BODY_AT : end],
                flow.prefix
                + buf[start + END_AT : start + BODY_AT]
                + answer_suffix(pending.sender_id, pending.counter),
            )
            payloads, headers, packed = decode_bundle(plain)
            if len(payloads) != 1:
                raise DecodeError("one answer at a time")
        except (OpenError, DecodeError) as err:
            self._drop("unreadable")
            if pending.survey is None:
                self._resolve(
                    hop,
                    pending,
                    error=ConnectionLost(pending.name, f"the reply is unreadable: {err}"),
                )
            return
        message = Message(
            payloads[0], flow.name, headers[0] if headers else None, packed, flow.sender_id
        )
        if pending.survey is not None:
            if kind == Kind.FAULT:
                pending.survey.fault(
                    (message.headers or {}).get("member", ""),
                    message.payload.decode(errors="replace"),
                )
            else:
                pending.survey.answer(message)
        elif kind == Kind.FAULT:
            ran = (message.headers or {}).get("may-have-run") != "0"
            detail = message.payload.decode(errors="replace")
            self._resolve(hop, pending, error=RemoteError(pending.name, detail, may_have_run=ran))
        else:
            del self._pending[hop]
            waiter = pending.waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(message)

    def _resolve(self, hop: int, pending: Pending, *, error: IrisError) -> None:
        del self._pending[hop]
        if pending.survey is not None:
            pending.survey.done([], error)
        elif pending.waiter is not None and not pending.waiter.done():
            pending.waiter.set_exception(error)

    def _on_fail(self, fail: frames.Fail) -> None:
        pending = self._pending.get(fail.hop)
        if pending is None:
            name = self._pushes.pop(fail.hop, None)
            if name is not None:
                error = _error(name, fail)
                self.owner.lost(Lost("push", name, b"", 1, fail.detail or "refused", error))
            end = self.tunnels.pop(fail.hop, None)
            if end is not None:
                end.error = _error(end.name, fail)
                end.ended_by_relay(fail.cause)
            return
        again = (
            pending.attempts < RETRIES
            and pending.deadline_us > self.mono_us
            and pending.survey is None
        )
        if again and (
            (fail.cause == Cause.REFUSED and fail.detail == "stale")
            or (fail.cause == Cause.LOST and pending.idempotent)
        ):
            # Sealed anew: a counter is never used for two sends.
            del self._pending[fail.hop]
            pending.attempts += 1
            self._send(pending)
            return
        self._resolve(fail.hop, pending, error=_error(pending.name, fail))

    def _on_roster(self, roster: frames.Roster) -> None:
        pending = self._pending.get(roster.hop)
        if pending is not None and pending.survey is not None:
            pending.survey.roster(roster.members)

    def _on_done(self, done: frames.Done) -> None:
        pending = self._pending.pop(done.hop, None)
        if pending is not None and pending.survey is not None:
            pending.survey.done(done.lost, None)

    # -- what comes in: tunnels ------------------------------------------------------------------------------

    def _tunnel_open(self, buf: memoryview, start: int, end: int) -> None:
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        _, _, _, alias, hop, deadline_us = HOP.unpack_from(buf, start)
        self.received_messages += 1
        flow = self._inbound.flow(alias, Kind.TUNNEL_OPEN)
        if hop in self.tunnels:
            raise PeerProtocolError(f"tunnel {hop} is open already")
        binding = self.owner.binding(flow)
        refusal = (
            Refusal.LEAVING if binding is None else binding.admit(Kind.TUNNEL_OPEN, end - start)
        )
        if refusal is None and len(self._half_open) >= MAX_HALF_OPEN:
            refusal = Refusal.FULL
        if refusal is None and deadline_us and deadline_us < self.mono_us:
            refusal = Refusal.EXPIRED
        if refusal is not None:
            self._refuse(buf, start, end, refusal)
            return
        tunnel = self._tunnel_end(flow.name, flow.key, flow.sender_id, hop, initiator=False)
        try:
            answer = tunnel.answer(buf[start + BODY_AT : end])
        except OpenError:
            self._drop("unreadable")
            self._refuse(buf, start, end, Refusal.UNREADABLE)
            return
        self.tunnels[hop] = tunnel
        until = self.mono_us + HALF_OPEN_US
        self._half_open[hop] = until
        self.deadline_us = min(self.deadline_us, until)
        tunnel.wake = lambda: self._opened(hop, tunnel, flow)
        self._emit_tunnel(HOP.pack(22 + len(answer), Kind.TUNNEL_ACCEPT, 0, 0, hop, 0) + answer)

    def _opened(self, hop: int, tunnel: TunnelEnd, flow: InFlow) -> None:
        """The first record of a tunnel to us was read, or failed."""
        if tunnel.headers is None and not tunnel.broken:
            return
        self._half_open.pop(hop, None)
        tunnel.wake = lambda: None
        binding = self.owner.binding(flow)
        if tunnel.broken:
            return
        if binding is None:
            self._break(hop, "the service has left")
        else:
            binding.tunnel(tunnel)

    def drop_tunnel(self, end: TunnelEnd) -> None:
        """Give up a tunnel that was not opened in time."""
        self._break(end.hop, "given up before it was open")

    @property
    def started(self) -> bool:
        """The relay has welcomed us."""
        return bool(self.relay_id)

    @property
    def busy(self) -> bool:
        """Requests of ours, or tunnels, are still in flight here."""
        return bool(self._pending or self.tunnels)

    def _break(self, hop: int, reason: str) -> None:
        end = self.tunnels.pop(hop, None)
        if end is not None:
            end.fail(reason, tell=True)

    def _tunnel(self, buf: memoryview, start: int, end: int) -> None:
        if end - start < TUNNEL_BODY_AT:
            raise PeerProtocolError("a tunnel frame is cut short")
        _, kind, _, _, hop, _ = HOP.unpack_from(buf, start)
        if kind != Kind.TUNNEL_END:
            self.received_messages += 1
        tunnel = self.tunnels.get(hop)
        if tunnel is None:
            if kind != Kind.TUNNEL_END:
                self._drop("late tunnel frames")
        elif kind == Kind.TUNNEL_DATA:
            tunnel.received(buf[start + TUNNEL_BODY_AT : end])
        elif kind == Kind.TUNNEL_ACCEPT:
            try:
                tunnel.accepted(buf[start + TUNNEL_BODY_AT : end])
            except (OpenError, PeerProtocolError) as err:
                self._break(hop, str(err))
        else:
            del self.tunnels[hop]
            cause = buf[start + TUNNEL_BODY_AT] if end - start > TUNNEL_BODY_AT else Cause.BROKEN
            tunnel.ended_by_relay(cause)

    # -- what comes in: control ------------------------------------------------------------------------------

    def _control(self, buf: memoryview, start: int, end: int) -> None:
        body = decode_control(buf, start, end)
        handler = self._controls.get(type(body))
        if handler is None or (
            self.state == "connecting" and not isinstance(body, (frames.Welcome, frames.Error))
        ):
            raise PeerProtocolError(f"a relay does not send {type(body).__name__} now")
        handler(body)

    def _on_welcome(self, welcome: frames.Welcome) -> None:
        if self.state != "connecting":
            raise PeerProtocolError("a second WELCOME")
        if welcome.version != PROTOCOL_VERSION:
            raise PeerProtocolError(
                f"the relay speaks version {welcome.version}, we speak {PROTOCOL_VERSION}"
            )
        self.relay_id, self.session_id = welcome.relay_id, welcome.session_id
        self.message_limit = min(self.message_limit, welcome.message_limit)
        self.out = Outbound(
            relay_id=welcome.relay_id, session_id=welcome.session_id, challenge=welcome.challenge,
            entropy=self._entropy, on_full=self.owner.out_full,
        )  # fmt: skip
        self.out.now_us = self.now_us
        self.state = "up"
        if self.on_welcome is not None and not self.on_welcome.done():
            self.on_welcome.set_result(welcome)

    def _on_error(self, error: frames.Error) -> None:
        raise RelayUnavailable(f"the relay ended the session: {error.detail}")

    def _on_bye(self, bye: frames.Bye) -> None:
        self.end(bye.reason or "the relay said goodbye", routed=True)

    def _on_ack(self, ack: frames.Ack | frames.Report | frames.Pong) -> None:
        wanted, waiter = self._acks.get(ack.id, (type(ack), None))
        if type(ack) is not wanted:
            raise PeerProtocolError(f"{type(ack).__name__} came where {wanted.__name__} was due")
        self._acks.pop(ack.id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(ack)

    def _on_membership(self, membership: frames.Membership) -> None:
        heard = self._watches.get(membership.id)
        if heard is not None:
            heard(membership)

    def _on_gap(self, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(f"a gap in frames of kind 0x{gap.kind:02x}")
        key = self.owner.find_key(gap.key_id)
        if key is None:
            return
        declared = frames.Declare(
            0, gap.kind, gap.name, gap.key_id, gap.sender_id, gap.plain, gap.groups, gap.member
        )
        flow = InFlow(declared, key, None)
        expected = self._expected(flow)
        if expected is not None and not flow.plain:
            # Members of a group see only their share, so the relay's word is all there is.
            expected.next = max(expected.next, gap.first + gap.count)
            self._lose(flow, gap.count, gap.cause)
        elif expected is not None and gap.first + gap.count >= expected.next:
            # A count of 0 says where a run of losses starts whose length is not known yet.
            if expected.known and gap.first > expected.next:
                self._lose(flow, gap.first - expected.next, "missing on the way")
            missing = gap.first + gap.count - max(gap.first, expected.next)
            expected.next = gap.first + gap.count
            expected.known = True
            if missing:
                self._lose(flow, missing, gap.cause)


_ANSWERS: Final[dict[type, type]] = {frames.Status: frames.Report, frames.Ping: frames.Pong}
"""What answers a control frame with an id, where it is not Ack."""


def _error(name: str, fail: frames.Fail) -> IrisError:
    """Return what a relay's own answer means for the caller."""
    if fail.cause == Cause.NO_MEMBERS:
        return NoMembers(name, fail.detail or "nobody serves it")
    if fail.cause == Cause.OVERLOADED:
        return Overloaded(name, fail.detail or "every member is full")
    if fail.cause == Cause.EXPIRED:
        late = RequestTimeout(name, fail.detail or "not started in time")
        late.may_have_run = fail.may_have_run
        return late
    if fail.cause == Cause.LOST:
        return ConnectionLost(
            name, fail.detail or "the member went away", may_have_run=fail.may_have_run
        )
    return RemoteError(name, fail.detail or "refused", may_have_run=fail.may_have_run)


__all__ = [
    "Binding",
    "Delivery",
    "Lost",
    "Owner",
    "Pending",
    "Session",
    "Sink",
    "SurveySink",
    "Waiter",
]
