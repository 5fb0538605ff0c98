"""Casts of a client that has no relay: they are held for the next session, up to `ClientConfig.offline_bytes`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from iris.core.bundle import Headers
from iris.core.interfaces import Loss
from iris.errors import ConnectionLost
from iris.wire.kinds import Kind

Cast = tuple[int, str, bytes, Headers | None, bool]
"""(kind, name, payload, headers, packed): a publication or broadcast that is not in a bundle yet."""


class HeldCasts:
    """Casts that wait for a session, in their order."""

    def __init__(self, limit_bytes: int, report: Callable[[Loss], object]) -> None:
        """`report` is called with the loss of each cast that cannot be sent any more."""
        self.bytes = 0
        """Bytes held."""
        self._limit_bytes = limit_bytes
        self._report = report
        self._casts: deque[Cast] = deque()

    def hold(self, cast: Cast) -> None:
        """Hold a cast until there is a session. Raises ConnectionLost if `offline_bytes` would be exceeded."""
        size = len(cast[2]) + 64
        if self.bytes + size > self._limit_bytes:
            detail = (
                f"no relay is connected, and {self.bytes} of {self._limit_bytes} bytes are "
                "held for the next one (offline_bytes)"
            )
            raise ConnectionLost(cast[1], detail, may_have_run=False)
        self._casts.append(cast)
        self.bytes += size

    def hold_unsent(self, casts: list[Cast]) -> None:
        """Hold casts that were accepted for a session that has ended, and report those for which there is no room."""
        for cast in casts:
            try:
                self.hold(cast)
            except ConnectionLost as err:
                self.lost(cast, err.detail)

    def release(self) -> deque[Cast]:
        """Remove and return all casts, in their order."""
        casts, self._casts = self._casts, deque()
        self.bytes = 0
        return casts

    def lost(self, cast: Cast, cause: str) -> None:
        """Report that a cast will not be sent."""
        self._report(Loss(Kind(cast[0]).name.lower(), cast[1], b"", 1, cause))
