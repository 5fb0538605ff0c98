"""Starts the store of a relay with a data directory, and starts it again whenever it ends.

The store is a separate process, so that a slow or full disk never holds up routing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from iris.errors import ConfigError
from iris.keyfiles import sync_directory
from relay.child import Child
from relay.store import needs_rocksdb

log = logging.getLogger(__name__)

STOP_S: Final = 10.0
STREAMS: Final = "streams"
"""Subdirectory of the data directory with a directory for each log."""
COMPLETE_FILE: Final = "complete"
"""File in the data directory that says up to where the streams are complete. A store writes it after a relay that read
all sessions to their end; the next store removes it."""
COMPLETE_FILE_BYTES: Final = 1 << 16
UNREAD: Final = b"unread\n"
"""Line that the relay writes to the store's standard input if it stops without having admitted any session."""


FIGURES: Final = b'{"figures":'
"""How a line of the store begins that is for the page of metrics."""

EXIT_USAGE: Final = 2
"""Exit code of a store that could not start and has reported why."""


class _StatusLine(msgspec.Struct):
    """One line of the store's standard output: why it cannot serve (empty: it can), and whether that stays so."""

    cannot: str
    final: bool


_decode: Final = msgspec.json.Decoder(_StatusLine).decode


class StoreSupervisor(Child):
    """One store, kept running while `run` runs."""

    def __init__(
        self, data: Path, socket_path: Path, log_level: str, log_format: str, cannot: Callable[[str, bool], None] = lambda why, final: None,
        *, bucket: str = "", bucket_key: Path | None = None, disk_limit: int = 0, bucket_pause_ms: int | None = None,
        figures: Callable[[bytes], None] | None = None,
    ) -> None:  # fmt: skip
        """`cannot(why, final)` is called when the store cannot serve, and with "" when it can again.

        `final`: it lasts until somebody corrects it. `figures` is called with lines for the page of metrics; without it
        the store makes none.
        """
        self._data = data
        super().__init__(
            (
                sys.executable, "-P", "-m", "relay.store", "--data", str(data), "--relay", str(socket_path), "--log-level", log_level,
                "--log-format", log_format, "--supervised", *(("--bucket", bucket) if bucket else ()),
                *(("--bucket-key", str(bucket_key.absolute())) if bucket_key else ()),
                *(("--disk-limit", str(disk_limit)) if disk_limit else ()),
                *(() if bucket_pause_ms is None else ("--bucket-pause-ms", str(bucket_pause_ms))),
                *(("--figures",) if figures else ()),
            )
        )  # fmt: skip
        self._cannot = ""
        self._on_cannot_serve = cannot
        self._on_figures = figures

    @property
    def has_streams(self) -> bool:
        """Whether the data directory has streams, which record again when the store is back."""
        try:
            return any(path.is_dir() for path in (self._data / STREAMS).iterdir())
        except OSError:
            return False

    @property
    def complete_for(self) -> str:
        """Id of the relay up to whose end the streams are complete, from `COMPLETE_FILE`; empty without it."""
        try:
            with (self._data / COMPLETE_FILE).open("rb") as file:
                return str(json.loads(file.read(COMPLETE_FILE_BYTES))["relay"])
        except (OSError, ValueError, TypeError, KeyError):
            return ""

    def forget_completeness(self) -> None:
        """Remove `COMPLETE_FILE`: messages may be published that the next store does not receive. Raises OSError."""
        remove_complete_file(self._data / COMPLETE_FILE)

    def _said(self, line: bytes) -> None:
        """Handle a line of the store: figures, or one JSON object with its status. Other lines are ignored."""
        if self._on_figures is not None and line.startswith(FIGURES):
            self._on_figures(line)
            return
        with contextlib.suppress(msgspec.DecodeError):
            status = _decode(line)
            self._set_cannot_serve(status.cannot, final=status.final)

    def _not_started(self, err: OSError) -> None:
        log.error("store.not_started", extra={"fields": {"error": str(err)}})
        self._set_cannot_serve(f"the store's process cannot be started: {err}", final=False)

    def _ended(self, code: int) -> None:
        if code != EXIT_USAGE:
            self._set_cannot_serve("", final=False)
        log.error("store.ended", extra={"fields": {"exit": code, "data": str(self._data)}})

    def _set_cannot_serve(self, why: str, *, final: bool) -> None:
        if why != self._cannot:
            self._cannot = why
            self._on_cannot_serve(why, final)

    async def stop(self, *, unread: bool = False) -> None:
        """End the store, which writes what it holds; kill it after `STOP_S`. Idempotent.

        `unread`: this relay has not admitted any session, so the streams are still complete.
        """
        self._stopping = True
        process = self._process
        if process is None or process.stdin is None:
            return
        if unread:
            process.stdin.write(UNREAD)
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            log.error("store.killed", extra={"fields": {"pid": process.pid}})
            self.kill()
            await process.wait()

    def status(self) -> dict[str, object]:
        """Return what `iris status` shows of the store, ready for JSON."""
        return {
            "data": str(self._data),
            "pid": self.pid,
            "starts": self._starts,
            "last_exit": self._last_exit,
            "cannot_serve": self._cannot,
        }


def check_data(directory: Path) -> None:
    """Raise ConfigError if a store could not use `directory`, or create it. Leaves nothing behind.

    The text names the path that is wrong, with the system's words. What goes wrong later is logged, and the store
    tries again.
    """
    check_path(directory)
    nearest = directory
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    wrong: int | None
    if not nearest.is_dir():
        wrong = errno.ENOTDIR
    elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
        wrong = errno.EROFS
    elif not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        wrong = errno.EACCES
    else:
        wrong = _unwritable(nearest)
    if wrong is None:
        return
    text = f"data: cannot keep streams in {directory}: {os.strerror(wrong)}: {nearest}"
    raise ConfigError(f"{text}; name a directory that this user can create or write to")


def check_path(directory: Path) -> None:
    """Raise ConfigError if RocksDB, which takes paths as UTF-8, could not open a database in `directory`."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"data: cannot keep streams in {directory}: its name is not UTF-8; name another directory, or a link to this one"
        ) from None


def check_store(bucket: str) -> None:
    """Raise ConfigError if the packages of a store, and of this `bucket` if it has one, are not installed, or the URL
    names no bucket."""
    try:
        import rocksdict  # noqa: F401 - whether it is there
    except ImportError as err:
        raise ConfigError(f"data: {needs_rocksdb()}") from err
    if bucket:
        from relay.store.bucket.url import open_bucket

        open_bucket(bucket)


def _unwritable(directory: Path) -> int | None:
    """Make and lock a temporary file in `directory`; return the error number if the file system does not let us.

    Root may write to every directory by its mode, but some, as /proc, take no files. A full disk does not count:
    the store waits until there is space.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".iris-check-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.errno
    return None


def remove_complete_file(path: Path) -> None:
    """Remove `COMPLETE_FILE` durably. Idempotent; raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync_directory(path.parent)
