"""Keeps one session with the relay up: connects, notices its end, finds the relay again, moves to a new session.

    new -> open -> closing -> closed

While there is no relay `session` is None, requests wait for it, and publications are kept within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.core.bundle import Headers
from iris.core.guard import Guard
from iris.core.interfaces import Lost, Owner
from iris.core.local_senders import LocalSenders
from iris.core.outbound import Outbound
from iris.core.session import Session
from iris.errors import Closed, ConnectionLost, IrisError, RelayUnavailable
from iris.pairs import READ_BYTES, Pairs
from iris.registry import Registry, leave
from iris.transport import Pump
from iris.wire import frames
from iris.wire.codec import ReceiveBuffer
from iris.wire.kinds import Kind

log = logging.getLogger(__name__)

LOOK_MIN_S: Final = 0.01
LOOK_MAX_S: Final = 0.25
LOOK_SHARE: Final = 0.05
"""Of the time without a relay: so often the socket's path is looked at, from every `LOOK_MIN_S` to every `LOOK_MAX_S`."""

Connector = Callable[[Callable[[], asyncio.BufferedProtocol]], Awaitable[Path | None]]
"""Connects the protocol that the factory makes to a relay, and returns the path of its socket, if it has one; raises RelayUnavailable."""

Cast = tuple[int, str, bytes, Headers | None, bool]
"""kind, name, payload, headers, packed: a publication or broadcast that no bundle took yet."""


LOOK_S: Final = 0.005
"""Between two looks at what a session that is being left still has to finish."""


def unwatched() -> Callable[[], bool]:
    """Nothing is looked at: the next attempt is made when its pause is over."""
    return lambda: False


class Registrar(Owner, Protocol):
    """The client: what no bundle took yet goes into one of the next session."""

    def cast(
        self, kind: int, name: str, payload: bytes, headers: Headers | None, packed: bool
    ) -> None: ...
    def detached(self, reason: str) -> None: ...
    def count_dropped(self, cause: str, count: int) -> None: ...


class Life(Enum):
    """What may be done with an attachment; the value completes "this client is ..."."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "the parent process's: connect anew after a fork"


OPEN: Final = Life.OPEN


class Attachment:
    """One client's hold on a relay. `session`, `out` and `pump` are of the session in use, None while there is none."""

    def __init__(
        self, client: Registrar, registry: Registry, config: ClientConfig, connector: Connector, entropy: Callable[[int], bytes],
        watch: Callable[[], Callable[[], bool]], local_senders: LocalSenders | None,
    ) -> None:  # fmt: skip
        """`watch` is called when a relay is lost, and returns what says whether one has come since it was asked last."""
        self.session: Session | None = None
        self.out: Outbound | None = None
        self.pump: Pump[Session] | None = None
        self.blocked = True
        """The write buffer is over its high-water mark, or there is no relay."""
        self.state = OPEN
        self.guard = Guard(int(config.freshness_s * 1e6))
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
        """Sessions over a Unix socket -> what fetches socket pairs for their tunnels."""
        self._pair_buffer: ReceiveBuffer | None = None
        self._pumps: WeakSet[Pump[Session]] = WeakSet()
        """Pumps of all sessions that may still send: the one in use, old ones that drain, and new ones."""
        self._up = asyncio.Event()
        self._vacant = asyncio.Event()
        """There is no session in use: the next relay is looked for."""
        self._leaving: dict[Pump[Session], asyncio.Task[None]] = {}
        """Sessions whose relay stops, until they have ended, and who ends them well."""
        self._missed = ""
        """Why the session in use was left, until those who may have missed something have heard of it."""
        self._writable: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._replacing = asyncio.Lock()
        self._lost_s: float | None = None
        """When the last session ended, while there is no other."""
        self._offline: deque[Cast] = deque()
        self._offline_bytes = 0
        self._ended: dict[str, int] = {"sent": 0, "received": 0}

    # -- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and stay connected until `close`. Raises RelayUnavailable, or what a registration failed with."""
        self._adopt(await self._attach())
        self._task = self._loop.create_task(self._run(), name="iris-client")

    async def say_bye(self) -> None:
        """Flush, and return when the relay has routed all of it and ended the session."""
        if self._leaving:
            await asyncio.wait(list(self._leaving.values()))
        if self.pump is not None:
            await self._bye(self.pump, "client closed")

    def close(self) -> None:
        """End now. Idempotent."""
        self.state = Life.CLOSED
        if self._task is not None:
            self._task.cancel()
        for leaving in self._leaving.values():
            leaving.cancel()
        for pump in [*self._leaving]:
            pump.abort("the client was closed")
        if self.pump is not None:
            self.pump.abort("the client was closed")
        offline, self._offline = self._offline, deque()
        self._offline_bytes = 0
        for cast in offline:
            self._lost(cast, "the client was closed without a relay")
        self._up.set()
        self._wake_writers()

    async def replace(self) -> None:
        """Move to a new session, make before break: nothing accepted is lost, no order is broken.

        Raises RelayUnavailable, or what a registration failed with; the old session then goes on.
        """
        async with self._replacing:
            await self.ready("relay", self._config.connect_timeout_s)
            old = self.pump
            try:
                new = await self._attach(hold=True)
            except RelayUnavailable:
                if old is None or old.session.drain_ms is None:
                    raise
                await self.ready("relay", self._config.connect_timeout_s)
                return
            if old is None or not old.connected:
                new.release_casts()
                self._take(new)
                return
            # What follows goes to the new session, once the relay has all that went to the old one.
            self.blocked = True
            try:
                with contextlib.suppress(ConnectionLost, TimeoutError):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await self._fence(old)
                # All that was routed to the old session before the new one was registered has been read.
                new.release_casts()
                if (
                    old.session.drain_ms is not None
                ):  # whoever looks for the next relay has begun already
                    new.abort("the relay is about to stop")
                    await self.ready("relay", self._config.connect_timeout_s)
                    return
                if self.pump is not old:
                    self._take(new)
                    return
                self._adopt(new)
            except BaseException:  # cancelled, or the new session has ended already
                new.abort("not taken into use")
                self.writing_resumed(old)
                raise
            try:
                with contextlib.suppress(IrisError, TimeoutError):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        # What was registered meanwhile is there before the old one goes.
                        await self._fence(new)
                        await self._fence(old)  # every JOIN on it is answered
                        await self._leave_all(old)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._config.drain_timeout_s):
                            while old.session.busy and old.connected:
                                await asyncio.sleep(LOOK_S)
                                old.turn()
                                old.flush()  # `touch` is for the session in use
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await self._bye(old, "moved to another session")
            finally:
                old.abort("replaced")

    async def _fence(self, pump: Pump[Session]) -> None:
        """Return when the relay has routed all that was sent on `pump`."""
        waiter = self._loop.create_future()
        pump.turn()
        pump.session.flush()
        pump.session.ask(frames.Ping, waiter)
        pump.flush()
        await waiter

    async def _leave_all(self, pump: Pump[Session]) -> None:
        """Return when no member of this session is handed anything more."""
        pump.turn()
        waiters = [leave(pump.session, member) for member in pump.session.members]
        pump.flush()
        if waiters:
            await asyncio.gather(*waiters)

    async def _bye(self, pump: Pump[Session], reason: str) -> None:
        if pump.connected:
            pump.turn()
            pump.session.flush()
            while pump.session.tunnels.queued_bytes and pump.connected:  # noqa: ASYNC110 - as in `_leave`
                await asyncio.sleep(LOOK_S)
            pump.turn()
            pump.session.flush()
            pump.session.out.control(frames.Bye(reason))
            pump.flush()
            await pump.closed.wait()

    def _is_open(self) -> bool:
        return self.state is OPEN

    async def _run(self) -> None:
        """Find a relay again whenever one is lost."""
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
                    await self._pause(backoff.failed(), arrived)

    async def _pause(self, pause_s: float, arrived: Callable[[], bool]) -> None:
        """Sleep, but no longer than until a relay has put its socket there."""
        until_s = self._loop.time() + pause_s
        while not arrived():
            now_s = self._loop.time()
            if now_s >= until_s:
                return
            away_s = now_s - self._lost_s if self._lost_s is not None else 0.0
            look_s = min(max(LOOK_MIN_S, away_s * LOOK_SHARE), LOOK_MAX_S)
            await asyncio.sleep(min(look_s, until_s - now_s))

    async def _move(self) -> None:
        """Take the next session into use, behind what those that are being left still have for us."""
        new = await self._attach(hold=bool(self._missed))
        try:
            for old in [*self._leaving]:
                with contextlib.suppress(ConnectionLost, TimeoutError):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await self._fence(old)
            self._tell_missed()
            new.release_casts()
            self._take(new)
        except BaseException:  # cancelled, or it has ended already
            new.abort("not taken into use")
            raise

    async def _attach(self, *, hold: bool = False) -> Pump[Session]:
        """Return a pump whose session is up, with everything registered; `hold`: until it is told to release casts."""
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
                    raise RelayUnavailable("the relay is about to stop")
        except TimeoutError:
            pump.abort("no answer in time")
            raise RelayUnavailable(
                f"the relay did not answer within {config.connect_timeout_s:g} s"
            ) from None
        except BaseException:
            pump.abort("could not be set up")
            raise
        finally:
            closed.cancel()
        return pump

    def _pairs_of(self, pump: Pump[Session], path: Path) -> None:
        """Let the tunnels of a session have socket pairs from the relay at `path`."""
        if self._pair_buffer is None:
            self._pair_buffer = ReceiveBuffer(READ_BYTES)
        tunnels = pump.session.tunnels
        pairs = Pairs(tunnels, path, self._config.relay_user, self._pair_buffer, pump.touch)
        self._pairs[pump] = pairs
        tunnels.fetch = pairs.fetch

    def _take(self, pump: Pump[Session]) -> None:
        """Adopt `pump` unless another was found meanwhile: there is one session at a time."""
        if self.pump is None:
            self._adopt(pump)
        else:
            pump.abort("another session is in use")

    def _adopt(self, pump: Pump[Session]) -> None:
        """From now on everything goes through this session; raises RelayUnavailable if it has ended meanwhile."""
        if not pump.connected:
            raise RelayUnavailable(pump.reason or "the relay closed the connection")
        if pump.session.drain_ms is not None:
            raise RelayUnavailable("the relay is about to stop")
        self._vacant.clear()
        self._end_waiting()
        self.pump, self.session, self.out = pump, pump.session, pump.session.out
        self.blocked = False
        if self._lost_s is not None:
            away_s = round(self._loop.time() - self._lost_s, 3)
            log.info("client.connected", extra={"fields": {"away_s": away_s}})
            self._lost_s = None
        pump.turn()
        self._registry.adopted(pump.session)
        offline, self._offline = self._offline, deque()
        self._offline_bytes = 0
        for cast in offline:
            try:
                self._client.cast(*cast)
            except IrisError as err:  # its key is gone, perhaps; the rest goes on
                self._lost(cast, str(err))
        pump.touch()
        self._up.set()
        self._wake_writers()

    # -- a relay that stops ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """The relay of a session stops: nothing new is begun there. What was accepted is written now; what runs may finish."""
        pump = self.pump
        if pump is None or pump.session.drain_ms is None or self.state is not OPEN:
            return
        pump.session.flush()
        pump.write()
        self._missed = "the relay was stopped"
        self._vacate("the relay is about to stop")
        leaving = self._loop.create_task(self._leave(pump), name="iris-leaving")
        self._leaving[pump] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(pump, None))

    async def _leave(self, pump: Pump[Session]) -> None:
        """Take nothing new, end what runs within the relay's grace, and say goodbye: the relay has routed all that was accepted then."""
        grace_s = (pump.session.drain_ms or 0) / 1000
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                # The goodbye has to be read before the relay ends the session.
                async with asyncio.timeout(grace_s - min(1.0, grace_s / 5)):
                    await self._fence(pump)  # every JOIN is answered
                    await self._leave_all(pump)
                    while pump.session.busy and pump.connected:  # noqa: ASYNC110 - handlers and callers have no event for all of it
                        await asyncio.sleep(LOOK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await self._bye(pump, "moved on: the relay is about to stop")
        finally:
            pump.abort("the relay was stopped")

    def _tell_missed(self) -> None:
        """Subscriptions and services hear that nobody can say how much they miss."""
        missed, self._missed = self._missed, ""
        if missed:
            self._client.detached(missed)

    def _vacate(self, reason: str) -> None:
        """There is no session in use any more."""
        self._end_waiting()
        self.session = self.out = self.pump = None
        self.blocked = True
        self._up.clear()
        self._vacant.set()
        if self.state is OPEN:
            self._lost_s = self._loop.time()
            log.info("client.disconnected", extra={"fields": {"reason": reason}})
        self._wake_writers()

    # -- use -------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise Closed unless the client may be used."""
        if self.state is not OPEN:
            raise Closed(f"this client is {self.state.value}")

    async def ready(self, name: str, timeout: float) -> tuple[Pump[Session], Session]:
        """Return the session, waiting at most `timeout` seconds for a lost relay to come back.

        Raises ConnectionLost for `name`, with may_have_run=False, when it did not.
        """
        pump = self.pump
        while pump is None:
            self.check_open()
            try:
                async with asyncio.timeout(timeout):
                    await self._up.wait()
            except TimeoutError:
                raise ConnectionLost(
                    name, f"no relay within {timeout:g} s", may_have_run=False
                ) from None
            pump = self.pump
        if self.state is not OPEN:
            self.check_open()
        pump.turn()
        return pump, pump.session

    def keep(self, cast: Cast) -> None:
        """Keep a publication until there is a relay; raises ConnectionLost when the bound is reached."""
        size = len(cast[2]) + 64
        if self._offline_bytes + size > self._config.offline_bytes:
            detail = f"no relay, and {self._offline_bytes} bytes wait for one already"
            raise ConnectionLost(cast[1], detail, may_have_run=False)
        self._offline.append(cast)
        self._offline_bytes += size

    def _lost(self, cast: Cast, cause: str) -> None:
        self._client.lost(Lost(Kind(cast[0]).name.lower(), cast[1], b"", 1, cause))

    def touch(self) -> None:
        """Something is to be written at the end of this turn."""
        if self.pump is not None:
            self.pump.touch()
        for pump in self._leaving:
            pump.touch()

    def writable(self) -> Awaitable[None] | None:
        """Return None if there is room to write, else what to await."""
        return self.wait_writable() if self.blocked and self.pump is not None else None

    async def wait_writable(self) -> None:
        """Return when there is room to write, or no relay to wait for."""
        while self.blocked and self.pump is not None and self.state is OPEN:
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    def _end_waiting(self) -> None:
        """Whoever waits for credit at the session in use looks for the next."""
        if self.out is not None:
            self.out.credits.end()

    def _wake_writers(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def messages(self, direction: str) -> int:
        """Return the data messages "sent" or "received" over all sessions, accepted or not."""
        count = self._ended[direction]
        pumps = [*self._leaving] if self.pump is None else [*self._leaving, self.pump]
        for pump in pumps:
            if pump.connected:
                session = pump.session
                sent = direction == "sent"
                count += session.out.sent_messages if sent else session.received_messages
        return count

    def poison(self) -> None:
        """In the child of a fork: counters, nonces and socket are the parent's."""
        self.state = Life.FORKED
        for pump in list(self._pumps):  # an old session may still seal, and a new one may begin to
            pump.poison()
        self.session = self.out = self.pump = None
        self.blocked = True

    # -- what the pump and the session call ------------------------------------------------------------------

    def out_full(self) -> None:
        """Enough is framed to be worth a write before the turn ends."""
        if self.pump is not None:
            self.pump.write()
        for pump in self._leaving:
            pump.write()

    def writing_paused(self, pump: Pump[Session]) -> None:
        """The write buffer is over its high-water mark."""
        if pump is self.pump:
            self.blocked = True

    def writing_resumed(self, pump: Pump[Session]) -> None:
        """There is room again."""
        if pump is self.pump:
            self.blocked = False
            self._wake_writers()

    def disconnected(self, pump: Pump[Session], reason: str) -> None:
        """A connection ended. What no bundle took yet is kept for the next."""
        session = pump.session
        if session.started:
            self._ended["sent"] += session.out.sent_messages
            self._ended["received"] += session.received_messages
        for cause, count in session.dropped.items():
            self._client.count_dropped(cause, count)
        self._registry.ended(session)
        pairs = self._pairs.pop(pump, None)
        if pairs is not None:
            pairs.cancel()
        if pump in self._leaving:
            self._tell_missed()
        if pump is not self.pump:
            return
        self._missed = ""
        self._vacate(reason)
        for cast in session.out.unsent():
            try:
                self.keep(cast)
            except ConnectionLost as err:
                self._lost(cast, err.detail)
        if self.state is OPEN:
            self._client.detached(reason)
