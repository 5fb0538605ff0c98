"""What the parts of one client share: its hold on a relay, what it has registered there, what it lost, what it counts.

Services, subscriptions and streams are given this, not the client. The attachment and its sessions work for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Protocol

from iris.attachment import Attachment, Connector, Life
from iris.config import ClientConfig
from iris.core.bundle import Headers, check_headers
from iris.core.conversation import UP
from iris.core.credit import WhenFull
from iris.core.inbound import InFlow
from iris.core.interfaces import Lost, Sink
from iris.core.local_senders import LocalSenders
from iris.core.message import encode_payload
from iris.core.outbound import OutFlow
from iris.core.session import Session
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import Closed, ConfigError, ConnectionLost, IrisError, MessageTooLarge
from iris.membership import Watcher
from iris.registry import Registry, Served, Subscriber
from iris.transport import Pump
from iris.wire import frames
from iris.wire.codec import MIN_MESSAGE_LIMIT
from iris.wire.kinds import AUDIENCE_MINOR, Kind

log = logging.getLogger("iris.client")  # programs know it by this name

MAX_LOSSES: Final = 1000
LOG_INTERVAL_S: Final = 1.0
TUNNEL: Final = "; send it through a tunnel"

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Part(Protocol):
    """What goes by the client's keys and ends with it: its streams."""

    def keys_changed(self) -> None: ...
    async def finish(self) -> None: ...
    def end(self) -> None: ...


class Runtime:
    """What stands behind one client. There is no relay, and there are no keys, until `attach`."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.losses: deque[Lost] = deque(maxlen=MAX_LOSSES)
        """The latest losses that were told, oldest first."""
        self.on_loss: Callable[[Lost], object] | None = None
        """Called with every loss."""
        self.counters: dict[str, int] = {}
        """Messages dropped here, by cause, and handlers that failed."""
        self.local_senders: LocalSenders | None = None
        """Clients that deliver their casts to each other themselves; set before `attach` (for bridges)."""
        self.working: set[Subscriber] = set()
        """Subscriptions whose coroutine handler has a task."""
        self.parts: list[Part] = []
        self.attachment: Attachment | None = None
        self.registry: Registry
        self._reloading = asyncio.Lock()
        self._watched: list[list[Lost]] = []
        """What each of those who watch losses has been told."""
        self._quiet_until_s = 0.0

    def attach(
        self, keyring: Keyring, connector: Connector, entropy: Callable[[int], bytes], watch: Callable[[], Callable[[], bool]]
    ) -> Attachment:  # fmt: skip
        """Return the hold on a relay that is to be opened, once."""
        self.registry = Registry(keyring, self._keys_changed)
        self.attachment = Attachment(
            self, self.registry, self.config, connector, entropy, watch, self.local_senders
        )
        self.registry.share_out(self.attachment.guard)
        _runtimes.add(self)
        return self.attachment

    async def close(self) -> None:
        """Leave: see `Client.close`."""
        attachment, registry, drain_s = self.attached(), self.registry, self.config.drain_timeout_s
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                async with asyncio.timeout(2 * drain_s + self.config.connect_timeout_s):
                    # Until all of it has ended handlers may use this client.
                    bindings = list(registry.services)
                    leaving = [binding.leave() for binding in bindings]
                    for subscription in list(self.working):
                        subscription.stop()
                    await asyncio.gather(*leaving, *(s.finish() for s in list(self.working)))
                    await asyncio.gather(*(binding.stop() for binding in bindings))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(drain_s):
                            await asyncio.gather(*(part.finish() for part in self.parts))
                    attachment.state = Life.CLOSING
                    await attachment.say_bye()
        finally:
            attachment.close()
            registry.end()
            for part in self.parts:
                part.end()
            for subscription in list(self.working):
                subscription.give_up()
            await asyncio.gather(*(binding.stop() for binding in registry.services))

    def _keys_changed(self) -> None:
        for part in self.parts:
            part.keys_changed()

    # -- readiness -------------------------------------------------------------------------------------------

    def attached(self) -> Attachment:
        """Return the hold on a relay; raises Closed unless the client is open."""
        attachment = self.attachment
        if attachment is None:
            raise Closed("this client is not connected yet; use `async with`, or await open()")
        attachment.check_open()
        return attachment

    def ready(
        self, name: str, timeout: float
    ) -> Coroutine[Any, Any, tuple[Pump[Session], Session]]:
        """Await what to send with, at most `timeout` seconds for a lost relay; raises Closed or ConnectionLost."""
        return (self.attachment or self.attached()).ready(name, timeout)

    @property
    def session(self) -> Session | None:
        """The session in use."""
        return self.attachment.session if self.attachment is not None else None

    def touch(self) -> None:
        """Something is to be written at the end of this turn."""
        if self.attachment is not None:
            self.attachment.touch()

    def freed(self, name: str, source: bytes) -> None:
        """A subscription that publishers wait for has handled some of what it had of one."""
        session = self.session
        if session is not None and session.state is UP:
            session.casts.windows.freed(name, source)
            self.touch()

    async def told(self, done: asyncio.Future[Any] | None) -> None:
        """Return when the relay knows that something has ended here, or has not answered in time: it has, anyway."""
        if done is not None:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await done

    async def settled(self) -> None:
        """Return when the relays that are linked to ours know what was registered; ours bounds that by a second."""
        attachment = self.attached()
        session = attachment.session
        if session is None or session.minor < AUDIENCE_MINOR:
            return
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.ask(frames.Settle, waiter)
        attachment.touch()
        await self.told(waiter)  # the next relay tells its peers, too

    @contextlib.contextmanager
    def watching(self, cluster: str) -> Iterator[Watcher]:
        """Follow who is in a cluster."""
        attachment = self.attached()
        watcher = Watcher(cluster, self.registry.cluster_keys(cluster))
        self.registry.watchers.append(watcher)
        if attachment.session is not None:
            watcher.attach(attachment.session)
            attachment.touch()
        try:
            yield watcher
        finally:
            self.registry.watchers.remove(watcher)
            watcher.detach()
            attachment.touch()

    async def reload(self, keyring: Keyring) -> None:
        """Move to `keyring` with a new session. While the old one drains, the keys of both are known, then only the new ones.

        Raises as `Attachment.replace`; the keyring is then the one before.
        """
        attachment, registry = self.attached(), self.registry
        async with self._reloading:
            before, session = registry.keyring, attachment.session
            registry.learn(keyring)
            registry.share_out(attachment.guard)
            try:
                await attachment.replace()
            except BaseException:
                # Otherwise it was cancelled after the new session was in use.
                if attachment.session is session:
                    registry.learn(before)
                raise
            finally:
                registry.forget_keys(attachment.session)
                registry.share_out(attachment.guard)

    # -- what is sent ----------------------------------------------------------------------------------------

    def encode(
        self, payload: object, headers: Headers | None, advice: str = TUNNEL
    ) -> tuple[bytes, bool]:
        """Return a payload's bytes, and whether they are MessagePack.

        Raises:
            MessageTooLarge: it is over the limit, which is never less than `MIN_MESSAGE_LIMIT`; `advice` ends the text.
            LocalProtocolError: `headers` are not str to str, or too large.
        """
        data, packed = (payload, False) if type(payload) is bytes else encode_payload(payload)
        if len(data) > MIN_MESSAGE_LIMIT:
            self.check_size(data, advice)
        if headers:
            check_headers(headers)
        return data, packed

    @property
    def keyring(self) -> Keyring:
        """The keys in use."""
        return self.registry.keyring

    @property
    def message_limit(self) -> int:
        """Bytes of the longest payload."""
        session = self.session
        return session.message_limit if session is not None else self.config.message_limit_bytes

    def check_size(self, data: bytes, advice: str = TUNNEL) -> None:
        """Raise MessageTooLarge if a payload is over the limit."""
        limit = self.message_limit
        if len(data) > limit:
            raise MessageTooLarge(f"{len(data)} bytes are over the limit of {limit}{advice}")

    def take(
        self, kind: Kind, name: str, payload: object, headers: Headers | None, *, force: bool = False
    ) -> bool:  # fmt: skip
        """Take a publication or broadcast; False while the write buffer is full."""
        attachment = self.attached()
        data, packed = self.encode(payload, headers)
        if attachment.out is None:
            # The name and its key are checked now: there is nobody to tell when the relay is back.
            (self.registry.topic_key if kind == Kind.PUBLISH else self.registry.cluster_keys)(name)
            attachment.keep((kind, name, data, headers, packed))
            return True
        if attachment.blocked and not force:
            return False
        self.cast(kind, name, data, headers, packed)
        attachment.touch()
        return True

    def has_credit(self, topic: str, when_full: WhenFull) -> bool:
        """Whether the subscribers of a topic that publishers wait for take one publication more; asks them at its first use."""
        if when_full != "wait":
            raise ConfigError(f"when_full: {when_full!r} is neither 'drop' nor 'wait'")
        attachment = self.attached()
        out = attachment.out
        if out is None:  # it is kept, within its bound
            return True
        flow = out.topics.get(topic) or self.topic(topic)
        credit = flow.credit
        if credit is None:
            credit = out.credit(flow)
            attachment.touch()
        return credit.sent + flow.size < credit.limit

    async def wait_for_credit(self, topic: str) -> None:
        """Return when a publication may go: there is room to write and credit, or it has waited for `config.stall_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.config.stall_s
        while True:
            attachment = self.attached()
            await attachment.wait_writable()
            if self.has_credit(topic, "wait"):
                return
            out = attachment.out
            assert out is not None  # else there is credit
            flow = out.topics[topic]
            credit = out.credit(flow)
            left_s = until_s - loop.time()
            if left_s <= 0:
                out.stalled(flow)
                attachment.touch()
                if self._may_log():
                    fields = {"topic": topic, "stall_s": self.config.stall_s}
                    log.warning("client.publish_stalled", extra={"fields": fields})
                return
            waiter: asyncio.Future[None] = loop.create_future()
            credit.waiters.append(waiter)
            try:
                async with asyncio.timeout(left_s):
                    await waiter
            except TimeoutError:
                continue
            finally:
                if waiter in credit.waiters:
                    credit.waiters.remove(waiter)

    def cast(
        self, kind: int, name: str, payload: bytes, headers: Headers | None, packed: bool
    ) -> None:
        """Put a checked publication or broadcast into its bundle (for the attachment)."""
        out = self.attachment.out if self.attachment is not None else None
        assert out is not None
        if kind == Kind.PUBLISH:
            flow = out.topics.get(name) or self.topic(name)
        else:
            flow = out.flow(kind, name, self.registry.cluster_keys(name)[0])
        out.add(flow, payload, headers, packed)

    def topic(self, topic: str) -> OutFlow:
        """Return the flow of a topic at its first use."""
        out = self.attached().out
        assert out is not None
        flow = out.flow(Kind.PUBLISH, topic, self.registry.topic_key(topic))
        out.topics[topic] = flow
        return flow

    # -- what the attachment and its sessions call -----------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key of an id, if we hold it."""
        return self.registry.find_key(key_id)

    def binding(self, flow: InFlow) -> Served | None:
        """Return the service that a flow is for."""
        return self.registry.binding(flow)

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions that a flow is for."""
        return self.registry.sinks(flow)

    def detached(self, reason: str) -> None:
        """There is no relay."""
        for watched in self._watched:
            watched.append(Lost("relay", "relay", b"", None, reason))
        for lost in self.registry.detached(reason):
            self.tell(lost)

    def draining(self) -> None:
        """A relay is stopping: nothing new goes there, what is in flight goes on, and we look for another."""
        log.info("client.relay_draining")
        if self.attachment is not None:
            self.attachment.drain()

    def out_full(self) -> None:
        """Enough is framed to be worth a write before the turn ends."""
        if self.attachment is not None:
            self.attachment.out_full()

    # -- losses and counters ---------------------------------------------------------------------------------

    def lost(self, lost: Lost) -> None:
        """Messages of ours, or for us, were lost. Subscriptions and services log what they miss; what we sent is logged here."""
        if not lost.source:
            for watched in self._watched:
                watched.append(lost)
            if self.on_loss is None and not self._watched and self._may_log():
                log.warning("client.lost", extra={"fields": {"lost": repr(lost)}})
        self.tell(lost)

    @contextlib.contextmanager
    def watching_losses(self) -> Iterator[list[Lost]]:
        """Collect what is lost of what is sent, and losses of the relay."""
        watched: list[Lost] = []
        self._watched.append(watched)
        try:
            yield watched
        finally:
            self._watched = [other for other in self._watched if other is not watched]

    def tell(self, lost: Lost) -> None:
        """Remember a loss that is counted and logged, and tell `on_loss`."""
        self.losses.append(lost)
        if self.on_loss is not None:
            try:
                self.on_loss(lost)
            except (Exception, asyncio.CancelledError):
                self.handler_failed("on_loss")

    def handler_failed(self, what: str) -> None:
        """A user's handler raised: counted always, logged with its traceback once in a while."""
        self.count_dropped("failed handlers", 1)
        if self._may_log():
            log.exception("client.handler_failed", extra={"fields": {"handler": what}})  # noqa: LOG004 - called where it is caught

    def count_dropped(self, cause: str, count: int) -> None:
        """Count messages that were dropped in this process."""
        self.counters[cause] = self.counters.get(cause, 0) + count

    def messages(self, direction: str) -> int:
        """Return the data messages "sent" or "received" over all sessions, accepted or not."""
        return self.attachment.messages(direction) if self.attachment is not None else 0

    def _may_log(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return False
        self._quiet_until_s = now_s + LOG_INTERVAL_S
        return True

    def forked(self) -> None:
        """In the child of a fork: nothing of this client may be used here."""
        if self.attachment is not None:
            self.attachment.poison()


def _after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.forked()


os.register_at_fork(after_in_child=_after_fork)
