"""The client: talk to clusters by name. `connect()` gives one; `Client.serve` makes it a member, too.

One event loop, one thread, one session with the local relay. When the relay goes away the client finds it again by itself:
requests in flight end with ConnectionLost, tunnels with TunnelBroken, publications wait within a bound, and services and
subscriptions are registered anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, overload

import msgspec

from iris.attachment import Attachment, Connector, never
from iris.audience import Audience
from iris.config import ClientConfig
from iris.core.bundle import CUT_BYTES, MESSAGE_BYTES, Headers, check_headers
from iris.core.company import Company
from iris.core.inbound import InFlow
from iris.core.message import Message, decode_payload, encode_payload
from iris.core.outbound import OutFlow
from iris.core.parties import Lost, Sink
from iris.core.session import Session
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.deadlines import deadline, milliseconds, seconds_left, within
from iris.dialling import REMOTE, arrivals, reach
from iris.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    DecodeError,
    IrisError,
    MessageTooLarge,
    RelayError,
    RequestError,
    RequestTimeout,
    ran_before,
)
from iris.keyfiles import has_keys, load_keys
from iris.membership import Members, Watcher
from iris.memory import keep_freed_memory
from iris.registry import Registry
from iris.service import Service
from iris.serving import ServiceBinding
from iris.streams import Streams
from iris.subscription import Policy, Subscription
from iris.survey import Survey
from iris.transport import Pump
from iris.tunnel import Tunnel
from iris.wire import frames
from iris.wire.frames import AUDIENCE_MINOR, HERE, Kind
from iris.wire.names import check_address, check_filter, check_group

if TYPE_CHECKING:
    from relay.embedded import EmbeddedRelay

log = logging.getLogger(__name__)

MAX_LOSSES: Final = 1000
WAIT_MIN_S: Final = 0.005
WAIT_MAX_S: Final = 0.1
"""Between two looks of `wait_for_subscribers`."""
LOG_INTERVAL_S: Final = 1.0
Scope = Literal["site", "federation"]
"""Whom a survey or broadcast is for: the members of this site, or of all."""
SESSIONS_TRIED: Final = 3
"""Sessions that an idempotent request is sent on, as one after the other is lost."""

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def connect(
    relay: str | Path | None = None, *, keyring: Keyring | None = None, config: ClientConfig | None = None,
    embedded: bool = False,
) -> Client:  # fmt: skip
    """Return a client, connected when entered: `async with iris.connect() as client`.

    `relay` is the path of the relay's socket, or tls://host:port of a relay on another host, with the access file that
    `iris key access` made; without it $IRIS_RELAY, else the user's own relay, else the host's.
    `keyring` defaults to the configuration directory's, else the one of `iris relay --dev`. `embedded` runs a relay inside
    this process, for a program that talks to itself.
    """
    if config is None:
        remote = isinstance(relay, str) and relay.startswith(REMOTE)
        config = ClientConfig(relay=relay if remote or relay is None else Path(relay))
    elif relay is not None:
        raise ConfigError("give the relay's path as `relay` or in `config`, not both")
    return Client(config, keyring, embedded=embedded)


class Client:
    """A process's session with its relay. Made by `connect`; an async context manager."""

    def __init__(
        self, config: ClientConfig, keyring: Keyring | None = None, *, embedded: bool = False,
        connector: Connector | None = None, entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        self.config = config
        self.losses: deque[Lost] = deque(maxlen=MAX_LOSSES)
        """The latest losses that were told, oldest first."""
        self.on_loss: Callable[[Lost], object] | None = None
        """Called with every loss: pushes that failed, gaps in what was subscribed to or broadcast, what was dropped here unhandled."""
        self.counters: dict[str, int] = {}
        """Messages dropped here, by cause, and handlers that failed."""
        self.company: Company | None = None
        """Clients that deliver their casts to each other themselves; set before it is opened (for bridges)."""
        self.working: set[Subscription] = set()
        """Subscriptions whose coroutine handler has a task."""
        self._given_keyring = keyring
        self._embedded = embedded
        self._entropy = entropy
        self._connector = connector
        self._loop: asyncio.AbstractEventLoop
        self._registry: Registry
        self._attachment: Attachment | None = None
        self._relay: EmbeddedRelay | None = None
        self._closed = False
        self._streams: Streams | None = None
        self._quiet_until_s = 0.0

    # -- life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self.close()

    async def open(self) -> None:
        """Connect. Raises RelayUnavailable if no relay answers, KeyringError if there are no keys."""
        if self._attachment is not None or self._closed:
            raise Closed("this client was opened before; connect anew")
        keyring = self._given_keyring
        if keyring is None and self._embedded and not has_keys(os.environ):
            keyring = Keyring.single(ClusterKey(self._entropy(32)))
        self._registry = Registry(keyring or load_keys(os.environ))
        if self.config.keep_freed_memory:
            keep_freed_memory()
        self._loop = asyncio.get_running_loop()
        self._attachment = Attachment(
            self, self.config, self._connector or self._default_connector(), self._entropy,
            self._default_watch(), self.company,
        )  # fmt: skip
        self._registry.share_out(self._attachment.guard)
        if self._streams is not None:
            self._registry.on_keys = self._streams.keys_changed
        _clients.add(self)
        try:
            await self._attachment.open()
        except BaseException:
            self._closed = True
            self._attachment.close()
            await self._stop_embedded()
            raise

    async def close(self) -> None:
        """Leave gracefully: members stop and finish what they accepted, what was sent is flushed. Idempotent.

        Bounded by `config.drain_timeout_s`, once more for handlers that were cancelled, and `connect_timeout_s` together.
        Cancelled, it closes at once.
        """
        attachment = self._attachment
        if attachment is None or self._closed:
            return
        self._closed = True
        if attachment.state != "open":
            return  # after a fork the socket, the loop and its tasks are the parent's
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                bound_s = 2 * self.config.drain_timeout_s + self.config.connect_timeout_s
                async with asyncio.timeout(bound_s):
                    # Until all of it has ended handlers may use this client.
                    bindings = list(self._registry.services)
                    leaving = [self._leave(b, self._say_leave(b)) for b in bindings]
                    for subscription in list(self.working):
                        subscription.stop()
                    await asyncio.gather(*leaving, *(s.finish() for s in list(self.working)))
                    await asyncio.gather(*(binding.stop() for binding in bindings))
                    if self._streams is not None:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(self.config.drain_timeout_s):
                                await self._streams.finish()
                    attachment.state = "closing"
                    await attachment.say_bye()
        finally:
            attachment.close()
            self._registry.end()
            if self._streams is not None:
                self._streams.end()
            for subscription in list(self.working):
                subscription.give_up()
            await asyncio.gather(*(binding.stop() for binding in self._registry.services))
            await self._stop_embedded()

    async def reload_keys(self, keyring: Keyring | None = None) -> None:
        """Use a changed keyring (`keyring`, else the file's) by moving to a new session. No accepted message is lost.

        Returns when the old session has finished its work, at the latest after `config.drain_timeout_s`. After that, keys that
        left the keyring open, serve and send nothing here.

        Raises RelayUnavailable or KeyringError; the client then continues as before.
        """
        attachment = self._attached()
        await self._registry.reload(keyring or load_keys(os.environ), attachment)

    def _default_connector(self) -> Connector:
        if self._embedded:
            from relay.embedded import EmbeddedRelay

            self._relay = EmbeddedRelay(entropy=self._entropy)
            return self._relay.connect

        return partial(reach, self.config, os.environ)

    def _default_watch(self) -> Callable[[], Callable[[], bool]]:
        if self._embedded or self._connector is not None:
            return lambda: never
        return partial(arrivals, self.config, os.environ)

    async def _stop_embedded(self) -> None:
        if self._relay is not None:
            relay, self._relay = self._relay, None
            await relay.close()

    def _attached(self) -> Attachment:
        attachment = self._attachment
        if attachment is None:
            raise Closed("this client is not connected yet; use `async with`, or await open()")
        attachment.check_open()
        return attachment

    @property
    def streams(self) -> Streams:
        """Durable streams: create, append, read, consume."""
        if self._streams is None:
            self._streams = Streams(self)
            if self._attachment is not None:
                self._registry.on_keys = self._streams.keys_changed
        return self._streams

    async def ready(self, name: str, timeout: float) -> tuple[Pump[Session], Session]:
        """Return what to send with, waiting at most `timeout` seconds for a lost relay (for `streams`)."""
        return await self._ready(name, timeout)

    async def _ready(self, name: str, timeout: float) -> tuple[Pump[Session], Session]:
        return await (self._attachment or self._attached()).ready(name, timeout)

    # -- requests --------------------------------------------------------------------------------------------

    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None,
    ) -> Any:  # fmt: skip
        """Send a request to one member and return its reply.

        The member is one of this site while any of them accepts it, else one of the nearest site that has one. A `cluster` like
        "eu:billing" names a site. `payload` is bytes or str (sent raw) or an object (sent as MessagePack). The reply is bytes if
        it was sent raw, else the object. With `type` it is decoded into that type; `iris.Message` gives the whole message.

        The request runs at most once. With `idempotent` it may run again on another member when one is lost.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RemoteError, RelayError or ConnectionLost; each says `may_have_run`.
            DecodeError: the reply does not fit `type`.
        """
        timeout_ms = milliseconds(timeout)
        until_s = time.monotonic() + timeout
        attempts = SESSIONS_TRIED if idempotent else 1
        ran = False
        try:
            while True:
                attempts -= 1
                attachment = self._attachment
                pump = (
                    attachment.pump
                    if attachment is not None and attachment.state == "open"
                    else None
                )
                if pump is not None:
                    pump.turn()
                    session = pump.session
                else:
                    pump, session = await self._ready(cluster, timeout)
                    timeout_ms = milliseconds(seconds_left(until_s))
                data, packed = self._encode(payload, headers)
                waiter: asyncio.Future[Message] = self._loop.create_future()
                pending = session.asks.send(
                    Kind.REQUEST, cluster, self._registry.cluster_keys(cluster)[0], data, headers, packed,
                    timeout_ms=timeout_ms, waiter=waiter, idempotent=idempotent,
                )  # fmt: skip
                pump.touch()
                try:
                    message = await waiter
                except ConnectionLost as err:
                    ran = ran or err.may_have_run
                    timeout = seconds_left(until_s)
                    timeout_ms = milliseconds(timeout)
                    if not attempts or timeout_ms <= 1 or self._closed:
                        raise
                else:
                    break
                finally:
                    if not waiter.done() or waiter.cancelled():
                        session.asks.forget(pending)
        except RequestError as err:
            if ran:
                ran_before(err)
            raise
        if type is Message:
            return message
        return decode_payload(message.payload, message.packed, type)

    async def push(
        self, cluster: str, payload: object, *, timeout: float = 5.0, headers: Headers | None = None
    ) -> None:
        """Send a message to one member; there is no reply. `timeout` is how long it may wait to be started.

        Returns when it is on the way. A push that fails (no members, all full, member lost, not started in time) is told to `on_loss`
        and kept in `losses`; `flush` waits until the relay has handed over what was sent before.
        """
        until_s = deadline(timeout)
        pump, session = await self._ready(cluster, timeout)
        data, packed = self._encode(payload, headers)
        session.asks.push(
            cluster,
            self._registry.cluster_keys(cluster)[0],
            data,
            headers,
            packed,
            milliseconds(seconds_left(until_s)),
        )
        pump.touch()
        if (attachment := self._attached()).blocked:
            await attachment.wait_writable()

    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, type: Any = None,
        scope: Scope = "federation",
    ) -> Survey:  # fmt: skip
        """Ask all members, of all sites or (`scope="site"`) of this one; iterate over the answers: `async for answer in client.survey(...)`.

        Ends when all have answered or at the timeout; `missing` then names the members that did not.
        """
        address = _scoped(cluster, scope)
        data, packed = self._encode(payload, headers)

        async def start(survey: Survey) -> Callable[[], None]:
            until_s = deadline(timeout)
            pump, session = await self._ready(cluster, timeout)
            pending = session.asks.send(
                Kind.SURVEY, address, self._registry.cluster_keys(address)[0], data, headers, packed,
                timeout_ms=milliseconds(seconds_left(until_s)), survey=survey,
            )  # fmt: skip
            pump.touch()
            return lambda: session.asks.forget(pending)

        return Survey(cluster, start, type)

    async def flush(self, *, timeout: float = 5.0) -> None:
        """Return when the relay has routed everything sent before; failures of pushes have then been told."""
        until_s = deadline(timeout)
        pump, session = await self._ready("relay", timeout)
        waiter: asyncio.Future[Any] = self._loop.create_future()
        session.flush()
        session.ask(frames.Ping, waiter)
        pump.touch()
        await within(waiter, seconds_left(until_s), "the relay did not answer")

    # -- casts -----------------------------------------------------------------------------------------------

    async def broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None, scope: Scope = "federation"
    ) -> None:  # fmt: skip
        """Send to every member that serves broadcasts, in all sites or (`scope="site"`) in this one; waits and fails as `publish`."""
        cluster = _scoped(cluster, scope)
        if not self._cast(Kind.BROADCAST, cluster, payload, headers):
            await self._attached().wait_writable()
            self._cast(Kind.BROADCAST, cluster, payload, headers, force=True)

    def offer_broadcast(self, cluster: str, payload: object) -> bool:
        """Broadcast if that needs no waiting; False: not taken, the write buffer is full."""
        check_address(cluster)
        return self._cast(Kind.BROADCAST, cluster, payload, None)

    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None
    ) -> None: ...
    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, report: bool
    ) -> int | None: ...
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, report: bool = False
    ) -> int | None:
        """Send to every subscriber of a matching filter. Waits only while the write buffer is over its high-water mark.

        Without a relay it is kept, within `config.offline_bytes`, until there is one again.

        With `report` it returns how many subscriptions the relay of this host knows for the topic, once it has routed the message:
        one round trip to the relay; 0 means that nobody heard it. See `audience`.

        Raises:
            ConnectionLost: that bound is reached; this message was not taken. With `report`: its `may_have_run` says whether it was.
            MessageTooLarge: it is over the limit; use a tunnel.
        """
        if not self.offer(topic, payload, headers=headers):
            await self._attached().wait_writable()
            self._cast(Kind.PUBLISH, topic, payload, headers, force=True)
        if not report:
            return None
        try:
            told = await self._audience(topic, self.config.connect_timeout_s, slow=False)
        except ConnectionLost as err:
            text = (
                f"published, or kept until there is a relay; nobody said who hears it: {err.detail}"
            )
            raise ConnectionLost(topic, text, may_have_run=True) from err
        return told.subscribers

    async def audience(self, topic: str, *, timeout: float = 5.0) -> Audience:
        """Return who hears a topic, and who was too slow for it: how many messages relays of this site dropped, and for whom.

        Other relays are waited for half a second at most. Which process it was is told to programs of the relay's own user.
        """
        return await self._audience(topic, timeout, slow=True)

    async def wait_for_subscribers(self, topic: str, count: int, *, timeout: float) -> int:
        """Return how many subscribe to a topic once they are at least `count`: what is published then reaches them.

        Raises RequestTimeout after `timeout` seconds.
        """
        until_s = deadline(timeout)
        pause_s = WAIT_MIN_S
        there = 0
        while True:
            left_s = until_s - time.monotonic()
            if left_s > 0:
                with contextlib.suppress(RequestTimeout, ConnectionLost):
                    there = (await self._audience(topic, left_s, slow=False)).subscribers
                if there >= count:
                    return there
                left_s = until_s - time.monotonic()
            if left_s <= 0:
                text = f"{there} of {count} subscribers are there after {timeout:g} s"
                raise RequestTimeout(topic, text)
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, WAIT_MAX_S)

    async def _audience(self, topic: str, timeout: float, *, slow: bool) -> Audience:
        until_s = deadline(timeout)
        key = self._registry.topic_key(topic)
        pump, session = await self._ready(topic, timeout)
        if session.minor < AUDIENCE_MINOR:
            text = "this relay does not say who subscribes to a topic; upgrade it"
            raise RelayError(topic, text, may_have_run=True)
        session.flush()
        session.out.prove(key)
        waiter: asyncio.Future[frames.Audience] = self._loop.create_future()
        session.ask(lambda number: frames.Topic(number, topic, key.key_id, slow), waiter)
        pump.touch()
        text = "the relay did not say who subscribes to it"
        return Audience.of(await within(waiter, seconds_left(until_s), text))

    def offer(self, topic: str, payload: object, *, headers: Headers | None = None) -> bool:
        """Publish if that needs no waiting; False: not taken, the write buffer is full."""
        attachment = self._attachment
        if (
            attachment is None
            or attachment.blocked
            or headers is not None
            or type(payload) is not bytes
        ):
            return self._cast(Kind.PUBLISH, topic, payload, headers)
        out = attachment.out
        assert out is not None  # there is one while it is not blocked
        flow = out.topics.get(topic) or self._topic(topic)
        payloads = flow.payloads
        size = flow.size + len(payload) + MESSAGE_BYTES
        if payloads and flow.plain and size <= CUT_BYTES:  # nothing to decide: the hot path
            payloads.append(payload)
            flow.size = size
            return True
        if len(payload) > CUT_BYTES:
            self._check_size(payload)
        out.add(flow, payload, None, False)
        attachment.pump.touch()  # type: ignore[union-attr]  # as for `out`
        return True

    def _cast(
        self,
        kind: Kind,
        name: str,
        payload: object,
        headers: Headers | None,
        *,
        force: bool = False,
    ) -> bool:
        """Take a publication or broadcast; False while the write buffer is full."""
        attachment = self._attached()
        data, packed = self._encode(payload, headers)
        if attachment.out is None:
            # The name and its key are checked now: there is nobody to tell when the relay is back.
            (self._registry.topic_key if kind == Kind.PUBLISH else self._registry.cluster_keys)(
                name
            )
            attachment.keep((kind, name, data, headers, packed))
            return True
        if attachment.blocked and not force:
            return False
        self.cast(kind, name, data, headers, packed)
        attachment.touch()
        return True

    def cast(
        self, kind: int, name: str, payload: bytes, headers: Headers | None, packed: bool
    ) -> None:
        """Put a checked publication or broadcast into its bundle (for the attachment)."""
        out = self._attachment.out if self._attachment is not None else None
        assert out is not None
        if kind == Kind.PUBLISH:
            flow = out.topics.get(name) or self._topic(name)
        else:
            flow = out.flow(kind, name, self._registry.cluster_keys(name)[0])
        out.add(flow, payload, headers, packed)

    def _topic(self, topic: str) -> OutFlow:
        """Return the flow of a topic at its first use."""
        out = self._attached().out
        assert out is not None
        flow = out.flow(Kind.PUBLISH, topic, self._registry.topic_key(topic))
        out.topics[topic] = flow
        return flow

    def subscribe(
        self, pattern: str, handler: Callable[[Message], object] | None = None, *, group: str = "",
        policy: Policy = "drop-new", limit_bytes: int = 64 << 20, on_gap: Callable[[Lost], object] | None = None,
        concurrency: int = 1,
    ) -> Subscription:  # fmt: skip
        """Receive what is published to matching topics, with a callback or by `async for`.

        Registered at once when connected; `async with client.subscribe(...)` returns when the relay of this host knows and those that
        it is linked to, for which it waits a second at most: what anybody of this site publishes then, is received. With a `group`, each bundle goes to one of the group's members. See `Subscription` for `policy`, `limit_bytes` and `concurrency`.
        """
        check_filter(pattern)
        if group:
            check_group(group)
        attachment = self._attached()
        subscription = Subscription(
            self, pattern, handler, group, policy, limit_bytes, on_gap, concurrency
        )
        if attachment.pump is not None:
            attachment.pump.turn()
        self._registry.add(subscription, attachment.session, attachment.guard)
        attachment.touch()
        return subscription

    async def subscription_ready(self, subscription: Subscription) -> None:
        """Return when our relay and its peers know of a subscription (for `Subscription`)."""
        await self._subscribed(subscription)
        if not subscription.settled:
            await self._settled()
            subscription.settled = True

    async def _subscribed(self, subscription: Subscription) -> None:
        """Return when our relay knows of a subscription; raises what it refused it with."""
        await self._attached().ready(subscription.filter, self.config.connect_timeout_s)
        await within(
            self._registry.ready(subscription), self.config.connect_timeout_s, "the relay did not answer SUBSCRIBE"
        )  # fmt: skip

    async def _settled(self) -> None:
        """Return when the relays that are linked to ours know what was registered; ours bounds that by a second."""
        attachment = self._attached()
        session = attachment.session
        if session is None or session.minor < AUDIENCE_MINOR:
            return
        waiter: asyncio.Future[Any] = self._loop.create_future()
        session.ask(frames.Settle, waiter)
        attachment.touch()
        with contextlib.suppress(
            ConnectionLost, TimeoutError
        ):  # the next relay tells its peers, too
            async with asyncio.timeout(self.config.connect_timeout_s):
                await waiter

    def unsubscribe(self, subscription: Subscription) -> asyncio.Future[None] | None:
        """End a subscription at once (for `Subscription`); return what to pass to `told`, if anything."""
        session = self._attachment.session if self._attachment is not None else None
        done = self._registry.remove(subscription, session)
        self.touch()
        return done

    async def told(self, done: asyncio.Future[Any] | None) -> None:
        """Return when the relay knows that something has ended here, or has not answered in time: it has, anyway."""
        if done is not None:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await done

    # -- tunnels ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None
    ) -> AsyncIterator[Tunnel]:
        """Open a tunnel to one member: `async with client.tunnel("archive", timeout=1.0) as tunnel`.

        Closed on the way out; broken, for both sides, if the block raises. Raises as `open_tunnel`.
        """
        tunnel = await self.open_tunnel(cluster, timeout=timeout, headers=headers)
        async with tunnel:
            yield tunnel

    async def open_tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None
    ) -> Tunnel:
        """Open a tunnel that the caller closes.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RelayError or ConnectionLost; no handler has run.
        """
        until_s = deadline(timeout)
        pump, session = await self._ready(cluster, timeout)
        if headers:
            check_headers(headers)
        key = self._registry.cluster_keys(cluster)[0]
        left_s = seconds_left(until_s)
        end = session.tunneling.open(cluster, key, headers, milliseconds(left_s))
        changed = asyncio.Event()
        end.wake = changed.set
        pump.touch()
        try:
            async with asyncio.timeout(left_s):
                while not end.open and not end.broken:
                    changed.clear()
                    await changed.wait()
        except BaseException as err:
            session.tunneling.drop(end)
            pump.touch()
            if isinstance(err, TimeoutError):
                raise RequestTimeout(
                    cluster, f"no member accepted the tunnel within {timeout:g} s"
                ) from None
            raise
        if end.error is not None:
            raise end.error
        if end.broken:
            raise ConnectionLost(cluster, end.broken, may_have_run=False)
        return Tunnel(end, self.touch, self.writable)

    # -- serving ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serve(self, service: Service) -> AsyncIterator[ServiceBinding]:
        """Be a member of `service`'s cluster while the block runs; entered when the relay of this host knows, and those linked to it.

        For those it waits a second at most. Callers in other sites find it a little later: `wait_for_members` there returns when they do.

        On the way out the member leaves, and what it accepted is finished.
        """
        attachment = self._attached()
        binding = ServiceBinding(self, service)
        _, session = await self._ready(service.name, self.config.connect_timeout_s)
        self._registry.services.append(binding)
        subscriptions: list[Subscription] = []
        try:
            for pattern, group, handler, concurrency in service.topics:
                callback, on_gap = handler.as_callback(), service.gap_handler
                subscriptions.append(
                    self.subscribe(
                        pattern, callback, group=group, on_gap=on_gap, concurrency=concurrency
                    )
                )
            if service.handlers:
                joined = self._registry.join(session, binding)
                attachment.touch()
                await within(joined, self.config.connect_timeout_s, "the relay did not answer JOIN")
            for subscription in subscriptions:
                await self._subscribed(subscription)
            await self._settled()
            yield binding
        finally:
            # All of it is said before the first await: who is cancelled here leaves as well.
            left = self._say_leave(binding)
            for subscription in subscriptions:
                subscription.stop()
            try:
                closing = [subscription.close() for subscription in subscriptions]
                await asyncio.gather(*closing, self._leave(binding, left))
            finally:
                await binding.stop()
                self._registry.forget(binding)

    def _say_leave(self, binding: ServiceBinding) -> list[asyncio.Future[None]]:
        """Tell the relay that a member takes nothing new; return what is resolved when it knows."""
        session = self._attachment.session if self._attachment is not None else None
        left = self._registry.leave(session, binding)
        self.touch()
        return left

    async def _leave(self, binding: ServiceBinding, left: list[asyncio.Future[None]]) -> None:
        """Take what comes until the relay knows that we left, and finish it."""
        for done in left:
            await self.told(done)
        binding.leaving = True
        # Bounded, because an idle tunnel may stay for ever: stop() ends what is left.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s):
                await binding.finish()

    # -- members ---------------------------------------------------------------------------------------------

    async def members(self, cluster: str, *, timeout: float = 5.0) -> Members:
        """Return who is there now, under any of our keys for the cluster: each member of this site, and how many there are in others."""
        return await self.wait_for_members(cluster, 0, timeout=timeout)

    async def watch_members(self, cluster: str) -> AsyncIterator[Members]:
        """Iterate over who is there: now, and after every change."""
        with self._watching(cluster) as watcher:
            await watcher.first()
            while not watcher.ended:
                yield watcher.members()
                await watcher.changed()

    async def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """Return once at least `count` members are there; raises RequestTimeout after `timeout` seconds."""
        with self._watching(cluster) as watcher:
            try:
                async with asyncio.timeout(timeout):
                    await watcher.first()
                    while len(watcher.members()) < count:
                        await watcher.changed()
                        self._attached()
            except TimeoutError:
                there = len(watcher.members())
                raise RequestTimeout(
                    cluster, f"{there} of {count} members are there after {timeout:g} s"
                ) from None
            return watcher.members()

    @contextlib.contextmanager
    def _watching(self, cluster: str) -> Iterator[Watcher]:
        attachment = self._attached()
        watcher = Watcher(cluster, self._registry.cluster_keys(cluster))
        self._registry.watchers.append(watcher)
        if attachment.session is not None:
            watcher.attach(attachment.session)
            attachment.touch()
        try:
            yield watcher
        finally:
            self._registry.watchers.remove(watcher)
            watcher.detach()
            attachment.touch()

    async def status(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Return the relay's counters and tables."""
        until_s = deadline(timeout)
        pump, session = await self._ready("relay", timeout)
        waiter: asyncio.Future[frames.Report] = self._loop.create_future()
        session.ask(frames.Status, waiter)
        pump.touch()
        report = await within(waiter, seconds_left(until_s), "the relay did not answer")
        try:
            document: dict[str, Any] = msgspec.json.decode(report.document, type=dict[str, Any])
        except msgspec.DecodeError as err:
            raise DecodeError(f"the relay's status: {err}") from err
        return document

    # -- what the session, the attachment and our own objects call -------------------------------------------

    @property
    def keyring(self) -> Keyring:
        """The keys in use."""
        return self._registry.keyring

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key of an id, if we hold it."""
        return self._registry.find_key(key_id)

    def binding(self, flow: InFlow) -> ServiceBinding | None:
        """Return the service that a flow is for."""
        return self._registry.binding(flow)

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions that a flow is for."""
        return self._registry.sinks(flow)

    def register(self, session: Session) -> list[asyncio.Future[None]]:
        """Register everything at a new session."""
        return self._registry.register(session)

    def adopted(self, session: Session) -> None:
        """A new session is in use."""
        self._registry.adopted(session)

    def ended(self, session: Session) -> None:
        """A session is over (for the attachment)."""
        self._registry.ended(session)

    def detached(self, reason: str) -> None:
        """There is no relay."""
        for lost in self._registry.detached(reason):
            self.tell(lost)

    def draining(self) -> None:
        """A relay is stopping: nothing new goes there, what is in flight goes on, and we look for another."""
        log.info("client.relay_draining")
        if self._attachment is not None:
            self._attachment.drain()

    def out_full(self) -> None:
        """Enough is framed to be worth a write before the turn ends."""
        if self._attachment is not None:
            self._attachment.out_full()

    def touch(self) -> None:
        """Something is to be written at the end of this turn."""
        if self._attachment is not None:
            self._attachment.touch()

    def writable(self) -> Awaitable[None] | None:
        """Return None if there is room to write, else what to await."""
        return self._attachment.writable() if self._attachment is not None else None

    def lost(self, lost: Lost) -> None:
        """Messages of ours, or for us, were lost. Subscriptions and services log what they miss; what we sent is logged here."""
        if not lost.source and self.on_loss is None and self._may_log():
            log.warning("client.lost", extra={"fields": {"lost": repr(lost)}})
        self.tell(lost)

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

    @property
    def sent_messages(self) -> int:
        """Data messages sent over all sessions."""
        return self._attachment.messages("sent") if self._attachment is not None else 0

    @property
    def received_messages(self) -> int:
        """Data messages received over all sessions, accepted or not."""
        return self._attachment.messages("received") if self._attachment is not None else 0

    def _may_log(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return False
        self._quiet_until_s = now_s + LOG_INTERVAL_S
        return True

    def _encode(self, payload: object, headers: Headers | None) -> tuple[bytes, bool]:
        data, packed = encode_payload(payload)
        if len(data) > CUT_BYTES:
            self._check_size(data)
        if headers:
            check_headers(headers)
        return data, packed

    @property
    def message_limit(self) -> int:
        """Bytes of the longest payload."""
        session = self._attachment.session if self._attachment is not None else None
        return session.message_limit if session is not None else self.config.message_limit_bytes

    def _check_size(self, data: bytes) -> None:
        limit = self.message_limit
        if len(data) > limit:
            raise MessageTooLarge(
                f"{len(data)} bytes are over the limit of {limit}; send it through a tunnel"
            )

    def forked(self) -> None:
        """In the child of a fork: nothing of this client may be used here."""
        if self._attachment is not None:
            self._attachment.poison()


def _scoped(cluster: str, scope: Scope) -> str:
    """Return a cluster's name with the site that a scope means before it; raises InvalidName or ConfigError."""
    site, name = check_address(cluster)
    if scope == "federation":
        return cluster
    if scope != "site":
        raise ConfigError(f"scope: {scope!r} is neither 'site' nor 'federation'")
    if site not in ("", HERE):
        raise ConfigError(f"scope: {cluster!r} names a site already")
    return f"{HERE}:{name}"


def _after_fork() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_after_fork)
