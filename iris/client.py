"""The client: talk to clusters by name. `connect()` gives one; `Client.serve` makes it a member, too.

One event loop, one thread, one session with the local relay. When the relay goes away the client finds it again by itself:
requests in flight end with ConnectionLost, tunnels with TunnelBroken, publications wait within a bound, and services and
subscriptions are registered anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import msgspec

from iris.attachment import OPEN, Attachment, Connector, unwatched
from iris.audience import Audience, ask_audience, wait_for_subscribers
from iris.config import ClientConfig
from iris.core.bundle import CUT_BYTES, MESSAGE_BYTES, Headers
from iris.core.credit import WhenFull
from iris.core.interfaces import Lost
from iris.core.message import Message, decode_payload
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.deadlines import deadline, milliseconds, seconds_left, within
from iris.dialling import REMOTE, arrivals, reach
from iris.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    DecodeError,
    RequestError,
    RequestTimeout,
    ran_before,
)
from iris.keyfiles import has_keys, load_keys
from iris.many import IN_FLIGHT, SESSIONS_TRIED, Many, Outcome
from iris.membership import Members
from iris.memory import keep_freed_memory
from iris.registry import Registry
from iris.runtime import Runtime
from iris.service import Service
from iris.serving import ServiceBinding, serving
from iris.streams import Streams
from iris.subscription import QUEUE_BYTES, Policy, Subscription
from iris.survey import Survey
from iris.tunnel import Tunnel, open_tunnel
from iris.wire import frames
from iris.wire.codec import MIN_MESSAGE_LIMIT
from iris.wire.kinds import HERE, Kind
from iris.wire.names import check_address

if TYPE_CHECKING:
    from relay.embedded import EmbeddedRelay

Scope = Literal["site", "federation"]
"""Whom a survey or broadcast is for: the members of this site, or of all."""


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
        self._runtime = runtime = Runtime(config)
        self.losses = runtime.losses
        """The latest losses that were told, oldest first."""
        self.counters = runtime.counters
        """Messages dropped here, by cause, and handlers that failed."""
        self._given_keyring = keyring
        self._embedded = embedded
        self._entropy = entropy
        self._connector = connector
        self._loop: asyncio.AbstractEventLoop
        self._registry: Registry
        self._attachment: Attachment | None = None
        self._relay: EmbeddedRelay | None = None
        self._closed = False
        # What every message takes.
        self._attached = runtime.attached
        self._ready = runtime.ready
        self._encode = runtime.encode
        self._take = runtime.take
        self._has_credit = runtime.has_credit

    # -- life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises RelayUnavailable if no relay answers, KeyringError if there are no keys."""
        if self._attachment is not None:
            raise Closed("this client was opened before; make another with iris.connect()")
        keyring = self._given_keyring
        if keyring is None and self._embedded and not has_keys(os.environ):
            keyring = Keyring.single(ClusterKey(self._entropy(32)))
        keyring = keyring or load_keys(os.environ)
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
            await self._attachment.open()
        except BaseException:
            self._attachment.close()
            await self._stop_embedded()
            raise

    async def close(self) -> None:
        """Leave gracefully: members stop and finish what they accepted, what was sent is flushed. Idempotent.

        Bounded by `config.drain_timeout_s`, once more for handlers that were cancelled, and `connect_timeout_s` together.
        Cancelled, it closes at once.
        """
        attachment = self._attachment
        if attachment is None or self._closed or attachment.state is not OPEN:
            return  # after a fork the socket, the loop and its tasks are the parent's
        self._closed = True
        try:
            await self._runtime.close()
        finally:
            await self._stop_embedded()

    async def reload_keys(self, keyring: Keyring | None = None) -> None:
        """Use a changed keyring (`keyring`, else the file's) by moving to a new session. No accepted message is lost.

        Returns when the old session has finished its work, at the latest after `config.drain_timeout_s`. After that, keys that
        left the keyring open, serve and send nothing here.

        Raises RelayUnavailable or KeyringError; the client then continues as before.
        """
        self._attached()
        await self._runtime.reload(keyring or load_keys(os.environ))

    async def _stop_embedded(self) -> None:
        if self._relay is not None:
            await self._relay.close()

    @cached_property
    def streams(self) -> Streams:
        """Durable streams: create, append, read, consume."""
        return Streams(self._runtime)

    @property
    def on_loss(self) -> Callable[[Lost], object] | None:
        """Called with every loss: pushes that failed, gaps in what was subscribed to or broadcast, what was dropped here unhandled."""
        return self._runtime.on_loss

    @on_loss.setter
    def on_loss(self, told: Callable[[Lost], object] | None) -> None:
        self._runtime.on_loss = told

    @property
    def keyring(self) -> Keyring:
        """The keys in use."""
        return self._runtime.keyring

    @property
    def message_limit(self) -> int:
        """Bytes of the longest payload."""
        return self._runtime.message_limit

    @property
    def sent_messages(self) -> int:
        """Data messages sent over all sessions."""
        return self._runtime.messages("sent")

    @property
    def received_messages(self) -> int:
        """Data messages received over all sessions, accepted or not."""
        return self._runtime.messages("received")

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
                    attachment.pump if attachment is not None and attachment.state is OPEN else None
                )
                if pump is not None:
                    pump.turn()
                    session = pump.session
                else:
                    pump, session = await self._ready(cluster, timeout)
                    timeout_ms = milliseconds(seconds_left(until_s))
                data, packed = self._encode(payload, headers)
                waiter: asyncio.Future[Message] = self._loop.create_future()
                pending = session.requests.send(
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
                        session.requests.forget(pending)
        except RequestError as err:
            if ran:
                ran_before(err)
            raise
        if type is Message:
            return message
        return decode_payload(message.payload, message.packed, type)

    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT,
    ) -> AsyncIterator[Outcome]:  # fmt: skip
        """Send a request for each payload; yield an `Outcome` for each as it ends: `async for outcome in client.request_many(...)`.

        Each is a request as `request` sends it, with its own `timeout` from when it is sent, and what it would raise is the outcome's
        `error`. It needs no task for each, and what is sent together travels together. At most `in_flight` of
        them are on the way or not yet taken; payloads are taken as there is room.

        Raises:
            InvalidName: the cluster's name; before anything is sent.
        """
        many = Many(
            self._runtime, cluster, payloads, timeout=timeout, headers=headers, idempotent=idempotent, wanted=type,
            in_flight=max(1, in_flight),
        )  # fmt: skip
        return many.outcomes()

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
        key = self._registry.cluster_keys(cluster)[0]
        left_ms = milliseconds(seconds_left(until_s))
        session.requests.push(cluster, key, data, headers, packed, left_ms)
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
            pending = session.requests.send(
                Kind.SURVEY, address, self._registry.cluster_keys(address)[0], data, headers, packed,
                timeout_ms=milliseconds(seconds_left(until_s)), survey=survey,
            )  # fmt: skip
            pump.touch()
            return lambda: session.requests.forget(pending)

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

    @contextlib.asynccontextmanager
    async def watch_losses(self, *, timeout: float = 5.0) -> AsyncIterator[list[Lost]]:
        """Collect what is lost of what is sent meanwhile: `async with client.watch_losses() as losses`.

        After a `flush` the list is complete. If the relay was lost or left on the way, a `Lost` of kind "relay" says so: of what was
        sent before, some may be lost. It begins when there is a relay; raises ConnectionLost after `timeout` seconds without one.
        """
        await self._ready("relay", timeout)
        with self._runtime.watching_losses() as losses:
            yield losses

    # -- casts -----------------------------------------------------------------------------------------------

    async def broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None, scope: Scope = "federation"
    ) -> None:  # fmt: skip
        """Send to every member that serves broadcasts, in all sites or (`scope="site"`) in this one; waits and fails as `publish`."""
        cluster = _scoped(cluster, scope)
        if not self._take(Kind.BROADCAST, cluster, payload, headers):
            await self._attached().wait_writable()
            self._take(Kind.BROADCAST, cluster, payload, headers, force=True)

    def offer_broadcast(self, cluster: str, payload: object) -> bool:
        """Broadcast if that needs no waiting; False: not taken, the write buffer is full."""
        check_address(cluster)
        return self._take(Kind.BROADCAST, cluster, payload, None)

    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop"
    ) -> None: ...  # fmt: skip
    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", report: bool
    ) -> int | None: ...  # fmt: skip
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", report: bool = False
    ) -> int | None:  # fmt: skip
        """Send to every subscriber of a matching filter. Waits only while the write buffer is over its high-water mark.

        With `when_full="wait"` it waits for subscribers that asked for it, too, while they are full: at most `config.stall_s`, after
        which the message is dropped for those that still are. Then nothing is lost, however fast you publish. Subscribers in other
        sites, and at relays of earlier versions, are never waited for.

        Without a relay it is kept, within `config.offline_bytes`, until there is one again.

        With `report` it returns how many subscriptions the relay of this host knows for the topic, once it has routed the message:
        one round trip to the relay; 0 means that nobody heard it. See `audience`.

        Raises:
            ConnectionLost: that bound is reached; this message was not taken. With `report`: its `may_have_run` says whether it was.
            MessageTooLarge: it is over the limit; use a tunnel.
        """
        if not self.offer(topic, payload, headers=headers, when_full=when_full):
            if when_full == "drop":
                await self._attached().wait_writable()
            else:
                await self._runtime.wait_for_credit(topic)
            self._take(Kind.PUBLISH, topic, payload, headers, force=True)
        if not report:
            return None
        try:
            told = await ask_audience(
                self._runtime, topic, self.config.connect_timeout_s, slow=False
            )
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
        return await ask_audience(self._runtime, topic, timeout, slow=True)

    async def wait_for_subscribers(self, topic: str, count: int, *, timeout: float) -> int:
        """Return how many subscribe to a topic once they are at least `count`: what is published then reaches them.

        Raises RequestTimeout after `timeout` seconds.
        """
        return await wait_for_subscribers(self._runtime, topic, count, timeout)

    def offer(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop"
    ) -> bool:  # fmt: skip
        """Publish if that needs no waiting; False: not taken, the write buffer is full, or a subscriber that `publish` would wait for."""
        attachment = self._attachment
        if (
            attachment is None
            or attachment.blocked
            or headers is not None
            or type(payload) is not bytes
        ):
            if when_full != "drop" and not self._has_credit(topic, when_full):
                return False
            return self._take(Kind.PUBLISH, topic, payload, headers)
        out = attachment.out
        assert out is not None  # there is one while it is not blocked
        flow = out.topics.get(topic) or self._runtime.topic(topic)
        payloads = flow.payloads
        size = flow.size + len(payload) + MESSAGE_BYTES
        if payloads and flow.plain and size <= CUT_BYTES:  # nothing to decide: the hot path
            payloads.append(payload)
            flow.size = size
            return True
        if when_full != "drop" and not self._has_credit(topic, when_full):
            return False  # a bundle that is begun may go beyond: it is one frame
        if len(payload) > MIN_MESSAGE_LIMIT:
            self._runtime.check_size(payload)
        out.add(flow, payload, None, False)
        pump = attachment.pump
        assert pump is not None  # likewise
        pump.touch()
        return True

    def subscribe(
        self, pattern: str, handler: Callable[[Message], object] | None = None, *, group: str = "",
        policy: Policy = "drop-new", limit_bytes: int = QUEUE_BYTES, on_gap: Callable[[Lost], object] | None = None,
        concurrency: int = 1, when_full: WhenFull = "drop",
    ) -> Subscription:  # fmt: skip
        """Receive what is published to matching topics, with a callback or by `async for`.

        Registered at once when connected; `async with client.subscribe(...)` returns when the relay of this host knows and those that
        it is linked to, for which it waits a second at most: what anybody of this site publishes then, is received. With a `group`, each bundle goes to one of the group's members. See `Subscription` for `policy`, `limit_bytes`, `concurrency` and
        `when_full`.
        """
        return Subscription(
            self._runtime, pattern, handler, group, policy, limit_bytes, on_gap, concurrency, when_full
        )  # fmt: skip

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
        return await open_tunnel(self._runtime, cluster, timeout, headers)

    # -- serving ---------------------------------------------------------------------------------------------

    def serve(self, service: Service) -> AbstractAsyncContextManager[ServiceBinding]:
        """Be a member of `service`'s cluster while the block runs; entered when the relay of this host knows, and those linked to it.

        For those it waits a second at most. Callers in other sites find it a little later: `wait_for_members` there returns when they do.

        On the way out the member leaves, and what it accepted is finished.
        """
        return serving(self._runtime, service)

    # -- members ---------------------------------------------------------------------------------------------

    async def members(self, cluster: str, *, timeout: float = 5.0) -> Members:
        """Return who is there now, under any of our keys for the cluster: each member of this site, and how many there are in others."""
        return await self.wait_for_members(cluster, 0, timeout=timeout)

    async def watch_members(self, cluster: str) -> AsyncIterator[Members]:
        """Iterate over who is there: now, and after every change."""
        with self._runtime.watching(cluster) as watcher:
            await watcher.first()
            while not watcher.ended:
                yield watcher.members()
                await watcher.changed()

    async def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """Return once at least `count` members are there; raises RequestTimeout after `timeout` seconds."""
        with self._runtime.watching(cluster) as watcher:
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
