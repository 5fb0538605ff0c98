"""Replicated interest: the journal of the side that advertises it, and the state of the side that receives it.

    Journal   a snapshot for a new peer, then changes, each from one version to the next
    Replica   FRESH ── reset ──► SNAPSHOT ── its last part ──► LIVE
              LIVE ── a change is missing ──► RESYNC ── reset ──► SNAPSHOT

Links replicate the members of relays in this way, and the sites that gateways reach. WAN connections
replicate whole sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

from iris.wire.codec import encode_control
from iris.wire.link_frames import (
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
    """The advertising side: changes and snapshots as frames. `version` rises with every change."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 1

    def changes(self, least: int = 0, /, **said: Any) -> Iterator[bytes]:
        """Yield the frames of a change, `least` of them at least.

        Values that are not lists are repeated in each frame.
        """
        lists, rest = _apart(said)
        for part in list(cut(**lists)) or [{}] * least:
            frame = encode_control(Interest(self.version, self.version + 1, **part, **rest))
            self.version += 1
            yield frame

    def snapshot(self, **said: Any) -> list[bytes]:
        """Return the frames of a snapshot."""
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
    """How much a replica has received."""

    FRESH = "nothing received"
    LIVE = "up to date"
    RESYNC = "a change is missing; a snapshot was requested"
    SNAPSHOT = "a snapshot is arriving"


class Verdict(Enum):
    """What to do with an INTEREST frame."""

    PART = "part of a snapshot"
    CHANGE = "a change to apply"
    IGNORED = "the snapshot that is due includes it"
    MISSING = "an earlier change is missing"


class Replica:
    """The receiving side: how far it has received the other side's journal."""

    __slots__ = ("coming", "known", "resyncs", "stage", "version")

    def __init__(self) -> None:
        self.stage = Stage.FRESH
        self.coming = Interest(0, 0)
        """What the parts of an arriving snapshot have said about sites so far."""
        self.known = False
        """A complete snapshot has arrived before."""
        self.version = 0
        self.resyncs = 0

    def receive(self, change: Interest) -> Verdict:
        """Return what an INTEREST frame is. Call `whole` with the last part of a snapshot."""
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
        """Store what a part of a snapshot says about sites, up to `sites` sites and `limit` entries.

        Returns how many were dropped.
        """
        coming = self.coming
        return (
            _extend(coming.sites, part.sites, sites)
            + _extend(coming.clusters, part.clusters, limit)
            + _extend(coming.site_topics, part.site_topics, limit)
        )

    def whole(self, version: int) -> bool:
        """Note that a snapshot is complete; return whether it is the first."""
        first, self.known = not self.known, True
        self.stage, self.version, self.coming = Stage.LIVE, version, Interest(0, 0)
        return first

    def in_step(self, version: int) -> bool:
        """Whether nothing is missing if the other side is at this version."""
        return self.stage is not Stage.LIVE or version == self.version

    @property
    def behind(self) -> bool:
        """Whether a snapshot that was asked for is due or arriving."""
        return self.stage in (Stage.RESYNC, Stage.SNAPSHOT)

    def request_resync(self) -> Resync:
        """Return the frame that asks for a snapshot."""
        self.stage = Stage.RESYNC
        self.resyncs += 1
        return Resync(self.version)


def _extend(known: list[Any], more: Sequence[object], limit: int) -> int:
    """Append as many entries as `limit` allows; return how many were dropped."""
    room = max(0, limit - len(known))
    known.extend(more[:room])
    return max(0, len(more) - room)


def _apart(said: dict[str, Any]) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Return (values that are lists, all other values)."""
    lists: dict[str, Sequence[Any]] = {
        name: value for name, value in said.items() if isinstance(value, list)
    }
    return lists, {name: value for name, value in said.items() if name not in lists}


def cut(**change: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Cut the lists of an INTEREST into pieces that fit in a control frame each; empty lists make no piece."""
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
    """Return the largest encoded size of an entry in bytes."""
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
