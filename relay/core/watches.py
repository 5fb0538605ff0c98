"""Watches: which sessions are notified of changes in a cluster, and the changes they have not been sent yet.

    a member joins or leaves ──► changes of its cluster ──► `expire`: each watch of it is sent them, once a turn

However often members come and go meanwhile, a watch is sent the difference, which is encoded once for all watches of
the same keys. With very many watches, `expire` notifies some of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from iris.wire.frames import MemberInfo, Membership
from iris.wire.kinds import NEVER_US
from relay.core.neighbor import Address
from relay.core.session import Watch

STEP_BYTES: Final = 128 << 10
"""About as many bytes of notices are sent at a stretch."""
NOTICE_BYTES: Final = 512
"""What a notice counts for in addition to its length."""
INFOS: Final = 256
"""Members in one notice."""


class _Change(NamedTuple):
    """What happened to a member. Numbers count the changes for its watches; 0: it did not happen."""

    first: int
    """When it joined first; 0: it was there before."""
    left: int
    """When it left last."""
    joined: int
    """When it joined last, if it is there."""
    info: MemberInfo | None
    """The member, if it is there."""


_Keys = tuple[str, tuple[bytes, ...]]
"""(name, key ids in order)."""


class _Cluster:
    """The watches of one name under the same keys, and what is to be sent to them."""

    __slots__ = (
        "changes",
        "count",
        "encoded",
        "since",
        "telling",
        "to_tell",
        "told",
        "until",
        "watches",
    )

    def __init__(self) -> None:
        self.watches: dict[tuple[int, int], Watch] = {}
        """(session number, watch number) -> watch."""
        self.changes: dict[str, _Change] = {}
        """Member id -> what happened to it since watches were notified."""
        self.count = 0
        """Number of the last change."""
        self.since = 0
        """`Watch.since` of the youngest watch."""
        self.telling: dict[str, _Change] = {}
        """The changes that watches are being sent."""
        self.told = 0
        """Number of the last change before those."""
        self.until = 0
        """Number of the last one of them."""
        self.to_tell: list[Watch] = []
        """The watches that are still to be sent them."""
        self.encoded: dict[int, list[_Notice]] = {}
        """(whether their sessions know of methods, since when they watch) -> what watches are sent."""

    @property
    def busy(self) -> bool:
        """Whether something is to be sent."""
        return bool(self.to_tell or self.changes)


class _Notice:
    """What several watches are sent in one frame."""

    __slots__ = ("joined", "left", "size")

    def __init__(self, joined: Sequence[MemberInfo], left: list[str]) -> None:
        raw = msgspec.msgpack.encode(joined)
        # The encoder takes what is encoded already in the place of the list.
        self.joined = cast("list[MemberInfo]", msgspec.Raw(raw))
        self.left = left
        self.size = len(raw) + 48 * len(left) + NOTICE_BYTES


class Watches:
    """All watches at one relay."""

    def __init__(self) -> None:
        self.deadline_us = NEVER_US
        """When `expire` is due: at once, if something is to be sent."""
        self._clusters: dict[_Keys, _Cluster] = {}
        """(name, key ids) -> its watches. It has no entry without one."""
        self._concerned: dict[Address, dict[_Keys, _Cluster]] = {}
        """Address -> those of them that its members concern."""
        self._busy: dict[_Keys, None] = {}
        """Those with something to send; the first is next."""

    def __len__(self) -> int:
        return sum(len(cluster.watches) for cluster in self._clusters.values())

    def add(self, watch: Watch) -> None:
        """Notify a session of changes from now on."""
        keys = _keys_of(watch)
        cluster = self._clusters.get(keys)
        if cluster is None:
            cluster = self._clusters[keys] = _Cluster()
            for key_id in keys[1]:
                self._concerned.setdefault((watch.name, key_id), {})[keys] = cluster
        cluster.watches[watch.session.number, watch.number] = watch
        watch.since = cluster.since = cluster.count

    def remove(self, watch: Watch) -> None:
        """Stop notifying a session, if it was notified."""
        keys = _keys_of(watch)
        cluster = self._clusters.get(keys)
        if cluster is None:
            return
        cluster.watches.pop((watch.session.number, watch.number), None)
        if cluster.watches:
            return
        del self._clusters[keys]
        self._busy.pop(keys, None)
        for key_id in keys[1]:
            there = self._concerned[watch.name, key_id]
            del there[keys]
            if not there:
                del self._concerned[watch.name, key_id]

    def expects(self, name: str, key_ids: Iterable[bytes]) -> bool:
        """Whether anybody watches an address."""
        return any((name, key_id) in self._concerned for key_id in key_ids)

    def joined(self, name: str, key_ids: Iterable[bytes], info: MemberInfo) -> None:
        """Note that a member joined, or came back."""
        for keys, cluster in self._of(name, key_ids).items():
            number = self._number(keys, cluster)
            before = cluster.changes.get(info.member)
            first, left = (number, 0) if before is None else (before.first, before.left)
            cluster.changes[info.member] = _Change(first, left, number, info)

    def left(self, name: str, key_ids: Iterable[bytes], member: str) -> None:
        """Note that a member left."""
        for keys, cluster in self._of(name, key_ids).items():
            before = cluster.changes.get(member)
            first = 0 if before is None else before.first
            if first > cluster.since:
                del cluster.changes[member]  # nobody knows of it
            else:
                number = self._number(keys, cluster)
                cluster.changes[member] = _Change(first, number, 0, None)

    def _of(self, name: str, key_ids: Iterable[bytes]) -> dict[_Keys, _Cluster]:
        found: dict[_Keys, _Cluster] = {}
        for key_id in key_ids:
            found.update(self._concerned.get((name, key_id), {}))
        return found

    def _number(self, keys: _Keys, cluster: _Cluster) -> int:
        """Return the number of a change that is to be sent."""
        self._busy[keys] = None
        self.deadline_us = 0
        cluster.count += 1
        return cluster.count

    def expire(self) -> None:
        """Send some of what is to be sent."""
        left = STEP_BYTES
        while self._busy and left > 0:
            keys = next(iter(self._busy))
            del self._busy[keys]
            cluster = self._clusters[keys]
            if not cluster.to_tell:
                cluster.telling, cluster.changes = cluster.changes, {}
                cluster.to_tell = [*cluster.watches.values()]
                cluster.until = cluster.count
                cluster.encoded = {}
            while cluster.to_tell and left > 0:
                watch = cluster.to_tell.pop()
                left -= NOTICE_BYTES
                if cluster.watches.get((watch.session.number, watch.number)) is watch:
                    left -= _notify(cluster, watch)
            if not cluster.to_tell:
                cluster.telling, cluster.encoded = {}, {}
                cluster.told = cluster.until
            if cluster.busy:
                self._busy[keys] = None  # behind all others
        self.deadline_us = 0 if self._busy else NEVER_US


def _notify(cluster: _Cluster, watch: Watch) -> int:
    """Send a watch the changes; return their size."""
    since = watch.since if watch.since > cluster.told else 0
    notices = cluster.encoded.get(since)
    if notices is None:
        left, joined = _news(cluster.telling, since)
        notices = [_Notice([], left[at : at + INFOS]) for at in range(0, len(left), INFOS)]
        for at in range(0, len(joined), INFOS):
            notices.append(_Notice(joined[at : at + INFOS], []))
        cluster.encoded[since] = notices
    for notice in notices:
        watch.session.control(Membership(watch.number, notice.joined, notice.left))
    return sum(notice.size for notice in notices)


def _news(changes: dict[str, _Change], since: int) -> tuple[list[str], list[MemberInfo]]:
    """Return which members left and which joined, for a watch that knows of the changes up to `since`."""
    left: list[str] = []
    joined: list[MemberInfo] = []
    for member, change in changes.items():
        if change.left > since and (not change.first or change.first <= since):
            left.append(member)
        if change.info is not None and change.joined > since:
            joined.append(change.info)
    return left, joined


def _keys_of(watch: Watch) -> _Keys:
    return watch.name, tuple(sorted(watch.key_ids))
