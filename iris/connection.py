"""A client's connection to its relay: opened and closed once, with one keyring, and what goes through it is counted.

A client uses one event loop in one thread, and has one session with the local relay. When the relay is lost,
the client reconnects by itself. Meanwhile requests in flight end with ConnectionLost and tunnels with
TunnelBroken; publications are held, up to a limit. After the reconnect, services and subscriptions are
registered again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from iris.absences import unwatched
from iris.attachment import FORKED, OPEN, Attachment, Connector
from iris.awaiting import check_callback
from iris.checks import check_number
from iris.config import ClientConfig
from iris.core.interfaces import Loss
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.dialling import arrivals, find_keys, reach, retried
from iris.errors import (
    Closed,
    ConfigError,
)
from iris.keyfiles import has_keys, load_keys
from iris.memory import keep_freed_memory
from iris.one_process import OneProcess
from iris.registry import Registry
from iris.runtime import Runtime
from iris.stats import Stats, snapshot

if TYPE_CHECKING:
    from relay.embedded import EmbeddedRelay


def _check_keyring(keyring: object) -> None:
    """Raise ConfigError unless `keyring` is a Keyring or None."""
    if keyring is not None and not isinstance(keyring, Keyring):
        raise ConfigError(
            f"keyring must be an iris.Keyring, not a {type(keyring).__name__}; without it, keyring.toml in the "
            "configuration directory ($IRIS_CONFIG) is used"
        )


class Connection(OneProcess):
    """The part of a client that opens and closes it, and says what was lost, sent and received."""

    def __init__(
        self, config: ClientConfig, keyring: Keyring | None, *, embedded: bool, connector: Connector | None,
        entropy: Callable[[int], bytes], wait: float,
    ) -> None:  # fmt: skip
        self.config = config
        self._runtime = runtime = Runtime(config)
        self.losses = runtime.losses
        """The latest 1,000 losses, oldest first."""
        self.counters = runtime.counters
        """Messages dropped in this process, by cause, and the number of handlers that failed: name -> count.

        What a session drops by itself is added when it ends; `stats` counts it at once.
        """
        _check_keyring(keyring)
        self._given_keyring = keyring
        check_number("wait", wait, 0)
        self._wait_s = wait
        self._embedded = embedded
        self._entropy = entropy
        self._connector = connector
        self._loop: asyncio.AbstractEventLoop
        self._registry: Registry
        self._attachment: Attachment | None = None
        self._relay: EmbeddedRelay | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        """Closes the client, for all that call `close`."""
        # Looked up once, because every message uses them.
        self._attached = runtime.attached
        self._ready = runtime.ready
        self._encode = runtime.encode
        self._take = runtime.take
        self._has_credit = runtime.has_credit

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; `async with` calls it.

        Raises:
            RelayUnavailable: no relay answered.
            KeyringError: there is no keyring, or it cannot be used.
            Closed: this client was opened before.
        """
        if self._attachment is not None:
            raise Closed("this client was opened before; make another one with iris.connect()")
        keyring = self._given_keyring
        if keyring is None and self._embedded and not has_keys(os.environ):
            keyring = Keyring.single(ClusterKey(self._entropy(32)))
        until_s = time.monotonic() + self._wait_s
        if keyring is None:
            keyring = await retried(lambda: find_keys(self.config, os.environ), until_s)
        if self.config.keep_freed_memory:
            keep_freed_memory()
        self._loop = asyncio.get_running_loop()
        connector, watch = self._connector, unwatched
        if connector is None and self._embedded:
            from relay.embedded import EmbeddedRelay

            self._relay = EmbeddedRelay(entropy=self._entropy)
            connector = self._relay.connect
        elif connector is None:
            connector = partial(reach, self.config, os.environ)
            watch = partial(arrivals, self.config, os.environ)
        self._attachment = self._runtime.attach(keyring, connector, self._entropy, watch)
        self._registry = self._runtime.registry
        try:
            await retried(self._attachment.open, until_s)
        except BaseException:
            self._attachment.close()
            await self._stop_embedded()
            raise

    async def close(self) -> None:
        """Close gracefully: members leave and finish what they accepted, and everything sent is flushed. Idempotent.

        Takes at most `config.drain_timeout_s` for handlers, once more for those that were cancelled after that, and
        `config.connect_timeout_s` for the relay. If `close` is cancelled, the connection ends at once. If a handler of
        this client calls it, it does not wait, because the client is closed after the handler has ended.
        """
        attachment = self._attachment
        if attachment is None or attachment.state is FORKED:
            return  # after a fork the socket, the loop and its tasks are the parent's
        if self._closing is None:
            if attachment.state is not OPEN:
                return
            self._closed = True
            self._closing = self._loop.create_task(self._close(), name="iris-close")
        if self._runtime.runs_in(asyncio.current_task()):
            return
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._closing.cancel()
            await asyncio.wait((self._closing,))
            raise

    async def _close(self) -> None:
        try:
            await self._runtime.close()
        finally:
            await self._stop_embedded()

    async def reload_keys(self, keyring: Keyring | None = None) -> None:
        """Replace the keyring by `keyring`, or read its file again, and move to a new session.

        No accepted message is lost.

        Returns when the old session has finished its work, at the latest after `config.drain_timeout_s`. From then on
        this client no longer uses keys that are not in the new keyring.

        Raises:
            RelayUnavailable: no new session could be made; the client goes on with the old keyring.
            KeyringError: the keyring cannot be used, or lacks a needed key; the client goes on with the old one.
            ConfigError: a handler that this client serves awaits it.
        """
        self._attached()
        if self._runtime.runs_in(asyncio.current_task()):
            raise ConfigError(
                "reload_keys waits for all handlers, so a handler cannot await it; keep a task of it instead: "
                "asyncio.create_task(client.reload_keys())"
            )
        _check_keyring(keyring)
        await self._runtime.reload(keyring or load_keys(os.environ))

    async def _stop_embedded(self) -> None:
        if self._relay is not None:
            await self._relay.close()

    @property
    def on_loss(self) -> Callable[[Loss], object] | None:
        """Function that is called with every loss, or None.

        It must be a plain function. Losses are pushes that failed, gaps in subscriptions and broadcasts, and messages
        dropped in this process.
        """
        return self._runtime.on_loss

    @on_loss.setter
    def on_loss(self, handler: Callable[[Loss], object] | None) -> None:
        check_callback("on_loss", handler)
        self._runtime.on_loss = handler

    @property
    def keyring(self) -> Keyring:
        """Keyring in use."""
        return self._runtime.keyring

    @property
    def message_limit(self) -> int:
        """Largest payload that can be sent, in bytes."""
        return self._runtime.message_limit

    @property
    def sent_messages(self) -> int:
        """Number of data messages sent, over all sessions."""
        return self._runtime.messages("sent")

    @property
    def received_messages(self) -> int:
        """Number of data messages received over all sessions, accepted or not."""
        return self._runtime.messages("received")

    def stats(self) -> Stats:
        """Return what this client has sent, received, dropped and holds now. Raises Closed unless it is open."""
        return snapshot(self._runtime)
