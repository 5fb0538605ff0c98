"""What an entry has done: messages in and out, and what was lost, by cause."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from relay.logs import Quiet

log = logging.getLogger(__name__)

_quiet: Final = Quiet()


class Tally:
    """The account of one entry."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.from_sp = 0
        """Messages received from SP peers."""
        self.to_sp = 0
        """Messages handed to nng for SP peers. What its sockets drop for a slow SUB or BUS peer is not told to us."""
        self.causes: Counter[str] = Counter()
        """Messages that went no further, by cause."""

    def count_lost(self, cause: str, detail: object = "", count: int = 1) -> None:
        """Count messages that go no further; the log has a line for each cause at most once in 10 s."""
        self.causes[cause] += count
        _quiet.warning(
            log,
            "bridge.lost",
            (self.label, cause),
            time.monotonic(),
            {"socket": self.label, "cause": cause, "detail": str(detail)[:200]},
        )

    def report(self, *, expired: int = 0) -> dict[str, object]:
        """Return the account as a log line shows it; `expired` were never ours to send."""
        lost = {**self.causes, **({"expired": expired} if expired else {})}
        return {
            "socket": self.label,
            "from_sp": self.from_sp,
            "to_sp": self.to_sp,
            "lost": dict(sorted(lost.items())),
        }
