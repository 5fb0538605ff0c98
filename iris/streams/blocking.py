"""Durable streams for threads without an event loop: `iris.blocking.Client.streams`.

Each object here stands for the object of the same name in `iris.streams`, and runs its methods on the client's thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from iris import streams as asynchronous
from iris.deadlines import deadline, seconds_left
from iris.errors import Closed
from iris.iterating import Late, in_time, late
from iris.one_process import OneProcess
from iris.streams.records import StreamGap, StreamMessage

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
W = TypeVar("W")
Source = TypeVar("Source", bound="asynchronous.Reader | asynchronous.Consumer")


class Runner(Protocol):
    """Runs a coroutine on the client's thread, and returns its result or raises its exception."""

    def __call__(self, work: Coroutine[Any, Any, R], /) -> R: ...


class _Proxy(OneProcess, Generic[T_co]):
    """An object on the client's thread, and the way to run its methods there."""

    def __init__(self, original: T_co, run: Runner) -> None:
        self._original = original
        self._run = run


def _waiting(
    method: Callable[Concatenate[T, P], Awaitable[R]],
) -> Callable[Concatenate[_Proxy[T], P], R]:
    """Return a method that runs the coroutine function `method` and waits for its result."""

    @functools.wraps(method)
    def call(self: _Proxy[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> R:
            return await method(self._original, *args, **kwargs)

        return self._run(work())

    return call


def _calling(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[_Proxy[T], P], R]:
    """Return a method that calls the plain function `method` on the client's thread."""

    @functools.wraps(method)
    def call(self: _Proxy[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> R:
            return method(self._original, *args, **kwargs)

        return self._run(work())

    return call


def _ending(method: Callable[[T], Awaitable[None] | None]) -> Callable[[_Proxy[T]], None]:
    """Return a method that runs `method` on the client's thread, unless the client was closed, and it with that."""

    @functools.wraps(method)
    def call(self: _Proxy[T], /) -> None:
        async def work() -> None:
            ending = method(self._original)
            if ending is not None:
                await ending

        with contextlib.suppress(Closed):
            self._run(work())

    return call


def _wrapping(
    method: Callable[Concatenate[T, P], R], wrapper: Callable[[R, Runner], W]
) -> Callable[Concatenate[_Proxy[T], P], W]:
    """Return a method that calls `method` on the client's thread, and wraps the object that it returns."""
    original = _calling(method)

    @functools.wraps(method)
    def call(self: _Proxy[T], /, *args: P.args, **kwargs: P.kwargs) -> W:
        return wrapper(original(self, *args, **kwargs), self._run)

    return call


class _Messages(_Proxy[Source], Iterator[StreamMessage]):
    """Iterates over the messages of a reader or consumer, which it gets in batches. `close` ends the iteration."""

    def __init__(self, original: Source, run: Runner) -> None:
        super().__init__(original, run)
        self._closed = self._stopped = False

    def __next__(self) -> StreamMessage:
        return self.next()

    def next(self, *, timeout: float | None = None) -> StreamMessage:
        """Return the next message, as `next(messages)` does. Raises StopIteration at the end.

        Raises RequestTimeout if none arrives within `timeout` seconds. That takes and ends nothing.
        """
        until_s = None if timeout is None else deadline(timeout)
        ready = self._original._ready
        while not self._stopped:
            with contextlib.suppress(IndexError):
                return ready.popleft()
            left_s = None if until_s is None else seconds_left(until_s)
            try:
                self._run(self._filled(left_s))
            except Late:
                assert timeout is not None
                raise late(self._original._of, timeout) from None
            except StopAsyncIteration:
                break
            except (Closed, concurrent.futures.CancelledError):
                if self._closed:
                    break
                raise
        raise StopIteration

    async def _filled(self, timeout: float | None) -> None:
        await in_time(self._original._fill(), timeout)

    def batch(self) -> list[StreamMessage]:
        """Return the next messages, at least one, without those that the iteration has already taken.

        Raises as the original does; StopAsyncIteration at the end.
        """
        return self._run(self._original.batch())

    def batches(self) -> Batches:
        """Iterate over lists of messages. This is faster than single messages."""
        return Batches(self)

    def _next_batch(self, timeout: float | None) -> list[StreamMessage]:
        """Return the next messages, within `timeout` seconds. Raises StopIteration at the end, RequestTimeout."""
        try:
            return self._run(self._original.batches().next(timeout=timeout))
        except StopAsyncIteration:
            pass
        except (Closed, concurrent.futures.CancelledError):
            if not self._closed:
                raise
        raise StopIteration

    @property
    def gaps(self) -> list[StreamGap]:
        """The latest 1,000 reports of missing messages, oldest first."""

        async def copied() -> list[StreamGap]:
            return list(self._original.gaps)

        return self._run(copied())

    def close(self) -> None:
        """Stop, also a thread that is waiting for messages. Idempotent; may be called from any thread.

        A consumer's messages that are not settled go to other workers.
        """
        self._closed = True
        with contextlib.suppress(Closed):  # the client was closed first, and everything with it
            self._run(self._original.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batches(OneProcess, Iterator[list[StreamMessage]]):
    """Iterates over the batches of a reader or consumer. For any thread."""

    def __init__(self, messages: _Messages[Any]) -> None:
        self._messages = messages

    def __next__(self) -> list[StreamMessage]:
        return self._messages._next_batch(None)

    def next(self, *, timeout: float | None = None) -> list[StreamMessage]:
        """Return the next messages, at least one. Raises StopIteration at the end.

        Raises RequestTimeout if none arrives within `timeout` seconds. That takes and ends nothing.
        """
        return self._messages._next_batch(timeout)


class Reader(_Messages[asynchronous.Reader]):
    """`for message in client.streams.read("orders")`; see `iris.streams.Reader`. For any thread."""

    @property
    def offset(self) -> int:
        """The offset after the last message delivered; -1 until the stream is found."""
        return self._original.offset

    @property
    def offsets(self) -> dict[int, int]:
        """Partition -> the offset after the last message delivered; -1 until it is found. A `start` for `read`."""

        async def copied() -> dict[int, int]:
            return self._original.offsets

        return self._run(copied())

    @property
    def missing(self) -> dict[int, Exception]:
        """Partitions that cannot be read now -> why. The reader goes on with the others, and tries these again."""
        return self._original.missing

    @property
    def high_water(self) -> int:
        """The end of the stream as of the last answer."""
        return self._original.high_water


class Consumer(_Messages[asynchronous.Consumer]):
    """`with client.streams.consumer("orders", "invoices") as work`; see `iris.streams.Consumer`.

    Several threads may take messages of one worker: each message goes to one of them. Any thread may settle a message.
    """

    def __init__(self, original: asynchronous.Consumer, run: Runner) -> None:
        super().__init__(original, run)
        original._settler.bind(self)  # `message.ack()` is for any thread, as `work.ack(message)`

    ack = _calling(asynchronous.Consumer.ack)
    ack_through = _calling(asynchronous.Consumer.ack_through)
    nack = _calling(asynchronous.Consumer.nack)
    touch = _calling(asynchronous.Consumer.touch)
    flush = _waiting(asynchronous.Consumer.flush)

    def __exit__(self, *raised: object) -> None:
        self._closed = True
        failed = isinstance(raised[1], Exception)
        with contextlib.suppress(Closed):  # the client was closed first, and everything with it
            self._run(self._original._close(failed=failed))

    def stop(self) -> None:
        """Deliver no further message, so that the loop ends; see `iris.streams.Consumer.stop`. For any thread."""
        self._stopped = True
        with contextlib.suppress(Closed):  # the client was closed first
            self._run(_stop(self._original))

    @property
    def lag(self) -> int:
        """Messages not settled yet, as of the last delivery."""
        return self._original.lag

    @property
    def active(self) -> bool:
        """Whether this worker receives messages; see `iris.streams.Consumer.active`."""
        return self._original.active

    @property
    def missing(self) -> dict[int, Exception]:
        """Partitions whose store is away -> why. The worker goes on with the others, and tries these again."""
        return self._original.missing


async def _stop(consumer: asynchronous.Consumer) -> None:
    consumer.stop()


class Staging(_Proxy[asynchronous.Staging]):
    """An attempt at a writer's batch; see `iris.streams.Staging`. Use it from one thread."""

    append = _waiting(asynchronous.Staging.append)
    append_many = _waiting(asynchronous.Staging.append_many)
    finish = _waiting(asynchronous.Staging.finish)
    close = _ending(asynchronous.Staging.close)

    @property
    def attempt(self) -> str:
        """The attempt's id, 32 hex digits; pass it to `discard` if the attempt failed."""
        return self._original.attempt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(
            Closed
        ):  # the client was closed first, or it is the child of a fork
            self.close()


class Mirror(_Proxy[asynchronous.Mirror]):
    """A mirror of a stream; see `iris.streams.Mirror`. `run` takes as long as the mirror copies."""

    run = _waiting(asynchronous.Mirror.run)
    close = _ending(asynchronous.Mirror.close)

    @property
    def lag(self) -> int:
        """See `iris.streams.Mirror`."""
        return self._original.lag

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(
            Closed
        ):  # the client was closed first, or it is the child of a fork
            self.close()


class Streams(_Proxy[asynchronous.Streams]):
    """The streams of a client's clusters and topics; see `iris.Client.streams`."""

    create = _waiting(asynchronous.Streams.create)
    describe = _waiting(asynchronous.Streams.describe)
    partitions = _waiting(asynchronous.Streams.partitions)
    list = _waiting(asynchronous.Streams.list)
    stores = _waiting(asynchronous.Streams.stores)
    change = _waiting(asynchronous.Streams.change)
    pause = _waiting(asynchronous.Streams.pause)
    resume = _waiting(asynchronous.Streams.resume)
    delete = _waiting(asynchronous.Streams.delete)
    move = _waiting(asynchronous.Streams.move)
    balance = _waiting(asynchronous.Streams.balance)
    share_keys = _waiting(asynchronous.Streams.share_keys)
    append = _waiting(asynchronous.Streams.append)
    append_many = _waiting(asynchronous.Streams.append_many)
    commit = _waiting(asynchronous.Streams.commit)
    discard = _waiting(asynchronous.Streams.discard)
    find = _waiting(asynchronous.Streams.find)
    fetch = _waiting(asynchronous.Streams.fetch)
    consumers = _waiting(asynchronous.Streams.consumers)
    delete_consumer = _waiting(asynchronous.Streams.delete_consumer)
    change_consumer = _waiting(asynchronous.Streams.change_consumer)
    pause_consumer = _waiting(asynchronous.Streams.pause_consumer)
    resume_consumer = _waiting(asynchronous.Streams.resume_consumer)
    handover_consumer = _waiting(asynchronous.Streams.handover_consumer)
    dead_letters = _waiting(asynchronous.Streams.dead_letters)
    redrive = _waiting(asynchronous.Streams.redrive)
    promote = _waiting(asynchronous.Streams.promote)
    handover = _waiting(asynchronous.Streams.handover)
    read = _wrapping(asynchronous.Streams.read, Reader)
    consumer = _wrapping(asynchronous.Streams.consumer, Consumer)
    mirror = _wrapping(asynchronous.Streams.mirror, Mirror)
    stage = _wrapping(asynchronous.Streams.stage, Staging)
