"""Interest that is replicated: the journal of who tells it, and the state of who hears it.

    Journal   a snapshot to who is new, then changes, each from one version to the next
    Replica   FRESH ── reset ──► SNAPSHOT ── its last part ──► LIVE ── a change is missing ──► RESYNC ── reset ──► SNAPSHOT

The mesh tells and hears the members of relays in this way, and with them the sites that gateways reach; federation a site as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

from iris.wire.codec import encode_control
from iris.wire.frames import (
    Interest,
    MemberEntry,
    Resync,
    SiteCluster,
    SiteEntry,
    SiteTopic,
    TopicEntry,
)

_FRAME_BYTES: Final = 32 << 10


class Journal:
    """What one side has told of its interest: changes and snapshots as frames. `version` rises with every change."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 1

    def changes(self, least: int = 0, /, **said: Any) -> Iterator[bytes]:
        """Yield the frames that tell of a change, at least so many. What is no list is said in each of them."""
        lists, rest = _apart(said)
        for part in list(cut(**lists)) or [{}] * least:
            frame = encode_control(Interest(self.version, self.version + 1, **part, **rest))
            self.version += 1
            yield frame

    def snapshot(self, **said: Any) -> list[bytes]:
        """Return the frames that tell of everything."""
        lists, rest = _apart(said)
        parts = list(cut(**lists)) or [{}]
        last = len(parts) - 1
        return [
            encode_control(
                Interest(0, self.version, **part, reset=index == 0, more=index < last, **rest)
            )
            for index, part in enumerate(parts)
        ]


class Stage(Enum):
    """How much a replica has heard."""

    FRESH = "nothing came"
    LIVE = "it is as the other side said last"
    RESYNC = "a change is missing, and a snapshot was asked for"
    SNAPSHOT = "a snapshot is coming in"


class Verdict(Enum):
    """What to do with an Interest."""

    PART = "it is part of a snapshot"
    CHANGE = "it changes what is known"
    IGNORED = "the snapshot that is due will have it"
    MISSING = "a change before it is missing: ask again"


class Replica:
    """How far one side has heard the other's journal."""

    __slots__ = ("coming", "known", "resyncs", "stage", "version")

    def __init__(self) -> None:
        self.stage = Stage.FRESH
        self.coming = Interest(0, 0)
        """What the parts of a snapshot that is coming in have said of sites."""
        self.known = False
        """A first snapshot has come in whole."""
        self.version = 0
        self.resyncs = 0

    def receive(self, change: Interest) -> Verdict:
        """Return what an Interest is. Of a snapshot `whole` is to be called with the last part."""
        if change.reset:
            self.stage, self.coming = Stage.SNAPSHOT, Interest(0, 0)
        if self.stage is Stage.SNAPSHOT:
            return Verdict.PART
        if self.stage is Stage.RESYNC:
            return Verdict.IGNORED
        if self.stage is Stage.FRESH or change.base != self.version:
            return Verdict.MISSING
        self.version = change.version
        return Verdict.CHANGE

    def gather(self, part: Interest, limit: int, sites: int = 0) -> int:
        """Keep what a part of a snapshot says of sites, up to so many sites and entries. Returns how many were left out."""
        coming = self.coming
        return (
            _extend(coming.sites, part.sites, sites)
            + _extend(coming.clusters, part.clusters, limit)
            + _extend(coming.site_topics, part.site_topics, limit)
        )

    def whole(self, version: int) -> bool:
        """A snapshot has come in: return whether it is the first."""
        first, self.known = not self.known, True
        self.stage, self.version, self.coming = Stage.LIVE, version, Interest(0, 0)
        return first

    def in_step(self, version: int) -> bool:
        """Whether nothing is missing if the other side is at this version."""
        return self.stage is not Stage.LIVE or version == self.version

    @property
    def behind(self) -> bool:
        """Whether a snapshot is due, or coming in, that was asked for."""
        return self.stage in (Stage.RESYNC, Stage.SNAPSHOT)

    def request_resync(self) -> Resync:
        """Return what asks for a snapshot."""
        self.stage = Stage.RESYNC
        self.resyncs += 1
        return Resync(self.version)


def _extend(known: list[Any], more: Sequence[object], limit: int) -> int:
    """Append as many entries as `limit` allows; return how many were left out."""
    room = max(0, limit - len(known))
    known.extend(more[:room])
    return max(0, len(more) - room)


def _apart(said: dict[str, Any]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Return the lists, and the rest."""
    lists: dict[str, Sequence[Any]] = {
        name: value for name, value in said.items() if isinstance(value, list)
    }
    return lists, {name: value for name, value in said.items() if name not in lists}


def cut(**change: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Cut the lists of an Interest into pieces that fit a control frame each; nothing makes no piece."""
    part: dict[str, list[Any]] = {}
    size = 0
    for name, items in change.items():
        for item in items:
            part.setdefault(name, []).append(item)
            size += _size(item)
            if size > _FRAME_BYTES:
                yield part
                part, size = {}, 0
    if part:
        yield part


def _size(item: object) -> int:
    """Return how many bytes an entry takes at most."""
    match item:
        case MemberEntry():
            texts = len(item.name) + len(item.label) + len(item.tag)
            return 96 + 4 * texts + 18 * len(item.key_ids)
        case TopicEntry():
            return 64 + 4 * (len(item.filter) + len(item.group))
        case SiteTopic():
            return 96 + 4 * (len(item.filter) + len(item.group))
        case SiteCluster():
            return 160 + 4 * len(item.name)
        case SiteEntry():
            return 64
    return 9
