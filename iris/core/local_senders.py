"""Clients of one process that deliver their casts to each other directly, as those of a bridge do (sans-IO).

The relay still sends these casts to all of them, because members elsewhere want them too. So each client drops, without
opening it, every cast whose sender id is in the process's `LocalSenders`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

MAX_RETIRED: Final = 65_536
"""Retired sender ids that are remembered, because their last casts may still arrive."""


class LocalSenders:
    """The sender ids of clients in this process that deliver their casts to each other directly."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._retired: deque[bytes] = deque()

    def __contains__(self, sender_id: bytes) -> bool:
        return sender_id in self._ids

    def add(self, sender_id: bytes) -> None:
        """Add the id of a new sender."""
        self._ids.add(sender_id)

    def retire(self, sender_ids: Iterable[bytes]) -> None:
        """Mark ids as no longer used. The latest `MAX_RETIRED` of them stay in the set."""
        self._retired.extend(sender_ids)
        while len(self._retired) > MAX_RETIRED:
            self._ids.discard(self._retired.popleft())
