"""Who hears a topic: what `Client.audience` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iris.wire import frames


@dataclass(frozen=True, slots=True)
class SlowReceiver:
    """A process, or (`link`) another relay, for which a relay dropped messages of a topic: it did not read them in time."""

    label: str
    dropped: int
    """Messages of this topic."""
    since_s: float
    """How long ago the first was dropped, of whatever topic, ..."""
    last_s: float
    """... and the last."""
    relay: str
    """Host of the relay that dropped them."""
    pid: int
    """0 if it is not shown to this user."""
    address: str
    """host:port of a process on another host than its relay; may be empty."""
    link: bool


@dataclass(frozen=True, slots=True)
class Audience:
    """Who hears a topic now, as far as the relay of this host knows."""

    subscribers: int
    """Subscriptions, members of queue groups and stores that record it included; each session counts once for a filter and group."""
    dropped: int = 0
    """Messages of the topic that relays of this site dropped, because somebody was slow, and remember."""
    slow: Sequence[SlowReceiver] = ()

    @classmethod
    def of(cls, told: frames.Audience) -> Audience:
        """Return what a relay answered."""
        slow = [
            SlowReceiver(
                each.label, each.dropped, each.since_us / 1e6, each.last_us / 1e6, each.relay, each.pid, each.address, each.link
            )
            for each in told.slow
        ]  # fmt: skip
        return cls(told.subscribers, told.dropped, slow)
