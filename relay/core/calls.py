"""Requests, pushes, surveys, tunnel openings and store calls: dispatched to members or relays, refused, or lost.

A dispatched call is in the `in_flight` table of the neighbor that has it, under a hop id that this relay
chose. So only that neighbor can answer it (answers.py). A refusal returns the frame itself, over links too,
to the caller's relay, so no relay keeps bodies. The exception is a call that waits because a relay that
served it a moment ago may come back (parking.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import UNSET

from iris.errors import PeerProtocolError
from iris.wire.codec import (
    ALIAS_AT,
    DEADLINE,
    DEADLINE_AT,
    FLAGS_AT,
    KIND_AT,
    REWRITE,
)
from iris.wire.frames import Fail
from iris.wire.kinds import (
    FLAG_REFUSED,
    NEVER_US,
    PUSH,
    REFUSED_ALIAS,
    STALE,
    SURVEY,
    TUNNEL_OPEN,
    UNREADABLE,
    Cause,
    HopClass,
    Kind,
    Refusal,
)
from relay.core.allowances import Allowances
from relay.core.answers import Answers
from relay.core.balance import pick
from relay.core.direct import DirectTunnels
from relay.core.heads import call_head
from relay.core.interest import Interest
from relay.core.leaving import Leaving, was_told
from relay.core.limits import Limits
from relay.core.link import Link
from relay.core.mesh import Mesh
from relay.core.neighbor import Dispatched, DispatchedRun, Load, Neighbor, Route, Target
from relay.core.overdue import LIFE_US, Overdue
from relay.core.parking import Parked, Parking, Prospect
from relay.core.ports import Accounts
from relay.core.quotas import Quotas, hold, is_over
from relay.core.session import Session
from relay.core.sites import Sites
from relay.core.surveys import Surveys
from relay.core.tunnels import Tunnels
from relay.core.unserved import Unserved

MAX_ATTEMPTS: Final = 4
"""Attempts per call: the first member and up to three others after refusals. Remote sites then get as many again."""
MAX_FULL: Final = 32
"""Connections that are tried for a call, besides those whose queue is full, before the call is refused."""
MAX_IN_FLIGHT: Final = 262_144
"""Limit of calls in flight at one session of this relay. The member itself chooses its limit in bytes."""
_NUMBERS: Final = (1 << 62) - 1
"""Mask of the counter in hop ids."""


def _let_call(neighbor: Neighbor, room: int) -> None:
    neighbor.may_call = room


def _let_hold(neighbor: Neighbor, room: int) -> None:
    neighbor.may_hold = room


class Calls:
    """The part of the router for calls, which expect answers."""

    def __init__(
        self, relay_id: bytes, accounts: Accounts, interest: Interest, sites: Sites, mesh: Mesh, limits: Limits, quotas: Quotas,
        neighbors: dict[int, Neighbor],
    ) -> None:  # fmt: skip
        self.accounts = accounts
        self._interest = interest
        self._limits = limits
        self.limit = limits.pending
        """Limit of unanswered calls of one session or link."""
        self._neighbors = neighbors
        self._quotas = quotas
        self.callers = Allowances(
            quotas.calls,
            neighbors,
            lambda neighbor: neighbor.pending,
            lambda neighbor: neighbor.may_call,
            _let_call,
        )
        self.members = Allowances(
            quotas.in_flight,
            neighbors,
            lambda neighbor: len(neighbor.in_flight),
            lambda neighbor: neighbor.may_hold,
            _let_hold,
        )
        self._mesh = mesh
        self._loads = mesh.loads
        self._sites = sites
        self._last_hop = 0
        self._now_us = 0
        self.unserved = Unserved(relay_id, interest, sites, mesh)
        self.parking = Parking(
            accounts,
            interest,
            quotas.parked,
            self._prospect,
            self._unparked,
            lambda route: self.unserved.expiry_text(route, self._now_us),
        )
        self.tunnels = Tunnels(
            accounts, self.ended, self.parking.give_up, DirectTunnels(limits.direct)
        )
        self.surveys = Surveys(
            relay_id,
            accounts,
            interest,
            self._next_hop,
            self.ended,
            self._may_hold_more,
            self._may_hold_here,
        )
        self.answers = Answers(
            accounts, interest, neighbors, self.tunnels, self.surveys, self.ended, self.release
        )
        self._overdue = Overdue(neighbors, self.surveys, self.release)
        self.leaving = Leaving(neighbors, limits.pending, mesh.links, sites.wans, self.parking)

    # -- out to members --------------------------------------------------------------------------------------

    def called(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, now_us: int
    ) -> None:
        """Route a request, push, survey, tunnel opening or store call, or one that its receiver refused and
        returned.
        """
        route, hop, deadline_us, reason = call_head(neighbor, buf, start, end)
        self._now_us = now_us
        if route is None:
            self._refused(neighbor, buf, start, end, reason, hop)
            return
        if route.kind == TUNNEL_OPEN and (
            hop in neighbor.tunnels or self.parking.holds_opening(neighbor, hop)
        ):
            raise PeerProtocolError(f"hop id {hop} is already in use by an open tunnel")
        self.accounts.in_ += 1
        if deadline_us and neighbor.clock_us:
            deadline_us = max(1, min(deadline_us + neighbor.clock_us, NEVER_US))
            DEADLINE.pack_into(buf, start + DEADLINE_AT, deadline_us)
        if neighbor.pending >= neighbor.may_call and (detail := self._crowded(neighbor)):
            self.accounts.refused += 1
            neighbor.control(Fail(hop, Cause.OVERLOADED, detail))
            return
        if deadline_us and deadline_us <= now_us:
            self.accounts.expired += 1
            neighbor.control(
                Fail(hop, Cause.EXPIRED, "the deadline had passed when it reached the relay")
            )
            return
        self.resolve(route)
        if route.loads:
            if route.hop_class in COUNTED and isinstance(neighbor, Link):
                self.count_demand(neighbor, route)
        elif not route.peers and not route.sites:
            self._park_or_end(neighbor, route, hop, deadline_us, buf, start, end)
            return
        self._start(neighbor, route, hop, deadline_us, buf, start, end)

    def count_demand(self, link: Link, route: Route) -> None:
        """Count a call that came over a link, so that the other relay gets load reports for this address."""
        demand = route.demand = link.demand(route.kind, route.name, route.key_id)
        demand.used_us = self._now_us
        self._loads.called(self._now_us)

    def _start(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, buf: memoryview, start: int, end: int
    ) -> None:  # fmt: skip
        until_us = 0
        if not deadline_us:
            until_us = self._now_us + LIFE_US
            self._overdue.due_us = min(self._overdue.due_us, until_us)
        if route.kind == SURVEY:
            self.surveys.start(origin, route, hop, deadline_us, until_us, buf, start, end)
            return
        dispatched = Dispatched(origin, hop, route, end - start)
        dispatched.deadline_us = deadline_us
        dispatched.until_us = until_us
        if self._dispatch_to_best(dispatched, buf, start, end):
            origin.pending += 1
        else:
            self._return_unserved(dispatched, buf, start, end)

    def dispatch_one(self, dispatched: Dispatched, buf: memoryview, start: int, end: int) -> None:
        """Dispatch a call to the best remaining member, or end it."""
        if self._dispatch_to_best(dispatched, buf, start, end):
            dispatched.origin.pending += 1
        else:
            self._return_unserved(dispatched, buf, start, end)

    def is_served(self, route: Route, now_us: int) -> bool:
        """Whether this relay, another one or a remote site serves a route's address."""
        self._now_us = now_us
        self.resolve(route)
        return bool(route.loads or route.peers or route.sites)

    def resolve(self, route: Route) -> None:
        """Find the loads that serve this route's address; cached until the interest changes."""
        if route.version != self._interest.version:
            route.targets.clear()
            address = (route.name, route.key_id, route.kind)
            route.loads, route.peers = (), ()
            if route.member:
                self._resolve_member(route)
                return
            if self._sites.is_for_this_site(route):
                route.loads = self._interest.loads(*address)
                if route.neighbor.hop_class != HopClass.MESH:
                    route.peers = self._interest.peer_loads(*address)
            route.sites = self._sites.loads(route)
            route.version = self._interest.version

    def _resolve_member(self, route: Route) -> None:
        """Find the load of the one member that a route's calls are for."""
        address = (route.name, route.key_id, route.member)
        route.version = self._interest.version
        if not route.relay_id:
            member = self._interest.member(*address)
            load = None if member is None else member.load(route.kind)
            route.loads = () if load is None else (load,)
        elif (link := self._mesh.links.get(route.relay_id)) is not None:
            load = link.member_load(route.kind, *address)
            route.peers = () if load is None else (load,)

    def _next_hop(self, neighbor: Neighbor) -> int:
        self._last_hop = hop = (self._last_hop + 1) & _NUMBERS
        return hop | neighbor.own_hop

    def _dispatch_to_best(
        self, dispatched: Dispatched, buf: memoryview, start: int, end: int
    ) -> bool:
        """Dispatch a call to the best member, else to a relay that has one, else to a remote site.

        Returns False if none of them has room. While a member in this site has room, even in a queue, calls
        stay here: a remote site is tens of milliseconds away.
        """
        route = dispatched.route
        self.resolve(route)
        dispatched.attempts += 1
        route.turn += 1
        load = None
        if dispatched.attempts <= MAX_ATTEMPTS:
            load = pick(route.loads, route.peers, dispatched.size, dispatched.tried, route.turn)
        if load is None and dispatched.attempts <= 2 * MAX_ATTEMPTS:
            load = next((far for far in route.sites if far not in dispatched.tried), None)
        if load is None:
            return False
        if not self.send_to(dispatched, load, buf, start, end):
            return self._dispatch_to_another(dispatched, load, buf, start, end)
        self.accounts.out += 1
        return True

    def _dispatch_to_another(
        self, dispatched: Dispatched, load: Load, buf: memoryview, start: int, end: int
    ) -> bool:
        """Dispatch a call for which the connection of the best member, `load`, is full.

        A connection that is full for one member is full for all of its members, so each one is asked once.
        """
        route = dispatched.route
        every = {one.neighbor for one in (*route.loads, *route.peers, *route.sites)}
        full = {neighbor for neighbor in every if not neighbor.port.has_room(end - start)}
        loads, peers, sites = route.loads, route.peers, route.sites
        for _ in range(MAX_FULL):
            full.add(load.neighbor)
            loads = [one for one in loads if one.neighbor not in full]
            peers = [one for one in peers if one.neighbor not in full]
            sites = [one for one in sites if one.neighbor not in full]
            another = None
            if dispatched.attempts <= MAX_ATTEMPTS:
                another = pick(loads, peers, dispatched.size, dispatched.tried, route.turn)
            if another is None and dispatched.attempts <= 2 * MAX_ATTEMPTS:
                another = next((far for far in sites if far not in dispatched.tried), None)
            if another is None:
                return False
            if self.send_to(dispatched, another, buf, start, end):
                self.accounts.out += 1
                return True
            load = another
        return False

    def send_to(
        self, dispatched: Dispatched, load: Load, buf: memoryview, start: int, end: int
    ) -> bool:
        neighbor = load.neighbor
        if not neighbor.port.has_room(end - start):
            return False
        route = dispatched.route
        target = route.target(load.site_route or neighbor, load.serial or route.member)
        if load.member is not None:
            count = dispatched.count
            held = len(neighbor.in_flight) + count
            if held > neighbor.may_hold and not self._may_hold_here(neighbor, count):
                return False
        elif not self._may_hold_more(target, dispatched):
            return False
        hop = (self._last_hop + 1) & _NUMBERS | neighbor.own_hop
        self._last_hop += dispatched.count
        number = target.number(self._interest.next_tick())
        REWRITE.pack_into(buf, start + ALIAS_AT, number, hop)
        if not neighbor.port.forward(buf, start, end, dispatched.count):
            if dispatched.share is not None:
                dispatched.share.remove(dispatched.count)
                dispatched.share = None
            return False
        dispatched.load = load
        count = dispatched.count
        load.taken(dispatched.size, self._now_us, count)
        if route.demand is not None:
            route.demand.messages += count
        kind = load.kind
        if isinstance(dispatched, DispatchedRun):
            dispatched.first_hop = hop
            hops = range(hop, hop + count)
            neighbor.in_flight.update(dict.fromkeys(hops, dispatched))
            if kind == PUSH:
                load.pushes.update(zip(hops, hops, strict=True))
            return True
        neighbor.in_flight[hop] = dispatched
        if kind == PUSH:
            load.pushes[hop] = hop
        elif kind == TUNNEL_OPEN:
            self.tunnels.opening(dispatched, neighbor, hop)
        return True

    def _crowded(self, neighbor: Neighbor) -> str:
        """Return why a neighbor may not have another unanswered call, or an empty text."""
        limit, now_us = self.limit, self._now_us
        if neighbor.pending >= limit and not self._overdue.make_room_for(neighbor, limit, now_us):
            return f"{limit} calls of this connection are unanswered, which is the limit; wait for some to end"
        if self.callers.more(neighbor, limit, now_us):
            return ""
        if self._overdue.make_room_for(neighbor, neighbor.may_call, now_us):
            return ""
        return self._quotas.calls.full(neighbor.user, "unanswered calls")

    def _may_hold_here(self, neighbor: Neighbor, count: int) -> bool:
        """Return whether the members of a session may have `count` more calls in flight."""
        return self.members.more(neighbor, MAX_IN_FLIGHT, self._now_us, count)

    def _may_hold_more(self, target: Target, dispatched: Dispatched) -> bool:
        """Count a call in its sender's share of a link or WAN connection; False if the share is used up.

        A peer that finishes nothing must not fill our tables, and one session must not take all slots at
        the peer.
        """
        neighbor, limit, share = target.neighbor, self._limits.pending, target.share
        count = dispatched.count
        if len(neighbor.in_flight) + count <= limit:
            # This does what `hold` does while there is room for everybody, without its function calls.
            if share is not None and share.held + count <= limit >> 1:
                whole = share.whole
                if whole.held + count <= limit - (limit >> 2):
                    share.held += count
                    whole.held += count
                    dispatched.share = share
                    return True
            if hold(target, dispatched, limit):
                return True
        if not self._overdue.make_room_at(neighbor, self._now_us):
            return False
        return len(neighbor.in_flight) + count <= limit and hold(target, dispatched, limit)

    # -- nobody serves it for now ---------------------------------------------------------------------------

    def _park_or_end(
        self, origin: Neighbor, route: Route, hop: int, deadline_us: int, buf: memoryview, start: int, end: int
    ) -> None:  # fmt: skip
        """Park a call that is not served if a relay or site that serves it may come back; else end it."""
        if not isinstance(origin, Session) or not self.unserved.may_be_served(route, self._now_us):
            self._return_unserved(Dispatched(origin, hop, route, end - start), buf, start, end)
            return
        entry = Parked(origin, route, hop, deadline_us, bytes(buf[start:end]))
        if error := self.parking.add(entry, self._now_us):
            self.accounts.refused += 1
            origin.control(Fail(hop, Cause.OVERLOADED, error))

    def _prospect(self, route: Route) -> Prospect:
        self.resolve(route)
        if route.loads or route.peers or route.sites:
            return Prospect.SERVED
        return Prospect.HOPED if self.unserved.may_be_served(route, self._now_us) else Prospect.NONE

    def _unparked(self, entry: Parked, *, served: bool) -> None:
        """Dispatch a call that waited to a member that serves it now, or end it."""
        origin, route, hop = entry.origin, entry.route, entry.hop
        frame = memoryview(bytearray(entry.frame))
        self.resolve(route)
        if served:
            self._start(origin, route, hop, entry.deadline_us, frame, 0, len(frame))
        else:
            self._return_unserved(Dispatched(origin, hop, route, len(frame)), frame, 0, len(frame))

    @property
    def deadline_us(self) -> int:
        """Time at which `expire` is due."""
        due_us = min(self._overdue.due_us, self.leaving.due_us)
        return min(self.parking.deadline_us, due_us) if self.parking.waiting.total else due_us

    def expire(self, now_us: int) -> None:
        """End calls whose time is over, and dispatch parked calls that are served again."""
        self._now_us = now_us
        if now_us >= self._overdue.due_us:
            self._overdue.expire(now_us)
        if self.parking.waiting:
            self.parking.expire(now_us)
        if now_us >= self.leaving.due_us:
            self.leaving.expire(now_us)

    # -- refused, and ended ----------------------------------------------------------------------------------

    def _refused(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, reason: int, hop: int
    ) -> None:
        """Offer a call that its receiver refused to another member, within the deadline."""
        dispatched = neighbor.in_flight.get(hop)
        if dispatched is None:
            if not neighbor.greeted:
                raise PeerProtocolError("data frame before HELLO")
            self.accounts.in_ += 1
            self.accounts.drop("late answer", 1)
            return
        if dispatched.load.kind != buf[start + KIND_AT] or dispatched.length(hop) != end - start:
            raise PeerProtocolError("a refused call was returned with another kind or length")
        self.accounts.in_ += 1
        del neighbor.in_flight[hop]
        if dispatched.survey is not None:
            self.accounts.refused += 1
            self.surveys.finish_part(dispatched, self.surveys.unanswered(dispatched))
            return
        given_up, told = dispatched.given_up, was_told(dispatched, hop)
        self.release(dispatched, hop)
        if dispatched.load.kind == Kind.TUNNEL_OPEN:
            self.tunnels.refused(dispatched, neighbor, hop)
        if dispatched.origin.closed or given_up:
            self.accounts.drop("late answer", 1)
            return
        dispatched = dispatched.single(hop)
        dispatched.tried.append(dispatched.load)
        buf[start + FLAGS_AT] = 0
        # It came back over a link with the deadline by the other relay's clock.
        DEADLINE.pack_into(buf, start + DEADLINE_AT, dispatched.deadline_us)
        if reason in (Refusal.FULL, Refusal.LEAVING):
            deadline_us, route = dispatched.deadline_us, dispatched.route
            in_time = not deadline_us or deadline_us > self._now_us
            in_time = in_time and not told
            if in_time and self._dispatch_to_best(dispatched, buf, start, end):
                dispatched.waits = True
                dispatched.origin.pending += 1
            elif in_time and not route.loads and not route.peers and not route.sites:
                self._park_or_end(
                    dispatched.origin, route, dispatched.hop, deadline_us, buf, start, end
                )
            else:
                self._return_unserved(dispatched, buf, start, end, reason)
        elif dispatched.origin.hop_class:
            self._bounce(dispatched, buf, start, end, reason)
        elif reason == Refusal.EXPIRED:
            self.accounts.expired += 1
            detail = "the deadline had passed when it reached the member"
            dispatched.origin.control(Fail(dispatched.hop, Cause.EXPIRED, detail))
        else:
            self.accounts.refused += 1
            ran = reason in (Refusal.REPLAYED, Refusal.STALE)
            detail = _DETAILS.get(reason, UNREADABLE)
            dispatched.origin.control(Fail(dispatched.hop, Cause.REFUSED, detail, ran))

    def _return_unserved(
        self,
        dispatched: Dispatched,
        buf: memoryview,
        start: int,
        end: int,
        reason: int = Refusal.FULL,
    ) -> None:
        """End a call that no member can take: report it to the caller, or return it to the relay that sent it."""
        route = dispatched.route
        if route.member:
            self.accounts.refused += 1
            cause, detail = self.unserved.member_failure(route, leaving=reason == Refusal.LEAVING)
            dispatched.origin.control(Fail(dispatched.hop, cause, detail))
            return
        served = bool(route.loads or route.peers or route.sites)
        if dispatched.origin.hop_class:
            self._bounce(dispatched, buf, start, end, reason if served else Refusal.LEAVING)
            return
        self.accounts.refused += 1
        if served:
            servers = (("local member", route.loads), ("other relay", route.peers), ("remote site", route.sites))  # fmt: skip
            counts = ", ".join(_counted(loads, what) for what, loads in servers if loads)
            detail = f"all members are at capacity or refused it: {counts}"
            far = (load.neighbor for load in (*route.peers, *route.sites))
            if any(is_over(neighbor, dispatched.origin, self._limits.pending) for neighbor in far):
                detail += "; your share of the calls in flight to another relay or site is used up, try again later"
            dispatched.origin.control(Fail(dispatched.hop, Cause.OVERLOADED, detail))
            return
        seen_us = self.unserved.seen_us(route, self._now_us)
        seen_ms = UNSET if seen_us is None else seen_us // 1000
        detail = self.unserved.failure_text(route, self._now_us)
        dispatched.origin.control(Fail(dispatched.hop, Cause.NO_MEMBERS, detail, seen_ms=seen_ms))

    def _bounce(
        self, dispatched: Dispatched, buf: memoryview, start: int, end: int, reason: int
    ) -> None:
        """Return a call over the link that it came by, because the caller's relay may know another member."""
        port = dispatched.origin.port
        if dispatched.route.barred:
            self.accounts.refused += 1
            dispatched.origin.control(Fail(dispatched.hop, Cause.REFUSED, dispatched.route.barred))
            return
        if dispatched.route.kind == Kind.SURVEY:
            self.accounts.refused += 1
            dispatched.origin.control(Fail(dispatched.hop, Cause.NO_MEMBERS))
            return
        buf[start + FLAGS_AT] = FLAG_REFUSED | reason << 4
        REWRITE.pack_into(buf, start + ALIAS_AT, REFUSED_ALIAS, dispatched.hop)
        if port.has_room(end - start) and port.forward(buf, start, end, 1):
            self.accounts.out += 1
        else:
            self.accounts.refused += 1
            dispatched.origin.control(
                Fail(dispatched.hop, Cause.OVERLOADED, "the send queue of the link is full")
            )

    def release(self, dispatched: Dispatched, hop: int) -> None:
        """Remove one call from its load, because its member or link no longer has it."""
        dispatched.load.pushes.pop(hop, None)
        self.ended(dispatched)

    def ended(self, dispatched: Dispatched, count: int = 1) -> None:
        """Subtract `count` calls of `dispatched` from its load, demand and share, and from the origin's
        unanswered calls.
        """
        load = dispatched.load
        load.ended(dispatched.size, self._now_us, count)
        demand = dispatched.route.demand
        if demand is not None and dispatched.survey is None:
            demand.messages -= count
        member = load.member
        if member is not None and member.left:
            member.forget_if_done()
        share = dispatched.share
        if share is not None:
            if dispatched.left == count:
                dispatched.share = None
            share.held -= count
            whole = share.whole
            whole.held -= count
            if not whole.sessions:
                whole.forget_if_done()
        if dispatched.survey is None:
            dispatched.ended(count)

    # -- losses ----------------------------------------------------------------------------------------------

    def neighbor_down(self, neighbor: Neighbor, now_us: int) -> Iterator[int]:
        """Report the calls in flight at a lost connection as lost, end its tunnels, and notify receivers of
        its own calls; all of it in parts.
        """
        yield from self.tunnels.neighbor_down(neighbor)
        for far in (*self._mesh.links.values(), *self._sites.wans.values()):
            share = far.shares.pop(neighbor.number, None)
            if share is not None:
                share.close()
        lost_calls, neighbor.in_flight = neighbor.in_flight, {}
        what = _LOST[neighbor.hop_class]
        for hop in list(lost_calls):
            yield 1
            dispatched = lost_calls.pop(hop)
            if dispatched.survey is not None:
                self.surveys.finish_part(dispatched, self.surveys.unanswered(dispatched))
                continue
            given_up = dispatched.given_up
            self.release(dispatched, hop)
            if not dispatched.origin.closed and not given_up:
                dispatched.origin.control(
                    Fail(dispatched.origin_hop(hop), Cause.LOST, f"{what} was lost", True)
                )
        self.leaving.neighbor_down(neighbor, max(now_us, self._now_us))


def _counted(loads: Sequence[Load], what: str) -> str:
    concurrency = sum(load.concurrency for load in loads)
    return f"{len(loads)} {what}{'s' * (len(loads) > 1)} (concurrency {concurrency})"


COUNTED: Final = (HopClass.MESH, HopClass.FROM_WAN)
"""Hop classes of calls over links to members of this relay. The sending relay gets load reports for these."""
_LOST: Final[dict[int, str]] = {
    HopClass.LOCAL: "the member's session",
    HopClass.MESH: "the link to the member's relay",
    HopClass.TO_WAN: "the connection to the member's site",
}
_DETAILS: Final[dict[int, str]] = {
    Refusal.STALE: STALE,
    Refusal.REPLAYED: "the member has already received this message",
    Refusal.CLOCK: "the sender's and the member's clocks are too far apart; synchronize them",
}
