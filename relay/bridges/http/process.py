"""The bridge as a process: a client with a keyring and a server of HTTP, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import iris
from iris.accepting import connections_that_fit
from iris.signals import on_signal
from iris.web import server
from iris.web.guard import Guard
from iris.web.tokens import Tokens
from relay import notify
from relay.bridges.http.application import OPEN_PATHS, Application
from relay.bridges.http.config import VERBS, HttpConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Where the bridge listens, and whom it admits."""

    listen: str = "127.0.0.1:8081"
    tokens: Path
    allow_remote: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    certificate: str = ""
    key: str = ""


class HttpBridge:
    """The parts of a bridge, joined. `serve` until `stop` is set."""

    def __init__(self, front: Front, config: HttpConfig, client: iris.Client) -> None:
        self.front = front
        self.client = client
        self.application = Application(client, config, connections_that_fit(config.max_connections))
        self.refused: Counter[str] = Counter()
        """Connections that were cut or refused, by reason."""
        self.guard = Guard(
            self.application, Tokens.load(front.tokens, VERBS), hosts=front.hosts, origins=front.origins, open_paths=OPEN_PATHS
        )  # fmt: skip
        self.serving = False
        self._config = config
        self._reloads: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then finish within `drain_s`."""
        fields = {"address": server.address_of(listener), "tokens": len(self.guard.tokens)}
        log.warning("http.reads")
        log.info("http.serving", extra={"fields": fields})
        ending = asyncio.ensure_future(self._end_streams(stop))
        self.serving = True
        notify.ready(os.environ)
        try:
            await server.serve(
                self.guard, listener, stop, max_connections=self.application.room.connections.limit,
                grace_s=self._config.drain_s, body_s=self._config.body_s, refused=self.refused,
                certificate=self.front.certificate, key=self.front.key,
            )  # fmt: skip
        finally:
            self.serving = False
            ending.cancel()
            for task in self._reloads:
                task.cancel()
            await self.application.topics.closed()
        log.info("http.stopped", extra={"fields": {"requests": sum(self.application.asked.values())}})  # fmt: skip

    def reload(self) -> None:
        """Read the tokens and the keyring again. Event streams end, and are admitted again by the new tokens."""
        task = asyncio.get_running_loop().create_task(self._reload(), name="http-reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        try:
            self.guard.tokens = Tokens.load(self.front.tokens, VERBS)
        except iris.IrisError as error:
            log.error("http.tokens_not_reloaded", extra={"fields": {"error": str(error)}})
            return
        self.application.end_streams()
        log.info("http.tokens_reloaded", extra={"fields": {"tokens": len(self.guard.tokens)}})
        try:
            await self.client.reload_keys()
        except iris.IrisError as error:  # the old keys stay
            log.error("bridge.keys_not_reloaded", extra={"fields": {"error": str(error)}})
        else:
            log.info("bridge.keys_reloaded", extra={"fields": {}})

    async def _end_streams(self, stop: asyncio.Event) -> None:
        await stop.wait()
        notify.stopping(os.environ)
        self.application.end_streams()


async def serve(
    front: Front, config: HttpConfig, relay: str | None, stop: asyncio.Event,
    page: Callable[[HttpBridge], AbstractContextManager[None]] | None = None,
) -> None:  # fmt: skip
    """Run a bridge, within `page(bridge)`, until `stop` is set. SIGHUP reads tokens and keys again.

    Raises:
        ConfigError: a setting, the file of tokens, the address or a certificate cannot be used.
        RelayUnavailable: no relay answers.
    """
    own = iris.ClientConfig(relay=relay, label="iris bridge http", message_limit_bytes=config.max_body_bytes)  # fmt: skip
    if bool(front.certificate) != bool(front.key):
        raise iris.ConfigError("--tls-cert, --tls-key: give both or neither")
    if not front.tokens.exists():
        raise iris.ConfigError(
            f"there is no file of tokens, {front.tokens}; make a token with "
            "`iris bridge http-token NAME --allow VERB=NAME`"
        )
    Tokens.load(front.tokens, VERBS)  # before anything is opened
    remote = front.allow_remote or bool(front.certificate)
    with contextlib.closing(server.listen("--listen", front.listen, allow_remote=remote)) as listener:  # fmt: skip
        async with iris.connect(config=own) as client:
            bridge = HttpBridge(front, config, client)
            on_signal(signal.SIGHUP, bridge.reload)
            with page(bridge) if page is not None else contextlib.nullcontext():
                await bridge.serve(listener, stop)
