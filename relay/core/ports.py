"""What the router knows of the outside: ports that take frames, and the account of every message."""

from __future__ import annotations

from typing import Protocol


class Held:
    """What one tunnel has waiting at one port, in bytes."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Port(Protocol):
    """One session's connection as the router sees it. Nothing here waits: a port queues within its bounds, or refuses."""

    def has_room(self, size: int) -> bool:
        """Whether `forward` and `send` would take a frame of `size` bytes: asked before an alias is declared for it."""

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        """Take the frame at `buf[start:end]`, of `count` messages; False: the queue is full, nothing was taken.

        The frame is borrowed until the router's caller settles the port, and not changed until then.
        """

    def send(self, frame: bytes, count: int) -> bool:
        """As `forward`, for a frame of its own."""

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        """As `forward`, for one message within the tunnels' share of the queue; `held` counts what waits."""

    def discard(self, held: Held) -> int:
        """Forget what one tunnel has waiting here; return how many messages that were."""

    def control(self, frame: bytes) -> None:
        """Take a control frame, always; a session that does not read its answers is not read from."""

    def finish(self) -> None:
        """Close once all that was taken is written."""

    def abort(self, reason: str) -> None:
        """Close now; `reason` is for our log."""

    @property
    def crowded(self) -> bool:
        """Whether more waits here than publishers that wait for credit are to add to."""

    @property
    def held_messages(self) -> int:
        """Messages taken and not yet given to the connection."""


class Accounts:
    """Where messages went: in + copied = out + refused + dropped + expired + held, always.

    A fan-out to n ports adds n - 1 to `copied`; one that nobody wants is dropped as "unwanted". `out` counts what a port
    took; what it still holds is `held`, and what it held when it closed is dropped as "session lost".
    """

    __slots__ = ("copied", "dropped", "expired", "in_", "out", "refused")

    def __init__(self) -> None:
        self.in_ = 0
        self.copied = 0
        self.out = 0
        self.refused = 0
        self.expired = 0
        self.dropped: dict[str, int] = {}

    def drop(self, cause: str, count: int) -> None:
        """Count messages that go nowhere."""
        self.dropped[cause] = self.dropped.get(cause, 0) + count

    def report(self, held: int) -> dict[str, object]:
        """Return the account as status shows it; `held` is the sum over all ports."""
        return {
            "in": self.in_,
            "copied": self.copied,
            "out": self.out - held,
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
            - self.refused
            - self.expired
            - sum(self.dropped.values())
        )
