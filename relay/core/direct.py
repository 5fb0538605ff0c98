"""Socket pairs for tunnels between two sessions of this host: who gets one, how many there are, and what their ends say passed.

    the opener asks: DIRECT ──► both sessions can be handed descriptors, and there is room: a pair, and a token of each end to its session
    the tunnel ends, or a session does ──► the pair is shut down for both, whatever they do with their descriptors

What passes by a pair this relay never sees, so it stands in no account of messages.
"""

from __future__ import annotations

from typing import Final, Protocol

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.kinds import DIRECT_MINOR
from relay.core.neighbor import Tunnel
from relay.core.quotas import Table
from relay.core.session import Session

MAX_PAIRS_OF_SESSION: Final = 128
"""Ends of pairs that one session may have: each is a descriptor there."""


class Pair(Protocol):
    """A socket pair, and the token of each end: the opener's, the member's."""

    @property
    def tokens(self) -> tuple[bytes, bytes]: ...
    def end(self) -> None:
        """Shut it down for whoever holds a descriptor of it, and give ours back; tokens that were not used mean nothing any more."""


class PairMaker(Protocol):
    """Makes pairs: this needs sockets."""

    def make(self, opener: str, member: str) -> Pair | None:
        """Return a pair of which each user may fetch an end; None: no descriptor is free."""


class DirectTunnels:
    """The pairs of one relay. Without a `maker` there are none."""

    def __init__(self, limit: int) -> None:
        self.maker: PairMaker | None = None
        self.table = Table(limit)
        self.made = 0
        self.refused: dict[str, int] = {}
        """Why tunnels stayed with the relay -> how many times one asked."""
        self.passed = [0, 0, 0, 0]
        """What all ends said passed: records and bytes sent, records and bytes received."""

    def asked(self, session: Session, ask: frames.Direct) -> None:
        """A session asks for a pair. A tunnel that ended meanwhile is none of ours any more, and one is enough."""
        tunnel = session.tunnels.get(ask.hop)
        if tunnel is None or tunnel.pair is not None:
            return
        opener, member = tunnel.opener, tunnel.member
        why = ""
        if not (isinstance(opener, Session) and isinstance(member, Session)):
            why = "another relay is on the way"
        elif not (opener.takes_descriptors and member.takes_descriptors):
            why = "a session is not of this host"
        elif opener.minor < DIRECT_MINOR or member.minor < DIRECT_MINOR:
            why = "a session speaks an older version"
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
        """A tunnel is forgotten, and both sides were told or are being told."""
        pair, tunnel.pair = tunnel.pair, None
        if pair is None:
            return
        pair.end()
        self.table.give(tunnel.opener.user)
        for session in (tunnel.opener, tunnel.member):
            assert isinstance(session, Session)
            session.pairs -= 1

    def carried(self, session: Session, carried: frames.Carried) -> None:
        """One end says what passed; raises PeerProtocolError."""
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
        """Return the figures, ready for JSON. Those of records and bytes are what the ends said."""
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
