"""Accepts sessions and passes their frames to the router and back, within the bounds of each port.

One `SessionHub` serves all sessions. The base of their ports and of links is in `relay.net.ports`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from iris.accepting import Accepted, Acceptor, connections_that_fit
from iris.errors import PeerProtocolError
from iris.remote import SESSION_ALPN, check_alpn, peer_access_id
from iris.transport import Writer
from iris.wire.codec import (
    FRAME_OVERHEAD,
    KIND_AT,
    FrameReader,
    OnFrame,
    decode_control,
    encode_control,
    ignored,
)
from iris.wire.frames import Error
from iris.wire.kinds import Kind
from relay.config import RelayConfig
from relay.core.neighbor import Neighbor
from relay.core.quotas import RELAYS_STORE, Table
from relay.core.session import Session
from relay.core.slow import Slow
from relay.logs import Quiet
from relay.net.addresses import show
from relay.net.pairs import Pairs, hand_over
from relay.net.ports import ConnectionPort, Driver
from relay.net.processes import PeerProcess, end_connection, peer_process
from relay.net.turns import PEER, TURN

log = logging.getLogger(__name__)

CONTROL_PAUSE_BYTES = 1 << 20
FIRST_LIMIT_BYTES = 64 << 10
"""Longest frame until a session has proven a key."""
ACCEPTS = 64
SWEEP_S = 0.5
INTERNAL = "internal error"
"""Reason for which a connection is cut after a bug."""
WEB_USER = "web"
"""User of sessions over WebSocket that showed no ticket."""
_QUESTIONS = frozenset({Kind.STATUS, Kind.MEMBERS, Kind.TOPIC})
"""Frames of a session that change nothing, and whose answers may cost much."""
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
ChannelOf = Callable[[ssl.SSLContext], bytes]
"""Returns the channel of the TLS context with which a connection was admitted. Raises PeerProtocolError if it was
removed."""


class SessionHub:
    """All sessions of a relay: their ports, and the time limits of silent ones."""

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        self.driver = driver
        self.router = driver.router
        self.config = config
        self.ports: set[SessionPort] = set()
        self.quiet = Quiet()
        self.protocol_errors = 0
        self.refused = 0
        self.attaching = 0
        """Accepted connections that are not attached to their ports yet."""
        self.held: list[tuple[Accepted, SessionPort]] | None = None
        """Sessions accepted but not read yet, while store and links are expected back; None: sessions are not held."""
        self.over = False
        """Whether the drain is over, so that no session may greet any more."""
        # A session takes two descriptors: its own, and that of its process.
        self.max_sessions = connections_that_fit(config.max_sessions, each=2)
        self.users = Table(self.max_sessions)
        """Sessions per user. A connection over TLS is counted when its user is known."""
        self.store_pid: Callable[[], int | None] = lambda: None
        """Process id of the store that this relay runs."""
        self._acceptor = Acceptor(self._accepted, self._starved, per_turn=ACCEPTS)
        self.router.slow.on_report = self._slow
        self.pairs = self.router.direct.maker = Pairs()
        self._loop: asyncio.AbstractEventLoop

    def listen(self, listener: socket.socket) -> None:
        """Accept sessions from `listener`, which the caller closes after `stop_listening`."""
        self._loop = asyncio.get_running_loop()
        self._acceptor.listen((listener,))

    def stop_listening(self) -> None:
        """Stop accepting. Idempotent."""
        self._acceptor.stop()

    def _accepted(self, connection: Accepted, address: object) -> None:
        peer = Peer(connection)
        if peer.pid == self.store_pid():
            peer.user = RELAYS_STORE
        if peer.user != RELAYS_STORE and not self.has_room(peer.user):
            connection.close()
            return
        try:
            process = peer_process(connection, peer.pid)
        except ProcessLookupError:
            connection.close()
            return
        except (
            OSError
        ) as err:  # no descriptor is free; the next connection will wait to be accepted
            process = None
            self._unwatched(peer.pid, err)
        self.attaching += 1
        self.users.take(peer.user)
        port = SessionPort(self, peer, connection=connection, process=process)
        if self.held is not None and peer.user != RELAYS_STORE:
            self.held.append((connection, port))
            return
        self._begin(connection, port)

    def release(self) -> None:
        """Read the sessions that were held, and hold none from now on. Idempotent."""
        held, self.held = self.held or [], None
        for connection, port in held:
            self._begin(connection, port)

    def _begin(self, connection: Accepted, port: SessionPort) -> None:
        task = self._acceptor.attach(connection, lambda: port, self._not_attached)
        task.add_done_callback(lambda task: self._release_slot(port))

    def _starved(self, err: OSError) -> None:
        self.quiet.warning(
            log, "sessions.no_descriptors", "", time.monotonic(), {"error": str(err)}
        )

    def _unwatched(self, pid: int, err: OSError) -> None:
        fields = {"pid": pid, "error": str(err)}
        self.quiet.warning(log, "session.not_watched", "", time.monotonic(), fields)

    def _slow(self, slow: Slow, now_us: int) -> None:
        since = datetime.now(UTC) - timedelta(microseconds=now_us - slow.since_us)
        fields = {
            **slow.report(now_us),
            "dropped_lately": slow.unreported,
            "since": since.isoformat(timespec="milliseconds"),
        }
        event = "link.slow" if slow.link else "session.slow"
        self.quiet.warning(log, event, (slow.label, slow.pid), time.monotonic(), fields)

    def cut_ungreeted(self) -> None:
        """Cut sessions that have not greeted, now and when they are attached.

        Nothing was accepted from them. Idempotent.
        """
        self.over = True
        for port in list(self.ports):
            if not port.session.greeted:
                port.abort("the relay stops")

    def has_room(self, user: str = "") -> bool:
        """Return whether one more session, of `user` if known, is within the limits.

        A refusal is counted and logged.
        """
        limit = self.max_sessions
        if len(self.ports) + self.attaching < limit and (not user or self.users.has_room(user)):
            return True
        self.refused += 1
        fields = {"max_sessions": limit, "user": user, "of_this_user": self.users.held.get(user, 0)}
        self.quiet.warning(log, "sessions.full", user, time.monotonic(), fields)
        return False

    def _not_attached(self, err: OSError) -> None:
        self.quiet.warning(log, "session.not_attached", "", time.monotonic(), {"error": str(err)})

    def _release_slot(self, port: SessionPort) -> None:
        """Free the slot of an accepted connection that was not attached, and never will be."""
        if port.attaching:
            self.attaching -= 1
            port.attaching = False
            self.users.give(port.user)
            port.unwatch()

    def port(self) -> SessionPort:
        """Return the protocol for a new connection within this process."""
        peer = Peer(None)
        self.users.take(peer.user)
        return SessionPort(self, peer)

    def remote_port(self, channel_of: ChannelOf) -> SessionPort:
        """Return the protocol for a session of another host whose TLS handshake is done."""
        return SessionPort(self, Peer(None), channel_of=channel_of)

    async def sweep(self) -> None:
        """Cut connections that do not greet, or do not end a frame, in time. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for port in list(self.ports):
                port.check_deadline(now_s)

    @property
    def idle(self) -> bool:
        """Whether no member runs anything, no caller waits and nothing waits to be written."""
        return not any(
            port.session.in_flight
            or port.session.pending
            or port.session.tunnels
            or port.waits
            or port.unwritten_bytes
            for port in self.ports
        )

    def end(self) -> None:
        """Close every session at once, those being accepted included. Idempotent."""
        self.stop_listening()
        held, self.held = self.held or [], None
        for connection, port in held:
            connection.close()
            self._release_slot(port)
        self._acceptor.cancel()
        for port in list(self.ports):
            port.abort("the relay stopped")

    async def close(self) -> None:
        """Close every session, and wait until the connections are closed. Idempotent."""
        self.end()
        await self._acceptor.closed()
        await asyncio.sleep(0)


class Peer:
    """The process at the other end of a local socket, as the kernel reports it; without a socket, this process."""

    __slots__ = ("pid", "trusted", "user")

    def __init__(self, connection: socket.socket | None) -> None:
        self.pid, uid = os.getpid(), os.geteuid()
        if connection is not None:
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            self.pid, uid, _ = _CREDENTIALS.unpack(credentials)
        self.trusted = uid in (0, os.geteuid())
        """Whether the peer runs as root or as the user of this process."""
        self.user = f"uid {uid}"


class SessionPort(ConnectionPort):
    """The connection of one session. Implements `relay.core.ports.Port`."""

    def __init__(
        self, hub: SessionHub, peer: Peer, *, connection: Accepted | None = None, process: PeerProcess | None = None,
        channel_of: ChannelOf | None = None, web: bool = False,
    ) -> None:  # fmt: skip
        """Serve `peer`, of a Unix socket if `connection` is given; own its `process`.

        With `channel_of` the session is of another host, and its user is unknown until it is admitted. With `web` it
        is a session over WebSocket.
        """
        super().__init__(hub.driver, hub.config)
        self._web = web
        self._remote = web or channel_of is not None
        self._trusted = peer.trusted and not self._remote
        self.user = "" if self._remote else peer.user
        self._hub = hub
        self._channel_of = channel_of
        """Set only for a session of another host."""
        self.context: ssl.SSLContext | None = None
        """TLS context with which a session of another host was admitted."""
        self._local = connection
        """The Unix socket, over which descriptors can be passed; None if it is none."""
        self._process = process
        self._pid = peer.pid
        self._reader = FrameReader(ignored, hub.driver.buffer, FIRST_LIMIT_BYTES)
        self.session: Session
        self.attaching = connection is not None
        """Whether the hub counts this connection in `attaching`."""
        self._left_bytes = -1
        self._gone = False
        """Whether the connection was lost while frames waited for their turn; they are handled first."""
        self._handle: OnFrame = ignored
        """What handles frames that waited when the connection was lost."""
        self._busy_since_s = time.monotonic()

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reader.on_frame, self._reader.may_go_on = self._first, self._may_go_on
        self._writer = Writer(self._transport)
        self.session = self._router.session_up(
            self, remote=self._remote, web=self._web, ours=self._trusted, user=self.user
        )
        self.session.takes_descriptors = self._local is not None
        if self._process is not None:
            self._process.watch(self._process_ended)
        self._hub.ports.add(self)
        self._hub.attaching -= self.attaching
        self.attaching = False
        if self._remote:
            name = transport.get_extra_info("peername")
            self.session.address = show(*name[:2]) if name else ""
        if self._channel_of is not None:
            self._admit(transport.get_extra_info("ssl_object"), self._channel_of)
        elif self._web:
            self._hub.users.take(WEB_USER)
            self.user = self.session.user = WEB_USER
        if self._hub.over:
            self.abort("the relay stops")

    def _admit(self, tls: ssl.SSLObject, channel_of: ChannelOf) -> None:
        self.context = tls.context
        try:
            check_alpn(tls, SESSION_ALPN)
            access_id = peer_access_id(tls)
            self.session.channel = channel_of(tls.context)
        except PeerProtocolError as err:
            self._protocol_error(err)
            return
        user = f"access file {access_id.hex()}"
        if not self._hub.users.has_room(user):
            self._hub.refused += 1
            self._protocol_error(PeerProtocolError(self._hub.users.full(user, "sessions")))
            return
        self._hub.users.take(user)
        self.user = self.session.user = user
        fields = {"session": self.session.number, "access": access_id.hex()}
        log.info("session.admitted", extra={"fields": fields})

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if (self._closed or self._finishing) and not self._gone:
            return
        now_ns = time.monotonic_ns()
        self._router.now_us = now_ns // 1000
        pulse = self.session.pulse
        if pulse is not None:  # part of a frame shows, too, that the peer is alive
            pulse.last_us = now_ns // 1000
        reader = self._reader
        try:
            if nbytes:
                reader.received(nbytes)
            elif self._may_go_on(0):
                reader.go_on()
        except PeerProtocolError as err:
            self._driver.settle()
            self._protocol_error(err)
        except Exception:  # an internal error must cost this session only
            log.exception("session.fault", extra={"fields": {"session": self.session.number}})
            self.abort(INTERNAL)
        finally:
            self._driver.settle()
        if reader.waiting and not self._is_done():
            self._busy_since_s = 0.0  # it is not the peer's fault
            if nbytes:
                self._wait()
        elif self.session.greeted:
            if not reader.tail and reader.big is None:
                self._busy_since_s = 0.0
            elif reader.held_bytes <= nbytes or not self._busy_since_s:
                # The unfinished frame began in this read; a busy session seldom pauses between two.
                self._busy_since_s = now_ns / 1e9

    def _wait(self) -> None:
        """Wait for the next turn with frames that were received."""
        self.turn.wait()

    def go_on(self) -> bool:
        self.turn.release()
        self.buffer_updated(0)
        if (self._closed or self._finishing) and not self._gone:
            return False
        if self._reader.waiting:
            return not self.turn.peer_is_behind
        if self._gone:
            self._end()
        else:
            self.turn.resume(TURN)
        return False

    def _first(self, buf: memoryview, start: int, end: int) -> None:
        """Handle the first frame: HELLO begins a session, FETCH fetches the end of a socket pair with a token."""
        self._reader.on_frame = self._frame
        if buf[start + KIND_AT] == Kind.FETCH and self._local is not None:
            self._hand_over(decode_control(buf, start, end))
        else:
            self._frame(buf, start, end)

    def _hand_over(self, fetch: Any) -> None:
        """Send a connection the descriptor for its token, and close it; raises PeerProtocolError."""
        end = self._hub.pairs.take(fetch.token, self.user)
        if end is None:
            raise PeerProtocolError(
                "FETCH has a token that is unknown, was used, or belongs to another user"
            )
        try:
            hand_over(self._transport.get_extra_info("socket").fileno(), end)
        except (
            OSError
        ) as err:  # the peer has left, or no descriptor is free: the tunnel stays with the relay
            fields = {"error": str(err)}
            self._hub.quiet.warning(log, "tunnel.not_handed_over", "", time.monotonic(), fields)
        self.finish()

    def _frame(self, buf: memoryview, start: int, end: int) -> bool:
        """Route a frame of a session that has not proven a key yet. The first proof replaces this handler."""
        self._router.frame_in(self.session, buf, start, end)
        if (self.session.proven or self.session.granted) and not self._finishing:
            self._reader.limit = self._router.message_limit + FRAME_OVERHEAD
            self._reader.on_frame = self._router.entry(self.session)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reader.waiting and not (self._closed or self._finishing):
            self._closed = self._gone = True
            self._handle = self._reader.on_frame
            self._reader.on_frame = self._unanswered
            self.turn.resume(PEER)
            return
        self._closed = True
        self._end()

    def _unanswered(self, buf: memoryview, start: int, end: int) -> object:
        """Handle a frame of a connection that is lost, unless it only asks something: nobody would get the answer."""
        return None if buf[start + KIND_AT] in _QUESTIONS else self._handle(buf, start, end)

    def _process_ended(self) -> None:
        """End the session if another process still has the connection. Else the kernel has ended it already."""
        self.unwatch()
        connection = self._local
        if connection is not None and connection.fileno() >= 0 and end_connection(connection):
            fields = {"session": self.session.number, "label": self.session.label, "pid": self._pid}
            log.info("session.process_ended", extra={"fields": fields})

    def unwatch(self) -> None:
        """Watch the process no longer. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _end(self) -> None:
        self._gone = False
        self.unwatch()
        self._hub.ports.discard(self)
        if self.user:
            self._hub.users.give(self.user)
            self.user = ""
        self._driver.turn()
        self._router.session_down(self.session)
        self._driver.settle()
        self._lost("session lost")

    # -- Port ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._reader.on_frame = ignored
        super().finish()
        self.turn.resume(TURN)  # closing with unread bytes would discard what was written last

    def abort(self, reason: str) -> None:
        if not self._closed:
            log.info(
                "session.aborted",
                extra={"fields": {"session": self.session.number, "reason": reason}},
            )
            self._closed = True
            self._reader.on_frame = ignored
            self._transport.abort()
        elif self._gone:
            self._end()

    def _neighbor(self) -> Neighbor | None:
        return self.session

    def _has_room_again(self) -> None:
        self._router.writable(self.session)

    def _control_waits(self) -> None:
        if self._control_bytes > CONTROL_PAUSE_BYTES:
            self.turn.pause(PEER)

    def _write_queue(self) -> None:
        super()._write_queue()
        if self._control_bytes < CONTROL_PAUSE_BYTES // 2 and not self._closed:
            self.turn.resume(PEER)

    # -- faults ----------------------------------------------------------------------------------------------

    def check_deadline(self, now_s: float) -> None:
        """Cut the connection if its greeting or the rest of a frame is overdue."""
        if not (self._busy_since_s or self._finishing) or self._closed:
            return
        config = self._hub.config
        if self._finishing:
            left_bytes = self.unwritten_bytes
            if left_bytes != self._left_bytes:
                self._left_bytes, self._busy_since_s = left_bytes, now_s
            elif now_s - self._busy_since_s > config.frame_timeout_s:
                self.abort("it does not read the last frames")
            return
        greeted = self.session.greeted
        limit_s = config.frame_timeout_s if greeted else config.hello_timeout_s
        if now_s - self._busy_since_s > limit_s and not self.turn.paused:
            what = "the rest of a frame" if greeted else "HELLO"
            self._protocol_error(PeerProtocolError(f"{what} was not received within {limit_s:g} s"))
            self._driver.settle()

    def _protocol_error(self, err: PeerProtocolError) -> None:
        """Send the session the rule that it broke, and close it. Other sessions are not affected."""
        self._hub.protocol_errors += 1
        fields = {
            "session": self.session.number,
            "label": self.session.label,
            "pid": self.session.pid,
            "error": str(err),
        }
        self._hub.quiet.warning(
            log, "session.protocol_error", self.session.pid, time.monotonic(), fields
        )
        if not self._closed:
            self.control(encode_control(Error(str(err)[:1024])))
            self.finish()
            self._router.session_down(self.session)
