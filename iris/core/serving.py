"""The serving half of a session: calls that arrive for its members, their answers, and the credit of pushes.

A call is admitted, opened and guarded against replays, then given to the binding of its member, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iris.core.bundle import Headers, decode_single
from iris.core.compression import held_bytes
from iris.core.conversation import UP
from iris.core.guard import Guard, Sender
from iris.core.inbound import InFlow
from iris.core.interfaces import Delivery, Owner
from iris.core.local_senders import LocalSenders
from iris.core.message import Message, MethodMessage
from iris.core.session_base import SessionBase
from iris.errors import DecodeError, OpenError, PeerProtocolError, Replayed, Stale
from iris.wire import frames
from iris.wire.codec import BODY_AT, CALL, END_AT, answer_suffix
from iris.wire.frames import MAX_CREDIT
from iris.wire.kinds import (
    FAULT,
    FLAG_REFUSED,
    RUN_KINDS,
    SURVEY,
    Kind,
    Refusal,
)
from iris.wire.runs import part_of_calls, read_calls, single_end


class ServingSession(SessionBase):
    """A session through which members are called."""

    def __init__(
        self, owner: Owner, guard: Guard, entropy: Callable[[int], bytes], local_senders: LocalSenders | None, *, label: str, pid: int,
        message_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(
            owner, guard, entropy, local_senders, label=label, pid=pid, message_limit=message_limit
        )
        self.running = 0
        """Deliveries of this session whose handlers have not ended yet. The bindings count them."""
        self.callers_left = 0
        """Calls dispatched to members of this session whose callers left before the answer."""
        self.cancels: dict[int, Callable[[], None]] = {}
        """Calls at members of this session that end when their caller leaves: hop id -> what to call then."""
        self._credits: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """(member, kind) -> hop ids of the pushes that ended in this turn, and of those that were not started."""
        table = self._table
        table[Kind.REQUEST] = table[Kind.PUSH] = table[Kind.SURVEY] = self._incoming
        table[Kind.CALLS] = self._incoming_run
        self._controls[frames.CallerLeft] = self._on_left

    # -- what arrives ----------------------------------------------------------------------------------------

    def _incoming(self, buf: memoryview, start: int, end: int) -> None:
        """Handle a request, push or survey for a member of this session."""
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        kind, flags, alias, hop, deadline_us, sent_us, count = CALL.unpack_from(buf, start)
        if flags & FLAG_REFUSED:
            raise PeerProtocolError("the relay sent a session a message that is marked as refused")
        self.received_alone += 1
        flow = self.flow(alias, kind)
        if count != 1:
            self.drop("unreadable")
            self.refuse(buf, start, end, Refusal.UNREADABLE)
            return
        at, sizes = start + BODY_AT, (end - start - BODY_AT,)
        end_fields = buf[start + END_AT : start + BODY_AT]
        for _, _, reason in self._dispatch(
            flow, hop, deadline_us, sent_us, buf, at, sizes, end_fields
        ):
            self.refuse(buf, start, end, reason)

    def _incoming_run(self, buf: memoryview, start: int, end: int) -> None:
        """Handle a run of requests or pushes for a member.

        Neighbors refused for one reason are sent back as a run, too.
        """
        at, sizes = read_calls(buf, start, end)
        _, flags, alias, hop, deadline_us, sent_us, count = CALL.unpack_from(buf, start)
        if flags & FLAG_REFUSED:
            raise PeerProtocolError("the relay sent a session a message that is marked as refused")
        self.received_alone += count
        flow = self._inbound.flow_of(alias, RUN_KINDS)
        end_fields = single_end(buf, start)
        back = self._dispatch(flow, hop, deadline_us, sent_us, buf, at, sizes, end_fields)
        for first, length, reason in back:
            part = memoryview(part_of_calls(buf, start, end, first, length))
            self.refuse(part, 0, len(part), reason, length)

    def _dispatch(
        self, flow: InFlow, hop: int, deadline_us: int, sent_us: int, buf: memoryview, at: int, sizes: Sequence[int],
        end_fields: bytes | memoryview,
    ) -> Sequence[tuple[int, int, Refusal]]:  # fmt: skip
        """Open and dispatch the calls of one frame: bodies of the lengths `sizes`, from `buf[at]` on, with hop
        ids from `hop` on.

        Return the refused calls: (index of the first, number of consecutive calls, reason).
        """
        binding = self.owner.binding(flow)
        if binding is None:
            return ((0, len(sizes), Refusal.LEAVING),)
        if deadline_us and self.clock_us:
            deadline_us += self.clock_us
        late = deadline_us and deadline_us < self.mono_us
        stale = abs(self.now_us - sent_us) >= self.guard.freshness_us
        kind = flow.kind
        open_body = flow.opener.open if flow.opener is not None else None
        assert open_body is not None
        metadata = flow.prefix + end_fields
        sender: Sender | None = None
        back: list[tuple[int, int, Refusal]] = []
        name, sender_id, method = flow.name, flow.sender_id, ""
        for number, length in enumerate(sizes):
            body = buf[at : at + length]
            at += length
            size = BODY_AT + length
            refusal = binding.admit(kind, size)
            if refusal is None and late:
                refusal = Refusal.EXPIRED
            if refusal is None:
                try:
                    counter, plain = open_body(body, metadata)
                    held = held_bytes(plain, size)
                    if held > size and binding.admit(kind, held) is not None:
                        refusal = Refusal.FULL
                    else:
                        payload, headers, packed, method = decode_single(plain)
                except (OpenError, DecodeError):
                    self.drop("unreadable")
                    refusal = Refusal.UNREADABLE
            if refusal is None:
                message = (
                    MethodMessage(payload, name, headers, packed, sender_id, method)
                    if method
                    else Message(payload, name, headers, packed, sender_id)
                )
                delivery = Delivery(self, flow, hop + number, deadline_us, counter, message, held)
                if stale:
                    refusal = self._too_old(delivery, sent_us)
                    if refusal is None:
                        continue
            if refusal is None:
                if sender is None:
                    receiver = binding.number if kind == SURVEY else 0
                    sender = self.guard.sender(
                        flow.key.key_id, flow.sender_id, self.now_us, receiver
                    )
                try:
                    if sender is None:
                        refusal = Refusal.FULL
                    else:
                        sender.window.accept(counter)
                        sender.used_us = self.now_us
                except (Replayed, Stale) as err:
                    self.drop("replayed" if isinstance(err, Replayed) else "stale")
                    refusal = Refusal.REPLAYED if isinstance(err, Replayed) else Refusal.STALE
            if refusal is None:
                if method:
                    binding.call(delivery, method)
                else:
                    binding.dispatch(delivery)
            elif back and back[-1][2] is refusal and sum(back[-1][:2]) == number:
                back[-1] = (back[-1][0], back[-1][1] + 1, refusal)
            else:
                back.append((number, 1, refusal))
        return back

    def _too_old(self, delivery: Delivery, sent_us: int) -> Refusal | None:
        """Answer a message whose clock is too far from this host's with a fault, or return why a push is refused."""
        self.drop("too old")
        if (
            delivery.flow.kind == Kind.PUSH
        ):  # a push has no answer: its relay reports the refusal to the sender
            return Refusal.CLOCK
        age_s = (self.now_us - sent_us) / 1e6
        delivery.fault(
            f"refused: it was sent {age_s:+.1f} s from the member's clock; synchronize the clocks",
            may_have_run=False,
            member=f"{self.relay_id.hex()}.{delivery.flow.member}",
        )
        return None

    def _on_left(self, left: frames.CallerLeft) -> None:
        """Count callers that no longer wait, and end the handlers that asked for that.

        The others run to the end, because work that was begun is finished.
        """
        self.callers_left += len(left.hops)
        if self.cancels:
            for hop in left.hops:
                cancel = self.cancels.pop(hop, None)
                if cancel is not None:
                    cancel()

    # -- what goes back --------------------------------------------------------------------------------------

    def answer(
        self, delivery: Delivery, kind: int, payload: bytes, headers: Headers | None, packed: bool
    ) -> None:
        """Seal and send the answer to a delivery, bound to its request."""
        if self.state is not UP:
            self.drop("late answers")
            return
        flow = delivery.flow
        out = self.out
        suffix = answer_suffix(flow.sender_id, delivery.counter)
        ours = out.flow(kind, flow.name, flow.key)
        if kind != FAULT:
            out.answer(ours, payload, headers, packed, delivery.hop, flow.sender_id, suffix)
        else:
            out.single(ours, payload, headers, packed, delivery.hop, 0, 0, suffix)

    def credit(self, member: int, kind: int, hop: int, *, started: bool) -> None:
        """Return the credit of a push at the end of the turn.

        If it was not `started`, the relay reports that to its sender.
        """
        given = self._credits.get((member, kind))
        if given is None:
            given = self._credits[member, kind] = ([], [])
        hops, unstarted = given
        hops.append(hop)
        if not started:
            unstarted.append(hop)
        if len(hops) >= MAX_CREDIT:
            del self._credits[member, kind]
            self.out.control(frames.Credit(member, kind, hops, unstarted))
