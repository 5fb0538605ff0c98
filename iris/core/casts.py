"""Receive publications and broadcasts: open bundles, check their senders' sequences, deliver the messages (sans-IO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from iris.core.bundle import decode_bundle
from iris.core.compression import held_bytes
from iris.core.credit import Windows
from iris.core.guard import FlowKey, Guard
from iris.core.guard import Sequence as Expected
from iris.core.inbound import Inbound, InFlow
from iris.core.interfaces import Loss, Owner, Sink
from iris.core.local_senders import LocalSenders
from iris.core.message import Message
from iris.errors import DecodeError, OpenError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import BODY_AT, BUNDLE, END_AT
from iris.wire.kinds import UNKNOWN_COUNT, Kind

CASTS: Final = (Kind.PUBLISH, Kind.BROADCAST, Kind.GAP)
"""Frame kinds that arrive in their sender's order. A session may have to hold them to keep that order."""


class Drop(Protocol):
    """A function that counts dropped messages by cause."""

    def __call__(self, cause: str, count: int = 1, /) -> None: ...


class Casts:
    """The publications and broadcasts that one session receives."""

    __slots__ = (
        "_bundle_bytes",
        "_drop",
        "_flow",
        "_guard",
        "_local_senders",
        "_owner",
        "now_us",
        "received",
        "subscriptions_version",
        "windows",
    )  # fmt: skip

    def __init__(
        self,
        owner: Owner,
        guard: Guard,
        inbound: Inbound,
        drop: Drop,
        send: Callable[[frames.Control], None],
        local_senders: LocalSenders | None = None,
    ) -> None:
        self._owner = owner
        self._guard = guard
        self._flow = inbound.flow
        self._drop = drop
        self._local_senders = local_senders
        self._bundle_bytes = 0
        """Size in memory of the bundle opened last."""
        self.now_us = 0
        """Time of this turn, in µs since 1970."""
        self.received = 0
        """Number of messages received."""
        self.subscriptions_version = 0
        """Rises by one when the subscriptions change."""
        self.windows = Windows(self._sinks, inbound, send)
        """Credit of publishers that wait for subscribers."""

    def subscriptions_changed(self) -> None:
        """Note that the subscriptions or the keys have changed."""
        self.subscriptions_version += 1
        self.windows.changed()

    def publish(self, buf: memoryview, start: int, end: int) -> None:
        """Deliver a published bundle to its subscribers."""
        flow, messages = self._bundle(buf, start, end)
        window = flow.window
        if messages:
            if flow.version != self.subscriptions_version:
                self._sinks(flow)
            size = self._bundle_bytes
            for sink in flow.sinks:
                sink.deliver(messages, size)
            if not flow.sinks:
                self._drop("unwanted", len(messages))
        if window is not None:
            self.windows.received(flow, window, end - start)

    def _sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions to which a flow is delivered."""
        if flow.version != self.subscriptions_version:
            flow.sinks = self._owner.sinks(flow)
            flow.version = self.subscriptions_version
        return flow.sinks

    def broadcast(self, buf: memoryview, start: int, end: int) -> None:
        """Deliver a broadcast bundle to this session's member of that cluster."""
        flow, messages = self._bundle(buf, start, end)
        if messages:
            binding = self._owner.binding(flow)
            if binding is None:
                self._drop("unwanted", len(messages))
            else:
                binding.broadcast(messages, self._bundle_bytes)

    def _bundle(self, buf: memoryview, start: int, end: int) -> tuple[InFlow, list[Message]]:
        """Open a bundle and check its position in its sender's sequence.

        Return its flow and messages, none if it was dropped.
        """
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        kind, alias, sent_us, count, first = BUNDLE.unpack_from(buf, start)
        flow = self._flow(alias, kind)
        self.received += count
        if flow.is_local:
            self._drop("delivered in this process", count)
            return flow, []
        if abs(self.now_us - sent_us) >= self._guard.freshness_us:
            cause = f"sent {(self.now_us - sent_us) / 1e6:+.0f} s from our clock"
            self._report_refused(flow, first, count, cause)
            return flow, []
        assert flow.opener is not None
        try:
            _, plain = flow.opener.open(
                buf[start + BODY_AT : end], flow.prefix + buf[start + END_AT : start + BODY_AT]
            )
            self._bundle_bytes = held_bytes(plain, end - start)
            payloads, headers, packed = decode_bundle(plain)
            if len(payloads) != count:
                raise DecodeError(
                    f"a bundle holds {len(payloads)} messages, but its frame says {count}"
                )
        except (OpenError, DecodeError) as err:
            self._report_refused(flow, first, count, str(err))
            return flow, []
        expected = flow.expected or self._expected(flow)
        if expected is None:
            self._report_loss(flow, count, "too many senders to keep apart")
            return flow, []
        if first != expected.next:
            if first < expected.next:
                self._drop("late or repeated", count)
                return flow, []
            if expected.known and flow.plain and (missing := expected.missing(first)):
                self._report_loss(flow, missing, "missing on the way")
        if flow.plain:
            expected.known = True
        elif expected.known:
            self._groups_only(flow, expected, expected.missing(first) + count)
        expected.next = first + count
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
        """Return the flow's sequence, made at the first message that opened, or None if the table is full.

        A service keeps its sequence when a reconnect makes it another member, so it receives nothing twice. A broadcast
        for a member of another session gets a temporary one, because a member that joins later has its own sequence.
        """
        if flow.expected is None:
            key = self._flow_key(flow)
            if key is None:
                return Expected()
            flow.expected = self._guard.sequence(key, self.now_us)
        return flow.expected

    def _flow_key(self, flow: InFlow) -> FlowKey | None:
        """Return the guard's key for a flow, or None for a broadcast to a member of another session."""
        receiver = 0
        if flow.kind == Kind.BROADCAST:
            binding = self._owner.binding(flow)
            if binding is None:
                return None
            receiver = binding.number
        return (flow.kind, receiver, flow.name, flow.key.key_id, flow.sender_id)

    def _groups_only(self, flow: InFlow, expected: Expected, count: int) -> None:
        """Handle a delivery to queue groups only, from a sender whose messages reached subscriptions without a
        group before.

        An honest relay sends it only after those subscriptions have ended. If they still exist, report the loss
        to them.
        """
        plain = flow.as_plain()
        if self._owner.sinks(plain):
            self._report_loss(plain, count, "delivered to queue groups alone")
        else:
            expected.known = False

    def _report_loss(self, flow: InFlow, count: int | None, cause: str) -> None:
        """Report a loss to each subscription or member that should have received the messages of a flow."""
        loss = Loss(Kind(flow.kind).name.lower(), flow.name, flow.sender_id, count, cause)
        self._drop("lost", count or 0)
        if flow.kind == Kind.BROADCAST:
            binding = self._owner.binding(flow)
            if binding is not None:
                binding.gap(loss)
        else:
            for sink in self._owner.sinks(flow):
                sink.gap(loss)
        self._owner.lost(loss)

    def _report_refused(self, flow: InFlow, first: int, count: int, cause: str) -> None:
        """Report the messages of a bundle that is dropped.

        The gap that the sender's next message shows does not report them again.
        """
        if not flow.plain or not count:
            self._report_loss(flow, count, cause)
        elif not self._report_range(flow, first, count, cause):
            self._drop("late or repeated", count)

    def _report_range(self, flow: InFlow, first: int, count: int, cause: str) -> bool:
        """Report `count` messages from `first` on as lost, and those missing before them, except what was
        already reported.

        Return False if all of them were already reported or received. These numbers are not authenticated, so the
        sequence continues from the next message that opens.
        """
        key = self._flow_key(flow)
        expected = self._guard.reported(key) if key is not None else Expected()
        before, here = expected.note_lost(first, count)
        if before:
            self._report_loss(flow, before, "missing on the way")
        if here:
            self._report_loss(flow, here, cause)
        return bool(before or here)

    def unrouted(self, unrouted: frames.Unrouted) -> None:
        """Report casts of this client that its relay dropped. Raises PeerProtocolError for another kind.

        A publication that nobody subscribes to is not a loss, so subscribers under other keys are only logged.
        """
        if unrouted.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(
                f"UNROUTED must name PUBLISH or BROADCAST, not frame kind 0x{unrouted.kind:02x}"
            )
        if isinstance(unrouted.others, dict):
            self._owner.other_keys(unrouted.name, unrouted.key_id, unrouted.others)
            return
        kind = Kind(unrouted.kind).name.lower()
        self._owner.lost(Loss(kind, unrouted.name, b"", unrouted.count, unrouted.cause))

    def gap(self, gap: frames.Gap) -> None:
        """Report the losses in a relay's GAP. Raises PeerProtocolError for a kind that has no gaps."""
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(
                f"GAP must name PUBLISH or BROADCAST, not frame kind 0x{gap.kind:02x}"
            )
        if self._local_senders is not None and gap.sender_id in self._local_senders:
            return  # the process has delivered these messages itself
        key = self._owner.find_key(gap.key_id)
        if key is None:
            return
        declared = frames.Declare(
            0, gap.kind, gap.name, gap.key_id, gap.sender_id, gap.plain, gap.groups, gap.member
        )
        flow = InFlow(declared, key, None)
        if gap.count == UNKNOWN_COUNT:
            # The next message shows how many; without one, the number stays unknown.
            # Both ends of a link may report the same loss.
            flow_key = self._flow_key(flow) if flow.plain else None
            expected = self._guard.known(flow_key) if flow_key is not None else None
            if expected is None or expected.note_unknown():
                self._report_loss(flow, None, gap.cause)
        elif not flow.plain:
            # Members of a group see only their share, so the relay's number is the only one.
            self._report_loss(flow, gap.count, gap.cause)
        else:
            # A count of 0 marks the start of a run of losses whose length is not known yet.
            self._report_range(flow, gap.first, gap.count, gap.cause)
