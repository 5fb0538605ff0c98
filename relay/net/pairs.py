"""Socket pairs for direct tunnels. A session fetches its end once, with a token, on a separate connection."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

TOKEN_BYTES: Final = 16
BUFFER_BYTES: Final = 208 << 10
"""SO_SNDBUF of each end: room for three records of 64 KiB in flight."""


class SocketPair:
    """A socket pair: this relay's copies of both ends, and their tokens. Implements `relay.core.direct.Pair`."""

    __slots__ = ("_pairs", "ends", "tokens")

    def __init__(self, pairs: Pairs, ends: tuple[socket.socket, socket.socket]) -> None:
        self._pairs = pairs
        self.ends = ends
        self.tokens = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)

    def end(self) -> None:
        for token, end in zip(self.tokens, self.ends, strict=True):
            self._pairs.forget(token)
            with contextlib.suppress(OSError):  # both directions are shut already
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Pairs:
    """Makes socket pairs and holds the unused tokens. Implements `relay.core.direct.PairMaker`."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, tuple[socket.socket, str]] = {}
        """Unused tokens: token -> (end of a pair, user that may fetch it)."""

    def make(self, opener: str, member: str) -> SocketPair | None:
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None
        pair = SocketPair(self, ends)
        for token, end, user in zip(pair.tokens, ends, (opener, member), strict=True):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self._waiting[token] = end, user
        return pair

    def take(self, token: bytes, user: str) -> socket.socket | None:
        """Return the end for a token of this user, once; the pair still owns it and closes it."""
        end, owner = self._waiting.get(token, (None, ""))
        if end is None or owner != user:
            return None
        del self._waiting[token]
        return end

    def forget(self, token: bytes) -> None:
        """Make a token invalid. Idempotent."""
        self._waiting.pop(token, None)

    @property
    def waiting(self) -> int:
        """Number of unused tokens."""
        return len(self._waiting)


def hand_over(descriptor: int, end: socket.socket) -> None:
    """Send one byte and `end` over the connection `descriptor`, which nothing was written to yet; raises OSError."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        socket.send_fds(connection, [b"\0"], [end.fileno()])
