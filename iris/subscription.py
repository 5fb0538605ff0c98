"""Subscriptions: receive messages of matching topics by callback or `async for`, through a queue bounded in bytes."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Self, get_args

from iris.awaiting import check_callback, finished, is_late
from iris.checks import check_whole
from iris.contexts import Contexts, Late
from iris.core.credit import MIN_QUEUE_BYTES, WhenQueueFull
from iris.core.interfaces import Loss
from iris.core.message import Message
from iris.deadlines import within
from iris.errors import Closed, ConfigError, IrisError, Overloaded
from iris.forks import FORKED, disable_in_child
from iris.handlers import ArgumentError, stopping
from iris.iterating import Items, Iteration
from iris.lanes import Lanes
from iris.logs import RAISED
from iris.losses import LossLog
from iris.misuse import AsyncOnly
from iris.one_process import OneProcess
from iris.runtime import Runtime
from iris.wire.names import check_filter, check_group, optional

MAX_CONCURRENCY: Final = 65_536
QUEUE_BYTES: Final = 64 << 20
"""Default of `limit_bytes`."""

CoroutineHandler = Callable[[Message], Awaitable[Any]]


class Subscription(OneProcess, AsyncOnly, Items[Message]):
    """A subscription to a topic filter, made by `Client.subscribe`.

    Use it as an async context manager and iterate over it with `async for`, or give `subscribe` a handler. It is
    registered from the start; `ready` waits until the relays know it. Several tasks may iterate over it: each message
    goes to one of them. To leave a group without a loss while a task iterates, call `close` in another task, and the
    iterator ends after the last message.

    The queue holds up to `limit_bytes` of messages that have not been handled. `when_full` says what happens then:

    * "drop-new" (default): new messages are dropped
    * "drop-old": the messages that have waited longest are dropped
    * "close": the subscription ends, and its iterator raises Overloaded
    * "wait": publishers that use `publish(..., when_full="wait")` wait until there is room. New messages of others are
      dropped, and so are those of a publisher that has waited for its `stall_s`, until half of its window is free

    Each loss is counted in `lost_messages`, reported to `on_loss`, and listed in the client's `losses` and log.

    A coroutine handler runs at most `concurrency` times at once, and once at a time for each publisher and topic, so
    that their messages are handled in order.
    """

    _right_use = "async with client.subscribe(...) as messages:"

    def __init__(
        self, runtime: Runtime, pattern: str, handler: Callable[[Message], object] | None, group: str | None,
        when_full: WhenQueueFull = "drop-new", limit_bytes: int = QUEUE_BYTES,
        on_loss: Callable[[Loss], object] | None = None, concurrency: int = 1,
    ) -> None:  # fmt: skip
        check_filter(pattern)
        group = optional(group, check_group)
        attachment = runtime.attached()
        check_callback("on_loss", on_loss)
        if when_full not in get_args(WhenQueueFull):
            raise ConfigError(
                f"when_full must be 'drop-new', 'drop-old', 'close' or 'wait', not {when_full!r}"
            )
        check_whole("limit_bytes", limit_bytes, 1)
        if when_full == "wait" and limit_bytes < MIN_QUEUE_BYTES:
            raise ConfigError(
                f"limit_bytes must be at least {MIN_QUEUE_BYTES} with when_full='wait', not {limit_bytes}"
            )
        self.filter = pattern
        self.group = group
        self.lost_messages = 0
        """Number of messages for this subscription that are known to be lost."""
        self._runtime = runtime
        self._contexts = Contexts()
        self._settled = False
        """Whether the relays linked to the local one know the subscription."""
        self._handler = handler
        self._coroutine = handler if inspect.iscoroutinefunction(handler) else None
        """The handler, if it is a coroutine function."""
        check_whole("concurrency", concurrency, 1, MAX_CONCURRENCY)
        if concurrency > 1 and self._coroutine is None:
            raise ConfigError(
                f"concurrency={concurrency} needs a handler that is a coroutine function; define it with `async def`"
            )
        self._concurrency = concurrency
        self._lanes = Lanes() if concurrency > 1 else None
        """The queue, if `concurrency` is above 1; `_queue` is not used then."""
        self._workers: dict[asyncio.Task[None], Iterator[Message]] = {}
        """Tasks that run the handler, with `_lanes`: task -> unhandled messages of its current bundle."""
        self._plain: type = bytes
        """What a plain handler returned last, so that the look at what it returns costs next to nothing."""
        self._begun: Late | None = None
        """What a plain handler returned for the message in front, until the task of the handler awaits it."""
        self._when_full = when_full
        self.limit_bytes = limit_bytes
        """Size of the queue in bytes."""
        self.waits = when_full == "wait"
        """Whether publishers should wait instead of sending what would be dropped."""
        self._held: dict[tuple[str, bytes], int] = {}
        """With `waits`: (topic, publisher) -> bytes queued."""
        self._on_loss = on_loss
        self._log = LossLog(runtime, "subscription", pattern, f"on_loss of {pattern}")
        self._queue: deque[tuple[list[Message], int]] = deque()
        self._queued_bytes = 0
        self._current: Iterator[Message] = iter(())
        """Unhandled messages of the bundle that was taken from `_queue` last."""
        self._reader: asyncio.Task[Any] | None = None
        """The task that iterated last, if it was one."""
        self._waiters: list[asyncio.Future[None]] = []
        self._worker: asyncio.Task[None] | None = None
        self._entered = False
        self.stopped: asyncio.Future[None] | None = None
        """The relay's answer to UNSUBSCRIBE, if it was sent."""
        self._ended = False
        self._error: IrisError | None = None
        self.deliver: Callable[[list[Message], int], None] = (
            self._enqueue if handler is None or self._coroutine else self._call
        )
        if attachment.pump is not None:
            attachment.pump.turn()
        disable_in_child(self)
        runtime.registry.add(self, attachment.session, attachment.guard)
        attachment.touch()

    # -- the user's side -------------------------------------------------------------------------------------

    async def ready(self) -> Self:
        """Wait until the local relay and those linked to it have registered the subscription, and return it.

        It waits at most a second for the linked relays. Raises the error with which the local relay refused.
        """
        await self.registered()
        if not self._settled:
            await self._runtime.settled()
            self._settled = True
        return self

    async def registered(self) -> None:
        """Wait until the local relay has registered the subscription; raises the error if it refused."""
        runtime = self._runtime
        timeout = runtime.config.connect_timeout_s
        await runtime.in_use(self.filter, timeout)
        await within(
            runtime.registry.ready(self),
            timeout,
            f"the relay did not register the subscription to {self.filter!r}",
        )

    async def close(self) -> None:
        """End the subscription. Nothing is delivered after it returns. Idempotent.

        The last subscription of a `group` in this client is delivered what was on its way to it, because no other
        member gets that.

        A coroutine handler may finish the queued messages within `config.drain_timeout_s`; the rest is dropped and
        reported as lost. If the handler itself calls `close`, it does not wait for that. An iterator yields the queued
        messages and then ends. What is queued when its loop or `async with` block is left is dropped; with a `group`
        it is reported as lost.
        """
        self.stop()
        try:
            await self._runtime.acknowledged(self.stopped)
        except BaseException:
            self._leave()
            self.give_up()
            raise
        self._leave()
        await self.finish()
        self._log.end()

    async def finish(self) -> None:
        """Wait at most `drain_timeout_s` until a coroutine handler has handled the queued messages; drop the rest."""
        tasks = self._tasks
        if not tasks or asyncio.current_task() in tasks:
            return
        bound_s = self._runtime.config.drain_timeout_s
        try:
            _, late = await asyncio.wait(tasks, timeout=bound_s)
        finally:
            self.give_up()
        if late:
            await asyncio.wait(late, timeout=bound_s)

    def give_up(self) -> None:
        """Cancel the tasks of a coroutine handler, and drop and report the messages it has not started on.

        Idempotent.
        """
        tasks = [task for task in self._tasks if not task.done()]
        rests = [list(rest) for rest in self._workers.values()]
        self._worker = None
        self._workers.clear()
        if not tasks:
            return
        self._ended = True
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        rests.append(list(self._current))
        while self._lanes is not None and (waiting := self._lanes.drop_oldest()) is not None:
            rests.append(waiting[0])
        for messages in (*rests, *(queued for queued, _ in self._queue)):
            if messages:
                self._drop(messages, "subscription closed")
        if self._begun is not None:  # its task has not begun
            self._begun.drop()
        self._queue.clear()
        self._held.clear()
        self._queued_bytes = 0
        self._log.end()

    def stop(self) -> None:
        """End the subscription without waiting for the relay. Queued messages are still delivered. Idempotent.

        In a group it ends when the relay has answered: what is on its way is still delivered.
        """
        runtime = self._runtime
        stopped = runtime.registry.remove(self, runtime.session)
        self.stopped = stopped or self.stopped
        if self.stopped is None or not self.group:
            self.end()
        runtime.touch()

    def _leave(self) -> None:
        """Accept nothing more, whether or not the relay has answered."""
        self._runtime.registry.left(self, self._runtime.session)

    def leave(self) -> None:
        """End the subscription without waiting for the relay, when the last iteration has ended."""
        self.stop()
        self._reader = None
        if self.stopped is None or self.stopped.done():
            self._drop_unread()
        else:
            self.stopped.add_done_callback(lambda _: self._drop_unread())
        self._log.end()

    def _drop_unread(self) -> None:
        """Drop what nobody iterates over. In a group no other member gets it, so it is reported."""
        if not self._ended or self._handler is not None or not self.group:
            return
        reader = self._reader
        if reader is not None and reader is not asyncio.current_task() and not reader.done():
            return
        rest = [list(self._current), *(messages for messages, _ in self._queue)]
        self._queue.clear()
        self._held.clear()
        self._queued_bytes = 0
        for messages in rest:
            if messages:
                self._drop(messages, "subscription closed")
        self._log.end()

    async def __aenter__(self) -> Self:
        self._entered = True
        try:
            return await self.ready()
        except BaseException:
            await self.close()  # do not register a refused filter again at every reconnect
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        self._drop_unread()

    @property
    def _of(self) -> str:
        return self.filter

    def __aiter__(self) -> Items[Message]:
        return self if self._entered else _Unentered(self)

    async def __anext__(self) -> Message:
        if not self._settled:
            await self.ready()
        while True:
            for message in self._current:
                return message
            if self._queue:
                if self.group:
                    self._reader = asyncio.current_task()
                messages, size = self._queue.popleft()
                self._handled(messages, size)
                self._current = iter(messages)
            elif self._error is not None:
                raise self._error
            elif self._ended:
                raise StopAsyncIteration
            else:
                if self.group:
                    self._reader = asyncio.current_task()
                await self._message()

    def runs_in(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task runs the handler."""
        return task in self._tasks

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        """Tasks that run the coroutine handler."""
        return [*self._workers] if self._worker is None else [self._worker]

    @property
    def queued_bytes(self) -> int:
        """Bytes that were received and not handled yet."""
        return self._queued_bytes

    # -- the session's side ----------------------------------------------------------------------------------

    def held(self, name: str, source: bytes) -> int:
        """Return the queued bytes of one publisher (`source`) and topic; 0 unless publishers wait."""
        return self._held.get((name, source), 0)

    def gap(self, loss: Loss) -> None:
        """Count and report messages that did not arrive."""
        self.lost_messages += loss.count or 0
        self._log.report(loss, self._on_loss)

    def end_log(self) -> None:
        """Log the losses that are not logged yet, because the client is closed."""
        self._log.end()

    def end(self, error: IrisError | None = None) -> None:
        """Accept nothing new. Iteration ends, or raises `error`, after the queued messages."""
        self._ended = True
        self._error = self._error or error
        self._wake()

    def _forked(self) -> None:
        """Deliver nothing in the child of a fork, because the parent does; iteration raises Closed."""
        self._ended = True
        self._error = Closed(f"the subscription to {self.filter!r} {FORKED}")
        self._queue.clear()
        self._waiters = []
        self._worker = None
        self._workers.clear()
        for _ in self._current:  # an iteration may be in the middle of it
            pass

    def _call(self, messages: list[Message], size: int) -> None:
        handler = self._handler
        assert handler is not None
        plain = self._plain
        rest = iter(messages)
        fresh, first = self._contexts.fresh, self._contexts.first
        while True:
            context = fresh()
            run = context.run
            try:
                for message in rest:
                    value = run(handler, message)
                    if value is not None and type(value) is not plain:
                        if is_late(value):
                            late = self._contexts.late(context, value)
                            self._begin(handler, late, [message, *rest], size)
                            return
                        plain = self._plain = type(value)
                    try:
                        if context != first:  # the handler has set a variable
                            break
                    except Exception:  # to a value that cannot be compared
                        break
                else:
                    return
            except RAISED as err:
                self._failed(err)

    def _begin(
        self, handler: Callable[[Message], object], begun: Late, messages: list[Message], size: int
    ) -> None:  # fmt: skip
        """Await what a plain handler returned for the first of `messages`. From now on it is a coroutine handler."""

        async def run(message: Message) -> object:
            return handler(message)

        self._coroutine, self._begun = run, begun
        self.deliver = self._enqueue
        self._put(messages, size)

    def _enqueue(self, messages: list[Message], size: int) -> None:
        if self._error is not None:
            self._drop(messages)  # it was full, and closed
        elif self._queued_bytes + size > self.limit_bytes and (self._queue or self._lanes):
            self._on_full(messages, size)
        else:
            self._put(messages, size)

    def _put(self, messages: list[Message], size: int) -> None:
        self._queued_bytes += size
        if self.waits:
            sender = (messages[0].name, messages[0].source)
            self._held[sender] = self._held.get(sender, 0) + size
        if self._lanes is not None:
            self._lanes.put(messages, size)
            assert self._coroutine is not None  # only coroutine handlers have lanes
            if self._lanes.ready and len(self._workers) < self._concurrency and not self._ended:
                task = self._contexts.start(
                    self._work_lanes(self._coroutine, self._lanes), f"iris-{self.filter}"
                )
                self._workers[task] = iter(())
                self._runtime.working.add(self)
                task.add_done_callback(self._worker_ended)
            return
        self._queue.append((messages, size))
        self._wake()
        if self._coroutine is not None and self._worker is None and not self._ended:
            self._worker = self._contexts.start(self._work(self._coroutine), f"iris-{self.filter}")
            self._runtime.working.add(self)
            self._worker.add_done_callback(self._worker_ended)

    def _on_full(self, messages: list[Message], size: int) -> None:
        if self._when_full == "drop-old":
            while self._queued_bytes + size > self.limit_bytes:
                oldest = self._oldest()
                if oldest is None:
                    break
                old, old_size = oldest
                self._handled(old, old_size)
                self._drop(old)
            self._put(messages, size)
        else:
            self._drop(messages)
            if self._when_full == "close" and not self._ended:
                self.end(
                    Overloaded(
                        self.filter,
                        f"the subscription was closed, because its queue of {self.limit_bytes} bytes was full (when_full='close')",
                    )
                )

    def _handled(self, messages: list[Message], size: int) -> None:
        """Free the room of a bundle that was handled or dropped."""
        self._queued_bytes -= size
        if self.waits:
            sender = (messages[0].name, messages[0].source)
            left = self._held.pop(sender, 0) - size
            if left > 0:
                self._held[sender] = left
            self._runtime.freed(*sender)

    def _oldest(self) -> tuple[list[Message], int] | None:
        """Remove the bundle that has waited longest and return its messages and size; None if the queue is empty."""
        if self._lanes is not None:
            return self._lanes.drop_oldest()
        return self._queue.popleft() if self._queue else None

    def _drop(self, messages: list[Message], cause: str = "slow subscriber") -> None:
        """Count and report dropped messages, which are of one publisher and topic."""
        first = messages[0]
        self._runtime.count_dropped(cause, len(messages))
        loss = Loss("publish", first.name, first.source, len(messages), cause)
        self.gap(loss)
        self._runtime.report_loss(loss)

    def _failed(self, error: BaseException) -> None:
        """Count and log an exception of the handler."""
        ran = not isinstance(error, ArgumentError)
        what = f"subscription {self.filter}"
        self._runtime.handler_failed(what, self.filter, self._handler, error, ran=ran)

    def _message(self) -> asyncio.Future[None]:
        """Return what is done at the next message, or at the end."""
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters:  # of other tasks, or cancelled: perhaps no message ever comes
            self._waiters = [one for one in self._waiters if not one.done()]
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _work(self, handler: CoroutineHandler) -> None:
        """Run a coroutine handler for one message after another."""
        contexts = self._contexts
        while not self._ended or self._queue:
            if not self._queue:
                if contexts.sets and contexts.changed():
                    self._worker = None  # now, so that the next bundle starts another
                    return
                await self._message()
                continue
            messages, size = self._queue.popleft()
            self._current = iter(messages)
            for message in self._current:
                try:
                    begun, self._begun = self._begun, None
                    if begun is not None:
                        await begun.finished()
                    elif contexts.sets:
                        await contexts.inside(handler, message)
                    else:
                        value = await handler(message)
                        if value is not None and is_late(value):
                            await finished(value)
                except RAISED as err:
                    if stopping():
                        raise
                    self._failed(err)
                if stopping():
                    return  # the handler ignored its cancellation
                if not contexts.sets:
                    contexts.sets = contexts.changed()
            self._handled(messages, size)

    async def _work_lanes(self, handler: CoroutineHandler, lanes: Lanes) -> None:
        """Run a coroutine handler for one bundle after another.

        Up to `concurrency` tasks do so, each for its own lane.
        """
        contexts = self._contexts
        task = asyncio.current_task()
        assert task is not None
        try:
            while (waiting := lanes.take()) is not None:
                rest = self._workers[task] = iter(waiting.messages)
                try:
                    for message in rest:
                        try:
                            if contexts.sets:
                                await contexts.inside(handler, message)
                            else:
                                value = await handler(message)
                                if value is not None and is_late(value):
                                    await finished(value)
                        except RAISED as err:
                            if stopping():
                                raise
                            self._failed(err)
                        if stopping():
                            return  # the handler ignored its cancellation
                        if not contexts.sets:
                            contexts.sets = contexts.changed()
                finally:
                    self._handled(waiting.messages, waiting.size)
                    lanes.done(waiting)
        finally:
            self._workers.pop(task, None)  # now, so that a new bundle starts another task

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        self._workers.pop(task, None)
        if not self._workers and self._worker in (None, task):
            self._runtime.working.discard(self)


class _Unentered(Iteration[Message]):
    """An iteration over a subscription that no block closes: its end closes the subscription."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    @property
    def _of(self) -> str:
        return self._subscription.filter

    async def __anext__(self) -> Message:
        self._begun()
        try:
            return await self._subscription.__anext__()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise

    async def aclose(self) -> None:
        """End the iteration and the subscription. Idempotent."""
        self._end()
        await self._subscription.close()

    def _release(self) -> None:
        self._subscription.leave()
