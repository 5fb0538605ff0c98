"""All tunnels of one session: those that it opens, and those opened to its members (sans-IO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from iris.core.bundle import Headers
from iris.core.conversation import UP
from iris.core.direct import REPORT_BYTES, PairEnd
from iris.core.guard import Shares
from iris.core.inbound import InFlow
from iris.core.requests import error_of
from iris.core.session_base import SessionBase
from iris.core.tunnel import Growth, TunnelEnd
from iris.crypto.keys import ClusterKey
from iris.errors import OpenError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import BODY_AT, HOP, KIND_AT, TUNNEL_BODY_AT, tunnel_frame
from iris.wire.kinds import NEVER_US, Cause, Kind, Refusal
from iris.wire.names import split_site

MAX_HALF_OPEN: Final = 1024
HALF_OPEN_US: Final = 5_000_000
Fetch = Callable[[bytes, TunnelEnd], None]
"""Fetch the end of the socket pair for a token and pass it to `Tunnels.attach_pair`. On failure the
tunnel stays with the relay."""


class _AfterPong:
    """A `Waiter` for the PONG to a PING, which calls `then`. If PONG does not come, the session has ended."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def done(self) -> bool:
        return False

    def set_result(self, result: Any, /) -> None:
        self._then()

    def set_exception(self, exception: BaseException, /) -> None:
        """Do nothing: the session has ended, so every tunnel is already broken."""


class Tunnels:
    """The tunnel ends of one session, `ends`: hop id -> end. Incoming tunnels that stay half open expire."""

    __slots__ = ("_growth", "_half_open", "_session", "_shares", "dirty", "ends", "fetch")

    def __init__(self, session: SessionBase) -> None:
        self.ends: dict[int, TunnelEnd] = {}
        self._session = session
        self.dirty: list[TunnelEnd] = []
        """Tunnels with a record that was begun in this turn."""
        self._growth = Growth()
        self._half_open: dict[int, tuple[int, bytes]] = {}
        """Half-open incoming tunnels: hop id -> (time at which it expires, key id)."""
        self._shares = Shares(MAX_HALF_OPEN)
        self.fetch: Fetch | None = None
        """Set only for a relay on this host, which alone can pass descriptors."""

    def open(
        self,
        name: str,
        key: ClusterKey,
        headers: Headers | None,
        timeout_ms: int,
        member: str = "",
    ) -> TunnelEnd:
        """Start a tunnel, with `member` to the one member with this id. Its end is `open` once that has accepted."""
        hop = self._session.next_hop()
        tunnel_id = self._session.entropy(16)
        bare = split_site(name)[1]
        end = self._end(bare, key, tunnel_id, hop, initiator=True, opening=headers)
        self.ends[hop] = end
        self._session.out.opening(
            name,
            key,
            tunnel_id,
            end.hello(),
            hop,
            self._session.mono_us + 1000 * timeout_ms,
            timeout_ms,
            member,
        )
        return end

    def _end(
        self,
        name: str,
        key: ClusterKey,
        tunnel_id: bytes,
        hop: int,
        *,
        initiator: bool,
        opening: Headers | None = None,
    ) -> TunnelEnd:
        return TunnelEnd(
            name, key, tunnel_id, hop, initiator=initiator, ephemeral=self._session.entropy(32),
            emit=self._emit, mark_dirty=self.dirty.append, growth=self._growth, opening=opening,
        )  # fmt: skip

    def _emit(self, frame: bytes) -> None:
        if frame[KIND_AT] == Kind.TUNNEL_END:
            # The last frame of this hop id. It does not count as a message, because relays create it, too.
            self._forget(HOP.unpack_from(frame)[4])
        elif self._session.state is UP:
            self._session.out.sent_messages += 1
        if self._session.state is UP:
            self._session.out.raw(frame)

    def opening(self, buf: memoryview, start: int, end: int) -> None:
        """Handle TUNNEL_OPEN, which opens a tunnel to a member. Its handler starts when the first record has opened."""
        if end - start < BODY_AT:
            raise PeerProtocolError(
                f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
            )
        _, _, _, alias, hop, deadline_us = HOP.unpack_from(buf, start)
        if deadline_us and self._session.clock_us:
            deadline_us += self._session.clock_us
        self._session.received_alone += 1
        flow = self._session.flow(alias, Kind.TUNNEL_OPEN)
        if hop in self.ends:
            raise PeerProtocolError(f"the relay opened tunnel {hop}, which is already open")
        binding = self._session.owner.binding(flow)
        refusal = (
            Refusal.LEAVING if binding is None else binding.admit(Kind.TUNNEL_OPEN, end - start)
        )
        key_id = flow.key.key_id
        if refusal is None and not self._shares.has_room(key_id, self._session.guard.keys):
            refusal = Refusal.FULL
        if refusal is None and deadline_us and deadline_us < self._session.mono_us:
            refusal = Refusal.EXPIRED
        if refusal is not None:
            self._session.refuse(buf, start, end, refusal)
            return
        tunnel = self._end(flow.name, flow.key, flow.sender_id, hop, initiator=False)
        try:
            answer = tunnel.answer(buf[start + BODY_AT : end])
        except OpenError:
            self._session.drop("unreadable")
            self._session.refuse(buf, start, end, Refusal.UNREADABLE)
            return
        self.ends[hop] = tunnel
        until = self._session.mono_us + HALF_OPEN_US
        self._half_open[hop] = (until, key_id)
        self._shares.take(key_id)
        self._session.deadline_us = min(self._session.deadline_us, until)
        tunnel.wake = lambda: self._opened(hop, tunnel, flow)
        self._emit(tunnel_frame(Kind.TUNNEL_ACCEPT, hop, answer))

    def _opened(self, hop: int, tunnel: TunnelEnd, flow: InFlow) -> None:
        """Start the handler once the first record of an incoming tunnel has opened; clean up if it broke."""
        if tunnel.headers is None and not tunnel.broken:
            return
        self._remove_half_open(hop)
        tunnel.wake = lambda: None
        binding = self._session.owner.binding(flow)
        if tunnel.broken:
            return
        if binding is None:
            self._break(hop, "the service has left")
        else:
            binding.tunnel(tunnel)

    def _remove_half_open(self, hop: int) -> None:
        """Remove a tunnel from the half-open ones."""
        half = self._half_open.pop(hop, None)
        if half is not None:
            self._shares.give_back(half[1])

    def drop(self, end: TunnelEnd) -> None:
        """Break a tunnel that was not opened in time."""
        self._break(end.hop, "the caller gave it up before it was open")

    def _break(self, hop: int, reason: str) -> None:
        end = self._forget(hop)
        if end is not None:
            end.fail(reason, notify=True)

    def _forget(self, hop: int) -> TunnelEnd | None:
        """Remove and return an end that will receive no more frames."""
        end = self.ends.pop(hop, None)
        if end is not None:
            self._report(end, 0)
            end.release()
        return end

    # -- socket pairs ----------------------------------------------------------------------------------------

    def paired(self, pair: frames.Pair) -> None:
        """Handle PAIR: the relay has created a socket pair for a tunnel. Raises PeerProtocolError."""
        end = self.ends.get(pair.hop)
        if end is not None:
            end.pair_granted()
            if self.fetch is not None:
                self.fetch(pair.token, end)

    def attach_pair(self, end: TunnelEnd, pair: PairEnd) -> None:
        """Give a tunnel its end of the pair, or close it if the tunnel has ended."""
        if self.ends.get(end.hop) is end:
            end.attach_pair(pair)
        else:
            pair.close()

    def pair_lost(self, end: TunnelEnd) -> None:
        """Handle a broken pair: the tunnel breaks unless the relay reports the reason before it answers a PING."""
        if not end.ended and self._session.state is UP:
            self._session.ask(frames.Ping, _AfterPong(lambda: self._break_if_open(end)))

    def _break_if_open(self, end: TunnelEnd) -> None:
        if self.ends.get(end.hop) is end and not end.ended:
            self._break(end.hop, "its direct connection broke")

    def _request_pair(self, end: TunnelEnd) -> None:
        end.wants_direct = False
        if self.fetch is not None and not end.ended:
            self._session.out.control(frames.Direct(end.hop))

    def _report(self, end: TunnelEnd, least_bytes: int) -> None:
        if end.direct is not None and self._session.state is UP:
            passed = end.direct.report(least_bytes)
            if passed is not None and any(passed):
                self._session.out.control(frames.Carried(*passed))

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written to socket pairs."""
        return sum(end.pair.queued_bytes for end in self.ends.values() if end.pair is not None)

    def frame(self, buf: memoryview, start: int, end: int) -> None:
        """Handle TUNNEL_ACCEPT, TUNNEL_DATA or TUNNEL_END."""
        if end - start < TUNNEL_BODY_AT:
            raise PeerProtocolError(
                f"a tunnel frame of {end - start} bytes is shorter than its {TUNNEL_BODY_AT} bytes of fixed fields"
            )
        _, kind, _, _, hop, _ = HOP.unpack_from(buf, start)
        if kind != Kind.TUNNEL_END:
            self._session.received_alone += 1
        tunnel = self.ends.get(hop)
        if tunnel is None:
            if kind != Kind.TUNNEL_END:
                self._session.drop("late tunnel frames")
        elif kind == Kind.TUNNEL_DATA:
            tunnel.received(buf[start + TUNNEL_BODY_AT : end])
        elif kind == Kind.TUNNEL_ACCEPT:
            try:
                tunnel.accepted(buf[start + TUNNEL_BODY_AT : end])
            except (OpenError, PeerProtocolError) as err:
                self._break(hop, str(err))
        else:
            cause = buf[start + TUNNEL_BODY_AT] if end - start > TUNNEL_BODY_AT else Cause.BROKEN
            direct = tunnel.direct
            if (
                cause == Cause.CLOSED
                and direct is not None
                and direct.moved
                and direct.pair is not None
            ):
                direct.pair.drain()  # the peer sent all of it before TUNNEL_END
            self._forget(hop)
            tunnel.ended_by_relay(cause)

    def failed(self, fail: frames.Fail) -> None:
        """Handle FAIL: the relay found no member for an opening."""
        end = self._forget(fail.hop)
        if end is not None:
            end.error = error_of(end.name, fail)
            end.ended_by_relay(fail.cause)

    def flush(self) -> None:
        """Seal the records begun in this turn."""
        for end in self.dirty:
            end.flush()
            if end.wants_direct:
                self._request_pair(end)
            if end.pair is not None:
                end.pair.flush()
                self._report(end, REPORT_BYTES)
        self.dirty.clear()

    def expire(self, mono_us: int) -> int:
        """Break tunnels that were half open for too long; return the next deadline."""
        soonest = NEVER_US
        for hop, (until, _) in list(self._half_open.items()):
            if until <= mono_us:
                self._remove_half_open(hop)
                self._break(
                    hop, f"the peer did not finish the handshake within {HALF_OPEN_US / 1e6:g} s"
                )
            elif until < soonest:
                soonest = until
        return soonest

    def end(self, reason: str) -> None:
        """Break all tunnels because the connection has ended."""
        ends, self.ends = self.ends, {}
        for end in ends.values():
            end.release()
            end.fail(reason, notify=False)
