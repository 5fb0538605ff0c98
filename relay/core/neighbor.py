"""A connection of the router, and what is on its way over it: aliases that were declared, calls that were handed over, tunnels.

These types refer to one another, so they stand together: a neighbor has routes and calls, and each of those leads to a neighbor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from iris.core.aliases import Alias, AliasTable
from iris.core.heartbeat import Heartbeat
from iris.errors import LocalProtocolError, PeerProtocolError
from iris.wire.codec import BODY_AT, MAX_REPORT_BYTES, RELAY_HOP, encode_control
from iris.wire.frames import Beat, Control, Declare, Gap
from iris.wire.kinds import HopClass
from relay.core.ports import Held, Port
from relay.core.shares import Share, UserShare

MAX_GAPS: Final = 65_536
MAX_TARGETS: Final = 1024
PACE_WEIGHT: Final = 0.125
"""Of the latest interval in the average (as TCP smooths its round trips: RFC 6298)."""
UNKNOWN_PACE_US: Final = 1000
"""Taken for one handler until the pace is known."""

Address = tuple[str, bytes]
Topic = tuple[str, bytes, str]
"""Filter, key id, group."""
Delivery = tuple[int, str, bytes, bytes, bool, tuple[str, ...], int, int, str]
"""kind, name, key id, sender id, plain, groups, member, hop class, site: all that an alias towards a neighbor stands for."""


class Subscriber(Protocol):
    """Who wants a topic: a session, a relay behind a link, or another site."""

    @property
    def number(self) -> int: ...
    @property
    def hop_class(self) -> HopClass: ...
    @property
    def site(self) -> str: ...
    @property
    def neighbor(self) -> Neighbor:
        """Over which connection it is reached."""

    def subscription_count(self, key: Topic) -> int:
        """Return how many subscriptions to (filter, key id, group) it stands for, which it has."""


class Behind(Protocol):
    """A relay behind a link, or another site."""

    def members_behind(self, kind: int, name: str, key_id: bytes) -> list[str]:
        """Return the ids of the members there that serve `kind` at an address, as far as is known."""


class Serves(Protocol):
    """A member of this relay, as far as what it was handed is concerned."""

    @property
    def serial(self) -> int: ...
    @property
    def left(self) -> bool: ...
    def forget_if_done(self) -> None:
        """Once it has left and finished all, nothing refers to it any more."""


class Counted(Protocol):
    """What a publisher that waits may send, as far as its frames count."""

    received: int
    """Bytes, ..."""
    review_at: int
    """... and how many of them are reason to look how much more it may send."""

    def ended(self) -> None:
        """The publisher is gone, or its alias stands for another."""


_UNDECLARED: Final = Alias(-1, 0)


class Target:
    """One delivery set at one neighbor, and the alias that stands for it there, declared at its first message."""

    __slots__ = ("alias", "delivery", "neighbor", "port", "route", "share")

    def __init__(self, route: Route, neighbor: Neighbor, delivery: Delivery) -> None:
        self.route = route
        self.neighbor = neighbor
        self.port = neighbor.port
        self.delivery = delivery
        self.alias = _UNDECLARED
        self.share: Share | None = None
        """Share of the route's neighbor, if this is a link or WAN connection and the share was needed already."""

    def number(self, tick: int) -> int:
        """Return the alias number, declared anew if it was taken for something else."""
        alias = self.alias if self.alias.number >= 0 else self.declare(tick)
        alias.used = tick
        return alias.number

    def declare(self, tick: int) -> Alias:
        """Return the alias, declared: it is new, or its number was taken for something else."""
        self.alias = self.neighbor.out_alias(self.delivery, tick)
        self.route.declared(self)
        return self.alias


class Demand:
    """What a link handed to the members here of one address and kind, and what it was last told of the others' share."""

    __slots__ = ("messages", "reported", "used_us")

    def __init__(self) -> None:
        self.messages = 0
        self.reported = 0
        self.used_us = 0


UNUSED: Final = -1
RELEASED: Final = -2
"""Versions of a route that was not resolved yet, or whose sender is gone."""


class Route:
    """An alias that a neighbor declared: where its frames go. What is cached holds for one `version` of the interest.

    What a link sends goes to sessions of this relay alone, or at a gateway to one other site; what comes from another site, to sessions
    and links: nothing can go round in circles.
    """

    __slots__ = (
        "_declared",
        "_neighbors",
        "_prune_at",
        "barred",
        "demand",
        "flow",
        "groups",
        "hop_class",
        "key_id",
        "kind",
        "loads",
        "many",
        "name",
        "neighbor",
        "only",
        "onward",
        "parts",
        "peers",
        "plain",
        "sender_id",
        "single",
        "site",
        "sites",
        "targets",
        "turn",
        "version",
        "vias",
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
        """Over a link: the subscriptions without a group are meant ..."""
        self.only: tuple[str, ...] = ()
        """... and those of these groups."""
        self.hop_class = declared.hop_class
        self.site = declared.site
        """Where a session's messages are to go, or those on their way to a site."""
        self.barred = ""
        """Why its messages may not cross to, or from, another site."""
        wan = neighbor.hop_class == HopClass.TO_WAN
        self.onward = HopClass.FROM_WAN if wan else HopClass.MESH
        """The hop class over links to relays of this site."""
        self.vias: dict[str, int] = {}
        """Site -> number of the way that these messages take."""
        self.sites: Sequence[Load] = ()
        """Members in other sites, nearest first, all of a site as one."""
        self.demand: Demand | None = None
        """Over a link: where its calls are counted."""
        self.version = UNUSED
        self.flow: Counted | None = None
        """What its publisher may send, if it waits: see `relay.core.credit`."""
        self.parts = 1
        """Bundles that a publisher was told to cut a turn's messages into."""
        self.turn = 0
        """Rises with every choice, so that equals take turns."""
        self.single: Target | None = None
        """The only receiver, when there is exactly one and no group to choose for."""
        self.many: Sequence[Target] = ()
        self.groups: Sequence[tuple[str, Sequence[Subscriber]]] = ()
        self.loads: Sequence[Load] = ()
        self.peers: Sequence[Load] = ()
        self.targets: dict[tuple[int, int, bool, tuple[str, ...]], Target] = {}
        """By the number of a neighbor or way, ..."""
        self._declared: dict[tuple[int, Delivery], None] = {}
        """Number of a neighbor, and what an alias was declared for there."""
        self._prune_at = 64

    def declared(self, target: Target) -> None:
        """An alias was declared for a target of this route: it goes with the route."""
        self._declared[(target.neighbor.number, target.delivery)] = None
        if len(self._declared) >= self._prune_at:
            there = (key for key in self._declared if key[0] in self._neighbors)
            self._declared = dict.fromkeys(there)
            self._prune_at = max(64, 2 * len(self._declared))

    def release(self) -> None:
        """The sender is gone, or its alias stands for another: the aliases that stood for it elsewhere are free."""
        if self.flow is not None:
            self.flow.ended()
            self.flow = None
        for number, delivery in self._declared:
            neighbor = self._neighbors.get(number)
            if neighbor is not None:
                remember = (
                    neighbor.port.held_messages > 0
                )  # it may wait there, and make room for others
                neighbor.aliases.free(delivery, remember=remember)
        self._declared = {}
        # Who still refers to it (`relay.core.missed_casts`) keeps little.
        self.targets, self.single, self.many, self.groups = {}, None, (), ()
        self.version = RELEASED

    def target(
        self, subscriber: Subscriber, member: int, plain: bool = True, groups: tuple[str, ...] = ()
    ) -> Target:
        """Return the target for a delivery at a session or link, or over a way to a site."""
        key = (subscriber.number, member, plain, groups)
        target = self.targets.get(key)
        if target is None:
            if len(self.targets) >= MAX_TARGETS:
                self.targets.clear()
            hop_class = (
                self.onward if subscriber.hop_class == HopClass.MESH else subscriber.hop_class
            )
            address = (self.kind, self.name, self.key_id, self.sender_id)
            delivery = (*address, plain, groups, member, hop_class, subscriber.site)
            target = self.targets[key] = Target(self, subscriber.neighbor, delivery)
        return target


class Survey:
    """One survey on the way: who has not answered, and who was lost."""

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
        """The origin may still wait: this counts in its `pending`."""

    def lose(self, members: Sequence[str]) -> None:
        """Note members that never answered. As many are named as fit into DONE, however long their names are."""
        for member in members:
            size = 3 + (len(member) if member.isascii() else 4 * len(member))
            if size > self._room_bytes:
                return
            self._room_bytes -= size
            self.lost.append(member)

    def give_up(self) -> None:
        """The origin waits no more."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1


class Dispatched:
    """A request, push, survey or tunnel opening that a member or another relay was handed and has not finished."""

    __slots__ = (
        "attempts", "behind", "deadline_us", "hop", "load", "origin", "roster", "route", "share", "size", "survey", "tried", "until_us", "waits",
    )  # fmt: skip
    count = 1
    """Calls in it."""
    left = 1
    """Calls of it that did not end."""

    def __init__(self, origin: Neighbor, hop: int, route: Route, size: int) -> None:
        self.origin = origin
        self.hop = hop
        """The origin's hop id."""
        self.route = route
        self.size = size
        self.load: Load
        self.attempts = 0
        self.tried: list[Load] = []
        self.survey: Survey | None = None
        self.roster: list[str]
        """Of a survey: the members that the relay behind a link handed it to, ..."""
        self.behind: Sequence[str]
        """... and what stands for those of another site, before it has named them."""
        self.share: Share | None = None
        """Share in which it counts while a link or WAN connection has it."""
        self.deadline_us = 0
        self.until_us = 0
        """Time at which it is given up, if it has no deadline."""
        self.waits = True
        """The origin may still wait: this counts in its `pending`."""

    @property
    def given_up(self) -> bool:
        """Whether the origin was told that it is lost: it had no deadline, and nobody ended it. It hears no more of it."""
        return not (self.waits or self.deadline_us)

    def origin_hop(self, hop: int) -> int:
        """Return the origin's hop id of the call that we gave this one."""
        return self.hop

    def length(self, hop: int) -> int:
        """Return the length of that call as a frame of its own."""
        return self.size

    def single(self, hop: int) -> Dispatched:
        """Return that call by itself, after it came back."""
        return self

    def ended(self, count: int) -> None:
        """The origin waits no more for so many calls of it."""
        if self.waits:
            self.waits = False
            self.origin.pending -= 1

    def give_up(self) -> None:
        """The origin waits no more for any call of it."""
        self.ended(1)


class DispatchedRun(Dispatched):
    """Calls of one frame that a member or another relay was handed: under hop ids that follow one another, and so were the origin's."""

    __slots__ = ("count", "first_hop", "left", "sizes")

    def __init__(self, origin: Neighbor, hop: int, route: Route, sizes: Sequence[int]) -> None:
        """`hop` is the origin's hop id of the first call; `sizes` are the lengths of their bodies."""
        count = len(sizes)
        super().__init__(origin, hop, route, BODY_AT + sum(sizes) // count)
        self.count = self.left = count
        self.sizes = sizes
        self.first_hop = 0
        """The hop id that we gave to the first call."""

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
        """Whether bodies of these lengths, from our hop id `hop` on, are what was handed over."""
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
    """A tunnel's socket pair, as far as its end goes."""

    def end(self) -> None: ...


class Tunnel:
    """A tunnel's two ends here: the opener's session (or link) and hop id, the member's session (or link) and hop id."""

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
        """By which its records pass us by: see `relay.core.direct`."""
        self.opener = opener
        self.opener_hop = opener_hop
        self.member = member
        self.member_hop = member_hop
        self.opener_held = Held()
        self.member_held = Held()


class Neighbor:
    """The router's side of one connection: a session, or a link to another relay."""

    __slots__ = (
        "address",
        "aliases",
        "casts",
        "clock_us",
        "closed",
        "dropped_entries",
        "gaps",
        "greeted",
        "group_bytes",
        "in_flight",
        "label",
        "left_hops",
        "minor",
        "number",
        "over_share",
        "own_hop",
        "own_hop_mask",
        "pending",
        "port",
        "pulse",
        "routes",
        "shares",
        "swept_us",
        "tunnels",
        "user",
        "users",
    )
    hop_class = HopClass.LOCAL
    site = ""
    """Another one, if this connection goes there."""

    def __init__(self, port: Port, number: int, max_aliases: int) -> None:
        self.port = port
        self.number = number
        self.greeted = False
        self.closed = False
        self.label = ""
        self.address = ""
        """host:port of the other end, if it is on another host."""
        self.minor = 0
        """Minor version of its greeting. Frames that were added later are not sent to it."""
        self.pulse: Heartbeat | None = None
        """Of the other side, if it is on another host."""
        self.clock_us = 0
        """Added to its deadlines: our clock less its own."""
        self.own_hop = RELAY_HOP
        """What a hop id that we chose has in the bits of `own_hop_mask`: both sides number their own."""
        self.own_hop_mask = RELAY_HOP
        self.casts = False
        """It has declared an alias for publications or broadcasts."""
        self.swept_us = 0
        self.routes: list[Route | None] = []
        self.group_bytes = 0
        """Of the queue groups that its aliases name."""
        self.aliases: AliasTable[Delivery] = AliasTable(max_aliases)
        self.in_flight: dict[int, Dispatched] = {}
        """By the hop id that we gave: what its members run."""
        self.pending = 0
        """What it waits for."""
        self.left_hops: set[int] = set()
        """Its hop ids of calls whose callers left, until those who have them are told."""
        self.tunnels: dict[int, Tunnel] = {}
        self.user: str = f"connection {number}"
        """User in whose shares its calls count."""
        self.shares: dict[int, Share] = {}
        """Number of the neighbor that a call came from -> its share of this connection."""
        self.users: dict[str, UserShare] = {}
        """User -> share of this connection."""
        self.over_share = 0
        """Calls that it was not handed because their sender's share was used up."""
        self.dropped_entries = 0
        """Entries that it announced beyond the bounds, which were dropped."""
        self.gaps: dict[Delivery, list[int]] = {}
        """Dropped on the way to it and not yet told: delivery -> [first sequence, count]."""

    def forget(self) -> None:
        """Its connection is gone: whoever still refers to it keeps little."""
        self.closed = True
        for route in self.routes:
            if route is not None:
                route.release()
        self.routes = []
        self.gaps = {}
        self.aliases = AliasTable(1)

    @property
    def neighbor(self) -> Neighbor:
        """Itself: a way to a site has another."""
        return self

    def subscription_count(self, key: tuple[str, bytes, str]) -> int:
        """Return how many subscriptions to (filter, key id, group) this neighbor stands for, which it has."""
        return 1

    def beat_came(self, beat: Beat, now_us: int) -> None:
        """Its heart beats, which says how its clock runs; raises PeerProtocolError from a session of this host, which has none."""
        if self.pulse is None:
            raise PeerProtocolError("BEAT from a session on this host")
        self.pulse.on_beat(beat, now_us)
        self.clock_us = self.pulse.clock_us

    def control(self, body: Control) -> None:
        """Send it a control frame; one that cannot be said ends a connection between relays, and nobody else's call."""
        try:
            frame = encode_control(body)
        except LocalProtocolError as err:
            if not self.hop_class:
                raise
            self.port.abort(str(err))
        else:
            self.port.control(frame)

    def out_alias(self, delivery: Delivery, tick: int) -> Alias:
        """Return the alias for a delivery towards this neighbor, declared if it is new."""
        alias = self.aliases.get(delivery)
        if alias is None:
            alias = self.aliases.add(delivery, tick)
            kind, name, key_id, sender_id, plain, groups, member, hop_class, site = delivery
            address = (kind, name, key_id, sender_id)
            self.control(
                Declare(alias.number, *address, plain, list(groups), member, hop_class, site)
            )
        return alias

    def dropped(self, delivery: Delivery, first: int, count: int) -> None:
        """Remember a loss on the way to this neighbor, to be told when there is room.

        The receiver itself sees a loss between what arrives, so of a plain delivery the latest run is remembered. Where
        a run starts is said at once, in order: a receiver that knew nothing of this sender counts from there.
        """
        gap = self.gaps.get(delivery)
        plain = delivery[4]
        if gap is not None and (not plain or gap[0] + gap[1] == first):
            gap[1] += count
        elif gap is not None or len(self.gaps) < MAX_GAPS:
            self.gaps[delivery] = [first, count]
            if plain:
                self.send_gap(delivery, first, 0, "slow receiver")

    def send_gaps(self) -> None:
        """Send the losses remembered: there is room again."""
        gaps, self.gaps = self.gaps, {}
        for delivery, (first, count) in gaps.items():
            self.send_gap(delivery, first, count, "slow receiver")

    def send_gap(self, delivery: Delivery, first: int, count: int, cause: str) -> None:
        """Tell it of a loss on the way to it."""
        self.control(gap_of(delivery, first, count, cause))


def gap_of(delivery: Delivery, first: int, count: int, cause: str) -> Gap:
    """Return what tells of a loss of a delivery."""
    kind, name, key_id, sender_id, plain, groups, member, _, site = delivery
    # `first` is the sender's word, and `count` a sum: they may not fit the fields.
    first, count = min(first, (1 << 63) - 1), min(count, (1 << 32) - 1)
    return Gap(
        kind, name, key_id, sender_id, first, count, cause, plain, list(groups), member, site
    )


class Load:
    """What one member, or all members of an address behind one link, were handed of one kind and have not finished."""

    __slots__ = (
        "_since_us",
        "behind",
        "bytes",
        "concurrency",
        "kind",
        "limit_bytes",
        "member",
        "messages",
        "neighbor",
        "others",
        "pace_us",
        "pushes",
        "site_route",
    )

    def __init__(
        self,
        neighbor: Neighbor,
        member: Serves | None,
        kind: int,
        concurrency: int,
        limit_bytes: int,
        behind: Behind | None = None,
        site_route: Subscriber | None = None,
    ) -> None:
        self.neighbor = neighbor
        self.member = member
        """None: whoever the relay at the other end of the link chooses, ..."""
        self.behind = behind
        """... of these."""
        self.site_route = site_route
        """To the site of these members, if it is another one."""
        self.kind = kind
        self.concurrency = concurrency
        self.limit_bytes = limit_bytes
        self.messages = 0
        """Handed over by us, and not finished."""
        self.others = 0
        """Handed over by others, as the other relay said last."""
        self.bytes = 0
        self.pace_us = 0.0
        """Time from one end of ours to the next while all handlers are busy, a moving average; 0 while it is not known."""
        self._since_us = 0
        """Since when all handlers are busy, or the last end after that."""
        self.pushes: dict[int, int] = {}
        """Pushes that a member was handed, by hop id."""

    @property
    def serial(self) -> int:
        """The member that is meant; 0 behind a link."""
        return 0 if self.member is None else self.member.serial

    def taken(self, size: int, now_us: int, count: int = 1) -> None:
        """Messages of `size` bytes each were handed over."""
        self.bytes += size * count
        self.messages += count
        beyond = self.messages + self.others - self.concurrency
        if 0 <= beyond < count:
            # What its handlers waited for us does not make it slow.
            self._since_us = now_us

    def ended(self, size: int, now_us: int, count: int = 1) -> None:
        """Messages of `size` bytes each ended."""
        self.bytes -= size * count
        if self.messages + self.others >= self.concurrency:
            if self._since_us:
                each_us = (now_us - self._since_us) / count
                weight = PACE_WEIGHT if count == 1 else 1 - (1 - PACE_WEIGHT) ** count
                self.pace_us += (each_us - self.pace_us) * weight
            self._since_us = now_us
        else:
            self._since_us = 0
        self.messages -= count

    def wait_us(self) -> float:
        """Return how long a message more would take, as far as the pace tells.

        Little's law on what we handed over alone: the pace at which that ends tells what others' share of the handlers costs us.
        """
        if self.pace_us:
            return (self.messages + 1) * self.pace_us
        return (self.messages + self.others + 1) * UNKNOWN_PACE_US / self.concurrency
