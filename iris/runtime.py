"""The shared state of one client: its attachment to a relay, its registrations, its losses and its counters.

Services, subscriptions and streams use the `Runtime`, and not the client. The attachment and its sessions call
it back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import copy_context
from typing import Any, Final, NoReturn, Protocol, cast

from iris.attachment import Attachment, Connector, Life
from iris.awaiting import check_returned
from iris.config import ClientConfig
from iris.core.bundle import Headers, check_headers
from iris.core.conversation import UP
from iris.core.credit import WhenFull
from iris.core.inbound import InFlow
from iris.core.interfaces import Loss, Sink
from iris.core.local_senders import LocalSenders
from iris.core.message import encode_payload
from iris.core.outflow import OutFlow
from iris.core.session import Session
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.deadlines import seconds_left, within
from iris.errors import (
    Closed,
    ConfigError,
    ConnectionLost,
    IrisError,
    MessageTooLarge,
    RequestError,
    RequestTimeout,
    away_text,
    name_timeout,
)  # fmt: skip
from iris.forks import disable_in_child
from iris.logs import EXITS, RAISED, Repeats, error_text, function_name, logger
from iris.registry import Registry, Served, Subscriber
from iris.transport import Pump
from iris.troubles import TroubleReports
from iris.wire import frames
from iris.wire.codec import MIN_MESSAGE_LIMIT
from iris.wire.kinds import NO_MEMBERS, Kind

log = logger("iris.client")  # the documented name of this logger

FAILED_HANDLERS: Final = "failed handlers"
"""Name of the counter of handlers that raised."""
MAX_LOSSES: Final = 1000
"""Number of losses that `Client.losses` keeps."""
NOT_OPEN: Final = (
    "this client is not connected yet; enter it with `async with`, or await its open()"
)
TUNNEL: Final = "; send it through a tunnel"


class _NotOpen:
    """The registry of a client that is not open yet: whatever is asked of it says so."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Closed(NOT_OPEN)


class Part(Protocol):
    """A part of the client that uses its keys and ends with it: its streams."""

    def keys_changed(self) -> None: ...
    async def finish(self) -> None: ...
    def end(self) -> None: ...


class Runtime:
    """The shared state behind one client. It has no attachment and no keys before `attach`."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._context = copy_context()
        """That of the program, of which each call of `on_loss` has a copy."""
        self.losses: deque[Loss] = deque(maxlen=MAX_LOSSES)
        """The latest losses, at most `MAX_LOSSES`, oldest first."""
        self.reported_losses = 0
        """Losses added to `losses`, also those that it no longer keeps."""
        self.on_loss: Callable[[Loss], object] | None = None
        """Called with every loss."""
        self.counters: dict[str, int] = {}
        """Messages dropped in this process, by cause, and the number of handlers that failed: name -> count."""
        self.local_senders: LocalSenders | None = None
        """Clients that deliver their casts to each other directly; set before `attach` (for bridges)."""
        self.working: set[Subscriber] = set()
        """Subscriptions whose coroutine handler has a running task."""
        self.parts: list[Part] = []
        self.attachment: Attachment | None = None
        self.registry = cast(Registry, _NotOpen())
        self.troubles = TroubleReports(self._send_trouble)
        """Losses and failed handlers, which the relay shows to operators."""
        self._reloading = asyncio.Lock()
        self._watched: list[list[Loss]] = []
        """Lists that collect losses, one for each active `watching_losses`."""
        self._repeats = Repeats()
        """Limits the log lines about failed handlers, losses of sent messages, and stalls."""

    def attach(
        self, keyring: Keyring, connector: Connector, entropy: Callable[[int], bytes], watch: Callable[[], Callable[[], bool]]
    ) -> Attachment:  # fmt: skip
        """Create the attachment, not yet connected, and return it. Called once."""
        self.registry = Registry(keyring, self._keys_changed)
        self.attachment = Attachment(
            self, self.registry, self.config, connector, entropy, watch, self.local_senders
        )
        self.registry.share_out(self.attachment.guard)
        disable_in_child(self)
        return self.attachment

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether a task runs a handler of this client."""
        handlers: list[Served | Subscriber] = [*self.registry.services, *self.working]
        return task is not None and any(one.runs_in(task) for one in handlers)

    async def close(self) -> None:
        """Close gracefully; see `Client.close`."""
        attachment, registry, drain_s = self.attached(), self.registry, self.config.drain_timeout_s
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                async with asyncio.timeout(2 * drain_s + self.config.connect_timeout_s):
                    # Handlers may use this client until all of these have ended.
                    bindings = list(registry.services)
                    leaving = [binding.leave() for binding in bindings]
                    stopping = [s for s in registry.subscriptions() if s.group or s in self.working]
                    for subscription in stopping:
                        subscription.stop()
                    left = [self.acknowledged(s.stopped) for s in stopping if s.group]
                    await asyncio.gather(*leaving, *left)
                    await asyncio.gather(*(s.finish() for s in list(self.working)))
                    await asyncio.gather(*(binding.stop() for binding in bindings))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(drain_s):
                            await asyncio.gather(*(part.finish() for part in self.parts))
                    attachment.state = Life.CLOSING
                    self.troubles.flush()
                    await attachment.say_bye()
        finally:
            self.troubles.end()
            ending = attachment.close()
            registry.end()
            for part in self.parts:
                part.end()
            for subscription in list(self.working):
                subscription.give_up()
            # Nothing is left to the loop, which may end now.
            await asyncio.gather(*ending, return_exceptions=True)
            await asyncio.gather(*(binding.stop() for binding in registry.services))
            self._repeats.end()

    def _keys_changed(self) -> None:
        for part in self.parts:
            part.keys_changed()

    # -- readiness -------------------------------------------------------------------------------------------

    def attached(self) -> Attachment:
        """Return the attachment. Raises Closed unless the client is open."""
        attachment = self.attachment
        if attachment is None:
            raise Closed(NOT_OPEN)
        attachment.check_open()
        return attachment

    def ready(
        self, name: str, timeout: float
    ) -> Coroutine[Any, Any, tuple[Pump[Session], Session]]:
        """Return the pump and session for a call, after waiting at most `timeout` seconds for a relay.

        Raises Closed, or ConnectionLost for `name`.
        """
        return (self.attachment or self.attached()).ready(name, timeout)

    def in_use(
        self, name: str, timeout: float
    ) -> Coroutine[Any, Any, tuple[Pump[Session], Session]]:
        """As `ready`, but never the session of a relay that stops: for what must last, and for what casts need."""
        return (self.attachment or self.attached()).in_use(name, timeout)

    def name_timeout(self, error: RequestError, timeout: float, until_s: float) -> None:
        """Change an error about the deadline `until_s` (monotonic) of a call to name its timeout (s) and the cause."""
        name_timeout(error, timeout, self._away_s(until_s - timeout))

    def away_text(self, timeout: float, until_s: float) -> str:
        """Return the text to add to an error about a deadline if the relay was away meanwhile, else ""."""
        return away_text(self._away_s(until_s - timeout))

    def _away_s(self, since_s: float) -> float:
        return self.attachment.absences.seconds(since_s) if self.attachment is not None else 0.0

    async def answered(
        self, waiter: asyncio.Future[Any], text: str, timeout: float, until_s: float
    ) -> Any:
        """Await an answer of the relay until `until_s` (monotonic), which a `timeout` (s) of the caller has set.

        Raises RequestTimeout with `text` ("the relay did not ...").
        """
        try:
            return await within(waiter, seconds_left(until_s), text)
        except RequestTimeout as err:
            self.name_timeout(err, timeout, until_s)
            raise

    @property
    def session(self) -> Session | None:
        """The session in use, or None."""
        return self.attachment.session if self.attachment is not None else None

    def touch(self) -> None:
        """Write what the session has queued at the end of this turn of the loop."""
        if self.attachment is not None:
            self.attachment.touch()

    def freed(self, name: str, source: bytes) -> None:
        """Grant new credit to the publisher `source` of a topic, because some of its messages were handled."""
        session = self.session
        if session is not None and session.state is UP:
            session.casts.windows.freed(name, source)
            self.touch()

    async def acknowledged(self, done: asyncio.Future[Any] | None) -> None:
        """Wait for the relay's answer to LEAVE, UNSUBSCRIBE or SETTLE, at most `connect_timeout_s`.

        Without an answer the caller goes on, because the member or subscription has ended on this side in any case.
        """
        if done is not None:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(self.config.connect_timeout_s):
                    await done

    async def settled(self) -> None:
        """Wait until the relays linked to the local one know what was registered.

        The relay waits at most a second.
        """
        attachment = self.attached()
        session = attachment.session
        if session is None:
            return
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.ask(frames.Settle, waiter)
        attachment.touch()
        await self.acknowledged(waiter)  # if this relay is lost, the next one advertises it, too

    async def reload(self, keyring: Keyring) -> None:
        """Move to `keyring` with a new session. While the old session drains, the keys of both keyrings are known.

        Raises as `Attachment.replace`; the keyring is then not changed.
        """
        attachment, registry = self.attached(), self.registry
        async with self._reloading:
            before, session = registry.keyring, attachment.session
            registry.learn(keyring)
            registry.share_out(attachment.guard)
            try:
                await attachment.replace()
            except BaseException:
                # If another session is in use, `replace` was cancelled after it had moved: keep the new keyring.
                if attachment.session is session:
                    registry.learn(before)
                raise
            finally:
                registry.forget_keys(attachment.session)
                registry.share_out(attachment.guard)

    # -- sending ---------------------------------------------------------------------------------------------

    def encode(
        self, payload: object, headers: Headers | None, advice: str = TUNNEL
    ) -> tuple[bytes, bool]:
        """Return (payload as bytes, whether they are MessagePack), after checking the size and the headers.

        Raises:
            MessageTooLarge: the payload is over the limit, which is at least `MIN_MESSAGE_LIMIT`; the text ends with
                `advice`. Or the headers are.
            EncodeError: the payload cannot be sent, or `headers` are not a dict of str to str.
        """
        data, packed = (payload, False) if type(payload) is bytes else encode_payload(payload)
        if len(data) > MIN_MESSAGE_LIMIT:
            self.check_size(data, advice)
        if headers:
            check_headers(headers)
        return data, packed

    @property
    def keyring(self) -> Keyring:
        """Keyring in use."""
        return self.registry.keyring

    @property
    def message_limit(self) -> int:
        """Largest payload that can be sent, in bytes."""
        session = self.session
        return session.message_limit if session is not None else self.config.message_limit_bytes

    def check_size(self, data: bytes, advice: str = TUNNEL) -> None:
        """Raise MessageTooLarge if a payload is over the limit."""
        limit = self.message_limit
        if len(data) > limit:
            raise MessageTooLarge(
                f"a payload of {len(data)} bytes is over the limit of {limit}{advice}"
            )

    def take(
        self, kind: Kind, name: str, payload: object, headers: Headers | None, *, force: bool = False
    ) -> bool:  # fmt: skip
        """Accept a publication or broadcast for sending. Return False if the write buffer is full, unless `force`."""
        attachment = self.attached()
        data, packed = self.encode(payload, headers)
        if attachment.out is None:
            # Check the name and its key now, because the caller cannot get the error later.
            (self.registry.topic_key if kind == Kind.PUBLISH else self.registry.cluster_keys)(name)
            attachment.held.hold((kind, name, data, headers, packed))
            return True
        if attachment.blocked and not force:
            return False
        self.cast(kind, name, data, headers, packed)
        attachment.touch()
        return True

    def has_credit(self, topic: str, when_full: WhenFull) -> bool:
        """Return whether the subscribers of a topic that publishers wait for have room for one more publication.

        The first use for a topic asks the relay for credit. Raises ConfigError if `when_full` is wrong.
        """
        if when_full != "wait":
            raise ConfigError(f"when_full must be 'drop' or 'wait', not {when_full!r}")
        attachment = self.attached()
        out = attachment.out
        if out is None:  # it is held for the next session, up to `offline_bytes`
            return True
        flow = out.topics.get(topic) or self.topic(topic)
        credit = flow.credit
        if credit is None:
            credit = out.credit(flow)
            attachment.touch()
        return credit.sent + flow.size < credit.limit

    async def wait_for_credit(self, topic: str) -> None:
        """Return when there is room to write and credit to publish, or after `config.stall_s` without.

        Raises ConnectionLost if the relay does not read, and as much waits for it as would without a relay.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.config.stall_s
        while True:
            attachment = self.attached()
            try:
                async with asyncio.timeout(max(0.0, until_s - loop.time())):
                    await attachment.wait_writable()
            except TimeoutError:
                self._relay_stalled(topic, attachment)
                return
            if self.has_credit(topic, "wait"):
                return
            out = attachment.out
            assert out is not None  # without a session `has_credit` is True
            flow = out.topics[topic]
            credit = out.credit(flow)
            left_s = until_s - loop.time()
            if left_s <= 0:
                out.stalled(flow)
                attachment.touch()
                fields: dict[str, object] = {"topic": topic, "stall_s": self.config.stall_s}
                self._repeats.warning(log, "client.publish_stalled", topic, None, fields)
                return
            waiter: asyncio.Future[None] = loop.create_future()
            credit.waiters.append(waiter)
            try:
                async with asyncio.timeout(left_s):
                    await waiter
            except TimeoutError:
                continue
            finally:
                if waiter in credit.waiters:
                    credit.waiters.remove(waiter)

    def _relay_stalled(self, topic: str, attachment: Attachment) -> None:
        """Log that the relay does not read. Raises ConnectionLost if too much waits for it already."""
        stall_s, config = self.config.stall_s, self.config
        waiting = attachment.pump.unwritten_bytes if attachment.pump is not None else 0
        if waiting > config.write_high_bytes + config.offline_bytes:
            detail = f"the relay does not read, and {waiting} bytes wait for it (offline_bytes); see `iris status`"
            raise ConnectionLost(topic, detail, may_have_run=False)
        fields: dict[str, object] = {"topic": topic, "stall_s": stall_s, "waiting": waiting}
        self._repeats.warning(log, "client.relay_stalled", topic, None, fields)

    def cast(
        self, kind: int, name: str, payload: bytes, headers: Headers | None, packed: bool
    ) -> None:
        """Put a publication or broadcast, already checked, into the bundle of its topic or cluster."""
        out = self.attachment.out if self.attachment is not None else None
        assert out is not None
        if kind == Kind.PUBLISH:
            flow = out.topics.get(name) or self.topic(name)
        else:
            flow = out.flow(kind, name, self.registry.cluster_keys(name)[0])
        out.add(flow, payload, headers, packed)

    def topic(self, topic: str) -> OutFlow:
        """Create the outgoing flow of a topic, at its first use in a session."""
        out = self.attached().out
        assert out is not None
        flow = out.flow(Kind.PUBLISH, topic, self.registry.topic_key(topic))
        out.topics[topic] = flow
        return flow

    # -- what the attachment and its sessions call -----------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key with this id, or None."""
        return self.registry.find_key(key_id)

    def binding(self, flow: InFlow) -> Served | None:
        """Return the service that a flow is for."""
        return self.registry.binding(flow)

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions that a flow is for."""
        return self.registry.sinks(flow)

    def detached(self, reason: str) -> None:
        """Report losses of unknown count, because the session was lost."""
        for watched in self._watched:
            watched.append(Loss("relay", "relay", b"", None, reason))
        for loss in self.registry.detached(reason):
            self.report_loss(loss)

    def draining(self) -> None:
        """Handle DRAIN from a relay that is stopping: finish what is in flight there, and look for the next relay."""
        log.info("client.relay_draining")
        if self.attachment is not None:
            self.attachment.drain()

    def out_full(self) -> None:
        """Write now, because enough is framed to be worth a write before the turn ends."""
        if self.attachment is not None:
            self.attachment.out_full()

    # -- losses and counters ---------------------------------------------------------------------------------

    def lost(self, loss: Loss) -> None:
        """Report messages lost that this process sent or should have received.

        Losses of sent messages are logged here; subscriptions and services log what they did not receive.
        """
        if not loss.source:
            if loss.cause != NO_MEMBERS:  # a broadcast without members is nobody's loss
                if loss.count is None:
                    self.troubles.count("uncounted", loss.name)
                else:
                    self.troubles.count("not sent", loss.name, loss.count)
            for watched in self._watched:
                watched.append(loss)
            if self.on_loss is None and not self._watched:
                key = (loss.kind, loss.name, type(loss.error))
                self._repeats.warning(log, "client.loss", key, None, {"loss": str(loss)})
        self.report_loss(loss)

    def other_keys(self, topic: str, key_id: bytes, others: dict[str, int]) -> None:
        """Log that a topic published to under a key has subscribers only under other keys."""
        key = key_id[:4].hex()
        fields: dict[str, object] = {"topic": topic, "key": key, "others": others}
        self._repeats.warning(log, "client.other_keys", (topic, key), None, fields)

    @contextlib.contextmanager
    def watching_losses(self) -> Iterator[list[Loss]]:
        """Collect the losses of sent messages, and of the relay, inside the block."""
        watched: list[Loss] = []
        self._watched.append(watched)
        try:
            yield watched
        finally:
            self._watched = [other for other in self._watched if other is not watched]

    def report_loss(self, loss: Loss) -> None:
        """Add a loss, which is counted and logged already, to `losses`, and call `on_loss` with it."""
        self.losses.append(loss)
        self.reported_losses += 1
        if self.on_loss is not None:
            try:
                check_returned(self._context.copy().run(self.on_loss, loss))
            except RAISED as err:
                self.handler_failed("on_loss", "", self.on_loss, err)

    def _send_trouble(self, make: Callable[[], frames.Control]) -> None:
        attachment = self.attachment
        if attachment is not None and attachment.session is not None and not attachment.blocked:
            attachment.session.control(make())
            attachment.touch()

    def handler_failed(
        self, handler: str, of: str, function: object, error: BaseException, *, ran: bool = True
    ) -> None:
        """Count a failed handler of the user, and log it: at once if it did not fail in this way within 10 s.

        `handler` says what it is the handler of, "handler of thumbnails", and `of` is the cluster or filter, or "". It
        has not `ran` if the message does not fit it; then the error says enough, and no traceback is logged.
        Call it in an except block.

        A SystemExit or KeyboardInterrupt ends the event loop, as it does in any other task. It is raised there only
        after the answer to the message is written, so that nobody waits for it.
        """
        self._count_failed(of)
        name = function_name(function)
        fields: dict[str, object] = {
            "handler": handler,
            "function": name,
            "error": error_text(error),
        }
        if isinstance(error, EXITS):
            log.error("client.handler_exited", exc_info=error, extra={"fields": fields})
            self.exit_loop(error)
            return
        if not ran:
            fields["error"] = str(error)
            fields["messages"] = 1
        self._repeats.error(
            log, "client.handler_failed", (handler, name, type(error)), error if ran else None, fields
        )  # fmt: skip

    def handler_late(self, handler: str, of: str, function: object, error: BaseException) -> None:
        """Count and log a handler whose own call timed out, because its caller's deadline has passed.

        The handler itself made no mistake, so no traceback is logged.
        """
        self._count_failed(of)
        name = function_name(function)
        fields: dict[str, object] = {"handler": handler, "function": name, "error": error_text(error)}  # fmt: skip
        self._repeats.warning(log, "client.handler_late", (handler, name), None, fields)

    def _count_failed(self, of: str) -> None:
        self.count_dropped(FAILED_HANDLERS, 1)
        self.troubles.count("handler failed", of)

    def exit_loop(self, error: BaseException) -> None:
        """Raise an error out of the running event loop, in the turn after what is queued now was written."""

        def leave() -> NoReturn:
            raise error

        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, leave)

    def count_dropped(self, cause: str, count: int) -> None:
        """Count messages that were dropped in this process."""
        self.counters[cause] = self.counters.get(cause, 0) + count

    def messages(self, direction: str) -> int:
        """Return the number of data messages "sent" or "received" over all sessions, accepted or not."""
        return self.attachment.messages(direction) if self.attachment is not None else 0

    def _forked(self) -> None:
        """Disable this client in the child of a fork."""
        if self.attachment is not None:
            self.attachment.poison()
        for watcher in self.registry.watchers:
            watcher._forked()
