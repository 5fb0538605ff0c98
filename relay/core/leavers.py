"""Sessions that leave a queue group while others may still choose them for it.

    UNSUBSCRIBE, or BYE ── not chosen any more, and advertised so ── leaver: gets what no other here gets

A publisher's relay chooses a member, or the relay of one, by what it was advertised. So a message may be on its way to
the last member here when that leaves. To choose again would break the order of its publisher: another member may have
later messages already.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.core.interest import Interest
from relay.core.neighbor import Subscriber


class Leavers:
    """The subscriptions in queue groups that are being left. They stay in their session's quota until then."""

    def __init__(self) -> None:
        self._interest = Interest()
        self._counts: dict[tuple[int, str, str, bytes], int] = {}
        """(session number, filter, group, key id) -> how often it is being left: a session may come and go again."""

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, session: Subscriber, pattern: str, group: str, key_ids: Iterable[bytes]) -> None:
        """Note that a session leaves."""
        for key_id in key_ids:
            which = (session.number, pattern, group, key_id)
            self._counts[which] = self._counts.get(which, 0) + 1
            if self._counts[which] == 1:
                self._interest.subscribe(session, pattern, group, (key_id,))

    def remove(
        self, session: Subscriber, pattern: str, group: str, key_ids: Iterable[bytes]
    ) -> None:
        """Note that a session has left."""
        for key_id in key_ids:
            which = (session.number, pattern, group, key_id)
            self._counts[which] -= 1
            if not self._counts[which]:
                del self._counts[which]
                self._interest.unsubscribe(session, pattern, group, (key_id,))

    def groups(self, topic: str, key_id: bytes) -> dict[str, list[Subscriber]]:
        """Return group -> the sessions that are leaving it, of those that match a topic."""
        return self._interest.subscribers(topic, key_id)[1]
