"""The interest of the other relays: receives their snapshots and changes, and keeps the copies up to date.

    INTEREST ── `Replica.receive` ──► part of a snapshot ── with the last part, the new copy replaces the old one
                                  ──► a change ──► the copy, and sessions that watch
                                  ──► a change before it is missing ──► RESYNC

The interest leads to a link for all that is in its copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.kinds import SERVED_KINDS
from iris.wire.link_frames import MemberEntry, TopicEntry
from iris.wire.names import check_cluster, check_filter, check_group, printable
from relay.core.advertiser import MAX_GROUPS_HERE
from relay.core.casts import Casts
from relay.core.draining import DRAIN_PING
from relay.core.interest import Interest
from relay.core.link import MAX_COPY, SUSPENDED_US, Copy, Link, check_named
from relay.core.reach import Reach
from relay.core.replica import Verdict
from relay.core.session import is_listed

MAX_SHARED: Final = 8192
"""Limit of values kept for sharing; over it, they are forgotten."""
MAX_PINGS: Final = 1024
"""Limit of PINGs of one link that wait for its snapshot; over it they are answered at once."""


class PeerInterest:
    """The interest of other relays, as they advertise it."""

    def __init__(self, interest: Interest, casts: Casts, reach: Reach) -> None:
        self._interest = interest
        self._casts = casts
        self._reach = reach
        self.resyncs = 0
        self._key_ids: dict[tuple[bytes, ...], list[bytes]] = {}
        """Key ids -> the shared list of them."""
        self._kinds: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}
        """Kinds and handlers -> the shared table of them."""

    def on_interest(self, link: Link, change: link_frames.Interest) -> None:
        """Apply a change, a snapshot or part of one."""
        if (change.starting, change.store_failed) != (link.copy.starting, link.copy.store_failed):
            link.copy.starting, link.copy.store_failed = change.starting, change.store_failed
            self._interest.version += 1  # calls that wait for the store look again
        verdict = link.replica.receive(change)
        if change.reset:
            copy = link.copy
            link.waiting = Copy(copy.relay, copy.site, copy.label)
            link.settle_us = link.beats.last_us + SUSPENDED_US
            self.empty(link)
        if verdict is Verdict.PART and link.waiting is not None:
            self._apply_part(link, link.waiting, change)
        elif verdict is Verdict.CHANGE:
            self._apply(link, change)
        elif verdict is Verdict.MISSING:
            self._request_resync(link)

    def _apply_part(self, link: Link, waiting: Copy, change: link_frames.Interest) -> None:
        """Apply part of a snapshot; with the last part, the new copy replaces the old one."""
        for entry in map(self._shared, change.joined):
            if waiting.join(entry):
                self._add_addresses(link, entry)
            else:
                link.dropped_entries += 1
        self._apply_topics(link, change.topics)
        self._reach.advertised_by(link, change, link.beats.last_us)
        if change.more:
            return
        old = link.copy
        for serial, entry in old.members.items():
            if serial not in waiting.members:
                self.member_left(entry, old.member_id(serial))
        for serial, entry in waiting.members.items():
            if serial not in old.members:
                self._member_joined(entry, old)
        old.replace(waiting)
        for _, name, key_id in list(link.loads):
            if (name, key_id) not in link.addresses:
                link.forget_loads(name, key_id)
        for address in link.addresses:
            self._interest.changed(address)  # the copy is used from here on
        link.waiting = None
        new = link.replica.whole(change.version)
        link.settle_us = 0
        pings, link.pings = link.pings, []
        for ping in pings:
            link.control(frames.Pong(ping))
        self._interest.version += 1
        if new:
            self._casts.link_restored(link)

    def _apply(self, link: Link, change: link_frames.Interest) -> None:
        copy = link.copy
        for entry in map(self._shared, change.joined):
            if not copy.join(entry):
                link.dropped_entries += 1
                continue
            self._add_addresses(link, entry)
            self._member_joined(entry, copy)
        for serial in change.left:
            gone = copy.leave(serial)
            if gone is None:
                continue
            served = frozenset(gone.kinds) if is_listed(gone.kinds) else None
            for key_id in gone.key_ids:
                address = (gone.name, key_id)
                if served is not None:
                    self._interest.seen.left(address, served, copy.host, link.beats.last_us)
                link.addresses[address] -= 1
                if not link.addresses[address]:
                    del link.addresses[address]
                    self._interest.unserve(link, address)
                    link.forget_loads(*address)
                self._interest.changed(address)
            self.member_left(gone, copy.member_id(serial))
        weighed = self._apply_topics(link, change.topics)
        self._reach.advertised_by(link, change, link.beats.last_us)
        if (
            weighed
            or not change.topics
            or change.joined
            or change.left
            or change.sites
            or change.clusters
        ):
            # If only topics changed, `subscribe` has raised the version for those that came or went.
            # A new count changes no route.
            self._interest.version += 1

    def _shared(self, entry: MemberEntry) -> MemberEntry:
        """Check an entry, and return it made of values shared with other entries.

        At 100,000 members, sharing halves the memory.
        """
        _check_member(entry)
        if len(self._key_ids) + len(self._kinds) > MAX_SHARED:
            self._key_ids.clear()
            self._kinds.clear()
        key_ids = self._key_ids.setdefault(tuple(entry.key_ids), entry.key_ids)
        kinds = self._kinds.setdefault(tuple(sorted(entry.kinds.items())), entry.kinds)
        name, label = sys.intern(entry.name), sys.intern(printable(entry.label))
        tag = printable(entry.tag)
        return MemberEntry(entry.serial, name, key_ids, kinds, label, tag, entry.methods)

    def _add_addresses(self, link: Link, entry: MemberEntry) -> None:
        """Route calls for the addresses of a member over the link."""
        for key_id in entry.key_ids:
            address = (entry.name, key_id)
            count = link.addresses.get(address, 0)
            link.addresses[address] = count + 1
            if not count:
                self._interest.serve(link, address)
            self._interest.changed(address)

    def _apply_topics(self, link: Link, topics: Sequence[TopicEntry]) -> bool:
        """Apply the subscriptions of the relay behind a link. Returns True if the weight of a queue group changed."""
        weighed = False
        for entry in topics:
            topic = (entry.filter, entry.key_id, entry.group)
            self._interest.changed_topic(topic)
            known = topic in link.topics
            group = (entry.key_id, entry.group)
            weighed = weighed or bool(entry.group)
            if entry.count:
                if not known:
                    _check_topic(entry)
                    another = entry.group and group not in link.weights
                    if len(link.topics) >= MAX_COPY or (
                        another and link.groups.get(entry.key_id, 0) >= MAX_GROUPS_HERE
                    ):
                        link.dropped_entries += (
                            1  # its end will name an unknown topic, which is ignored
                        )
                        continue
                    if another:
                        link.groups[entry.key_id] = link.groups.get(entry.key_id, 0) + 1
                    self._interest.subscribe(link, entry.filter, entry.group, (entry.key_id,))
                link.topics[topic] = entry.count
                if entry.group:
                    link.weights.setdefault(group, {})[entry.filter] = entry.count
            elif known:
                del link.topics[topic]
                self._interest.unsubscribe(link, entry.filter, entry.group, (entry.key_id,))
                if entry.group:
                    del link.weights[group][entry.filter]
                    if not link.weights[group]:
                        del link.weights[group]
                        link.groups[entry.key_id] -= 1
                        if not link.groups[entry.key_id]:
                            del link.groups[entry.key_id]
        return weighed

    def beat(self, link: Link, version: int) -> None:
        """Handle a beat. `version` is that of the changes sent before it."""
        if not link.replica.in_step(version):
            self._request_resync(link)

    def on_ping(self, link: Link, ping: frames.Ping) -> None:
        """Answer a PING, which asks whether we have received all earlier changes; while a snapshot is due,
        only after that.
        """
        if link.replica.behind and ping.id != DRAIN_PING and len(link.pings) < MAX_PINGS:
            link.pings.append(ping.id)
        else:
            link.control(frames.Pong(ping.id))

    def _request_resync(self, link: Link) -> None:
        """Ask for a snapshot, because a change was lost or repeated."""
        self.resyncs += 1
        link.settle_us = link.beats.last_us + SUSPENDED_US
        link.control(link.replica.request_resync())

    def _member_joined(self, entry: MemberEntry, copy: Copy) -> None:
        """Note for watches that another relay has a new member."""
        watches = self._interest.watches
        if watches.expects(entry.name, entry.key_ids) and is_listed(entry.kinds):
            watches.joined(entry.name, entry.key_ids, copy.info(entry))

    def member_left(self, entry: MemberEntry, member: str) -> None:
        """Note for watches that a member of another relay has left."""
        if is_listed(entry.kinds):
            self._interest.watches.left(entry.name, entry.key_ids, member)

    def empty(self, link: Link) -> None:
        """Stop routing to a link: remove its addresses and topics from the interest."""
        for address in link.addresses:
            self._interest.unserve(link, address)
            self._interest.changed(address)
        topics, link.topics = link.topics, {}
        for topic, key_id, group in topics:
            self._interest.unsubscribe(link, topic, group, (key_id,))
            self._interest.changed_topic((topic, key_id, group))
        link.addresses = {}
        link.weights = {}
        link.groups = {}


def _check_member(entry: MemberEntry) -> None:
    check_named(check_cluster, entry.name)
    if not entry.kinds.keys() <= SERVED_KINDS:
        raise PeerProtocolError(f"member {entry.serial} serves an unknown kind of call")


def _check_topic(entry: TopicEntry) -> None:
    check_named(check_filter, entry.filter)
    if entry.group:
        check_named(check_group, entry.group)
