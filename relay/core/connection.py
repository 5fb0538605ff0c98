"""A connection of the router: its peer, the aliases declared to it, and the losses it has not been sent yet.

What is in transit over it is in `relay.core.neighbor`.
"""

from __future__ import annotations

from typing import Final

from iris.core.aliases import Alias, AliasTable
from iris.core.heartbeat import Heartbeat
from iris.errors import LocalProtocolError, PeerProtocolError
from iris.wire.codec import RELAY_HOP, encode_control
from iris.wire.frames import Beat, Control, Declare, Gap
from iris.wire.kinds import HopClass
from relay.core.ports import Port

MAX_GAPS: Final = 65_536
"""Limit of deliveries with unreported losses per connection."""

Delivery = tuple[int, str, bytes, bytes, bool, tuple[str, ...], int, int, str]
"""What an alias stands for: (kind, name, key id, sender id, plain, groups, member, hop class, site)."""


class Connection:
    """The router's side of one connection: a session, or a link or WAN connection to another relay."""

    __slots__ = (
        "address",
        "aliases",
        "clock_us",
        "closed",
        "controlled_us",
        "gaps",
        "greeted",
        "label",
        "number",
        "own_hop",
        "own_hop_mask",
        "port",
        "pulse",
    )
    hop_class = HopClass.LOCAL
    site = ""
    """The remote site, if this connection leads to one."""

    def __init__(self, port: Port, number: int, max_aliases: int) -> None:
        self.port = port
        self.number = number
        self.greeted = False
        self.closed = False
        self.label = ""
        self.address = ""
        """host:port of the peer, if it is on another host."""
        self.pulse: Heartbeat | None = None
        """The heartbeat state of a peer on another host; None on this host."""
        self.controlled_us = 0
        """When it sent its latest control frame."""
        self.clock_us = 0
        """Our clock minus the peer's, to be added to its deadlines."""
        self.own_hop = RELAY_HOP
        """Value of the `own_hop_mask` bits in hop ids that we chose: both sides number their own."""
        self.own_hop_mask = RELAY_HOP
        self.aliases: AliasTable[Delivery] = AliasTable(max_aliases)
        self.gaps: dict[Delivery, list[int]] = {}
        """Unreported losses on the way to it: delivery -> [first sequence, count]."""

    def beat_came(self, beat: Beat, now_us: int) -> None:
        """Note a beat and the peer's clock; raises PeerProtocolError from a session of this host, which does
        not beat.
        """
        if self.pulse is None:
            raise PeerProtocolError("BEAT from a session on this host or over WebSocket")
        self.pulse.on_beat(beat, now_us)
        self.clock_us = self.pulse.clock_us

    def control(self, body: Control) -> None:
        """Send it a control frame.

        A frame that does not fit closes a connection between relays; for a session it raises.
        """
        try:
            frame = encode_control(body)
        except LocalProtocolError as err:
            if not self.hop_class:
                raise
            self.port.abort(str(err))
        else:
            self.port.control(frame)

    def out_alias(self, delivery: Delivery, tick: int) -> Alias:
        """Return the alias for a delivery to this peer, declared if it is new."""
        alias = self.aliases.get(delivery)
        if alias is None:
            alias = self.aliases.add(delivery, tick)
            kind, name, key_id, sender_id, plain, groups, member, hop_class, site = delivery
            address = (kind, name, key_id, sender_id)
            self.control(
                Declare(alias.number, *address, plain, list(groups), member, hop_class, site)
            )
        return alias

    def dropped(self, delivery: Delivery, first: int, count: int) -> None:
        """Note a loss on the way to this peer, to be reported when there is room.

        The receiver itself sees losses between messages that arrive, so of a plain delivery only the latest
        run is kept. Where a run starts is reported at once, in order: a receiver that does not know this
        sender counts from there.
        """
        gap = self.gaps.get(delivery)
        plain = delivery[4]
        if gap is not None and (not plain or gap[0] + gap[1] == first):
            gap[1] += count
        elif gap is not None or len(self.gaps) < MAX_GAPS:
            self.gaps[delivery] = [first, count]
            if plain:
                self.send_gap(delivery, first, 0, "slow receiver")

    def send_gaps(self) -> None:
        """Report the losses that were noted, because there is room again."""
        gaps, self.gaps = self.gaps, {}
        for delivery, (first, count) in gaps.items():
            self.send_gap(delivery, first, count, "slow receiver")

    def send_gap(self, delivery: Delivery, first: int, count: int, cause: str) -> None:
        """Send it a GAP for a loss on the way to it."""
        self.control(gap_of(delivery, first, count, cause))


def gap_of(delivery: Delivery, first: int, count: int, cause: str) -> Gap:
    """Return the GAP frame for a loss of a delivery."""
    kind, name, key_id, sender_id, plain, groups, member, _, site = delivery
    # `first` comes from the sender, and `count` is a sum: they may not fit in the fields.
    first, count = min(first, (1 << 63) - 1), min(count, (1 << 32) - 1)
    return Gap(
        kind, name, key_id, sender_id, first, count, cause, plain, list(groups), member, site
    )
