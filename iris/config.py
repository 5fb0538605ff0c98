"""Settings of a client and of a member: frozen dataclasses that check their values when they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from iris.checks import check_number, check_whole
from iris.errors import ConfigError
from iris.program import program_name
from iris.wire.codec import DEFAULT_MESSAGE_LIMIT, MAX_MESSAGE_LIMIT, MIN_MESSAGE_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of a client; pass them as `iris.connect(config=ClientConfig(...))`.

    Fields that end in `_s` are seconds. A wrong value raises ConfigError.
    """

    relay: Path | str | None = None
    """Path of the relay's socket, or "tls://host:port" of a relay on another host.

    Several TLS addresses are separated by commas and tried in random order. "tls://dns:name:port" stands for
    all addresses of a host name. None: $IRIS_RELAY if it is set, else your own relay if its socket exists, else
    the host's.
    """

    access: Path | None = None
    """Access file for tls:// addresses, made by `iris key access`.

    None: $IRIS_ACCESS, else access.pem beside the keyring.
    """

    label: str = field(default_factory=program_name)
    """Name of this client in `iris members` and `iris status`; at most 64 characters.

    Default: the program's file name.
    """

    message_limit_bytes: int = DEFAULT_MESSAGE_LIMIT
    """Largest payload of a message, from 64 KiB to 64 MiB; default 1 MiB. Send larger messages through a tunnel.

    If the relay has a lower limit, that limit applies.
    """

    connect_timeout_s: float = 5.0
    """Timeout for connecting: until the relay has answered HELLO and registered all services and subscriptions."""

    drain_timeout_s: float = 5.0
    """How long a member that leaves may take to finish what it accepted.

    After that, its handlers are cancelled and their callers get an error.
    """

    reconnect_min_s: float = 0.05
    """Pause before the first attempt to reconnect.

    It doubles after each attempt, with jitter, up to `reconnect_max_s`.
    """

    reconnect_max_s: float = 2.0
    """Longest pause between two attempts to reconnect."""

    offline_bytes: int = 8 << 20
    """Bytes of publications and broadcasts held while no relay is connected.

    Beyond it, `publish` raises ConnectionLost.
    """

    write_high_bytes: int = 1 << 20
    """High-water mark of the write buffer, at least 4096. Above it `publish` waits and `offer` refuses."""

    freshness_s: float = 600.0
    """Refuse messages whose sender's clock differs from the local clock by more than this."""

    keep_freed_memory: bool = False
    """Let the C allocator keep up to 512 MiB that this process has freed, instead of returning it to the system.

    Messages of 64 KiB and more, and floods of small ones, become up to three times faster; the process stays as
    large as it once was. The setting needs glibc, applies to the whole process and cannot be undone by another
    client in it. `iris run` sets it for its services.
    """

    stall_s: float = 1.0
    """Longest time that one `publish(..., when_full="wait")` waits for subscribers.

    After that, messages for the subscribers that are still full are dropped until these have room again.
    """

    compress: bool = False
    """Compress each bundle with zstd before it is sealed, for slow connections between sites.

    Every receiver can open it.

    An observer of the traffic can see how well it compressed. Leave this off if a message may hold both a
    secret and text chosen by a stranger.
    """

    trusted_user: str = "iris"
    """User whose relay is trusted, besides root and the user of this process."""

    def __post_init__(self) -> None:
        limits = MIN_MESSAGE_LIMIT, MAX_MESSAGE_LIMIT
        check_whole("message_limit_bytes", self.message_limit_bytes, *limits)
        for name in (
            "connect_timeout_s",
            "drain_timeout_s",
            "reconnect_min_s",
            "reconnect_max_s",
            "freshness_s",
            "stall_s",
        ):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(
                    f"{name} must be above 0 and at most 86400 s (a day), not {getattr(self, name)}"
                )
        check_whole("offline_bytes", self.offline_bytes, 0)
        check_whole("write_high_bytes", self.write_high_bytes, 4096)
        if not isinstance(self.label, str):
            raise ConfigError(f"label must be a str, not {type(self.label).__name__}")
        if len(self.label) > 64:
            raise ConfigError(f"label must have at most 64 characters, not {len(self.label)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a member accepts at once; pass it as `Service(..., limits=Limits(...))`.

    Relays send nothing beyond these limits to the member. When all members are at capacity, callers get Overloaded.
    """

    concurrency: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    """Handlers that run at the same time, for each kind (request, push, survey). Default: 4 x CPUs."""

    queue_bytes: int = 64 << 20
    """Bytes queued or running, for each kind. An empty queue accepts one message of any size."""

    tunnels: int = 16_384
    """Tunnels open at the same time."""

    def __post_init__(self) -> None:
        for name, most in (
            ("concurrency", 1 << 20),
            ("queue_bytes", 1 << 40),
            ("tunnels", 1 << 20),
        ):
            check_whole(name, getattr(self, name), 1, most)
