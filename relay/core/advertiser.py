"""Advertises this relay's interest to the other relays: members, subscriptions, reachable sites, its store.

    a change ── gathered for `GATHER_US` ──► INTEREST to every link, a portion at a time, oldest first
    a new link, or RESYNC ── flush what was gathered ──► a snapshot to that link

Changes and snapshots are encoded once for all links.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from iris.wire.kinds import NEVER_US
from iris.wire.link_frames import MemberEntry, TopicEntry
from relay.core.interest import Interest
from relay.core.link import Link
from relay.core.neighbor import Topic
from relay.core.quotas import all_but_a_quarter
from relay.core.reach import Reach
from relay.core.replica import Journal
from relay.core.session import Member
from relay.core.summary import ALL

GATHER_US: Final = 2_000
"""Time for which changes are gathered before they are sent to links."""
PORTION: Final = 256
"""Entries, counted once per key, that are sent to links each time. Another relay needs longer to apply a change than a
session needs to make it, and answers to calls wait behind it. A member that leaves before its turn is never sent.
"""
MAX_GROUPS_HERE: Final = 128
"""Limit of queue groups of one relay under one key. One DECLARE over a link may have to name them all."""


class Advertiser:
    """The interest of this relay, as advertised to every link."""

    def __init__(
        self, links: dict[bytes, Link], interest: Interest, reach: Reach, members: Callable[[], Iterable[Member]],
        due: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`members` returns all members of this relay; `due` is called with the time at which `flush` is due."""
        self._links = links
        self._interest = interest
        self._reach = reach
        self._members = members
        self._due = due
        self.journal = Journal()
        self.sent: Callable[[list[Callable[[], None]]], None] = _nothing
        """Called with functions that were given to `ask`, once all changes before them have been sent."""
        self.leaving = False
        """Set once this relay stops: links are then sent an empty interest, and calls in flight may finish."""
        self.starting = False
        """A store of this relay is starting."""
        self.store_failed = ""
        """Why the store that this relay starts cannot serve; empty if it can."""
        self._advertised_store = (False, "")
        self._changes: OrderedDict[int | Topic | Callable[[], None], Member | int] = OrderedDict()
        """What is gathered, oldest first: serial -> member that joined, `~serial` -> member that left, topic -> its new
        count, and functions that were given to `ask`."""
        self._topics: dict[Topic, int] = {}
        """Topic -> number of subscriptions of this relay's sessions."""
        self._sites: dict[str, None] = {}
        """Remote sites whose distance must be advertised in the next change."""
        self._groups: dict[bytes, dict[str, dict[str, int]]] = {}
        """Key id -> queue group -> user -> subscriptions of this relay.

        The first user is the one that created the group.
        """
        self._snapshot: list[bytes] = []
        """Frames of the latest snapshot, valid while the journal has the version `_snapshot_version`."""
        self._snapshot_version = 0
        self.flush_us = NEVER_US
        """When `flush` is due."""

    def joined(self, member: Member, now_us: int) -> None:
        """Advertise a new member of this relay."""
        self._snapshot_version = 0
        if self._links and not self.leaving:
            self._changes[member.serial] = member
            self.gather(now_us)

    def left(self, member: Member, now_us: int) -> None:
        """Advertise that a member of this relay has left."""
        self._snapshot_version = 0
        if self._links and not self.leaving:
            if self._changes.pop(member.serial, None) is None:
                self._changes[~member.serial] = member
            self.gather(now_us)

    def count_subscription(
        self, pattern: str, key_ids: Iterable[bytes], group: str, user: str, by: int, now_us: int
    ) -> None:
        """Add (`by` 1) or remove (`by` -1) one session's subscription, and advertise the new count."""
        for key_id in key_ids:
            topic = (pattern, key_id, group)
            if group:
                self._count_group(key_id, group, user, by)
            count = self._topics.get(topic, 0) + by
            if count:
                self._topics[topic] = count
            else:
                del self._topics[topic]
            if self._links and not self.leaving:
                self._changes[topic] = count
                self.gather(now_us)
            self._interest.changed_topic(topic)
        self._snapshot_version = 0

    def _count_group(self, key_id: bytes, group: str, user: str, by: int) -> None:
        here = self._groups.setdefault(key_id, {})
        users = here.setdefault(group, {})
        users[user] = users.get(user, 0) + by
        if not users[user]:
            del users[user]
        if not users:
            del here[group]
            if not here:
                del self._groups[key_id]

    def group_error(self, group: str, key_ids: Iterable[bytes], user: str) -> str:
        """Return why no queue group can be added here, or an empty text.

        An alias over a link may have to name all groups.
        """
        for key_id in key_ids:
            here = self._groups.get(key_id, {})
            if group in here:
                continue
            if len(here) >= MAX_GROUPS_HERE:
                return f"the sessions of this relay are already in {MAX_GROUPS_HERE} queue groups under this key, which is the limit; use fewer groups"
            made = sum(next(iter(users)) == user for users in here.values())
            if made >= all_but_a_quarter(MAX_GROUPS_HERE):
                return (
                    f"the sessions of {user} already use {made} of the relay's {MAX_GROUPS_HERE} queue groups under this key, and the rest "
                    "is reserved for other users; use fewer groups"
                )
        return ""

    def leave(self) -> None:
        """Advertise an empty interest, so that peers send nothing new, because this relay is about to stop."""
        self.flush()
        self.leaving = True
        self._snapshot_version = 0
        self.journal.version += 1
        for link in self._links.values():
            self.send_snapshot(link)

    def set_store(self, *, starting: bool, failed: str, now_us: int) -> None:
        """Set whether a store of this relay is starting, and why it cannot serve (`failed`, empty if it can)."""
        if (starting, failed) != (self.starting, self.store_failed):
            self.starting, self.store_failed = starting, failed
            self._interest.version += 1  # calls that wait for the store look again
            self.gather(now_us)

    def site_changed(self, site: str, now_us: int) -> None:
        """Advertise that a remote site is now reached through this relay, is no longer, or is at another distance."""
        self._sites[site] = None
        self.gather(now_us)

    def topics(self) -> list[Topic]:
        """Return every topic that has a subscription in this site."""
        there = (link.topics for link in self._links.values())
        return list(dict.fromkeys(topic for topics in (self._topics, *there) for topic in topics))

    def subscription_count(self, topic: Topic) -> int:
        """Return the number of subscriptions to a topic in this site."""
        there = sum(link.topics.get(topic, 0) for link in self._links.values())
        return self._topics.get(topic, 0) + there

    def counted(self, topic: Topic) -> int:
        """Return the number of subscriptions to a topic of this relay's sessions."""
        return self._topics.get(topic, 0)

    def gather(self, now_us: int) -> None:
        """Advertise a change at most `GATHER_US` from now, together with other changes until then."""
        self._snapshot_version = 0
        if self.flush_us == NEVER_US:
            self.flush_us = now_us + GATHER_US
            self._due(self.flush_us)

    def ask(self, done: Callable[[], None], now_us: int) -> None:
        """Give `done` to `sent` once everything that was changed before has been sent to the links."""
        self._changes[done] = 0
        self.gather(now_us)

    def expire(self, now_us: int) -> None:
        """Send a portion, because `flush_us` has come."""
        self.flush(PORTION)
        if self._changes or self._reach.waiting:
            self.gather(now_us)

    def flush(self, most: int = ALL) -> None:
        """Send gathered changes to every link, `most` of this relay and as many of remote sites."""
        self.flush_us = NEVER_US
        room = most
        joined, left, topics, asked = [], [], [], []
        while self._changes and room > 0:
            key, change = self._changes.popitem(last=False)
            if isinstance(change, Member):
                room -= len(change.key_ids)
                if change.left:
                    left.append(change.serial)
                else:
                    joined.append(_entry(change))
            elif isinstance(key, tuple):
                room -= 1
                topics.append(TopicEntry(*key, change))
            elif callable(key):
                asked.append(key)
        sites, clusters, site_topics = self._reach.changes(self._sites, most)
        if self.leaving:
            sites, clusters, site_topics = [], [], []
        store, advertised = self._store_state(), self._advertised_store
        if self._changes and advertised[0]:
            store = (
                advertised  # a store that has started has streams, and others must know these first
            )
        self._advertised_store = starting, failed = store
        for frame in self.journal.changes(
            int(store != advertised), joined=joined, left=left, topics=topics, sites=sites, clusters=clusters,
            site_topics=site_topics, starting=starting, store_failed=failed,
        ):  # fmt: skip
            for link in self._links.values():
                link.port.control(frame)
        self._sites = {}
        if asked:
            self.sent(asked)

    def on_resync(self, link: Link, _: object) -> None:
        """Send a snapshot to a link that missed a change."""
        self.flush()
        self.send_snapshot(link)

    def send_snapshot(self, link: Link) -> None:
        """Send a snapshot of the current interest. Gathered changes must have been flushed."""
        for frame in self._snapshot_frames():
            link.port.control(frame)

    def _snapshot_frames(self) -> list[bytes]:
        """Return the frames of a snapshot of the current interest."""
        if self._snapshot_version != self.journal.version:
            joined, topics = [], []
            sites, clusters, site_topics = self._reach.snapshot()
            if not self.leaving:
                joined = [_entry(member) for member in self._members() if not member.left]
                topics = [TopicEntry(*topic, count) for topic, count in self._topics.items()]
            else:
                sites, clusters, site_topics = [], [], []
            starting, failed = self._store_state()
            self._snapshot = self.journal.snapshot(
                joined=joined, topics=topics, sites=sites, clusters=clusters, site_topics=site_topics,
                starting=starting, store_failed=failed,
            )  # fmt: skip
            self._snapshot_version = self.journal.version
        return self._snapshot

    def _store_state(self) -> tuple[bool, str]:
        """Return (starting, failed) of our store as advertised: nothing once this relay is leaving."""
        return (False, "") if self.leaving else (self.starting, self.store_failed)


def _entry(member: Member) -> MemberEntry:
    kinds = {kind: load.concurrency for kind, load in member.loads.items()}
    return MemberEntry(
        member.serial, member.name, list(member.key_ids), kinds, member.session.label, member.tag,
        member.methods,
    )  # fmt: skip


def _nothing(asked: list[Callable[[], None]]) -> None:
    """Default for `sent`."""
