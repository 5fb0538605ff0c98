"""The flags byte of data frames: what each side may set, and what a relay forwards.

A relay checks every flags byte before it forwards a frame, because the receiver blames the relay for it. A
session sends 0, or `refused` with a reason in a frame that it returns. Between relays there is also `more`,
which `relay.net.fragments` removes before the router gets the frame. A relay of minor version 0 forwards
its sessions' flags unchecked: they are cleared, and its connection stays open.
"""

from __future__ import annotations

from iris.errors import PeerProtocolError
from iris.wire.codec import FLAGS_AT, KIND_AT
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal
from relay.core.neighbor import Neighbor, Route

_REASONS = {int(reason) for reason in Refusal}


def clear_flags(neighbor: Neighbor, buf: memoryview, start: int) -> None:
    """Clear the flags of a frame that may have none.

    Raises PeerProtocolError, except for a relay of minor version 0.
    """
    if not neighbor.hop_class or neighbor.minor:
        kind, flags = buf[start + KIND_AT], buf[start + FLAGS_AT]
        raise PeerProtocolError(f"flags 0x{flags:02x} are not allowed in a {Kind(kind).name} frame")
    buf[start + FLAGS_AT] = 0


def refusal_of(neighbor: Neighbor, flags: int) -> int:
    """Return the reason of a refused frame. Raises PeerProtocolError under the same conditions as `clear_flags`."""
    reason = flags >> 4
    if flags == FLAG_REFUSED | reason << 4 and reason in _REASONS:
        return reason
    if not neighbor.hop_class or neighbor.minor:
        raise PeerProtocolError(f"flags 0x{flags:02x} are not allowed in a refused frame")
    return reason if reason in _REASONS else Refusal.UNREADABLE


def route_of(
    neighbor: Neighbor, route: Route | None, alias: int, buf: memoryview, start: int
) -> Route:
    """Return the route of a frame whose alias does not match its kind and flags at once.

    Raises PeerProtocolError if none does.
    """
    if route is None or route.kind != buf[start + KIND_AT]:
        raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
    clear_flags(neighbor, buf, start)
    return route
