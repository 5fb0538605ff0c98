"""The flags byte of data frames: what each side may say there, and what a relay passes on.

A relay hands out what came from others, so it looks at every flags byte before it does: nobody may say something in its name. A session
sends 0, and `refused` with a reason in what it gives back. Between relays `more` comes besides, which `relay.fragments` takes out before
the router sees the frame. A relay of minor version 0 passed on what its sessions said: that is cleared, and costs it nothing.
"""

from __future__ import annotations

from iris.errors import PeerProtocolError
from iris.wire.codec import FLAGS_AT, KIND_AT
from iris.wire.frames import FLAG_REFUSED, Kind, Refusal
from relay.core.session import Neighbor, Route

_REASONS = {int(reason) for reason in Refusal}


def clear_flags(neighbor: Neighbor, buf: memoryview, start: int) -> None:
    """Take out the flags of a frame that may have none; raises PeerProtocolError unless an older relay passed them on."""
    if not neighbor.hop_class or neighbor.minor:
        kind, flags = buf[start + KIND_AT], buf[start + FLAGS_AT]
        raise PeerProtocolError(f"flags 0x{flags:02x} in a {Kind(kind).name} frame")
    buf[start + FLAGS_AT] = 0


def refusal_of(neighbor: Neighbor, flags: int) -> int:
    """Return why a frame came back; raises PeerProtocolError as `clear_flags`."""
    reason = flags >> 4
    if flags == FLAG_REFUSED | reason << 4 and reason in _REASONS:
        return reason
    if not neighbor.hop_class or neighbor.minor:
        raise PeerProtocolError(f"flags 0x{flags:02x} in a refused frame")
    return reason if reason in _REASONS else Refusal.UNREADABLE


def route_of(
    neighbor: Neighbor, route: Route | None, alias: int, buf: memoryview, start: int
) -> Route:
    """Return the route of a frame whose kind and flags together are not what its alias stands for; raises PeerProtocolError."""
    if route is None or route.kind != buf[start + KIND_AT]:
        raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
    clear_flags(neighbor, buf, start)
    return route
