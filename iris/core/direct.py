"""Socket pairs: a busy tunnel between two sessions of one relay moves its records to a socket pair that
bypasses the relay.

The relay creates the pair and gives each session its end (PAIR, FETCH). The two sides agree on the move by items within
the tunnel (see `iris.core.tunnel`). In the pair, each record follows a u32 with its length.

The relay keeps a duplicate of both ends. When the tunnel or a session ends, it first sends the reason and then
shuts the pair down. So a session that finds its pair broken sends PING: if no TUNNEL_END comes before the PONG,
the pair itself broke, and the tunnel breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

DIRECT_AFTER_BYTES: Final = 1 << 20
"""Bytes that a tunnel carries, both directions together, before it requests a pair."""
REPORT_BYTES: Final = 256 << 20
"""Each time so many bytes have passed, and at the end, the session reports them to the relay."""


class PairEnd(Protocol):
    """This end of a socket pair, as the tunnel sees it. No method blocks."""

    sent_records: int
    sent_bytes: int
    received_records: int
    received_bytes: int
    queued_bytes: int
    """Bytes queued and not yet written."""

    @property
    def full(self) -> bool:
        """Whether the queue is full: a sender should wait for `TunnelEnd.wake`."""

    def send(self, record: bytes) -> None:
        """Queue a record, to be written by the end of the turn."""

    def flush(self) -> None:
        """Write queued records, as far as the socket has room."""

    def finish(self, then: Callable[[], None]) -> None:
        """Call `then` once all queued records are written, or the pair is broken."""

    def read(self) -> None:
        """Start to pass received records to `TunnelEnd.arrived`."""

    def drain(self) -> None:
        """Read everything that is in the socket now."""

    def close(self) -> None:
        """Close the descriptor. Idempotent."""


class Direct:
    """State of a tunnel end on its move to a socket pair."""

    __slots__ = ("moved", "pair", "peer_ready", "reported")

    def __init__(self) -> None:
        self.pair: PairEnd | None = None
        """This end of the pair, once its descriptor is here; the item `ready` is sent then."""
        self.peer_ready = False
        """Whether the peer has sent `ready`."""
        self.moved = False
        """Whether the peer has sent `moved`, so its records come by the pair."""
        self.reported = (0, 0, 0, 0)
        """Totals already reported to the relay: records and bytes sent, records and bytes received."""

    @property
    def may_move(self) -> bool:
        """Whether the peer may send `moved` now."""
        return self.pair is not None and not self.moved

    def report(self, least_bytes: int) -> tuple[int, int, int, int] | None:
        """Return what passed since the last report, in the form of `reported`, or None if it is less
        than `least_bytes`."""
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
