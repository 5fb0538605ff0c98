"""One client of the first Iris on the event loop: its socket on one side, a session of its own at the relay on the other.

What it sends is acted on as it comes; when the relay does not take it, the client is not read from. What comes for it is
written at the end of the turn, and a client that leaves more than `queue_bytes` unread is cut. It ends in one of four ways: it
said CLOSE, it is lost, it was dropped with a reason, or the bridge stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, Protocol, cast

import iris
from relay.bridges.iris1.calls import Calls
from relay.bridges.iris1.config import Iris1Config
from relay.bridges.iris1.core import codec
from relay.bridges.iris1.core.frames import (
    Broadcast,
    Frame,
    Publish,
    Request,
    Subscribe,
    TunInit,
    Violation,
)
from relay.bridges.iris1.core.machine import Machine, State
from relay.bridges.iris1.gate import Gate, Settling
from relay.bridges.iris1.lines import Lines
from relay.bridges.iris1.local import Locals
from relay.bridges.iris1.near import NearEnd
from relay.bridges.iris1.outlet import Flushing, Outlet

log = logging.getLogger(__name__)

READ_HIGH_BYTES: Final = 256 << 10
"""What may wait to be acted on; then the client is not read from."""
FRAMES_A_TURN: Final = 64
"""Then other clients have their turn, however many frames have come."""
TURNS_TO_READ: Final = 3
"""Turns of the loop after which every socket has been looked at, and what was in it acted on."""
STOPPED: Final = "the bridge stopped"
_ROUTED: Final = (Publish, Broadcast, Request, TunInit)
"""What others get, so that subscriptions that were said before it have to be in effect."""


class Ending(Enum):
    """How a connection ended."""

    CLOSED = "closed"
    LOST = "lost"
    DROPPED = "dropped"
    STOPPED = "stopped"


class House(Protocol):
    """What a conversation asks and tells the bridge that it is with: see `relay.bridges.iris1.bridge.Bridge`."""

    config: Iris1Config
    counters: Counter[str]
    gate: Gate
    near: Locals
    flushing: Flushing
    connect: Callable[[str], iris.Client]

    def connected(self, conversation: Conversation) -> None: ...
    def greeted(self, conversation: Conversation) -> bool: ...
    def arrived(self, conversation: Conversation) -> None: ...
    def disconnected(self, conversation: Conversation) -> None: ...
    def lost(self, lost: iris.Lost) -> None: ...
    def gap(self, gap: iris.Lost) -> None: ...
    def warn(self, event: str, peer: str, reason: str) -> None: ...


class Conversation(asyncio.Protocol):
    """One connection."""

    def __init__(self, bridge: House) -> None:
        config = bridge.config
        self.machine = Machine(
            self, lambda data: self._outlet.emit(data), bridge.counters, message_limit=READ_HIGH_BYTES, max_calls=config.max_calls,
            call_bytes=config.call_bytes, max_tunnels=config.max_tunnels,
            tunnel_message_bytes=config.tunnel_message_bytes, tunnel_bytes=config.tunnel_bytes,
        )  # fmt: skip
        self.task: asyncio.Task[None] | None = None
        """From INIT on."""
        self.peer = ""
        self._bridge = bridge
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._outlet: Outlet
        self._silence: asyncio.TimerHandle | None = None
        self._taken = 0
        """Frames in this turn."""
        self._kept: Frame | None = None
        """A frame that waits for subscriptions of others."""
        self._others_settled = False
        """They are in effect: it waits no more."""
        self._first = False
        """The next frame is the first that was read in its turn."""
        self._looked = 0
        """How many of the bytes said here came before others' sockets were looked at."""
        self._settling = Settling(bridge.gate, lambda: self.machine.decoder.held_bytes)
        self._joined = asyncio.Event()
        """It has a session, or it never will."""
        self._gone = asyncio.Event()
        """It is closed."""
        self._ended = asyncio.Event()
        self._ending: Ending | None = None
        self._reason = ""
        self.client: iris.Client | None = None
        self._writable: Callable[[], Awaitable[None] | None] = lambda: None
        """What the client has to wait for before more is written."""
        """Its session, once there is one."""
        self._calls: Calls
        self._lines: Lines
        self.near_bytes = 0
        """Of requests by other programs of the bridge that it has not answered."""
        self._cluster = ""
        """Of which it is a member, for other programs of the bridge."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The client's requests and tunnels."""
        self._worker: asyncio.Task[None] | None = None
        self._reading_paused = False
        self._topics: dict[bytes, tuple[iris.Subscription, asyncio.Task[None]]] = {}

    # -- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outlet = Outlet(
            self._transport, self._bridge.config.queue_bytes, self._full, self._bridge.flushing
        )
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "?"
        self._bridge.connected(self)
        self._silence = self._loop.call_later(self._bridge.config.handshake_s, self._silent)

    def data_received(self, data: bytes) -> None:
        if self.machine.state != State.ENDED:  # what still comes then is nobody's
            self._first = self._worker is None and self._kept is None
            self._settling.said += len(data)
            self.machine.decoder.feed(data)
            self._bridge.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.machine.decoder.within and self.machine.state == State.OPEN:
            self._bridge.counters["lost within a frame"] += 1
        if self._silence is not None:
            self._silence.cancel()
        self.machine.end()
        self._end(Ending.LOST)
        self._outlet.lost()
        self._gone.set()
        self._joined.set()
        if self.task is None or self.task.done():  # cancelled before it began, it has told nobody
            self._bridge.disconnected(self)

    def pause_writing(self) -> None:
        self._outlet.pause()

    def resume_writing(self) -> None:
        self._outlet.resume()

    def _silent(self) -> None:
        if self.machine.state == State.OPENING:
            self._bridge.counters["handshake timeouts"] += 1
            self._transport.abort()

    def _full(self, unread_bytes: int) -> None:
        self._bridge.counters["slow clients cut"] += 1
        reason = f"the client left {unread_bytes} bytes unread"
        self._bridge.warn("bridge.client_dropped", self.peer, reason)
        self._end(Ending.DROPPED, reason)

    # -- what the client says --------------------------------------------------------------------------------

    def work(self, *, subscribing: bool = False) -> None:
        """Act on what has come, as far as nothing has to be waited for; `subscribing`: up to the first frame that is routed."""
        if self._worker is None:
            try:
                waiting = self._next(subscribing=subscribing)
            except (Violation, iris.IrisError) as err:
                self._offended(err)
                return
            if waiting is not None:
                self._worker = self._loop.create_task(self._keep_working(waiting))
        if self.machine.decoder.held_bytes > READ_HIGH_BYTES and not self._reads:
            self._reading_paused = True
            self._transport.pause_reading()

    @property
    def _reads(self) -> bool:
        """Whether what has come is acted on as soon as it is whole."""
        return self._worker is None and self.machine.state != State.JOINING

    def _next(self, *, subscribing: bool = False) -> Awaitable[None] | None:
        """Act on frames; return what to await before the next one: the relay may have to take something, or others a turn."""
        machine, writable = self.machine, self._writable
        waiting: Awaitable[None] | None = None
        frame: Frame | None = None
        while machine.state in (State.OPENING, State.OPEN):
            if self._taken == FRAMES_A_TURN:
                self._taken = 0
                waiting = asyncio.sleep(0)
                break
            upcoming, self._kept = self._kept or machine.decoder.next_frame(), None
            if upcoming is None:
                frame = None
                break
            if isinstance(upcoming, _ROUTED):
                waiting = self._waits_for_others()
                if waiting is not None or subscribing:
                    self._kept = upcoming
                    break
            frame = upcoming
            self._first = self._others_settled = False
            self._taken += 1
            waiting = machine.take(frame) or writable()
            if waiting is not None:
                frame = None  # others do not wait for what this one waits for
                break
        if waiting is None:
            self._taken = 0
        if self._settling.more:
            self._settling.stepped(more=isinstance(frame, Subscribe))
        return waiting

    def _waits_for_others(self) -> Awaitable[None] | None:
        """Return what to await before a frame is routed: the subscriptions that others said before it, read or not."""
        settling = self._settling
        if not self._first and settling.said - self.machine.decoder.held_bytes > self._looked:
            return self._look()
        if self._others_settled or not self._bridge.gate.subscribing:
            return None
        self._others_settled = True
        return self._bridge.gate.wait(settling)

    async def _look(self) -> None:
        """Return when all that others said before the latest that was read here is read, too.

        The first frame woke us, and others' sockets were looked at after it was there. Later frames may have come since then.
        """
        said = self._settling.said
        for _ in range(TURNS_TO_READ):
            await asyncio.sleep(0)
        self._looked = said

    async def _keep_working(self, first: Awaitable[None]) -> None:
        waiting: Awaitable[None] | None = first
        try:
            while waiting is not None:
                await waiting
                waiting = self._next()
        except (Violation, iris.IrisError) as err:
            self._offended(err)
        finally:
            self._worker = None
            self._read_on()

    def _read_on(self) -> None:
        if self._reading_paused and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def _offended(self, err: Exception) -> None:
        """End the connection for what the client did: nobody else hears of it."""
        silent = isinstance(err, Violation) and err.silent
        cause = "violations" if isinstance(err, Violation) else "refused"
        self._bridge.counters[cause] += 1
        self._bridge.warn("bridge.client_dropped", self.peer, str(err))
        self._drop("" if silent else str(err))

    def _drop(self, reason: str) -> None:
        if reason:
            self.machine.drop(reason)
        else:
            self.machine.end()
        self._hang_up()
        self._end(Ending.DROPPED, reason)

    def _hang_up(self) -> None:
        """Say no more; what still comes is read, and is nobody's."""
        self._outlet.hang_up()
        self._read_on()

    def _end(self, ending: Ending, reason: str = "") -> None:
        if self._ending is None:
            self._ending = ending
            self._reason = reason
            self._ended.set()
            self._settling.end()
            self._leave_near(topics=ending != Ending.STOPPED)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what the machine asks for ---------------------------------------------------------------------------

    def greeted(self, cluster: str) -> None:
        """It said who it is."""
        if self._silence is not None:
            self._silence.cancel()
        room = self._bridge.greeted(self)
        self.task = self._loop.create_task(self._run(cluster, room=room), name="iris1-client")

    def broadcast(self, cluster: str, message: bytes) -> Awaitable[None] | None:
        """Pass a broadcast on."""
        session = self._session
        taken = session.offer_broadcast(cluster, message)
        self._bridge.near.broadcast(cluster, message)
        return None if taken else session.broadcast(cluster, message)

    def publish(self, topic: str, event: bytes) -> Awaitable[None] | None:
        """Pass an event on."""
        session = self._session
        taken = session.offer(topic, event)
        self._bridge.near.publish(topic, event)
        return None if taken else session.publish(topic, event)

    def request(self, id: int, cluster: str, payload: bytes, timeout_ms: int) -> None:
        """Ask a cluster."""
        if self._ending is not None:
            self.machine.no_reply(id)
        else:
            asking = self._calls.ask(id, cluster, payload, timeout_ms)
            if asking is not None:
                self._keep(asking)

    def tunnel(self, id: int, cluster: str, timeout_ms: int) -> None:
        """Open a tunnel."""
        if self._ending is not None:
            self.machine.refuse_tunnel(id)
        else:
            opening = self._lines.open(id, cluster, timeout_ms)
            self._keep(self._loop.create_task(opening, name="iris1-tunnel"))

    def subscribe(self, topic: bytes, name: str) -> None:
        """Hear a topic; a second time changes nothing."""
        if topic in self._topics:
            self._bridge.counters["double subscriptions"] += 1
            return
        if len(self._topics) >= self._bridge.config.max_subscriptions:
            limit = self._bridge.config.max_subscriptions
            raise Violation(
                f"the client has {limit} subscriptions, the limit, and asked for another"
            )

        def heard(message: iris.Message) -> None:
            heard_by = self._topics.get(topic)
            if heard_by is not None and heard_by[0] is subscription:
                self.machine.send(codec.publish(topic, message.payload))

        subscription = self._session.subscribe(name, heard, on_gap=self._bridge.gap)
        self._taken = FRAMES_A_TURN  # it takes the longer, the more topics the client has
        subscribed = self._subscribed(subscription)
        registering = self._loop.create_task(subscribed, name="iris1-subscribe")
        self._topics[topic] = subscription, registering
        self._bridge.near.subscribe(name, topic, self)
        self._keep(registering)
        self._settling.begin(registering)

    async def _subscribed(self, subscription: iris.Subscription) -> None:
        try:
            await subscription.ready()
            fields = {"peer": self.peer, "topic": subscription.filter}
            log.debug("bridge.subscribed", extra={"fields": fields})
        except (iris.ConnectionLost, iris.RequestTimeout, iris.Closed):
            return  # it is registered anew when there is a relay again
        except iris.IrisError as err:
            if self._ending is None:  # else its end has its own last word
                self._offended(err)

    def unsubscribe(self, topic: bytes) -> None:
        """Hear a topic no more; one that is not heard changes nothing."""
        known = self._topics.pop(topic, None)
        if known is None:
            self._bridge.counters["unknown unsubscriptions"] += 1
            return
        subscription, registering = known
        self._bridge.near.unsubscribe(subscription.filter, self)
        registering.cancel()  # without a relay it would wait, and there may be many
        subscription.stop()

    def accept_tunnel(self, tunnel: NearEnd) -> None:
        """Carry a tunnel that another program of the bridge opened to it."""
        self._keep(self._loop.create_task(self._accept(tunnel), name="iris1-tunnel"))

    async def _accept(self, tunnel: NearEnd) -> None:
        try:
            await self._lines.on_tunnel(tunnel)
        finally:
            tunnel.fail("the other side disconnected")  # if nothing has ended it

    def _leave_near(self, *, topics: bool) -> None:
        """Other programs of the bridge hand it nothing any more; `topics`: no events either."""
        near = self._bridge.near
        if self._cluster:
            near.leave(self._cluster, self)
        if topics:
            for subscription, _ in self._topics.values():
                near.unsubscribe(subscription.filter, self)

    def closing(self) -> None:
        """It said CLOSE: nothing more comes from it."""
        self.machine.end(closed=True)
        if self._ending == Ending.STOPPED:  # its own end comes before ours
            self._calls.end()
            self._ending = Ending.CLOSED
        self._end(Ending.CLOSED)

    @property
    def _session(self) -> iris.Client:
        assert self.client is not None  # nothing but INIT is taken before
        return self.client

    # -- its session -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish what was accepted, in bounded time, and end it."""
        if self.task is None:
            self._transport.abort()
        self._end(Ending.STOPPED)

    def give_up(self) -> None:
        """End at once."""
        self._transport.abort()
        if self.task is not None:
            self.task.cancel()

    async def reload_keys(self, keyring: iris.Keyring) -> bool:
        """Move to a changed keyring, once it has a session; False: it cannot, and goes on with the old keys."""
        if self.task is None:
            return True  # it will connect with the new ones
        await self._joined.wait()  # at the latest when it is gone
        if self.client is None or self._ending is not None:
            return True
        try:
            await self.client.reload_keys(keyring)
        except iris.IrisError as err:
            if self._ending is not None:
                return True
            fields = {"peer": self.peer, "error": str(err)}
            log.error("bridge.keys_not_reloaded", extra={"fields": fields})
            return False
        return True

    async def _run(self, cluster: str, *, room: bool) -> None:
        bridge = self._bridge
        try:
            if not room:
                bridge.counters["clients over the bound"] += 1
                raise iris.ConfigError(
                    f"the bridge is full: it has {bridge.config.max_clients} clients (--max-clients)"
                )
            client = bridge.connect(f"iris1 {self.peer}"[:64])
            client._runtime.local_senders = bridge.near.local_senders
            async with client:
                await self._serve(client, cluster)
        except iris.IrisError as err:
            bridge.warn("bridge.client_refused", self.peer, str(err))
            if self.machine.state == State.JOINING:
                self.machine.deny(str(err))
            self._end(Ending.DROPPED, str(err))
        finally:
            if self._ending == Ending.CLOSED:
                self._outlet.emit(codec.close(""))
            elif self._ending == Ending.STOPPED:
                if self.machine.state == State.JOINING:
                    self.machine.deny(STOPPED)
                else:
                    self._outlet.emit(codec.close(STOPPED))
            self.machine.end()
            self._leave_near(topics=True)
            self._hang_up()
            try:
                await self._gone.wait()
            finally:
                bridge.disconnected(self)

    async def _serve(self, client: iris.Client, cluster: str) -> None:
        bridge, machine = self._bridge, self.machine
        self.client = client
        self._writable = client._runtime.attached().writable
        client.on_loss = bridge.lost
        machine.decoder.message_limit = client.message_limit
        near = bridge.near
        self._calls = Calls(client, machine, bridge.config, bridge.counters, near)
        self._lines = Lines(client, machine, bridge.config, bridge.counters, self._outlet, near)
        async with contextlib.AsyncExitStack() as serving:
            if cluster:
                await serving.enter_async_context(client.serve(self._service(cluster)))
            self._joined.set()
            if self._ending is None:
                if cluster:
                    self._cluster = cluster
                    near.join(cluster, self)
                machine.accept()
                log.info("bridge.client", extra={"fields": {"peer": self.peer, "cluster": cluster}})
                self._read_on()
                self.work()
            try:
                await self._ended.wait()
                await self._wind_up(serving.aclose)
            finally:
                for task in (*self._tasks, *([self._worker] if self._worker is not None else ())):
                    task.cancel()
            if machine.state == State.OPEN:
                machine.end()  # the session ends before its client is told
            log.info("bridge.client_left", extra={"fields": self._farewell(cluster)})
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=bridge.config.drain_s)

    def _service(self, cluster: str) -> iris.Service:
        service = iris.Service(cluster)
        service.on_request(self._calls.on_request)
        service.on_tunnel(self._lines.on_tunnel)
        service.on_gap(self._bridge.gap)

        @service.on_broadcast
        def heard(message: iris.Message) -> None:
            self.machine.send(codec.broadcast(message.payload))

        return service

    async def _wind_up(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Leave the cluster and finish what was accepted; what only the client could finish has ended with it."""
        stopped = self._ending == Ending.STOPPED
        gracefully = self._ending in (Ending.CLOSED, Ending.STOPPED)
        self._lines.end(
            STOPPED if stopped else "" if gracefully else "the client disconnected",
            gracefully=gracefully,
        )
        if stopped:
            self._keep(self._loop.create_task(self._calls.finished(), name="iris1-finished"))
        else:
            self._calls.end()
        leaving = asyncio.ensure_future(leave())
        try:
            rest = {*self._tasks, *([self._worker] if self._worker is not None else ())}
            if rest:
                await asyncio.wait(rest, timeout=self._bridge.config.drain_s)
            await leaving
        finally:
            leaving.cancel()

    def _farewell(self, cluster: str) -> dict[str, object]:
        ending = self._ending.value if self._ending is not None else ""
        return {"peer": self.peer, "cluster": cluster, "ending": ending, "reason": self._reason}
