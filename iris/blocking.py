"""The client for threads without an event loop: scripts, Spark, a REPL.

    with iris.blocking.connect() as client:
        reply = client.request("databases", b"...", timeout=1.0)

An `iris.Client` runs in one background thread; calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, overload

from iris import client as _client
from iris import iterating
from iris.audience import Audience
from iris.config import ClientConfig
from iris.core.bundle import Headers
from iris.core.credit import WhenFull, WhenQueueFull
from iris.core.interfaces import Loss
from iris.core.message import Message
from iris.crypto.keyring import Keyring
from iris.deadlines import HANDLED, carried_on, deadline, handled_us, seconds_left
from iris.describing import Description, PerMember, Ping
from iris.errors import Closed, ConfigError, RemoteError
from iris.forks import disable_in_child, keep_in_child
from iris.logs import EXITS
from iris.membership import Members
from iris.middleware import Middleware
from iris.nested import IN_HANDLER
from iris.one_process import OneProcess
from iris.program import standard_descriptors_are_open
from iris.request_many import IN_FLIGHT, Outcome
from iris.service import Service
from iris.stats import Stats
from iris.streams.blocking import Streams
from iris.subscription import QUEUE_BYTES
from iris.survey import Scope
from iris.tracer import Tracer
from iris.tunnel import Tunnel as _AsyncTunnel

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


def connect(
    relay: str | Path | None = None, *, keyring: Keyring | None = None, config: ClientConfig | None = None,
    embedded: bool = False, middleware: Sequence[Middleware] = (), tracing: bool | Tracer | None = None, wait: float = 0.0,
) -> Client:  # fmt: skip
    """Return a connected client. Close it, or use it as a context manager. See `iris.connect`.

    Middleware consists of coroutine functions here, too; they run in the client's own thread.

    Raises:
        RelayUnavailable: no relay answered.
        KeyringError: there is no keyring, or it cannot be used.
        ConfigError: gevent or eventlet has replaced the threads of this process.
    """
    _check_threads()
    return Client(
        _client.connect(
            relay, keyring=keyring, config=config, embedded=embedded, middleware=middleware, tracing=tracing, wait=wait
        )
    )  # fmt: skip


_FORKED: Final = (
    "belongs to the parent process; after a fork, make another one with iris.blocking.connect()"
)


class Client(OneProcess):
    """`iris.Client` for threads. Each call blocks its thread until it is done, and raises as the original does."""

    def __init__(self, client: _client.Client) -> None:
        self._client = client
        self._loop = _new_loop()
        self._unusable = ""
        """Why it cannot be used; empty while it can. Completes the error text "this client ..."."""
        self._started: set[concurrent.futures.Future[Any]] = set()
        """Futures of `start` whose work has not ended."""
        self._starting = threading.Lock()
        """Held while work is given to the loop, or the loop is about to end and takes no more."""
        self._closing = threading.Lock()
        """Held by the thread that closes the client."""
        self._served: dict[asyncio.Task[None], asyncio.Event] = {}
        """Services: the task that serves it -> what ends it."""
        self._stopping = False
        """Whether the loop may end."""
        self._thread = threading.Thread(target=self._run_loop, name="iris-client", daemon=True)
        self._thread.start()
        disable_in_child(self)
        try:
            self._run(client.open())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close gracefully, which ends every block of this client. Idempotent. See `iris.Client.close`.

        Any thread may call it; calls that still run then raise Closed. If a handler of this client calls it, it does
        not wait. In the child of a fork it does nothing, because the client belongs to the parent process.
        """
        if self._unusable:
            return
        if threading.current_thread() is self._thread or IN_HANDLER.get() is self._loop:
            # The client is closed after this handler has ended.
            threading.Thread(target=self.close, name="iris-client-close").start()
            return
        with self._closing:
            if not self._unusable:
                try:
                    self._run(self._close())
                finally:
                    self._stop()

    async def _close(self) -> None:
        try:
            for leave in self._served.values():
                leave.set()
            if self._served:
                await asyncio.wait([*self._served])
        finally:
            await self._client.close()

    @overload
    def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: type[T], member: str | None = None, method: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: TypeForm[T], member: str | None = None, method: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, member: str | None = None, method: str | None = None,
    ) -> Any: ...  # fmt: skip
    def request(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, member: str | None = None, method: str | None = None,
    ) -> Any:  # fmt: skip
        """See `iris.Client.request`."""
        return self._run(
            self._client.request(
                cluster, payload, timeout=timeout, headers=headers, idempotent=idempotent, type=type, member=member,
                method=method,
            )
        )  # fmt: skip

    def push(
        self, cluster: str, payload: object, *, timeout: float = 5.0, headers: Headers | None = None,
        member: str | None = None, method: str | None = None,
    ) -> None:  # fmt: skip
        """See `iris.Client.push`."""
        self._run(
            self._client.push(
                cluster, payload, timeout=timeout, headers=headers, member=member, method=method
            )
        )

    def broadcast(
        self, cluster: str, payload: object, *, headers: Headers | None = None, scope: Scope = "federation"
    ) -> None:  # fmt: skip
        """See `iris.Client.broadcast`."""
        self._run(self._client.broadcast(cluster, payload, headers=headers, scope=scope))

    def publish(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop", count: bool = False
    ) -> int | None:  # fmt: skip
        """See `iris.Client.publish`."""
        return self._run(
            self._client.publish(topic, payload, headers=headers, when_full=when_full, count=count)
        )

    def audience(self, topic: str, *, timeout: float = 5.0) -> Audience:
        """See `iris.Client.audience`."""
        return self._run(self._client.audience(topic, timeout=timeout))

    def wait_for_subscribers(self, topic: str, count: int, *, timeout: float) -> int:
        """See `iris.Client.wait_for_subscribers`."""
        return self._run(self._client.wait_for_subscribers(topic, count, timeout=timeout))

    @contextlib.contextmanager
    def watch_losses(self, *, timeout: float = 5.0) -> Iterator[list[Loss]]:
        """See `iris.Client.watch_losses`."""
        watching = self._client.watch_losses(timeout=timeout)
        losses = self._run(watching.__aenter__())
        try:
            yield losses
        finally:
            self._end(watching.__aexit__(None, None, None))

    @functools.cached_property
    def streams(self) -> Streams:
        """Durable streams: create, append to, read and consume them. See `iris.Client.streams`."""
        return Streams(self._client.streams, self._run)

    @property
    def message_limit(self) -> int:
        """Largest payload that can be sent, in bytes."""
        return self._client.message_limit

    @property
    def losses(self) -> list[Loss]:
        """The latest losses, oldest first; see `iris.Client.losses`."""

        async def copied() -> list[Loss]:
            return list(self._client.losses)

        return self._run(copied())

    def stats(self) -> Stats:
        """See `iris.Client.stats`."""

        async def taken() -> Stats:
            return self._client.stats()

        return self._run(taken())

    def offer(
        self, topic: str, payload: object, *, headers: Headers | None = None, when_full: WhenFull = "drop"
    ) -> bool:  # fmt: skip
        """See `iris.Client.offer`."""

        async def offer() -> bool:
            return self._client.offer(topic, payload, headers=headers, when_full=when_full)

        return self._run(offer())

    def flush(self, *, timeout: float = 5.0) -> None:
        """See `iris.Client.flush`."""
        self._run(self._client.flush(timeout=timeout))

    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: type[T], in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> list[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: TypeForm[T], in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> list[Outcome[T]]: ...  # fmt: skip
    @overload
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> list[Outcome[Any]]: ...  # fmt: skip
    def request_many(
        self, cluster: str, payloads: Iterable[object], *, timeout: float, headers: Headers | None = None, idempotent: bool = False,
        type: Any = None, in_flight: int = IN_FLIGHT, member: str | None = None, method: str | None = None,
    ) -> list[Outcome[Any]]:  # fmt: skip
        """Return one `Outcome` for each payload, in the order of the payloads; see `iris.Client.request_many`."""

        async def collect() -> list[Outcome[Any]]:
            asking = self._client.request_many(
                cluster, payloads, timeout=timeout, headers=headers, idempotent=idempotent, type=type, in_flight=in_flight,
                member=member, method=method,
            )  # fmt: skip
            return sorted([outcome async for outcome in asking], key=lambda one: one.number)

        return self._run(collect())

    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: None = None, scope: Scope = "federation", method: str | None = None,
    ) -> Answers[Message]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: type[T], scope: Scope = "federation", method: str | None = None,
    ) -> Answers[T]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: TypeForm[T], scope: Scope = "federation", method: str | None = None,
    ) -> Answers[T]: ...  # fmt: skip
    @overload
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None,
        type: Any, scope: Scope = "federation", method: str | None = None,
    ) -> Answers[Any]: ...  # fmt: skip
    def survey(
        self, cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, type: Any = None,
        scope: Scope = "federation", method: str | None = None,
    ) -> Answers[Any]:  # fmt: skip
        """Return all answers, and which members did not give one; see `iris.Client.survey`."""

        async def collect() -> Answers[Any]:
            survey = self._client.survey(
                cluster, payload, timeout=timeout, headers=headers, type=type, scope=scope, method=method
            )  # fmt: skip
            answers = Answers([answer async for answer in survey])
            answers.answered, answers.failed, answers.missing = survey.answered, survey.failed, survey.missing  # fmt: skip
            answers.errors = survey.errors
            return answers

        return self._run(collect())

    @contextlib.contextmanager
    def subscribe(
        self, pattern: str, *, group: str | None = None, when_full: WhenQueueFull = "drop-new",
        limit_bytes: int = QUEUE_BYTES, on_loss: Callable[[Loss], object] | None = None,
    ) -> Iterator[Items[Message]]:  # fmt: skip
        """Subscribe, and iterate over the messages in the block. See `iris.Client.subscribe`.

        with client.subscribe("orders.>") as messages:
            for message in messages: ...

        `on_loss` is called on the client's thread.
        """

        async def start() -> Any:
            subscription = self._client.subscribe(
                pattern, group=group, when_full=when_full, limit_bytes=limit_bytes, on_loss=on_loss
            )  # fmt: skip
            return await subscription.__aenter__()

        subscription = self._run(start())
        try:
            yield Items(self, subscription)
        finally:
            self._end(subscription.close())

    @contextlib.contextmanager
    def tunnel(
        self, cluster: str, *, timeout: float, headers: Headers | None = None, member: str | None = None
    ) -> Iterator[Tunnel]:  # fmt: skip
        """See `iris.Client.tunnel`."""
        opening = self._client.open_tunnel(cluster, timeout=timeout, headers=headers, member=member)
        tunnel = self._run(opening)
        try:
            yield Tunnel(tunnel, self._run)
        except BaseException as err:
            self._end(tunnel.__aexit__(type(err), err, None))
            raise
        else:
            self._end(tunnel.close())

    @contextlib.contextmanager
    def serve(self, service: Service) -> Iterator[None]:
        """See `iris.Client.serve`.

        Handlers run on the client's thread, so a plain function that blocks stops them all. `sys.exit` in one of them
        fails its call only.
        """
        served = self._run(self._serve(service))
        try:
            yield
        finally:
            self._end(self._leave(served))
            if served.done() and not served.cancelled():  # in the child of a fork it never ends
                served.result()

    async def _serve(self, service: Service) -> asyncio.Task[None]:
        """Return the task that serves a service once it has joined.

        It is one task, because what the lifespan enters must often be left by the same task, in the same context.
        """
        joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()

        async def serve() -> None:
            async with self._client.serve(service):
                joined.set_result(None)
                await leave.wait()

        served = asyncio.create_task(serve(), name="iris-serve")
        self._served[served] = leave
        served.add_done_callback(self._served.pop)
        try:
            await asyncio.wait((served, joined), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            served.cancel()
            await asyncio.wait((served,))
            raise
        if not joined.done():
            await served  # raises why it could not join
        return served

    async def _leave(self, served: asyncio.Task[None]) -> None:
        if served in self._served:
            self._served[served].set()
            try:
                await asyncio.wait((served,))
            except asyncio.CancelledError:
                served.cancel()
                raise

    def members(self, cluster: str, *, timeout: float = 5.0) -> Members:
        """See `iris.Client.members`."""
        return self._run(self._client.members(cluster, timeout=timeout))

    def watch_members(self, cluster: str) -> Items[Members]:
        """See `iris.Client.watch_members`."""
        return Items(self, self._client.watch_members(cluster))

    def wait_for_members(self, cluster: str, count: int, *, timeout: float) -> Members:
        """See `iris.Client.wait_for_members`."""
        return self._run(self._client.wait_for_members(cluster, count, timeout=timeout))

    def describe(self, cluster: str, *, timeout: float = 5.0) -> PerMember[Description]:
        """See `iris.Client.describe`."""
        return self._run(self._client.describe(cluster, timeout=timeout))

    def ping(self, cluster: str, *, timeout: float = 5.0) -> PerMember[Ping]:
        """See `iris.Client.ping`."""
        return self._run(self._client.ping(cluster, timeout=timeout))

    def status(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """See `iris.Client.status`."""
        return self._run(self._client.status(timeout=timeout))

    def reload_keys(self, keyring: Keyring | None = None) -> None:
        """See `iris.Client.reload_keys`."""
        self._run(self._client.reload_keys(keyring))

    def call(self, work: Callable[[_client.Client], Coroutine[Any, Any, T]]) -> T:
        """Await `work(client)` on the client's thread and return its result.

        It makes every method of `iris.Client` available: `client.call(lambda c: c.audience("orders"))`.
        """
        return self._run(work(self._client))

    def start(
        self, work: Callable[[_client.Client], Coroutine[Any, Any, T]]
    ) -> concurrent.futures.Future[T]:
        """Start `work(client)` on the client's thread and return a future. Cancelling the future cancels the work."""
        future = self._submit(work(self._client))
        self._started.add(future)
        future.add_done_callback(self._started.discard)
        return future

    def _run_loop(self) -> None:
        """Run the event loop until `_stop`. What ends a loop, such as `sys.exit` in a handler, must not end this one:
        every call waits for it, and in a thread it would not end the program either."""
        while not self._stopping:
            with contextlib.suppress(*EXITS):  # its call has failed, and it is in the log
                self._loop.run_forever()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._unusable:
                raise Closed("this client was closed before the call had ended") from None
            raise
        except BaseException:
            if not future.done():  # after KeyboardInterrupt nobody waits for the result
                future.cancel()
            raise

    def _end(self, work: Coroutine[Any, Any, object]) -> None:
        """Run what ends a block, unless the client was closed, which has ended it."""
        with contextlib.suppress(Closed):
            self._run(work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start work for which this thread is going to wait."""
        if not self._unusable and threading.current_thread() is self._thread:
            work.close()
            raise Closed(
                "a handler called the blocking client on the client's own thread, which would wait for itself; "
                "make the handler a coroutine function and use iris.Client in it"
            )
        if not self._unusable and HANDLED and (until_us := handled_us()):
            work = carried_on(work, until_us)
        return self._submit(work)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._starting:
            if not self._unusable:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise Closed(f"this client {self._unusable}")

    def _forked(self) -> None:
        """Refuse to work in the child of a fork, where neither the thread nor the loop runs."""
        # Threads that held these locks are not in the child.
        self._starting, self._closing = threading.Lock(), threading.Lock()
        keep_in_child(self._served)
        if not self._unusable:
            self._unusable = _FORKED
            for future in self._started:
                concurrent.futures.Future.__init__(future)  # its lock may be held, too
                future.set_exception(Closed(f"this client {_FORKED}"))

    def _stop(self) -> None:
        with self._starting:
            self._unusable = "is closed; make another one with iris.blocking.connect()"
        finished: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(
            _settle(), self._loop
        )
        finished.result(timeout=5)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()


class Items(OneProcess, Iterator[T]):
    """What arrives one after another: iterate over it, or take one item at a time with `next`. For any thread.

    A `next` that is interrupted takes nothing: the one after it returns the item.
    """

    _next: concurrent.futures.Future[T] | None = None
    """The wait for the next item, if one was interrupted."""

    def __init__(self, client: Client, items: iterating.Items[T]) -> None:
        self._client = client
        self._items = items
        self._turn = threading.Lock()

    def __next__(self) -> T:
        return self.next()

    def next(self, *, timeout: float | None = None) -> T:
        """Return the next item, as `next(items)` does. Raises StopIteration at the end.

        Raises RequestTimeout if nothing arrives within `timeout` seconds. That takes and ends nothing: what arrives
        later is returned by the next call.
        """
        if (
            self._client._unusable is _FORKED
        ):  # before the lock, which may be held by a thread of the parent
            raise Closed(f"this client {_FORKED}")
        if timeout is None:
            with self._turn:
                return self._take(None)
        until_s = deadline(timeout)
        with contextlib.suppress(iterating.Late):
            if self._turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
                try:
                    return self._take(until_s)
                finally:
                    self._turn.release()
        raise iterating.late(self._items._of, timeout)

    def _take(self, until_s: float | None) -> T:
        """Return the next item. Raises Late after the monotonic time `until_s`."""
        while True:
            left_s = None if until_s is None else seconds_left(until_s)
            begun = self._next is not None
            try:
                if self._next is None:
                    self._next = self._client._begin(self._following(left_s))
            except Closed:
                if not self._client._unusable:
                    raise
                return self._left()
            following = self._next
            # An interrupted wait has another limit. A new one has this limit, and takes nothing after it.
            if begun and not concurrent.futures.wait((following,), left_s).done:
                raise iterating.Late
            try:
                item = following.result()
            except (StopAsyncIteration, concurrent.futures.CancelledError):
                self._next = None
                raise StopIteration from None
            except iterating.Late:
                self._next = None
                if until_s is not None and time.monotonic() >= until_s:
                    raise
            except Exception:  # an interrupt is none: then the next call waits for the same item
                self._next = None
                raise
            else:
                self._next = None
                return item

    def __del__(self) -> None:
        if self._next is not None and self._client._unusable is not _FORKED:
            self._next.cancel()

    async def _following(self, timeout: float | None) -> T:
        return await iterating.in_time(anext(self._items), timeout)

    def _left(self) -> T:
        """Return the next of the items that had arrived before the client was closed. Its loop has ended."""
        following = self._following(None)
        try:
            following.send(None)
        except StopIteration as end:
            item: T = end.value
            return item
        except StopAsyncIteration:
            raise StopIteration from None
        following.close()  # there is nothing to wait for
        raise StopIteration


class Answers(list[T]):
    """The answers to a survey, in the order in which they arrived. The attributes are those of `iris.Survey`."""

    def __init__(self, answers: Iterable[T]) -> None:
        super().__init__(answers)
        self.answered: list[str] = []
        """Ids of the members that answered."""
        self.failed: dict[str, str] = {}
        """Members that answered with an error: id -> text of the error."""
        self.errors: dict[str, RemoteError] = {}
        """The same errors with their codes and details: id -> RemoteError."""
        self.missing: list[str] = []
        """Ids of the members that were asked and did not answer in time."""


class Tunnel(OneProcess, Iterator[bytes]):
    """`iris.Tunnel` for threads. Each call blocks its thread until it is done."""

    def __init__(
        self, tunnel: _AsyncTunnel, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._tunnel = tunnel
        self._run = run

    def send(self, data: bytes | str) -> None:
        """See `iris.Tunnel.send`."""
        self._run(self._tunnel.send(data))

    def recv(self, *, limit_bytes: int = 64 << 20) -> bytes:
        """See `iris.Tunnel.recv`."""
        received: bytes = self._run(self._tunnel.recv(limit_bytes=limit_bytes))
        return received

    def __next__(self) -> bytes:
        return self.next()

    def next(self, *, timeout: float | None = None) -> bytes:
        """See `iris.Tunnel.next`. Raises StopIteration when the other side has finished."""
        try:
            message: bytes = self._run(self._tunnel.next(timeout=timeout))
        except StopAsyncIteration:
            raise StopIteration from None
        return message

    def finish(self) -> None:
        """See `iris.Tunnel.finish`."""
        self._run(self._tunnel.finish())

    def close(self) -> None:
        """See `iris.Tunnel.close`."""
        self._run(self._tunnel.close())


def _check_threads() -> None:
    """Raise ConfigError if threads are greenlets: the client's event loop would stop all of them, for ever."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        library = "gevent"
    elif eventlet is not None and eventlet.is_monkey_patched("thread"):
        library = "eventlet"
    else:
        return
    raise ConfigError(
        f"iris.blocking needs real threads, but {library} has patched the threads of this process; use it in a process "
        "that is not patched, such as a worker with threads (gunicorn --worker-class gthread)"
    )


async def _settle() -> None:
    """Return when all other tasks have ended. After 2 s they are cancelled, and after 4 s left alone."""
    for cancel in (False, True):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks if cancel else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)


def _new_loop() -> asyncio.AbstractEventLoop:
    if not standard_descriptors_are_open():
        # A socket can get the number of one, with which libuv would abort.
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
