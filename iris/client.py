"""The client: call clusters by name and serve them. `connect()` returns a `Client`.

It is a connection to a relay (`iris.connection`) with calls (`iris.calls`), and here with casts, services and members.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from iris.attachment import Connector
from iris.audience import Audience, ask_audience, wait_for_subscribers
from iris.calls import Calls
from iris.config import ClientConfig
from iris.core.bundle import CUT_BYTES, MESSAGE_BYTES, Headers
from iris.core.credit import WhenFull, WhenQueueFull
from iris.core.interfaces import Loss
from iris.crypto.keyring import Keyring
from iris.deadlines import (
    deadline,
    seconds_left,
)
from iris.describing import (
    Description,
    PerMember,
    Ping,
    Send,
    ask_members,
    describe_member,
    ping_member,
)
from iris.dialling import REMOTE
from iris.errors import (
    ConfigError,
    ConnectionLost,
    DecodeError,
)
from iris.following import MembersWatch, wait_for_members
from iris.handlers import subscriber
from iris.iterating import Iteration
from iris.lifespan import serving
from iris.membership import Members
from iris.middleware import Middleware
from iris.misuse import AsyncOnly
from iris.parameters import Provided
from iris.service import Service
from iris.serving import ServiceBinding
from iris.subscription import QUEUE_BYTES, Subscription
from iris.survey import Scope, scoped
from iris.tracer import Tracer, default_tracer
from iris.wire import frames
from iris.wire.codec import MIN_MESSAGE_LIMIT
from iris.wire.kinds import Kind
from iris.wire.names import check_address

if TYPE_CHECKING:
    from iris.streams import Streams

T = TypeVar("T")


def connect(
    relay: str | Path | None = None, *, keyring: Keyring | None = None, config: ClientConfig | None = None,
    embedded: bool = False, middleware: Sequence[Middleware] = (), tracing: bool | Tracer | None = None, wait: float = 0.0,
) -> Client:  # fmt: skip
    """Return a client that connects when entered: `async with iris.connect() as client`.

    `relay` is the path of the relay's socket, or "tls://host:port" of a relay on another host, which needs the access
    file that `iris key access` makes. By default it is $IRIS_RELAY if that is set, else your own relay if its socket
    exists, else the host's relay.

    `keyring` is by default the keyring in the configuration directory, else that of `iris relay --dev`.

    `embedded=True` runs a relay inside this process, for a program whose parts send messages only to each other.

    `wait` is how many seconds to wait for a relay that does not run yet. After that, the last error is raised.

    `middleware` runs around `request`, each request of `request_many`, and `push`, the first one outermost: coroutine
    functions `async def middleware(call: iris.Call, call_next)` that return what `await call_next(call)` returned, or
    raise.

    `tracing=True` makes OpenTelemetry spans of what this client sends, and of the handlers that it serves; it needs the
    extra `[otel]`. An `iris.tracing.Tracing` does so with its provider. By default it is off, unless the process is
    instrumented (`iris.tracing.instrument`, `opentelemetry-instrument`).

    Raises:
        ConfigError: `relay` is given here and in `config`, or a setting is wrong.
    """
    if config is None:
        remote = isinstance(relay, str) and relay.startswith(REMOTE)
        config = ClientConfig(relay=relay if remote or relay is None else Path(relay))
    elif relay is not None:
        raise ConfigError("the relay is given twice; pass it as `relay` or in `config`, not both")
    return Client(
        config, keyring, embedded=embedded, middleware=middleware, tracing=tracing, wait=wait
    )


class Client(Calls, AsyncOnly):
    """A process's connection to its relay, made by `connect`. Use it as an async context manager.

    All methods must be called in the event loop in which the client was opened.
    """

    _right_use = "async with iris.connect(...) as client:"

    def __init__(
        self, config: ClientConfig, keyring: Keyring | None = None, *, embedded: bool = False,
        connector: Connector | None = None, entropy: Callable[[int], bytes] = os.urandom,
        middleware: Sequence[Middleware] = (), tracing: bool | Tracer | None = None, wait: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            config, keyring, embedded=embedded, connector=connector, entropy=entropy, wait=wait
        )
        self._tracer = _tracer(tracing)
        if self._tracer is not None:
            self._tracer.trace_calls(self)
        if middleware:
            self._wrap_calls(middleware)

    @cached_property
    def streams(self) -> Streams:
        """Durable streams: create, append to, read and consume them."""
        from iris.streams import (
            Streams,  # `import iris` has imported it; the command may do without it
        )

        return (
            Streams(self._runtime) if self._tracer is None else self._tracer.streams(self._runtime)
        )

    # -- casts -----------------------------------------------------------------------------------------------

    async def broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None, scope: Scope = "federation"
    ) -> None:  # fmt: skip
        """Send a message to all members that serve broadcasts.

        Each member receives it at most once, and the messages of one sender in their order. The members of all sites
        receive it, or with `scope="site"` only those of this site. Waits and raises as `publish` does.
        """
        cluster = scoped(cluster, scope)
        if not self._take(Kind.BROADCAST, cluster, payload, headers):
            await self._attached().wait_writable()
            self._take(Kind.BROADCAST, cluster, payload, headers, force=True)

    def offer_broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None
    ) -> bool:
        """Broadcast without waiting. Return False if the write buffer is full; the message was not accepted then."""
        check_address(cluster)
        return self._take(Kind.BROADCAST, cluster, payload, headers)

    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop"
    ) -> None: ...  # fmt: skip
    @overload
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", count: bool
    ) -> int | None: ...  # fmt: skip
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", count: bool = False
    ) -> int | None:  # fmt: skip
        """Publish a message to all subscribers whose filter matches the topic.

        Each subscriber receives it at most once, and the messages of one publisher to one topic in their order.
        Of each queue group one subscriber receives it. Waits only while the write buffer is over its high-water mark.

        With `when_full="wait"`, also wait while subscribers that asked for it (`subscribe(..., when_full="wait")`) are
        full. After `config.stall_s` seconds the message is dropped for those that are still full. `publish` never waits
        for subscribers in other sites.

        While no relay is connected, up to `config.offline_bytes` are held. They are sent when a relay is connected
        again.

        With `count=True`, wait until the relay has routed the message and return how many subscriptions it
        knows for the topic. This takes one round trip to the relay; 0 means that the message reached no
        subscriber. See `audience`.

        Raises:
            ConnectionLost: no relay is connected and `config.offline_bytes` are held; this message was not accepted.
                With `count=True`, `may_have_run` says whether the message was accepted.
            MessageTooLarge: the payload is over `message_limit`; use a tunnel.
            KeyringError: the keyring has no key for the topic.
        """
        if not self.offer(topic, payload, headers=headers, when_full=when_full):
            if when_full == "drop":
                await self._attached().wait_writable()
            else:
                await self._runtime.wait_for_credit(topic)
            self._take(Kind.PUBLISH, topic, payload, headers, force=True)
        if not count:
            return None
        try:
            audience = await ask_audience(
                self._runtime, topic, self.config.connect_timeout_s, slow=False
            )
        except ConnectionLost as err:
            text = f"published, or held until a relay is connected; but the subscribers were not counted: {err.detail}"
            raise ConnectionLost(topic, text, may_have_run=True) from err
        return audience.subscribers

    async def audience(self, topic: str, *, timeout: float = 5.0) -> Audience:
        """Return how many subscribers a topic has, and for which slow receivers relays of this site dropped messages.

        The local relay waits at most half a second for the other relays. Process ids and addresses are shown only to
        programs of the relay's own user.
        """
        return await ask_audience(self._runtime, topic, timeout, slow=True)

    async def wait_for_subscribers(self, topic: str, count: int, *, timeout: float) -> int:
        """Wait until a topic has at least `count` subscribers, and return their number.

        What you publish after that reaches them. Raises RequestTimeout after `timeout` seconds.
        """
        return await wait_for_subscribers(self._runtime, topic, count, timeout)

    def offer(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop"
    ) -> bool:  # fmt: skip
        """Publish without waiting. Return False where `publish` would wait; the message was not accepted then.

        Raises as `publish`.
        """
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
        assert out is not None  # not None while it is not blocked
        flow = out.topics.get(topic) or self._runtime.topic(topic)
        payloads = flow.payloads
        size = flow.size + len(payload) + MESSAGE_BYTES
        if payloads and flow.plain and size <= CUT_BYTES:  # nothing to decide: the hot path
            payloads.append(payload)
            flow.size = size
            return True
        if when_full != "drop" and not self._has_credit(topic, when_full):
            return False  # a bundle already begun may exceed the credit, because it is one frame
        if len(payload) > MIN_MESSAGE_LIMIT:
            self._runtime.check_size(payload)
        out.add(flow, payload, None, False)
        pump = attachment.pump
        assert pump is not None  # not None while it is not blocked
        pump.touch()
        return True

    def subscribe(
        self, pattern: str, handler: Callable[..., object] | None = None, *, group: str | None = None,
        when_full: WhenQueueFull = "drop-new", limit_bytes: int = QUEUE_BYTES,
        on_loss: Callable[[Loss], object] | None = None, concurrency: int = 1,
    ) -> Subscription:  # fmt: skip
        """Subscribe to the topics that match `pattern`: with a `handler`, or with `async for` over the subscription.

            async with client.subscribe("orders.>") as orders:
                async for message in orders: ...

        The block is entered when the local relay and the relays linked to it have registered the subscription;
        it waits at most a second for the linked ones. Whatever is published in this site after that is
        received.

        The parameters of a handler are annotated as those of a `Service`; without an annotation it receives the
        `Message`.

        Subscriptions with the same `group` share the messages: each bundle goes to one of them. See
        `Subscription` for `when_full`, `limit_bytes` and `concurrency`.

        Raises:
            InvalidName: the filter or the group is not allowed.
            KeyringError: the keyring has no key for any topic that matches.
            ConfigError: an option is wrong.
        """
        callback = subscriber(handler, Provided(self)) if handler is not None else None
        make: Callable[..., Subscription]
        make = Subscription if self._tracer is None else self._tracer.subscription
        return make(
            self._runtime, pattern, callback, group, when_full, limit_bytes, on_loss, concurrency
        )  # fmt: skip

    # -- serving ---------------------------------------------------------------------------------------------

    def serve(self, service: Service) -> AbstractAsyncContextManager[ServiceBinding]:
        """Serve `service` while the block runs, as a member of its cluster: `async with client.serve(service): ...`.

        The block is entered when the local relay and the relays linked to it have registered the member; it waits at
        most a second for the linked ones. Callers in other sites reach the member a little later, when
        `Members.sites` there counts it.

        When the block ends, the member leaves and finishes what it accepted. The service's `lifespan` is entered before
        it joins, and left at the end; what it raises is raised here.

        Raises:
            ConfigError: nothing fits a parameter of a handler, or no payload can be decoded into its type.
            ConnectionLost: no relay is connected.
            TimeoutError: the lifespan did not end within `config.drain_timeout_s`.
        """
        return serving(self._runtime, service, self, self._tracer)

    # -- members ---------------------------------------------------------------------------------------------

    async def members(self, cluster: str, *, timeout: float = 5.0) -> Members:
        """Return the members of a cluster now, under any of your keys for it.

        Members of this site are listed one by one; other sites report only a number. Raises RequestTimeout after
        `timeout` seconds.
        """
        return await self.wait_for_members(cluster, 0, timeout=timeout)

    def watch_members(self, cluster: str) -> Iteration[Members]:
        """Iterate over the members of a cluster: the list now, then the list after each change."""
        return MembersWatch(self._runtime, cluster)

    async def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """Wait until a cluster has at least `count` members in this site, and return them.

        Raises RequestTimeout after `timeout` seconds.
        """
        return await wait_for_members(self._runtime, cluster, count, timeout)

    async def describe(self, cluster: str, *, timeout: float = 5.0) -> PerMember[Description]:
        """Ask each member of a cluster in this site what it is: its handlers and their types, counts and times.

        The library of the member answers, also while all handlers are busy. `failed` has the members that did not
        answer, and `sites` counts the members of other sites, which cannot
        be asked. Raises RequestTimeout if the relay does not list the members within `timeout` seconds.
        """
        return await self._ask_members(cluster, timeout, describe_member)

    async def ping(self, cluster: str, *, timeout: float = 5.0) -> PerMember[Ping]:
        """Measure the round trip to each member of a cluster in this site. `failed` and `sites` as in `describe`."""
        return await self._ask_members(cluster, timeout, ping_member)

    async def _ask_members(
        self, cluster: str, timeout: float, ask: Callable[[Send, str, float], Awaitable[T]]
    ) -> PerMember[T]:
        def send(member: str, method: str, left_s: float) -> Awaitable[bytes]:
            # Without the middleware of this client, which is for the requests of the program.
            return Client.request(self, cluster, b"", timeout=left_s, member=member, method=method, type=bytes)  # fmt: skip

        until_s = deadline(timeout)
        members = await self.members(cluster, timeout=timeout)
        return await ask_members(members, partial(ask, send), seconds_left(until_s))

    async def status(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Return the status of the local relay: its counters and tables, as `iris status --json` shows them.

        Raises RequestTimeout after `timeout` seconds.
        """
        until_s = deadline(timeout)
        pump, session = await self._ready("relay", timeout)
        waiter: asyncio.Future[frames.Report] = self._loop.create_future()
        session.ask(frames.Status, waiter)
        pump.touch()
        text = "the relay did not answer"
        report = await self._runtime.answered(waiter, text, timeout, until_s)
        try:
            document: dict[str, Any] = msgspec.json.decode(report.document, type=dict[str, Any])
        except msgspec.DecodeError as err:
            raise DecodeError(f"cannot decode the status from the relay: {err}") from err
        return document


def _tracer(tracing: bool | Tracer | None) -> Tracer | None:
    """Return what traces a client, or None. Raises ConfigError, and ImportError without OpenTelemetry."""
    if tracing is None:
        return default_tracer()
    if tracing is True:
        from iris.tracing import Tracing

        return Tracing()
    if tracing is not False and not hasattr(tracing, "trace_calls"):
        raise ConfigError(
            f"tracing must be True, False or an iris.tracing.Tracing, not {tracing!r}; for a provider, pass Tracing(provider)"
        )
    return tracing or None
