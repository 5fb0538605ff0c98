"""A link as the router knows it, and the copy of the other relay's interest that came over it.

The other relay is the only authority on its members: a snapshot when the link comes up, then changes in order, each from
one version to the next. A copy outlives its link for `SUSPENDED_US`, so that a link that flaps makes nobody disappear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.core.heartbeat import Heartbeat
from iris.errors import InvalidName, PeerProtocolError
from iris.wire import frames
from iris.wire.frames import MemberEntry
from iris.wire.kinds import SERVED_KINDS, HopClass
from relay.core.neighbor import Address, Demand, Load, Neighbor
from relay.core.ports import Port
from relay.core.replica import Replica

SUSPENDED_US: Final = 3_000_000
"""How long a copy outlives its link, and how long a snapshot is waited for."""
MAX_COPY: Final = 1 << 20
"""Members (counted once per key id), and topics, that are kept of one relay. Entries beyond that are counted and dropped."""
LINK_HOP: Final = 1 << 62
"""Set in hop ids that the relay with the higher id chose."""
_UNBOUNDED: Final = 1 << 62


class Copy:
    """What another relay's members and subscribers want, as it said last."""

    __slots__ = (
        "keyed", "label", "link", "members", "names", "relay", "site", "starting", "store_failed", "surplus", "until_us",
    )  # fmt: skip

    def __init__(self, relay: str, site: str, label: str) -> None:
        self.relay = relay
        """Its id in hex."""
        self.site = site
        self.label = label
        self.link: Link | None = None
        """None: suspended."""
        self.until_us = 0
        """When it is dropped, while it is suspended."""
        self.starting = False
        """A store of that relay is on its way."""
        self.store_failed = ""
        """Why the store that it starts cannot serve."""
        self.members: dict[int, MemberEntry] = {}
        self.names: dict[str, dict[int, MemberEntry]] = {}
        self.keyed = 0
        """Members, each counted once per key id."""
        self.surplus = 0
        """Members that were dropped for want of room and have not left: as many unknown ones may leave."""

    def replace(self, newer: Copy) -> None:
        """Replace the contents by those of a complete snapshot."""
        self.members, self.names = newer.members, newer.names
        self.keyed, self.surplus = newer.keyed, newer.surplus

    def join(self, entry: MemberEntry) -> bool:
        """Add a member. Returns False if there is no room for it."""
        if entry.serial in self.members:
            raise PeerProtocolError(f"member {entry.serial} joined twice")
        if self.keyed + len(entry.key_ids) > MAX_COPY:
            self.surplus += 1
            return False
        self.keyed += len(entry.key_ids)
        self.members[entry.serial] = entry
        self.names.setdefault(entry.name, {})[entry.serial] = entry
        return True

    def leave(self, serial: int) -> MemberEntry | None:
        """Remove a member and return it; None if it had been dropped for want of room."""
        entry = self.members.pop(serial, None)
        if entry is None:
            if not self.surplus:
                raise PeerProtocolError(f"member {serial} left but had not joined")
            self.surplus -= 1
            return None
        self.keyed -= len(entry.key_ids)
        named = self.names[entry.name]
        del named[serial]
        if not named:
            del self.names[entry.name]
        return entry

    def serves(self, kind: int, name: str, key_id: bytes) -> bool:
        """Whether a member of an address serves `kind`."""
        named = self.names.get(name)
        return named is not None and any(
            kind in entry.kinds and key_id in entry.key_ids for entry in named.values()
        )

    def member_id(self, serial: int) -> str:
        """Return the id by which users know a member."""
        return f"{self.relay}.{serial}"

    def info(self, entry: MemberEntry) -> frames.MemberInfo:
        """Return a member as sessions see it."""
        return frames.MemberInfo(
            self.member_id(entry.serial), list(entry.kinds), entry.key_ids, self.relay, self.site, entry.label, entry.tag
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
        self, port: Port, number: int, hello: frames.LinkHello, copy: Copy, own_id: bytes, now_us: int
    ) -> None:  # fmt: skip
        super().__init__(port, number, hello.aliases)
        self.greeted = True
        self.hello = hello
        self.minor = hello.minor
        self.relay_id = hello.relay_id
        self.label = copy.label
        self.copy = copy
        """What the other relay wants."""
        self.own_hop_mask = LINK_HOP
        self.own_hop = LINK_HOP if own_id > hello.relay_id else 0
        self.waiting: Copy | None = None
        """The snapshot that is coming in."""
        self.replica = Replica()
        """How far its interest was heard."""
        self.settle_us = now_us + SUSPENDED_US
        """Until then its snapshot may come and have what nobody else serves."""
        self.pings: list[int] = []
        """PINGs to be answered when its snapshot has come."""
        self.addresses: dict[Address, int] = {}
        """Address -> members there: where the interest leads to this link."""
        self.topics: dict[tuple[str, bytes, str], int] = {}
        """(filter, key id, group) -> sessions there."""
        self.weights: dict[tuple[bytes, str], dict[str, int]] = {}
        """(key id, group) -> filter -> sessions there."""
        self.groups: dict[bytes, int] = {}
        """Key id -> number of queue groups there."""
        self.loads: dict[tuple[int, str, bytes], Load] = {}
        self.demands: dict[tuple[int, str, bytes], Demand] = {}
        self.bye = False
        """The other relay leaves: nothing of it is kept."""
        self.pulse = self.beats = Heartbeat(hello.mono_us, now_us)
        self.clock_us = self.beats.clock_us

    def subscription_count(self, key: tuple[str, bytes, str]) -> int:
        """Return how many sessions there have a subscription, as the other relay said."""
        return self.topics.get(key, 1)

    @property
    def rtt_us(self) -> int:
        """The round trip at the last beat."""
        return self.beats.rtt_us

    def load(self, kind: int, name: str, key_id: bytes) -> Load | None:
        """Return the load of the members behind this link that serve `kind` at an address; None if there are none."""
        concurrency = sum(
            entry.kinds[kind]
            for entry in self.copy.names.get(name, {}).values()
            if kind in entry.kinds and key_id in entry.key_ids
        )
        key = (kind, name, key_id)
        if not concurrency:
            return None
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = Load(self, None, kind, concurrency, _UNBOUNDED, self)
        load.concurrency = concurrency
        return load

    def members_behind(self, kind: int, name: str, key_id: bytes) -> list[str]:
        """Return the ids of the members behind this link that serve `kind` at an address."""
        return [
            self.copy.member_id(entry.serial)
            for entry in self.copy.names.get(name, {}).values()
            if kind in entry.kinds and key_id in entry.key_ids
        ]

    def forget_loads(self, name: str, key_id: bytes) -> None:
        """Nobody serves an address there any more."""
        for kind in SERVED_KINDS:
            self.loads.pop((kind, name, key_id), None)

    def demand(self, kind: int, name: str, key_id: bytes) -> Demand:
        """Return where what this link hands to an address is counted."""
        key = (kind, name, key_id)
        demand = self.demands.get(key)
        if demand is None:
            demand = self.demands[key] = Demand()
        return demand

    def weight(self, key_id: bytes, group: str) -> int:
        """Return how many sessions there are in a queue group behind this link, at most 64."""
        filters = self.weights.get((key_id, group))
        return min(64, max(filters.values())) if filters else 1


def check_named(check: Callable[[str], str], name: str) -> None:
    """Raise PeerProtocolError for a name that `check` refuses: a relay tells of none."""
    try:
        check(name)
    except InvalidName as err:
        raise PeerProtocolError(str(err)) from err
