"""The bridge as a process: a session and a socket for each entry, start and stop.

connect all -> open all -> run -> SIGTERM -> leave -> finish -> linger -> close all
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import iris
from iris.signals import on_signal
from relay.bridges.sp.bridge import Bridge
from relay.bridges.sp.bus import BusBridge
from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.pair import PairBridge
from relay.bridges.sp.pipeline import PullBridge, PushBridge
from relay.bridges.sp.requests import RepBridge, ReqBridge
from relay.bridges.sp.surveys import RespondentBridge, SurveyorBridge
from relay.bridges.sp.topics import PubBridge, SubBridge, TopicPushBridge

log = logging.getLogger(__name__)

FINISH_S: Final = 2.0
"""Time for messages in flight to finish."""
LINGER_S: Final = 0.1
"""nng does not linger: within this time it has sent the last messages."""
CLOSE_S: Final = 2.0
"""`nng_close` blocks. If it takes longer than this, the process ends without it."""
DRAIN_S: Final = FINISH_S
RECEIVES_WITHOUT_CONTEXT: Final = ("respondent", "sub", "pull", "bus", "pair")
"""Entries whose sockets hold received messages that belong to no context. Their peers do not send them again."""
MIN_LIMIT_BYTES: Final = 64 << 10
LIMIT_BYTES: Final = 64 << 20

BRIDGES: Final[dict[str, type[Bridge]]] = {
    "rep": RepBridge,
    "req": ReqBridge,
    "respondent": RespondentBridge,
    "surveyor": SurveyorBridge,
    "sub": SubBridge,
    "pub": PubBridge,
    "pull": PullBridge,
    "push": PushBridge,
    "bus": BusBridge,
    "pair": PairBridge,
}


class SpBridge:
    """All entries of one process. `open`, `run` until `stop` is set, `close`."""

    def __init__(self, entries: Sequence[SocketConfig], relay: Path | str | None = None) -> None:
        self.entries = entries
        self.bridges: list[Bridge] = []
        self.stuck = False
        """Set if nng did not close in time: the process must be ended."""
        self._relay = relay
        self._clients: list[iris.Client] = []
        self._running: list[asyncio.Task[None]] = []
        self._reloads: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect every entry to the relay and open its socket.

        Raises:
            RelayUnavailable: no relay answers.
            ConfigError: a key, address, file or setting was refused. Everything opened so far is closed.
        """
        try:
            for entry in self.entries:
                client = iris.connect(config=self._client_config(entry))
                await client.open()
                self._clients.append(client)
                bridge_type = (
                    TopicPushBridge
                    if entry.protocol == "push" and entry.topics
                    else BRIDGES[entry.protocol]
                )
                bridge = bridge_type(entry, client)
                self.bridges.append(bridge)
                bridge.socket.open()
                log.info(
                    "bridge.open",
                    extra={"fields": {"socket": entry.label, "url": bridge.socket.url}},
                )
        except BaseException:
            await self.close()
            raise

    async def run(self, stop: asyncio.Event) -> None:
        """Run all entries until `stop` is set; raises the error of an entry that fails."""
        loop = asyncio.get_running_loop()
        self._running = [
            loop.create_task(bridge.run(), name=bridge.config.label) for bridge in self.bridges
        ]
        readying = loop.create_task(self._ready())
        stopped = loop.create_task(stop.wait())
        try:
            await asyncio.wait((stopped, *self._running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            readying.cancel()
        for task in self._running:
            if task.done():
                task.result()
                raise RuntimeError(f"socket {task.get_name()!r} ended unexpectedly")

    async def close(self) -> None:
        """End all entries within about 2 * FINISH_S + 2 * CLOSE_S, and longer if the relay is frozen."""
        for bridge in self.bridges:
            bridge.stop()
        for reload in self._reloads:
            reload.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                if self._running:
                    await asyncio.gather(*(bridge.finished() for bridge in self.bridges))
                    await asyncio.sleep(LINGER_S)
        # Before the sockets close: a closed descriptor may be reused while a task still waits for it.
        for task in self._running:
            task.cancel()
        for bridge in self.bridges:
            bridge.give_up()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_S)
        for bridge in self.bridges:
            if bridge.config.protocol in RECEIVES_WITHOUT_CONTEXT:
                bridge.socket.count_unread()
            bridge.socket.forget_descriptors()
        await self._close_sockets()
        for task in self._running:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                log.error("bridge.failed", exc_info=error, extra={"fields": {"socket": task.get_name()}})  # fmt: skip
        await asyncio.gather(*(client.close() for client in self._clients))
        self.report()

    def reload_keys(self) -> None:
        """Have every session reload the keyring. A session that cannot keeps the old keys, and the log says why."""
        task = asyncio.get_running_loop().create_task(self._reload_keys(), name="sp reload")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_keys(self) -> None:
        for bridge in list(self.bridges):
            fields = {"socket": bridge.config.label}
            try:
                await bridge.client.reload_keys()
            except iris.IrisError as err:
                log.error("bridge.keys_not_reloaded", extra={"fields": {**fields, "error": str(err)}})  # fmt: skip
            else:
                log.info("bridge.keys_reloaded", extra={"fields": fields})

    def report(self) -> None:
        """Log the counts of every entry."""
        for bridge in self.bridges:
            fields = {**bridge.report(), "peers": len(bridge.socket.peers)}
            if bridge.serving is not None:
                fields["serving"] = bridge.serving
            if bridge.config.protocol in ("pub", "bus") and bridge.config.counts_written:
                fields["behind"] = bridge.socket.behind()
            log.info("bridge.status", extra={"fields": fields})

    async def _ready(self) -> None:
        for bridge in self.bridges:
            await bridge.ready.wait()
        log.info("bridge.ready", extra={"fields": {"sockets": len(self.bridges), "pid": os.getpid()}})  # fmt: skip

    async def _close_sockets(self) -> None:
        """Close the sockets in a daemon thread, which does not delay the exit of the process."""
        loop = asyncio.get_running_loop()
        closed = loop.create_future()

        def work() -> None:
            for bridge in self.bridges:
                bridge.socket.close()
            with contextlib.suppress(RuntimeError):  # it took too long, and the loop is closed
                loop.call_soon_threadsafe(closed.set_result, None)

        threading.Thread(target=work, name="sp-close", daemon=True).start()
        _, late = await asyncio.wait((closed,), timeout=CLOSE_S)
        if late:
            self.stuck = True
            log.warning("bridge.stuck", extra={"fields": {"seconds": CLOSE_S}})

    def _client_config(self, entry: SocketConfig) -> iris.ClientConfig:
        return iris.ClientConfig(
            relay=self._relay,
            label=f"iris bridge sp: {entry.label}"[:64],
            message_limit_bytes=min(max(entry.max_message_bytes, MIN_LIMIT_BYTES), LIMIT_BYTES),
            drain_timeout_s=DRAIN_S,
        )


async def serve(
    entries: Sequence[SocketConfig], relay: Path | str | None, stop: asyncio.Event,
    page: Callable[[SpBridge], AbstractContextManager[None]] | None = None,
) -> None:  # fmt: skip
    """Run the bridge, within `page(bridge)`, until `stop` is set.

    SIGUSR1 logs the counts, SIGHUP reloads the keyring.
    """
    loop = asyncio.get_running_loop()
    bridge = SpBridge(entries, relay)
    on_signal(signal.SIGUSR1, bridge.report)
    on_signal(signal.SIGHUP, bridge.reload_keys)
    opening = loop.create_task(bridge.open())
    stopped = loop.create_task(stop.wait())
    await asyncio.wait((opening, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not opening.done():
        opening.cancel()
        await asyncio.wait((opening,))
    if opening.cancelled():
        return  # stopped before there was a relay
    opening.result()
    try:
        with page(bridge) if page is not None else contextlib.nullcontext():
            await bridge.run(stop)
    finally:
        await bridge.close()
        if bridge.stuck:
            logging.shutdown()
            os._exit(0 if stop.is_set() else 1)
