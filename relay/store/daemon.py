"""A store as a process: its start, its stop and its signals; what it tells the relay that started it.

SIGTERM and SIGINT end it, and so does the end of its standard input if a relay started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from iris.dialling import dial
from iris.errors import IrisError
from iris.memory import keep_freed_memory
from iris.transport import Pump
from iris.wire.texts import sound_json
from relay import notify, watchdog
from relay.logs import configure
from relay.process import loop_factory, raise_descriptor_limit, stop_on_signals
from relay.store.directory import DirectoryBusy
from relay.store.figures import report
from relay.store.process import BucketSettings, StoreProcess
from relay.store.session import StoreSession
from relay.supervisor import UNREAD

log = logging.getLogger(__name__)

RETRY_OPEN_S: Final = 2.0
"""Pause between two attempts to open a directory or key that cannot be used. The same process tries again."""
RETRY_BUSY_S: Final = 0.5
"""The same pause for a directory that another store uses: that store may be about to exit."""


async def serve(
    directory: Path, relay: Path, trusted_user: str, *, supervised: bool, environ: Mapping[str, str] = MappingProxyType({}),
    bucket: BucketSettings | None = None, figures: bool = False,
) -> None:  # fmt: skip
    """Run a store until SIGTERM or SIGINT; a second signal ends the process at once.

    `figures`: write figures for the page of metrics to standard output, which the relay reads.
    `environ` names the service manager of a store that is not supervised: it is notified when the directory is open.
    """
    loop = asyncio.get_running_loop()
    stop = stop_on_signals()

    async def connect(factory: Callable[[], Pump[StoreSession]]) -> object:
        return await loop.create_unix_connection(factory, sock=await dial(relay, trusted_user))

    process = StoreProcess(directory, connect, supervised=supervised, bucket=bucket)
    ended = asyncio.Event()
    if supervised:
        # The relay holds the other end of standard input, so we exit when the relay ends for whatever reason.
        loop.add_reader(0, _read_stdin, loop, stop, ended, process.unread)
    if not supervised:
        process.open()
    elif not await _open_when_possible(process, stop):
        return
    running = loop.create_task(process.run(), name="iris-store")
    notify.ready(environ)
    pinging = loop.create_task(watchdog.keep_alive(environ), name="iris-watchdog")
    helpers = [pinging]
    if figures:
        helpers.append(loop.create_task(report(process.store), name="iris-store-figures"))
    try:
        stopped = loop.create_task(stop.wait())
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if supervised and not running.done():
            await process.wait_for_relay(ended)
        if running.done():
            running.result()
    finally:
        notify.stopping(environ)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        try:
            await process.close()
        finally:
            for task in helpers:
                task.cancel()


async def _open_when_possible(process: StoreProcess, stop: asyncio.Event) -> bool:
    """Try to open the directory until that succeeds, and report each new error to the relay.

    Returns False if `stop` was set first.
    """
    said = ""
    while not stop.is_set():
        try:
            process.open()
        except IrisError as err:
            busy = isinstance(err, DirectoryBusy)
            if str(err) != said:
                said = str(err)
                log.error("store.cannot_serve", extra={"fields": {"error": said}})
                report_to_relay(said, final=not busy)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_BUSY_S if busy else RETRY_OPEN_S):
                    await stop.wait()
        else:
            report_to_relay("", final=False)
            return True
    return False


def report_to_relay(why: str, *, final: bool) -> None:
    """Report to the relay that started us why we cannot serve ("": we can).

    `final`: the error will not pass by itself.
    """
    said = sound_json(json.dumps({"cannot": why, "final": final}, separators=(",", ":")))
    with contextlib.suppress(OSError):  # the relay is gone, and so are we in a moment
        os.write(1, said.encode() + b"\n")


def _read_stdin(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, ended: asyncio.Event, unread: Callable[[], None]
) -> None:  # fmt: skip
    said = os.read(0, 64)
    if said == UNREAD:
        unread()
    if not said:
        loop.remove_reader(0)
        ended.set()
        stop.set()


def run(
    directory: Path, relay: Path, trusted_user: str, log_level: str, log_format: str, *, supervised: bool = False,
    bucket: BucketSettings | None = None, figures: bool = False,
) -> None:  # fmt: skip
    """Run a store in this process until a signal, or the end of standard input if supervised, stops it."""
    configure(log_level, log_format)
    raise_descriptor_limit()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        environ = (
            {} if supervised else os.environ
        )  # the relay's service manager is not that of its store
        runner.run(
            serve(
                directory,
                relay,
                trusted_user,
                supervised=supervised,
                environ=environ,
                bucket=bucket,
                figures=figures,
            )
        )
