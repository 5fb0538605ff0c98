"""What the bridge to the first Iris can be told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from iris import ConfigError

DEFAULT_LISTEN: Final = (("127.0.0.1", 55_555), ("::1", 55_555))


@dataclass(frozen=True, slots=True, kw_only=True)
class Iris1Config:
    """Everything the bridge can be told; validated here, once."""

    listen: tuple[tuple[str, int], ...] = DEFAULT_LISTEN
    """Numeric addresses and ports; port 0 takes any."""

    allow_remote: bool = False
    """Listen on other addresses than loopback. Whoever reaches the port acts with the bridge's keys."""

    max_clients: int = 1024
    """Connections at once; each has a session of its own at the relay."""

    handshake_s: float = 5.0
    """Until a client has said INIT."""

    queue_bytes: int = 64 << 20
    """What a client may leave unread; beyond it, it is cut. An empty queue takes one message of any size."""

    max_calls: int = 16_384
    """Requests in flight per client, in each direction. More of its own are answered as timeouts, more for it as not taken."""

    call_bytes: int = 64 << 20
    """Bytes of a client's own requests in flight; more are answered as timeouts."""

    max_subscriptions: int = 16_384
    """Topics per client; one more ends its connection."""

    max_tunnels: int = 4096
    """Tunnels per client, opening ones included."""

    tunnel_message_bytes: int = 64 << 20
    """Longest message of a tunnel: it is put together here. A longer one ends its tunnel."""

    tunnel_bytes: int = 128 << 20
    """Bytes of tunnel messages that are put together or wait, per client and direction; the tunnel that brings more ends."""

    confirm_s: float = 3.0
    """How long a service may take to confirm a tunnel."""

    native_timeout_s: float = 60.0
    """What a service is told as the timeout of a request whose caller does not say: our own protocol does not show it."""

    grace_s: float = 0.25
    """How much later than its timeout a request may still start: its expiry is for the service to judge."""

    slack_s: float = 0.005
    """How much longer than its timeout a client's request is waited for: the ways through two bridges are not its members' time.

    Tests of the bindings want a reply within 1 ms, and none from a handler of 25 ms within 12.
    """

    drain_s: float = 5.0
    """How long what was accepted may take when the bridge or a client ends."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{field.name}: {value} is not valid; it must be greater than 0")
        if not self.listen:
            raise ConfigError("listen: no address is given; give at least one ADDRESS:PORT")
