"""Settings of the HTTP bridge."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from iris import ConfigError

MIN_BODY_BYTES: Final = 64 << 10
MAX_BODY_BYTES: Final = 64 << 20
VERBS: Final = (
    "request",
    "push",
    "broadcast",
    "survey",
    "publish",
    "subscribe",
    "append",
    "read",
)
"""What a token can allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Limits of the bridge, validated when it is created."""

    max_body_bytes: int = 1 << 20
    """Largest body of a request, and largest message that the bridge receives. The relay has a limit, too."""

    body_s: float = 30.0
    """Time for a request to send its body."""

    max_calls: int = 1024
    """Requests of any kind under way, apart from event streams. More are answered with 503."""

    calls_bytes: int = 128 << 20
    """Bodies held at a time. More are answered with 503."""

    default_timeout_s: float = 5.0
    """Timeout of a call without the header Iris-Timeout."""

    max_timeout_s: float = 300.0
    """Longest timeout that a call may have."""

    max_connections: int = 16_384
    """HTTP connections at a time."""

    max_readers: int = 12_000
    """Event streams of topics at a time. One more is answered with 503."""

    max_filters: int = 1024
    """Different topic filters that are read at a time; each has one subscription."""

    max_stream_readers: int = 1024
    """Event streams of durable streams at a time. Each reads the store by itself."""

    reader_bytes: int = 256 << 10
    """Events that wait for one reader. Those over it are dropped for this reader, which gets their number."""

    filter_bytes: int = 8 << 20
    """Publications of one filter that wait to be handed to its readers; those over it are lost for all of them."""

    heartbeat_s: float = 15.0
    """Interval of comments on an event stream without events, so that a connection that is gone is noticed."""

    stall_s: float = 60.0
    """Time after which a reader that takes nothing is disconnected."""

    drain_s: int = 5
    """Time for what is under way when the bridge stops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"{field.name}: {getattr(self, field.name)} is not valid; it must be greater than 0")  # fmt: skip
        if not MIN_BODY_BYTES <= self.max_body_bytes <= MAX_BODY_BYTES:
            raise ConfigError(f"max_body_bytes: {self.max_body_bytes} is not from {MIN_BODY_BYTES} to {MAX_BODY_BYTES}")  # fmt: skip
