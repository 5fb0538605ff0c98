"""The part of a session's protocol that clients and stores share: greeting, answers matched by id, end (sans-IO).

    CONNECTING (HELLO sent) ──► UP (WELCOME received) ──► ENDED

`iris.core.session` adds the client's part, `relay.store.session` the store's. The shell drives both in the same way:
it passes frames to `frame`, calls `turn` with the time before user code runs and `flush` after it, and calls `expire`
no later than `deadline_us`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Final

from iris.core.interfaces import Waiter
from iris.errors import ConnectionLost, LocalProtocolError, PeerProtocolError, RelayUnavailable
from iris.wire import frames
from iris.wire.codec import KIND_AT, check_control, decode_control
from iris.wire.kinds import NEVER_US, PROTOCOL_MINOR, PROTOCOL_VERSION, UNLIMITED

Handler = Callable[[memoryview, int, int], None]


class State(Enum):
    """Lifecycle state of a session."""

    CONNECTING = "connecting"
    """HELLO was sent."""
    UP = "up"
    """WELCOME was received."""
    ENDED = "ended"


CONNECTING: Final = State.CONNECTING
UP: Final = State.UP
ENDED: Final = State.ENDED
"""Module constants, because every turn reads them and a look-up in the enum class takes five times as long."""


class Conversation:
    """One connection's session with its relay. Subclasses fill `_table` and `_controls`."""

    answers: ClassVar[dict[type[frames.Control], type[frames.Control]]] = {
        frames.Status: frames.Report,
        frames.Ping: frames.Pong,
        frames.Topic: frames.Audience,
    }
    """Request type -> type of its answer, where that is not Ack."""

    def __init__(self, *, label: str, pid: int, message_limit: int) -> None:
        self.state = CONNECTING
        self.now_us = 0
        self.mono_us = 0
        self.deadline_us = NEVER_US
        self.message_limit = message_limit
        self.relay_id = b""
        self.session_id = b""
        self.reason = ""
        """Why the session ended."""
        self.on_welcome: Waiter | None = None
        self._label = label[:64]
        self._pid = pid
        self._next_id = 1
        self._acks: dict[int, tuple[type[Any], Waiter, int]] = {}
        """Pending requests: id -> (type of the answer, waiter, last hop id sent before it)."""
        self._table: list[Handler] = [self._control] * 256
        self._controls: dict[type, Callable[[Any], None]] = {
            frames.Welcome: self._on_welcome,
            frames.Error: self._on_error,
            frames.Bye: self._on_bye,
            frames.Ack: self._on_ack,
            frames.Pong: self._on_ack,
            frames.Ping: lambda ping: self.control(frames.Pong(ping.id)),
            frames.Wait: self._on_wait,
        }

    @property
    def greeting(self) -> frames.Hello:
        """The HELLO frame. Read it after the first `turn`, which sets the time."""
        return frames.Hello(PROTOCOL_VERSION, PROTOCOL_MINOR, self._label, self._pid)

    @property
    def started(self) -> bool:
        """Whether WELCOME was received."""
        return bool(self.relay_id)

    def frame(self, buf: memoryview, start: int, end: int) -> None:
        """Handle one whole frame, `buf[start:end]`. Raises PeerProtocolError if the relay broke the protocol."""
        self._table[buf[start + KIND_AT]](buf, start, end)

    @property
    def silent(self) -> bool:
        """Whether a relay on another host has sent nothing for too long."""
        return False

    def over_tls(self, relay_id: bytes, channel: bytes) -> None:
        """Expect a relay on another host, with this relay id and certificate hash (`channel`).

        Call it before `greeting`.
        """
        raise PeerProtocolError(
            "a session of this kind can attach only to the relay on its own host, not over TLS"
        )

    @property
    def last_hop(self) -> int:
        """The last hop id that this session used."""
        return 0

    def mark_alive(self) -> None:
        """Note that bytes came from the relay."""

    def turn(self, now_us: int, mono_us: int) -> None:
        """Set the time: µs since 1970, and µs of CLOCK_MONOTONIC."""
        self.now_us = now_us
        self.mono_us = mono_us

    def expire(self, mono_us: int) -> None:
        """End everything whose deadline has passed."""

    def release_casts(self) -> None:
        """Deliver the held casts, in order. Raises PeerProtocolError as `frame`."""

    def poison(self) -> None:
        """Make every later seal fail. In the child of a fork, counters and nonces belong to the parent."""

    def control(self, body: frames.Control) -> None:
        """Send a control frame."""
        raise NotImplementedError

    def ask(self, build: Callable[[int], frames.Control], waiter: Waiter) -> None:
        """Send the control frame that `build` makes for a new id.

        Its Ack, Report, Pong or Audience resolves `waiter`. If the frame breaks the protocol it is not sent, because
        the relay would end the connection for all that use it: `waiter` gets a LocalProtocolError.
        """
        if self.state is not UP:
            waiter.set_exception(ConnectionLost("relay", self.reason or "the session is not up"))
            return
        number = self._next_id
        self._next_id += 1
        body = build(number)
        try:
            check_control(body)
        except LocalProtocolError as err:
            waiter.set_exception(err)
            return
        self._acks[number] = self.answers.get(type(body), frames.Ack), waiter, self.last_hop
        self.control(body)

    def end(self, reason: str, *, routed: bool = False) -> None:
        """End the session because the connection has ended: everything in flight fails with `reason`. Idempotent.

        `routed`: the relay has routed everything that this session sent.
        """
        if self.state is ENDED:
            return
        self.state, self.reason = ENDED, reason
        self._ended(reason, routed)
        acks, self._acks = self._acks, {}
        for _, waiter, _ in acks.values():
            if not waiter.done():
                waiter.set_exception(ConnectionLost("relay", reason))

    def _ended(self, reason: str, routed: bool) -> None:
        """Hook for subclasses: the session has just ended."""

    def _control(self, buf: memoryview, start: int, end: int) -> None:
        body = decode_control(buf, start, end)
        handler = self._controls.get(type(body))
        if handler is None or (
            self.state is CONNECTING and type(body) not in (frames.Welcome, frames.Error)
        ):
            raise PeerProtocolError(
                f"the relay sent {type(body).__name__}, which a session cannot receive in state {self.state.value!r}"
            )
        handler(body)

    def _on_welcome(self, welcome: frames.Welcome) -> None:
        if self.state is not CONNECTING:
            raise PeerProtocolError("the relay sent a second WELCOME")
        if welcome.version != PROTOCOL_VERSION:
            raise PeerProtocolError(
                f"the relay speaks protocol version {welcome.version}, but this process speaks {PROTOCOL_VERSION}; "
                "upgrade the older one"
            )
        self._check_welcome(welcome)
        self.relay_id, self.session_id = welcome.relay_id, welcome.session_id
        self.message_limit = min(self.message_limit, welcome.message_limit)
        self._welcomed(welcome)
        if self.on_welcome is not None and not self.on_welcome.done():
            self.on_welcome.set_result(welcome)

    def _check_welcome(self, welcome: frames.Welcome) -> None:
        """Hook for subclasses: raise PeerProtocolError for a WELCOME that this session does not accept."""

    def _welcomed(self, welcome: frames.Welcome) -> None:
        """Apply an accepted WELCOME. Subclasses extend it."""
        self.state = UP

    def _on_error(self, error: frames.Error) -> None:
        raise RelayUnavailable(f"the relay ended the session: {error.detail}")

    def _on_bye(self, bye: frames.Bye) -> None:
        self.end(bye.reason or "the relay ended the session", routed=True)

    def _on_ack(self, ack: Any) -> None:
        entry = self._acks.get(ack.id)
        if entry is None:
            self._unexpected_ack(ack)
            return
        wanted, waiter, hops = entry
        if type(ack) is not wanted:
            raise PeerProtocolError(
                f"the relay answered request {ack.id} with {type(ack).__name__}, not {wanted.__name__}"
            )
        del self._acks[ack.id]
        self._routed(hops)
        if not waiter.done():
            waiter.set_result(ack)

    def _on_wait(self, wait: frames.Wait) -> None:
        """Answer a publisher that waits for subscribers: this session does not limit it."""
        self.control(frames.Window(wait.alias, wait.serial, UNLIMITED))

    def _unexpected_ack(self, ack: Any) -> None:
        """Hook for subclasses: an answer came with an id that has no waiter."""

    def _routed(self, hops: int) -> None:
        """Hook for subclasses: the relay, which routes in order, has routed everything up to this hop id."""
