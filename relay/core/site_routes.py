"""Routes to remote sites: a WAN connection of this relay, or a link to a gateway that has one.

    this relay ──────────── Wan ──────────► gateway of a remote site
    this relay ── Link ── gateway ── Wan ─► gateway of a remote site

A site is advertised as a whole: the interest of all its members and subscribers together. Each end of a WAN
connection keeps a copy of the other site's interest in a `SiteRoute`. A gateway advertises that to the
relays of its own site, which keep a `SiteRoute` over it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

from iris.core.heartbeat import Heartbeat
from iris.errors import PeerProtocolError
from iris.wire import link_frames
from iris.wire.kinds import SERVED_KINDS, HopClass, Kind
from iris.wire.link_frames import SiteCluster, SiteTopic
from iris.wire.names import check_cluster, check_filter, check_group
from relay.core.interest import Interest
from relay.core.link import LINK_HOP, SUSPENDED_US, check_named
from relay.core.neighbor import Address, Load, Neighbor, Topic
from relay.core.ports import Port
from relay.core.replica import Replica

Served = tuple[dict[int, int], int]
"""(kind -> number of handlers, number of members) of an address in a site."""
NOBODY: Final[Served] = ({}, 0)
"""An address without members."""
Groups = dict[bytes, dict[str, int]]
"""Key id -> queue group -> number of topics in it."""
MAX_WANTED: Final = 1 << 18
"""Limit of addresses, and of topics, of one site: about 700 MB per route with the longest names. More are dropped."""
MAX_SITE_GROUPS: Final = 240
"""Limit of queue groups of one site under one key. One DECLARE on the way there may have to name them all."""
MAX_NAMED: Final = 4096
"""Largest number of placeholders for a remote site's members that did not answer a survey."""
_UNBOUNDED: Final = 1 << 62
_SMOOTH: Final = 8
"""The latest round trip counts 1/8 in the average."""


class SiteRoute:
    """One route to a remote site, and the copy of that site's interest that came over it.

    It is a subscriber in the interest, like a session or link; its frames go to `neighbor`.
    """

    __slots__ = (
        "clusters",
        "cost_ms",
        "dropped_entries",
        "groups",
        "loads",
        "names",
        "neighbor",
        "number",
        "relay_id",
        "rtt_us",
        "site",
        "topics",
    )
    hop_class = HopClass.TO_WAN

    def __init__(self, site: str, neighbor: Neighbor, relay_id: bytes, number: int) -> None:
        self.site = site
        self.neighbor = neighbor
        self.relay_id = relay_id
        """Id of the relay at the other end of `neighbor`."""
        self.number = number
        self.cost_ms = 0
        self.rtt_us = 0
        self.clusters: dict[Address, Served] = {}
        """Address -> members there."""
        self.names: dict[str, dict[bytes, None]] = {}
        """Cluster -> the key ids under which it has members there."""
        self.topics: dict[Topic, int] = {}
        """Topic -> number of subscriptions there."""
        self.groups: Groups = {}
        self.dropped_entries = 0
        """Entries of the site's interest that were dropped over a limit."""
        self.loads: dict[tuple[int, str, bytes], Load] = {}
        """(kind, cluster, key id) -> load of the members there."""

    @property
    def own(self) -> bool:
        """Whether it is a WAN connection of this relay."""
        return isinstance(self.neighbor, Wan)

    @property
    def stale(self) -> bool:
        """Whether the remote site has not advertised its interest yet."""
        return isinstance(self.neighbor, Wan) and not self.neighbor.replica.known

    @property
    def distance_us(self) -> int:
        """Distance of the site by this route: its cost and its round trip."""
        return 1000 * self.cost_ms + self.rtt_us

    def subscription_count(self, key: Topic) -> int:
        """Return how many sessions of the site have a subscription, as it advertised."""
        return self.topics.get(key, 1)

    def load(self, kind: int, name: str, key_id: bytes) -> Load | None:
        """Return the load of the members of an address there that serve `kind`; None if there are none."""
        concurrency = self.clusters.get((name, key_id), NOBODY)[0].get(kind, 0)
        key = (kind, name, key_id)
        if not concurrency:
            return None
        load = self.loads.get(key)
        if load is None:
            load = Load(self.neighbor, None, kind, concurrency, _UNBOUNDED, self, self)
            self.loads[key] = load
        load.concurrency = concurrency
        return load

    def members_behind(self, kind: int, name: str, key_id: bytes) -> list[str]:
        """Return placeholders for the members there that serve `kind` at an address: only their number is known."""
        kinds, members = self.clusters.get((name, key_id), NOBODY)
        count = min(members, kinds.get(kind, 0), MAX_NAMED)
        return [f"{self.site}:{number}" for number in range(1, count + 1)]

    def apply_cluster(self, entry: SiteCluster, interest: Interest) -> None:
        """Set the members that the site advertises for an address."""
        address = (entry.name, entry.key_id)
        if entry.kinds:
            if len(self.clusters) >= MAX_WANTED and address not in self.clusters:
                self.dropped_entries += 1  # its end will name an unknown topic, which is ignored
                return
            self.clusters[address] = (entry.kinds, entry.members)
            self.names.setdefault(entry.name, {})[entry.key_id] = None
        elif self.clusters.pop(address, None) is not None:
            del self.names[entry.name][entry.key_id]
            if not self.names[entry.name]:
                del self.names[entry.name]
            for kind in SERVED_KINDS:
                self.loads.pop((kind, *address), None)
        interest.version += 1

    def apply_topic(self, entry: SiteTopic, interest: Interest) -> None:
        """Set the number of subscriptions that the site advertises for a topic."""
        key = (entry.filter, entry.key_id, entry.group)
        if entry.count:
            if key not in self.topics:
                if len(self.topics) >= MAX_WANTED or not join_group(self.groups, key):
                    self.dropped_entries += 1
                    return
                interest.subscribe(self, entry.filter, entry.group, (entry.key_id,))
            self.topics[key] = entry.count
        elif self.topics.pop(key, None) is not None:
            leave_group(self.groups, key)
            interest.unsubscribe(self, entry.filter, entry.group, (entry.key_id,))

    def empty(self, interest: Interest) -> None:
        """Remove everything that leads to this route."""
        for topic, key_id, group in self.topics:
            interest.unsubscribe(self, topic, group, (key_id,))
        self.topics = {}
        self.groups = {}
        self.clusters = {}
        self.names = {}
        self.loads = {}
        interest.version += 1

    def rank(self, name: str, sender_id: bytes) -> bytes:
        """Return the rank of this route for a sender and address; the route with the highest rank to a site is chosen.

        Rendezvous hashing (Thaler and Ravishankar, 1998): when a route is lost, senders on other routes are
        not moved.
        """
        seed = sender_id + self.relay_id + name.encode()
        return hashlib.blake2b(seed, digest_size=8).digest()


class Wan(Neighbor):
    """The router's side of one WAN connection to a gateway of a remote site.

    The site's name is from its certificate.
    """

    __slots__ = (
        "beats",
        "bye",
        "hello",
        "relay_id",
        "replica",
        "reported_us",
        "settle_us",
        "site",
        "site_route",
        "snapshot_due_us",
        "snapshot_us",
    )
    hop_class = HopClass.TO_WAN

    def __init__(
        self, port: Port, number: int, hello: link_frames.LinkHello, site: str, own_id: bytes, now_us: int
    ) -> None:  # fmt: skip
        super().__init__(port, number, hello.aliases)
        self.greeted = True
        self.site = site
        self.hello = hello
        self.relay_id = hello.relay_id
        self.own_hop_mask = LINK_HOP
        self.own_hop = LINK_HOP if own_id > hello.relay_id else 0
        self.site_route: SiteRoute
        self.replica = Replica()
        """How far the other site's interest has been received over this connection."""
        self.settle_us = now_us + SUSPENDED_US
        """Until then, its interest may arrive and have members that nobody else has."""
        self.snapshot_us = 0
        """When our interest was last sent as a snapshot."""
        self.snapshot_due_us = 0
        """When the next snapshot is due; 0 if none is."""
        self.reported_us: dict[tuple[int, str, bytes, bytes, bool, tuple[str, ...]], int] = {}
        """Address and receivers of a reported loss -> time until which further losses are not reported."""
        self.bye = False
        self.pulse = self.beats = Heartbeat(hello.mono_us, now_us)
        self.clock_us = self.beats.clock_us

    def forget(self) -> Iterator[int]:
        """Close it, and drop its tables in parts.

        A cast that came over it may still be recorded (`relay.core.missed_casts`) and refer to it.
        """
        self.reported_us = {}
        return super().forget()

    def let_go(self) -> None:
        super().let_go()
        del self.site_route

    def smooth_rtt(self) -> None:
        """Update the smoothed round trip after a beat."""
        site_route, rtt_us = self.site_route, self.beats.rtt_us
        if rtt_us:
            site_route.rtt_us += (
                (rtt_us - site_route.rtt_us) // _SMOOTH if site_route.rtt_us else rtt_us
            )


class Suspended:
    """The members of a site whose last route was lost a moment ago, because the site may come back."""

    __slots__ = ("clusters", "until_us")

    def __init__(self, site_route: SiteRoute, now_us: int) -> None:
        self.clusters = site_route.clusters
        self.until_us = now_us + SUSPENDED_US

    def serves(self, kind: int, name: str, key_id: bytes) -> bool:
        """Whether a member of an address served `kind`."""
        return kind in self.clusters.get((name, key_id), NOBODY)[0]


def join_group(groups: Groups, key: Topic) -> bool:
    """Count a topic in its queue group. Returns False if there are too many groups under its key."""
    _, key_id, group = key
    if group:
        here = groups.setdefault(key_id, {})
        if group not in here and len(here) >= MAX_SITE_GROUPS:
            return False
        here[group] = here.get(group, 0) + 1
    return True


def leave_group(groups: Groups, key: Topic) -> None:
    """Remove a topic that `join_group` counted."""
    _, key_id, group = key
    if group:
        here = groups[key_id]
        here[group] -= 1
        if not here[group]:
            del here[group]
            if not here:
                del groups[key_id]


def clusters_behind(site_routes: Iterable[SiteRoute], address: Address) -> Served:
    """Return the members of an address at a site.

    Its routes may differ by some milliseconds; the largest number counts.
    """
    return max(
        (site_route.clusters.get(address, NOBODY) for site_route in site_routes),
        key=lambda served: (served[1], sum(served[0].values())),
        default=NOBODY,
    )


def check_entry(entry: SiteCluster | SiteTopic) -> None:
    """Raise PeerProtocolError for an entry that no relay may advertise about a site."""
    if isinstance(entry, SiteCluster):
        check_named(check_cluster, entry.name)
        if not entry.kinds.keys() <= SERVED_KINDS:
            raise PeerProtocolError(f"members of {entry.name} serve an unknown kind of call")
        return
    check_named(check_filter, entry.filter)
    if entry.group:
        check_named(check_group, entry.group)


def is_site_local(kind: int) -> bool:
    """Whether calls of a kind leave this site only if they name another one.

    A stream's name stands for another log elsewhere.
    """
    return kind == Kind.STREAM
