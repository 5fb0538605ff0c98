"""State of one connection of the first Iris: which frames are allowed, and which answers the client
waits for.

    OPENING ── INIT ──► JOINING ── accept ──► OPEN ── CLOSE, or `drop` ──► ENDED
       └── wrong INIT: DENY or nothing ─────────────────────────────────────┘

The client has no timers, so every REQUEST and every TUN_INIT is answered exactly once, whatever
happens; `end` answers those that are left. A client that sent CLOSE expects no answers to its requests
and gets none; only the tunnels that it is opening are refused. Only INIT or DENY is sent before the
connection is open: frames for a new member wait for `accept`. Frames are passed to a `Host`, which
answers through the methods below. If a method of the host returns an awaitable, it must be done before
the next frame is handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, Protocol

from relay.bridges.iris1.core import codec, frames
from relay.bridges.iris1.core.decoder import Decoder
from relay.bridges.iris1.core.frames import Frame, Oversized, Payload, Violation
from relay.bridges.iris1.core.names import BadName, cluster_name, topic_name
from relay.bridges.iris1.core.tunnels import WINDOW, ByteBudget, ClientEnd, TunnelFault

MAX_TIMEOUT_MS: Final = 0xFFFF_FFFF


class State(Enum):
    """State of a connection."""

    OPENING = "opening"
    JOINING = "joining"
    OPEN = "open"
    ENDED = "ended"


class TunnelHandler(Protocol):
    """Joins the client's end of a tunnel with its other end."""

    client_end: ClientEnd | None

    def opened(self, client_end: ClientEnd) -> None:
        """The client confirmed the tunnel."""

    def message(self, data: bytes) -> None:
        """The client sent a complete message."""

    def allowed(self) -> None:
        """The client granted more bytes."""

    def closed(self, reason: str | None) -> None:
        """The client closed the tunnel (None) or broke the protocol (the reason)."""


class ReplyReceiver(Protocol):
    """Receives the answer to a request that was dispatched to the client: exactly one of these calls."""

    def answered(self, success: bool, payload: Payload) -> None: ...
    def failed(self, reason: str) -> None: ...


class Host(Protocol):
    """Acts on the client's frames; implemented on the event loop."""

    def init_received(self, cluster: str) -> None: ...
    def broadcast(self, cluster: str, message: bytes) -> Awaitable[None] | None: ...
    def publish(self, topic: str, event: bytes) -> Awaitable[None] | None: ...
    def request(self, id: int, cluster: str, payload: bytes, timeout_ms: int) -> None: ...
    def subscribe(self, topic: bytes, name: str) -> None: ...
    def unsubscribe(self, topic: bytes) -> None: ...
    def tunnel(self, id: int, cluster: str, timeout_ms: int) -> None: ...
    def closing(self) -> None: ...


class Machine:
    """The state of one connection. `emit` sends bytes to the client; `counters` counts errors by cause."""

    def __init__(
        self, host: Host, emit: Callable[[bytes], None], counters: Counter[str], *, message_limit: int,
        max_calls: int, call_bytes: int, max_tunnels: int, tunnel_message_bytes: int, tunnel_bytes: int,
    ) -> None:  # fmt: skip
        self.state = State.OPENING
        self.decoder = Decoder(message_limit)
        self._host = host
        self._emit = emit
        self._counters = counters
        self._held: list[bytes] = []
        self._pending: dict[int, int] = {}
        """Requests of the client without an answer: id -> size of the payload."""
        self._pending_bytes = 0
        self._max_calls = max_calls
        self._max_call_bytes = call_bytes
        self._dispatched: dict[int, ReplyReceiver] = {}
        self._next_dispatch = 0
        self._opening: set[int] = set()
        """Ids of the client's tunnels that are not confirmed yet."""
        self._tunnels: dict[int, TunnelHandler] = {}
        self._builds: dict[int, TunnelHandler | None] = {}
        """Tunnels offered to the client and not confirmed: build id -> handler, or None once given up."""
        self._next_build = 0
        self._max_tunnels = max_tunnels
        self._tunnel_message_bytes = tunnel_message_bytes
        self._incoming = ByteBudget(tunnel_bytes)
        self.outgoing = ByteBudget(tunnel_bytes)
        """Budget of tunnel messages to the client; `_incoming` is for messages from it."""

    # -- life ------------------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Open the connection: send INIT, then the frames that waited for it."""
        self.state = State.OPEN
        self._emit(codec.init())
        held, self._held = self._held, []
        for data in held:
            self._emit(data)

    def deny(self, reason: str) -> None:
        """Refuse the connection: send DENY with the reason."""
        self.end()
        self._emit(codec.deny(reason))

    def drop(self, reason: str) -> None:
        """End an open connection with a CLOSE frame that carries the reason."""
        was_open = self.state == State.OPEN
        self.end()
        if was_open:
            self._emit(codec.close(reason))

    def end(self, *, closed: bool = False) -> None:
        """End the connection: answer all pending requests and openings. Idempotent.

        `closed`: the client sent CLOSE and expects no more answers to its requests.
        """
        if closed:
            self._pending.clear()
            self._pending_bytes = 0
        for id in list(self._pending):
            self.no_reply(id)
        for id in list(self._opening):
            self.refuse_tunnel(id)
        self.state = State.ENDED
        self._held = []
        receivers, self._dispatched = self._dispatched, {}
        for receiver in receivers.values():
            receiver.failed("the service disconnected before it answered")

    def send(self, data: bytes) -> bool:
        """Send a frame, or hold it until the connection is open; return False if it has ended."""
        if self.state == State.OPEN:
            self._emit(data)
        elif self.state == State.JOINING:
            self._held.append(data)
        else:
            return False
        return True

    def handle(self, frame: Frame) -> Awaitable[None] | None:
        """Act on one frame. Await the result, if there is one, before the next frame. Raises Violation."""
        try:
            return self._handle(frame)
        except BadName as err:
            raise Violation(str(err)) from None

    def _handle(self, frame: Frame) -> Awaitable[None] | None:
        host = self._host
        match frame:
            case frames.Publish(topic, event):
                return host.publish(topic_name(topic), self._checked(event))
            case frames.Broadcast(cluster, message):
                return host.broadcast(cluster_name(cluster), self._checked(message))
            case frames.Request():
                self._request(frame)
            case frames.Reply(id, success, payload):
                receiver = self._dispatched.pop(id, None)
                if receiver is None:
                    self._counters["late replies"] += 1
                else:
                    receiver.answered(success, payload)
            case frames.TunTransfer(id, size, chunk):
                self._transfer(id, size, chunk)
            case frames.TunAllow(id, size):
                self._allow(id, size)
            case frames.Subscribe(topic):
                host.subscribe(topic, topic_name(topic))
            case frames.Unsubscribe(topic):
                host.unsubscribe(topic)
            case frames.TunInit():
                self._tun_init(frame)
            case frames.TunConfirm(build, id):
                self._tun_confirm(build, id)
            case frames.TunClose(id):
                self._tun_close(id)
            case frames.Init(magic, version, cluster):
                self._init(magic, version, cluster)
            case frames.Close():
                host.closing()
        return None

    def _init(self, magic: bytes, version: bytes, cluster: bytes) -> None:
        if magic != frames.CLIENT_MAGIC:
            raise Violation(
                "INIT has a wrong magic: the client does not speak this protocol", silent=True
            )
        if version != frames.VERSION:
            theirs = version.decode(errors="replace")
            self.deny(f"Unsupported protocol. Client: {theirs}. Iris: {frames.VERSION.decode()}.")
            raise Violation(f"version {theirs[:40]!r} is not supported", silent=True)
        try:
            name = cluster_name(cluster) if cluster else ""
        except BadName as err:
            self.deny(str(err))
            raise Violation(str(err), silent=True) from None
        self.state = State.JOINING
        self._host.init_received(name)

    def _checked(self, payload: Payload) -> bytes:
        """Return a payload, or raise Violation if it is oversized and its frame has no answer."""
        if isinstance(payload, Oversized):
            self._counters["oversized"] += 1
            raise Violation(payload.text("message"))
        return payload

    # -- the client's requests -------------------------------------------------------------------------------

    def _request(self, frame: frames.Request) -> None:
        id, payload = frame.id, frame.payload
        if id in self._pending:
            raise Violation(f"request id {id} is in use by a request that is not answered yet")
        size = 0 if isinstance(payload, Oversized) else len(payload)
        full = len(self._pending) >= self._max_calls or (
            self._pending_bytes and self._pending_bytes + size > self._max_call_bytes
        )
        self._pending[id] = size
        self._pending_bytes += size
        if isinstance(payload, Oversized):
            self._counters["oversized"] += 1
            self.reply(id, payload.text("request").encode(), success=False)
            return
        if full:
            self._counters["requests over the bound"] += 1
            self.no_reply(id)
            return
        try:
            cluster = cluster_name(frame.cluster)
        except BadName as err:
            self.reply(id, str(err).encode(), success=False)
        else:
            self._host.request(id, cluster, payload, min(frame.timeout_ms, MAX_TIMEOUT_MS))

    def reply(self, id: int, payload: bytes, *, success: bool) -> None:
        """Answer a request of the client, unless it is answered already."""
        if self._remove_pending(id):
            self._emit(codec.reply(id, payload, success=success))

    def no_reply(self, id: int) -> None:
        """Answer a request of the client with a timeout, unless it is answered already."""
        if self._remove_pending(id):
            self._emit(codec.no_reply(id))

    def _remove_pending(self, id: int) -> bool:
        size = self._pending.pop(id, None)
        if size is None:
            return False
        self._pending_bytes -= size
        return self.state != State.ENDED

    # -- requests for the client -----------------------------------------------------------------------------

    @property
    def dispatched(self) -> int:
        """Number of requests dispatched to the client and not answered."""
        return len(self._dispatched)

    def is_pending(self, id: int) -> bool:
        """Whether a request of the client is not answered yet."""
        return id in self._pending

    @property
    def pending(self) -> int:
        """Number of the client's requests that are not answered yet."""
        return len(self._pending)

    def dispatch(self, receiver: ReplyReceiver, payload: bytes, timeout_ms: int) -> int | None:
        """Send the client a request; return its id, or None if the client has left or is at capacity."""
        if self.state == State.ENDED:
            return None
        if len(self._dispatched) >= self._max_calls:
            self._counters["requests over the bound"] += 1
            return None
        id = self._next_dispatch
        self._next_dispatch += 1
        self._dispatched[id] = receiver
        self.send(codec.request(id, payload, min(timeout_ms, MAX_TIMEOUT_MS)))
        return id

    def forget_dispatched(self, id: int) -> None:
        """Ignore the reply to this request from now on."""
        self._dispatched.pop(id, None)

    # -- tunnels ---------------------------------------------------------------------------------------------

    @property
    def tunnel_count(self) -> int:
        """Number of the client's tunnels, including those that are being opened."""
        return len(self._opening) + len(self._tunnels) + len(self._builds)

    def _tun_init(self, frame: frames.TunInit) -> None:
        id = frame.id
        if id in self._opening or id in self._tunnels:
            raise Violation(f"tunnel id {id} is already in use")
        full = self.tunnel_count >= self._max_tunnels
        self._opening.add(id)
        try:
            cluster = cluster_name(frame.cluster)
        except BadName:
            full = True
        if full:
            self._counters["tunnels refused"] += 1
            self.refuse_tunnel(id)
        else:
            self._host.tunnel(id, cluster, min(frame.timeout_ms, MAX_TIMEOUT_MS))

    def confirm_tunnel(self, id: int, handler: TunnelHandler) -> None:
        """Confirm a tunnel of the client, if it is still being opened."""
        if id in self._opening:
            self._opening.discard(id)
            self._open(id, handler, codec.tun_confirm(id))

    def refuse_tunnel(self, id: int) -> None:
        """Refuse a tunnel of the client, if it is still being opened."""
        if id in self._opening:
            self._opening.discard(id)
            if self.state != State.ENDED:
                self._emit(codec.tun_refuse(id))

    def build_tunnel(self, handler: TunnelHandler) -> int | None:
        """Offer the client a tunnel; return the build id, or None if the client has left or is at capacity."""
        if self.state == State.ENDED:
            return None
        if self.tunnel_count >= self._max_tunnels:
            self._counters["tunnels refused"] += 1
            return None
        build = self._next_build
        self._next_build += 1
        self._builds[build] = handler
        self.send(codec.tun_init(build))
        return build

    def give_up_build(self, build: int) -> None:
        """Stop waiting for a confirmation. If it comes later, the tunnel is closed."""
        if build in self._builds:
            self._builds[build] = None

    def _tun_confirm(self, build: int, id: int) -> None:
        if build not in self._builds:
            raise Violation(
                f"tunnel {id} confirms build id {build}, which the bridge did not offer"
            )
        if id in self._opening or id in self._tunnels:
            raise Violation(f"tunnel id {id} is already in use")
        handler = self._builds.pop(build)
        if handler is None:
            self._counters["late tunnels"] += 1
            self._emit(codec.tun_close(id, "the tunnel was confirmed too late"))
            return
        self._open(id, handler, b"")
        assert handler.client_end is not None
        handler.opened(handler.client_end)

    def _open(self, id: int, handler: TunnelHandler, first: bytes) -> None:
        handler.client_end = ClientEnd(id, self._incoming, self._tunnel_message_bytes)
        self._tunnels[id] = handler
        self._emit(first + codec.tun_allow(id, WINDOW))

    def _transfer(self, id: int, size: int, chunk: bytes) -> None:
        handler = self._tunnels.get(id)
        if handler is None or handler.client_end is None:
            self._counters["chunks of closed tunnels"] += 1
            return
        try:
            message = handler.client_end.receive(size, chunk)
        except TunnelFault as fault:
            self._counters["tunnel faults"] += 1
            self.close_tunnel(handler.client_end, str(fault))
            handler.closed(str(fault))
            return
        if message is not None:
            handler.message(message)
        self.grant(handler.client_end)

    def grant(self, client_end: ClientEnd) -> None:
        """Grant the client the bytes that have become free."""
        size = client_end.grant()
        if size and self._is_open(client_end):
            self._emit(codec.tun_allow(client_end.id, size))

    def _allow(self, id: int, size: int) -> None:
        handler = self._tunnels.get(id)
        if handler is not None and handler.client_end is not None:
            handler.client_end.allow(size)
            handler.allowed()

    def _tun_close(self, id: int) -> None:
        handler = self._tunnels.get(id)
        # Without a handler both sides closed it at the same time.
        if handler is not None and handler.client_end is not None:
            self.close_tunnel(handler.client_end)
            handler.closed(None)

    def close_tunnel(self, client_end: ClientEnd, reason: str = "") -> None:
        """Close the client's end of a tunnel, unless the client has closed it."""
        if self._is_open(client_end):
            del self._tunnels[client_end.id]
            client_end.end()
            if self.state != State.ENDED:
                self._emit(codec.tun_close(client_end.id, reason))

    def _is_open(self, client_end: ClientEnd) -> bool:
        """Whether this end is still open. The client may give the id of a closed tunnel to another."""
        handler = self._tunnels.get(client_end.id)
        return handler is not None and handler.client_end is client_end
