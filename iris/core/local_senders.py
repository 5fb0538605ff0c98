"""Clients of one process that hand each other what they publish and broadcast, as a bridge's do (sans-IO).

A relay sends such casts to all of them nevertheless, because others want them, too. Each client drops, unopened, what comes from
a sender of its local_senders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

MAX_RETIRED: Final = 65_536
"""Ids of senders that have ended: what they sent last may still be on its way."""


class LocalSenders:
    """The sender ids of all clients of one local_senders."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._retired: deque[bytes] = deque()

    def __contains__(self, sender_id: bytes) -> bool:
        return sender_id in self._ids

    def add(self, sender_id: bytes) -> None:
        """Somebody sends under this id from now on."""
        self._ids.add(sender_id)

    def retire(self, sender_ids: Iterable[bytes]) -> None:
        """Nobody sends under these any more."""
        self._retired.extend(sender_ids)
        while len(self._retired) > MAX_RETIRED:
            self._ids.discard(self._retired.popleft())
