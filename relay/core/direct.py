"""Socket pairs for tunnels between two local sessions: who gets one, their limit, and the traffic over them.

the opener sends DIRECT ──► both sessions can receive descriptors, and there is room:
                            a pair, and for each session a token of its end
the tunnel or a session ends ──► the pair is shut down for both, whatever they do with their descriptors

The relay does not see what passes over a pair, so this traffic is in no account of messages.
"""

from __future__ import annotations

from typing import Final, Protocol

from iris.errors import PeerProtocolError
from iris.wire import frames
from relay.core.neighbor import Tunnel
from relay.core.quotas import Table
from relay.core.session import Session

MAX_PAIRS_OF_SESSION: Final = 128
"""Limit of pair ends of one session: each is a file descriptor there."""


class Pair(Protocol):
    """A socket pair, and the tokens of its ends: (opener's, member's)."""

    @property
    def tokens(self) -> tuple[bytes, bytes]: ...
    def end(self) -> None:
        """Shut the pair down for everybody who holds a descriptor, and close ours. Unused tokens become invalid."""


class PairMaker(Protocol):
    """Makes pairs, which needs sockets."""

    def make(self, opener: str, member: str) -> Pair | None:
        """Return a pair of which each user may fetch one end, or None if no descriptor is free."""


class DirectTunnels:
    """The pairs of one relay. Without a `maker` there are none."""

    def __init__(self, limit: int) -> None:
        self.maker: PairMaker | None = None
        self.table = Table(limit)
        self.made = 0
        self.refused: dict[str, int] = {}
        """Reason that a tunnel got no pair -> number of requests."""
        self.passed = [0, 0, 0, 0]
        """Totals that all ends reported: records and bytes sent, records and bytes received."""

    def asked(self, session: Session, ask: frames.Direct) -> None:
        """Make a pair that a session asks for. A tunnel that has ended is ignored, and so is a second request."""
        tunnel = session.tunnels.get(ask.hop)
        if tunnel is None or tunnel.pair is not None:
            return
        opener, member = tunnel.opener, tunnel.member
        why = ""
        if not (isinstance(opener, Session) and isinstance(member, Session)):
            why = "another relay is on the way"
        elif not (opener.takes_descriptors and member.takes_descriptors):
            why = "a session is not of this host"
        elif (
            max(opener.pairs, member.pairs) + (2 if opener is member else 1) > MAX_PAIRS_OF_SESSION
        ):
            why = "a session has as many as it may"
        elif not self.table.has_room(opener.user):
            why = "the limit is reached"
        else:
            pair = self.maker.make(opener.user, member.user) if self.maker is not None else None
            if pair is not None:
                self._made(tunnel, opener, member, pair)
                return
            why = "no descriptor is free"
        self.refused[why] = self.refused.get(why, 0) + 1

    def _made(self, tunnel: Tunnel, opener: Session, member: Session, pair: Pair) -> None:
        tunnel.pair = pair
        self.made += 1
        self.table.take(opener.user)
        for session, hop, token in (
            (opener, tunnel.opener_hop, pair.tokens[0]),
            (member, tunnel.member_hop, pair.tokens[1]),
        ):
            session.pairs += 1
            session.had_pairs = True
            session.control(frames.Pair(hop, token))

    def ended(self, tunnel: Tunnel) -> None:
        """Shut down the pair of a tunnel that ends."""
        pair, tunnel.pair = tunnel.pair, None
        if pair is None:
            return
        pair.end()
        self.table.give(tunnel.opener.user)
        for session in (tunnel.opener, tunnel.member):
            assert isinstance(session, Session)
            session.pairs -= 1

    def carried(self, session: Session, carried: frames.Carried) -> None:
        """Add what one end reports to have passed; raises PeerProtocolError."""
        if not session.had_pairs:
            raise PeerProtocolError("CARRIED from a session that never had a socket pair")
        for index, more in enumerate(
            (
                carried.sent_records,
                carried.sent_bytes,
                carried.received_records,
                carried.received_bytes,
            )
        ):
            self.passed[index] += more

    def status(self) -> dict[str, object]:
        """Return the figures, ready for JSON. Records and bytes are as the ends reported."""
        sent_records, sent_bytes, received_records, received_bytes = self.passed
        return {
            "open": self.table.total,
            "limit": self.table.limit,
            "made": self.made,
            "refused": dict(self.refused),
            "sent_records": sent_records,
            "sent_bytes": sent_bytes,
            "received_records": received_records,
            "received_bytes": received_bytes,
        }
