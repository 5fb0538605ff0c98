"""The router's view of the outside: ports that accept frames, and the account of every message."""

from __future__ import annotations

from typing import Final, Protocol


class Held:
    """Bytes that one tunnel has queued at one port."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Port(Protocol):
    """One connection as the router sees it. Nothing here waits: a port queues within its limits, or refuses."""

    def has_room(self, size: int) -> bool:
        """Whether `forward` and `send` would accept a frame of `size` bytes.

        Asked before an alias is declared for it.
        """

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        """Accept the frame at `buf[start:end]`, of `count` messages; False: the queue is full and nothing was accepted.

        The frame is borrowed until the router's caller settles the port, and must not change until then.
        """

    def send(self, frame: bytes, count: int) -> bool:
        """Same as `forward`, for a frame of its own."""

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        """Same as `forward`, for one message within the tunnels' share of the queue; `held` counts the queued bytes."""

    def discard(self, held: Held) -> int:
        """Drop what one tunnel has queued here; return the number of messages."""

    def control(self, frame: bytes) -> None:
        """Accept a control frame, always. A session that does not read its answers is not read from."""

    @property
    def unread(self) -> bool:
        """Whether the peer has sent something that this side has not read yet, for reasons of its own."""

    def finish(self) -> None:
        """Close once all accepted frames are written."""

    def abort(self, reason: str) -> None:
        """Close now; `reason` is for our log."""

    @property
    def crowded(self) -> bool:
        """Whether the queue is so long that publishers that wait for credit must not add to it."""

    @property
    def held_messages(self) -> int:
        """Messages accepted and not yet given to the connection."""


class Gone:
    """The port of a connection that has ended: it refuses everything.

    A route, a call or a record of lost messages may refer to the connection for longer, and must not keep its port.
    """

    unread = crowded = False
    held_messages = 0

    def has_room(self, size: int) -> bool:
        return False

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        return False

    def send(self, frame: bytes, count: int) -> bool:
        return False

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        return False

    def discard(self, held: Held) -> int:
        return 0

    def control(self, frame: bytes) -> None:
        """Ignore a control frame for a peer that is gone."""

    def finish(self) -> None:
        """Do nothing: it is closed."""

    def abort(self, reason: str) -> None:
        """Do nothing: it is closed."""


GONE: Final[Port] = Gone()


class Accounts:
    """Where messages went: in + copied = out + unwanted + refused + dropped + expired + held, always.

    A fan-out to n ports adds n - 1 to `copied`; a cast that nobody wants is `unwanted`, which is not a fault. `out`
    counts what a port accepted; what it still has queued is `held`, and what it had queued when it closed
    is dropped as "session lost".
    """

    __slots__ = ("copied", "dropped", "expired", "in_", "out", "refused", "unwanted")

    def __init__(self) -> None:
        self.in_ = 0
        self.copied = 0
        self.out = 0
        self.unwanted = 0
        self.refused = 0
        self.expired = 0
        self.dropped: dict[str, int] = {}
        """Cause -> messages dropped."""

    def drop(self, cause: str, count: int) -> None:
        """Count messages that are dropped."""
        self.dropped[cause] = self.dropped.get(cause, 0) + count

    def report(self, held: int) -> dict[str, object]:
        """Return the account as status shows it; `held` is the sum over all ports."""
        return {
            "in": self.in_,
            "copied": self.copied,
            "out": self.out - held,
            "unwanted": self.unwanted,
            "refused": self.refused,
            "expired": self.expired,
            "dropped": dict(self.dropped),
            "held": held,
        }

    def balance(self) -> int:
        """Return what is unaccounted for: 0 unless the router has a bug."""
        return (
            self.in_
            + self.copied
            - self.out
            - self.unwanted
            - self.refused
            - self.expired
            - sum(self.dropped.values())
        )
