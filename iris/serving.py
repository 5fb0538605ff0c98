"""Runs a service: its member, its queues and workers, and exactly one answer for each delivery."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from iris.awaiting import finished, is_late
from iris.broadcasts import Broadcasts
from iris.cancelling import Cancelling
from iris.contexts import Contexts
from iris.core import faults
from iris.core.bundle import Headers
from iris.core.interfaces import Delivery, Loss
from iris.core.message import MEMBER_HEADER, Message
from iris.core.tunnel import TunnelEnd
from iris.deadlines import HANDLED
from iris.describing import DESCRIBE, PING, Description, describe_handlers, library_version
from iris.errors import ConfigError
from iris.handlers import ArgumentError, Deferred, Expired, Handler, Request, encode_reply, stopping
from iris.inbox import Inbox
from iris.logs import EXITS, RAISED, error_text, logger
from iris.loop_watch import times_held
from iris.losses import LossLog
from iris.methods import Methods, no_method
from iris.nested import IN_HANDLER
from iris.one_process import OneProcess
from iris.parameters import Provided
from iris.program import host_name
from iris.runtime import Runtime
from iris.service import Service
from iris.stats import dropped_messages
from iris.tally import TIMED_EVERY, Tally
from iris.tunnel import EndOfTunnel, Tunnel
from iris.wire.kinds import PUSH, SURVEY, TUNNEL_OPEN, Kind, Refusal

ROUNDING_US: Final = 5_000
"""How much too early an error may report that a deadline has passed, because times are sent in milliseconds."""

log = logger("iris.service")  # the documented name of this logger


class ServiceBinding(OneProcess):
    """A service while it is served: its member, queues and workers. It stays the same across reconnects."""

    def __init__(self, runtime: Runtime, service: Service, provided: Provided) -> None:
        """Raises ConfigError if nothing that is `provided` fits a parameter of a handler."""
        self.service = service
        self.number = next(_numbers)
        self.member = 0
        self.member_id = ""
        self.key_ids: set[bytes] = set()
        """Key ids under which it has joined, in this session or an earlier one."""
        self.leaving = False
        """Whether LEAVE was sent. What was dispatched before the relay received it is still accepted."""
        self.left = False
        """Whether everything new is refused."""
        self.running = 0
        """Deliveries, bundles of broadcasts and tunnels that are queued or running."""
        self._runtime = runtime
        self._attachment = runtime.attached()
        self.loop = asyncio.get_running_loop()
        self._contexts = Contexts(nested=True)
        self._limits = service.limits
        self._provided = provided
        self._served_since_s = time.monotonic()
        handlers = {
            kind: handler.resolved(provided, has_message=kind != Kind.TUNNEL_OPEN)
            for kind, handler in service.handlers.items()
        }
        self._inboxes = {
            int(k): Inbox(
                h,
                answered=k in _ANSWERED,
                cancelling=Cancelling(service.handlers[k]) if service.handlers[k].cancels else None,
            )
            for k, h in handlers.items()
            if k in _ANSWERED or k == Kind.PUSH
        }
        self._broadcasts = Broadcasts(
            service.name, handlers.get(Kind.BROADCAST), self._limits.queue_bytes, self._contexts,
            began=self._began, done=self.done, failed=self._failed, dropped=self._drop_casts,
        )  # fmt: skip
        self.broadcast = self._broadcasts.run
        self._tunnels: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        """Set when `running` becomes 0."""
        self._stop_by_s: float | None = None
        """Set by `stop`: the loop time until which it waits for cancelled tasks."""
        self._tunnel_handler = handlers.get(Kind.TUNNEL_OPEN)
        self.on_loss: Callable[[Loss], object] | None = None
        """Handler of losses."""
        if service.loss_handler is not None:
            self.on_loss = service.loss_handler.resolved(provided, has_message=False).function
        self._log = LossLog(runtime, "service", service.name, f"on_loss of {service.name}")

    def joined(self, member: int, member_id: str, key_ids: Iterable[bytes]) -> None:
        """Record the member that the relay made for this service. After a reconnect it is another one."""
        self.member = member
        self.member_id = member_id
        self.key_ids.update(key_ids)

    @property
    def queued_bytes(self) -> int:
        """Bytes that are queued or running."""
        return self._broadcasts.queued_bytes + sum(
            inbox.queued_bytes for inbox in self._inboxes.values()
        )

    # -- what the session calls ------------------------------------------------------------------------------

    @property
    def expects_broadcasts(self) -> bool:
        """Whether the service has a handler for broadcasts or losses, so that missing broadcasts are reported."""
        return self._broadcasts.handler is not None or self.on_loss is not None

    def admit(self, kind: int, size: int) -> Refusal | None:
        """Return the reason to refuse a message of `size` bytes before it is opened, or None to accept it."""
        if self.left:
            return Refusal.LEAVING
        if kind == TUNNEL_OPEN:
            if self._tunnel_handler is None:
                return Refusal.UNREADABLE
            return Refusal.FULL if len(self._tunnels) >= self._limits.tunnels else None
        inbox = self._inboxes.get(kind)
        if inbox is None:
            # A relay sends such a request only if it is for exactly this member.
            return None if kind == Kind.REQUEST else Refusal.UNREADABLE
        if inbox.queued_bytes and inbox.queued_bytes + size > self._limits.queue_bytes:
            return Refusal.FULL
        return None

    def dispatch(self, delivery: Delivery) -> None:
        """Run a request, push or survey: at once if its handler is a plain function, else within `concurrency`."""
        inbox = self._inboxes.get(delivery.flow.kind)
        self.running += 1
        delivery.session.running += 1
        if inbox is None:
            self._not_served(delivery)
            return
        handler = inbox.handler
        if not handler.is_coroutine:
            answer = None
            tally = inbox.tally
            function = handler.function if tally.handled % TIMED_EVERY else inbox.timed
            try:
                if handler.wanted is Request:
                    answer = _Answer(self, delivery)
                    argument = handler.argument(delivery, answer.defer)
                else:
                    argument = handler.convert(delivery.message)
                context = self._contexts.fresh()
                value = context.run(function, argument)
                if value is not None and type(value) is not bytes and is_late(value):
                    late = self._contexts.late(context, value)
                    inbox.begin(delivery, answer or _Answer(self, delivery), late)
                    self._give_to_worker(inbox, delivery)
                    return
                tally.handled += 1
            except RAISED as err:
                (answer or _Answer(self, delivery)).failed(err)
            else:
                if answer is None:
                    self.answer(delivery, value)
                else:
                    answer.returned(value)
            return
        if inbox.cancelling is not None:
            inbox.cancelling.expect(delivery)
        self._give_to_worker(inbox, delivery)

    def _give_to_worker(self, inbox: Inbox, delivery: Delivery) -> None:
        """Give a delivery to an idle or a new worker, or queue it."""
        inbox.queued_bytes += delivery.size
        if inbox.idle:
            inbox.assigned.add(delivery)
            inbox.idle.pop().set_result(delivery)
        elif len(inbox.workers) < self._limits.concurrency:
            inbox.assigned.add(delivery)
            task = self._contexts.start(self._work(inbox, delivery), f"iris-{self.service.name}")
            inbox.workers.add(task)
            task.add_done_callback(inbox.workers.discard)
        else:
            inbox.queue.append(delivery)

    def call(self, delivery: Delivery, method: str) -> None:
        """Run the handler of a method as `dispatch` does, or answer that this member has none."""
        kind = delivery.flow.kind
        inbox = self._inboxes.get(kind)
        methods = inbox.handler.handlers if inbox and isinstance(inbox.handler, Methods) else {}
        if method in methods:
            self.dispatch(delivery)
            return
        if method in (DESCRIBE, PING) and kind in _ANSWERED:
            self.running += 1
            delivery.session.running += 1
            self.answer(delivery, self.describe(delivery) if method == DESCRIBE else None)
            return
        self.running += 1
        delivery.session.running += 1
        _Answer(self, delivery).failed(no_method(self.service.name, kind, method, methods))

    def _given_up(self, delivery: Delivery) -> None:
        """Answer a delivery whose caller left before it ran. Nobody reads the answer, but relays count it."""
        self._runtime.count_dropped("caller left", 1)
        self.answer_error(delivery, "the caller left before it ran", may_have_run=False)

    def describe(self, delivery: Delivery) -> Description:
        """Return the description of this member, for the answer to a delivery."""
        inboxes = self._inboxes

        def tally_of(kind: Kind, method: str) -> Tally | None:
            return inboxes[kind].tallies[method] if kind in inboxes else None

        service = self.service
        return Description(
            _member_id(delivery), service.name, service.version, service.description,
            describe_handlers(service, self._provided, tally_of), self.running - 1,
            sum(len(inbox.queue) + len(inbox.assigned) for inbox in inboxes.values()) + len(self._broadcasts),
            time.monotonic() - self._served_since_s, library_version(), host_name(), os.getpid(), self.queued_bytes,
            dropped_messages(self._runtime), times_held(self.loop, service.name),
        )  # fmt: skip

    def tallies(self) -> list[tuple[int, str, Tally]]:
        """Return (kind, method, counts) of each handler of requests, pushes and surveys."""
        return [
            (kind, method, tally)
            for kind, inbox in self._inboxes.items()
            for method, tally in inbox.tallies.items()
        ]

    def _not_served(self, delivery: Delivery) -> None:
        """Answer a request to exactly this member, which has no handler for requests."""
        detail = f"this member of {self.service.name} does not serve requests"
        self.answer_error(delivery, detail, may_have_run=False)

    def tunnel(self, end: TunnelEnd) -> None:
        """Start the tunnel handler for a new tunnel."""
        handler = self._tunnel_handler
        assert handler is not None  # `admit` refuses tunnels without a handler
        self.running += 1
        tunnel = Tunnel(end, self._attachment.touch, self._attachment.writable)
        task = self._contexts.start(
            self._work_tunnel(handler, tunnel), f"iris-{self.service.name}-tunnel"
        )
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)

    def gap(self, loss: Loss) -> None:
        """Report broadcasts that did not arrive."""
        self._log.report(loss, self.on_loss)

    # -- running ---------------------------------------------------------------------------------------------

    async def _work(self, inbox: Inbox, delivery: Delivery) -> None:
        handler, cancelling, contexts = inbox.handler, inbox.cancelling, self._contexts
        function = handler.function
        task = asyncio.current_task()
        assert task is not None
        while True:
            inbox.assigned.discard(delivery)
            answer, begun = _Answer(self, delivery), None
            if inbox.begun and delivery in inbox.begun:
                answer, begun = inbox.begun.pop(delivery)
            cancelled = False
            started_ns = time.monotonic_ns()
            try:
                late = delivery.deadline_us and delivery.deadline_us < started_ns // 1000
                if late and begun is None:
                    if cancelling is not None:
                        cancelling.end(delivery)
                    self.expired(delivery)
                elif cancelling is not None and not cancelling.begin(delivery, task):
                    cancelling.end(delivery)
                    self._given_up(delivery)
                else:
                    if inbox.answered and delivery.deadline_us:
                        HANDLED[task] = delivery.deadline_us
                    try:
                        if begun is not None:
                            value = await begun.finished()
                        elif contexts.sets:
                            argument = handler.argument(delivery, answer.defer)
                            value = await contexts.inside(function, argument)
                        else:
                            value = await function(handler.argument(delivery, answer.defer))
                            if value is not None and type(value) is not bytes and is_late(value):
                                value = await finished(value)
                    finally:
                        if cancelling is not None:
                            cancelled = cancelling.end(delivery)
                    inbox.tally.returned(started_ns)
                    answer.returned(value)
            except RAISED as err:
                if stopping():
                    answer.failed(RuntimeError("the member stopped before it answered"))
                    raise
                if cancelled and isinstance(err, asyncio.CancelledError):
                    answer.cancelled()
                else:
                    answer.failed(err)
            finally:
                HANDLED.pop(task, None)
                inbox.queued_bytes -= delivery.size
            if self._stop_by_s is not None:
                return  # the handler ignored its cancellation; stop() answers the rest
            if not contexts.sets:
                contexts.sets = contexts.changed()
            if inbox.queue:
                delivery = inbox.queue.popleft()
            elif self.left:
                return
            elif contexts.sets and contexts.changed():
                inbox.workers.discard(task)  # now, so that the next delivery starts another
                return
            else:
                waiter: asyncio.Future[Delivery] = self.loop.create_future()
                inbox.idle.append(waiter)
                delivery = await waiter

    async def _work_tunnel(self, handler: Handler, tunnel: Tunnel) -> None:
        try:
            async with tunnel:
                try:
                    await handler.function(tunnel)
                except EndOfTunnel:
                    return
        except RAISED as err:
            if stopping():
                raise
            self._failed("tunnel handler", handler, err)
        finally:
            self.done()

    def _began(self) -> None:
        self.running += 1

    def done(self) -> None:
        """Count one running delivery, bundle or tunnel less."""
        self.running -= 1
        if self.running == 0:
            self._quiet.set()

    def runs_in(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task runs a handler of this service."""
        return (
            task in self._tunnels
            or self._broadcasts.runs_in(task)
            or any(task in inbox.workers for inbox in self._inboxes.values())
        )

    def leave(self) -> Coroutine[Any, Any, None]:
        """Send LEAVE at once; await the result to wait until everything accepted is finished."""
        runtime = self._runtime
        acks = runtime.registry.leave(runtime.session, self)
        runtime.touch()
        return self._finish_leaving(acks)

    async def _finish_leaving(self, acks: list[asyncio.Future[None]]) -> None:
        """Accept messages until the relay has answered LEAVE, then finish what was accepted."""
        for ack in acks:
            await self._runtime.acknowledged(ack)
        self.left = True
        # With a timeout, because an idle tunnel may stay open forever: stop() ends what is left.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._runtime.config.drain_timeout_s):
                await self.finish()

    async def finish(self) -> None:
        """Return when everything accepted has run. The member has left by now, so nothing new is accepted."""
        while self.running:
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self) -> None:
        """Cancel what still runs, and answer what has not started with an error. Idempotent.

        Waits for the cancelled tasks, at most `drain_timeout_s`.
        """
        self.left = True
        if self._stop_by_s is None:
            self._stop_by_s = self.loop.time() + self._runtime.config.drain_timeout_s
        tasks = [
            *self._tunnels,
            *(task for inbox in self._inboxes.values() for task in inbox.workers),
        ]
        for task in tasks:
            task.cancel()
        tasks += self._broadcasts.stop()
        self._give_up_queued()
        if tasks:
            left_s = max(0.0, self._stop_by_s - self.loop.time())
            _, stuck = await asyncio.wait(tasks, timeout=left_s)
            if stuck:
                log.warning("service.stuck", extra={"fields": {"handlers": len(stuck)}})
        self._log.end()

    def _give_up_queued(self) -> None:
        """Answer deliveries that no worker has started with an error."""
        for inbox in self._inboxes.values():
            given_up = [*inbox.assigned, *inbox.queue]
            inbox.assigned.clear()
            inbox.queue.clear()
            for delivery in given_up:
                inbox.queued_bytes -= delivery.size
                if delivery in inbox.begun:  # its function was called
                    answer, begun = inbox.begun.pop(delivery)
                    begun.drop()
                    answer.failed(RuntimeError("the member stopped before it answered"))
                    continue
                if inbox.cancelling is not None:
                    inbox.cancelling.end(delivery)
                self.answer_error(
                    delivery, "the member stopped before it ran this message", may_have_run=False
                )
            if given_up:
                self._runtime.count_dropped("member stopped", len(given_up))

    def _drop_casts(self, messages: list[Message], cause: str) -> None:
        """Count and report dropped broadcasts, which are of one sender."""
        first = messages[0]
        self._runtime.count_dropped(cause, len(messages))
        loss = Loss("broadcast", first.name, first.source, len(messages), cause)
        self.gap(loss)
        self._runtime.report_loss(loss)

    def answer(self, delivery: Delivery, value: object) -> None:
        """Answer a delivery with the value that its handler returned; for a push, only return its credit."""
        kind = delivery.flow.kind
        if kind == PUSH:
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
                    self.failed(delivery, err)
                    self.answer_error(delivery, str(err), may_have_run=True)
                    return
            limit = delivery.session.message_limit
            if len(payload) > limit:
                detail = (
                    f"the reply of {len(payload)} bytes is over the limit of {limit}; use a tunnel"
                )
                self.answer_error(delivery, detail, may_have_run=True)
                return
            if kind == SURVEY:
                headers = {**(headers or {}), MEMBER_HEADER: _member_id(delivery)}
            delivery.reply(payload, headers, packed)
        self._ended(delivery)

    def answer_error(
        self, delivery: Delivery, detail: str, *, may_have_run: bool, code: str = "", details: bytes = b""
    ) -> None:  # fmt: skip
        """Answer a delivery with an error. For a push, its relay reports to the sender only that it did not run."""
        if delivery.flow.kind == Kind.PUSH:
            delivery.finish(started=may_have_run)
        else:
            delivery.fault(
                detail, may_have_run=may_have_run, member=_member_id(delivery), code=code, details=details
            )  # fmt: skip
        self._ended(delivery)

    def _ended(self, delivery: Delivery) -> None:
        """Count a delivery as finished."""
        delivery.session.running -= 1
        self._attachment.touch()
        self.running -= 1
        if self.running == 0:
            self._quiet.set()

    def expired(self, delivery: Delivery) -> None:
        """Answer a delivery with an error without running it, because its deadline has passed."""
        self._runtime.count_dropped("expired", 1)
        self._tally(delivery).expired += 1
        detail = "the deadline passed while the message was queued at the member"
        self.answer_error(delivery, detail, may_have_run=False)

    def failed(self, delivery: Delivery, error: BaseException) -> None:
        """Count and log an exception of the handler of a request, push or survey."""
        self._tally(delivery).failed += 1
        handler = self._inboxes[delivery.flow.kind].handler.chosen(delivery.message)
        late_us = time.monotonic_ns() // 1000 + ROUNDING_US
        if isinstance(error, TimeoutError) and 0 < delivery.deadline_us < late_us:
            name = self.service.name
            self._runtime.handler_late(f"handler of {name}", name, handler.function, error)
            return
        self._failed("handler", handler, error)

    def refused(self, delivery: Delivery) -> None:
        """Count a delivery that its handler refused, or whose payload does not fit."""
        self._tally(delivery).refused += 1

    def _tally(self, delivery: Delivery) -> Tally:
        return self._inboxes[delivery.flow.kind].tally_of(delivery.message)

    def _failed(self, what: str, handler: Handler, error: BaseException) -> None:
        ran = not isinstance(error, ArgumentError)
        name = self.service.name
        self._runtime.handler_failed(f"{what} of {name}", name, handler.function, error, ran=ran)


class _Answer:
    """Sends exactly one answer for one delivery."""

    __slots__ = ("_binding", "_delivery", "deferred")

    def __init__(self, binding: ServiceBinding, delivery: Delivery) -> None:
        self._binding = binding
        self._delivery = delivery
        self.deferred = False

    def defer(self) -> Deferred:
        if self._delivery.flow.kind == Kind.PUSH:
            raise ConfigError("a push has no reply, so it cannot be deferred")
        if self.deferred:
            raise ConfigError("this request was deferred already; a request has only one reply")
        self.deferred = True
        IN_HANDLER.set(
            self._binding.loop
        )  # for a plain function: what it starts from now on belongs to it
        return Deferred(self._finish, self._binding.loop)

    def returned(self, value: object) -> None:
        if not self.deferred:
            self._finish(value, None)

    def cancelled(self) -> None:
        """Answer a delivery whose handler was cancelled with its caller. Nobody reads it, but relays count it."""
        if not self.deferred:  # else the deferred reply still answers
            self._finish(None, "the handler was cancelled because its caller left")

    def failed(self, err: BaseException) -> None:
        if self.deferred:
            self._binding.failed(self._delivery, err)  # the deferred reply still answers
            return
        if isinstance(err, Expired):
            self._binding.expired(self._delivery)
            return
        if isinstance(err, faults.Refusal):
            self._finish(None, err)
            return
        if not isinstance(err, ArgumentError) or self._delivery.flow.kind == Kind.PUSH:
            self._binding.failed(self._delivery, err)  # the sender of a push does not get the text
        else:
            self._binding.refused(self._delivery)
        try:
            detail = str(err) if isinstance(err, ArgumentError) else f"{type(err).__name__}: {err}"
            if isinstance(err, EXITS):
                detail = f"{error_text(err)}; the program of the member ends"
        except Exception as broken:  # the __str__ of a user's exception may raise anything
            detail = f"{type(err).__name__} (its __str__ raised {type(broken).__name__})"
        self._finish(None, detail, err)

    def _finish(
        self, value: object, detail: str | faults.Refusal | None, err: BaseException | None = None
    ) -> None:
        if detail is None:
            self._binding.answer(self._delivery, value)
        elif isinstance(detail, faults.Refusal):
            refusal = detail
            if refusal.may_have_run:
                self._binding.refused(self._delivery)
            self._binding.answer_error(
                self._delivery, str(refusal), may_have_run=refusal.may_have_run, code=refusal.code,
                details=refusal.packed,
            )  # fmt: skip
        else:
            bad = isinstance(err, ArgumentError)
            self._binding.answer_error(
                self._delivery, detail, may_have_run=not bad, code=faults.BAD_PAYLOAD if bad else ""
            )


def _member_id(delivery: Delivery) -> str:
    """Return the id of the member that received a delivery. After a reconnect, the binding has another id."""
    return f"{delivery.session.relay_id.hex()}.{delivery.flow.member}"


_numbers = itertools.count(1)
_ANSWERED = frozenset({Kind.REQUEST, Kind.SURVEY})
