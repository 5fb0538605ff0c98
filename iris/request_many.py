"""Many requests to one cluster at once: the work behind `Client.request_many`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from iris.checks import check_many, check_whole
from iris.core.bundle import Headers
from iris.core.message import Message, decode_payload
from iris.core.requests import Pending, Requests
from iris.deadlines import (
    HANDLED,
    carried_on,
    explain_cut,
    handled_us,
    milliseconds,
    not_sent,
    seconds_left,
)
from iris.errors import (
    ConnectionLost,
    DecodeError,
    IrisError,
    RequestError,
    RequestTimeout,
    ran_before,
)
from iris.iterating import Iteration, Waiters
from iris.runtime import Runtime
from iris.wire.kinds import Kind

IN_FLIGHT: Final = 256
"""Requests unanswered or not yet yielded, by default."""
SESSIONS_TRIED: Final = 3
"""Sessions over which an idempotent request may be sent, one after the other."""


T = TypeVar("T")


class Outcome(Generic[T]):
    """The outcome of one request of `Client.request_many`: a reply or an error."""

    __slots__ = ("error", "number", "reply")

    def __init__(self, number: int, reply: T | None, error: IrisError | None) -> None:
        self.number = number
        """Position of the payload, from 0."""
        self.reply = reply
        """The reply, as `Client.request` would have returned it; None if the request failed."""
        self.error = error
        """The error that `Client.request` would have raised, or None."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.number, self.reply, self.error)

    def __repr__(self) -> str:
        return f"Outcome({self.number}: {self.error or 'replied'})"

    def result(self) -> T:
        """Return the reply, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast("T", self.reply)


class _Request:
    """One request that waits for its reply.

    It stands in for a future, but wakes the iterator only once for all replies of one turn of the event loop.
    """

    __slots__ = (
        "_many",
        "ended",
        "number",
        "payload",
        "pending",
        "ran",
        "sessions_left",
        "timeout",
        "until_s",
    )

    def __init__(
        self,
        many: Many,
        number: int,
        payload: object,
        until_s: float,
        sessions: int,
        timeout: float,
    ) -> None:
        self._many = many
        self.timeout = timeout
        """Timeout of this request: less than that of the call if the caller handles a request that leaves less."""
        self.number = number
        self.payload = payload
        self.until_s = until_s
        self.sessions_left = sessions
        self.ran = False
        """Whether an attempt that was lost with its session may have run."""
        self.ended = False
        self.pending: tuple[Requests, Pending]

    def done(self) -> bool:
        return self.ended

    def set_result(self, result: Any, /) -> None:
        self.ended = True
        self._many.replied(self, result)

    def set_exception(self, exception: BaseException, /) -> None:
        self.ended = True
        assert isinstance(exception, IrisError)
        self._many.failed(self, exception)


class Work(Protocol):
    """What sends the requests. The iterator is another object, because requests in flight refer to this one."""

    ready: deque[Outcome[Any]]
    """Outcomes that were not yielded yet."""

    async def more(self) -> None:
        """Send requests, and wait for an outcome. Raises StopAsyncIteration when all have been yielded."""

    def cancel(self) -> None:
        """Forget the requests that have not ended."""

    async def cancelled(self) -> None:
        """Return when the requests that were cancelled have ended."""


class Outcomes(Iteration[Outcome[Any]]):
    """Iterates over the outcomes of requests, in the order in which they end."""

    def __init__(self, cluster: str, work: Work) -> None:
        self._cluster = cluster
        self._work = work

    @property
    def _of(self) -> str:
        return self._cluster

    async def __anext__(self) -> Outcome[Any]:
        ready = self._work.ready
        self._begun()
        while not ready:
            self._begun()
            try:
                await self._work.more()
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._end()
                raise
        return ready.popleft()

    async def aclose(self) -> None:
        """End the iteration, and return when its requests have ended. Idempotent."""
        self._end()
        await self._work.cancelled()

    def _release(self) -> None:
        self._work.cancel()
        self._work.ready.clear()


class Many:
    """The requests of one call of `Client.request_many`."""

    def __init__(
        self, runtime: Runtime, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None,
        idempotent: bool, wanted: Any, in_flight: int, member: str, method: str,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._cluster = cluster
        self._payloads: Iterator[tuple[int, object]] = enumerate(payloads)
        self._timeout = timeout
        self._headers = headers
        self._idempotent = idempotent
        self._wanted = wanted
        check_whole("in_flight", in_flight, 0)
        milliseconds(timeout)
        self._in_flight = max(1, in_flight)
        self._member = member
        self._method = method
        self._sessions = SESSIONS_TRIED if idempotent else 1
        self._waiting: set[_Request] = set()
        self._again: deque[_Request] = deque()
        self.ready: deque[Outcome[Any]] = deque()
        self._cancelled = False
        self._waiters = Waiters()
        self._taking = asyncio.Lock()
        """Held by the one task that sends requests and waits for the next outcome."""

    async def more(self) -> None:
        """See `Work`."""
        async with self._taking:
            # Raise at once for a wrong name or a missing key, which would fail every request.
            self._runtime.registry.cluster_keys(self._cluster)
            while not self.ready:
                request = None if self._cancelled else self._next()
                if request is not None:
                    await self._send_from(request)
                if not self.ready:
                    if not self._waiting:
                        raise StopAsyncIteration
                    await self._waiters.wait()

    def cancel(self) -> None:
        """See `Work`."""
        self._cancelled = True
        for request in self._waiting:
            requests, pending = request.pending
            requests.forget(pending)
        if self._waiting:
            self._waiting.clear()
            self._runtime.touch()
        self._waiters.wake()

    async def cancelled(self) -> None:
        """See `Work`."""

    def _next(self) -> _Request | None:
        """Return the next request to send; None if all were sent, or `in_flight` is reached."""
        if self._again:
            return self._again.popleft()
        if len(self._waiting) + len(self.ready) < self._in_flight:
            for number, payload in self._payloads:
                now_s, timeout = time.monotonic(), self._timeout
                if HANDLED and (until_us := handled_us()):
                    timeout = min(timeout, until_us / 1e6 - now_s)
                return _Request(self, number, payload, now_s + timeout, self._sessions, timeout)
        return None

    async def _send_from(self, first: _Request) -> None:
        """Send `first`, and as many others as `in_flight` allows."""
        runtime = self._runtime
        try:
            pump, session = await runtime.ready(self._cluster, seconds_left(first.until_s))
        except IrisError as err:
            self._record_error(first, err)
            return
        except BaseException:  # cancelled: it is the first again
            self._again.appendleft(first)
            raise
        pump.turn()
        key = runtime.registry.cluster_keys(self._cluster)[0]
        requests = session.requests
        request: _Request | None = first
        try:
            while request is not None:
                request.ended = False
                request.sessions_left -= 1
                try:
                    if request.timeout <= 0 < self._timeout:
                        raise not_sent(self._cluster)
                    data, packed = runtime.encode(request.payload, self._headers)
                    pending = requests.send(
                        Kind.REQUEST, self._cluster, key, data, self._headers, packed,
                        timeout_ms=milliseconds(seconds_left(request.until_s)), waiter=request, idempotent=self._idempotent,
                        member=self._member, method=self._method,
                    )  # fmt: skip
                except IrisError as err:
                    self._record_error(request, err)
                else:
                    request.pending = requests, pending
                    self._waiting.add(request)
                request = self._next()
        finally:
            pump.touch()  # even if the iterable of payloads raises

    def replied(self, request: _Request, message: Message) -> None:
        """Record the reply of a request."""
        self._waiting.discard(request)
        reply: Any = message
        if self._wanted is not Message:
            try:
                reply = decode_payload(message.payload, message.packed, self._wanted)
            except DecodeError as err:
                err.may_have_run = True
                self._record_error(request, err)
                return
        self.ready.append(Outcome(request.number, reply, None))
        self._waiters.wake()

    def failed(self, request: _Request, error: IrisError) -> None:
        """Record the error of a request, or send it again if it may run on another session."""
        self._waiting.discard(request)
        again = request.sessions_left and time.monotonic() < request.until_s
        if again and isinstance(error, ConnectionLost):
            request.ran = request.ran or error.may_have_run
            self._again.append(request)
            self._waiters.wake()
        else:
            self._record_error(request, error)

    def _record_error(self, request: _Request, error: IrisError) -> None:
        if isinstance(error, RequestError) and request.timeout > 0:
            self._runtime.name_timeout(error, request.timeout, request.until_s)
            if request.ran:
                ran_before(error)
            if request.timeout < self._timeout and isinstance(error, RequestTimeout):
                explain_cut(error, self._timeout)
        self.ready.append(Outcome(request.number, None, error))
        self._waiters.wake()


def wrap_request_many(
    request_many: Callable[..., AsyncIterator[Outcome[Any]]],
    request: Callable[..., Coroutine[Any, Any, Any]],
) -> Any:
    """Return `Client.request_many` that sends each request with `request`, which runs inside middleware."""

    @functools.wraps(request_many)
    def wrapped(
        cluster: str, payloads: Iterable[object], *, in_flight: int = IN_FLIGHT, **options: Any
    ) -> Outcomes:
        # Without payloads it only checks its arguments: some now, the cluster's key when it is iterated.
        check_many("payloads", payloads, "request")
        checks = request_many(cluster, (), in_flight=in_flight, **options)
        send = functools.partial(request, cluster, **options)
        return Outcomes(cluster, _Wrapped(checks, send, enumerate(payloads), max(1, in_flight)))

    return wrapped


class _Wrapped:
    """Requests that run inside middleware, each in a task. Raises what middleware raises, except for IrisError."""

    def __init__(
        self, checks: AsyncIterator[Outcome[Any]], send: Callable[[object], Coroutine[Any, Any, Any]],
        payloads: Iterator[tuple[int, object]], in_flight: int,
    ) -> None:  # fmt: skip
        self.ready: deque[Outcome[Any]] = deque()
        self._checks: AsyncIterator[Outcome[Any]] | None = checks
        self._send = send
        self._payloads = payloads
        self._in_flight = in_flight
        self._running: set[asyncio.Task[Any]] = set()
        self._waiters = Waiters()
        self._error: BaseException | None = None
        """What ends the iteration when all tasks have ended."""
        self._until_us: int | None = None
        """Deadline of the request that the program handled when the iteration began; 0 if it handled none."""

    async def more(self) -> None:
        """See `Work`."""
        if self._checks is not None:
            async for _ in self._checks:
                raise AssertionError("it was given no payloads")
            self._checks = None
        if self._until_us is None:
            self._until_us = handled_us() if HANDLED else 0
        while not self.ready:
            if self._error is not None:
                self.cancel()
                await self.cancelled()
                raise self._error
            self._start(self._until_us)
            if not self._running:
                raise StopAsyncIteration
            await self._waiters.wait()

    def _start(self, until_us: int) -> None:
        """Start as many requests as there is room for."""
        for number, payload in itertools.islice(
            self._payloads, self._in_flight - len(self._running)
        ):
            work = self._send(payload)
            work = carried_on(work, until_us) if until_us else work
            task = asyncio.create_task(work, name="iris-request")
            self._running.add(task)
            task.add_done_callback(functools.partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        try:
            self.ready.append(Outcome(number, task.result(), None))
        except IrisError as err:
            self.ready.append(Outcome(number, None, err))
        except BaseException as err:
            self._error = self._error or err
        self._waiters.wake()

    def cancel(self) -> None:
        """See `Work`."""
        self._error = self._error or StopAsyncIteration()
        for task in self._running:
            task.cancel()
        self._waiters.wake()

    async def cancelled(self) -> None:
        """See `Work`."""
        if self._running:
            await asyncio.wait(self._running)
