"""Frames that a client sends in the relay protocol v1.0-draft2 of the first Iris, and their limits."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

VERSION: Final = b"v1.0-draft2"
CLIENT_MAGIC: Final = b"iris-client-magic"
RELAY_MAGIC: Final = b"iris-relay-magic"
CHUNK_LIMIT: Final = 65_536
"""Longest chunk of a tunnel in bytes, in both directions."""
MAX_NAME: Final = 65_536
"""Longest string in bytes: a cluster, a topic or a string of the handshake."""
MAX_SKIPPED: Final = 1 << 30
"""Longest binary that is skipped, in bytes. A client that announces more is disconnected."""


class Op(IntEnum):
    """The first byte of a frame."""

    INIT = 0x00
    DENY = 0x01
    CLOSE = 0x02
    BROADCAST = 0x03
    REQUEST = 0x04
    REPLY = 0x05
    SUBSCRIBE = 0x06
    UNSUBSCRIBE = 0x07
    PUBLISH = 0x08
    TUN_INIT = 0x09
    TUN_CONFIRM = 0x0A
    TUN_ALLOW = 0x0B
    TUN_TRANSFER = 0x0C
    TUN_CLOSE = 0x0D


class Violation(Exception):
    """The client sent what the protocol does not allow. `silent`: its connection ends without a CLOSE frame."""

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


class Oversized(NamedTuple):
    """A payload over the message limit. Its bytes were dropped; only the size is known."""

    size: int
    limit: int

    def text(self, what: str) -> str:
        """Return a sentence about it for the other side; `what` is "request", "reply" or "message"."""
        return f"a {what} of {self.size} bytes is over the limit of {self.limit}"


Payload: TypeAlias = bytes | Oversized


class Init(NamedTuple):
    magic: bytes
    version: bytes
    cluster: bytes


class Close(NamedTuple):
    pass


class Broadcast(NamedTuple):
    cluster: bytes
    message: Payload


class Request(NamedTuple):
    id: int
    cluster: bytes
    payload: Payload
    timeout_ms: int


class Reply(NamedTuple):
    """`payload` is the reply, or the text of the fault."""

    id: int
    success: bool
    payload: Payload


class Subscribe(NamedTuple):
    topic: bytes


class Unsubscribe(NamedTuple):
    topic: bytes


class Publish(NamedTuple):
    topic: bytes
    event: Payload


class TunInit(NamedTuple):
    id: int
    cluster: bytes
    timeout_ms: int


class TunConfirm(NamedTuple):
    build: int
    id: int


class TunAllow(NamedTuple):
    id: int
    size: int


class TunTransfer(NamedTuple):
    id: int
    size: int
    """Size of the whole message in its first chunk, and 0 in all others."""
    chunk: bytes


class TunClose(NamedTuple):
    id: int


Frame: TypeAlias = (
    Init | Close | Broadcast | Request | Reply | Subscribe | Unsubscribe | Publish
    | TunInit | TunConfirm | TunAllow | TunTransfer | TunClose
)  # fmt: skip
