"""A client's session with its relay: ids, deadlines, answers, dispatch (sans-IO).

Incoming messages are passed to the owner's bindings and sinks by plain calls. `iris.core.conversation`
describes how the shell drives a session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from iris.core.casts import CASTS, Casts
from iris.core.conversation import UP
from iris.core.guard import Guard
from iris.core.heartbeat import ClockSamples, Heartbeat
from iris.core.inbound import UnknownKey
from iris.core.interfaces import Owner
from iris.core.local_senders import LocalSenders
from iris.core.outbound import Outbound
from iris.core.requests import Requests
from iris.core.serving import ServingSession
from iris.core.store_calls import StoreCalls
from iris.core.tunnels import Tunnels
from iris.crypto.keys import ClusterKey
from iris.errors import (
    PeerProtocolError,
)  # fmt: skip
from iris.wire import frames
from iris.wire.codec import (
    BUNDLE,
    HOP,
    KIND_AT,
    check_control,
)  # fmt: skip
from iris.wire.kinds import (
    Kind,
    Refusal,
)
from iris.wire.runs import read_answers, read_calls

MAX_HELD_BYTES: Final = 16 << 20
NOT_OURS: Final = "under a key that is not ours"


class Session(ServingSession):
    """A client's session over one connection."""

    def __init__(
        self, owner: Owner, guard: Guard, entropy: Callable[[int], bytes], *, label: str, pid: int, message_limit: int,
        compress: bool = False, local_senders: LocalSenders | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            owner, guard, entropy, local_senders, label=label, pid=pid, message_limit=message_limit
        )
        self._compress = compress
        self._local_senders = local_senders
        self.drain_ms: int | None = None
        """Grace time after which the relay, which is stopping, ends this session; None before DRAIN."""
        self.requests = requests = Requests(self)
        self.tunnels = tunnels = Tunnels(self)
        self.store_calls = StoreCalls(self)
        self.members: list[int] = []
        """Members that joined through this session."""
        self.registered: set[object] = set()
        """Registrations that the owner made through this session, as keys of the owner's choice."""
        self._certified = self._channel = b""
        """Over TLS: the relay id in the certificate, and the certificate's hash, to which proofs are bound."""
        self._heartbeat: Heartbeat | None = None
        """Heartbeat state; None for a relay on this host."""
        self._web = False
        """Whether this is a session over WebSocket."""
        self._ticket: str | msgspec.UnsetType = msgspec.UNSET
        """Over WebSocket: what HELLO shows to the relay."""
        self._prove_first: Sequence[ClusterKey] = ()
        """Over WebSocket: keys to prove before anything else, because the ticket may require it."""
        self._samples: ClockSamples | None = None
        """Over WebSocket: samples of the relay's clock, in place of heartbeats."""
        self.casts = casts = Casts(
            owner, guard, self._inbound, self.drop, self.control, local_senders
        )  # fmt: skip
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._watches: dict[
            int, tuple[Callable[[frames.Membership], None], Callable[[str], None] | None]
        ] = {}
        """id -> (called with each Membership, called with the reason if the relay refuses)."""
        table = self._table
        table[Kind.PUBLISH] = casts.publish
        table[Kind.REPLY] = table[Kind.FAULT] = table[Kind.ANSWER] = requests.answered
        table[Kind.ANSWERS] = requests.answered_run
        table[Kind.BROADCAST] = casts.broadcast
        table[Kind.STREAM_REPLY] = self.store_calls.answered
        table[Kind.TUNNEL_OPEN] = tunnels.opening
        table[Kind.TUNNEL_ACCEPT] = table[Kind.TUNNEL_DATA] = table[Kind.TUNNEL_END] = tunnels.frame
        self._controls |= {
            frames.Drain: self._on_drain,
            frames.Declare: self._inbound.declare,
            frames.Gap: casts.gap,
            frames.Fail: self._on_fail,
            frames.Unrouted: self._on_unrouted,
            frames.Pair: tunnels.paired,
            frames.Share: lambda share: self.out.share(share.name, share.key_id, share.parts),
            frames.Wait: casts.windows.on_wait,
            frames.Window: lambda window: self.out.credits.window(window),
            frames.Roster: requests.roster,
            frames.Done: requests.done,
            frames.Membership: self._on_membership,
            frames.Report: self._on_ack,
            frames.Audience: self._on_ack,
            frames.Beat: self._on_beat,
            frames.Ping: self._on_ping,
        }

    @property
    def greeting(self) -> frames.Hello:
        far = self._certified or self._web
        return msgspec.structs.replace(
            super().greeting, mono_us=self.mono_us if far else 0, ticket=self._ticket
        )

    # -- driving ---------------------------------------------------------------------------------------------

    def frame(self, buf: memoryview, start: int, end: int) -> None:
        """Handle one whole frame, `buf[start:end]`. Raises PeerProtocolError if the relay broke the protocol."""
        try:
            self._table[buf[start + KIND_AT]](buf, start, end)
        except UnknownKey:
            self._not_ours(buf, start, end)

    def turn(self, now_us: int, mono_us: int) -> None:
        """Set the time: µs since 1970, and µs of CLOCK_MONOTONIC."""
        self.now_us = now_us
        self.mono_us = mono_us
        self.casts.now_us = now_us
        if self.state is UP:
            self.out.now_us = now_us

    def flush(self) -> None:
        """Seal what the turn collected, and return the credit of pushes that ended."""
        if self.state is not UP:
            return
        if self.requests.left:
            self.requests.flush()
        self.out.flush()
        if self.tunnels.dirty:
            self.tunnels.flush()
        if self._credits:
            for (member, kind), (hops, unstarted) in self._credits.items():
                self.out.control(frames.Credit(member, kind, hops, unstarted))
            self._credits.clear()

    def expire(self, mono_us: int) -> None:
        """End everything whose deadline has passed, and send a beat if it is time."""
        self.mono_us = mono_us
        self.deadline_us = min(
            self.requests.expire(mono_us),
            self.tunnels.expire(mono_us),
            self.store_calls.expire(mono_us),
        )
        heartbeat = self._heartbeat
        if heartbeat is not None and self.state is UP:
            if mono_us >= heartbeat.beat_us:
                self.out.control(heartbeat.beat(mono_us))
            self.deadline_us = min(self.deadline_us, heartbeat.deadline_us)

    def over_tls(self, relay_id: bytes, channel: bytes) -> None:
        self._certified, self._channel = relay_id, channel

    def over_web(self, ticket: str = "", keys: Sequence[ClusterKey] = ()) -> None:
        """Show a ticket and our clock in HELLO, because the session is over WebSocket.

        `keys` are proven before anything else. Call it before `greeting`.
        """
        self._web = True
        self._prove_first = keys
        self._ticket = ticket or msgspec.UNSET

    @property
    def has_ticket(self) -> bool:
        """Whether the session shows a ticket, which limits what it may do."""
        return isinstance(self._ticket, str)

    def mark_alive(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.last_us = self.mono_us

    @property
    def silent(self) -> bool:
        """Whether a relay on another host has sent nothing for too long."""
        return self._heartbeat is not None and self._heartbeat.dead(self.mono_us)

    def hold_casts(self) -> None:
        """Hold incoming casts, because another session of this client may still have earlier ones to read."""
        for kind in CASTS:
            self._table[kind] = self._hold

    def release_casts(self) -> None:
        held, self._held = self._held, []
        self._held_bytes = 0
        self._table[Kind.PUBLISH] = self.casts.publish
        self._table[Kind.BROADCAST] = self.casts.broadcast
        self._table[Kind.GAP] = self._control
        for frame in held:
            self.frame(memoryview(frame), 0, len(frame))

    def _hold(self, buf: memoryview, start: int, end: int) -> None:
        self._held.append(bytes(buf[start:end]))
        self._held_bytes += end - start
        if self._held_bytes > MAX_HELD_BYTES:
            self.release_casts()  # casts still unread elsewhere will then count as late, and be reported

    def _ended(self, reason: str, routed: bool) -> None:
        self._table = [self._late] * 256  # frames read together with BYE can no longer be answered
        if self.started:
            self.out.retire_senders()
            self.out.credits.end()
        cancels, self.cancels = self.cancels, {}
        for cancel in cancels.values():  # no answer can reach these callers any more
            cancel()
        self.requests.end(reason, routed=routed)
        self.tunnels.end(reason)
        self.store_calls.end(reason)

    def _late(self, buf: memoryview, start: int, end: int) -> None:
        """Drop a frame that came after BYE."""
        self.drop("after BYE")

    def poison(self) -> None:
        if self.started:
            self.out.poison()
        for end in self.tunnels.ends.values():
            end.poison()

    def forget_keys(self) -> None:
        """Remove aliases under keys that the owner no longer has."""
        self._inbound.forget_keys()

    # -- sending ---------------------------------------------------------------------------------------------

    def watch(
        self,
        name: str,
        key_ids: list[bytes],
        on_change: Callable[[frames.Membership], None],
        *,
        refused: Callable[[str], None] | None = None,
        stay: bool,
        streams: bool = False,
    ) -> int:
        """Request the members that serve `name`, or with `streams` the stores that hold it; return the watch's id.

        `on_change` is called with the answer, and with later changes if `stay` is set. `refused` is called with
        the reason if the relay has no room for another watch.

        Raises LocalProtocolError, and sends nothing, if the name or the key ids break the protocol.
        """
        number = self._next_id
        self._next_id += 1
        body = frames.Members(number, name, key_ids, stay, streams)
        check_control(body)
        self._watches[number] = on_change, refused
        self.out.control(body)
        return number

    def unwatch(self, number: int) -> None:
        """End a watch."""
        if self._watches.pop(number, None) is not None and self.state is UP:
            self.out.control(frames.Unwatch(number))

    # -- incoming frames -------------------------------------------------------------------------------------

    @property
    def received_messages(self) -> int:
        """Number of messages of all kinds received."""
        return self.received_alone + self.casts.received

    def _not_ours(self, buf: memoryview, start: int, end: int) -> None:
        """Drop a frame under a key that this process does not have. Nothing else is affected."""
        _, kind, _, _, hop, _ = HOP.unpack_from(buf, start)
        if kind in CASTS:
            count = BUNDLE.unpack_from(buf, start)[3]
            self.casts.received += count
            self.drop(NOT_OURS, count)
            return
        if kind == Kind.ANSWERS:
            _, hops, _ = read_answers(buf, start, end)
            self.drop(NOT_OURS, len(hops))
            for number in hops:
                self.requests.not_ours(number)
            return
        if kind == Kind.CALLS:
            _, sizes = read_calls(buf, start, end)
            self.drop(NOT_OURS, len(sizes))
            self.refuse(buf, start, end, Refusal.UNREADABLE, len(sizes))
            return
        self.drop(NOT_OURS)
        if kind in (Kind.REPLY, Kind.FAULT, Kind.ANSWER):
            self.requests.not_ours(hop)
        else:
            self.refuse(buf, start, end, Refusal.UNREADABLE)

    # -- incoming frames: tunnels ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether requests in either direction, tunnels, or store calls that write are in flight."""
        return bool(
            len(self.requests) or self.tunnels.ends or self.running or self.store_calls.writes
        )

    @property
    def serving(self) -> bool:
        """Whether a handler runs or waits for a delivery or tunnel that came by this session."""
        return self.state is UP and (
            self.running > 0 or any(not end.initiator for end in [*self.tunnels.ends.values()])
        )

    # -- incoming frames: control ------------------------------------------------------------------------------

    def _on_fail(self, fail: frames.Fail) -> None:
        self.requests.failed(fail)
        self.tunnels.failed(fail)
        self.store_calls.failed(fail)

    def _on_unrouted(self, unrouted: frames.Unrouted) -> None:
        if isinstance(unrouted.alias, msgspec.UnsetType):
            self.casts.unrouted(unrouted)
            return
        lost = self.out.alias_refused(
            unrouted.alias,
            unrouted.kind,
            unrouted.name,
            unrouted.key_id,
            full=unrouted.full is True,
        )
        if unrouted.kind in CASTS and lost:
            self.casts.unrouted(msgspec.structs.replace(unrouted, count=lost))

    def _check_welcome(self, welcome: frames.Welcome) -> None:
        if not self._certified:
            return
        if welcome.relay_id != self._certified or not welcome.mono_us:
            raise PeerProtocolError(
                "the relay's WELCOME has no clock reading, or names another relay than its TLS certificate"
            )

    def _welcomed(self, welcome: frames.Welcome) -> None:
        self.out = Outbound(
            relay_id=welcome.relay_id, session_id=welcome.session_id, challenge=welcome.challenge,
            channel=self._channel, entropy=self.entropy, on_full=self.owner.out_full, max_aliases=welcome.aliases,
            compress=self._compress, local_senders=self._local_senders, releases=not self._web,
        )  # fmt: skip
        self.out.now_us = self.now_us
        super()._welcomed(welcome)
        if self._certified:
            self._heartbeat = Heartbeat(welcome.mono_us, self.mono_us)
            self.clock_us = self._heartbeat.clock_us
            self.deadline_us = min(self.deadline_us, self._heartbeat.deadline_us)
        elif self._web:
            self._samples = ClockSamples(welcome.mono_us, self.mono_us)
            self.clock_us = self._samples.clock_us
            for key in self._prove_first:
                self.out.prove(key)

    def _on_ping(self, ping: frames.Ping) -> None:
        if self._samples is None:
            self.control(frames.Pong(ping.id))
            return
        if ping.mono_us is not msgspec.UNSET:
            self._samples.add(ping.mono_us, self.mono_us)
            self.clock_us = self._samples.clock_us
        self.control(frames.Pong(ping.id, self.mono_us))

    def _unexpected_ack(self, ack: Any) -> None:
        if type(ack) is frames.Ack and ack.error:
            _, refused = self._watches.pop(ack.id, (None, None))
            if refused is not None:
                refused(ack.error)

    def _routed(self, hops: int) -> None:
        # Some answers wait for other relays, and come after later ones.
        self.requests.routed = max(self.requests.routed, hops)

    def _on_drain(self, drain: frames.Drain) -> None:
        if self.drain_ms is None:
            self.drain_ms = drain.grace_ms
            self.owner.draining()

    def _on_membership(self, membership: frames.Membership) -> None:
        watch = self._watches.get(membership.id)
        if watch is not None:
            watch[0](membership)

    def _on_beat(self, beat: frames.Beat) -> None:
        if self._heartbeat is None:
            raise PeerProtocolError(
                "the relay sent BEAT to a session on its own host; only sessions over TLS use it"
            )
        self._heartbeat.on_beat(beat, self.mono_us)
        self.clock_us = self._heartbeat.clock_us
