"""`iris run --workers N` and `--reload`: processes that serve the same services, started again when they end.

Each worker is a new interpreter (never a fork), in a session of its own, so that Ctrl-C reaches the supervisor
alone. See `iris.cli.worker` for what the two say to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from iris.cli.exits import Exit
from iris.cli.worker import LOADED, READY
from iris.core.backoff import Backoff
from iris.errors import ConfigError
from iris.extras import install_line
from iris.logs import logger
from iris.signals import on_signal
from relay import notify

log = logger(__name__)

PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
LASTED_S: Final = 10.0
"""A worker that ran for longer than this is started again after the shortest pause."""

Changes = Callable[[asyncio.Event], AsyncIterator[list[str]]]
"""Takes an event that ends it, and yields the paths of changed files."""


class Worker:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.loaded = False
        self.ready = False
        self.reloading = False
        """Whether it has keys to read that it has not confirmed yet."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Keeps `count` workers running until `stop`."""

    def __init__(
        self, command: Sequence[str], count: int, *, changes: Changes | None = None
    ) -> None:
        """`command` starts a worker if `--status-fd N` is added. With `changes`, workers are started again at each."""
        self._command = command
        self._count = count
        self._changes = changes
        self._running: dict[int, Worker] = {}
        self._stop = asyncio.Event()
        self._first_loaded = asyncio.Event()
        self._changed = asyncio.Event()
        self._told_ready = False
        self._code = Exit.OK

    async def run(self) -> int:
        """Run the workers until a signal or a mistake that a restart does not correct; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            on_signal(number, self._on_stop)
        on_signal(signal.SIGHUP, self._on_hangup)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch()) if self._changes is not None else None
            keepers = [
                group.create_task(self._keep(number), name=f"iris-worker-{number}")
                for number in range(self._count)
            ]
            await asyncio.wait(keepers)
            self.stop()
            if watching is not None:
                await watching
        return int(self._code)

    def stop(self) -> None:
        """Let every worker finish what it accepted, and start none again. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._first_loaded.set()
            notify.stopping(os.environ)
            for worker in self._running.values():
                worker.send(signal.SIGTERM)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            for worker in self._running.values():
                worker.send(signal.SIGKILL)
            os._exit(Exit.INTERRUPTED)
        log.info("run.supervisor_stopping", extra={"fields": {"workers": len(self._running)}})
        self.stop()

    def _on_hangup(self) -> None:
        if self._running:
            notify.reloading(os.environ)
        for worker in self._running.values():
            worker.reloading = True
            if worker.ready:
                worker.send(signal.SIGHUP)

    async def _keep(self, number: int) -> None:
        """Keep one worker running. All but the first start when the first has imported the services."""
        if number:
            await self._first_loaded.wait()
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while not self._stop.is_set():
            began_s = time.monotonic()
            changed = self._changed
            try:
                code, loaded = await self._run_one(number, changed)
            except OSError as error:
                code, loaded = Exit.ANSWER, True
                fields: dict[str, object] = {"worker": number, "error": str(error)}
                log.error("run.worker_not_started", extra={"fields": fields})
            else:
                if self._stop.is_set() or changed.is_set():
                    continue  # it was told to end
                log.error("run.worker_ended", extra={"fields": {"worker": number, "exit": code}})
            if self._changes is not None:
                log.warning("run.waiting_for_change", extra={"fields": {"worker": number}})
                await self._either(changed)
                continue
            if code == Exit.USAGE and not loaded:  # it has said what is wrong
                self._code = Exit.USAGE
                self.stop()
                return
            if time.monotonic() - began_s > LASTED_S:
                backoff.succeeded()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.failed()):
                    await self._stop.wait()

    async def _run_one(self, number: int, changed: asyncio.Event) -> tuple[int, bool]:
        """Run one worker to its end; return its exit code, and whether it had imported the services."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                environ = {k: v for k, v in os.environ.items() if k != notify.VARIABLE}
                if self._changes is not None:
                    # Python takes compiled code for current if the second of the change and the size are the same.
                    environ["PYTHONDONTWRITEBYTECODE"] = "1"
                process = await asyncio.create_subprocess_exec(
                    *self._command, "--status-fd", str(theirs.fileno()), env=environ, pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )  # fmt: skip
            worker = self._running[number] = Worker(process)
            try:
                if self._stop.is_set() or changed.is_set():  # while it was started
                    worker.send(signal.SIGTERM)
                reader, writer = await asyncio.open_connection(sock=ours)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._hear(worker, reader))
                    code = await process.wait()
                    # Processes that the worker forked may still hold its end. What it wrote is read before the end.
                    ours.shutdown(socket.SHUT_RD)
                writer.close()
                return code, worker.loaded
            except asyncio.CancelledError:
                worker.send(signal.SIGKILL)
                raise
            finally:
                del self._running[number]
                self._tell_ready()

    async def _hear(self, worker: Worker, reader: asyncio.StreamReader) -> None:
        while text := await reader.readline():
            self._heard(worker, text)

    def _heard(self, worker: Worker, text: bytes) -> None:
        if text == LOADED:
            worker.loaded = True
            self._first_loaded.set()
        elif text == READY:
            again = worker.reloading and not worker.ready
            worker.ready, worker.reloading = True, again
            if again:
                worker.send(signal.SIGHUP)
            self._tell_ready()

    def _tell_ready(self) -> None:
        """Notify the service manager if all workers serve with the keys of now."""
        workers = self._running.values()
        if len(workers) == self._count and all(w.ready and not w.reloading for w in workers):
            notify.ready(os.environ)
            if not self._told_ready:
                self._told_ready = True
                pids = [worker.process.pid for worker in workers]
                log.info("run.workers_ready", extra={"fields": {"workers": pids}})

    async def _watch(self) -> None:
        assert self._changes is not None
        async for files in self._changes(self._stop):
            log.info("run.reloading", extra={"fields": {"changed": files[:8]}})
            before, self._changed = self._changed, asyncio.Event()
            before.set()
            for worker in self._running.values():
                worker.send(signal.SIGTERM)

    async def _either(self, event: asyncio.Event) -> None:
        """Return when `event` or the end of this supervisor is there."""
        waiting = [asyncio.ensure_future(each.wait()) for each in (event, self._stop)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


def python_changes(directory: str) -> Changes:
    """Return the changes of Python files below a directory. Raises ConfigError if watchfiles is not installed."""
    try:
        from watchfiles import PythonFilter, awatch
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--reload requires watchfiles; install it with: {install_line('reload')}"
        ) from error

    async def changes(stop: asyncio.Event) -> AsyncIterator[list[str]]:
        async for found in awatch(directory, watch_filter=PythonFilter(), stop_event=stop):
            yield sorted(path for _, path in found)

    return changes


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a worker: `iris run` with these arguments, in a new interpreter."""
    return [sys.executable, "-P", "-m", "iris.cli", "run", *arguments]
