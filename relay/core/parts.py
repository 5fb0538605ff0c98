"""The parts of one relay's router, and the life of its members, aliases and connections. `Router` feeds it frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from msgspec import UnsetType

from iris.errors import InvalidName, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.kinds import (
    DECLARED_KINDS,
    HERE,
    MEMBER_KINDS,
    NEVER_US,
    HopClass,
    Kind,
)
from iris.wire.names import check_cluster, check_topic
from relay.core.audience import MAX_ASKED, Audiences
from relay.core.buckets import Rate
from relay.core.calls import Calls
from relay.core.casts import Casts
from relay.core.documents import Part, joined
from relay.core.draining import Draining
from relay.core.endings import Endings
from relay.core.federation import Federation
from relay.core.interest import MAX_SHOWN, Interest
from relay.core.limits import Limits
from relay.core.link import Link
from relay.core.mesh import Mesh
from relay.core.neighbor import Neighbor, Route
from relay.core.parking import PARKED_BYTES
from relay.core.policy import Policy
from relay.core.ports import Accounts
from relay.core.quotas import Quotas
from relay.core.rates import Rates
from relay.core.reach import Reach
from relay.core.session import Member, Session
from relay.core.settling import Settling
from relay.core.site_routes import Wan
from relay.core.sites import Sites
from relay.core.slow import SlowReceivers
from relay.core.stores import StoreWatch
from relay.core.tickets import Admission
from relay.core.troubles import Troubles

SPARSE_ALIASES: Final = 1024
"""Alias numbers of a session that need not follow others that it has declared."""
MAX_GROUP_BYTES: Final = 64 << 20
"""Bytes of queue group names in the aliases of one link or WAN connection.

Names of an alias over it are counted and dropped.
"""

MAX_LEAVING: Final = 1024
"""Subscriptions in groups that a session leaves at once; of further ones it gets nothing more that is on its way."""
MEMBER_WORK: Final = 8
"""Work of the end of a member, besides 1 for each of its keys: see `relay.core.endings`."""
SCANNED: Final = 1024
"""Aliases, subscriptions or keys of members that RELEASE looks at before others get their turn."""
RELEASE_WORK: Final = 16
"""The end of an alias, and of each alias that it had at a receiver, counts as this many."""


def node_count(pattern: str, key_ids: Sequence[bytes]) -> int:
    """Return the largest number of topic tree nodes that a subscription may need."""
    return len(set(key_ids)) * (pattern.count(".") + 1)


class Parts:
    """The parts of one relay's router, and the state that they share."""

    def __init__(
        self, relay_id: bytes, *, message_limit: int, limits: Limits | None = None,
        site: str = "", label: str = "", policy: Policy | None = None, wall: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """`wall` returns the wall clock in µs since 1970. Other relays and people see it, and it decides nothing."""
        self._wall = wall
        self.relay_id = relay_id
        self.label = label
        """The host's name, for people."""
        self.now_us = 0
        """The current time in µs, set by the driver."""
        self.accounts = Accounts()
        self.interest = Interest()
        self.sessions: dict[int, Session] = {}
        """Number -> session."""
        self.neighbors: dict[int, Neighbor] = {}
        """Number -> session, link or WAN connection."""
        self.ending: dict[int, Session] = {}
        """Number -> closed session of which something is left; it gets nothing more."""
        self.endings = Endings()
        self._pulsing: dict[int, Neighbor] = {}
        """Number -> neighbor on another host, which gets beats."""
        self.limits = limits or Limits()
        self.quotas = Quotas(
            members=self.limits.all_members, subscriptions=self.limits.all_subscriptions,
            watches=self.limits.all_watches, parked_bytes=PARKED_BYTES, aliases=self.limits.all_aliases,
            calls=self.limits.all_pending, in_flight=self.limits.all_pending,
            keys=self.limits.all_keys, questions=MAX_ASKED,
        )  # fmt: skip
        self.rates = Rates(
            self.accounts,
            Rate(*self.limits.session_rate),
            [(pattern, Rate(*quota)) for pattern, quota in self.limits.address_rates],
        )
        self.message_limit = message_limit
        self.pulse_us = NEVER_US
        """When the next beat is due."""
        self.draining = False
        self.alone = True
        """No other relay or site was ever connected, so nobody here can have missed a cast from elsewhere."""
        self.admission: Admission | None = None
        """The check of tickets of sessions over WebSocket; None: they show none."""
        self.status_extra: Callable[[], dict[str, object]] = dict
        self._next_number = 1
        self.slow = SlowReceivers(lambda: self.now_us)
        self.troubles = Troubles(lambda: self.now_us)
        self.sites = Sites(site, policy or Policy())
        self.wans = self.sites.wans
        self.drains = Draining(self.leave_asked, self.goodbye, self._handlers_run)
        self._casts = casts = Casts(
            self.accounts, self.interest, self.sites, self.slow, lambda: self.now_us, self.drains.has_acknowledged,
            self._last_received_us, lambda: self.mesh.settling(self.now_us),
        )  # fmt: skip
        self.credits = casts.credits
        self._reach = Reach(self.interest, self.sites, casts, self.number)
        self.mesh = Mesh(relay_id, label, self.interest, casts, self._reach, self._members)
        self.links = self.mesh.links
        self.advertiser = self.mesh.advertiser
        self.peer_interest = self.mesh.peer_interest
        self.federation = Federation(
            self.interest, self.sites, self._reach, self.advertiser, casts, self.number
        )
        self._calls = Calls(
            relay_id,
            self.accounts,
            self.interest,
            self.sites,
            self.mesh,
            self.limits,
            self.quotas,
            self.neighbors,
        )
        self.direct = self._calls.tunnels.direct
        self.stores = StoreWatch(self.advertiser)
        self.settling = Settling(self.links, self.advertiser, lambda: self.now_us)
        self.audiences = Audiences(
            label, self.interest, self.slow, self.quotas.questions, lambda: self.now_us
        )

    @property
    def wall_us(self) -> int | None:
        """The wall clock in µs since 1970; None if this router was given none."""
        return None if self._wall is None else self._wall()

    def number(self) -> int:
        """Return the number of the next neighbor or site route."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def site(self) -> str:
        """The name of our site; empty while it is unknown."""
        return self.sites.site

    @property
    def fresh(self) -> bool:
        """Whether no cast was routed yet, and none elsewhere that would have come here."""
        return self.alone and not self._casts.begun

    # -- connections -----------------------------------------------------------------------------------------

    def watch_pulse(self, neighbor: Neighbor) -> None:
        """Send beats to a neighbor on another host from now on, and close it when it is silent."""
        self._pulsing[neighbor.number] = neighbor
        self.pulse_us = 0

    def session_down(self, session: Session) -> None:
        """Remove a closed session. Idempotent."""
        if session.closed:
            return
        forgotten = session.forget()
        if self.admission is not None:
            self.admission.forget(session)
        del self.sessions[session.number], self.neighbors[session.number]
        self._pulsing.pop(session.number, None)
        if session.members or session.subscriptions:
            # Routes are resolved again without it, and it gets nothing more.
            self.interest.version += 1
        self.ending[session.number] = session
        self.take_apart(self._session_parts(session, forgotten))
        self.drains.forget(session, self.now_us)
        self.stores.session_ended(session, self.now_us)

    def _session_parts(self, session: Session, forgotten: Iterator[int]) -> Iterator[int]:
        """Take apart what a closed session held. What others wait for comes first."""
        members = [*reversed(session.members.values())]
        while members:  # what is freed is freed in its part, and not all at the end
            member = members.pop()
            if not member.left:
                self.leave(member)
                yield MEMBER_WORK + len(member.key_ids)
        yield from forgotten
        if session.proofs:
            self.quotas.keys.give(session.user, session.proofs)
            session.proofs = 0
        if session.declared:
            self.quotas.aliases.give(session.user, session.declared)
            session.declared = 0
        yield from self._calls.neighbor_down(session, self.now_us)
        while session.subscriptions:
            (pattern, group), key_ids = session.subscriptions.popitem()
            self.interest.unsubscribe(session, pattern, group, key_ids)
            self.advertiser.count_subscription(
                pattern, key_ids, group, session.user, -1, self.now_us
            )
            nodes = node_count(pattern, key_ids)
            session.topic_nodes -= nodes
            self.quotas.subscriptions.give(session.user, nodes)
            yield nodes
        while session.watches:
            _, watch = session.watches.popitem()
            self.interest.watches.remove(watch)
            self.quotas.watches.give(session.user, len(watch.key_ids))
            yield len(watch.key_ids)
        while session.staying:
            session.staying.pop()()
            yield 1
        yield from self.credits.forget(session)
        self._calls.callers.ended(session)
        self._calls.members.ended(session)
        session.let_go()
        del self.ending[session.number]

    def end_subscription(
        self, session: Session, pattern: str, group: str, done: Callable[[], None], *, stay: bool = False
    ) -> None:  # fmt: skip
        """End a subscription of a session that is connected, and call `done` when nothing for it alone can follow.

        The last one here of a queue group gets what other relays have sent it until then; with `stay` it gets what
        nobody else here can take until the session ends.
        """
        key_ids = session.subscriptions.pop((pattern, group))
        self.interest.unsubscribe(session, pattern, group, key_ids)
        room = bool(group) and session.leaving < MAX_LEAVING
        stay = stay and room
        if (
            not stay
        ):  # else other relays go on sending, because another session will be there in a moment
            self._unadvertise(session, pattern, group, key_ids)
        leavers = self._casts.leavers
        count = self.advertiser.counted
        last = [key_id for key_id in key_ids if stay or not count((pattern, key_id, group))]

        def ended(done: Callable[[], None] = done) -> None:
            if waits:
                session.leaving -= 1
                leavers.remove(session, pattern, group, last)
                self.interest.version += 1
            if group and not session.closed:
                session.groups[group] -= 1
                if not session.groups[group]:
                    del session.groups[group]
            if stay:
                self._unadvertise(session, pattern, group, key_ids)
            nodes = node_count(pattern, key_ids)
            session.topic_nodes -= nodes
            self.quotas.subscriptions.give(session.user, nodes)
            done()

        waits = stay or (room and bool(last) and not self.alone)
        if not waits:
            ended()
            return
        session.leaving += 1
        leavers.add(session, pattern, group, last)
        if stay:
            session.staying.append(lambda: ended(lambda: None))
            done()
        else:
            self.known(ended)

    def _unadvertise(
        self, session: Session, pattern: str, group: str, key_ids: tuple[bytes, ...]
    ) -> None:
        self.advertiser.count_subscription(pattern, key_ids, group, session.user, -1, self.now_us)

    def known(self, done: Callable[[], None]) -> None:
        """Call `done` once nobody sends anything by what was advertised before, but for remote sites."""
        (self.drains if self.drains.begun else self.settling).after(done)

    def take_apart(self, work: Iterator[int]) -> None:
        """Take apart what a closed connection held, in parts.

        While this relay stops, all of it is done at once, because what was cut is counted.
        """
        if self.draining:
            for _ in work:
                pass
        else:
            self.endings.begin(work, self.now_us)

    def _last_received_us(self) -> int:
        """Return when something was received last over the link or WAN connection that has been silent for longest."""
        far = (n.pulse.last_us for n in self._pulsing.values() if n.hop_class and n.pulse)
        return min(far, default=self.now_us)

    def link_down(self, link: Link) -> None:
        """Remove a closed link. Idempotent."""
        if link.closed:
            return
        self.mesh.link_down(link, self.now_us)
        forgotten = link.forget()
        del self.neighbors[link.number], self._pulsing[link.number]
        self.take_apart(self._connection_parts(link, forgotten))
        self.drains.forget(link, self.now_us)
        self.settling.forget(link)
        self.audiences.forget(link)

    def wan_down(self, wan: Wan) -> None:
        """Remove a closed WAN connection. Idempotent."""
        if wan.closed:
            return
        self.federation.wan_down(wan, self.now_us, silent=self.drains.has_acknowledged(wan))
        forgotten = wan.forget()
        del self.neighbors[wan.number], self._pulsing[wan.number]
        self.take_apart(self._connection_parts(wan, forgotten))
        self.drains.forget(wan, self.now_us)

    def _connection_parts(self, neighbor: Neighbor, forgotten: Iterator[int]) -> Iterator[int]:
        """Take apart the calls and credits of a closed link or WAN connection."""
        yield from forgotten
        yield from self._calls.neighbor_down(neighbor, self.now_us)
        yield from self.credits.forget(neighbor)
        neighbor.let_go()

    def goodbye(self, session: Session, *, complete: bool = False) -> None:
        """Send BYE to a session, as an answer or first, and close it after that."""
        if session.gaps:
            session.send_gaps()
        session.port.control(encode_control(frames.Bye(complete=complete)))
        session.port.finish()
        busy = session.in_flight or session.pending or session.tunnels
        before = self.under_way if busy and self.draining else (0, 0)
        self.session_down(session)
        if before != (0, 0):
            self.drains.cut(before, self.under_way)

    # -- members ---------------------------------------------------------------------------------------------

    def leave_asked(self, session: Session, leave: frames.Leave) -> None:
        """Handle LEAVE: a session withdraws one of its members."""
        member = session.members.get(leave.member)
        if member is None or member.left:
            session.control(
                frames.Ack(leave.id, f"this session does not have member {leave.member}")
            )
            return
        if self.drains.hold(session, leave, self.now_us):
            return  # who does not know of the drain, or a handler that runs, may still call it
        self.leave(member)
        session.control(frames.Ack(leave.id))

    def _handlers_run(self) -> bool:
        """Whether a call or tunnel is in flight at a member of this relay."""
        return any(session.in_flight and not session.stores for session in self.sessions.values())

    def leave(self, member: Member) -> None:
        """Remove a member that left itself or with its session."""
        member.left = True
        member.session.keyed -= len(member.key_ids)
        self.quotas.members.give(member.session.user, len(member.key_ids))
        self.interest.leave(member)
        if member.listed:
            where = self.label or "this relay"
            for key_id in member.key_ids:
                self.interest.seen.left((member.name, key_id), member.loads, where, self.now_us)
        self.advertiser.left(member, self.now_us)
        member.forget_if_done()
        if member.listed:
            self.interest.watches.left(member.name, member.key_ids, self.member_id(member))

    def member_id(self, member: Member) -> str:
        """Return the id by which users know a member: relay id (hex), '.', serial. It is never reused."""
        return f"{self.relay_id.hex()}.{member.serial}"

    # -- aliases ---------------------------------------------------------------------------------------------

    def declare(self, neighbor: Neighbor, declared: frames.Declare) -> Route:
        """Store a declared alias and return its route; raises PeerProtocolError."""
        self.check_alias(neighbor, declared)
        if declared.kind in (Kind.PUBLISH, Kind.BROADCAST):
            neighbor.casts = True
        routes = neighbor.routes
        if declared.alias >= len(routes):
            size = min(self.limits.aliases, max(16, 2 * declared.alias + 1))
            routes.extend([None] * (size - len(routes)))
        before = routes[declared.alias]
        if before is not None:
            before.release()
            neighbor.group_bytes -= sum(map(len, before.only_groups))
        else:
            neighbor.declared += 1
            if not neighbor.hop_class:
                self.quotas.aliases.take(neighbor.user)
        route = routes[declared.alias] = Route(neighbor, declared, self.neighbors)
        if declared.groups and neighbor.hop_class:  # a session's casts go where its relay decides
            size = sum(map(len, declared.groups))
            if neighbor.group_bytes + size <= MAX_GROUP_BYTES:
                neighbor.group_bytes += size
                route.only_groups = tuple(declared.groups)
            else:
                neighbor.dropped_entries += len(declared.groups)
        if declared.member:
            self._address_member(route, declared)
        return route

    def check_alias(self, neighbor: Neighbor, declared: frames.Declare) -> None:
        """Raise PeerProtocolError if a neighbor may not declare such an alias."""
        limit = self.limits.aliases
        if isinstance(neighbor, Session):
            limit = self.limits.aliases_of(web=neighbor.web)
        if declared.kind not in DECLARED_KINDS:
            raise PeerProtocolError(
                f"DECLARE of an alias for frames of kind 0x{declared.kind:02x}, which have none"
            )
        if declared.alias >= limit:
            raise PeerProtocolError(f"alias {declared.alias} is over the limit of {limit}")
        try:
            (check_topic if declared.kind == Kind.PUBLISH else check_cluster)(declared.name)
        except InvalidName as err:
            raise PeerProtocolError(str(err)) from err

    def alias_error(self, session: Session, alias: int) -> str:
        """Return why a session may not have one more alias, or an empty text. A refusal is counted."""
        routes, table = session.routes, self.quotas.aliases
        if alias < len(routes):
            if routes[alias] is not None:
                return ""  # its number is used for something else, which takes no more room
        elif alias >= SPARSE_ALIASES + 4 * session.declared:
            table.refused += 1
            return (
                f"alias {alias} is far beyond the {session.declared} that this session has, and its number would take "
                "room for those between them; use rising numbers"
            )
        return "" if table.has_room(session.user) else table.full(session.user, "aliases")

    def forget_alias(self, session: Session, alias: int) -> int:
        """End an alias of a session; return how many aliases that frees at others."""
        route = session.routes[alias]
        if route is None:
            return 0
        session.routes[alias] = None
        session.declared -= 1
        self.quotas.aliases.give(session.user)
        return route.release()

    def forget_routes(self, session: Session, key_id: bytes) -> Iterator[None]:
        """End the aliases that a session declared under a key, in parts."""
        work = 0
        for alias, route in enumerate(session.routes):
            work += 1
            if route is not None and route.key_id == key_id:
                work += RELEASE_WORK * (1 + self.forget_alias(session, alias))
            if work >= SCANNED:
                work = 0
                yield

    def _address_member(self, route: Route, declared: frames.Declare) -> None:
        """Let a route lead to the one member that its DECLARE names. Raises PeerProtocolError."""
        if route.neighbor.hop_class:
            if route.hop_class == HopClass.MESH and declared.kind in MEMBER_KINDS:
                route.member = declared.member
            return
        if isinstance(declared.relay, UnsetType):
            return  # the number alone has no meaning in a session
        if declared.kind not in MEMBER_KINDS:
            kind = Kind(declared.kind).name
            raise PeerProtocolError(f"{kind} cannot be sent to one member; only calls can")
        if route.site not in ("", HERE):
            raise PeerProtocolError("a call to one member cannot be sent to another site")
        route.member = declared.member
        route.relay_id = declared.relay if declared.relay != self.relay_id else b""

    # -- reports ---------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> tuple[int, int]:
        """(calls that have not ended, each survey counted once per receiver; tunnels)."""
        neighbors = self.neighbors.values()
        dispatched = sum(len(neighbor.in_flight) for neighbor in neighbors)
        tunnels = sum(len(neighbor.tunnels) for neighbor in neighbors) // 2
        return dispatched - tunnels + len(self._calls.parking.waiting), tunnels

    @property
    def held_messages(self) -> int:
        """Messages that ports accepted and have not written."""
        waiting = sum(neighbor.port.held_messages for neighbor in self.neighbors.values())
        return waiting + len(self._calls.parking.waiting)

    def _members(self) -> Iterator[Member]:
        for session in (*self.sessions.values(), *self.ending.values()):
            yield from session.members.values()

    def status(self) -> Part:
        """Return tables and counters, ready for JSON."""
        return joined(self.status_in_parts())

    def status_in_parts(self) -> Iterator[Part]:
        """Yield tables and counters, ready for JSON. Counters are those of one moment."""
        yield {
            "relay": self.relay_id.hex(),
            "host": self.label,
            "site": self.site,
            "draining": self.draining,
            "sessions": [],
            "clusters": {},
            "other_keys": [],
        }
        for session in list(self.sessions.values()):
            yield {
                "sessions": [
                    {
                        "session": session.number,
                        "label": session.label,
                        "pid": session.pid,
                        "user": session.user,
                        "members": len(session.members),
                        "subscriptions": len(session.subscriptions),
                        "running": len(session.in_flight),
                        "waiting": session.pending,
                        "tunnels": len(session.tunnels),
                        "held": session.port.held_messages,
                        "keys": session.shown_keys,
                    }
                ]
            }
        for name, counts in self.interest.cluster_counts():
            yield {"clusters": {name: counts}}
        for shown in self._casts.other_keys.shown():
            yield {"other_keys": [shown]}
        yield from self.mesh.status(self.now_us, self.wall_us)
        yield {
            "clusters_not_shown": max(0, self.interest.names - MAX_SHOWN),
            "accounts": self.accounts.report(self.held_messages),
            **self.federation.status(self.now_us, self.wall_us),
            "slow": self.slow.report(self.now_us),
            "troubles": self.troubles.status(self.now_us),
            "parked": len(self._calls.parking.waiting),
            "publishers_waiting": self.credits.waiting,
            "publishers_unlimited": self.credits.unlimited,
            "ending": len(self.ending),
            "quotas": self.quotas.status(),
            "rates": self.rates.status(),
            "direct": self.direct.status(),
            **self.status_extra(),
        }

    def numbers(self, limited: str) -> dict[str, object]:
        """Return the part of the snapshot without names. `limited` says why there is no more.

        It has no "clusters" key, so that nobody who looks for a name takes an empty list for an answer.
        """
        extra = self.status_extra()
        return {
            **{name: extra[name] for name in ("uptime_s",) if name in extra},
            "relay": self.relay_id.hex(),
            "site": self.site,
            "draining": self.draining,
            "limited": limited,
            "sessions": [],
            "links": [],
            "counts": {
                "sessions": len(self.sessions),
                "clusters": self.interest.names,
                "links": len(self.mesh.links),
                "sites": len(self.sites.site_routes),
            },
            "accounts": self.accounts.report(self.held_messages),
            "troubles": {"totals": dict(self.troubles.totals)},
        }
