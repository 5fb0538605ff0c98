"""The relay as a process: what starts, in which order it stops, and the signals.

bind socket -> router -> hub (sessions) -> READY=1 -> ... -> STOPPING=1 -> drain -> close -> release the name
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping

from iris.memory import keep_freed_memory
from relay import notify, socketfile
from relay.config import RelayConfig
from relay.core.router import Limits, Router
from relay.logs import configure
from relay.sessions import SessionHub

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
DRAIN_QUIET_POLLS = 5
"""A relay has drained when nothing ran and nothing waited so many times in a row."""


def make_router(config: RelayConfig, entropy: Callable[[int], bytes] = os.urandom) -> Router:
    """Return the router of a relay with a fresh random id."""
    limits = Limits(
        aliases=config.max_aliases,
        joins=config.max_joins_per_session,
        keys=config.max_keys_per_session,
        pending=config.max_pending_per_session,
        subscriptions=config.max_subscriptions_per_session,
    )
    return Router(
        entropy(16), entropy=entropy, message_limit=config.message_limit_bytes, limits=limits
    )


class Relay:
    """One relay. `start` binds and serves, `stop` drains and closes; both are awaited in one event loop."""

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self.router = make_router(config)
        self.hub = SessionHub(self.router, config)
        self._socket: socketfile.SocketFile | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()
        self.router.status_extra = self._status

    async def start(self) -> None:
        """Serve at the socket. Raises ConfigError or AlreadyRunning; nothing is left behind then."""
        self._socket = socketfile.bind(
            self.config.socket_path, mode=self.config.socket_mode, group=self.config.socket_group
        )
        self.hub.listen(self._socket.listener)
        self._sweeper = asyncio.create_task(self.hub.sweep(), name="iris-sweep")
        fields = {
            "relay": self.router.relay_id.hex(),
            "socket": str(self.config.socket_path),
            "pid": os.getpid(),
        }
        log.info("relay.started", extra={"fields": fields})

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Take no new session, give what runs `drain_s` to finish, close. Idempotent, and safe to cancel: it closes then."""
        bound_s = self.config.drain_timeout_s if drain_s is None else drain_s
        try:
            self.hub.stop_listening()
            if self._socket is not None:
                self._socket.listener.close()
            self.router.drain(int(bound_s * 1000))
            self.hub.settle()
            until_s = time.monotonic() + bound_s
            quiet = 0
            while time.monotonic() < until_s and self.hub.ports and quiet < DRAIN_QUIET_POLLS:
                await asyncio.sleep(DRAIN_POLL_S)
                quiet = quiet + 1 if self.hub.idle else 0
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
                self._sweeper = None
            for port in list(self.hub.ports):
                port.abort("the relay stopped")
            if self._socket is not None:
                self._socket.release()
                self._socket = None
        await asyncio.sleep(0)
        account = self.router.accounts.report(self.router.held_messages)
        log.info(
            "relay.stopped",
            extra={"fields": {"relay": self.router.relay_id.hex(), "account": account}},
        )

    def _status(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "socket": str(self.config.socket_path),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "protocol_errors": self.hub.protocol_errors,
            "turned_away": self.hub.turned_away,
        }


async def serve(config: RelayConfig, environ: Mapping[str, str]) -> None:
    """Run a relay until SIGTERM or SIGINT. A second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    relay = Relay(config)
    await relay.start()
    notify.ready(environ)
    try:
        await stop.wait()
    finally:
        notify.stopping(environ)
        await relay.stop()


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        ValueError, OSError
    ):  # containers may forbid it; the soft limit then stands
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: RelayConfig, environ: Mapping[str, str]) -> None:
    """Run a relay in this process until it is told to stop: logging, memory settings, event loop."""
    configure(config.log_level)
    raise_descriptor_limit()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(config, environ))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, where it exists."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
