"""A store's side of its session with the relay: receives bundles, which stay sealed, and calls,
which it answers (sans-IO).

It does for a process without cluster keys what `iris.core.session` does for a client.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Final, Protocol

from iris.core.aliases import MAX_ALIASES, AliasTable
from iris.core.conversation import UP, Conversation
from iris.core.interfaces import Waiter
from iris.crypto.channel import MARK, Channel
from iris.crypto.keys import StoreKey
from iris.errors import DecodeError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import (
    BODY_AT,
    DATA_LENGTH,
    END,
    END_AT,
    FLAGS_AT,
    FRAME_OVERHEAD,
    HOP,
    encode_control,
)
from iris.wire.frames import MAX_CREDIT, Serving
from iris.wire.kinds import DECLARED_KINDS, FLAG_REFUSED, Kind, Refusal
from iris.wire.orders import SignedOrder
from iris.wire.runs import single_calls
from iris.wire.streams import Answer, Call, Refused, decode_call, encode
from iris.wire.texts import encodable
from relay.store.bucket.writer import Output
from relay.store.errors import ChannelRefused


class Flow:
    """One declared alias: sender, kind and address.

    `found` caches the owner's streams for one `version` of its catalogue.
    """

    __slots__ = ("declared", "found", "kind", "version")

    def __init__(self, declared: frames.Declare) -> None:
        self.declared = declared
        self.kind = declared.kind
        self.found: Any = None
        self.version = -1


class Bundle:
    """A received bundle, sealed as it was published."""

    __slots__ = ("body", "count", "end", "first", "flow", "hop", "session")

    def __init__(
        self, session: StoreSession, flow: Flow, hop: int, end: bytes, body: bytes
    ) -> None:
        self.session = session
        self.flow = flow
        self.hop = hop
        self.end = end
        """The 24 bytes of end fields."""
        self.body = body
        _, _, self.count, self.first = END.unpack(end)


class Gate(Protocol):
    """Holds back what rests on writes that may still be lost."""

    def hold(self, output: Output, number: int | None = None) -> None: ...


class HeldAnswer:
    """An answer that waits behind a gate."""

    __slots__ = ("_body", "_incoming")

    def __init__(self, incoming: IncomingCall, body: bytes) -> None:
        self._incoming = incoming
        self._body = body

    def release(self) -> None:
        self._incoming.session.answer(self._incoming, self._body)

    def withdraw(self, reason: str) -> None:
        refused = encode(Refused("moved", encodable(reason[:1024])))
        self._incoming.session.answer(self._incoming, refused)


class HeldCredit:
    """The credit of a push that waits behind a gate."""

    __slots__ = ("_bundle",)

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def release(self) -> None:
        self._bundle.session.credit(self._bundle)

    def withdraw(self, reason: str) -> None:
        self._bundle.session.refuse(self._bundle, Refusal.LEAVING)


class IncomingCall:
    """A received call. It must be answered exactly once."""

    __slots__ = (
        "call",
        "channel",
        "counter",
        "deadline_us",
        "gate",
        "hop",
        "key_id",
        "name",
        "rests_on",
        "session",
    )

    def __init__(
        self, session: StoreSession, flow: Flow, hop: int, deadline_us: int, call: Call
    ) -> None:
        self.session = session
        self.name = flow.declared.name
        self.key_id = flow.declared.key_id
        self.hop = hop
        self.deadline_us = deadline_us
        self.call = call
        self.channel: Channel | None = None
        """Channel of the call and its answer; None for a call that is not authenticated."""
        self.counter = 0
        """Counter of the call in its channel."""
        self.gate: Gate | None = None
        """Gate of the stream that the call is for; None if its writes are durable at once."""
        self.rests_on: int | None = None
        """Number of the object that the answer waits for at its gate; None: everything that was written."""

    def answer(self, answer: Answer) -> None:
        """Send the answer, as soon as what it says is durable. It is dropped if the session has ended."""
        if self.gate is None:
            self.session.answer(self, encode(answer))
        else:
            self.gate.hold(HeldAnswer(self, encode(answer)), self.rests_on)

    def refuse(self, code: str, detail: str, *, sure: bool = False) -> None:
        """Answer that the call was refused, and why.

        `sure`: the disk failed, and certainly nothing was written.
        """
        self.answer(Refused(code, encodable(detail[:1024]), sure))


class StoreOwner(Protocol):
    """The callbacks of a session, implemented by the store."""

    def cast_received(self, bundle: Bundle) -> None: ...
    def push_received(self, bundle: Bundle) -> None:
        """Receive a push: call `StoreSession.credit` when it is on disk, or `StoreSession.refuse`."""

    def gap_received(self, gap: frames.Gap) -> None: ...
    def unseal(self, incoming: IncomingCall, end: memoryview, body: memoryview) -> memoryview:
        """Return the call inside an authenticated body and set its channel. Raises ChannelRefused."""

    def call_received(self, incoming: IncomingCall) -> None: ...
    def callers_left(self, hops: Set[int]) -> None:
        """The callers of these calls, by hop id, no longer wait."""

    def draining(self) -> None: ...
    def out_full(self) -> None: ...


class Out:
    """Output queue: the bytes to write, in order."""

    __slots__ = ("chunk_bytes", "chunks")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.chunk_bytes = 0

    def add(self, data: bytes) -> None:
        self.chunks.append(data)
        self.chunk_bytes += len(data)


class StoreSession(Conversation):
    """The protocol state of one connection to the relay."""

    def __init__(
        self, owner: StoreOwner, entropy: Callable[[int], bytes], *, label: str, pid: int, message_limit: int
    ) -> None:  # fmt: skip
        super().__init__(label=label, pid=pid, message_limit=message_limit)
        self.owner = owner
        self.out = Out()
        self.complete = False
        """The relay has sent BYE and confirmed that we received everything we record."""
        self.on_membership: Callable[[frames.Membership], None] = lambda membership: None
        """Called with the answer to Members, and with later changes."""
        self._sender_id = entropy(16)
        self._challenge = b""
        self._flows: list[Flow | None] = []
        self._aliases: AliasTable[tuple[str, bytes]] = AliasTable(MAX_ALIASES)
        self._tick = 0
        self._credits: dict[int, list[int]] = {}
        table = self._table
        table[Kind.PUBLISH] = table[Kind.BROADCAST] = self._cast
        table[Kind.PUSH] = self._push
        table[Kind.CALLS] = self._pushes
        table[Kind.STREAM] = self._call
        self._controls |= {
            frames.Drain: lambda drain: self.owner.draining(),
            frames.Declare: self._on_declare,
            frames.Gap: self._on_gap,
            frames.Membership: lambda membership: self.on_membership(membership),
            frames.CallerLeft: lambda left: self.owner.callers_left(frozenset(left.hops)),
        }

    # -- driving ---------------------------------------------------------------------------------------------

    def turn(self, now_us: int, mono_us: int) -> None:
        super().turn(max(self.now_us, now_us), mono_us)  # the session's wall time never goes back

    def flush(self) -> None:
        """Send the collected credit of finished pushes."""
        for member, hops in self._credits.items():
            for at in range(0, len(hops), MAX_CREDIT):
                self.control(frames.Credit(member, Kind.PUSH, hops[at : at + MAX_CREDIT]))
        self._credits.clear()

    # -- sending ---------------------------------------------------------------------------------------------

    def control(self, body: frames.Control) -> None:
        self.out.add(encode_control(body))

    def grant(self, key: StoreKey, signed: SignedOrder, waiter: Waiter) -> None:
        """Send an order to the relay; its Ack says whether the order is accepted."""
        proof = key.sign_proof(
            signed.order,
            relay_id=self.relay_id,
            session_id=self.session_id,
            challenge=self._challenge,
        )
        self.ask(
            lambda n: frames.Grant(n, signed.order, signed.public_key, signed.signature, proof),
            waiter,
        )

    def join(
        self, name: str, key_ids: list[bytes], kinds: dict[int, Serving], tag: str, waiter: Waiter
    ) -> None:
        """Serve an address under these keys."""
        self.ask(lambda n: frames.Join(n, name, key_ids, kinds, tag), waiter)

    def answer(self, incoming: IncomingCall, body: bytes) -> None:
        """Send the encoded answer to a call."""
        if self.state is not UP:
            return
        if len(body) > self.message_limit + FRAME_OVERHEAD - _HEAD_BYTES:
            body = encode(
                Refused(
                    "full",
                    f"the answer has {len(body)} bytes; a message has at most {self.message_limit}",
                )
            )
        self._tick += 1
        address = (incoming.name, incoming.key_id)
        alias = self._aliases.get(address)
        if alias is None:
            alias = self._aliases.add(address, self._tick)
            name, key_id = address
            self.control(
                frames.Declare(alias.number, Kind.STREAM_REPLY, name, key_id, self._sender_id)
            )
        alias.used = self._tick
        end = END.pack(self.now_us, 0, 1, 0)
        sealed = b""
        if incoming.channel is not None:
            sealed = incoming.channel.seal(incoming.counter, end, body)
        size = DATA_LENGTH + len(sealed) + len(body)
        head = HOP.pack(size, Kind.STREAM_REPLY, 0, alias.number, incoming.hop, 0)
        self.out.add(head + end + sealed)
        self.out.add(body)
        if self.out.chunk_bytes > _FULL_BYTES:
            self.owner.out_full()

    def credit(self, bundle: Bundle) -> None:
        """Return the credit of a finished push at the end of this turn."""
        self._credits.setdefault(bundle.flow.declared.member, []).append(bundle.hop)

    def refuse(self, bundle: Bundle, reason: Refusal) -> None:
        """Send a push back, so that the relay can give it to another member."""
        if self.state is not UP:
            return
        size = DATA_LENGTH + len(bundle.body)
        flags = FLAG_REFUSED | reason << 4
        self.out.add(HOP.pack(size, Kind.PUSH, flags, 0, bundle.hop, 0) + bundle.end + bundle.body)

    # -- what comes in ---------------------------------------------------------------------------------------

    def _bundle(self, buf: memoryview, start: int, end: int) -> Bundle:
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame has {end - start} bytes; its header alone has {BODY_AT}"
            )
        _, kind, _, alias, hop, _ = HOP.unpack_from(buf, start)
        flow = self._flow(alias, kind)
        return Bundle(
            self,
            flow,
            hop,
            bytes(buf[start + END_AT : start + BODY_AT]),
            bytes(buf[start + BODY_AT : end]),
        )

    def _flow(self, alias: int, kind: int) -> Flow:
        try:
            flow = self._flows[alias]
        except IndexError:
            flow = None
        if flow is None or flow.kind != kind:
            raise PeerProtocolError(f"alias {alias} was not declared for {Kind(kind).name}")
        return flow

    def _cast(self, buf: memoryview, start: int, end: int) -> None:
        self.owner.cast_received(self._bundle(buf, start, end))

    def _push(self, buf: memoryview, start: int, end: int) -> None:
        if buf[start + FLAGS_AT] & FLAG_REFUSED:
            raise PeerProtocolError("a push with the refused flag came to a session")
        self.owner.push_received(self._bundle(buf, start, end))

    def _pushes(self, buf: memoryview, start: int, end: int) -> None:
        for frame in single_calls(buf, start, end, Kind.PUSH):
            self._push(memoryview(frame), 0, len(frame))

    def _call(self, buf: memoryview, start: int, end: int) -> None:
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame has {end - start} bytes; its header alone has {BODY_AT}"
            )
        _, kind, _, alias, hop, deadline_us = HOP.unpack_from(buf, start)
        flow = self._flow(alias, kind)
        incoming = IncomingCall(self, flow, hop, deadline_us, _UNREAD)
        try:
            body = buf[start + BODY_AT : end]
            if len(body) and body[0] == MARK:
                body = self.owner.unseal(incoming, buf[start + END_AT : start + BODY_AT], body)
            incoming.call = decode_call(body)
        except ChannelRefused as err:
            incoming.refuse(
                "channel", str(err)
            )  # not authenticated: the caller may not hold the channel
            return
        except DecodeError as err:
            incoming.refuse("invalid", str(err))
            return
        self.owner.call_received(incoming)

    def _welcomed(self, welcome: frames.Welcome) -> None:
        self._challenge = welcome.challenge
        self._aliases = AliasTable(welcome.aliases)
        super()._welcomed(welcome)

    def _on_bye(self, bye: frames.Bye) -> None:
        self.complete = bye.complete
        super()._on_bye(bye)

    def _on_declare(self, declared: frames.Declare) -> None:
        if declared.kind not in DECLARED_KINDS or declared.alias >= MAX_ALIASES:
            raise PeerProtocolError(
                f"DECLARE of alias {declared.alias} (the limit is {MAX_ALIASES}) for frames of kind 0x{declared.kind:02x}"
            )
        flows = self._flows
        if declared.alias >= len(flows):
            flows.extend([None] * (min(MAX_ALIASES, max(16, 2 * declared.alias + 1)) - len(flows)))
        flows[declared.alias] = Flow(declared)

    def _on_gap(self, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(
                f"a gap in frames of kind 0x{gap.kind:02x}; only publications and broadcasts have gaps"
            )
        self.owner.gap_received(gap)


_FULL_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 128
_UNREAD: Final[Any] = None
