"""Counts of one entry: messages in and out, and lost messages by cause."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from relay.logs import Quiet

log = logging.getLogger(__name__)

_quiet: Final = Quiet()


class Tally:
    """The counts of one entry."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.from_sp = 0
        """Messages received from SP peers."""
        self.to_sp = 0
        """Messages passed to nng for SP peers. nng does not report what it drops for a slow SUB or BUS peer."""
        self.causes: Counter[str] = Counter()
        """Lost messages: cause -> count."""

    def count_lost(self, cause: str, detail: object = "", count: int = 1) -> None:
        """Count lost messages. Each cause is logged at most once in 10 s."""
        self.causes[cause] += count
        _quiet.warning(
            log,
            "bridge.loss",
            (self.label, cause),
            time.monotonic(),
            {"socket": self.label, "cause": cause, "detail": str(detail)[:200]},
        )

    def report(self, *, expired: int = 0) -> dict[str, object]:
        """Return the counts for a log line.

        `expired` messages expired in the member's queue, before the bridge could send them.
        """
        losses = {**self.causes, **({"expired": expired} if expired else {})}
        return {
            "socket": self.label,
            "from_sp": self.from_sp,
            "to_sp": self.to_sp,
            "losses": dict(sorted(losses.items())),
        }
