"""Settings of the bridge to the first Iris."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from iris import ConfigError

DEFAULT_LISTEN: Final = (("127.0.0.1", 55_555), ("::1", 55_555))


@dataclass(frozen=True, slots=True, kw_only=True)
class Iris1Config:
    """All settings of the bridge, validated when it is created."""

    listen: tuple[tuple[str, int], ...] = DEFAULT_LISTEN
    """Numeric addresses and ports. Port 0 takes any free port."""

    allow_remote: bool = False
    """Listen on addresses other than loopback. Whoever reaches the port acts with the bridge's keys."""

    max_clients: int = 1024
    """Connections at a time; each has its own session at the relay."""

    handshake_s: float = 5.0
    """Time within which a client must send INIT."""

    queue_bytes: int = 64 << 20
    """Bytes that a client may leave unread; a client over the limit is disconnected.

    An empty queue accepts one message of any size.
    """

    max_calls: int = 16_384
    """Requests in flight per client, in each direction.

    More from the client are answered as timeouts; more for the client are refused.
    """

    call_bytes: int = 64 << 20
    """Bytes of a client's own requests in flight. More are answered as timeouts."""

    max_subscriptions: int = 16_384
    """Topics per client. One more ends its connection."""

    max_tunnels: int = 4096
    """Tunnels per client, including those that are being opened."""

    tunnel_message_bytes: int = 64 << 20
    """Longest tunnel message, which the bridge assembles in memory. A longer one ends its tunnel."""

    tunnel_bytes: int = 128 << 20
    """Bytes of tunnel messages assembled or queued, per client and direction. The tunnel that exceeds it ends."""

    confirm_s: float = 3.0
    """Time within which a service must confirm a tunnel."""

    native_timeout_s: float = 60.0
    """Timeout given to a service for a request whose caller did not state one.

    Iris itself does not transmit timeouts.
    """

    grace_s: float = 0.25
    """How much later than its timeout a request may still reach a service, which judges by itself
    whether it has expired.
    """

    slack_s: float = 0.005
    """Added to a client's timeout for the path through two bridges.

    Tests of the bindings expect a reply within 1 ms, and none within 12 ms from a handler that takes 25
    ms.
    """

    drain_s: float = 5.0
    """Time to finish what was accepted when the bridge stops or a client leaves."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{field.name}: {value} is not valid; it must be greater than 0")
        if not self.listen:
            raise ConfigError("listen: no address is given; give at least one ADDRESS:PORT")
