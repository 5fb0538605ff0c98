"""One tunnel as the first Iris sees it: chunks and allowances towards the client, whole messages towards us.

Both sides grant each other bytes of payload. The client sends no chunk that it was not granted; what it sent is granted
anew as soon as it is part of a message, unless a whole message waits to go on: then the window is all that may come. A message
to the client waits with its first chunk alone for the client's grant, and the rest of it follows whatever the balance is.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 4_194_304
"""What a client may send before it is granted more."""
GRANT_BYTES: Final = WINDOW // 8
"""Grants are made in portions: a client that may send so much less than the window does not wait."""
_MOST: Final = 1 << 62


class TunnelFault(Exception):
    """A tunnel has to end; the text is told to both ends."""


class ByteBudget:
    """Bytes of messages that are put together or wait, for all tunnels of one client, in one direction."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit

    def reserve(self, size: int) -> None:
        """Hold so many bytes more; raises TunnelFault if they are too many."""
        if self.held + size > self.limit:
            raise TunnelFault(
                f"more than {self.limit} bytes are queued in the tunnels of this client"
            )
        self.held += size

    def release(self, size: int) -> None:
        """So many bytes are not held any more."""
        self.held -= size


class ClientEnd:
    """The client's half of a tunnel."""

    __slots__ = (
        "_budget", "_missing", "_partial", "_to_grant", "_window", "allowance", "id", "message_limit", "waiting",
    )  # fmt: skip

    def __init__(self, id: int, budget: ByteBudget, message_limit: int) -> None:
        self.id = id
        self.message_limit = message_limit
        self.allowance = 0
        """What may be sent to the client; below 0 after a message that was larger."""
        self.waiting = 0
        """Bytes of whole messages from the client that have not gone on."""
        self._budget = budget
        self._partial = bytearray()
        self._missing = 0
        self._window = WINDOW
        self._to_grant = 0

    def allow(self, size: int) -> None:
        """The client grants more."""
        self.allowance = min(self.allowance + size, _MOST)

    def sent(self, size: int) -> None:
        """So much has gone to the client."""
        self.allowance -= size

    def receive(self, size: int, chunk: bytes) -> bytes | None:
        """Take a chunk; return the message that it completes, which counts as `waiting` until `passed_on`.

        Raises:
            TunnelFault: more than was granted, more than was announced, nothing begun, or more than is held here.
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
        """A message of `size` bytes has gone on, or is given up."""
        self.waiting -= size
        self._budget.release(size)

    def grant(self) -> int:
        """Return what is to be granted to the client now, and count it as granted."""
        if self.waiting or self._to_grant < GRANT_BYTES:
            return 0
        size, self._to_grant = self._to_grant, 0
        self._window += size
        return size

    def end(self) -> None:
        """Give back what a message begun has taken; what waits is given back by `passed_on`."""
        self._drop_partial()
        self._missing = 0

    def _drop_partial(self) -> None:
        self._budget.release(len(self._partial))
        self._partial = bytearray()
