"""The interest of one site as advertised: ours to other sites, and other sites' to the relays of ours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeVar

from iris.wire.link_frames import SiteCluster, SiteTopic
from relay.core.neighbor import Address, Topic
from relay.core.quotas import Table
from relay.core.site_routes import NOBODY, Groups, Served, join_group, leave_group

T = TypeVar("T")
ALL: Final = 1 << 62
"""More entries than there can be."""


class Room:
    """Limits of advertised addresses and of topics. Of our own site each key has a share; of other sites, each site."""

    __slots__ = ("clusters", "topics")

    def __init__(self, limit: int) -> None:
        self.clusters = Table(limit)
        self.topics = Table(limit)


class Summary:
    """The interest of one site, as advertised to others.

    Possible changes are collected, and sent if they differ from what was sent last. Entries over a limit
    are held back, and advertised when another entry ends.
    """

    __slots__ = (
        "_by_key",
        "_cluster_of",
        "_groups",
        "_kept",
        "_room",
        "_topic_of",
        "_touched_addresses",
        "_touched_topics",
        "clusters",
        "site",
        "topics",
    )

    def __init__(
        self, site: str, cluster_of: Callable[[Address], Served], topic_of: Callable[[Topic], int], room: Room, *, by_key: bool
    ) -> None:  # fmt: skip
        """`cluster_of` and `topic_of` return the current values."""
        self.site = site
        self._room = room
        self._by_key = by_key
        self._groups: Groups = {}
        self._kept: tuple[dict[Address, None], dict[Topic, None]] = ({}, {})
        """Addresses and topics that are held back, the oldest first."""
        self._cluster_of = cluster_of
        self._topic_of = topic_of
        self.clusters: dict[Address, Served] = {}
        """Address -> members, as advertised."""
        self.topics: dict[Topic, int] = {}
        """Topic -> count, as advertised."""
        self._touched_addresses: OrderedDict[Address, None] = OrderedDict()
        """Addresses that may have changed since the last `changes`."""
        self._touched_topics: OrderedDict[Topic, None] = OrderedDict()
        """Topics that may have changed since the last `changes`."""

    def touch(self, address: Address) -> None:
        """Note that the members of an address may have changed."""
        self._touched_addresses[address] = None

    def touch_topic(self, topic: Topic) -> None:
        """Note that the subscriptions to a topic may have changed."""
        self._touched_topics[topic] = None

    def changes(self, most: int = ALL) -> tuple[list[SiteCluster], list[SiteTopic]]:
        """Return what differs from what was advertised last; from now on it counts as advertised.

        Looks at `most` addresses and topics, those first that were noted first. `waiting` says if more are left.
        """
        clusters: list[SiteCluster] = []
        topics: list[SiteTopic] = []
        addresses = _first(self._touched_addresses, most)
        touched = _first(self._touched_topics, most - len(addresses))
        ended = sum([self._collect_cluster(address, clusters) for address in addresses])
        for kept in list(islice(self._kept[0], 2 * ended)):
            self._collect_cluster(kept, clusters)
        ended = sum([self._collect_topic(topic, topics) for topic in touched])
        for waiting in list(islice(self._kept[1], 2 * ended)):
            self._collect_topic(waiting, topics)
        return clusters, topics

    def _collect_cluster(self, address: Address, changed: list[SiteCluster]) -> bool:
        """Append an address if its members changed. Returns True if room became free."""
        now, before = self._cluster_of(address), self.clusters.get(address, NOBODY)
        table, holder = self._room.clusters, self._holder(address[1])
        kept = self._kept[0]
        kept.pop(address, None)
        if now == before:
            return False
        if not now[0]:
            del self.clusters[address]
            table.give(holder)
        elif before is NOBODY:
            if not table.has_room(holder):
                kept[address] = None
                return False
            table.take(holder)
        changed.append(SiteCluster(self.site, *address, *now))
        if now[0]:
            self.clusters[address] = now
        return not now[0]

    def _collect_topic(self, topic: Topic, changed: list[SiteTopic]) -> bool:
        """Append a topic if its subscriptions changed. Returns True if room became free."""
        count, before = self._topic_of(topic), self.topics.get(topic, 0)
        table, holder = self._room.topics, self._holder(topic[1])
        kept = self._kept[1]
        kept.pop(topic, None)
        if count == before:
            return False
        if not count:
            del self.topics[topic]
            leave_group(self._groups, topic)
            table.give(holder)
        elif not before:
            if not table.has_room(holder) or not join_group(self._groups, topic):
                kept[topic] = None
                return False
            table.take(holder)
        changed.append(SiteTopic(self.site, *topic, count))
        if count:
            self.topics[topic] = count
        return not count

    def _holder(self, key_id: bytes) -> str:
        """Return the holder of the share in which an entry counts: a key or a site."""
        return key_id.hex() if self._by_key else self.site

    @property
    def waiting(self) -> bool:
        """Whether `changes` has not looked at everything that was noted."""
        return bool(self._touched_addresses or self._touched_topics)

    @property
    def unadvertised(self) -> int:
        """Number of addresses and topics that are held back."""
        return len(self._kept[0]) + len(self._kept[1])

    def end(self) -> None:
        """Withdraw everything, and free its room."""
        for table in (self._room.clusters, self._room.topics):
            table.drop(self.site)

    def whole(self) -> tuple[list[SiteCluster], list[SiteTopic]]:
        """Return everything that was advertised."""
        return (
            [
                SiteCluster(self.site, *address, *changed)
                for address, changed in self.clusters.items()
            ],
            [SiteTopic(self.site, *topic, count) for topic, count in self.topics.items()],
        )


def _first(noted: OrderedDict[T, None], most: int) -> list[T]:
    """Take at most so many out, the oldest first."""
    return [noted.popitem(last=False)[0] for _ in range(min(most, len(noted)))]
