"""Starts the store of a relay that was given a data directory, and starts it again whenever it ends.

The store is a process of its own, so that a slow or full disk never holds up routing. The relay holds the other end of its
standard input: when the relay is gone, however it went, the store ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from iris.core.backoff import Backoff
from iris.keyfiles import sync_directory

log = logging.getLogger(__name__)

PAUSE_MIN_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
LASTED_S: Final = 10.0
"""A store that ran for so long is started again at once."""
STOP_S: Final = 10.0
STREAMS: Final = "streams"
"""In the data directory: a directory for each log."""
COMPLETE_FILE: Final = "complete"
"""In the data directory, from the end of a relay that has read everybody to the start of its next store: what its streams lack nothing up to."""
COMPLETE_FILE_BYTES: Final = 1 << 16
UNREAD: Final = b"unread\n"
"""At its standard input: what a relay says to its store that has not come yet."""


EXIT_USAGE: Final = 2
"""It could not begin, and has said why."""


class _StatusLine(msgspec.Struct):
    """A line of the store's standard output."""

    cannot: str
    final: bool


_decode: Final = msgspec.json.Decoder(_StatusLine).decode


class StoreSupervisor:
    """One store, kept running while `run` runs."""

    def __init__(
        self, data: Path, socket_path: Path, log_level: str, log_format: str, cannot: Callable[[str, bool], None] = lambda why, final: None
    ) -> None:  # fmt: skip
        """`cannot` hears why the store cannot serve, and whether that stays so until somebody mends it; of "" when it can again."""
        self._data = data
        self._command = (
            sys.executable, "-m", "relay.store", "--data", str(data), "--relay", str(socket_path), "--log-level", log_level,
            "--log-format", log_format, "--supervised",
        )  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._last_exit: int | None = None
        self._stopping = False
        self._cannot = ""
        self._on_cannot_serve = cannot

    async def run(self) -> None:
        """Keep the store running. Runs until cancelled or stopped; an end that nobody asked for is logged."""
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while not self._stopping:
            began_s = time.monotonic()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
                )
            except OSError as err:
                log.error("store.not_started", extra={"fields": {"error": str(err)}})
                self._set_cannot_serve(f"it cannot be started: {err}", final=False)
            else:
                self._starts += 1
                await self._listen(self._process)
                self._last_exit = await self._process.wait()
                self._process = None
                if self._stopping:
                    return
                if self._last_exit != EXIT_USAGE:
                    self._set_cannot_serve("", final=False)
                fields = {"exit": self._last_exit, "data": str(self._data)}
                log.error("store.ended", extra={"fields": fields})
            if time.monotonic() - began_s > LASTED_S:
                backoff.succeeded()
            await asyncio.sleep(backoff.failed())

    @property
    def has_streams(self) -> bool:
        """Whether the store before this one left streams, which record again once it is here."""
        try:
            return any(path.is_dir() for path in (self._data / STREAMS).iterdir())
        except OSError:
            return False

    @property
    def complete_for(self) -> str:
        """Id of the relay up to whose end its streams lack nothing, as the store before this one said; empty if it did not."""
        try:
            with (self._data / COMPLETE_FILE).open("rb") as file:
                return str(json.loads(file.read(COMPLETE_FILE_BYTES))["relay"])
        except (OSError, ValueError, TypeError, KeyError):
            return ""

    def forget_completeness(self) -> None:
        """Something may have been published that the next store does not hear of: there may be a gap. Raises OSError."""
        remove_complete_file(self._data / COMPLETE_FILE)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read what the store says of itself until it ends: one JSON object a line. What is none is not for us."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
                if not line:
                    return
                said = _decode(line)
            except (ValueError, msgspec.DecodeError):
                continue
            self._set_cannot_serve(said.cannot, final=said.final)

    def _set_cannot_serve(self, why: str, *, final: bool) -> None:
        if why != self._cannot:
            self._cannot = why
            self._on_cannot_serve(why, final)

    def stop_restarting(self) -> None:
        """Start it no more: whoever stops the relay may stop the store, too."""
        self._stopping = True

    async def stop(self, *, unread: bool = False) -> None:
        """End the store: it writes what it has. Killed when that takes too long. Idempotent.

        `unread`: this relay waited for it, and let nobody in, so that its streams still lack nothing.
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

    def kill(self) -> None:
        """End it now. Idempotent."""
        self._stopping = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the running store; None if there is none."""
        return self._process.pid if self._process is not None else None

    def status(self) -> dict[str, object]:
        """Return what `iris status` shows of it."""
        return {
            "data": str(self._data),
            "pid": self.pid,
            "starts": self._starts,
            "last_exit": self._last_exit,
            "cannot_serve": self._cannot,
        }


def remove_complete_file(path: Path) -> None:
    """Remove the file `COMPLETE_FILE`, for good. Idempotent; raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync_directory(path.parent)
