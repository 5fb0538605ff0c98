"""A process that the relay starts, and starts again whenever it ends.

The relay holds the other end of its standard input. When the relay ends, even if it is killed, that input ends and so
does the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Final

from iris.core.backoff import Backoff

PAUSE_MIN_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
LASTED_S: Final = 10.0
"""A process that ran for longer than this is started again after the shortest pause."""


class Child:
    """One process, kept running while `run` runs. Subclasses log what happens to it."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> None:
        """`pass_fds`: descriptors that the process inherits, under the same numbers."""
        self._command = command
        self._pass_fds = pass_fds
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._last_exit: int | None = None
        self._stopping = False

    async def run(self) -> None:
        """Keep the process running until cancelled or stopped. An unexpected end is logged."""
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while not self._stopping:
            began_s = time.monotonic()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=self._pass_fds
                )  # fmt: skip
            except OSError as err:
                self._not_started(err)
            else:
                self._starts += 1
                await self._listen(self._process)
                self._last_exit = await self._process.wait()
                self._process = None
                if self._stopping:
                    return
                self._ended(self._last_exit)
            if time.monotonic() - began_s > LASTED_S:
                backoff.succeeded()
            await asyncio.sleep(backoff.failed())

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read the lines of the process's standard output until it ends. Lines over 64 KiB are skipped."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue
            if not line:
                return
            self._said(line)

    def _said(self, line: bytes) -> None:
        """Handle a line of the standard output."""

    def _not_started(self, err: OSError) -> None:
        """Log that the process cannot be started."""
        raise NotImplementedError

    def _ended(self, code: int) -> None:
        """Log that the process ended although nobody stopped it."""
        raise NotImplementedError

    def stop_restarting(self) -> None:
        """Do not start the process again: whoever stops the relay may stop it, too."""
        self._stopping = True

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._stopping = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return self._process.pid if self._process is not None else None
