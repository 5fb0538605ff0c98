"""What a client can be told."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from iris.errors import ConfigError
from iris.wire.codec import DEFAULT_MESSAGE_LIMIT, MAX_MESSAGE_LIMIT, MIN_MESSAGE_LIMIT


def _program() -> str:
    return os.path.basename(sys.argv[0])[:64] if sys.argv and sys.argv[0] else "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Everything a client can be told; validated here, once."""

    relay: Path | str | None = None
    """Socket of the relay, or tls://host:port of one on another host; several with commas are tried in a random order, and
    tls://dns:name:port stands for all addresses of a name. None: $IRIS_RELAY, else the user's own relay, else the host's."""

    access: Path | None = None
    """For tls://: the file that `iris key access` made. None: $IRIS_ACCESS, else access.pem among the key files."""

    label: str = field(default_factory=_program)
    """Shown by `iris members` and `iris status`; at most 64 characters."""

    message_limit_bytes: int = DEFAULT_MESSAGE_LIMIT
    """Largest payload, 64 KiB to 64 MiB; the relay's limit holds as well. Larger messages go through a tunnel."""

    connect_timeout_s: float = 5.0
    """Until the relay has answered HELLO, and until it knows every service and subscription."""

    drain_timeout_s: float = 5.0
    """How long a member that leaves may finish what it accepted; then the rest is cancelled, and callers told."""

    reconnect_min_s: float = 0.05
    """First pause before another attempt; doubled, with jitter, up to `reconnect_max_s`."""

    reconnect_max_s: float = 2.0

    offline_bytes: int = 8 << 20
    """Published bytes kept while there is no relay; beyond it `publish` raises ConnectionLost."""

    write_high_bytes: int = 1 << 20
    """Write buffer above which `publish` waits and `offer` refuses."""

    freshness_s: float = 600.0
    """Messages whose sender's clock is further from ours than this are refused."""

    keep_freed_memory: bool = False
    """Let the C allocator keep up to 512 MiB that this whole process has freed, instead of returning it to the system.

    Messages of 64 KiB and more, and floods of small ones, are faster by up to three times; the process stays as large as it once was.
    `iris run` does it for its services. glibc only, and for good: another client of this process cannot take it back.
    """

    stall_s: float = 1.0
    """Seconds that one publication with `when_full="wait"` waits for subscribers. After that, what is published is dropped for those
    that are still full, until they have room."""

    compress: bool = False
    """Compress what is sent, bundle by bundle, before it is sealed (zstd): for slow ways between sites. Receivers open it in any case.

    Whoever sees the traffic learns how well it compressed: leave it off where strangers choose part of a message with a secret in it.
    """

    relay_user: str = "iris"
    """A relay is trusted if it runs as us, as root, or as this user."""

    def __post_init__(self) -> None:
        if not MIN_MESSAGE_LIMIT <= self.message_limit_bytes <= MAX_MESSAGE_LIMIT:
            raise ConfigError(
                f"message_limit_bytes: {self.message_limit_bytes} is not from "
                f"{MIN_MESSAGE_LIMIT} to {MAX_MESSAGE_LIMIT}"
            )
        for name in (
            "connect_timeout_s",
            "drain_timeout_s",
            "reconnect_min_s",
            "reconnect_max_s",
            "freshness_s",
            "stall_s",
        ):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0 and up to a day")
        if self.offline_bytes < 0 or self.write_high_bytes < 4096:
            raise ConfigError(
                "offline_bytes must be at least 0, and write_high_bytes at least 4096"
            )
        if len(self.label) > 64:
            raise ConfigError(f"label: {len(self.label)} characters are over the limit of 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a member takes at once; the relay queues no more than this at it."""

    concurrency: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    """Handlers that run at once, per kind."""

    queue_bytes: int = 64 << 20
    """Bytes handed over and not finished, per kind; an empty queue takes one message of any size."""

    tunnels: int = 16_384
    """Tunnels open at once."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.queue_bytes < 1 or self.tunnels < 1:
            raise ConfigError("concurrency, queue_bytes and tunnels must be at least 1")
