"""Slow receivers: who did not read casts in time, and how much was dropped for them. Kept for operators and publishers.

a drop ── within GATHER_US ──► reported to the log, then every AGAIN_US while drops go on
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from iris.wire.kinds import NEVER_US
from relay.core.connection import Delivery
from relay.core.neighbor import Neighbor
from relay.core.session import Session

GATHER_US: Final = 200_000
"""Time from the first drop to its report, so that a burst is reported with its count."""
AGAIN_US: Final = 10_500_000
"""Interval of reports about one receiver while drops go on."""
MAX_REPORTED: Final = 64
"""Receivers in a status report."""
TOPICS_REPORTED: Final = 8
"""Names of topics per receiver in a status report."""
MAX_SLOW: Final = 256
"""Limit of receivers remembered. The one whose last drop is oldest makes room."""
MAX_TOPICS: Final = 64
"""Limit of addresses remembered per receiver; drops of others count in its total only."""
Address = tuple[str, bytes]
"""(name, key id)."""


class Slow:
    """One session, link or WAN connection for which messages were dropped."""

    __slots__ = (
        "address", "dropped", "label", "last_us", "link", "number", "pid", "reported_us", "since_us", "topics", "unreported", "user",
    )  # fmt: skip

    def __init__(self, neighbor: Neighbor, now_us: int) -> None:
        self.number = neighbor.number
        self.label = neighbor.label
        self.link = bool(neighbor.hop_class)
        """Whether it is another relay."""
        self.pid = neighbor.pid if isinstance(neighbor, Session) else 0
        self.user = neighbor.user if isinstance(neighbor, Session) else ""
        self.address = neighbor.address
        self.since_us = self.last_us = now_us
        """Times of the first and the latest drop, by the relay's clock."""
        self.dropped = 0
        self.unreported = 0
        """Drops that were not reported to the log yet."""
        self.reported_us = 0
        """When it was reported to the log last; 0 if never."""
        self.topics: dict[Address, int] = {}
        """Address -> dropped messages."""

    def report(self, now_us: int) -> dict[str, object]:
        """Return the figures, ready for JSON, including names."""
        return {
            "session": self.number,
            "label": self.label,
            "link": self.link,
            "pid": self.pid,
            "user": self.user,
            "address": self.address,
            "dropped": self.dropped,
            "since_s": round((now_us - self.since_us) / 1e6, 3),
            "last_s": round((now_us - self.last_us) / 1e6, 3),
            "topics": list(dict.fromkeys(name for name, _ in self.topics))[:TOPICS_REPORTED],
        }


class SlowReceivers:
    """The slow receivers of one relay. A drop costs one look-up; receivers without drops cost nothing."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` returns the relay's time in µs."""
        self._clock = clock
        self.deadline_us = NEVER_US
        """When `expire` is due."""
        self.on_report: Callable[[Slow, int], None] = _ignore
        """Called with a slow receiver and the time, for the log."""
        self._slow: dict[int, Slow] = {}
        """Number -> receiver; the one with the latest drop is last."""
        self._latest = -1

    def dropped(self, neighbor: Neighbor, delivery: Delivery, count: int) -> None:
        """Note that messages for a neighbor were dropped."""
        number, now_us = neighbor.number, self._clock()
        slow = self._slow.get(number)
        if slow is None:
            if len(self._slow) >= MAX_SLOW:
                del self._slow[next(iter(self._slow))]
            slow = self._slow[number] = Slow(neighbor, now_us)
        elif self._latest != number:
            self._slow[number] = self._slow.pop(number)
        self._latest = number
        slow.dropped += count
        slow.last_us = now_us
        if not slow.unreported:
            due_us = max(now_us + GATHER_US, slow.reported_us + AGAIN_US if slow.reported_us else 0)
            self.deadline_us = min(self.deadline_us, due_us)
        slow.unreported += count
        address = (delivery[1], delivery[2])
        known = slow.topics.get(address)
        if known is not None:
            slow.topics[address] = known + count
        elif len(slow.topics) < MAX_TOPICS:
            slow.topics[address] = count

    def expire(self, now_us: int) -> None:
        """Report to the log what is due."""
        soonest = NEVER_US
        for slow in self._slow.values():
            if not slow.unreported:
                continue
            due_us = slow.reported_us + AGAIN_US if slow.reported_us else 0
            if now_us < due_us:
                soonest = min(soonest, due_us)
                continue
            slow.reported_us = now_us
            self.on_report(slow, now_us)
            slow.unreported = 0
        self.deadline_us = soonest

    def of(self, name: str, key_id: bytes) -> list[tuple[Slow, int]]:
        """Return (receiver, dropped messages of an address), the latest first."""
        address = (name, key_id)
        return [
            (slow, slow.topics[address])
            for slow in reversed(self._slow.values())
            if address in slow.topics
        ]

    def report(self, now_us: int) -> list[dict[str, object]]:
        """Return the latest receivers, ready for JSON, the last one first."""
        latest = islice(reversed(self._slow.values()), MAX_REPORTED)
        return [slow.report(now_us) for slow in latest]


def _ignore(slow: Slow, now_us: int) -> None:
    """Default for `on_report`."""
