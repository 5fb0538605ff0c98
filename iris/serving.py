"""A service that is being served: its member, its queues and workers, and the one answer of each delivery."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from iris.core.bundle import Headers
from iris.core.interfaces import Delivery, Lost
from iris.core.message import MEMBER_HEADER, Message
from iris.core.tunnel import TunnelEnd
from iris.deadlines import within
from iris.errors import ConfigError, DecodeError
from iris.handlers import Deferred, Handler, Request, encode_reply, stopping
from iris.losses import LossLog
from iris.runtime import Runtime
from iris.service import Service
from iris.subscription import Subscription
from iris.tunnel import EndOfTunnel, Tunnel
from iris.wire.kinds import Kind, Refusal

log = logging.getLogger("iris.service")  # programs know it by this name


class _Inbox:
    """Deliveries of one kind that wait for a handler, and the workers that run them."""

    __slots__ = ("handed", "handler", "idle", "queue", "queued_bytes", "workers")

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.queue: deque[Delivery] = deque()
        self.queued_bytes = 0
        self.handed: set[Delivery] = set()
        """Given to a worker that has not started on it."""
        self.idle: list[asyncio.Future[Delivery]] = []
        self.workers: set[asyncio.Task[None]] = set()


class ServiceBinding:
    """A service that is being served: its member, its queues, its workers. Outlives reconnects."""

    def __init__(self, runtime: Runtime, service: Service) -> None:
        self.service = service
        self.number = next(_numbers)
        self.member = 0
        self.member_id = ""
        self.key_ids: set[bytes] = set()
        """Under which it joined, at one time or another."""
        self.going = False
        """It takes nothing new as soon as the relay knows."""
        self.leaving = False
        """It takes nothing any more."""
        self.running = 0
        self._runtime = runtime
        self._attachment = runtime.attached()
        self.loop = asyncio.get_running_loop()
        self._limits = service.limits
        self._inboxes = {
            int(k): _Inbox(h)
            for k, h in service.handlers.items()
            if k in _ANSWERED or k == Kind.PUSH
        }
        self._casts: deque[tuple[list[Message], int]] = deque()
        self._cast_bytes = 0
        self._cast_worker: asyncio.Task[None] | None = None
        self._tunnels: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        self._stop_by_s: float | None = None
        """It was stopped, and waits no longer than this for its tasks."""
        self._broadcast_handler = service.handlers.get(Kind.BROADCAST)
        self._log = LossLog(runtime, "service", service.name, f"gap handler of {service.name}")

    def joined(self, member: int, member_id: str, key_ids: Iterable[bytes]) -> None:
        """It is this member from now on; a reconnect makes it another."""
        self.member = member
        self.member_id = member_id
        self.key_ids.update(key_ids)

    # -- what the session calls ------------------------------------------------------------------------------

    @property
    def misses_casts(self) -> bool:
        """Whether a broadcast that does not come is a loss: it has a handler, or hears of gaps."""
        return self._broadcast_handler is not None or self.service.gap_handler is not None

    def admit(self, kind: int, size: int) -> Refusal | None:
        """Refuse before opening what there is no room for."""
        if self.leaving:
            return Refusal.LEAVING
        if kind == Kind.TUNNEL_OPEN:
            if kind not in self.service.handlers:
                return Refusal.UNREADABLE
            return Refusal.FULL if len(self._tunnels) >= self._limits.tunnels else None
        inbox = self._inboxes.get(kind)
        if inbox is None:
            return Refusal.UNREADABLE
        if inbox.queued_bytes and inbox.queued_bytes + size > self._limits.queue_bytes:
            return Refusal.FULL
        return None

    def take(self, delivery: Delivery) -> None:
        """Run a request, push or survey: now if its handler is a plain function, else within the concurrency limit."""
        inbox = self._inboxes[delivery.flow.kind]
        self.running += 1
        delivery.session.running += 1
        handler = inbox.handler
        if not handler.is_coroutine:
            answer = None
            try:
                if handler.wanted is Request:
                    answer = _Answer(self, delivery)
                    value = handler.function(handler.argument(delivery, answer.defer))
                else:
                    value = handler.function(handler.convert(delivery.message))
            except (Exception, asyncio.CancelledError) as err:
                (answer or _Answer(self, delivery)).failed(err)
            else:
                if answer is None:
                    self.finish_one(delivery, value)
                else:
                    answer.returned(value)
            return
        inbox.queued_bytes += delivery.size
        if inbox.idle:
            inbox.handed.add(delivery)
            inbox.idle.pop().set_result(delivery)
        elif len(inbox.workers) < self._limits.concurrency:
            inbox.handed.add(delivery)
            task = self.loop.create_task(
                self._work(inbox, delivery), name=f"iris-{self.service.name}"
            )
            inbox.workers.add(task)
            task.add_done_callback(inbox.workers.discard)
        else:
            inbox.queue.append(delivery)

    def broadcast(self, messages: list[Message], size: int) -> None:
        """Run broadcasts in order; a coroutine handler has one queue, which drops what comes when it is full."""
        handler = self._broadcast_handler
        if handler is None:
            return
        if self._stop_by_s is not None:
            self._casts_lost(messages, "member stopped")
        elif not handler.is_coroutine:
            for message in messages:
                self._cast(handler, message)
        elif self._casts and self._cast_bytes + size > self._limits.queue_bytes:
            self._casts_lost(messages, "slow member")
        else:
            self._casts.append((messages, size))
            self._cast_bytes += size
            self.running += 1
            if self._cast_worker is None:
                self._cast_worker = self.loop.create_task(
                    self._work_casts(handler), name=f"iris-{self.service.name}-casts"
                )

    def tunnel(self, end: TunnelEnd) -> None:
        """Run a tunnel handler."""
        self.running += 1
        tunnel = Tunnel(end, self._attachment.touch, self._attachment.writable)
        task = self.loop.create_task(
            self._work_tunnel(tunnel), name=f"iris-{self.service.name}-tunnel"
        )
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)

    def gap(self, gap: Lost) -> None:
        """Some broadcasts did not come."""
        self._log.tell(gap, self.service.gap_handler)

    # -- running ---------------------------------------------------------------------------------------------

    def _cast(self, handler: Handler, message: Message) -> None:
        try:
            handler.function(handler.convert(message))
        except (Exception, asyncio.CancelledError):
            self._runtime.handler_failed(f"broadcast handler of {self.service.name}")

    async def _work_casts(self, handler: Handler) -> None:
        try:
            while self._casts:
                messages, size = self._casts.popleft()
                for message in messages:
                    try:
                        await handler.function(handler.convert(message))
                    except (Exception, asyncio.CancelledError):
                        if stopping():
                            raise
                        self._runtime.handler_failed(f"broadcast handler of {self.service.name}")
                    if stopping():
                        return
                self._cast_bytes -= size
                self.done()
        finally:
            self._cast_worker = None

    async def _work(self, inbox: _Inbox, delivery: Delivery) -> None:
        handler = inbox.handler
        while True:
            inbox.handed.discard(delivery)
            answer = _Answer(self, delivery)
            try:
                if delivery.deadline_us and delivery.deadline_us < time.monotonic_ns() // 1000:
                    self._expired(delivery)
                else:
                    value = await handler.function(handler.argument(delivery, answer.defer))
                    answer.returned(value)
            except (Exception, asyncio.CancelledError) as err:
                if stopping():
                    answer.failed(RuntimeError("the member stopped before it answered"))
                    raise
                answer.failed(err)
            finally:
                inbox.queued_bytes -= delivery.size
            if self._stop_by_s is not None:
                return  # a handler that took no notice of its cancellation; stop() answers the rest
            if inbox.queue:
                delivery = inbox.queue.popleft()
            elif self.leaving:
                return
            else:
                waiter: asyncio.Future[Delivery] = self.loop.create_future()
                inbox.idle.append(waiter)
                delivery = await waiter

    async def _work_tunnel(self, tunnel: Tunnel) -> None:
        handler = self.service.handlers[Kind.TUNNEL_OPEN]
        try:
            async with tunnel:
                try:
                    await handler.function(tunnel)
                except EndOfTunnel:
                    return
        except Exception:
            self._runtime.handler_failed(f"tunnel handler of {self.service.name}")
        finally:
            self.done()

    def done(self) -> None:
        """One thing less is running."""
        self.running -= 1
        if self.running == 0:
            self._quiet.set()

    def leave(self) -> Coroutine[Any, Any, None]:
        """Tell the relay, at once, that the member takes nothing new; await the end of what it accepted."""
        runtime = self._runtime
        told = runtime.registry.leave(runtime.session, self)
        runtime.touch()
        return self._leave(told)

    async def _leave(self, told: list[asyncio.Future[None]]) -> None:
        """Take what comes until the relay knows that we left, and finish it."""
        for done in told:
            await self._runtime.told(done)
        self.leaving = True
        # Bounded, because an idle tunnel may stay for ever: stop() ends what is left.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.config.drain_timeout_s):
                await self.finish()

    async def finish(self) -> None:
        """Return when everything accepted has run. The member has left by now, so nothing new comes."""
        while self.running:
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self) -> None:
        """Cancel what still runs, answer what did not start, and wait for the former to end, within bounds. Idempotent."""
        self.leaving = True
        if self._stop_by_s is None:
            self._stop_by_s = self.loop.time() + self._runtime.config.drain_timeout_s
        tasks = [
            *self._tunnels,
            *(task for inbox in self._inboxes.values() for task in inbox.workers),
        ]
        if self._cast_worker is not None:
            tasks.append(self._cast_worker)
        for task in tasks:
            task.cancel()
        self._give_up_queued()
        if tasks:
            left_s = max(0.0, self._stop_by_s - self.loop.time())
            _, stuck = await asyncio.wait(tasks, timeout=left_s)
            if stuck:
                log.warning("service.stuck", extra={"fields": {"handlers": len(stuck)}})
        self._log.end()

    def _give_up_queued(self) -> None:
        """No task takes these any more: those that have them were cancelled before they started on them."""
        for inbox in self._inboxes.values():
            given_up = [*inbox.handed, *inbox.queue]
            inbox.handed.clear()
            inbox.queue.clear()
            for delivery in given_up:
                inbox.queued_bytes -= delivery.size
                self.end_with(delivery, "the member stopped before it started", may_have_run=False)
            if given_up:
                self._runtime.count_dropped("member stopped", len(given_up))
        while self._casts:
            messages, size = self._casts.popleft()
            self._cast_bytes -= size
            self._casts_lost(messages, "member stopped")
            self.done()

    def _casts_lost(self, messages: list[Message], cause: str) -> None:
        first = messages[0]
        self._runtime.count_dropped(cause, len(messages))
        lost = Lost("broadcast", first.name, first.source, len(messages), cause)
        self.gap(lost)
        self._runtime.tell(lost)

    def finish_one(self, delivery: Delivery, value: object) -> None:
        """A handler returned `value`: answer with it, or give a push's credit back."""
        kind = delivery.flow.kind
        if kind == Kind.PUSH:
            delivery.finish()
        else:
            headers: Headers | None = None
            packed = False
            if type(value) is bytes:
                payload = value
            else:
                try:
                    payload, headers, packed = encode_reply(value)
                except Exception as err:
                    self.end_with(delivery, str(err), may_have_run=True)
                    return
            limit = delivery.session.message_limit
            if len(payload) > limit:
                self.end_with(
                    delivery, f"a reply of {len(payload)} bytes is over {limit}", may_have_run=True
                )
                return
            if kind == Kind.SURVEY:
                headers = {**(headers or {}), MEMBER_HEADER: _member_id(delivery)}
            delivery.reply(payload, headers, packed)
        self._ended(delivery)

    def end_with(self, delivery: Delivery, detail: str, *, may_have_run: bool) -> None:
        """Answer with an error; of a push its sender hears if it did not run."""
        if delivery.flow.kind == Kind.PUSH:
            delivery.finish(started=may_have_run)
        else:
            delivery.fault(detail, may_have_run=may_have_run, member=_member_id(delivery))
        self._ended(delivery)

    def _ended(self, delivery: Delivery) -> None:
        delivery.session.running -= 1
        self._attachment.touch()
        self.running -= 1
        if self.running == 0:
            self._quiet.set()

    def _expired(self, delivery: Delivery) -> None:
        """What waited here for longer than its sender allowed is not run."""
        self._runtime.count_dropped("expired", 1)
        detail = "the deadline had passed in the member's queue"
        self.end_with(delivery, detail, may_have_run=False)

    def failed(self) -> None:
        """A handler raised: logged once in a while, counted always."""
        self._runtime.handler_failed(f"handler of {self.service.name}")


class _Answer:
    """The one answer of one delivery."""

    __slots__ = ("_binding", "_deferred", "_delivery")

    def __init__(self, binding: ServiceBinding, delivery: Delivery) -> None:
        self._binding = binding
        self._delivery = delivery
        self._deferred = False

    def defer(self) -> Deferred:
        if self._deferred or self._delivery.flow.kind == Kind.PUSH:
            raise ConfigError("a push takes no answer, and a request only one")
        self._deferred = True
        return Deferred(self._finish, self._binding.loop)

    def returned(self, value: object) -> None:
        if not self._deferred:
            self._finish(value, None)

    def failed(self, err: BaseException) -> None:
        if self._deferred:
            self._binding.failed()  # the deferred reply still answers
            return
        if not isinstance(err, DecodeError):
            self._binding.failed()
        try:
            detail = str(err) if isinstance(err, DecodeError) else f"{type(err).__name__}: {err}"
        except Exception as broken:  # whatever the __str__ of a user's exception raises
            detail = f"{type(err).__name__}, whose text raised {type(broken).__name__}"
        self._finish(None, detail, err)

    def _finish(self, value: object, detail: str | None, err: BaseException | None = None) -> None:
        if detail is None:
            self._binding.finish_one(self._delivery, value)
        else:
            may_have_run = not isinstance(err, DecodeError)
            self._binding.end_with(self._delivery, detail, may_have_run=may_have_run)


def _member_id(delivery: Delivery) -> str:
    """Return which member of ours this was handed to: after a move to another session the binding is another."""
    return f"{delivery.session.relay_id.hex()}.{delivery.flow.member}"


_numbers = itertools.count(1)
_ANSWERED = frozenset({Kind.REQUEST, Kind.SURVEY})


@contextlib.asynccontextmanager
async def serving(runtime: Runtime, service: Service) -> AsyncIterator[ServiceBinding]:
    """Be a member while the block runs: see `Client.serve`."""
    attachment = runtime.attached()
    binding = ServiceBinding(runtime, service)
    _, session = await runtime.ready(service.name, runtime.config.connect_timeout_s)
    runtime.registry.services.append(binding)
    subscriptions: list[Subscription] = []
    try:
        for pattern, group, handler, concurrency, when_full in service.topics:
            callback, on_gap = handler.as_callback(), service.gap_handler
            subscriptions.append(
                Subscription(
                    runtime,
                    pattern,
                    callback,
                    group,
                    on_gap=on_gap,
                    concurrency=concurrency,
                    when_full=when_full,
                )
            )
        if service.handlers:
            joined = runtime.registry.join(session, binding)
            attachment.touch()
            await within(joined, runtime.config.connect_timeout_s, "the relay did not answer JOIN")
        for subscription in subscriptions:
            await subscription.registered()
        await runtime.settled()
        yield binding
    finally:
        # All of it is said before the first await: who is cancelled here leaves as well.
        leaving = binding.leave()
        for subscription in subscriptions:
            subscription.stop()
        try:
            closing = [subscription.close() for subscription in subscriptions]
            await asyncio.gather(*closing, leaving)
        finally:
            await binding.stop()
            runtime.registry.forget(binding)
