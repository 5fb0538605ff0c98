"""One process of `iris run`: it waits for the relay, serves, and says to a supervisor what it has done.

A supervisor (`iris.cli.supervisor`) gives each of its workers one end of a socket pair. The worker writes `LOADED` when
its services are imported, and `READY` when they serve and after each reload of the keys. When the supervisor ends, even
if it is killed, the socket ends too, and the worker drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
from typing import Final

import iris
from iris.cli.exits import Exit
from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.errors import IrisError, RelayUnavailable
from iris.forks import keep_from_child
from iris.logs import logger
from iris.signals import on_signal
from relay import notify

log = logger(__name__)

LOADED: Final = b"loaded\n"
READY: Final = b"ready\n"
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
"""Longest pause between two attempts to find a relay."""


class Line:
    """The worker's end of the socket pair; without a supervisor, the service manager is told instead."""

    def __init__(self, descriptor: int | None) -> None:
        self._socket = None
        if descriptor is not None:
            self._socket = keep_from_child(socket.socket(fileno=descriptor))
            self._socket.setblocking(False)

    @property
    def supervised(self) -> bool:
        """Whether this process is a worker."""
        return self._socket is not None

    def loaded(self) -> None:
        """Say that the services are imported."""
        self._write(LOADED)

    def ready(self) -> None:
        """Say that the services serve, with the keys of now."""
        if self._socket is None:
            notify.ready(os.environ)
        self._write(READY)

    def reloading(self) -> None:
        """Say that the keys are being read again."""
        if self._socket is None:
            notify.reloading(os.environ)

    def stopping(self) -> None:
        """Say that the services stop."""
        if self._socket is None:
            notify.stopping(os.environ)

    async def ended(self) -> None:
        """Return when the supervisor has ended; never without one."""
        if self._socket is None:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.get_running_loop().sock_recv(self._socket, 1)

    def _write(self, text: bytes) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the supervisor has ended, as `ended` notices
                self._socket.send(text)


async def serve(
    services: list[iris.Service],
    relay: str | None,
    line: Line,
    *,
    wait: bool = True,
    label: str = "iris run",
) -> None:
    """Serve until SIGTERM or SIGINT, or until the supervisor ends. SIGHUP reloads the keys.

    The services join in reverse order and leave in order, each when the one before has finished what it accepted. So
    a service can call those after it for as long as one of its handlers runs.

    A second signal exits at once; in a worker it has no effect, because there both the supervisor and the service
    manager may send the first. With `wait`, a relay that is not there is waited for. `label` is what lists of
    programs show.

    Raises:
        IrisError: the relay or the keys cannot be used, or a service was refused.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def on_stop() -> None:
        if stop.is_set() and not line.supervised:
            os._exit(Exit.INTERRUPTED)
        stop.set()

    _handled.update((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(number, on_stop)
    orphaned = loop.create_task(line.ended(), name="iris-supervisor")
    orphaned.add_done_callback(lambda _: stop.set())
    names = [service.name for service in services]
    config = ClientConfig(relay=relay, label=label[:64])
    try:
        client = await _connected(config, stop, wait=wait)
        if client is None:
            return
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.close)

            def on_hangup() -> None:
                task = loop.create_task(_reload(client, line), name="iris-reload")
                reloads.add(task)
                task.add_done_callback(reloads.discard)

            on_signal(signal.SIGHUP, on_hangup)
            for service in reversed(services):  # so the stack leaves them in order
                await stack.enter_async_context(client.serve(service))
            log.info("run.serving", extra={"fields": {"clusters": names, "pid": os.getpid()}})
            line.ready()
            await stop.wait()
            line.stopping()
            log.info("run.stopping", extra={"fields": {"clusters": names}})
            if reloads:
                await asyncio.wait(reloads)
    finally:
        orphaned.cancel()
        _handled.clear()


_handled: Final[set[signal.Signals]] = set()
"""Signals that `serve` handles in this process."""
_before: Final = threading.local()
"""`mask`: the signals that were blocked before this thread began to fork."""


def _hold_signals() -> None:
    """Block the handled signals for the time of a fork."""
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _own_signals() -> None:
    """Give the child of a fork its own signals. Until now it writes those that it gets to the parent's event loop.

    So the end of a pool's worker would stop the parent, and a signal to all processes of a service would be the second
    one for it.
    """
    if _handled:
        signal.set_wakeup_fd(-1)
    for number in _handled:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_own_signals
)


async def _connected(
    config: ClientConfig, stop: asyncio.Event, *, wait: bool
) -> iris.Client | None:
    """Return a connected client, or None if `stop` was set before there was a relay."""
    backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
    while not stop.is_set():
        client = iris.connect(config=config)
        try:
            await client.open()
        except IrisError as error:
            # The keys of a development relay come with it.
            missing = isinstance(error, RelayUnavailable) or isinstance(
                error.__cause__, RelayUnavailable
            )
            if not wait or not missing:
                raise
            if not backoff.failures:
                log.warning("run.waiting_for_relay", extra={"fields": {"error": str(error)}})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.failed()):
                    await stop.wait()
        else:
            return client
    return None


async def _reload(client: iris.Client, line: Line) -> None:
    line.reloading()
    try:
        await client.reload_keys()
    except IrisError as error:  # the old keys remain in use
        log.error("run.keys_not_reloaded", extra={"fields": {"error": str(error)}})
    else:
        log.info("run.keys_reloaded")
    line.ready()
