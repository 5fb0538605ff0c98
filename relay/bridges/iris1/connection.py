"""One client of the first Iris on the event loop: a socket on one side, its own session at the relay on
the other.

Frames from the client are processed as they arrive. If the relay cannot accept more, the client's
socket is not read. Frames for the client are written at the end of the turn, and a client that leaves
more than `queue_bytes` unread is disconnected. A connection ends in one of four ways: the client sent
CLOSE, it was lost, it was dropped for a reason, or the bridge stops.
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
from relay.bridges.iris1.barrier import PendingSubscriptions, SubscriptionBarrier
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
from relay.bridges.iris1.local import LocalClients
from relay.bridges.iris1.local_tunnel import LocalTunnelEnd
from relay.bridges.iris1.requests import Requests
from relay.bridges.iris1.tunnels import Tunnels
from relay.bridges.iris1.writer import ClientWriter, FlushQueue

log = logging.getLogger(__name__)

READ_HIGH_BYTES: Final = 256 << 10
"""Bytes that may wait unprocessed. Above this the client's socket is not read."""
FRAMES_A_TURN: Final = 64
"""Frames of one client processed in a turn. After these the other clients have their turn."""
TURNS_TO_READ: Final = 3
"""Turns of the loop after which every socket was read once and its data processed."""
STOPPED: Final = "the bridge stopped"
_ROUTED: Final = (Publish, Broadcast, Request, TunInit)
"""Frames that reach others. Subscriptions received before them must be in effect first."""


class Ending(Enum):
    """How a connection ended."""

    CLOSED = "closed"
    LOST = "lost"
    DROPPED = "dropped"
    STOPPED = "stopped"


class BridgePort(Protocol):
    """The parts of the bridge that a connection uses; implemented by `relay.bridges.iris1.bridge.Bridge`."""

    config: Iris1Config
    max_clients: int
    counters: Counter[str]
    barrier: SubscriptionBarrier
    local: LocalClients
    flush_queue: FlushQueue
    connect: Callable[[str], iris.Client]

    def connected(self, connection: ClientConnection) -> None: ...
    def admit(self, connection: ClientConnection) -> bool: ...
    def received(self, connection: ClientConnection) -> None: ...
    def disconnected(self, connection: ClientConnection) -> None: ...
    def lost(self, lost: iris.Loss) -> None: ...
    def gap(self, gap: iris.Loss) -> None: ...
    def warn(self, event: str, peer: str, reason: str) -> None: ...


class ClientConnection(asyncio.Protocol):
    """The bridge's side of one connection of a client."""

    def __init__(self, bridge: BridgePort) -> None:
        config = bridge.config
        self.machine = Machine(
            self, lambda data: self._writer.write(data), bridge.counters, message_limit=READ_HIGH_BYTES, max_calls=config.max_calls,
            call_bytes=config.call_bytes, max_tunnels=config.max_tunnels,
            tunnel_message_bytes=config.tunnel_message_bytes, tunnel_bytes=config.tunnel_bytes,
        )  # fmt: skip
        self.task: asyncio.Task[None] | None = None
        """Task that runs the connection; None before INIT."""
        self.peer = ""
        self._bridge = bridge
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._writer: ClientWriter
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._frames_in_turn = 0
        """Frames processed in this turn of the loop."""
        self._held_frame: Frame | None = None
        """Frame that waits for subscriptions of other clients."""
        self._others_settled = False
        """Those subscriptions are in effect, so `_held_frame` waits no longer."""
        self._first_in_turn = False
        """Whether the next frame begins the data that was read in this turn."""
        self._read_mark = 0
        """Bytes of this client that were received before the other clients' sockets were last read."""
        self._pending_subscriptions = PendingSubscriptions(
            bridge.barrier, lambda: self.machine.decoder.held_bytes
        )
        self._joined = asyncio.Event()
        """Set once there is a session, or there will never be one."""
        self._socket_closed = asyncio.Event()
        """Set once the socket is closed."""
        self._ended = asyncio.Event()
        self._ending: Ending | None = None
        self._reason = ""
        self.client: iris.Client | None = None
        """The client's session, once there is one."""
        self._writable: Callable[[], Awaitable[None] | None] = lambda: None
        """Returns what to await before more is written to the session, or None."""
        self._requests: Requests
        self._tunnels: Tunnels
        self.local_request_bytes = 0
        """Bytes of unanswered requests from other clients of this bridge."""
        self._cluster = ""
        """Cluster of which this is a member for other clients of the bridge; "" if none."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of the client's requests, subscriptions and tunnels."""
        self._worker: asyncio.Task[None] | None = None
        self._reading_paused = False
        self._topics: dict[bytes, tuple[iris.Subscription, asyncio.Task[None]]] = {}

    # -- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writer = ClientWriter(
            self._transport, self._bridge.config.queue_bytes, self._full, self._bridge.flush_queue
        )
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "?"
        self._bridge.connected(self)
        self._handshake_timer = self._loop.call_later(
            self._bridge.config.handshake_s, self._handshake_timed_out
        )

    def data_received(self, data: bytes) -> None:
        if self.machine.state != State.ENDED:  # data that arrives after the end is ignored
            self._first_in_turn = self._worker is None and self._held_frame is None
            self._pending_subscriptions.received_bytes += len(data)
            self.machine.decoder.feed(data)
            self._bridge.received(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.machine.decoder.mid_frame and self.machine.state == State.OPEN:
            self._bridge.counters["lost within a frame"] += 1
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self.machine.end()
        self._end(Ending.LOST)
        self._writer.lost()
        self._socket_closed.set()
        self._joined.set()
        # A task that was cancelled before it began has not reported the end.
        if self.task is None or self.task.done():
            self._bridge.disconnected(self)

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    def _handshake_timed_out(self) -> None:
        if self.machine.state == State.OPENING:
            self._bridge.counters["handshake timeouts"] += 1
            self._transport.abort()

    def _full(self, unread_bytes: int) -> None:
        self._bridge.counters["slow clients cut"] += 1
        reason = f"the client left {unread_bytes} bytes unread"
        self._bridge.warn("bridge.client_dropped", self.peer, reason)
        self._end(Ending.DROPPED, reason)

    # -- what the client says --------------------------------------------------------------------------------

    def process(self, *, subscribing: bool = False) -> None:
        """Process received frames until one has to wait.

        `subscribing`: stop before the first frame that is routed.
        """
        if self._worker is None:
            try:
                waiting = self._next(subscribing=subscribing)
            except (Violation, iris.IrisError) as err:
                self._drop_offender(err)
                return
            if waiting is not None:
                self._worker = self._loop.create_task(self._process_rest(waiting))
        if self.machine.decoder.held_bytes > READ_HIGH_BYTES and not self._reads:
            self._reading_paused = True
            self._transport.pause_reading()

    @property
    def _reads(self) -> bool:
        """Whether a received frame is processed as soon as it is complete."""
        return self._worker is None and self.machine.state != State.JOINING

    def _next(self, *, subscribing: bool = False) -> Awaitable[None] | None:
        """Process frames; return what to await before the next one, or None if no frame is left.

        It waits for room at the relay, or for a turn of the other clients.
        """
        machine, writable = self.machine, self._writable
        waiting: Awaitable[None] | None = None
        frame: Frame | None = None
        while machine.state in (State.OPENING, State.OPEN):
            if self._frames_in_turn == FRAMES_A_TURN:
                self._frames_in_turn = 0
                waiting = asyncio.sleep(0)
                break
            upcoming, self._held_frame = self._held_frame or machine.decoder.next_frame(), None
            if upcoming is None:
                frame = None
                break
            if isinstance(upcoming, _ROUTED):
                waiting = self._waits_for_others()
                if waiting is not None or subscribing:
                    self._held_frame = upcoming
                    break
            frame = upcoming
            self._first_in_turn = self._others_settled = False
            self._frames_in_turn += 1
            waiting = machine.handle(frame) or writable()
            if waiting is not None:
                frame = None  # others need not wait for what this one waits for
                break
        if waiting is None:
            self._frames_in_turn = 0
        if self._pending_subscriptions.may_hold_more:
            self._pending_subscriptions.progressed(may_hold_more=isinstance(frame, Subscribe))
        return waiting

    def _waits_for_others(self) -> Awaitable[None] | None:
        """Return what to await before a frame is routed: earlier subscriptions of other clients, read or not."""
        pending = self._pending_subscriptions
        if (
            not self._first_in_turn
            and pending.received_bytes - self.machine.decoder.held_bytes > self._read_mark
        ):
            return self._read_others()
        if self._others_settled or not self._bridge.barrier.subscribing:
            return None
        self._others_settled = True
        return self._bridge.barrier.wait(pending)

    async def _read_others(self) -> None:
        """Return when everything that other clients sent before the last bytes read here is read as
        well.

        The first frame of a turn needs no such wait: the other sockets were read after it arrived.
        Later frames may have arrived since then.
        """
        received_bytes = self._pending_subscriptions.received_bytes
        for _ in range(TURNS_TO_READ):
            await asyncio.sleep(0)
        self._read_mark = received_bytes

    async def _process_rest(self, first: Awaitable[None]) -> None:
        waiting: Awaitable[None] | None = first
        try:
            while waiting is not None:
                await waiting
                waiting = self._next()
        except (Violation, iris.IrisError) as err:
            self._drop_offender(err)
        finally:
            self._worker = None
            self._read_on()

    def _read_on(self) -> None:
        if self._reading_paused and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def _drop_offender(self, err: Exception) -> None:
        """Disconnect the client for an error of its own. Other clients do not notice."""
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
        """Stop sending; what still arrives is read and ignored."""
        self._writer.hang_up()
        self._read_on()

    def _end(self, ending: Ending, reason: str = "") -> None:
        if self._ending is None:
            self._ending = ending
            self._reason = reason
            self._ended.set()
            self._pending_subscriptions.end()
            self._leave_local(topics=ending != Ending.STOPPED)

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what the machine asks for ---------------------------------------------------------------------------

    def init_received(self, cluster: str) -> None:
        """Start the session of a client that sent INIT."""
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        admitted = self._bridge.admit(self)
        self.task = self._loop.create_task(
            self._run(cluster, admitted=admitted), name="iris1-client"
        )

    def broadcast(self, cluster: str, message: bytes) -> Awaitable[None] | None:
        """Broadcast a message for the client; return what to await before its next frame."""
        session = self._session
        taken = session.offer_broadcast(cluster, message)
        self._bridge.local.broadcast(cluster, message)
        return None if taken else session.broadcast(cluster, message)

    def publish(self, topic: str, event: bytes) -> Awaitable[None] | None:
        """Publish an event for the client; return what to await before its next frame."""
        session = self._session
        taken = session.offer(topic, event)
        self._bridge.local.publish(topic, event)
        return None if taken else session.publish(topic, event)

    def request(self, id: int, cluster: str, payload: bytes, timeout_ms: int) -> None:
        """Send a request to a cluster for the client."""
        if self._ending is not None:
            self.machine.no_reply(id)
        else:
            requesting = self._requests.request(id, cluster, payload, timeout_ms)
            if requesting is not None:
                self._track(requesting)

    def tunnel(self, id: int, cluster: str, timeout_ms: int) -> None:
        """Open a tunnel for the client."""
        if self._ending is not None:
            self.machine.refuse_tunnel(id)
        else:
            opening = self._tunnels.open(id, cluster, timeout_ms)
            self._track(self._loop.create_task(opening, name="iris1-tunnel"))

    def subscribe(self, topic: bytes, name: str) -> None:
        """Subscribe the client to a topic. A second subscription to it changes nothing."""
        if topic in self._topics:
            self._bridge.counters["double subscriptions"] += 1
            return
        if len(self._topics) >= self._bridge.config.max_subscriptions:
            limit = self._bridge.config.max_subscriptions
            raise Violation(
                f"the client has {limit} subscriptions, the limit, and asked for another"
            )

        def forward(message: iris.Message) -> None:
            current = self._topics.get(topic)
            if current is not None and current[0] is subscription:
                self.machine.send(codec.publish(topic, message.payload))

        subscription = self._session.subscribe(name, forward, on_loss=self._bridge.gap)
        self._frames_in_turn = (
            FRAMES_A_TURN  # subscribing takes long with many topics: end the turn
        )
        subscribed = self._subscribed(subscription)
        registering = self._loop.create_task(subscribed, name="iris1-subscribe")
        self._topics[topic] = subscription, registering
        self._bridge.local.subscribe(name, topic, self)
        self._track(registering)
        self._pending_subscriptions.begin(registering)

    async def _subscribed(self, subscription: iris.Subscription) -> None:
        try:
            await subscription.ready()
            fields = {"peer": self.peer, "topic": subscription.filter}
            log.debug("bridge.subscribed", extra={"fields": fields})
        except (iris.ConnectionLost, iris.RequestTimeout, iris.Closed):
            return  # registered again when there is a relay
        except iris.IrisError as err:
            if self._ending is None:  # else the connection already ends for another reason
                self._drop_offender(err)

    def unsubscribe(self, topic: bytes) -> None:
        """Unsubscribe from a topic. An unknown topic changes nothing."""
        known = self._topics.pop(topic, None)
        if known is None:
            self._bridge.counters["unknown unsubscriptions"] += 1
            return
        subscription, registering = known
        self._bridge.local.unsubscribe(subscription.filter, self)
        registering.cancel()  # without a relay the task would wait, and there may be many
        subscription.stop()

    def accept_tunnel(self, tunnel: LocalTunnelEnd) -> None:
        """Carry a tunnel that another client of the bridge opened to this one."""
        self._track(self._loop.create_task(self._accept(tunnel), name="iris1-tunnel"))

    async def _accept(self, tunnel: LocalTunnelEnd) -> None:
        try:
            await self._tunnels.on_tunnel(tunnel)
        finally:
            tunnel.fail("the other side disconnected")  # if it has not ended yet

    def _leave_local(self, *, topics: bool) -> None:
        """Leave the local cluster, so that other clients of the bridge send nothing more.

        `topics`: unsubscribe as well.
        """
        local = self._bridge.local
        if self._cluster:
            local.leave(self._cluster, self)
        if topics:
            for subscription, _ in self._topics.values():
                local.unsubscribe(subscription.filter, self)

    def closing(self) -> None:
        """Note that the client sent CLOSE; nothing more is read from it."""
        self.machine.end(closed=True)
        if self._ending == Ending.STOPPED:  # the client's own CLOSE takes precedence
            self._requests.end()
            self._ending = Ending.CLOSED
        self._end(Ending.CLOSED)

    @property
    def _session(self) -> iris.Client:
        assert self.client is not None  # only INIT is handled before there is a session
        return self.client

    # -- its session -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish what was accepted within a time limit, then disconnect."""
        if self.task is None:
            self._transport.abort()
        self._end(Ending.STOPPED)

    def give_up(self) -> None:
        """Disconnect at once."""
        self._transport.abort()
        if self.task is not None:
            self.task.cancel()

    async def reload_keys(self, keyring: iris.Keyring) -> bool:
        """Change to a new keyring; return False if the session cannot, and keeps the old keys.

        Waits until there is a session.
        """
        if self.task is None:
            return True  # it will connect with the new keys
        await self._joined.wait()  # set when the socket is closed at the latest
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

    async def _run(self, cluster: str, *, admitted: bool) -> None:
        bridge = self._bridge
        try:
            if not admitted:
                bridge.counters["clients over the bound"] += 1
                raise iris.ConfigError(
                    f"the bridge is full: it has {bridge.max_clients} clients (--max-clients)"
                )
            client = bridge.connect(f"iris1 {self.peer}"[:64])
            client._runtime.local_senders = bridge.local.local_senders
            async with client:
                await self._serve(client, cluster)
        except iris.IrisError as err:
            bridge.warn("bridge.client_refused", self.peer, str(err))
            if self.machine.state == State.JOINING:
                self.machine.deny(str(err))
            self._end(Ending.DROPPED, str(err))
        finally:
            if self._ending == Ending.CLOSED:
                self._writer.write(codec.close(""))
            elif self._ending == Ending.STOPPED:
                if self.machine.state == State.JOINING:
                    self.machine.deny(STOPPED)
                else:
                    self._writer.write(codec.close(STOPPED))
            self.machine.end()
            self._leave_local(topics=True)
            self._hang_up()
            try:
                await self._socket_closed.wait()
            finally:
                bridge.disconnected(self)

    async def _serve(self, client: iris.Client, cluster: str) -> None:
        bridge, machine = self._bridge, self.machine
        self.client = client
        self._writable = client._runtime.attached().writable
        client.on_loss = bridge.lost
        machine.decoder.message_limit = client.message_limit
        local = bridge.local
        self._requests = Requests(client, machine, bridge.config, bridge.counters, local)
        self._tunnels = Tunnels(
            client, machine, bridge.config, bridge.counters, self._writer, local
        )
        async with contextlib.AsyncExitStack() as serving:
            if cluster:
                await serving.enter_async_context(client.serve(self._service(cluster)))
            self._joined.set()
            if self._ending is None:
                if cluster:
                    self._cluster = cluster
                    local.join(cluster, self)
                machine.accept()
                log.info("bridge.client", extra={"fields": {"peer": self.peer, "cluster": cluster}})
                self._read_on()
                self.process()
            try:
                await self._ended.wait()
                await self._wind_up(serving.aclose)
            finally:
                for task in (*self._tasks, *([self._worker] if self._worker is not None else ())):
                    task.cancel()
            if machine.state == State.OPEN:
                machine.end()  # the session ends before the client learns of it
            log.info("bridge.client_left", extra={"fields": self._summary(cluster)})
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=bridge.config.drain_s)

    def _service(self, cluster: str) -> iris.Service:
        service = iris.Service(cluster)
        service.on_request(self._requests.on_request)
        service.on_tunnel(self._tunnels.on_tunnel)
        service.on_loss(self._bridge.gap)

        @service.on_broadcast
        def forward(message: iris.Message) -> None:
            self.machine.send(codec.broadcast(message.payload))

        return service

    async def _wind_up(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Leave the cluster and finish what was accepted. Work that needs a client that has left ends at once."""
        stopped = self._ending == Ending.STOPPED
        gracefully = self._ending in (Ending.CLOSED, Ending.STOPPED)
        self._tunnels.end(
            STOPPED if stopped else "" if gracefully else "the client disconnected",
            gracefully=gracefully,
        )
        if stopped:
            self._track(self._loop.create_task(self._requests.finished(), name="iris1-finished"))
        else:
            self._requests.end()
        leaving = asyncio.ensure_future(leave())
        try:
            rest = {*self._tasks, *([self._worker] if self._worker is not None else ())}
            if rest:
                await asyncio.wait(rest, timeout=self._bridge.config.drain_s)
            await leaving
        finally:
            leaving.cancel()

    def _summary(self, cluster: str) -> dict[str, object]:
        ending = self._ending.value if self._ending is not None else ""
        return {"peer": self.peer, "cluster": cluster, "ending": ending, "reason": self._reason}
