"""Errors of logs, refusals of calls, and `ChannelRefused` for a call that failed authentication.

    LogError
    ├── LogMissing         the path does not exist
    ├── LogExists          the path exists
    ├── LogBusy            another process, or another `Log` of this one, has it open
    ├── LogDamaged         the data on disk cannot be trusted; quarantine this stream, serve the others
    ├── CursorsFull        the log has the maximum number of cursors
    ├── RecordsAway        the records are in the bucket, and are being fetched
    ├── RecordsUnreachable the records are in the bucket, which does not answer
    └── LogWriteFailed     a write did not reach the disk; reads still work, writes need a reopen

Each error requires another reaction of the caller: create, open, wait, quarantine, delete a cursor, fetch, try again,
or reopen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.errors import IrisError

_SALVAGE: Final = "Stop its store and run `iris store salvage` to recover what can be read"


class LogError(IrisError):
    """An operation on the log at `path` failed."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"log {path}: {detail}")
        self.path = path


class LogMissing(LogError):
    """There is no log at the path."""


class LogExists(LogError):
    """The path exists; it was not changed."""


class LogBusy(LogError):
    """The log is open in another process, or in another object of this one."""


class LogDamaged(LogError):
    """The log's files do not contain what was written. Nothing was repaired, and no wrong record was returned.

    `offset` is the first doubtful offset; None if the whole log is in doubt.
    """

    def __init__(self, path: str, what: str, offset: int | None = None) -> None:
        where = "" if offset is None else f" (at offset {offset})"
        super().__init__(path, f"{what}{where}. {_SALVAGE}")
        self.what = what
        self.offset = offset


class ObjectLost(LogDamaged):
    """An object of the bucket that has records of the log is missing, or is not what was written."""

    def __init__(self, path: str, what: str) -> None:
        LogError.__init__(self, path, f"{what}; restore the object from a backup")
        self.what = what
        self.offset = None


class RecordsAway(LogError):
    """The records are in an object of the bucket, which is being fetched. Nothing was changed."""

    def __init__(
        self, path: str, key: str, when: Callable[[object, Callable[[], None]], None]
    ) -> None:
        super().__init__(path, f"records are being fetched from object {key}")
        self.when = when
        """`when(key, callback)` calls `callback` when a read is worth another try; the last one of a key counts."""


class RecordsUnreachable(LogError):
    """The records are in an object of the bucket, which does not answer. Nothing was changed."""


class CursorsFull(LogError):
    """The log has the maximum number of cursors; delete one."""


class LogWriteFailed(LogError):
    """A disk write failed. It was not acknowledged, and may or may not be there after a reopen.

    `sure`: the write was not tried, because an earlier one had failed, so it is certainly not there.
    """

    def __init__(self, path: str, reason: str, *, sure: bool = False) -> None:
        super().__init__(path, f"write failed: {reason}")
        self.reason = reason
        self.sure = sure


class ChannelRefused(IrisError):
    """The call was not made by the holder of an open channel, and was not processed."""


class ChannelUnknown(ChannelRefused):
    """This store does not know the channel or door, so the caller's proof was not checked.

    Callers get there without fault: the stream has moved here, or the store was restarted. They open another channel.
    """


class Refuse(IrisError):
    """The call is refused. `code` is one of `streams.REFUSALS`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
