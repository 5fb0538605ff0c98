"""A link to another relay, and the copy of that relay's interest.

Only the other relay decides about its members: it sends a snapshot when the link comes up, then changes in
order, each from one version to the next. A copy outlives its link for `SUSPENDED_US`, so that members do
not disappear when a link flaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from msgspec import UNSET

from iris.core.heartbeat import Heartbeat
from iris.errors import InvalidName, PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.kinds import SERVED_KINDS, HopClass, Kind
from iris.wire.link_frames import MemberEntry
from relay.core.neighbor import Address, Demand, Load, Neighbor
from relay.core.ports import Port
from relay.core.replica import Replica
from relay.core.session import is_listed

SUSPENDED_US: Final = 3_000_000
"""How long a copy outlives its link, and how long a snapshot is waited for."""
MAX_COPY: Final = 1 << 20
"""Limit of members (counted once per key id), and of topics, in the copy of one relay.

Entries over it are counted and dropped.
"""
MAX_LOOKED_AT: Final = 64
"""Members of an address that are looked at to learn what its members serve."""
LINK_HOP: Final = 1 << 62
"""Bit that is set in hop ids chosen by the relay with the higher id."""
_UNBOUNDED: Final = 1 << 62


class Entries(dict[int, MemberEntry]):
    """Serial -> member, of one cluster under one key."""

    __slots__ = ("listed",)

    def __init__(self) -> None:
        super().__init__()
        self.listed = 0
        """How many of them are members of the cluster, not only stores."""


_NONE: Final = Entries()


class Copy:
    """The members of another relay, as it advertised them last."""

    __slots__ = (
        "keyed", "label", "link", "members", "names", "relay", "site", "starting", "store_failed", "surplus", "until_us",
    )  # fmt: skip

    def __init__(self, relay: str, site: str, label: str) -> None:
        self.relay = relay
        """The relay's id in hex."""
        self.site = site
        self.label = label
        self.link: Link | None = None
        """The link to that relay; None while the copy is suspended."""
        self.until_us = 0
        """When a suspended copy is dropped."""
        self.starting = False
        """A store of that relay is starting."""
        self.store_failed = ""
        """Why the store that it starts cannot serve; empty if it can."""
        self.members: dict[int, MemberEntry] = {}
        """Serial -> member."""
        self.names: dict[str, dict[bytes, Entries]] = {}
        """Cluster -> key id -> members: what is asked of one key does not look at the members of others."""
        self.keyed = 0
        """Members, each counted once per key id."""
        self.surplus = 0
        """Members that were dropped over the limit and have not left: as many unknown ones may leave."""

    @property
    def host(self) -> str:
        """The host of the relay, for people."""
        return self.label or f"relay {self.relay[:8]}"

    def replace(self, newer: Copy) -> None:
        """Replace the contents with those of a complete snapshot."""
        self.members, self.names = newer.members, newer.names
        self.keyed, self.surplus = newer.keyed, newer.surplus

    def join(self, entry: MemberEntry) -> bool:
        """Add a member. Returns False if the copy is full. Raises PeerProtocolError if it joined already."""
        if entry.serial in self.members:
            raise PeerProtocolError(f"member {entry.serial} joined twice")
        if self.keyed + len(entry.key_ids) > MAX_COPY:
            self.surplus += 1
            return False
        self.keyed += len(entry.key_ids)
        self.members[entry.serial] = entry
        keys = self.names.setdefault(entry.name, {})
        listed = is_listed(entry.kinds)
        for key_id in dict.fromkeys(entry.key_ids):
            entries = keys.setdefault(key_id, Entries())
            entries[entry.serial] = entry
            entries.listed += listed
        return True

    def leave(self, serial: int) -> MemberEntry | None:
        """Remove a member and return it; None if it had been dropped over the limit."""
        entry = self.members.pop(serial, None)
        if entry is None:
            if not self.surplus:
                raise PeerProtocolError(f"member {serial} left but had not joined")
            self.surplus -= 1
            return None
        self.keyed -= len(entry.key_ids)
        keys = self.names[entry.name]
        listed = is_listed(entry.kinds)
        for key_id in dict.fromkeys(entry.key_ids):
            entries = keys[key_id]
            del entries[serial]
            entries.listed -= listed
            if not entries:
                del keys[key_id]
        if not keys:
            del self.names[entry.name]
        return entry

    def entries(self, name: str, key_id: bytes) -> Entries:
        """Return the members of an address."""
        keys = self.names.get(name)
        return _NONE if keys is None else keys.get(key_id, _NONE)

    def addresses(self) -> Iterator[tuple[Address, set[int]]]:
        """Yield each address that has members of a cluster, with the kinds that the first of these serve."""
        for name, keys in self.names.items():
            for key_id, entries in keys.items():
                if entries.listed:
                    some = islice(entries.values(), MAX_LOOKED_AT)
                    yield (name, key_id), {kind for entry in some for kind in entry.kinds}

    def serves(self, kind: int, name: str, key_id: bytes) -> bool:
        """Whether a member of an address serves `kind`."""
        return any(kind in entry.kinds for entry in self.entries(name, key_id).values())

    def member_id(self, serial: int) -> str:
        """Return the id by which users know a member."""
        return f"{self.relay}.{serial}"

    def info(self, entry: MemberEntry) -> frames.MemberInfo:
        """Return a member as sessions see it."""
        return frames.MemberInfo(
            self.member_id(entry.serial), list(entry.kinds), entry.key_ids, self.relay, self.site, entry.label, entry.tag,
            entry.methods or UNSET,
        )  # fmt: skip


class Link(Neighbor):
    """The router's side of one link."""

    __slots__ = (
        "addresses",
        "beats",
        "bye",
        "copy",
        "demands",
        "groups",
        "hello",
        "loads",
        "pings",
        "relay_id",
        "replica",
        "settle_us",
        "topics",
        "waiting",
        "weights",
    )
    hop_class = HopClass.MESH

    def __init__(
        self, port: Port, number: int, hello: link_frames.LinkHello, copy: Copy, own_id: bytes, now_us: int
    ) -> None:  # fmt: skip
        super().__init__(port, number, hello.aliases)
        self.greeted = True
        self.hello = hello
        self.relay_id = hello.relay_id
        self.label = copy.label
        self.copy = copy
        """The other relay's members."""
        self.own_hop_mask = LINK_HOP
        self.own_hop = LINK_HOP if own_id > hello.relay_id else 0
        self.waiting: Copy | None = None
        """The snapshot that is arriving, or None."""
        self.replica = Replica()
        """How far the other relay's interest has been received."""
        self.settle_us = now_us + SUSPENDED_US
        """Until then, the snapshot may arrive and have members that nobody else has."""
        self.pings: list[int] = []
        """Ids of PINGs to answer when the snapshot is complete."""
        self.addresses: dict[Address, int] = {}
        """Address -> number of members behind this link. The interest leads to this link for these addresses."""
        self.topics: dict[tuple[str, bytes, str], int] = {}
        """(filter, key id, group) -> number of sessions behind this link."""
        self.weights: dict[tuple[bytes, str], dict[str, int]] = {}
        """(key id, group) -> filter -> number of sessions behind this link."""
        self.groups: dict[bytes, int] = {}
        """Key id -> number of queue groups behind this link."""
        self.loads: dict[tuple[int, str, bytes], Load] = {}
        """(kind, cluster, key id) -> load of the members behind this link."""
        self.demands: dict[tuple[int, str, bytes], Demand] = {}
        """(kind, cluster, key id) -> calls that came over this link."""
        self.bye = False
        """The other relay said goodbye, so its copy is not kept."""
        self.pulse = self.beats = Heartbeat(hello.mono_us, now_us)
        self.clock_us = self.beats.clock_us

    def subscription_count(self, key: tuple[str, bytes, str]) -> int:
        """Return how many sessions behind this link have a subscription, as the other relay advertised."""
        return self.topics.get(key, 1)

    @property
    def rtt_us(self) -> int:
        """The round trip at the last beat."""
        return self.beats.rtt_us

    def load(self, kind: int, name: str, key_id: bytes) -> Load | None:
        """Return the load of the members behind this link that serve `kind` at an address; None if there are none."""
        concurrency = sum(
            entry.kinds[kind]
            for entry in self.copy.entries(name, key_id).values()
            if kind in entry.kinds
        )
        key = (kind, name, key_id)
        if not concurrency:
            return None
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = Load(self, None, kind, concurrency, _UNBOUNDED, self)
        load.concurrency = concurrency
        return load

    def member_load(self, kind: int, name: str, key_id: bytes, serial: int) -> Load | None:
        """Return the load for calls of a kind to exactly one member behind this link; None if it cannot be sent any."""
        entry = self.copy.members.get(serial)
        if entry is None or entry.name != name or key_id not in entry.key_ids:  # fmt: skip
            return None
        if kind in entry.kinds:
            return self.load(kind, name, key_id)
        if kind != Kind.REQUEST or not is_listed(entry.kinds):
            return None
        key = (kind, name, key_id)
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = Load(self, None, kind, 1, _UNBOUNDED, self)
        return load

    def members_behind(self, kind: int, name: str, key_id: bytes) -> list[str]:
        """Return the ids of the members behind this link that serve `kind` at an address."""
        return [
            self.copy.member_id(entry.serial)
            for entry in self.copy.entries(name, key_id).values()
            if kind in entry.kinds
        ]

    def forget_loads(self, name: str, key_id: bytes) -> None:
        """Remove the loads of an address that has no members behind this link any more."""
        for kind in SERVED_KINDS:
            self.loads.pop((kind, name, key_id), None)

    def demand(self, kind: int, name: str, key_id: bytes) -> Demand:
        """Return the counter of calls from this link to an address and kind here."""
        key = (kind, name, key_id)
        demand = self.demands.get(key)
        if demand is None:
            demand = self.demands[key] = Demand()
        return demand

    def weight(self, key_id: bytes, group: str) -> int:
        """Return how many sessions of a queue group are behind this link, at most 64."""
        filters = self.weights.get((key_id, group))
        return min(64, max(filters.values())) if filters else 1


def check_named(check: Callable[[str], str], name: str) -> None:
    """Raise PeerProtocolError for a name that `check` refuses, because no relay may advertise it."""
    try:
        check(name)
    except InvalidName as err:
        raise PeerProtocolError(str(err)) from err
