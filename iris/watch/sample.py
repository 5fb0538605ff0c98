"""What was gathered at one time, before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from iris.describing import Description
from iris.streams.listing import StreamInfo
from iris.watch.network import MAX_SENTENCE, MAX_TEXT
from iris.wire.consumers import ConsumerInfo
from iris.wire.frames import MemberInfo
from iris.wire.names import printable


@dataclass(slots=True)
class RelayAnswer:
    """The status of one relay that was asked; without a report, why there is none."""

    address: str
    host: str
    """Host of the address, for a relay that has never said its name."""
    report: dict[str, Any] | None
    error: str = ""


@dataclass(slots=True)
class MemberAnswer:
    """What one member said of itself; without a description, why there is none."""

    description: Description | None
    error: str = ""
    silent: bool = False
    """Whether it gave no answer at all."""


@dataclass(slots=True)
class ClusterAnswer:
    """The members of a cluster under the keys that are held, and the answers of those that were asked."""

    members: Sequence[MemberInfo]
    others: dict[str, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    answers: dict[str, MemberAnswer] = field(default_factory=dict)


@dataclass(slots=True)
class StreamAnswer:
    """A stream and its consumers; None if these were not asked for now."""

    info: StreamInfo
    consumers: Sequence[ConsumerInfo] | None = None


@dataclass(slots=True)
class Sample:
    """One look at the network."""

    at_s: float
    """Monotonic time."""
    time_us: int
    relays: list[RelayAnswer] = field(default_factory=list)
    clusters: dict[str, ClusterAnswer] = field(default_factory=dict)
    """Clusters for which a key is held."""
    streams: list[StreamAnswer] | None = None
    """None if stores were not asked now."""
    problems: list[str] = field(default_factory=list)


def text(value: object) -> str:
    """Return text of another process that can be shown: without control characters, and not too long."""
    shown = printable(str(value))
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"


def sentence(value: object) -> str:
    """Return an error of another process that can be shown."""
    shown = printable(str(value))
    return shown if len(shown) <= MAX_SENTENCE else shown[: MAX_SENTENCE - 1] + "…"


def number(value: object) -> float:
    """Return a number of another process; 0 for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return 0.0


def whole(value: object) -> int:
    """Return a whole number of another process; 0 for anything else."""
    return int(number(value))
