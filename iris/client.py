"""The client: call clusters by name and serve them. `connect()` returns a `Client`.

A client uses one event loop in one thread, and has one session with the local relay. When the relay is lost,
the client reconnects by itself. Meanwhile requests in flight end with ConnectionLost and tunnels with
TunnelBroken; publications are held, up to a limit. After the reconnect, services and subscriptions are
registered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import msgspec

from iris.absences import unwatched
from iris.attachment import OPEN, Attachment, Connector
from iris.audience import Audience, ask_audience, wait_for_subscribers
from iris.checks import check_number
from iris.config import ClientConfig
from iris.core.bundle import CUT_BYTES, MESSAGE_BYTES, Headers
from iris.core.credit import WhenFull
from iris.core.interfaces import Lost
from iris.core.message import Message, check_decodable, decode_payload
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.deadlines import (
    HANDLED,
    deadline,
    explain_cut,
    inherited_s,
    milliseconds,
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
from iris.dialling import REMOTE, arrivals, find_keys, reach, retried
from iris.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    DecodeError,
    RequestError,
    RequestTimeout,
    ran_before,
)
from iris.following import wait_for_members, watch_members
from iris.handlers import subscriber
from iris.keyfiles import has_keys, load_keys
from iris.lifespan import serving
from iris.membership import Members
from iris.memory import keep_freed_memory
from iris.middleware import Middleware, checked, wrap_push, wrap_request
from iris.parameters import Provided
from iris.registry import Registry
from iris.request_many import IN_FLIGHT, SESSIONS_TRIED, Many, Outcome, wrap_request_many
from iris.runtime import Runtime
from iris.service import Service
from iris.serving import ServiceBinding
from iris.stats import Stats, snapshot
from iris.subscription import QUEUE_BYTES, Policy, Subscription
from iris.survey import Scope, Survey, make_survey, scoped
from iris.tracer import Tracer, default_tracer
from iris.tunnel import Tunnel, open_tunnel
from iris.wire import frames
from iris.wire.codec import MIN_MESSAGE_LIMIT
from iris.wire.kinds import REQUEST, Kind
from iris.wire.names import check_address, check_member, check_method

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # checkers bring it; the library does not import it

    from iris.streams import Streams
    from relay.embedded import EmbeddedRelay

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

    `embedded=True` runs a relay inside this process, for a program whose parts talk to each other only.

    With `wait`, a relay that does not run yet is waited for, up to that many seconds; its last error is raised then.

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


class Client:
    """A process's connection to its relay, made by `connect`. Use it as an async context manager.

    All methods must be called in the event loop in which the client was opened.
    """

    def __init__(
        self, config: ClientConfig, keyring: Keyring | None = None, *, embedded: bool = False,
        connector: Connector | None = None, entropy: Callable[[int], bytes] = os.urandom,
        middleware: Sequence[Middleware] = (), tracing: bool | Tracer | None = None, wait: float = 0.0,
    ) -> None:  # fmt: skip
        self.config = config
        self._runtime = runtime = Runtime(config)
        self.losses = runtime.losses
        """The latest 1,000 losses, oldest first."""
        self.counters = runtime.counters
        """Messages dropped in this process, by cause, and the number of handlers that failed: name -> count.

        What a session drops by itself is added when it ends; `stats` counts it at once.
        """
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
        # Looked up once, because every message uses them.
        self._attached = runtime.attached
        self._ready = runtime.ready
        self._encode = runtime.encode
        self._take = runtime.take
        self._has_credit = runtime.has_credit
        self._tracer = _tracer(tracing)
        if self._tracer is not None:
            self._tracer.trace_calls(self)
        if middleware:  # instead of a look at it in each call
            around = checked(middleware)
            self.request = wrap_request(self.request, around)  # type: ignore[method-assign]  # for this client only
            self.request_many = wrap_request_many(self.request_many, self.request)  # type: ignore[method-assign]  # for this client only
            self.push = wrap_push(self.push, around)  # type: ignore[method-assign]  # for this client only

    # -- life ------------------------------------------------------------------------------------------------

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
        `config.connect_timeout_s` for the relay. If `close` is cancelled, the connection ends at once.
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
        """Replace the keyring by `keyring`, or read its file again, and move to a new session.

        No accepted message is lost.

        Returns when the old session has finished its work, at the latest after `config.drain_timeout_s`. From then on
        this client no longer uses keys that are not in the new keyring.

        Raises:
            RelayUnavailable: no new session could be made; the client goes on with the old keyring.
            KeyringError: the keyring cannot be used, or lacks a needed key; the client goes on with the old one.
        """
        self._attached()
        await self._runtime.reload(keyring or load_keys(os.environ))

    async def _stop_embedded(self) -> None:
        if self._relay is not None:
            await self._relay.close()

    @cached_property
    def streams(self) -> Streams:
        """Durable streams: create, append to, read and consume them."""
        from iris.streams import (
            Streams,  # `import iris` has imported it; the command may do without it
        )

        return (
            Streams(self._runtime) if self._tracer is None else self._tracer.streams(self._runtime)
        )

    @property
    def on_loss(self) -> Callable[[Lost], object] | None:
        """Function that is called with every loss, or None.

        Losses are pushes that failed, gaps in subscriptions and broadcasts, and messages dropped in this process.
        """
        return self._runtime.on_loss

    @on_loss.setter
    def on_loss(self, handler: Callable[[Lost], object] | None) -> None:
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

    # -- requests --------------------------------------------------------------------------------------------

    @overload
    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: type[T], member: str | None = None, method: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: TypeForm[T], member: str | None = None, method: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, member: str | None = None, method: str | None = None,
    ) -> Any: ...  # fmt: skip
    async def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, member: str | None = None, method: str | None = None,
    ) -> Any:  # fmt: skip
        """Send a request to one member and return its reply.

        The relays choose a member of this site if one accepts the request, else a member of the nearest site that has
        one. A `cluster` such as "eu:billing" names a site.

        `payload` is bytes or str (sent as they are) or an object (sent as MessagePack). The reply is bytes if
        the handler returned bytes or str, else the object. With `type` the reply is decoded into that type;
        `type=iris.Message` returns the whole message with its headers.

        The request runs at most once. With `idempotent=True` it may run again on another member if one is lost.

        With `member`, an id from `members`, the request goes to that member alone. It fails with NoMembers if the
        member has left, and is never sent to another one. Only members of this site can be called so.

        With `method`, the handler of that name runs (`Service.on_request("place")`). A member that has none answers
        with a RemoteError of the code "no_method". Members of earlier versions of Iris refuse the request with a
        RelayError. In both cases `may_have_run` is False.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RemoteError, RelayError or ConnectionLost. Its
                `may_have_run` is False only if no handler has run.
            MessageTooLarge: the payload is over `message_limit`; nothing was sent.
            EncodeError: the payload cannot be sent. Nothing was sent.
            DecodeError: the reply does not fit `type`. Its `may_have_run` is True.
            KeyringError: the keyring has no key for the cluster.
            InvalidName: `cluster`, `member` or `method` is not allowed.
            ConfigError: no reply can be decoded into `type`. Nothing was sent.
        """
        if member is not None:
            check_member(cluster, member)
        if method is not None:
            check_method(method)
        if type is not None:
            check_decodable(type)
        own_timeout = 0.0
        if HANDLED and (left_s := inherited_s(cluster, timeout)) is not None:
            own_timeout, timeout = timeout, left_s
        timeout_ms = milliseconds(timeout)
        until_s = time.monotonic() + timeout
        attempts = SESSIONS_TRIED if idempotent else 1
        ran = False
        left_s = timeout
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
                    pump, session = await self._ready(cluster, left_s)
                    timeout_ms = milliseconds(seconds_left(until_s))
                data, packed = self._encode(payload, headers)
                waiter: asyncio.Future[Message] = self._loop.create_future()
                pending = session.requests.send(
                    REQUEST, cluster, self._registry.cluster_keys(cluster)[0], data, headers, packed,
                    timeout_ms=timeout_ms, waiter=waiter, idempotent=idempotent, member=member or "",
                    method=method or "",
                )  # fmt: skip
                pump.touch()
                try:
                    message = await waiter
                except ConnectionLost as err:
                    ran = ran or err.may_have_run
                    left_s = seconds_left(until_s)
                    timeout_ms = milliseconds(left_s)
                    if not attempts or timeout_ms <= 1 or self._closed:
                        raise
                except BaseException:  # cancelled, or this coroutine is collected as garbage
                    if not waiter.done() or waiter.cancelled():
                        session.requests.forget(pending)
                        if not self._loop.is_closed():
                            pump.touch()
                    raise
                else:
                    break
        except RequestError as err:
            self._runtime.name_timeout(err, timeout, until_s)
            if ran:
                ran_before(err)
            if own_timeout and isinstance(err, RequestTimeout):
                explain_cut(err, own_timeout)
            raise
        if type is Message:
            return message
        try:
            return decode_payload(message.payload, message.packed, type, "reply")
        except DecodeError as err:
            err.may_have_run = True
            raise

    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: type[T], in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> AsyncIterator[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: TypeForm[T], in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> AsyncIterator[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> AsyncIterator[Outcome[Any]]: ...  # fmt: skip
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> AsyncIterator[Outcome[Any]]:  # fmt: skip
        """Send one request for each payload; yield an `Outcome` for each, in the order in which they end.

            async for outcome in client.request_many("thumbnails", photos, timeout=5.0): ...

        Each request is sent as `request` does it, and its `timeout` begins when it is sent. An error of one
        request is the `error` of its outcome and does not end the others. This needs no task for each request,
        and requests that are sent together travel together.

        At most `in_flight` requests are unanswered or not yet yielded. Payloads are taken from the iterable as there
        is room. `member` and `method` are as in `request`: with `member`, all go to that member.

        Raises:
            InvalidName: the name of the cluster, the member or the method is not allowed. Nothing was sent.
            KeyringError: the keyring has no key for the cluster. Nothing was sent.
        """
        if member is not None:
            check_member(cluster, member)
        if method is not None:
            check_method(method)
        if type is not None:
            check_decodable(type)
        many = Many(
            self._runtime, cluster, payloads, timeout=timeout, headers=headers, idempotent=idempotent, wanted=type,
            in_flight=in_flight, member=member or "", method=method or "",
        )  # fmt: skip
        return many.outcomes()

    async def push(
        self, cluster: str, payload: object, *, timeout: float = 5.0, headers: Headers | None = None,
        member: str | None = None, method: str | None = None,
    ) -> None:  # fmt: skip
        """Send a message to one member, without a reply. It runs at most once.

        `timeout` is how long the message may wait until a handler starts. Returns when the message is on its way.
        `member` and `method` are as in `request`.

        A push that fails (no members, all at capacity, member lost, not started in time) is reported to `on_loss` and
        in `losses`. After `flush`, all failures of earlier pushes have been reported.

        Raises:
            ConnectionLost: no relay was connected within `timeout`; nothing was sent.
            MessageTooLarge: the payload is over `message_limit`; nothing was sent.
            KeyringError: the keyring has no key for the cluster.
        """
        if member is not None:
            check_member(cluster, member)
        if method is not None:
            check_method(method)
        until_s = deadline(timeout)
        pump, session = await self._ready(cluster, timeout)
        data, packed = self._encode(payload, headers)
        key = self._registry.cluster_keys(cluster)[0]
        left_ms = milliseconds(seconds_left(until_s))
        session.requests.push(
            cluster, key, data, headers, packed, left_ms, member or "", method or ""
        )
        pump.touch()
        if (attachment := self._attached()).blocked:
            await attachment.wait_writable()

    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: None = None, scope: Scope = "federation", method: str | None = None,
    ) -> Survey[Message]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: type[T], scope: Scope = "federation", method: str | None = None,
    ) -> Survey[T]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: TypeForm[T], scope: Scope = "federation", method: str | None = None,
    ) -> Survey[T]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: Any, scope: Scope = "federation", method: str | None = None,
    ) -> Survey[Any]: ...  # fmt: skip
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, type: Any = None,
        scope: Scope = "federation", method: str | None = None,
    ) -> Survey[Any]:  # fmt: skip
        """Ask all members and iterate over their answers: `async for answer in client.survey(...)`.

        It asks the members of all sites, or with `scope="site"` only those of this site. The iteration ends when all
        have answered, or at the timeout. After that, `missing` lists the members that did not answer; see `Survey`.
        `method` is as in `request`.
        """
        return make_survey(
            self._runtime, cluster, payload, timeout=timeout, headers=headers, wanted=type, scope=scope, method=method
        )  # fmt: skip

    async def flush(self, *, timeout: float = 5.0) -> None:
        """Return when the relay has routed everything sent before. All failures of pushes have been reported by then.

        Raises RequestTimeout if the relay does not answer within `timeout` seconds.
        """
        until_s = deadline(timeout)
        held = self._attached().held.bytes  # held casts are only flushed by the next session
        ready = self._runtime.in_use if held else self._ready
        pump, session = await ready("relay", timeout)
        waiter: asyncio.Future[Any] = self._loop.create_future()
        session.flush()
        session.ask(frames.Ping, waiter)
        pump.touch()
        await self._runtime.answered(waiter, "the relay did not answer", timeout, until_s)

    @contextlib.asynccontextmanager
    async def watch_losses(self, *, timeout: float = 5.0) -> AsyncIterator[list[Lost]]:
        """Collect the losses of messages sent inside the block: `async with client.watch_losses() as losses`.

        After a `flush` the list is complete. If the relay was lost or stopped meanwhile, the list has a `Lost`
        of kind "relay": some of the messages sent before it may be lost.

        Waits for a relay first, and raises ConnectionLost if none is connected within `timeout` seconds.
        """
        await self._ready("relay", timeout)
        with self._runtime.watching_losses() as losses:
            yield losses

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
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", report: bool
    ) -> int | None: ...  # fmt: skip
    async def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", report: bool = False
    ) -> int | None:  # fmt: skip
        """Publish a message to all subscribers whose filter matches the topic.

        Each subscriber receives it at most once, and the messages of one publisher to one topic in their order.
        Of each queue group one member receives it. Waits only while the write buffer is over its high-water mark.

        With `when_full="wait"`, also wait while subscribers that asked for it (`subscribe(...,
        when_full="wait")`) are full. After `config.stall_s` seconds the message is dropped for those that are
        still full. Subscribers in other sites, and at relays of earlier versions, are never waited for.

        While no relay is connected, up to `config.offline_bytes` are held and sent when there is one again.

        With `report=True`, wait until the relay has routed the message and return how many subscriptions it
        knows for the topic. This takes one round trip to the relay; 0 means that the message reached no
        subscriber. See `audience`.

        Raises:
            ConnectionLost: no relay is connected and `config.offline_bytes` are held; this message was not accepted.
                With `report=True`, `may_have_run` says whether the message was accepted.
            MessageTooLarge: the payload is over `message_limit`; use a tunnel.
            KeyringError: the keyring has no key for the topic.
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
        self, pattern: str, handler: Callable[..., object] | None = None, *, group: str = "",
        policy: Policy = "drop-new", limit_bytes: int = QUEUE_BYTES, on_gap: Callable[[Lost], object] | None = None,
        concurrency: int = 1, when_full: WhenFull = "drop",
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
        `Subscription` for `policy`, `limit_bytes`, `concurrency` and `when_full`.

        Raises:
            InvalidName: the filter or the group is not allowed.
            KeyringError: the keyring has no key for any topic that matches.
            ConfigError: an option is wrong.
        """
        callback = subscriber(handler, Provided(self)) if handler is not None else None
        make: Callable[..., Subscription]
        make = Subscription if self._tracer is None else self._tracer.subscription
        return make(
            self._runtime, pattern, callback, group, policy, limit_bytes, on_gap, concurrency, when_full
        )  # fmt: skip

    # -- tunnels ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None, member: str | None = None
    ) -> AsyncIterator[Tunnel]:  # fmt: skip
        """Open a tunnel to one member: `async with client.tunnel("archive", timeout=1.0) as tunnel`.

        The tunnel is closed when the block ends, and broken on both sides if the block raises. `member` is as in
        `request`. Raises as `open_tunnel`.
        """
        tunnel = await self.open_tunnel(cluster, timeout=timeout, headers=headers, member=member)
        async with tunnel:
            yield tunnel

    async def open_tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None, member: str | None = None
    ) -> Tunnel:  # fmt: skip
        """Open a tunnel to one member and return it; you must close it. `tunnel` closes it for you.

        `member` is as in `request`.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RelayError or ConnectionLost.
            KeyringError: the keyring has no key for the cluster.
            InvalidName: `cluster` or `member` is not allowed.
        """
        if member is not None:
            check_member(cluster, member)
        return await open_tunnel(self._runtime, cluster, timeout, headers, member or "")

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

    def watch_members(self, cluster: str) -> AsyncIterator[Members]:
        """Iterate over the members of a cluster: the list now, then the list after each change."""
        return watch_members(self._runtime, cluster)

    async def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """Wait until a cluster has at least `count` members in this site, and return them.

        Raises RequestTimeout after `timeout` seconds.
        """
        return await wait_for_members(self._runtime, cluster, count, timeout)

    async def describe(self, cluster: str, *, timeout: float = 5.0) -> PerMember[Description]:
        """Ask each member of a cluster in this site what it is: its handlers and their types, counts and times.

        The library of the member answers, also while all handlers are busy. `failed` has the members that did not
        answer, such as those of earlier versions of Iris, and `sites` counts the members of other sites, which cannot
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
