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
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from iris import keyfiles, paths
from iris.config import ClientConfig
from iris.core.bundle import Headers, check_headers
from iris.core.guard import Guard
from iris.core.inbound import InFlow
from iris.core.message import Message, decode_payload, encode_payload
from iris.core.outbound import Outbound, OutFlow
from iris.core.session import Lost, Session, Sink
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    IrisError,
    KeyringError,
    LocalProtocolError,
    MessageTooLarge,
    RelayUnavailable,
    RequestError,
    RequestTimeout,
)  # fmt: skip
from iris.membership import Members, Watcher
from iris.service import Service, ServiceBinding
from iris.subscription import Policy, Subscription
from iris.survey import Survey
from iris.transport import Pump, dial
from iris.tunnel import Tunnel
from iris.wire import frames
from iris.wire.codec import ReceiveBuffer
from iris.wire.frames import Kind
from iris.wire.names import check_cluster, check_filter, check_group, check_topic, matches

log = logging.getLogger(__name__)

MAX_LOSSES: Final = 1000
Connector = Callable[[Callable[[], asyncio.BufferedProtocol]], Awaitable[Any]]

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def connect(
    relay: str | Path | None = None, *, keyring: Keyring | None = None, config: ClientConfig | None = None,
    embedded: bool = False,
) -> Client:  # fmt: skip
    """Return a client, connected when entered: `async with iris.connect() as client`.

    `relay` is the path of the relay's socket; without it $IRIS_RELAY, else the user's own relay, else the host's.
    `keyring` defaults to the configuration directory's, else the one of `iris relay --dev`. `embedded` runs a relay inside
    this process, for a program that talks to itself.
    """
    if config is None:
        config = ClientConfig(relay=Path(relay) if relay is not None else None)
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
        self.keyring = keyring
        self.losses: deque[Lost] = deque(maxlen=MAX_LOSSES)
        """The latest losses that were told, oldest first."""
        self.on_loss: Callable[[Lost], object] | None = None
        """Called with every loss: pushes that failed, gaps in what was subscribed to or broadcast."""
        self.counters: dict[str, int] = {}
        """Messages dropped here, by cause, and handlers that failed."""
        self._embedded = embedded
        self._entropy = entropy
        self._connector = connector
        self._guard = Guard(int(config.freshness_s * 1e6))
        self._buffer = ReceiveBuffer()
        self._keys: dict[bytes, ClusterKey] = {}
        self._cluster_keys: dict[str, tuple[ClusterKey, ...]] = {}
        self._session: Session | None = None
        self._out: Outbound | None = None
        self._pump: Pump | None = None
        self._blocked = True
        self._writable: asyncio.Future[None] | None = None
        self._up: asyncio.Event = asyncio.Event()
        self._run_task: asyncio.Task[None] | None = None
        self._bindings: dict[int, ServiceBinding] = {}
        self._services: list[ServiceBinding] = []
        self._subscriptions: dict[tuple[str, str], list[Subscription]] = {}
        self._registered: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._watchers: list[Watcher] = []
        self._offline: deque[tuple[int, str, bytes, Headers | None, bool]] = deque()
        self._offline_bytes = 0
        self._state = "new"
        self._pid = os.getpid()
        self._reload = asyncio.Event()
        self._last_failure = 0.0
        self._sent = 0
        self._received = 0
        self._relay: Any = None

    # -- life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises RelayUnavailable if no relay answers, KeyringError if there are no keys."""
        if self._state != "new":
            raise Closed(f"this client is {self._state}; connect anew")
        if self.keyring is None and self._embedded and not self._configured():
            self.keyring = Keyring.single(ClusterKey(self._entropy(32)))
        self.keyring = self.keyring or load_keys()
        self._learn_keys()
        self._loop = asyncio.get_running_loop()
        if self._connector is None:
            self._connector = await self._default_connector()
        _clients.add(self)
        self._state = "open"
        try:
            pump = await self._attach()
        except BaseException:
            self._state = "closed"
            await self._stop_embedded()
            raise
        self._run_task = self._loop.create_task(self._run(pump), name="iris-client")

    async def close(self) -> None:
        """Leave gracefully: members stop and finish what they accepted, what was sent is flushed. Idempotent.

        Cancelled, it closes at once.
        """
        if self._state != "open":
            return
        self._state = "closing"
        self._up.set()
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                async with asyncio.timeout(self.config.connect_timeout_s):
                    for binding in list(self._services):
                        await self._leave(binding)
                    await self._bye()
        finally:
            self._state = "closed"
            if self._run_task is not None:
                self._run_task.cancel()
            if self._pump is not None:
                self._pump.abort("the client was closed")
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    subscription.end()
            for watcher in self._watchers:
                watcher.end()
            self._wake_writers()
            await asyncio.gather(*(binding.stop() for binding in self._services))
            await self._stop_embedded()

    async def _bye(self) -> None:
        """Flush, and wait until the relay has routed all of it."""
        pump, session = self._pump, self._session
        if pump is None or session is None:
            return
        pump.turn()
        session.flush()
        session.out.control(frames.Bye("client closed"))
        pump.flush()
        await pump.closed.wait()

    async def reload_keys(self, keyring: Keyring | None = None) -> None:
        """Take up a changed keyring (`keyring`, else the file's) by a graceful reconnect; nothing accepted is lost."""
        self.keyring = keyring or load_keys()
        self._learn_keys()
        await self._reconnect()

    async def _reconnect(self) -> None:
        """Attach a second session, move everything to it, and only then leave the first."""
        self._check_open()
        old = self._pump
        await self._up.wait()
        self._reload.set()
        while self._pump is old and self._state == "open":  # noqa: ASYNC110 - bounded by the connect timeout
            await asyncio.sleep(0.005)

    async def _run(self, pump: Pump) -> None:
        """Keep a session up until the client is closed."""
        while self._state in ("open", "closing"):
            lost = asyncio.ensure_future(pump.closed.wait())
            reload = asyncio.ensure_future(self._reload.wait())
            try:
                await asyncio.wait((lost, reload), return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                reload.cancel()
            if self._state != "open":
                return
            if not pump.closed.is_set():
                self._reload.clear()
                pump = await self._replace(pump)
                continue
            pause_s = self.config.reconnect_min_s
            while self._state == "open":
                try:
                    pump = await self._attach()
                    break
                except IrisError as err:
                    log.debug("client.reconnect", extra={"fields": {"error": str(err)}})
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self.config.reconnect_max_s)

    async def _replace(self, old: Pump) -> Pump:
        """Make before break: the old session finishes what it accepted after the new one serves."""
        old_session = old.session
        members = dict(self._bindings)
        try:
            pump = await self._attach()
        except IrisError as err:
            log.warning("client.reload_failed", extra={"fields": {"error": str(err)}})
            return old
        old.turn()
        leaves = []
        for member in members:
            waiter: asyncio.Future[Any] = self._loop.create_future()
            old_session.ask(lambda number, m=member: frames.Leave(number, m), waiter)  # type: ignore[misc]  # a bound default
            leaves.append(waiter)
        old.flush()
        with contextlib.suppress(IrisError, TimeoutError):
            async with asyncio.timeout(self.config.connect_timeout_s):
                await asyncio.gather(*leaves)
                while old_session.busy and not old.closed.is_set():  # noqa: ASYNC110 - seldom and short
                    await asyncio.sleep(0.005)
                old.turn()
                old_session.flush()
                old_session.out.control(frames.Bye("keys reloaded"))
                old.flush()
                await old.closed.wait()
        old.abort("replaced")
        for member in members:
            self._bindings.pop(member, None)
        return pump

    async def _attach(self) -> Pump:
        """Return a pump whose session is up, with every service and subscription registered."""
        assert self._connector is not None
        session = Session(
            self, self._guard, self._entropy,
            label=self.config.label, pid=self._pid, message_limit=self.config.message_limit_bytes,
        )  # fmt: skip
        pump = Pump(self, session, self._buffer, self.config.write_high_bytes)
        welcomed = session.on_welcome = self._loop.create_future()
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                await self._connector(lambda: pump)
                closed = asyncio.ensure_future(pump.closed.wait())
                try:
                    await asyncio.wait((closed, welcomed), return_when=asyncio.FIRST_COMPLETED)
                    if not welcomed.done():
                        raise RelayUnavailable(pump.reason or "the relay closed the connection")
                    await self._register_all(pump, session)
                finally:
                    closed.cancel()
        except TimeoutError:
            pump.abort("no answer in time")
            raise RelayUnavailable(
                f"the relay did not answer within {self.config.connect_timeout_s:g} s"
            ) from None
        except BaseException:
            pump.abort("could not be set up")
            raise
        self._adopt(pump, session)
        return pump

    def _adopt(self, pump: Pump, session: Session) -> None:
        """From now on this is the session that everything goes through."""
        old = self._session
        if old is not None and old.state == "up":
            old.flush()
        self._pump, self._session, self._out = pump, session, session.out
        self._blocked = False
        for watcher in self._watchers:
            watcher.attach(session)
        offline, self._offline = self._offline, deque()
        self._offline_bytes = 0
        pump.turn()
        for kind, name, payload, headers, packed in offline:
            session.out.add(self._cast_flow(kind, name), payload, headers, packed)
        pump.touch()
        self._up.set()
        self._wake_writers()

    async def _register_all(self, pump: Pump, session: Session) -> None:
        waiting: list[asyncio.Future[Any]] = []
        pump.turn()
        for binding in self._services:
            if not binding.leaving:
                waiting.append(self._join(session, binding))
        for place in list(self._subscriptions):
            waiting.append(self._subscribe(session, place))
        pump.flush()
        if waiting:
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    def _configured(self) -> bool:
        return (keyfiles.config_directory(os.environ) / keyfiles.KEYRING_FILE).exists()

    async def _default_connector(self) -> Connector:
        if self._embedded:
            from relay.embedded import EmbeddedRelay

            self._relay = EmbeddedRelay(entropy=self._entropy)
            connector: Connector = self._relay.connect
            return connector

        async def connector_by_path(factory: Callable[[], asyncio.BufferedProtocol]) -> None:
            path = self.config.relay or find_relay()
            connection = await dial(path, self.config.relay_user)
            try:
                await self._loop.create_unix_connection(factory, sock=connection)
            except BaseException:
                connection.close()
                raise

        return connector_by_path

    async def _stop_embedded(self) -> None:
        if self._relay is not None:
            relay, self._relay = self._relay, None
            await relay.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise Closed(
                f"this client is {'not connected yet' if self._state == 'new' else self._state}"
            )

    async def _ready(self, name: str, timeout: float) -> tuple[Pump, Session]:
        """Return the session, waiting for a lost relay to come back within `timeout` seconds."""
        session, pump = self._session, self._pump
        if session is None or pump is None:
            self._check_open()
            try:
                async with asyncio.timeout(timeout):
                    await self._up.wait()
            except TimeoutError:
                raise ConnectionLost(
                    name, f"no relay within {timeout:g} s", may_have_run=False
                ) from None
            self._check_open()
            session, pump = self._session, self._pump
            if session is None or pump is None:
                raise ConnectionLost(name, "the relay went away again", may_have_run=False)
        pump.turn()
        return pump, session

    # -- requests --------------------------------------------------------------------------------------------

    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None,
    ) -> Any:  # fmt: skip
        """Send a request to one member and return its reply.

        `payload` is bytes or str (sent raw) or an object (sent as MessagePack). The reply is bytes if it was sent raw, else
        the object; with `type` it is decoded into that, `iris.Message` gives the whole message. At most once, unless
        `idempotent`, which lets it run again elsewhere when a member is lost.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RemoteError or ConnectionLost; each says `may_have_run`.
            DecodeError: the reply does not fit `type`.
        """
        started = time.monotonic()
        pump, session = await self._ready(cluster, timeout)
        data, packed = self._encode(payload, headers)
        waiter: asyncio.Future[Message] = self._loop.create_future()
        timeout_ms = _milliseconds(
            timeout if self._up.is_set() else timeout - (time.monotonic() - started)
        )
        pending = session.send_to_one(
            Kind.REQUEST, cluster, self._key(cluster), data, headers, packed,
            timeout_ms=timeout_ms, waiter=waiter, idempotent=idempotent,
        )  # fmt: skip
        pump.touch()
        try:
            message = await waiter
        except asyncio.CancelledError:
            session.forget(pending)
            raise
        except ConnectionLost:
            left_s = timeout - (time.monotonic() - started)
            if not idempotent or left_s <= 0 or self._state != "open":
                raise
            return await self.request(
                cluster, payload, timeout=left_s, headers=headers, idempotent=True, type=type
            )
        if type is Message:
            return message
        return decode_payload(message.payload, message.packed, type)

    async def push(
        self, cluster: str, payload: object, *, timeout: float = 5.0, headers: Headers | None = None
    ) -> None:
        """Send a message to one member; there is no reply. `timeout` is how long it may wait to be started.

        Returns when it is on the way. A push that fails (no members, all full, member lost) is told to `on_loss` and
        kept in `losses`; `flush` waits until the relay has handed over what was sent before.
        """
        pump, session = await self._ready(cluster, timeout)
        data, packed = self._encode(payload, headers)
        session.push(cluster, self._key(cluster), data, headers, packed, _milliseconds(timeout))
        pump.touch()
        if self._blocked:
            await self._wait_writable()

    def survey(
        self,
        cluster: str,
        payload: object,
        *,
        timeout: float,
        headers: Headers | None = None,
        type: Any = None,
    ) -> Survey:
        """Ask all members; iterate over the answers: `async for answer in client.survey(...)`.

        Ends when all have answered or at the timeout; `missing` then names the members that did not.
        """
        check_cluster(cluster)
        data, packed = self._encode(payload, headers)

        async def start(survey: Survey) -> Callable[[], None]:
            pump, session = await self._ready(cluster, timeout)
            pending = session.send_to_one(
                Kind.SURVEY, cluster, self._key(cluster), data, headers, packed,
                timeout_ms=_milliseconds(timeout), survey=survey,
            )  # fmt: skip
            pump.touch()
            return lambda: session.forget(pending)

        return Survey(cluster, start, type)

    async def flush(self, *, timeout: float = 5.0) -> None:
        """Return when the relay has routed everything sent before; failures of pushes have then been told."""
        pump, session = await self._ready("relay", timeout)
        waiter: asyncio.Future[Any] = self._loop.create_future()
        session.flush()
        session.ask(frames.Ping, waiter)
        pump.touch()
        await self._within(waiter, timeout, "the relay did not answer")

    # -- casts -----------------------------------------------------------------------------------------------

    async def broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None
    ) -> None:
        """Send to every member that serves broadcasts. Waits only while the write buffer is over its high-water mark."""
        if not self._cast(Kind.BROADCAST, cluster, payload, headers):
            await self._wait_writable()
            self._cast(Kind.BROADCAST, cluster, payload, headers, force=True)

    async def publish(self, topic: str, payload: object, *, headers: Headers | None = None) -> None:
        """Send to every subscriber of a matching filter. Waits only while the write buffer is over its high-water mark.

        Without a relay it is kept, within `config.offline_bytes`, until there is one again.

        Raises:
            ConnectionLost: that bound is reached; this message was not taken.
            MessageTooLarge: it is over the limit; use a tunnel.
        """
        if not self.offer(topic, payload, headers=headers):
            await self._wait_writable()
            self._cast(Kind.PUBLISH, topic, payload, headers, force=True)

    def offer(self, topic: str, payload: object, *, headers: Headers | None = None) -> bool:
        """Publish if that needs no waiting; False: not taken, the write buffer is full or there is no relay."""
        if self._blocked or headers is not None:
            return self._cast(Kind.PUBLISH, topic, payload, headers)
        out: Outbound = self._out  # type: ignore[assignment]  # there is one while we are not blocked
        flow = out.topics.get(topic)
        if flow is None:
            flow = self._topic(topic)
        if type(payload) is bytes and len(payload) <= 65_536:
            out.add(flow, payload, None, False)
        else:
            data, packed = self._encode(payload, None)
            out.add(flow, data, None, packed)
        pump = self._pump
        if not pump._scheduled:  # type: ignore[union-attr]
            pump.touch()  # type: ignore[union-attr]
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
        if self._pid != os.getpid():
            raise Closed("this client belongs to the parent process; connect anew after a fork")
        data, packed = self._encode(payload, headers)
        session = self._session
        if session is None:
            self._check_open()
            (check_topic if kind == Kind.PUBLISH else check_cluster)(name)
            size = len(data) + 64
            if self._offline_bytes + size > self.config.offline_bytes:
                raise ConnectionLost(
                    name,
                    f"no relay, and {self._offline_bytes} bytes wait for one already",
                    may_have_run=False,
                )
            self._offline.append((kind, name, data, headers, packed))
            self._offline_bytes += size
            return True
        if self._blocked and not force:
            return False
        session.out.add(self._cast_flow(kind, name), data, headers, packed)
        self.touch()
        return True

    def _cast_flow(self, kind: int, name: str) -> OutFlow:
        if kind == Kind.PUBLISH:
            return self._topic(name)
        assert self._out is not None
        return self._out.flow(kind, name, self._key(name))

    def _topic(self, topic: str) -> OutFlow:
        """Return the flow of a topic; checks the name at first use."""
        assert self._out is not None
        assert self.keyring is not None
        flow = self._out.topics.get(topic)
        if flow is None:
            check_topic(topic)
            keys = self.keyring.for_topic(topic)
            if not keys:
                raise KeyringError(
                    f"no key for topic {topic!r}; add one with `iris key add topic:{topic.split('.')[0]}`"
                )
            flow = self._out.topics[topic] = self._out.flow(Kind.PUBLISH, topic, keys[0])
        return flow

    def subscribe(
        self, pattern: str, handler: Callable[[Message], object] | None = None, *, group: str = "",
        policy: Policy = "drop-new", limit_bytes: int = 64 << 20, on_gap: Callable[[Lost], object] | None = None,
    ) -> Subscription:  # fmt: skip
        """Receive what is published to matching topics, with a callback or by `async for`.

        Registered at once when connected; `async with client.subscribe(...)` returns when the relay knows. With a `group`,
        each bundle goes to one of the group's members. See `Subscription` for `policy` and `limit_bytes`.
        """
        check_filter(pattern)
        if group:
            check_group(group)
        self._check_open()
        subscription = Subscription(self, pattern, handler, group, policy, limit_bytes, on_gap)
        place = (pattern, group)
        known = self._subscriptions.setdefault(place, [])
        known.append(subscription)
        session, pump = self._session, self._pump
        if session is not None and pump is not None:
            session.subscriptions_version += 1
            if len(known) == 1:
                pump.turn()
                self._subscribe(session, place)
                pump.touch()
        return subscription

    def _subscribe(self, session: Session, place: tuple[str, str]) -> asyncio.Future[None]:
        """Register a filter at the relay; every subscription of it waits for the same answer."""
        assert self.keyring is not None
        pattern, group = place
        done: asyncio.Future[None] = self._loop.create_future()
        self._registered[place] = done
        keys = self.keyring.for_filter(pattern)
        if not keys:
            done.set_exception(KeyringError(f"no key for any topic of {pattern!r}"))
        else:
            for key in keys:
                session.out.prove(key)
            if not group:
                self._guard.resume_topics(lambda topic: self._is_new(pattern, topic))
            ids = [key.key_id for key in keys]
            session.ask(
                lambda number: frames.Subscribe(number, pattern, ids, group),
                _AckWaiter(done, pattern),
            )
        done.add_done_callback(_retrieve)
        return done

    def _is_new(self, pattern: str, topic: str) -> bool:
        """Whether a topic matches `pattern` and no other plain subscription: what was missed of it before is no gap."""
        return matches(pattern, topic) and not any(
            matches(other, topic)
            for other, group in self._subscriptions
            if not group and other != pattern
        )

    async def _subscription_ready(self, subscription: Subscription) -> None:
        await self._up.wait()
        self._check_open()
        done = self._registered.get((subscription.filter, subscription.group))
        if done is not None:
            try:
                await asyncio.shield(done)
            except ConnectionLost:
                await self._up.wait()  # the reconnect has registered it

    async def _unsubscribe(self, subscription: Subscription) -> None:
        place = (subscription.filter, subscription.group)
        known = self._subscriptions.get(place, [])
        if subscription not in known:
            return
        known.remove(subscription)
        session, pump = self._session, self._pump
        if session is not None:
            session.subscriptions_version += 1
        if known:
            return
        del self._subscriptions[place]
        self._registered.pop(place, None)
        if session is not None and pump is not None:
            waiter: asyncio.Future[Any] = self._loop.create_future()
            waiter.add_done_callback(_retrieve)
            session.ask(lambda number: frames.Unsubscribe(number, place[0], place[1]), waiter)
            pump.touch()
            with contextlib.suppress(ConnectionLost):  # gone with the session
                await waiter

    # -- tunnels ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None
    ) -> AsyncIterator[Tunnel]:
        """Open a tunnel to one member: `async with client.tunnel("archive", timeout=1.0) as tunnel`.

        Closed on the way out; broken, for both sides, if the block raises.

        Raises:
            RequestTimeout, NoMembers, Overloaded: it could not be opened.
        """
        tunnel = await self.open_tunnel(cluster, timeout=timeout, headers=headers)
        async with tunnel:
            yield tunnel

    async def open_tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None
    ) -> Tunnel:
        """Open a tunnel that the caller closes. Raises as `tunnel`."""
        pump, session = await self._ready(cluster, timeout)
        if headers:
            check_headers(headers)
        end = session.open_tunnel(cluster, self._key(cluster), headers, _milliseconds(timeout))
        changed = asyncio.Event()
        end.wake = changed.set
        pump.touch()
        try:
            async with asyncio.timeout(timeout):
                while not end.open and not end.broken:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            session.drop_tunnel(end)
            pump.touch()
            raise RequestTimeout(
                cluster, f"no member accepted the tunnel within {timeout:g} s"
            ) from None
        except BaseException:
            session.drop_tunnel(end)
            pump.touch()
            raise
        if end.error is not None:
            raise end.error
        if end.broken:
            raise ConnectionLost(cluster, end.broken, may_have_run=False)
        return Tunnel(end, self.touch, self.writable)

    # -- serving ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serve(self, service: Service) -> AsyncIterator[ServiceBinding]:
        """Be a member of `service`'s cluster while the block runs; the relay knows when it is entered.

        On the way out the member leaves, and what it accepted is finished.
        """
        self._check_open()
        binding = ServiceBinding(self, service)
        self._services.append(binding)
        subscriptions = [
            self.subscribe(pattern, _converting(handler), group=group, on_gap=service.gap_handler)
            for pattern, group, handler in service.topics
        ]
        try:
            if service.handlers:
                pump, session = await self._ready(service.name, self.config.connect_timeout_s)
                joined = self._join(session, binding)
                pump.touch()
                await self._within(
                    joined, self.config.connect_timeout_s, "the relay did not answer JOIN"
                )
            for subscription in subscriptions:
                await subscription.ready()
            yield binding
        finally:
            try:
                for subscription in subscriptions:
                    await subscription.close()
                await self._leave(binding)
            finally:
                await binding.stop()
                if binding in self._services:
                    self._services.remove(binding)
                self._bindings = {m: b for m, b in self._bindings.items() if b is not binding}

    def _join(self, session: Session, binding: ServiceBinding) -> asyncio.Future[None]:
        assert self.keyring is not None
        service = binding.service
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(_retrieve)
        keys = self.keyring.for_cluster(service.name)
        if not service.handlers:
            done.set_result(None)
        elif not keys:
            done.set_exception(_no_key(service.name))
        else:
            for key in keys:
                session.out.prove(key)
            ids = [key.key_id for key in keys]

            def joined(ack: frames.Ack) -> None:
                # At once: the relay may hand over work right behind its answer.
                binding.member = ack.member
                binding.member_id = f"{session.relay_id.hex()}.{ack.member}"
                self._bindings[ack.member] = binding

            session.ask(
                lambda number: frames.Join(number, service.name, ids, service.kinds),
                _AckWaiter(done, service.name, joined),
            )
        return done

    async def _leave(self, binding: ServiceBinding) -> None:
        """Take nothing new, finish what was accepted."""
        session, pump = self._session, self._pump
        if not binding.leaving and binding.member and session is not None and pump is not None:
            waiter: asyncio.Future[Any] = self._loop.create_future()
            waiter.add_done_callback(_retrieve)
            pump.turn()
            member = binding.member
            session.ask(lambda number: frames.Leave(number, member), waiter)
            pump.touch()
            with contextlib.suppress(ConnectionLost):
                await waiter
        binding.leaving = True
        await binding.finish()

    # -- members ---------------------------------------------------------------------------------------------

    async def members(self, cluster: str, *, timeout: float = 5.0) -> Members:
        """Return who is there now, under any of our keys for the cluster."""
        watcher = self._watcher(cluster, stay=False)
        try:
            await self._ready(cluster, timeout)
            async with asyncio.timeout(timeout):
                await watcher.first()
            return watcher.members()
        except TimeoutError:
            raise RequestTimeout(
                cluster, f"the relay did not say who is there within {timeout:g} s"
            ) from None
        finally:
            self._unwatch(watcher)

    async def watch_members(self, cluster: str) -> AsyncIterator[Members]:
        """Iterate over who is there: now, and after every change."""
        watcher = self._watcher(cluster, stay=True)
        try:
            await watcher.first()
            while not watcher.ended:
                yield watcher.members()
                await watcher.changed()
        finally:
            self._unwatch(watcher)

    async def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """Return once at least `count` members are there; raises RequestTimeout after `timeout` seconds."""
        watcher = self._watcher(cluster, stay=True)
        try:
            async with asyncio.timeout(timeout):
                await watcher.first()
                while len(watcher.members()) < count:
                    await watcher.changed()
                    self._check_open()
            return watcher.members()
        except TimeoutError:
            there = len(watcher.members())
            raise RequestTimeout(
                cluster, f"{there} of {count} members are there after {timeout:g} s"
            ) from None
        finally:
            self._unwatch(watcher)

    def _watcher(self, cluster: str, *, stay: bool) -> Watcher:
        self._check_open()
        check_cluster(cluster)
        assert self.keyring is not None
        keys = self.keyring.for_cluster(cluster)
        if not keys:
            raise _no_key(cluster)
        watcher = Watcher(cluster, keys, stay=stay)
        self._watchers.append(watcher)
        if self._session is not None and self._pump is not None:
            self._pump.turn()
            watcher.attach(self._session)
            self._pump.touch()
        return watcher

    def _unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            watcher.detach()
            self.touch()

    async def status(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Return the relay's counters and tables."""
        pump, session = await self._ready("relay", timeout)
        waiter: asyncio.Future[frames.Report] = self._loop.create_future()
        session.ask(frames.Status, waiter)
        pump.touch()
        report = await self._within(waiter, timeout, "the relay did not answer")
        document: dict[str, Any] = msgspec.json.decode(report.document)
        return document

    # -- what the session and the pump call ------------------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key of an id, if it is in the keyring."""
        return self._keys.get(key_id)

    def binding(self, member: int) -> ServiceBinding | None:
        """Return the service that a member number of ours stands for."""
        return self._bindings.get(member)

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions that a flow is for."""
        found: list[Sink] = []
        for (pattern, group), subscriptions in self._subscriptions.items():
            if (group in flow.groups if group else flow.plain) and matches(pattern, flow.name):
                found += subscriptions
        return found

    def draining(self) -> None:
        """The relay is stopping. What is in flight goes on; when the connection ends we look for a relay again."""
        log.info("client.relay_draining")

    def lost(self, lost: Lost) -> None:
        """Messages were lost: counted, remembered, told."""
        self.losses.append(lost)
        if self.on_loss is not None:
            self.on_loss(lost)
        else:
            now = time.monotonic()
            if now - self._last_failure > 1.0:
                self._last_failure = now
                log.warning("client.lost", extra={"fields": {"lost": repr(lost)}})

    def out_full(self) -> None:
        """Enough is framed to be worth a write before the turn ends."""
        if self._pump is not None:
            self._pump.write()

    def writing_paused(self, pump: Pump) -> None:
        """The write buffer is over its high-water mark."""
        if pump is self._pump:
            self._blocked = True

    def writing_resumed(self, pump: Pump) -> None:
        """There is room again."""
        if pump is self._pump:
            self._blocked = False
            self._wake_writers()

    def disconnected(self, pump: Pump, reason: str) -> None:
        """A connection ended. What no bundle took yet is kept for the next."""
        session = pump.session
        if session.state == "ended" and hasattr(session, "out"):
            self._sent += session.out.sent_messages
            self._received += session.received_messages
            for cause, count in session.dropped.items():
                self.count_dropped(cause, count)
        if pump is not self._pump:
            return
        for item in session.out.unsent():
            size = len(item[2]) + 64
            if self._offline_bytes + size > self.config.offline_bytes:
                self.lost(
                    Lost(
                        "publish",
                        item[1],
                        b"",
                        1,
                        "no relay, and the buffer for its return is full",
                    )
                )
                continue
            self._offline.append(item)
            self._offline_bytes += size
        self._session = self._out = self._pump = None
        self._blocked = True
        self._up.clear()
        self._bindings.clear()
        if self._state == "open":
            log.info("client.disconnected", extra={"fields": {"reason": reason}})
            for (pattern, _), subscriptions in self._subscriptions.items():
                for subscription in subscriptions:
                    subscription.gap(Lost("publish", pattern, b"", None, reason))
            for binding in self._services:
                binding.gap(Lost("broadcast", binding.service.name, b"", None, reason))
        else:
            self._up.set()
        self._wake_writers()

    def touch(self) -> None:
        """Something is to be written at the end of this turn."""
        if self._pump is not None:
            self._pump.touch()

    def writable(self) -> Awaitable[None] | None:
        """Return None if there is room to write, else what to await."""
        return self._wait_writable() if self._blocked and self._session is not None else None

    def monotonic_us(self) -> int:
        """Return µs of CLOCK_MONOTONIC."""
        return time.monotonic_ns() // 1000

    def count_dropped(self, cause: str, count: int) -> None:
        """Count messages that were dropped in this process."""
        self.counters[cause] = self.counters.get(cause, 0) + count

    def handler_failed(self, what: str) -> None:
        """A user's handler raised: counted, and logged with its traceback at most once a second."""
        self.count_dropped("failed handlers", 1)
        now = time.monotonic()
        if now - self._last_failure > 1.0:
            self._last_failure = now
            log.error("client.handler_failed", exc_info=True, extra={"fields": {"handler": what}})

    @property
    def sent_messages(self) -> int:
        """Data messages sent over all connections."""
        return self._sent + (self._out.sent_messages if self._out is not None else 0)

    @property
    def received_messages(self) -> int:
        """Data messages received over all connections, accepted or not."""
        return self._received + (
            self._session.received_messages if self._session is not None else 0
        )

    # -- helpers ---------------------------------------------------------------------------------------------

    def _learn_keys(self) -> None:
        assert self.keyring is not None
        self._cluster_keys.clear()
        for keys in self.keyring.entries().values():
            self._keys.update({key.key_id: key for key in keys})

    def _key(self, cluster: str) -> ClusterKey:
        """Return the key that seals for a cluster; checks the name."""
        assert self.keyring is not None
        keys = self._cluster_keys.get(cluster)
        if keys is None:
            check_cluster(cluster)
            keys = self.keyring.for_cluster(cluster)
            if not keys:
                raise _no_key(cluster)
            if len(self._cluster_keys) > 65_536:
                self._cluster_keys.clear()
            self._cluster_keys[cluster] = keys
        return keys[0]

    def _encode(self, payload: object, headers: Headers | None) -> tuple[bytes, bool]:
        if self._state != "open":
            self._check_open()
        data, packed = encode_payload(payload)
        if len(data) > self.config.message_limit_bytes or (
            self._session is not None and len(data) > self._session.message_limit
        ):
            limit = (
                self._session.message_limit
                if self._session is not None
                else self.config.message_limit_bytes
            )
            raise MessageTooLarge(
                f"{len(data)} bytes are over the limit of {limit}; send it through a tunnel"
            )
        if headers:
            check_headers(headers)
        return data, packed

    async def _wait_writable(self) -> None:
        while self._blocked and self._session is not None and self._state == "open":
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    def _wake_writers(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def _within(self, waiter: asyncio.Future[Any], timeout: float, text: str) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError:
            raise RequestTimeout("relay", f"{text} within {timeout:g} s") from None

    def _forked(self) -> None:
        """In the child of a fork: the counters and the socket are the parent's."""
        self._state = "forked; connect anew in this process"
        if self._out is not None:
            self._out.poison()
        if self._session is not None:
            for end in self._session.tunnels.values():
                end.poison()
        self._session = self._out = None
        self._blocked = True


class _AckWaiter:
    """Turns an Ack into the result of a future, or its error; `then` runs first, in the same call."""

    def __init__(
        self,
        done: asyncio.Future[None],
        name: str,
        then: Callable[[frames.Ack], None] | None = None,
    ) -> None:
        self._future = done
        self._name = name
        self._then = then

    def done(self) -> bool:
        return self._future.done()

    def set_result(self, ack: frames.Ack) -> None:
        if ack.error:
            self._future.set_exception(
                LocalProtocolError(f"the relay refused {self._name}: {ack.error}")
            )
            return
        if self._then is not None:
            self._then(ack)
        self._future.set_result(None)

    def set_exception(self, exception: BaseException) -> None:
        self._future.set_exception(exception)


def load_keys() -> Keyring:
    """Return the keyring of the configuration directory, else that of a relay started with --dev.

    Raises:
        KeyringError: there is neither; the text says how to make one.
    """
    directory = keyfiles.config_directory(os.environ)
    path = directory / keyfiles.KEYRING_FILE
    if path.exists():
        return keyfiles.load_keyring(path)
    if not os.environ.get("IRIS_CONFIG"):
        dev = paths.dev_key_directory(os.environ, os.geteuid()) / keyfiles.KEYRING_FILE
        if dev.exists():
            return keyfiles.load_keyring(dev)
    raise KeyringError(
        f"no keyring in {directory}; make one with `iris key new`, or start `iris relay --dev`"
    )


def find_relay() -> Path:
    """Return the socket to try: $IRIS_RELAY, else the user's own relay if it is there, else the host's."""
    candidates = paths.candidate_sockets(os.environ, os.geteuid())
    return next((path for path in candidates if path.exists()), candidates[0])


def _milliseconds(timeout: float) -> int:
    if not timeout > 0:
        raise ConfigError(f"timeout: {timeout} s is not above 0")
    return min(max(1, int(timeout * 1000)), 0xFFFFFFFF)


def _no_key(cluster: str) -> KeyringError:
    return KeyringError(f"no key for cluster {cluster!r}; add one with `iris key add {cluster}`")


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _converting(handler: Any) -> Callable[[Message], object]:
    """Return a subscription callback that gives the handler what its annotation asks for."""
    if handler.is_coroutine:

        async def run(message: Message) -> object:
            return await handler.function(handler.convert(message))

        return run
    return lambda message: handler.function(handler.convert(message))


def _after_fork() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["Client", "Members", "RequestError", "connect", "find_relay", "load_keys"]
