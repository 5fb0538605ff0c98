"""Calls of a client: requests, pushes, surveys and tunnels, and what became of those without a reply."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from iris.attachment import OPEN
from iris.checks import check_many
from iris.connection import Connection
from iris.core.bundle import Headers
from iris.core.interfaces import Loss
from iris.core.message import Message, check_decodable, decode_payload
from iris.deadlines import (
    HANDLED,
    deadline,
    explain_cut,
    inherited_s,
    milliseconds,
    seconds_left,
)
from iris.errors import (
    ConnectionLost,
    DecodeError,
    RequestError,
    RequestTimeout,
    ran_before,
)
from iris.iterating import Iteration
from iris.middleware import Middleware, checked, wrap_push, wrap_request
from iris.request_many import IN_FLIGHT, SESSIONS_TRIED, Many, Outcome, Outcomes, wrap_request_many
from iris.survey import Scope, Survey, make_survey
from iris.tunnel import Tunnel, open_tunnel
from iris.wire import frames
from iris.wire.kinds import REQUEST
from iris.wire.names import check_member, check_method

if TYPE_CHECKING:
    from typing_extensions import TypeForm  # checkers bring it; the library does not import it

T = TypeVar("T")


class Calls(Connection):
    """The part of a client that calls clusters."""

    def _wrap_calls(self, middleware: Sequence[Middleware]) -> None:
        """Let requests and pushes pass through middleware, instead of a look at it in each call."""
        around = checked(middleware)
        self.request = wrap_request(self.request, around)  # type: ignore[method-assign]  # for this client only
        self.request_many = wrap_request_many(self.request_many, self.request)  # type: ignore[method-assign]  # for this client only
        self.push = wrap_push(self.push, around)  # type: ignore[method-assign]  # for this client only

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
        with a RemoteError of the code "no_method", and `may_have_run` is False.

        Raises:
            RequestError: NoMembers, Overloaded, RequestTimeout, RemoteError, RelayError or ConnectionLost. Its
                `may_have_run` is False only if no handler has run.
            MessageTooLarge: the payload is over `message_limit`, or the headers over 3,072 bytes; nothing was sent.
            EncodeError: the payload cannot be sent, or `headers` are not a dict of str to str. Nothing was sent.
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
    ) -> Iteration[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: TypeForm[T], in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> Iteration[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> Iteration[Outcome[Any]]: ...  # fmt: skip
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> Iteration[Outcome[Any]]:  # fmt: skip
        """Send one request for each payload; yield an `Outcome` for each, in the order in which they end.

            async for outcome in client.request_many("thumbnails", photos, timeout=5.0): ...

        Each request is sent as `request` does it, and its `timeout` begins when it is sent. An error of one
        request is the `error` of its outcome and does not end the others. This needs no task for each request,
        and requests that are sent together travel together.

        At most `in_flight` requests are unanswered or not yet yielded. Payloads are taken from the iterable as there
        is room. `member` and `method` are as in `request`: with `member`, all go to that member.

        Raises:
            ConfigError: `payloads` is itself a message: bytes, text or a dict. Nothing was sent.
            InvalidName: the name of the cluster, the member or the method is not allowed. Nothing was sent.
            KeyringError: the keyring has no key for the cluster. Nothing was sent.
        """
        check_many("payloads", payloads, "request")
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
        return Outcomes(cluster, many)

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
            MessageTooLarge: the payload is over `message_limit`, or the headers over 3,072 bytes; nothing was sent.
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
    async def watch_losses(self, *, timeout: float = 5.0) -> AsyncIterator[list[Loss]]:
        """Collect the losses of messages sent inside the block: `async with client.watch_losses() as losses`.

        After a `flush` the list is complete. If the relay was lost or stopped meanwhile, the list has a `Loss`
        of kind "relay": some of the messages sent before it may be lost.

        Waits for a relay first, and raises ConnectionLost if none is connected within `timeout` seconds.
        """
        await self._ready("relay", timeout)
        with self._runtime.watching_losses() as losses:
            yield losses

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
