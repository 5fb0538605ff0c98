"""Requests, pushes, surveys and tunnels: handed to members, answered, refused, lost.

What a member was handed stands in its session's `handed` table under a hop id that this relay chose (bit 63 set), so an
answer is accepted from that session alone. A refusal brings the frame itself back: no body is ever kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iris.errors import PeerProtocolError
from iris.wire.codec import (
    ALIAS_AT,
    BODY_AT,
    FLAGS_AT,
    HOP,
    KIND_AT,
    RELAY_HOP,
    REWRITE,
    TUNNEL_BODY_AT,
    tunnel_frame,
)
from iris.wire.frames import FLAG_REFUSED, Cause, Done, Fail, Kind, Refusal, Roster
from relay.core.balance import pick
from relay.core.interest import Interest, Load
from relay.core.ports import Accounts
from relay.core.session import Handed, Route, Session, Survey, Tunnel, kind_name

if TYPE_CHECKING:
    from relay.core.router import Limits

MAX_ATTEMPTS = 4
"""The first member, and up to three others after refusals."""


class Calls:
    """The router's half that expects answers."""

    def __init__(
        self, relay_id: bytes, accounts: Accounts, interest: Interest, limits: Limits, sessions: dict[int, Session]
    ) -> None:  # fmt: skip
        self._relay_id = relay_id
        self._accounts = accounts
        self._interest = interest
        self._limits = limits
        self._sessions = sessions
        self._next_hop = RELAY_HOP + 1
        self._now_us = 0

    # -- out to members --------------------------------------------------------------------------------------

    def called(self, session: Session, buf: memoryview, start: int, end: int, now_us: int) -> None:
        """A request, push, survey or tunnel opening came from `session`; or one that its member refused."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        _, kind, flags, alias, hop, deadline_us = HOP.unpack_from(buf, start)
        self._now_us = now_us
        if flags & FLAG_REFUSED:
            self._refused(session, buf, start, end, flags >> 4, hop, deadline_us)
            return
        try:
            route = session.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind != kind:
            raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
        if hop & RELAY_HOP:
            raise PeerProtocolError("hop ids with bit 63 are the relay's to choose")
        if kind == Kind.TUNNEL_OPEN and hop in session.tunnels:
            raise PeerProtocolError(f"tunnel {hop} is open already")
        self._accounts.in_ += 1
        if session.pending >= self._limits.pending and not self._forget_late(session):
            self._accounts.refused += 1
            session.control(
                Fail(
                    hop,
                    Cause.OVERLOADED,
                    f"{self._limits.pending} messages of this session are waiting",
                )
            )
            return
        if deadline_us and deadline_us <= now_us:
            self._accounts.expired += 1
            session.control(Fail(hop, Cause.EXPIRED, "the deadline had passed at the relay"))
            return
        self._resolve(route)
        if kind == Kind.SURVEY:
            self._survey(session, buf, start, end, route, hop)
            return
        handed = Handed(session, hop, route, end - start)
        handed.deadline_us = deadline_us
        if self._hand(handed, buf, start, end):
            session.pending += 1
        else:
            self._fail_unhanded(handed)

    def _resolve(self, route: Route) -> None:
        """Find who serves this route's address while the interest stays as it is."""
        if route.version != self._interest.version:
            route.targets.clear()
            route.loads = self._interest.loads(route.name, route.key_id, route.kind)
            route.version = self._interest.version

    def _forget_late(self, session: Session) -> bool:
        """Count no more what the session stopped waiting for, at most once a second; whether that made room.

        What a hung member was handed stays in the member's account, and must not close other clusters to the caller.
        """
        if self._now_us < session.swept_us:
            return False
        session.swept_us = self._now_us + 1_000_000
        for other in self._sessions.values():
            for handed in other.handed.values():
                late = handed.deadline_us and handed.deadline_us < self._now_us
                if late and handed.origin is session and handed.load.kind != Kind.TUNNEL_OPEN:
                    (handed.survey or handed).ended()
        return session.pending < self._limits.pending

    def _hand(self, handed: Handed, buf: memoryview, start: int, end: int) -> bool:
        """Hand it to the best member left; False when there is none."""
        route = handed.route
        self._resolve(route)
        handed.attempts += 1
        while True:
            route.turn += 1
            load = pick(route.loads, handed.size, handed.tried, route.turn)
            if load is None:
                return False
            if self._give(handed, load, buf, start, end):
                self._accounts.out += 1
                return True
            handed.tried.append(load)  # its port is full

    def _give(self, handed: Handed, load: Load, buf: memoryview, start: int, end: int) -> bool:
        member = load.member
        session = member.session
        if not session.port.has_room(handed.size):
            return False
        self._next_hop = hop = self._next_hop + 1
        number = handed.route.target(session, member.serial).number(self._interest.next_tick())
        REWRITE.pack_into(buf, start + ALIAS_AT, number, hop)
        if not session.port.forward(buf, start, end, 1):
            return False
        handed.load = load
        load.messages += 1
        load.bytes += handed.size
        session.handed[hop] = handed
        kind = load.kind
        if kind == Kind.PUSH:
            load.handed[hop] = hop
        elif kind == Kind.TUNNEL_OPEN:
            tunnel = Tunnel(handed.origin, handed.hop, session, hop)
            handed.origin.tunnels[handed.hop] = session.tunnels[hop] = tunnel
        return True

    def _survey(
        self, session: Session, buf: memoryview, start: int, end: int, route: Route, hop: int
    ) -> None:
        """To every member that serves surveys and has room: a copy each, under a hop id each."""
        survey = Survey(session, hop)
        roster = []
        if not route.loads:
            self._accounts.refused += 1
            session.control(Fail(hop, Cause.NO_MEMBERS, self._nobody(route)))
            return
        size = end - start
        self._accounts.copied += len(route.loads) - 1
        for load in route.loads:
            member_id = self._member_id(load)
            frame = memoryview(bytearray(buf[start:end]))
            handed = Handed(session, hop, route, size)
            handed.survey = survey
            full = (
                load.messages >= load.concurrency
                and load.bytes + size > load.limit_bytes
                and load.messages > 0
            )
            if full or not self._send_survey(handed, load, frame):
                self._accounts.refused += 1
                survey.lost.append(member_id)
            else:
                self._accounts.out += 1
                survey.open += 1
                roster.append(member_id)
        session.control(Roster(hop, roster))
        if survey.open:
            session.pending += 1
        else:
            session.control(Done(hop, survey.lost))

    def _send_survey(self, handed: Handed, load: Load, frame: memoryview) -> bool:
        session = load.member.session
        if not session.port.has_room(handed.size):
            return False
        self._next_hop = hop = self._next_hop + 1
        number = handed.route.target(session, load.member.serial).number(self._interest.next_tick())
        REWRITE.pack_into(frame, ALIAS_AT, number, hop)
        if not session.port.send(bytes(frame), 1):
            return False
        handed.load = load
        load.messages += 1
        load.bytes += handed.size
        session.handed[hop] = handed
        return True

    # -- back from members -----------------------------------------------------------------------------------

    def answered(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        """A reply, fault or answer came from a member's session; it is the credit, too."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        _, kind, _, alias, hop, _ = HOP.unpack_from(buf, start)
        try:
            route = session.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind != kind:
            raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
        accounts = self._accounts
        accounts.in_ += 1
        handed = session.handed.get(hop)
        if handed is None or handed.load.kind not in _ANSWERED:
            accounts.drop("late answer", 1)
            return
        del session.handed[hop]
        load = handed.load
        load.messages -= 1
        load.bytes -= handed.size
        if load.member.left:
            load.member.forget_if_done()
        origin = handed.origin
        survey = handed.survey
        if survey is None:
            handed.ended()
        if origin.closed:
            accounts.drop("late answer", 1)
        else:
            taken = origin.port.has_room(end - start)
            if taken:
                number = route.target(origin, 0).number(self._interest.next_tick())
                REWRITE.pack_into(buf, start + ALIAS_AT, number, handed.hop)
                taken = origin.port.forward(buf, start, end, 1)
            if taken:
                accounts.out += 1
            else:
                accounts.drop("slow receiver", 1)
                if survey is None:
                    origin.control(
                        Fail(
                            handed.hop,
                            Cause.LOST,
                            "the reply was dropped: we read too slowly",
                            True,
                        )
                    )
        if survey is not None:
            self._survey_less(survey)

    def credited(self, session: Session, load: Load, hops: Sequence[int]) -> None:
        """A member finished these pushes."""
        for hop in hops:
            if load.handed.pop(hop, None) is None:
                raise PeerProtocolError(
                    f"credit for a {kind_name(load.kind)} that was not handed over"
                )
            handed = session.handed.pop(hop)
            load.messages -= 1
            load.bytes -= handed.size
            handed.ended()
        load.member.forget_if_done()

    def _refused(
        self,
        session: Session,
        buf: memoryview,
        start: int,
        end: int,
        reason: int,
        hop: int,
        deadline_us: int,
    ) -> None:
        """A member sent a message back unopened: another may take it, within the deadline."""
        handed = session.handed.get(hop)
        if handed is None:
            if not session.greeted:
                raise PeerProtocolError("a data frame before HELLO")
            self._accounts.in_ += 1
            self._accounts.drop("late answer", 1)
            return
        if handed.load.kind != buf[start + KIND_AT] or handed.size != end - start:
            raise PeerProtocolError("a refused message came back changed")
        self._accounts.in_ += 1
        del session.handed[hop]
        load = handed.load
        self._release(load, hop, handed.size)
        if load.kind == Kind.TUNNEL_OPEN:
            del session.tunnels[hop], handed.origin.tunnels[handed.hop]
        if handed.survey is not None:
            self._accounts.refused += 1
            handed.survey.lost.append(self._member_id(load))
            self._survey_less(handed.survey)
            return
        handed.ended()
        if handed.origin.closed:
            self._accounts.drop("late answer", 1)
            return
        handed.tried.append(load)
        elsewhere = reason in (Refusal.FULL, Refusal.LEAVING) and handed.attempts < MAX_ATTEMPTS
        if elsewhere and (not deadline_us or deadline_us > self._now_us):
            buf[start + FLAGS_AT] = 0
            if self._hand(handed, buf, start, end):
                handed.waits = True
                handed.origin.pending += 1
                return
        if reason in (Refusal.FULL, Refusal.LEAVING):
            self._fail_unhanded(handed)
        elif reason == Refusal.EXPIRED:
            self._accounts.expired += 1
            handed.origin.control(
                Fail(handed.hop, Cause.EXPIRED, "the deadline had passed at the member")
            )
        else:
            self._accounts.refused += 1
            ran = reason == Refusal.REPLAYED
            text = {
                Refusal.STALE: "stale",
                Refusal.REPLAYED: "the member has seen this message before",
            }.get(
                Refusal(reason) if reason in _REASONS else Refusal.UNREADABLE,
                "the member cannot open it",
            )
            handed.origin.control(Fail(handed.hop, Cause.REFUSED, text, ran))

    def _fail_unhanded(self, handed: Handed) -> None:
        self._accounts.refused += 1
        route = handed.route
        if route.loads:
            detail = f"all {len(route.loads)} members are full or refused it"
            handed.origin.control(Fail(handed.hop, Cause.OVERLOADED, detail))
        else:
            handed.origin.control(Fail(handed.hop, Cause.NO_MEMBERS, self._nobody(route)))

    def _nobody(self, route: Route) -> str:
        text = f"no members of {route.name} take a {kind_name(route.kind)} under your key {route.key_id[:4].hex()}…"
        others = self._interest.others(route.name, (route.key_id,))
        there = ", ".join(f"{count} under {key_id}…" for key_id, count in list(others.items())[:4])
        return f"{text}; there are {there}" if there else text

    def _member_id(self, load: Load) -> str:
        return f"{self._relay_id.hex()}.{load.member.serial}"

    def _survey_less(self, survey: Survey) -> None:
        survey.open -= 1
        if survey.open == 0:
            survey.ended()
            if not survey.origin.closed:
                survey.origin.control(Done(survey.hop, survey.lost))

    def _release(self, load: Load, hop: int, size: int) -> None:
        load.messages -= 1
        load.bytes -= size
        load.handed.pop(hop, None)
        load.member.forget_if_done()

    # -- tunnels ---------------------------------------------------------------------------------------------

    def tunnel(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        """A tunnel frame: to the other side, under that side's hop id."""
        if end - start < TUNNEL_BODY_AT:
            raise PeerProtocolError("a tunnel frame is cut short")
        _, kind, _, _, hop, _ = HOP.unpack_from(buf, start)
        accounts = self._accounts
        # An end may be the relay's own word, so it is no message.
        count = 0 if kind == Kind.TUNNEL_END else 1
        tunnel = session.tunnels.get(hop)
        if tunnel is None:
            if not session.greeted:
                raise PeerProtocolError("a data frame before HELLO")
            accounts.in_ += count
            accounts.drop("late tunnel frame", count)
            return
        if not count and end - start > TUNNEL_BODY_AT + 1:
            # Ends go out whatever the queue of the other side: they stay small.
            raise PeerProtocolError("a TUNNEL_END carries one byte, its cause")
        accounts.in_ += count
        if hop & RELAY_HOP:
            other, other_hop, held = tunnel.opener, tunnel.opener_hop, tunnel.opener_held
        else:
            other, other_hop, held = tunnel.member, tunnel.member_hop, tunnel.member_held
        REWRITE.pack_into(buf, start + ALIAS_AT, 0, other_hop)
        if kind == Kind.TUNNEL_END:
            self._forget(tunnel)
            other.port.control(bytes(buf[start:end]))
            return
        if other.port.forward_tunnel(buf, start, end, held):
            accounts.out += 1
            return
        accounts.drop("tunnel share full", 1)
        fullest = max(other.tunnels.values(), key=lambda t: self._held_at(t, other))
        self._break(fullest, "tunnel share full")
        if fullest is not tunnel:
            self._break(tunnel, "tunnel share full")  # its frame is lost, and a tunnel never skips

    def _held_at(self, tunnel: Tunnel, session: Session) -> int:
        """Return the bytes of a tunnel that wait at a session; one to itself has both its ends there."""
        opener = tunnel.opener_held.bytes if tunnel.opener is session else 0
        return opener + (tunnel.member_held.bytes if tunnel.member is session else 0)

    def _break(self, tunnel: Tunnel, cause: str) -> None:
        """End a tunnel on both sides; what it has waiting is not sent."""
        self._forget(tunnel)
        for session, hop, held in (
            (tunnel.opener, tunnel.opener_hop, tunnel.opener_held),
            (tunnel.member, tunnel.member_hop, tunnel.member_held),
        ):
            lost = session.port.discard(held)
            self._accounts.out -= lost
            self._accounts.drop(cause, lost)
            if not session.closed:
                session.port.control(tunnel_frame(Kind.TUNNEL_END, hop, bytes((Cause.BROKEN,))))

    def _forget(self, tunnel: Tunnel) -> None:
        tunnel.opener.tunnels.pop(tunnel.opener_hop, None)
        tunnel.member.tunnels.pop(tunnel.member_hop, None)
        handed = tunnel.member.handed.pop(tunnel.member_hop, None)
        if handed is not None:
            self._release(handed.load, tunnel.member_hop, handed.size)
            handed.ended()

    # -- losses ----------------------------------------------------------------------------------------------

    def session_down(self, session: Session) -> None:
        """Whoever waits for this session's members, or shares a tunnel with it, hears now."""
        for tunnel in list(session.tunnels.values()):
            self._forget(tunnel)
            other, hop = (
                (tunnel.member, tunnel.member_hop)
                if tunnel.opener is session
                else (tunnel.opener, tunnel.opener_hop)
            )
            if not other.closed and other is not session:
                other.port.control(tunnel_frame(Kind.TUNNEL_END, hop, bytes((Cause.LOST,))))
        handed_to_it, session.handed = session.handed, {}
        for hop, handed in handed_to_it.items():
            self._release(handed.load, hop, handed.size)
            if handed.survey is not None:
                handed.survey.lost.append(self._member_id(handed.load))
                self._survey_less(handed.survey)
                continue
            handed.ended()
            if not handed.origin.closed:
                handed.origin.control(
                    Fail(handed.hop, Cause.LOST, "the member's session was lost", True)
                )


_ANSWERED = frozenset({Kind.REQUEST, Kind.SURVEY})
_REASONS = frozenset(Refusal)
