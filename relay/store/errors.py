"""What a log raises, what a call is refused with, and `ChannelRefused`, for a call that failed authentication.

    LogError
    ├── LogMissing         nothing is at the path
    ├── LogExists          something is at the path already
    ├── LogBusy            another process, or another `Log` of this one, has it open
    ├── LogDamaged         what is on disk cannot be trusted; quarantine this stream, serve the others
    ├── CursorsFull        the log keeps as many cursors as it may
    └── LogWriteFailed     a write did not reach the disk; reads go on, writes wait for a reopen

Siblings differ by what the caller does: create, open, wait, quarantine, make room and reopen.
"""

from __future__ import annotations

from typing import Final

from iris.errors import IrisError

_SALVAGE: Final = "Stop its store and run `iris store salvage` to recover what can be read"


class LogError(IrisError):
    """The log at `path` cannot do what was asked."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"log {path}: {detail}")
        self.path = path


class LogMissing(LogError):
    """There is no log at the path."""


class LogExists(LogError):
    """There is something at the path already; it was not touched."""


class LogBusy(LogError):
    """The log is open elsewhere."""


class LogDamaged(LogError):
    """The log's files do not hold what was written. Nothing was repaired, no wrong record was returned.

    `offset` is the first that is in doubt, None when the whole log is.
    """

    def __init__(self, path: str, what: str, offset: int | None = None) -> None:
        where = "" if offset is None else f" (at offset {offset})"
        super().__init__(path, f"{what}{where}. {_SALVAGE}")
        self.what = what
        self.offset = offset


class CursorsFull(LogError):
    """The log keeps as many cursors as it may; delete one."""


class LogWriteFailed(LogError):
    """The disk refused a write: it may or may not be found after a reopen, and was not acknowledged.

    `sure`: it was not tried, because one before it had failed, and nothing of it will be found.
    """

    def __init__(self, path: str, reason: str, *, sure: bool = False) -> None:
        super().__init__(path, f"write failed: {reason}")
        self.reason = reason
        self.sure = sure


class ChannelRefused(IrisError):
    """A call that the holder of an open channel did not make. It was not looked at."""


class Refuse(IrisError):
    """A call is refused; `code` is one of `streams.REFUSALS`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
