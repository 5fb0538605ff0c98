"""Keeps a client attached to a relay: connects, reconnects when the session ends, and moves to new sessions.

    new -> open -> closing -> closed

While no relay is connected, `session` is None, requests wait, and casts are held (`iris.held_casts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from iris.absences import Absences
from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.core.bundle import Headers
from iris.core.guard import Guard
from iris.core.interfaces import Owner
from iris.core.local_senders import LocalSenders
from iris.core.outbound import Outbound
from iris.core.session import Session
from iris.errors import Closed, ConnectionLost, IrisError, RelayUnavailable, with_deadline
from iris.held_casts import HeldCasts
from iris.leaving import Leaving, bye, fence, leave_replaced
from iris.logs import logger
from iris.nested import used
from iris.pairs import READ_BYTES, Pairs
from iris.registry import Registry, leave_groups
from iris.transport import LOOP_ENDED, Pump
from iris.wire.codec import ReceiveBuffer

log = logger(__name__)

Connector = Callable[[Callable[[], asyncio.BufferedProtocol]], Awaitable[Path | None]]
"""Connects the protocol that the factory makes to a relay.

Returns the path of the relay's socket, or None if it has none.

Raises RelayUnavailable.
"""


class Registrar(Owner, Protocol):
    """What an attachment calls: the client's runtime. `cast` puts a held cast into a bundle of the new session."""

    def cast(
        self, kind: int, name: str, payload: bytes, headers: Headers | None, packed: bool
    ) -> None: ...
    def detached(self, reason: str) -> None: ...
    def count_dropped(self, cause: str, count: int) -> None: ...


class Life(Enum):
    """Life cycle of an attachment. The values complete the error text "this client ..."."""

    OPEN = "is open"
    CLOSING = "is being closed; make another one with iris.connect()"
    CLOSED = "is closed; make another one with iris.connect()"
    LOOP_ENDED = LOOP_ENDED
    FORKED = "belongs to the parent process; after a fork, make another one with iris.connect()"


OPEN: Final = Life.OPEN
FORKED: Final = Life.FORKED


class Attachment:
    """The attachment of one client to a relay.

    `session`, `out` and `pump` belong to the session in use, and are None while there is none.
    """

    def __init__(
        self, client: Registrar, registry: Registry, config: ClientConfig, connector: Connector, entropy: Callable[[int], bytes],
        watch: Callable[[], Callable[[], bool]], local_senders: LocalSenders | None,
    ) -> None:  # fmt: skip
        """Create a detached attachment.

        `watch` is called when a relay is lost. It returns a function that says whether a relay has arrived since its
        last call.
        """
        self.session: Session | None = None
        self.out: Outbound | None = None
        self.pump: Pump[Session] | None = None
        self.blocked = True
        """Whether casts must wait: the write buffer is over its high-water mark, or there is no session."""
        self.state = OPEN
        self.guard = Guard(int(config.freshness_s * 1e6))
        self.held = HeldCasts(config.offline_bytes, client.lost)
        self.absences = Absences(asyncio.get_running_loop())
        self._client = client
        self._registry = registry
        self._config = config
        self._connector = connector
        self._watch = watch
        self._entropy = entropy
        self._local_senders = local_senders
        self._loop = asyncio.get_running_loop()
        self._buffer = ReceiveBuffer()
        self._pairs: dict[Pump[Session], Pairs] = {}
        """Sessions over a Unix socket -> the object that fetches socket pairs for their direct tunnels."""
        self._pair_buffer: ReceiveBuffer | None = None
        self._pumps: WeakSet[Pump[Session]] = WeakSet()
        """Pumps of all sessions that may still send: the one in use, those being left, and new ones."""
        self._up = asyncio.Event()
        self._vacant = asyncio.Event()
        """Set while there is no session in use, so that `_run` looks for a relay."""
        self._leaving = Leaving(config)
        """Sessions being left because their relay stops."""
        self._missed = ""
        """Why the last session was left, until the possible losses have been reported; else ""."""
        self._writable: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._replacing = asyncio.Lock()
        self._ended = {"sent": 0, "received": 0, "sent bytes": 0, "received bytes": 0}
        """Messages and bytes sent and received over sessions that have ended."""
        self.reconnects = 0
        """Sessions that were adopted after one was lost."""
        self.connected_s: float | None = None
        """Time (seconds since 1970) at which the session in use was adopted; None while there is none."""

    # -- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and stay connected until `close`.

        Raises RelayUnavailable, or the error of a failed registration.
        """
        self._adopt(await self._attach())
        self._task = self._loop.create_task(self._run(), name="iris-client")

    async def say_bye(self) -> None:
        """Flush, send BYE, and return when the relay has routed everything and ended the session."""
        await self._leaving.wait()
        if self.pump is not None:
            await bye(self.pump, "client closed")

    def close(self) -> list[asyncio.Task[None]]:
        """End all sessions now, and return the tasks that end in the next turn of the loop. Idempotent."""
        self.state = Life.CLOSED
        ending = self._leaving.abort("the client was closed")
        if self._task is not None:
            self._task.cancel()
            ending.append(self._task)
        if self.pump is not None:
            self.pump.abort("the client was closed")
        for cast in self.held.release():
            self.held.lost(cast, "the client was closed without a relay")
        self._up.set()
        self._wake_writers()
        return ending

    async def replace(self) -> None:
        """Move to a new session, which is registered before the old one ends. Nothing accepted is lost or reordered.

        Raises RelayUnavailable, or the error of a failed registration; the old session then stays in use.
        """
        async with self._replacing:
            await self.in_use("relay", self._config.connect_timeout_s)
            old = self.pump
            try:
                if old is not None and (groups := leave_groups(old.session, stay=True)):
                    # A relay chooses one session of a group. What it has chosen the old one for is earlier than what
                    # comes by the new one.
                    old.flush()
                    await asyncio.wait(groups, timeout=self._config.connect_timeout_s)
                new = await self._attach(hold=True)
            except BaseException as err:
                self._stay(old)
                drained = old is not None and old.session.drain_ms is not None
                if not isinstance(err, RelayUnavailable) or not drained:
                    raise
                await self.in_use("relay", self._config.connect_timeout_s)
                return
            if old is None or not old.connected:
                new.release_casts()
                self._adopt_unless_replaced(new)
                return
            try:
                # From here on casts wait for the new session, until the relay has routed all that was sent on the
                # old one.
                self.blocked = True
                with contextlib.suppress(ConnectionLost, TimeoutError):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await fence(old)
                # Everything that was routed to the old session before the new one was registered has been read now.
                new.release_casts()
                if (
                    old.session.drain_ms is not None
                ):  # `drain` has left the old session, and `_run` looks for the next relay
                    new.abort("the relay is about to stop")
                    await self.in_use("relay", self._config.connect_timeout_s)
                    return
                if self.pump is not old:
                    self._adopt_unless_replaced(new)
                    return
                self._adopt(new)
            except BaseException:  # cancelled, or the new session has ended already
                new.abort("this session was never used")
                self.writing_resumed(old)
                self._stay(old)
                raise
            await leave_replaced(old, new, self._config)

    def _stay(self, old: Pump[Session] | None) -> None:
        """Register again what `replace` has left, because the old session stays in use."""
        if old is not None and old is self.pump and old.connected:
            self._registry.register(old.session)
            old.touch()

    def _is_open(self) -> bool:
        return self.state is OPEN

    async def _run(self) -> None:
        """Reconnect whenever there is no session, until the client is closed."""
        while self._is_open():
            if self.pump is not None:
                await self._vacant.wait()
                continue
            backoff = Backoff(
                self._config.reconnect_min_s, self._config.reconnect_max_s, random.random
            )
            arrived = self._watch()
            while self._is_open() and self.pump is None:
                try:
                    await self._move()
                except (IrisError, OSError) as err:
                    log.debug("client.reconnect", extra={"fields": {"error": str(err)}})
                    await self.absences.pause(backoff.failed(), arrived)

    async def _move(self) -> None:
        """Use a new session, after everything that sessions being left have still to deliver was received."""
        new = await self._attach(hold=bool(self._missed))
        try:
            await self._leaving.fence_all()
            self._report_missed()
            parting = self._leaving.parting()
            if not parting:
                new.release_casts()
            self._adopt_unless_replaced(new)
        except BaseException:  # cancelled, or it has ended already
            new.abort("this session was never used")
            raise
        if parting:
            # What comes for queue groups by a relay that stops comes first.
            vacant = self._loop.create_task(self._vacant.wait())
            try:
                await asyncio.wait((vacant, asyncio.gather(*parting, return_exceptions=True)), return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            finally:
                vacant.cancel()
                new.release_casts()

    async def _attach(self, *, hold: bool = False) -> Pump[Session]:
        """Return the pump of a new session on which everything is registered.

        With `hold`, casts received on it are held until `release_casts`.
        """
        config = self._config
        session = Session(
            self._client, self.guard, self._entropy,
            label=config.label, pid=os.getpid(), message_limit=config.message_limit_bytes,
            compress=config.compress, local_senders=self._local_senders,
        )  # fmt: skip
        pump = Pump(self, session, self._buffer, config.write_high_bytes)
        self._pumps.add(pump)
        if hold:
            session.hold_casts()
        welcomed = session.on_welcome = self._loop.create_future()
        closed = self._loop.create_task(pump.closed.wait())
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                path = await self._connector(lambda: pump)
                if path is not None and pump.connected:
                    self._pairs_of(pump, path)
                await asyncio.wait((closed, welcomed), return_when=asyncio.FIRST_COMPLETED)
                if not welcomed.done():
                    raise RelayUnavailable(pump.reason or "the relay closed the connection")
                pump.turn()
                registered = self._registry.register(session)
                pump.flush()
                if registered:
                    await asyncio.gather(*registered)
                if session.drain_ms is not None:
                    raise RelayUnavailable("the relay is stopping and accepts no new sessions")
        except TimeoutError:
            pump.abort("the relay did not answer in time")
            raise RelayUnavailable(
                f"the relay did not answer within {config.connect_timeout_s:g} s (connect_timeout_s)"
            ) from None
        except BaseException:
            pump.abort("the session could not be set up")
            raise
        finally:
            closed.cancel()
        return pump

    def _pairs_of(self, pump: Pump[Session], path: Path) -> None:
        """Let the tunnels of a session fetch socket pairs from the relay at `path`."""
        if self._pair_buffer is None:
            self._pair_buffer = ReceiveBuffer(READ_BYTES)
        tunnels = pump.session.tunnels
        pairs = Pairs(tunnels, path, self._config.trusted_user, self._pair_buffer, pump.touch)
        self._pairs[pump] = pairs
        tunnels.fetch = pairs.fetch

    def _adopt_unless_replaced(self, pump: Pump[Session]) -> None:
        """Adopt the session of `pump`, or end it if another session is in use already."""
        if self.pump is None:
            self._adopt(pump)
        else:
            pump.abort("another session is in use")

    def _adopt(self, pump: Pump[Session]) -> None:
        """Use the session of `pump` for everything from now on.

        Raises RelayUnavailable if it has ended or is stopping.
        """
        if not pump.connected:
            raise RelayUnavailable(pump.reason or "the relay closed the connection")
        if pump.session.drain_ms is not None:
            raise RelayUnavailable("the relay is stopping and accepts no new sessions")
        self._vacant.clear()
        self._end_waiting()
        self.pump, self.session, self.out = pump, pump.session, pump.session.out
        used(pump.session)
        self.connected_s = time.time()
        self.blocked = False
        away_s = self.absences.end()
        if away_s is not None:
            log.info("client.connected", extra={"fields": {"away_s": away_s}})
            self.reconnects += 1
        pump.turn()
        self._registry.adopted(pump.session)
        for cast in self.held.release():
            try:
                self._client.cast(*cast)
            except IrisError as err:  # for example, its key is no longer in the keyring
                self.held.lost(cast, str(err))
        pump.touch()
        self._up.set()
        self._wake_writers()

    # -- a relay that stops ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Stop using a session whose relay is stopping; what runs there may finish."""
        pump = self.pump
        if pump is None or pump.session.drain_ms is None or self.state is not OPEN:
            return
        self._leaving.start(pump)
        self._missed = "the relay was stopped"
        self._vacate("the relay is about to stop")

    def _report_missed(self) -> None:
        """Report a loss of unknown count to subscriptions and services if a session was left since the last call."""
        missed, self._missed = self._missed, ""
        if missed:
            self._client.detached(missed)

    def _vacate(self, reason: str) -> None:
        """Stop using the current session, and wake `_run` to look for the next."""
        self._end_waiting()
        self.session = self.out = self.pump = None
        self.connected_s = None
        self.blocked = True
        self._up.clear()
        self._vacant.set()
        if self.state is OPEN:
            self.absences.begin()
            log.info("client.disconnected", extra={"fields": {"reason": reason}})
        self._wake_writers()

    # -- use -------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise Closed unless the client is open."""
        if self.state is not OPEN:
            raise Closed(f"this client {self.state.value}")

    def calling(self) -> Pump[Session] | None:
        """Return the pump of the session through which the caller may call now, or None.

        It is the session in use. While there is none, it is the one being left, for handlers that the relay waits for.
        """
        return self.pump if self.pump is not None else self._leaving.calling()

    async def ready(self, name: str, timeout: float) -> tuple[Pump[Session], Session]:
        """Return the session for a call, after waiting at most `timeout` seconds for one; see `calling`.

        Raises as `in_use`.
        """
        pump = self.pump
        if pump is None or self.state is not OPEN:
            pump = self.calling() if self.state is OPEN else None
            if pump is None:
                return await self.in_use(name, timeout)
        pump.turn()
        return pump, pump.session

    async def in_use(self, name: str, timeout: float) -> tuple[Pump[Session], Session]:
        """Return the session in use, after waiting at most `timeout` seconds for one.

        Raises ConnectionLost for `name`, with may_have_run=False, if there is none by then.
        """
        pump = self.pump
        while pump is None:
            self.check_open()
            try:
                async with asyncio.timeout(timeout):
                    await self._up.wait()
            except TimeoutError:
                text = f"no relay was connected within {timeout:g} s"
                lost = ConnectionLost(name, text, may_have_run=False)
                raise with_deadline(lost, "no relay was connected", timeout) from None
            pump = self.pump
        if self.state is not OPEN:
            self.check_open()
        pump.turn()
        return pump, pump.session

    def touch(self) -> None:
        """Write what sessions have queued at the end of this turn of the loop."""
        if self.pump is not None:
            self.pump.touch()
        for pump in self._leaving.pumps:
            pump.touch()

    def writable(self) -> Awaitable[None] | None:
        """Return None if there is room to write, else an awaitable that waits for room."""
        return self.wait_writable() if self.blocked and self.pump is not None else None

    async def wait_writable(self) -> None:
        """Return when there is room to write, or there is no session."""
        while self.blocked and self.pump is not None and self.state is OPEN:
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    def _end_waiting(self) -> None:
        """Wake those that wait for credit of the session in use; they wait for the next session then."""
        if self.out is not None:
            self.out.credits.end()

    def _wake_writers(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def messages(self, direction: str) -> int:
        """Return the number of data messages "sent" or "received", or of "sent bytes" or "received bytes".

        It is counted over all sessions, accepted or not.
        """
        return self._ended[direction] + sum(_traffic(pump)[direction] for pump in self._live())

    def dropped(self) -> list[tuple[str, int]]:
        """Return (cause, number) of the messages dropped in sessions that have not ended."""
        return [each for pump in self._live() for each in pump.session.dropped.items()]

    def _live(self) -> list[Pump[Session]]:
        leaving = self._leaving.pumps
        pumps = [*leaving] if self.pump is None else [*leaving, self.pump]
        return [pump for pump in pumps if pump.connected]

    def loop_ended(self) -> None:
        """Disable this client, because its event loop was closed before it: nothing can be sent any more."""
        self.poison(Life.LOOP_ENDED)

    def poison(self, state: Life = Life.FORKED) -> None:
        """Disable this client in the child of a fork, because counters, nonces and socket belong to the parent."""
        self.state = state
        for pump in list(self._pumps):  # sessions being left, and new ones, may seal, too
            pump.poison()
        self.session = self.out = self.pump = None
        self.blocked = True

    # -- what the pump and the session call ------------------------------------------------------------------

    def out_full(self) -> None:
        """Write now, because enough is framed to be worth a write before the turn ends."""
        if self.pump is not None:
            self.pump.write()
        for pump in self._leaving.pumps:
            pump.write()

    def writing_paused(self, pump: Pump[Session]) -> None:
        """Block casts, because the write buffer is over its high-water mark."""
        if pump is self.pump:
            self.blocked = True

    def writing_resumed(self, pump: Pump[Session]) -> None:
        """Unblock casts, because there is room to write again."""
        if pump is self.pump:
            self.blocked = False
            self._wake_writers()

    def disconnected(self, pump: Pump[Session], reason: str) -> None:
        """Clean up after a connection that ended, and hold its unsent casts for the next session."""
        session = pump.session
        if session.started:
            for direction, count in _traffic(pump).items():
                self._ended[direction] += count
        for cause, count in session.dropped.items():
            self._client.count_dropped(cause, count)
        self._registry.ended(session)
        pairs = self._pairs.pop(pump, None)
        if pairs is not None:
            pairs.cancel()
        if pump in self._leaving.pumps:
            self._report_missed()
        if pump is not self.pump:
            return
        self._missed = ""
        self._vacate(reason)
        self.held.hold_unsent(session.out.unsent())
        if self.state is OPEN:
            self._client.detached(reason)


def _traffic(pump: Pump[Session]) -> dict[str, int]:
    """Return the messages and bytes that went through a connection."""
    return {
        "sent": pump.session.out.sent_messages,
        "received": pump.session.received_messages,
        "sent bytes": pump.sent_bytes,
        "received bytes": pump.received_bytes,
    }
