"""Decides where every frame goes. It never waits, reads a clock, draws entropy or opens a socket.

The driver (the daemon, or a test with virtual time) sets `now_us`, adds sessions, feeds whole frames, and
settles the ports after each batch. Bodies are never read: a data frame is routed by its alias and hop id
alone, which are overwritten in place.

    session ── DECLARE ──► Route ── interest (members, subscribers, links) ──► Target ── alias there ──► port
    link    ── DECLARE ──► Route ── interest (members, subscribers)        ──► Target ── alias there ──► port

Casts, calls (with surveys and tunnels), the mesh and federation have a module each. Control frames of
sessions are in `control`, those of other relays in `peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire import frames, link_frames
from iris.wire.codec import KIND_AT, OnFrame
from iris.wire.kinds import NEVER_US, TUNNEL_KINDS, Kind
from iris.wire.names import (
    printable,
)
from relay.core.connection import Delivery
from relay.core.control import SessionControl
from relay.core.heads import UndeclaredAlias
from relay.core.limits import Limits
from relay.core.link import Link
from relay.core.neighbor import Neighbor
from relay.core.parts import Parts
from relay.core.peers import LinkControl, WanControl
from relay.core.policy import Policy
from relay.core.ports import Port
from relay.core.rates import Entry
from relay.core.runs import Runs
from relay.core.session import Session
from relay.core.site_routes import Wan
from relay.core.stores import HUNG_LOOKS
from relay.core.tickets import Admission

BEAT_STEP_US: Final = 100_000
"""Beats due within this time are sent together, so that many links cost one round a second."""


class Router(Parts):
    """The router of one relay. `entropy` gives the challenges of new sessions."""

    def __init__(
        self, relay_id: bytes, *, entropy: Callable[[int], bytes], message_limit: int, limits: Limits | None = None,
        site: str = "", label: str = "", policy: Policy | None = None, wall: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            relay_id,
            message_limit=message_limit,
            limits=limits,
            site=site,
            label=label,
            policy=policy,
            wall=wall,
        )
        self._entropy = entropy
        casts, calls = self._casts, self._calls
        self._from_sessions = SessionControl(self, calls)
        self._runs = Runs(calls)
        self._session_table = self._table(self._from_sessions.frame)
        if self.rates:
            self._session_table = self.rates.limited(self._session_table, lambda: self.now_us)
        self._guarded_table = self._session_table
        """The same for sessions that have a ticket."""
        self._link_table = self._table(LinkControl(self, calls, casts).frame)
        self._wan_table = self._table(WanControl(self, calls, casts).frame)

    def admit_by(self, admission: Admission) -> None:
        """Check the tickets of sessions over WebSocket, and what these sessions do, with `admission`."""
        self.admission = admission
        admission.on_lost_alias = self._from_sessions.deny
        self._guarded_table = admission.guarded(self._session_table)

    def stream_names(self, uuid: str, key_id: bytes) -> list[str]:
        """Return the names of the stream of a uuid (in hex) under a key, as stores of this network say them."""
        names = [each.tag for each in self.interest.members(uuid, (key_id,), streams=True)]
        names += [each.tag for each in self.mesh.infos(uuid, (key_id,), streams=True)]
        return [name for name in names if name]

    # -- driving ---------------------------------------------------------------------------------------------

    def session_up(
        self, port: Port, *, remote: bool = False, web: bool = False, ours: bool = True, user: str = "this process"
    ) -> Session:  # fmt: skip
        """Add a session that has yet to send HELLO.

        `remote`: it is on another host; `web`: and connected over WebSocket; `ours`: it is of the relay's own user or
        root. What the session holds counts in the shares of `user`.
        """
        number = self.number()
        session = Session(
            port,
            number,
            self._entropy(32),
            self.limits.aliases_of(web=web),
            remote,
            web,
            ours,
            user,
        )
        self.rates.new_session(session, self.now_us)
        self.sessions[number] = self.neighbors[number] = session
        return session

    def hello(self, dial_us: int) -> link_frames.LinkHello:
        """Return the greeting of a new link; `dial_us` is our clock when we dialled, 0 if we accepted."""
        limits = (self.message_limit, self.limits.aliases)
        return self.mesh.hello(dial_us, self.now_us, limits, self.site, self.label)

    def link_up(self, port: Port, hello: link_frames.LinkHello) -> Link:
        """Add a link after both relays have greeted. An older link to that relay must be down.

        The certificate named the relay of `hello`.
        """
        self.alone = False
        number = self.number()
        link = self.mesh.link_up(port, number, hello, self.now_us)
        if hello.site and not self.sites.site:
            self.sites.site = printable(hello.site)
        self.neighbors[number] = link
        self.watch_pulse(link)
        return link

    def wan_up(self, port: Port, hello: link_frames.LinkHello, site: str, cost_ms: int) -> Wan:
        """Add a WAN connection after both gateways have greeted. An older one to that gateway must be down.

        The certificate named the relay of `hello` and its `site`.
        """
        self.alone = False
        number = self.number()
        wan = Wan(port, number, hello, site, self.relay_id, self.now_us)
        wan.label = printable(hello.label)
        self.federation.wan_up(wan, cost_ms, self.now_us)
        self.neighbors[number] = wan
        self.watch_pulse(wan)
        return wan

    def frame_in(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Route the frame at `buf[start:end]`, which may be changed in place.

        Raises:
            PeerProtocolError: the session or relay broke the protocol; the caller sends it the error and closes it.
        """
        self.entry(neighbor)(buf, start, end)
        neighbor.complete()

    def entry(self, neighbor: Neighbor) -> OnFrame:
        """Return `frame_in` of one neighbor, one call shorter. It returns True after a frame that cost much.

        The caller completes what is left `unfinished` of such a frame before it passes on the next one.
        """
        table = self._session_table
        if isinstance(neighbor, Link):
            table = self._link_table
        elif isinstance(neighbor, Wan):
            table = self._wan_table
        elif isinstance(neighbor, Session) and neighbor.ticket is not None:
            table = self._guarded_table
        pulse = neighbor.pulse
        if pulse is not None:

            def far_frame_in(buf: memoryview, start: int, end: int) -> object:
                pulse.last_us = self.now_us
                try:
                    return table[buf[start + KIND_AT]](neighbor, buf, start, end)
                except UndeclaredAlias as err:
                    return self._unaliased(neighbor, buf, start, end, err)

            return far_frame_in

        def frame_in(buf: memoryview, start: int, end: int) -> object:
            try:
                return table[buf[start + KIND_AT]](neighbor, buf, start, end)
            except UndeclaredAlias as err:
                return self._unaliased(neighbor, buf, start, end, err)

        return frame_in

    def _unaliased(
        self, neighbor: Neighbor, buf: memoryview, start: int, end: int, err: UndeclaredAlias
    ) -> bool:
        if not isinstance(neighbor, Session):
            raise err
        return self._from_sessions.refused.frame(neighbor, buf, start, end, err)

    def shed(self, neighbor: Neighbor, delivery: Delivery, count: int) -> None:
        """Count queued messages that the neighbor's port dropped to make room; the port has put GAPs in their place."""
        self._casts.shed(neighbor, delivery, count)

    def writable(self, neighbor: Neighbor) -> None:
        """Report what was dropped for a neighbor, because its port has room again."""
        if neighbor.gaps and not neighbor.closed:
            neighbor.send_gaps()

    @property
    def deadline_us(self) -> int:
        """When `expire` is due at the latest, by the clock of `now_us`."""
        mine = min(
            self._calls.deadline_us, self.pulse_us, self.drains.deadline_us, self.slow.deadline_us,
            self.settling.deadline_us, self.audiences.deadline_us, self.credits.deadline_us, self.endings.deadline_us,
        )  # fmt: skip
        return min(
            self.mesh.deadline_us, self.federation.deadline_us, self._reach.deadline_us, self.stores.deadline_us,
            self.interest.watches.deadline_us, mine,
        )  # fmt: skip

    def is_due_before(self, time_us: int) -> bool:
        """Return whether `deadline_us` is before a time; faster, because every batch of frames asks for it."""
        return (
            self._calls.deadline_us < time_us
            or self.pulse_us < time_us
            or self.drains.deadline_us < time_us
            or self.slow.deadline_us < time_us
            or self.settling.deadline_us < time_us
            or self.audiences.deadline_us < time_us
            or self.credits.deadline_us < time_us
            or self.endings.deadline_us < time_us
            or self.mesh.deadline_us < time_us
            or self.federation.deadline_us < time_us
            or self._reach.deadline_us < time_us
            or self.stores.deadline_us < time_us
            or self.interest.watches.deadline_us < time_us
        )

    def expire(self) -> None:
        """Do what is due at `now_us`: beats, changes, waiting calls; close connections that are silent for too long."""
        if self.now_us >= self.pulse_us:
            self._beat()
        if self.now_us >= self.mesh.deadline_us:
            self.mesh.expire(self.now_us)
        if self.now_us >= self.drains.deadline_us:
            self.drains.expire(self.now_us)
        if self.now_us >= self.stores.deadline_us:
            for number in self.stores.expire(self.now_us):
                self._close_hung(self.sessions[number])
        if self.now_us >= self.slow.deadline_us:
            self.slow.expire(self.now_us)
        if self.now_us >= self.settling.deadline_us:
            self.settling.expire(self.now_us)
        if self.now_us >= self.audiences.deadline_us:
            self.audiences.expire(self.now_us)
        if self.now_us >= self.endings.deadline_us:
            self.endings.expire(self.now_us)
        if self.now_us >= self.credits.deadline_us:
            self.credits.expire(self.now_us)
        if self.now_us >= self._reach.deadline_us:
            self._reach.expire(self.now_us)
        if (
            self.now_us >= self._calls.deadline_us
        ):  # after what may change the interest, for which calls wait
            self._calls.expire(self.now_us)
        if self.now_us >= self.interest.watches.deadline_us:
            self.interest.watches.expire()
        # Last, because changes above must be advertised to other sites too.
        if self.now_us >= self.federation.deadline_us:
            self.federation.expire(self.now_us)

    def _close_hung(self, session: Session) -> None:
        """Close the session of a store that hangs, so that another one takes over."""
        session.port.abort(f"the store was silent for {HUNG_LOOKS} s")
        self.session_down(session)

    def _beat(self) -> None:
        soonest = NEVER_US
        for neighbor in list(self._pulsing.values()):
            pulse = neighbor.pulse
            if pulse is None:
                continue
            if pulse.dead(self.now_us) and neighbor.port.unread:
                pulse.last_us = self.now_us  # it is this relay that was too busy to read
            if pulse.dead(self.now_us):
                silent_s = (self.now_us - pulse.last_us) / 1e6
                neighbor.port.abort(f"the other side was silent for {silent_s:.1f} s")
                if isinstance(neighbor, Link):
                    self.link_down(neighbor)
                elif isinstance(neighbor, Wan):
                    self.wan_down(neighbor)
                elif isinstance(neighbor, Session):
                    self.session_down(neighbor)
                continue
            if self.now_us >= pulse.beat_us - BEAT_STEP_US:
                version, wall_us = 0, None
                if neighbor.hop_class:
                    wall_us = self.wall_us
                    version = (
                        self.federation if isinstance(neighbor, Wan) else self.advertiser
                    ).journal.version
                neighbor.control(pulse.beat(self.now_us, version, wall_us))
            soonest = min(soonest, pulse.deadline_us)
        self.pulse_us = soonest

    def wait_for_return(self, members: int, until_us: int) -> None:
        """Hold unserved calls until as many members are here as before this relay was restarted, or until
        `until_us`.
        """
        self._calls.unserved.wait_for(members, until_us)

    def wait_for_links(self, count: int, now_us: int) -> None:
        """Note `count` links and WAN connections from before a restart that are not back when sessions are let in."""
        self.now_us = now_us
        for number in range(count):
            self._casts.missed.disconnected(number, final=True)

    def drain(self, grace_ms: int) -> None:
        """Start to stop: notify members and callers. New sessions are notified when they greet."""
        self.draining = True
        self.stores.end(self.now_us)
        self.advertiser.leave()
        self.federation.leave()
        for session in self.sessions.values():
            if session.greeted:
                session.control(frames.Drain(grace_ms))
        there = [neighbor for neighbor in self.neighbors.values() if neighbor.greeted]
        self.drains.begin(there, grace_ms, self.now_us)

    def unread(self, session: Session) -> None:
        """Report that not everything a session sent was read, because this relay stops, to receivers elsewhere."""
        self._casts.unread(session)

    def end(self, session: Session, *, complete: bool) -> None:
        """Say goodbye to a store, which is sent nothing more. `complete`: see `frames.Bye`."""
        self.goodbye(session, complete=complete)

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        self._calls.called(neighbor, buf, start, end, self.now_us)

    def _survey(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> bool:
        self._calls.called(neighbor, buf, start, end, self.now_us)
        return True

    def _call_run(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> bool:
        self._runs.called(neighbor, buf, start, end, self.now_us)
        return True

    def _table(self, control: Entry) -> list[Entry]:
        """Return the handler of each frame kind."""
        calls, answers = self._calls, self._calls.answers
        table: list[Entry] = [control] * 256
        for kind in (Kind.PUBLISH, Kind.BROADCAST):
            table[kind] = self._casts.cast
        for kind in (Kind.REQUEST, Kind.PUSH, Kind.TUNNEL_OPEN, Kind.STREAM):
            table[kind] = self._call
        for kind in (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY):
            table[kind] = answers.answered
        for kind in TUNNEL_KINDS:
            table[kind] = calls.tunnels.frame
        table[Kind.SURVEY] = self._survey
        table[Kind.CALLS] = self._call_run
        table[Kind.ANSWERS] = answers.answered_run
        return table
