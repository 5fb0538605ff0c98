"""A tunnel between two sessions of one relay that has carried much: the socket pair by which its records pass the relay by.

The relay makes the pair and hands each session its end (PAIR, FETCH); how the two sides move over is said by items within the
tunnel, see `iris.core.tunnel`. In the pair every record follows a u32 of its length.

The relay keeps a duplicate of both ends and shuts them down when the tunnel or a session ends, after it has told why. So
whoever finds the pair broken asks the relay by PING: if no TUNNEL_END came before the PONG, the pair itself broke, and with it the tunnel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

DIRECT_AFTER_BYTES: Final = 1 << 20
"""What a tunnel carries, both directions together, before it asks for a pair."""
REPORT_BYTES: Final = 256 << 20
"""The relay is told what passed after this much, and at the end."""


class PairEnd(Protocol):
    """This end of a pair, as the tunnel sees it. Nothing here waits."""

    sent_records: int
    sent_bytes: int
    received_records: int
    received_bytes: int
    queued_bytes: int
    """Taken, and not written yet."""

    @property
    def full(self) -> bool:
        """Enough waits to be written: whoever sends should wait for `TunnelEnd.wake`."""

    def send(self, record: bytes) -> None:
        """Take a record, to be written by the end of the turn."""

    def flush(self) -> None:
        """Write what was taken, as far as there is room."""

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` once all that was taken is written, or the pair is broken."""

    def read(self) -> None:
        """Give what comes to `TunnelEnd.arrived`, from now on."""

    def drain(self) -> None:
        """Read all that is there now."""

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""


class Direct:
    """How far one end of a tunnel with a pair has come."""

    __slots__ = ("moved", "pair", "peer_ready", "reported")

    def __init__(self) -> None:
        self.pair: PairEnd | None = None
        """Set once this end has its descriptor, which it then said by `ready`."""
        self.peer_ready = False
        self.moved = False
        """What the other side sends is in the pair."""
        self.reported = (0, 0, 0, 0)
        """What the relay was told of: records and bytes sent, records and bytes received."""

    @property
    def may_move(self) -> bool:
        """The other side may say that it has moved."""
        return self.pair is not None and not self.moved

    def report(self, least_bytes: int) -> tuple[int, int, int, int] | None:
        """Return what passed since the last report, as `reported`; None if that is less than `least_bytes`."""
        pair = self.pair
        if pair is None:
            return None
        now = (pair.sent_records, pair.sent_bytes, pair.received_records, pair.received_bytes)
        before = self.reported
        since = (now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3])
        if since[1] + since[3] < least_bytes:
            return None
        self.reported = now
        return since
