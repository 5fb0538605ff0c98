"""The interest that a relay routes by: members by cluster, subscribers by topic, links that lead to them.

An address is (name, key id). `version` rises with every change that may alter a route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from iris.wire.kinds import MAX_OTHER_KEYS, HopClass, Kind
from relay.core.link import Link
from relay.core.neighbor import Address, Load, Subscriber, Topic
from relay.core.seen import Seen
from relay.core.session import Member, is_listed
from relay.core.watches import Watches

MAX_OTHERS: Final = MAX_OTHER_KEYS
"""Limit of other keys of a name that are reported to a caller without them. Anybody can make up keys."""
MAX_COUNT: Final = 0xFFFFFFFF
"""Largest count in a frame."""
MAX_NODES: Final = 4096
MAX_WIDTH: Final = 64
MAX_SUBSCRIBERS: Final = 16_384
"""Nodes of topic trees, nodes of one level of a tree, and subscribers that one question about a topic looks at. Over
these limits, the answer counts too few."""
MAX_SHOWN: Final = 4096
"""Names in one report."""


class _Node:
    """One token of the topic tree. `subscribers`: (number, group) -> session, link or site route."""

    __slots__ = ("children", "rest", "subscribers")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        """Next token -> node."""
        self.subscribers: dict[tuple[int, str], Subscriber] = {}
        self.rest: dict[tuple[int, str], Subscriber] = {}
        """Subscribers of a filter that ends in '>' below this token."""


_Match = tuple[str, dict[tuple[int, str], Subscriber]]
"""(filter, its subscribers)."""


class Interest:
    """All members and subscribers: those of this relay one by one, others by link or site route."""

    def __init__(self) -> None:
        self.version = 0
        self.tick = 0
        """Rises with every use of an alias, so that all aliases are dated by one clock."""
        self._clusters: dict[Address, dict[int, Member]] = {}
        """Address -> serial -> member of this relay."""
        self._names: dict[str, dict[bytes, int]] = {}
        """Cluster -> key id -> number of listed members of this relay."""
        self._peers: dict[Address, dict[int, Link]] = {}
        """Address -> link number -> link that leads to members."""
        self._topics: dict[bytes, _Node] = {}
        """Key id -> root of its topic tree."""
        self._heads: dict[str, dict[bytes, None]] = {}
        """First token of filters -> key ids under which there are such filters."""
        self.watches = Watches()
        self.seen = Seen()
        """Members that left a moment ago, here and elsewhere."""
        self.changed: Callable[[Address], None] = _ignore
        self.changed_topic: Callable[[Topic], None] = _ignore
        self.joined = 0
        """Number of members of this relay."""
        self.on_members: Callable[[], object] = _nothing
        """Called after a member of this relay joined or left."""

    def listen(
        self, changed: Callable[[Address], None], changed_topic: Callable[[Topic], None]
    ) -> None:
        """Set what to call when members of an address, or subscriptions to a topic, may have changed in this site."""
        self.changed, self.changed_topic = changed, changed_topic

    def next_tick(self) -> int:
        """Return the date of the alias used now."""
        self.tick += 1
        return self.tick

    # -- clusters --------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Add a member of this relay."""
        self.version += 1
        self.joined += 1
        for key_id in member.key_ids:
            self._clusters.setdefault((member.name, key_id), {})[member.serial] = member
            self.changed((member.name, key_id))
            if not member.listed:
                continue
            counts = self._names.setdefault(member.name, {})
            counts[key_id] = counts.get(key_id, 0) + 1
        self.on_members()

    def leave(self, member: Member) -> None:
        """Remove a member of this relay."""
        self.version += 1
        self.joined -= 1
        for key_id in member.key_ids:
            address = (member.name, key_id)
            self.changed(address)
            members = self._clusters[address]
            del members[member.serial]
            if not members:
                del self._clusters[address]
            if not member.listed:
                continue
            counts = self._names[member.name]
            counts[key_id] -= 1
            if not counts[key_id]:
                del counts[key_id]
                if not counts:
                    del self._names[member.name]
        self.on_members()

    def loads(self, name: str, key_id: bytes, kind: int) -> list[Load]:
        """Return the members of an address that serve `kind`, oldest first."""
        members = self._clusters.get((name, key_id))
        if not members:
            return []
        return [
            member.loads[kind]
            for member in members.values()
            if kind in member.loads and not member.session.closed
        ]

    def member(self, name: str, key_id: bytes, serial: int) -> Member | None:
        """Return a member of this relay at an address by its serial; None if it is not there."""
        member = self._clusters.get((name, key_id), {}).get(serial)
        return None if member is None or member.session.closed else member

    def members(
        self, name: str, key_ids: Iterable[bytes], *, streams: bool = False
    ) -> list[Member]:
        """Return the members under any of the key ids, each once, oldest first; with `streams` the stores that
        hold one instead.
        """
        found: dict[int, Member] = {}
        for key_id in key_ids:
            found.update(self._clusters.get((name, key_id), {}))
        members = [found[serial] for serial in sorted(found)]
        if streams:
            return [member for member in members if Kind.STREAM in member.loads]
        return [member for member in members if member.listed]

    def other_keys(self, name: str, key_ids: Iterable[bytes]) -> dict[str, int]:
        """Return how many members serve `name` under other keys: first 4 bytes of the key id in hex -> count."""
        known = set(key_ids)
        counts = islice(self._names.get(name, {}).items(), MAX_OTHERS + len(known))
        return {key_id[:4].hex(): n for key_id, n in sorted(counts) if key_id not in known}

    @property
    def names(self) -> int:
        """Number of cluster names with members of this relay."""
        return len(self._names)

    def cluster_counts(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield (name, first 4 bytes of key ids in hex -> members) of the oldest `MAX_SHOWN` names that are left."""
        for name in sorted(islice(self._names, MAX_SHOWN)):
            counts = sorted(islice(self._names.get(name, {}).items(), MAX_OTHERS))
            yield name, {key_id[:4].hex(): count for key_id, count in counts}

    def serve(self, link: Link, address: Address) -> None:
        """Note that a relay behind a link has members of `address`."""
        self._peers.setdefault(address, {})[link.number] = link

    def unserve(self, link: Link, address: Address) -> None:
        """Note that a link no longer leads to members of `address`."""
        links = self._peers[address]
        del links[link.number]
        if not links:
            del self._peers[address]

    def peer_loads(self, name: str, key_id: bytes, kind: int) -> list[Load]:
        """Return one load for each link with members of an address that serve `kind`, oldest link first."""
        links = self._peers.get((name, key_id))
        if not links:
            return []
        loads = [link.load(kind, name, key_id) for link in links.values()]
        return [load for load in loads if load is not None]

    def addresses(self) -> list[Address]:
        """Return every address of this site that has members."""
        return list(dict.fromkeys((*self._clusters, *self._peers)))

    def serving(self, name: str, key_id: bytes) -> Iterator[tuple[dict[int, int], bool, str]]:
        """Yield, for each member of this site at an address: kind -> handlers, whether it is listed, and its tag."""
        for member in self._clusters.get((name, key_id), {}).values():
            kinds = {kind: load.concurrency for kind, load in member.loads.items()}
            yield kinds, member.listed, member.tag
        for link in self._peers.get((name, key_id), {}).values():
            for entry in link.copy.entries(name, key_id).values():
                yield entry.kinds, is_listed(entry.kinds), entry.tag

    # -- topics ----------------------------------------------------------------------------------------------

    def subscribe(
        self, session: Subscriber, pattern: str, group: str, key_ids: Iterable[bytes]
    ) -> None:
        """Add a subscription of a session, link or site route to topics that match `pattern`."""
        self.version += 1
        for key_id in key_ids:
            node = self._topics.setdefault(key_id, _Node())
            tokens = pattern.split(".")
            self._heads.setdefault(tokens[0], {})[key_id] = None
            rest = tokens[-1] == ">"
            for token in tokens[:-1] if rest else tokens:
                node = node.children.setdefault(token, _Node())
            (node.rest if rest else node.subscribers)[(session.number, group)] = session

    def unsubscribe(
        self, session: Subscriber, pattern: str, group: str, key_ids: Iterable[bytes]
    ) -> None:
        """Remove a subscription; empty branches are pruned."""
        self.version += 1
        for key_id in key_ids:
            root = self._topics[key_id]
            tokens = pattern.split(".")
            rest = tokens[-1] == ">"
            path = [root]
            walked = tokens[:-1] if rest else tokens
            for token in walked:
                path.append(path[-1].children[token])
            del (path[-1].rest if rest else path[-1].subscribers)[(session.number, group)]
            for parent, token in zip(reversed(path[:-1]), reversed(walked), strict=True):
                node = parent.children[token]
                if node.children or node.subscribers or node.rest:
                    break
                del parent.children[token]
            if tokens[0] not in root.children if walked else not root.rest:
                heads = self._heads[tokens[0]]
                del heads[key_id]
                if not heads:
                    del self._heads[tokens[0]]
            if not (root.children or root.rest):
                del self._topics[key_id]

    def subscribers(
        self, topic: str, key_id: bytes
    ) -> tuple[list[Subscriber], dict[str, list[Subscriber]]]:
        """Return (subscribers of `topic` without a group, group -> its subscribers), each once per group,
        oldest first.
        """
        root = self._topics.get(key_id)
        if root is None:
            return [], {}
        found: dict[tuple[int, str], Subscriber] = dict(root.rest)
        nodes = [root]
        tokens = topic.split(".")
        for depth, token in enumerate(tokens):
            nodes = [
                child
                for node in nodes
                for child in (node.children.get(token), node.children.get("*"))
                if child is not None
            ]
            if depth + 1 < len(tokens):
                for node in nodes:
                    found.update(node.rest)
        for node in nodes:
            found.update(node.subscribers)
        plain: list[Subscriber] = []
        groups: dict[str, list[Subscriber]] = {}
        for number, group in sorted(found):
            session = found[(number, group)]
            if group:
                groups.setdefault(group, []).append(session)
            else:
                plain.append(session)
        return plain, dict(sorted(groups.items()))

    def audience(self, topic: str, key_id: bytes) -> int:
        """Return how many known subscriptions match a topic, in this relay, other relays and remote sites.

        Very many are not all looked at: see `MAX_NODES`.
        """
        root = self._topics.get(key_id)
        return 0 if root is None else _count(_matching(root, topic, _Look()), key_id)

    def links(self, topic: str, key_id: bytes) -> list[Link]:
        """Return the links with subscriptions that match a topic. Very many are not all looked at: see `MAX_NODES`."""
        root = self._topics.get(key_id)
        matching = [] if root is None else _matching(root, topic, _Look())
        found = {
            subscriber: None
            for _, subscribers in matching
            for subscriber in subscribers.values()
            if subscriber.hop_class is HopClass.MESH and isinstance(subscriber, Link)
        }
        return list(found)

    def other_audience(self, topic: str, key_id: bytes, *, named: bool = False) -> dict[str, int]:
        """Return how many subscriptions match a topic under other keys: first 4 bytes of the key id in hex -> count.

        Subscriptions that are also under `key_id` do not count. With `named`, neither do filters that begin with a
        wildcard: they do not show that somebody expects this topic.
        """
        first = topic.partition(".")[0]
        heads = (first,) if named else (first, "*", ">")
        every = chain.from_iterable(self._heads.get(head, ()) for head in heads)
        keys = sorted(set(islice(every, MAX_OTHERS + 1)) - {key_id})[:MAX_OTHERS]
        if not keys:
            return {}
        root = self._topics.get(key_id)
        look = _Look()
        own = {
            (pattern, *which)
            for pattern, subscribers in (() if root is None else _matching(root, topic, look))
            for which in subscribers
        }
        found: dict[str, int] = {}
        for key in keys:
            matching = _matching(self._topics[key], topic, look, named=named)
            if count := _count(matching, key, own, key_id):
                short = key[:4].hex()
                found[short] = min(found.get(short, 0) + count, MAX_COUNT)
        return found


def _ignore(_: object) -> None:
    """Default for `changed` and `changed_topic`."""


def _nothing() -> None:
    """Default for `on_members`."""


class _Look:
    """What one question about a topic may still look at."""

    __slots__ = ("nodes", "subscribers")

    def __init__(self) -> None:
        self.nodes = MAX_NODES
        self.subscribers = MAX_SUBSCRIBERS

    def take(
        self, subscribers: dict[tuple[int, str], Subscriber]
    ) -> dict[tuple[int, str], Subscriber]:
        """Return as many of the subscribers of a filter as may be looked at."""
        left = self.subscribers
        self.subscribers = max(0, left - len(subscribers))
        return subscribers if len(subscribers) <= left else dict(islice(subscribers.items(), left))


def _matching(root: _Node, topic: str, look: _Look, *, named: bool = False) -> list[_Match]:
    """Return the filters in a tree that match a topic, each with its subscribers, as many as `look` allows.

    With `named`, leave out filters that begin with a wildcard.
    """
    found: list[_Match] = [] if named else [(">", look.take(root.rest))]
    nodes = [("", root)]
    tokens = topic.split(".")
    for depth, token in enumerate(tokens):
        nodes = [
            (f"{path}{name}.", child)
            for path, node in nodes
            for name in ((token,) if named and not depth else (token, "*"))
            if (child := node.children.get(name)) is not None
        ]
        del nodes[min(MAX_WIDTH, look.nodes) :]
        look.nodes -= len(nodes)
        if depth + 1 < len(tokens):
            found += [(path + ">", look.take(node.rest)) for path, node in nodes if node.rest]
    return found + [
        (path[:-1], look.take(node.subscribers)) for path, node in nodes if node.subscribers
    ]


def _count(
    matching: Iterable[_Match], key_id: bytes, own: Collection[tuple[str, int, str]] = (), own_key: bytes = b""
) -> int:  # fmt: skip
    """Return the number of subscriptions under a key, less those of them that are also under `own_key`.

    `own`: (filter, number, group) of every subscription under `own_key`.
    """
    count = 0
    sites: dict[tuple[str, str, str], int] = {}
    """(site, filter, group) -> count: several routes to a site report the same subscriptions."""
    for pattern, subscribers in matching:
        for (number, group), subscriber in subscribers.items():
            if (
                subscriber.hop_class is HopClass.LOCAL and not own
            ):  # most of them, if there are very many
                count += 1
                continue
            here = subscriber.subscription_count((pattern, key_id, group))
            if (pattern, number, group) in own:
                here = max(0, here - subscriber.subscription_count((pattern, own_key, group)))
            if subscriber.hop_class == HopClass.TO_WAN:
                where = (subscriber.site, pattern, group)
                sites[where] = max(sites.get(where, 0), here)
            else:
                count += here
    return count + sum(sites.values())
