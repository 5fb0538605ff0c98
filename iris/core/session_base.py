"""State that all parts of a client's session share: outbound and inbound halves, owner, guard and
counters (sans-IO)."""

from __future__ import annotations

from collections.abc import Callable

from iris.core.conversation import Conversation
from iris.core.guard import Guard
from iris.core.inbound import Inbound
from iris.core.interfaces import Owner
from iris.core.local_senders import LocalSenders
from iris.core.outbound import Outbound
from iris.wire import frames
from iris.wire.codec import FLAGS_AT
from iris.wire.kinds import FLAG_REFUSED, Refusal


class SessionBase(Conversation):
    """Base of a client's session.

    Requests, store calls, tunnels and casts each add their part (`iris.core.session`).
    """

    def __init__(
        self, owner: Owner, guard: Guard, entropy: Callable[[int], bytes], local_senders: LocalSenders | None, *, label: str, pid: int,
        message_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(label=label, pid=pid, message_limit=message_limit)
        self.owner = owner
        self.guard = guard
        self.entropy = entropy
        self.clock_us = 0
        """Added to the relay's deadlines to get this host's clock; 0 for a relay on this host."""
        self.out: Outbound
        """Set at WELCOME."""
        self.received_alone = 0
        """Messages received outside bundles: calls, their answers, tunnel records."""
        self.dropped: dict[str, int] = {}
        """Dropped messages: cause -> count."""
        self._inbound = Inbound(owner.find_key, local_senders)
        self.replies = self._inbound.replies
        """Aliases that the relay declared for answers of stores."""
        self.flow = self._inbound.flow
        """Return the flow of an alias that the relay declared for a kind."""

    def control(self, body: frames.Control) -> None:
        self.out.control(body)

    @property
    def last_hop(self) -> int:
        return self.out.hops

    def next_hop(self) -> int:
        """Return a new hop id of this session."""
        self.out.hops += 1
        return self.out.hops

    def drop(self, cause: str, count: int = 1) -> None:
        """Count dropped messages."""
        self.dropped[cause] = self.dropped.get(cause, 0) + count

    def refuse(
        self, buf: memoryview, start: int, end: int, reason: Refusal, count: int = 1
    ) -> None:
        """Send a refused frame of `count` messages back, so that the relay can try another member
        without storing bodies."""
        frame = bytearray(buf[start:end])
        frame[FLAGS_AT] = FLAG_REFUSED | reason << 4
        self.drop(f"refused: {reason.name.lower()}", count)
        self.out.sent_messages += count
        self.out.raw(bytes(frame))
