"""Tunnels as a relay sees them: two ends, each with a hop id, and records that pass from one to the other.

The ends of a tunnel throttle it, not the relays. When a port's share for tunnels is full, the tunnel that
holds most of it is broken at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire.codec import ALIAS_AT, HOP, REWRITE, TUNNEL_BODY_AT, tunnel_frame
from iris.wire.kinds import Cause, Kind
from relay.core.direct import DirectTunnels
from relay.core.heads import flags_not_allowed
from relay.core.neighbor import Dispatched, Neighbor, Tunnel
from relay.core.ports import Accounts

MAX_RECORD_FRAME: Final = TUNNEL_BODY_AT + 65_535
"""Longest frame of a tunnel. Relays forward it whole, whatever the message limit of the next one."""


class Tunnels:
    """The tunnels of a relay. `ended` is called for each opening that its member or link no longer has.

    `given_up` returns whether an end belongs to an opening that still waits for a member, and drops it.
    """

    def __init__(
        self,
        accounts: Accounts,
        ended: Callable[[Dispatched, int], None],
        given_up: Callable[[Neighbor, int], bool],
        direct: DirectTunnels,
    ) -> None:
        self.direct = direct
        self._accounts = accounts
        self._ended = ended
        self._given_up = given_up

    def opening(self, dispatched: Dispatched, member: Neighbor, hop: int) -> None:
        """Note an opening that was dispatched to `member` under `hop`."""
        tunnel = Tunnel(dispatched.origin, dispatched.hop, member, hop)
        dispatched.origin.tunnels[dispatched.hop] = member.tunnels[hop] = tunnel

    def refused(self, dispatched: Dispatched, member: Neighbor, hop: int) -> None:
        """Forget a tunnel whose opening was refused."""
        tunnel = member.tunnels.pop(hop, None)
        dispatched.origin.tunnels.pop(dispatched.hop, None)
        if tunnel is not None and tunnel.pair is not None:
            self.direct.ended(tunnel)

    def frame(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Forward a tunnel frame to the other side, under that side's hop id."""
        if not TUNNEL_BODY_AT <= end - start <= MAX_RECORD_FRAME:
            raise _misfit(end - start)
        _, kind, flags, _, hop, _ = HOP.unpack_from(buf, start)
        if flags:
            raise flags_not_allowed(buf, start)
        accounts = self._accounts
        # The relay may send an end itself, so an end does not count as a message.
        count = 0 if kind == Kind.TUNNEL_END else 1
        tunnel = neighbor.tunnels.get(hop)
        if tunnel is None:
            if not neighbor.greeted:
                raise PeerProtocolError("data frame before HELLO")
            if not count and self._given_up(neighbor, hop):
                return
            accounts.in_ += count
            accounts.drop("late tunnel frame", count)
            return
        if not count and end - start > TUNNEL_BODY_AT + 1:
            # Ends are queued even if the other side's queue is full, so they must stay small.
            raise PeerProtocolError("TUNNEL_END must carry at most one byte, its cause")
        accounts.in_ += count
        if hop & neighbor.own_hop_mask == neighbor.own_hop:
            other, other_hop, held = tunnel.opener, tunnel.opener_hop, tunnel.opener_held
        else:
            other, other_hop, held = tunnel.member, tunnel.member_hop, tunnel.member_held
        if other.closed:
            accounts.drop("late tunnel frame", count)
            return
        REWRITE.pack_into(buf, start + ALIAS_AT, 0, other_hop)
        if kind == Kind.TUNNEL_END:
            other.port.control(bytes(buf[start:end]))
            self._forget(tunnel)
            return
        if other.port.forward_tunnel(buf, start, end, held):
            accounts.out += 1
            return
        accounts.drop("tunnel share full", 1)
        fullest = max(other.tunnels.values(), key=lambda t: self._held_at(t, other))
        self._break(fullest, "tunnel share full")
        if fullest is not tunnel:
            # Its frame is lost, and a tunnel never skips one.
            self._break(tunnel, "tunnel share full")

    def neighbor_down(self, neighbor: Neighbor) -> Iterator[int]:
        """End all tunnels of a lost neighbor in parts, and notify their other ends."""
        for hop in list(neighbor.tunnels):
            tunnel = neighbor.tunnels.get(hop)
            if tunnel is None:
                continue
            self._forget(tunnel)
            other, theirs = (
                (tunnel.member, tunnel.member_hop)
                if tunnel.opener is neighbor
                else (tunnel.opener, tunnel.opener_hop)
            )
            if not other.closed and other is not neighbor:
                other.port.control(tunnel_frame(Kind.TUNNEL_END, theirs, bytes((Cause.LOST,))))
            yield 1

    def _held_at(self, tunnel: Tunnel, neighbor: Neighbor) -> int:
        """Return the bytes of a tunnel that are queued at a neighbor, which may have both ends."""
        opener = tunnel.opener_held.bytes if tunnel.opener is neighbor else 0
        return opener + (tunnel.member_held.bytes if tunnel.member is neighbor else 0)

    def _break(self, tunnel: Tunnel, cause: str) -> None:
        """End a tunnel on both sides; its queued frames are dropped."""
        self._forget(tunnel)
        for neighbor, hop, held in (
            (tunnel.opener, tunnel.opener_hop, tunnel.opener_held),
            (tunnel.member, tunnel.member_hop, tunnel.member_held),
        ):
            lost = neighbor.port.discard(held)
            self._accounts.out -= lost
            self._accounts.drop(cause, lost)
            if not neighbor.closed:
                neighbor.port.control(tunnel_frame(Kind.TUNNEL_END, hop, bytes((Cause.BROKEN,))))

    def _forget(self, tunnel: Tunnel) -> None:
        tunnel.opener.tunnels.pop(tunnel.opener_hop, None)
        tunnel.member.tunnels.pop(tunnel.member_hop, None)
        if tunnel.pair is not None:
            self.direct.ended(tunnel)
        dispatched = tunnel.member.in_flight.pop(tunnel.member_hop, None)
        if dispatched is not None:
            self._ended(dispatched, 1)


def _misfit(size: int) -> PeerProtocolError:
    """Return the error for a tunnel frame of a size that none has."""
    if size < TUNNEL_BODY_AT:
        return PeerProtocolError(
            f"tunnel frame of {size} bytes is shorter than its {TUNNEL_BODY_AT}-byte header"
        )
    return PeerProtocolError(
        f"tunnel record of {size - TUNNEL_BODY_AT} bytes is over the limit of {MAX_RECORD_FRAME - TUNNEL_BODY_AT}"
    )
