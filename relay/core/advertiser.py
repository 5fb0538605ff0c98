"""What the other relays are told of this one: its members, what is wanted here, the sites that it reaches, and its store.

    a change ── gathered for `GATHER_US` ──► INTEREST to every link
    a new link, or RESYNC ── what was gathered is told ──► a snapshot

Both are encoded once for all links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from iris.wire.frames import MemberEntry, TopicEntry
from iris.wire.kinds import NEVER_US
from relay.core.interest import Interest
from relay.core.link import Link
from relay.core.neighbor import Topic
from relay.core.quotas import all_but_a_quarter
from relay.core.reach import Reach
from relay.core.replica import Journal
from relay.core.session import Member

GATHER_US: Final = 2_000
MAX_GROUPS_HERE: Final = 128
"""Queue groups of one relay under one key: a DECLARE over a link may name them all, and is a control frame."""


class Advertiser:
    """Our interest, as every link is told of it."""

    def __init__(
        self, links: dict[bytes, Link], interest: Interest, reach: Reach, members: Callable[[], Iterable[Member]],
        due: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`members` gives all members of this relay; `due` hears when `flush` is due."""
        self._links = links
        self._interest = interest
        self._reach = reach
        self._members = members
        self._due = due
        self.journal = Journal()
        self.flushed: Callable[[], None] = _nothing
        """Called when all that was gathered has been sent."""
        self.leaving = False
        """Links are told of no interest any more: what runs here may finish."""
        self.starting = False
        """A store of ours is on its way."""
        self.store_failed = ""
        """Why the store that this relay starts cannot serve."""
        self._advertised_store = (False, "")
        self._joined: dict[int, Member] = {}
        self._left: list[int] = []
        self._topics: dict[Topic, int] = {}
        self._changed: dict[Topic, int] = {}
        self._sites: dict[str, None] = {}
        """Other sites whose distance is to be told."""
        self._groups: dict[bytes, dict[str, dict[str, int]]] = {}
        """Key id -> queue group -> user -> this relay's subscriptions in it. The first user is the one who made the group."""
        self._snapshot: list[bytes] = []
        self._snapshot_version = 0
        self.flush_us = NEVER_US

    def joined(self, member: Member, now_us: int) -> None:
        """A member of this relay is there."""
        self._snapshot_version = 0
        if self._links and not self.leaving:
            self._joined[member.serial] = member
            self.gather(now_us)

    def left(self, member: Member, now_us: int) -> None:
        """A member of this relay is gone."""
        self._snapshot_version = 0
        if self._links and not self.leaving:
            if self._joined.pop(member.serial, None) is None:
                self._left.append(member.serial)
            self.gather(now_us)

    def count_subscription(
        self, pattern: str, key_ids: Iterable[bytes], group: str, user: str, by: int, now_us: int
    ) -> None:
        """Count one session of a user more (`by` 1) or less (-1) that wants a topic."""
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
                self._changed[topic] = count
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
        """Return why one queue group more is too many here, or an empty text: an alias over a link may have to name them all."""
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
        """This relay is about to stop: others send nothing new to its members."""
        self.flush()
        self.leaving = True
        self._snapshot_version = 0
        self.journal.version += 1
        for link in self._links.values():
            for frame in self.snapshot():
                link.port.control(frame)

    def set_store(self, *, starting: bool, failed: str, now_us: int) -> None:
        """A store of this relay is on its way, or is not any more; or it cannot serve, and this is why."""
        if (starting, failed) != (self.starting, self.store_failed):
            self.starting, self.store_failed = starting, failed
            self._interest.version += 1  # what waits for it is looked at
            self.gather(now_us)

    def site_changed(self, site: str, now_us: int) -> None:
        """Another site is reached through us, or no more, or is another distance away."""
        self._sites[site] = None
        self.gather(now_us)

    def topics(self) -> list[Topic]:
        """Return every topic that somebody of this site wants."""
        there = (link.topics for link in self._links.values())
        return list(dict.fromkeys(topic for topics in (self._topics, *there) for topic in topics))

    def subscription_count(self, topic: Topic) -> int:
        """Return how many of this site want a topic."""
        there = sum(link.topics.get(topic, 0) for link in self._links.values())
        return self._topics.get(topic, 0) + there

    def gather(self, now_us: int) -> None:
        """Something is to be told to the other relays, with what else changes in a moment."""
        self._snapshot_version = 0
        if self.flush_us == NEVER_US:
            self.flush_us = now_us + GATHER_US
            self._due(self.flush_us)

    def flush(self) -> None:
        """Tell all links of what changed."""
        self.flush_us = NEVER_US
        joined = [_entry(member) for member in self._joined.values()]
        topics = [TopicEntry(*topic, count) for topic, count in self._changed.items()]
        sites, clusters, site_topics = self._reach.changes(self._sites)
        if self.leaving:
            sites, clusters, site_topics = [], [], []
        store, advertised = self._store_state(), self._advertised_store
        self._advertised_store = starting, failed = store
        for frame in self.journal.changes(
            int(store != advertised), joined=joined, left=self._left, topics=topics, sites=sites, clusters=clusters,
            site_topics=site_topics, starting=starting, store_failed=failed,
        ):  # fmt: skip
            for link in self._links.values():
                link.port.control(frame)
        self._joined, self._left, self._changed, self._sites = {}, [], {}, {}
        self.flushed()

    def on_resync(self, link: Link, _: object) -> None:
        """A change was lost on the way to it: all is told again."""
        self.flush()
        for frame in self.snapshot():
            link.port.control(frame)

    def snapshot(self) -> list[bytes]:
        """Return our interest as it is now; all that was gathered has been told."""
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
        """Return what links are told of our store."""
        return (False, "") if self.leaving else (self.starting, self.store_failed)


def _entry(member: Member) -> MemberEntry:
    kinds = {kind: load.concurrency for kind, load in member.loads.items()}
    return MemberEntry(
        member.serial, member.name, list(member.key_ids), kinds, member.session.label, member.tag
    )


def _nothing() -> None:
    """Nobody waits."""
