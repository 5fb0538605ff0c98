"""What is in transit over a connection of the router: routes, calls in flight, tunnels.

These types refer to one another, so they share a module: a neighbor has routes and calls, and each leads to
a neighbor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from iris.core.aliases import Alias, AliasTable
from iris.errors import PeerProtocolError
from iris.wire.codec import BODY_AT, MAX_REPORT_BYTES
from iris.wire.frames import Declare
from iris.wire.kinds import Cause, HopClass
from relay.core.connection import Connection, Delivery
from relay.core.outstanding import Outstanding
from relay.core.ports import GONE, Held, Port
from relay.core.shares import Share, UserShare

MAX_TARGETS: Final = 1024
"""Limit of cached targets per route."""
SPARE_TARGETS: Final = 64
"""Targets of a route among which those at neighbors that have gone are not looked for."""
PART_WORK: Final = 32
"""Work of a part of an unfinished frame, when its sender has ended: see `relay.core.endings`."""
ALIAS_WORK: Final = 2
"""The same of an alias that a route declared to a receiver."""
FORGOTTEN: Final = 64
FORGOTTEN_EACH: Final = 8
"""Aliases declared to a connection that has ended are forgotten so many at a time, and so many are a work of 1."""

Address = tuple[str, bytes]
Topic = tuple[str, bytes, str]
"""(filter, key id, group)."""


class Subscriber(Protocol):
    """A receiver of topics: a session, a relay behind a link, or a remote site."""

    @property
    def number(self) -> int: ...
    @property
    def hop_class(self) -> HopClass: ...
    @property
    def site(self) -> str: ...
    @property
    def neighbor(self) -> Neighbor:
        """The connection over which it is reached."""

    def subscription_count(self, key: Topic) -> int:
        """Return how many subscriptions to (filter, key id, group) it stands for. It must have at least one."""


class RemoteMembers(Protocol):
    """A relay behind a link, or a remote site."""

    def members_behind(self, kind: int, name: str, key_id: bytes) -> list[str]:
        """Return the ids of the members there that serve `kind` at an address, as far as known."""


class LocalMember(Protocol):
    """A member of this relay that has calls in flight."""

    @property
    def serial(self) -> int: ...
    @property
    def left(self) -> bool: ...
    @property
    def cancels(self) -> Collection[int]:
        """Kinds whose handlers end when their caller leaves."""

    def forget_if_done(self) -> None:
        """Forget the member once it has left and finished its calls."""


class CountedFlow(Protocol):
    """The flow of a publisher that waits, as far as counting its frames goes."""

    received: int
    """Bytes received since the publisher's latest WAIT."""
    review_at: int
    """`received` at which the publisher's credit must be reviewed."""

    def ended(self) -> None:
        """End the flow, because the publisher has left or its alias was declared again."""


_UNDECLARED: Final = Alias(-1, 0)


class Target:
    """One delivery set at one neighbor, and the alias that stands for it there, declared with its first message."""

    __slots__ = ("alias", "delivery", "neighbor", "port", "route", "share")

    def __init__(self, route: Route, neighbor: Neighbor, delivery: Delivery) -> None:
        self.route = route
        self.neighbor = neighbor
        self.port = neighbor.port
        self.delivery = delivery
        self.alias = _UNDECLARED
        self.share: Share | None = None
        """The share of the route's neighbor, once needed, if `neighbor` is a link or WAN connection."""

    def number(self, tick: int) -> int:
        """Return the alias number, declared again if it was reused for another delivery."""
        alias = self.alias if self.alias.number >= 0 else self.declare(tick)
        alias.used = tick
        return alias.number

    def declare(self, tick: int) -> Alias:
        """Declare the alias, because it is new or its number was reused, and return it."""
        self.alias = self.neighbor.out_alias(self.delivery, tick)
        self.route.declared(self)
        return self.alias


class Demand:
    """Calls from one link to the members here of one address and kind, and the load of other senders it
    was last sent.
    """

    __slots__ = ("messages", "reported", "used_us")

    def __init__(self) -> None:
        self.messages = 0
        self.reported = 0
        self.used_us = 0
        """When a call came last."""


UNUSED: Final = -1
RELEASED: Final = -2
"""Versions of a route that was not resolved yet (UNUSED) or whose sender has left (RELEASED)."""


class Route:
    """An alias that a neighbor declared: where its frames go. Cached targets hold for one `version` of the interest.

    Frames from a link go to sessions of this relay only, or at a gateway to one remote site. Frames from a
    remote site go to sessions and links. So no frame can loop.
    """

    __slots__ = (
        "_declared",
        "_neighbors",
        "_prune_at",
        "_sweep_at",
        "barred",
        "demand",
        "flow",
        "groups",
        "hop_class",
        "key_id",
        "kind",
        "loads",
        "many",
        "member",
        "mesh_hop_class",
        "name",
        "neighbor",
        "only_groups",
        "parts",
        "peers",
        "plain",
        "relay_id",
        "sender_id",
        "single",
        "site",
        "sites",
        "taken_routes",
        "targets",
        "turn",
        "unheard_us",
        "unheard_version",
        "version",
    )

    def __init__(
        self, neighbor: Neighbor, declared: Declare, neighbors: Mapping[int, Neighbor]
    ) -> None:
        self._neighbors = neighbors
        self.neighbor = neighbor
        self.kind = declared.kind
        self.name = declared.name
        self.key_id = declared.key_id
        self.sender_id = declared.sender_id
        self.plain = declared.plain
        """Over a link: deliver to subscriptions without a group."""
        self.only_groups: tuple[str, ...] = ()
        """Over a link: deliver to subscriptions in these groups."""
        self.hop_class = declared.hop_class
        self.site = declared.site
        """The site that a session's messages are for, or that messages on their way to a site are for."""
        self.member = 0
        """Serial of the one member that its calls are for; 0 if the relays choose one."""
        self.relay_id = b""
        """The relay of that member; empty if it is the relay that has this route."""
        self.barred = ""
        """Why its messages may not cross to or from a remote site; empty if they may."""
        wan = neighbor.hop_class == HopClass.TO_WAN
        self.mesh_hop_class = HopClass.FROM_WAN if wan else HopClass.MESH
        """The hop class over links to relays of this site."""
        self.taken_routes: dict[str, int] = {}
        """Site -> number of the site route that these messages take."""
        self.sites: Sequence[Load] = ()
        """Loads in remote sites, nearest first; all members of a site are one load."""
        self.demand: Demand | None = None
        """Counter of calls that came over a link; None for other routes."""
        self.version = UNUSED
        self.unheard_version = UNUSED
        """Version of the interest at which `relay.core.other_keys` last looked for subscribers under other keys."""
        self.unheard_us = 0
        """When it may look again."""
        self.flow: CountedFlow | None = None
        """The credit of its publisher, if it waits: see `relay.core.credit`."""
        self.parts = 0
        """Number of bundles into which the publisher was notified to cut a turn's messages; 0 before that."""
        self.turn = 0
        """Rises with every choice, so that equal candidates take turns."""
        self.single: Target | None = None
        """The target, when there is exactly one and no group to choose for."""
        self.many: Sequence[Target] = ()
        self.groups: Sequence[tuple[str, Sequence[Subscriber]]] = ()
        self.loads: Sequence[Load] = ()
        self.peers: Sequence[Load] = ()
        self.targets: dict[tuple[int, int, bool, tuple[str, ...]], Target] = {}
        """(number of a neighbor or site route, member, plain, groups) -> target."""
        self._declared: dict[tuple[int, Delivery], None] = {}
        """(neighbor number, delivery) of every alias that was declared for this route."""
        self._prune_at = 64
        self._sweep_at = SPARE_TARGETS

    def _sweep(self) -> None:
        """Drop targets at neighbors that have gone: those of answers belong to callers, which come and go."""
        self.targets = {key: t for key, t in self.targets.items() if not t.neighbor.closed}
        if len(self.targets) >= MAX_TARGETS:
            self.targets.clear()
        self._sweep_at = min(MAX_TARGETS, max(SPARE_TARGETS, 2 * len(self.targets)))

    def declared(self, target: Target) -> None:
        """Note that an alias was declared for a target of this route; it is freed with the route."""
        self._declared[(target.neighbor.number, target.delivery)] = None
        if len(self._declared) >= self._prune_at:
            there = (key for key in self._declared if key[0] in self._neighbors)
            self._declared = dict.fromkeys(there)
            self._prune_at = max(64, 2 * len(self._declared))

    def release(self) -> int:
        """Free the aliases that were declared for this route, because its sender has left or its alias was
        declared again. Return how many they were.
        """
        count = len(self._declared)
        if self.flow is not None:
            self.flow.ended()
            self.flow = None
        for number, delivery in self._declared:
            neighbor = self._neighbors.get(number)
            if neighbor is not None:
                # It may be queued there, and be dropped to make room.
                remember = neighbor.port.held_messages > 0
                neighbor.aliases.free(delivery, remember=remember)
        self._declared = {}
        # A released route may still be referred to (`relay.core.missed_casts`) and must stay small.
        self.targets, self.single, self.many, self.groups = {}, None, (), ()
        self.version = RELEASED
        return count

    def target(
        self, subscriber: Subscriber, member: int, plain: bool = True, groups: tuple[str, ...] = ()
    ) -> Target:
        """Return the target for a delivery at a session or link, or over a route to a site."""
        key = (subscriber.number, member, plain, groups)
        target = self.targets.get(key)
        if target is None:
            if len(self.targets) >= self._sweep_at:
                self._sweep()
            hop_class = (
                self.mesh_hop_class
                if subscriber.hop_class == HopClass.MESH
                else subscriber.hop_class
            )
            address = (self.kind, self.name, self.key_id, self.sender_id)
            delivery = (*address, plain, groups, member, hop_class, subscriber.site)
            target = self.targets[key] = Target(self, subscriber.neighbor, delivery)
        return target


class Survey:
    """A survey in flight: its unanswered parts and its lost members."""

    __slots__ = (
        "_room_bytes", "deadline_us", "hop", "lost", "open", "origin", "until_us", "waits",
    )  # fmt: skip

    def __init__(self, origin: Neighbor, hop: int, deadline_us: int, until_us: int) -> None:
        self.origin = origin
        self.hop = hop
        self.deadline_us = deadline_us
        self.until_us = until_us
        self.open = 0
        self.lost: list[str] = []
        self._room_bytes = MAX_REPORT_BYTES // 2
        self.waits = True
        """The origin may still wait: the survey counts in its `pending`."""

    def lose(self, members: Sequence[str]) -> None:
        """Add members that never answered. Only as many are named as fit in a DONE frame."""
        for member in members:
            size = 3 + (len(member) if member.isascii() else 4 * len(member))
            if size > self._room_bytes:
                return
            self._room_bytes -= size
            self.lost.append(member)

    def give_up(self) -> None:
        """End the origin's wait."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1


class Dispatched:
    """A request, push, survey or tunnel opening in flight at a member or another relay."""

    __slots__ = (
        "attempts", "behind", "deadline_us", "hop", "load", "origin", "roster", "route", "share", "size", "survey", "told", "tried", "until_us", "waits",
    )  # fmt: skip
    count = 1
    """Number of calls in it."""
    left = 1
    """Number of its calls that have not ended."""

    def __init__(self, origin: Neighbor, hop: int, route: Route, size: int) -> None:
        self.origin = origin
        self.hop = hop
        """The origin's hop id."""
        self.route = route
        self.size = size
        self.load: Load
        self.attempts = 0
        self.tried: list[Load] = []
        """Loads that refused it."""
        self.survey: Survey | None = None
        self.told: set[int]
        """Our hop ids of its calls whose holder was told that the caller has left; unset if there are none."""
        self.roster: list[str]
        """The members to which the relay behind a link dispatched this survey."""
        self.behind: Sequence[str]
        """Placeholders for the members of a remote site, until it has named them."""
        self.share: Share | None = None
        """The share that counts it while it is at a link or WAN connection."""
        self.deadline_us = 0
        self.until_us = 0
        """When it is given up, if it has no deadline."""
        self.waits = True
        """The origin may still wait: this counts in its `pending`."""

    @property
    def given_up(self) -> bool:
        """Whether it was reported to the origin as lost, because it had no deadline and did not end.

        Later answers are dropped.
        """
        return not (self.waits or self.deadline_us)

    def origin_hop(self, hop: int) -> int:
        """Return the origin's hop id of the call with this hop id of ours."""
        return self.hop

    def length(self, hop: int) -> int:
        """Return the length of that call as a frame of its own."""
        return self.size

    def single(self, hop: int) -> Dispatched:
        """Return that call on its own, after it was refused and returned."""
        return self

    def ended(self, count: int) -> None:
        """End the origin's wait for `count` calls of it."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1

    def give_up(self) -> None:
        """End the origin's wait for all of its calls."""
        self.ended(1)


class DispatchedRun(Dispatched):
    """Calls of one frame in flight at a member or another relay. Their hop ids are consecutive, on both sides."""

    __slots__ = ("count", "first_hop", "left", "sizes")

    def __init__(self, origin: Neighbor, hop: int, route: Route, sizes: Sequence[int]) -> None:
        """`hop` is the origin's hop id of the first call; `sizes` are the lengths of their bodies."""
        count = len(sizes)
        super().__init__(origin, hop, route, BODY_AT + sum(sizes) // count)
        self.count = self.left = count
        self.sizes = sizes
        self.first_hop = 0
        """Our hop id of the first call."""

    def origin_hop(self, hop: int) -> int:
        return self.hop + hop - self.first_hop

    def length(self, hop: int) -> int:
        return BODY_AT + self.sizes[hop - self.first_hop]

    def single(self, hop: int) -> Dispatched:
        one = Dispatched(self.origin, self.origin_hop(hop), self.route, self.length(hop))
        one.load, one.attempts, one.tried = self.load, self.attempts, [*self.tried]
        one.deadline_us = self.deadline_us
        return one

    def same(self, hop: int, sizes: Sequence[int]) -> bool:
        """Whether bodies of these lengths, from our hop id `hop` on, are those that were dispatched."""
        first = hop - self.first_hop
        return tuple(self.sizes[first : first + len(sizes)]) == tuple(sizes)

    def ended(self, count: int) -> None:
        self.left -= count
        if self.waits:
            self.origin.pending -= count
            self.waits = self.left > 0

    def give_up(self) -> None:
        if self.waits:
            self.waits = False
            self.origin.pending -= self.left


class EndOfPair(Protocol):
    """The socket pair of a tunnel; only its end matters here."""

    def end(self) -> None: ...


class Tunnel:
    """The two ends of a tunnel at this relay: neighbor and hop id of its opener and of its member."""

    __slots__ = (
        "member",
        "member_held",
        "member_hop",
        "opener",
        "opener_held",
        "opener_hop",
        "pair",
    )

    def __init__(
        self, opener: Neighbor, opener_hop: int, member: Neighbor, member_hop: int
    ) -> None:
        self.pair: EndOfPair | None = None
        """The socket pair that carries its records past this relay, if any: see `relay.core.direct`."""
        self.opener = opener
        self.opener_hop = opener_hop
        self.member = member
        self.member_hop = member_hop
        self.opener_held = Held()
        self.member_held = Held()


class Neighbor(Connection):
    """A connection of the router, and what is in transit over it: the routes of its frames, its calls, its tunnels."""

    __slots__ = (
        "casts",
        "declared",
        "dropped_entries",
        "group_bytes",
        "in_flight",
        "left_hops",
        "may_call",
        "may_hold",
        "over_share",
        "pending",
        "refused",
        "routes",
        "shares",
        "swept_us",
        "tunnels",
        "unfinished",
        "user",
        "users",
    )

    def __init__(self, port: Port, number: int, max_aliases: int) -> None:
        super().__init__(port, number, max_aliases)
        self.casts = False
        """It has declared an alias for publications or broadcasts."""
        self.swept_us = 0
        """Time before which late calls here are not searched again."""
        self.routes: list[Route | None] = []
        """Alias -> route."""
        self.declared = 0
        """Number of its aliases, which count in its user's share if it is a session."""
        self.refused: dict[int, tuple[Cause, str]] = {}
        """Aliases that it was refused lately: alias -> why. See `relay.core.refused_aliases`."""
        self.group_bytes = 0
        """Bytes of the queue group names in its aliases."""
        self.in_flight: dict[int, Dispatched] = {}
        """Our hop id -> call in flight at its members."""
        self.pending = 0
        """Number of its own calls that are unanswered."""
        self.may_call = 0
        """How many may be, before `relay.core.allowances` is asked for more."""
        self.may_hold = 0
        """How many calls may be in flight at its members, before `relay.core.allowances` is asked for more."""
        self.left_hops: set[int] = set()
        """Its hop ids of calls whose callers left, until their holders are notified."""
        self.tunnels: dict[int, Tunnel] = {}
        """Hop id -> tunnel with an end here."""
        self.user: str = f"connection {number}"
        """The user in whose shares its calls count."""
        self.shares: dict[int, Share] = {}
        """Number of the neighbor that a call came from -> its share of this connection."""
        self.users: dict[str, UserShare] = {}
        """User -> share of this connection."""
        self.over_share = 0
        """Calls that were not dispatched to it because their sender's share was used up."""
        self.unfinished: Iterator[None] | None = None
        """The rest of handling its latest frame, if that is done in parts. Its next frame is handled after that."""
        self.dropped_entries = 0
        """Entries of its advertised interest that were dropped over a limit."""

    def complete(self) -> None:
        """Do the rest of handling its latest frame."""
        work, self.unfinished = self.unfinished, None
        if work is not None:
            for _ in work:
                pass

    def let_go(self) -> None:
        """Let go of its port and all else that refers back to it, because what it held was taken apart.

        Then its memory is free as soon as nobody refers to it: cycles are collected seldom (`iris.memory`).
        """
        self.port = GONE

    def forget(self) -> Iterator[int]:
        """Close it, and drop its tables in parts: objects that still refer to it keep little.

        Each part yields its work (see `relay.core.endings`).
        """
        self.closed = True
        self.gaps = {}
        self.refused = {}
        aliases, self.aliases = self.aliases, AliasTable(1)
        return self._forget_in_parts(aliases)

    def _forget_in_parts(self, aliases: AliasTable[Delivery]) -> Iterator[int]:
        work, self.unfinished = self.unfinished, None
        if work is not None:
            # It is gone, so a rule that the rest of its frame breaks ends nothing more.
            with suppress(PeerProtocolError):
                for _ in work:
                    yield PART_WORK
        routes, self.routes = self.routes, []
        while routes:
            route = routes.pop()
            if route is not None:
                yield 1 + ALIAS_WORK * route.release()
        for count in aliases.take_apart(FORGOTTEN):
            yield count // FORGOTTEN_EACH

    @property
    def neighbor(self) -> Neighbor:
        """Itself. A route to a site returns another neighbor."""
        return self

    def subscription_count(self, key: tuple[str, bytes, str]) -> int:
        """Return how many subscriptions to (filter, key id, group) it stands for. It must have at least one."""
        return 1


class Load(Outstanding):
    """Calls of one kind in flight at one member, or at all members of an address behind one link or site route."""

    __slots__ = (
        "behind",
        "kind",
        "limit_bytes",
        "member",
        "neighbor",
        "pushes",
        "site_route",
    )

    def __init__(
        self,
        neighbor: Neighbor,
        member: LocalMember | None,
        kind: int,
        concurrency: int,
        limit_bytes: int,
        behind: RemoteMembers | None = None,
        site_route: Subscriber | None = None,
    ) -> None:
        super().__init__(concurrency)
        self.neighbor = neighbor
        self.member = member
        """The member; None if the relay behind the link chooses one of `behind`."""
        self.behind = behind
        """The relay or site whose members these are."""
        self.site_route = site_route
        """The route to the site of these members, if it is a remote one."""
        self.kind = kind
        self.limit_bytes = limit_bytes
        self.pushes: dict[int, int] = {}
        """Pushes in flight at a member: hop id -> hop id."""

    @property
    def serial(self) -> int:
        """Serial of the member; 0 behind a link."""
        return 0 if self.member is None else self.member.serial
