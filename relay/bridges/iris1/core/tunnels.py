"""The client's end of a tunnel: chunks and grants on the side of the client, complete messages on the
other.

Each side grants the other bytes of payload. The client sends no chunk beyond its grant. Bytes are
granted again as soon as they are part of a complete message, unless a complete message waits to be
forwarded: then the window is all that may arrive. A message to the client waits until the grant covers
its first chunk. The rest of it follows whatever the grant is.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 4_194_304
"""Bytes that a client may send before it is granted more."""
GRANT_BYTES: Final = WINDOW // 8
"""Grants are made in portions of this size, so that a client does not wait for each of them."""
_MOST: Final = 1 << 62


class TunnelFault(Exception):
    """The tunnel must end; both ends receive the text."""


class ByteBudget:
    """Bytes of messages that are being assembled or queued, for all tunnels of one client in one direction."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit

    def reserve(self, size: int) -> None:
        """Add bytes; raises TunnelFault if the limit would be exceeded."""
        if self.held + size > self.limit:
            raise TunnelFault(
                f"more than {self.limit} bytes are queued in the tunnels of this client"
            )
        self.held += size

    def release(self, size: int) -> None:
        """Remove bytes that are no longer held."""
        self.held -= size


class ClientEnd:
    """The client's end of one tunnel."""

    __slots__ = (
        "_budget", "_missing", "_partial", "_to_grant", "_window", "allowance", "id", "message_limit", "waiting",
    )  # fmt: skip

    def __init__(self, id: int, budget: ByteBudget, message_limit: int) -> None:
        self.id = id
        self.message_limit = message_limit
        self.allowance = 0
        """Bytes that may be sent to the client; negative after a message larger than the grant."""
        self.waiting = 0
        """Bytes of complete messages from the client that are not forwarded yet."""
        self._budget = budget
        self._partial = bytearray()
        self._missing = 0
        self._window = WINDOW
        self._to_grant = 0

    def allow(self, size: int) -> None:
        """Add bytes that the client granted."""
        self.allowance = min(self.allowance + size, _MOST)

    def sent(self, size: int) -> None:
        """Subtract bytes that were sent to the client."""
        self.allowance -= size

    def receive(self, size: int, chunk: bytes) -> bytes | None:
        """Accept a chunk; return the message that it completes, which counts as `waiting` until
        `forwarded`.

        Raises:
            TunnelFault: the chunk exceeds the grant, its message's size, a limit or the budget, or
            belongs to no message.
        """
        self._window -= len(chunk)
        if self._window < 0:
            raise TunnelFault(f"the client sent {-self._window} bytes more than it was granted")
        self._to_grant += len(chunk)
        if size:
            self._drop_partial()
            if size > self.message_limit:
                raise TunnelFault(
                    f"a message of {size} bytes is over the limit of {self.message_limit}"
                )
            self._missing = size
        elif not self._missing:
            raise TunnelFault("a chunk came before the first chunk of its message")
        if len(chunk) > self._missing:
            raise TunnelFault(
                f"a chunk of {len(chunk)} bytes is longer than the {self._missing} bytes left of its message"
            )
        self._budget.reserve(len(chunk))
        self._missing -= len(chunk)
        if self._missing:
            self._partial += chunk
            return None
        message = chunk
        if self._partial:
            self._partial += chunk
            message = bytes(self._partial)
            self._partial = bytearray()
        self.waiting += len(message)
        return message

    def forwarded(self, size: int) -> None:
        """Release a message of `size` bytes that was forwarded or dropped."""
        self.waiting -= size
        self._budget.release(size)

    def grant(self) -> int:
        """Return how many bytes to grant the client now, and count them as granted."""
        if self.waiting or self._to_grant < GRANT_BYTES:
            return 0
        size, self._to_grant = self._to_grant, 0
        self._window += size
        return size

    def end(self) -> None:
        """Release the bytes of an incomplete message. Waiting messages are released by `forwarded`."""
        self._drop_partial()
        self._missing = 0

    def _drop_partial(self) -> None:
        self._budget.release(len(self._partial))
        self._partial = bytearray()
