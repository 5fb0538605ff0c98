"""Decides where every frame goes; never waits, reads a clock, draws entropy or opens a socket.

Whoever drives it (the daemon, or a test with virtual time) sets `now_us`, hands in sessions and whole frames, and settles
the ports after each batch. Bodies are never looked at: a data frame is routed by its alias and hop id alone, which are
overwritten in place.

    session ── DECLARE ──► Route ── interest (members, subscribers, links) ──► Target ── alias there ──► port
    link    ── DECLARE ──► Route ── interest (members, subscribers)        ──► Target ── alias there ──► port

Casts, calls (with surveys and tunnels), the mesh and other sites have a module each, and so has what control frames say: `control`
of sessions, `peers` of other relays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from iris.errors import InvalidName, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import KIND_AT
from iris.wire.frames import (
    DECLARED_KINDS,
    NEVER_US,
    Kind,
)
from iris.wire.names import (
    check_cluster,
    check_topic,
    printable,
)
from relay.core.audience import Audiences
from relay.core.calls import Calls
from relay.core.casts import Casts
from relay.core.control import SessionControl
from relay.core.draining import HEARD_MINOR, Draining
from relay.core.federation import Federation
from relay.core.interest import MAX_SHOWN, Interest
from relay.core.limits import Limits
from relay.core.link import Link
from relay.core.mesh import Mesh
from relay.core.neighbor import Neighbor, Route
from relay.core.parking import PARKED_BYTES
from relay.core.peers import LinkControl, WanControl
from relay.core.policy import Policy
from relay.core.ports import Accounts, Port
from relay.core.quotas import Quotas
from relay.core.reach import Reach
from relay.core.session import Member, Session
from relay.core.settling import Settling
from relay.core.sites import Sites
from relay.core.slow import SlowReceivers
from relay.core.stores import StoreWatch
from relay.core.ways import Wan

MAX_GROUP_BYTES: Final = 64 << 20
"""Of the names of queue groups that the aliases of one link or WAN connection may name together; those of an alias beyond are counted, and left out."""
WEIGHTY_KINDS: Final = frozenset(
    (Kind.DECLARE, Kind.GAP, Kind.BEAT, Kind.INTEREST, Kind.RESYNC, Kind.LOADS)
)
"""Frames about interest and addresses: they come in bursts, and cost more than their length. Messages and answers are none."""
BEAT_STEP_US: Final = 100_000
"""Beats due within this go together, so that many links cost one round a second."""


class Router:
    """One relay's decisions. `entropy` gives the challenges of new sessions."""

    def __init__(
        self, relay_id: bytes, *, entropy: Callable[[int], bytes], message_limit: int, limits: Limits | None = None,
        site: str = "", label: str = "", policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.relay_id = relay_id
        self.label = label
        """The host's name, for people."""
        self.now_us = 0
        self.accounts = Accounts()
        self.interest = Interest()
        self.sessions: dict[int, Session] = {}
        self.neighbors: dict[int, Neighbor] = {}
        """Sessions and links, by number."""
        self._pulsing: dict[int, Neighbor] = {}
        """Those on other hosts."""
        self._pulse_us = NEVER_US
        self.limits = limits or Limits()
        self.quotas = Quotas(
            members=self.limits.all_members, subscriptions=self.limits.all_subscriptions,
            watches=self.limits.all_watches, parked_bytes=PARKED_BYTES,
        )  # fmt: skip
        self.message_limit = message_limit
        self.draining = False
        self.alone = True
        """No other relay or site was ever connected: what is published elsewhere is nothing to anybody here."""
        self.status_extra: Callable[[], dict[str, object]] = dict
        self._entropy = entropy
        self._next_number = 1
        self.slow = SlowReceivers(lambda: self.now_us)
        self.sites = Sites(site, policy or Policy())
        self.wans = self.sites.wans
        self.drains = Draining(self._leave_held, self._end_held)
        self._casts = casts = Casts(
            self.accounts, self.interest, self.sites, self.slow, lambda: self.now_us, self.drains.has_heard
        )  # fmt: skip
        self._reach = Reach(self.interest, self.sites, casts, self._number)
        self.mesh = Mesh(relay_id, label, self.interest, casts, self._reach, self._members)
        self.links = self.mesh.links
        self.abroad = Federation(
            self.interest, self.sites, self._reach, self.mesh, casts, self._number
        )
        self._calls = calls = Calls(
            relay_id,
            self.accounts,
            self.interest,
            self.sites,
            self.mesh,
            self.limits,
            self.quotas,
            self.neighbors,
        )
        self.stores = StoreWatch(self.mesh)
        self.settling = Settling(self.mesh, lambda: self.now_us)
        self.audiences = Audiences(label, self.interest, self.slow, lambda: self.now_us)
        self._from_sessions = SessionControl(self, calls)
        self._session_table = _table(casts, calls, self._call, self._from_sessions.frame)
        self._link_table = _table(casts, calls, self._call, LinkControl(self, calls, casts).frame)
        self._wan_table = _table(casts, calls, self._call, WanControl(self, calls, casts).frame)

    # -- driving ---------------------------------------------------------------------------------------------

    def session_up(
        self, port: Port, *, remote: bool = False, ours: bool = True, user: str = "this process"
    ) -> Session:
        """Add a connection that has yet to say HELLO. `remote`: from another host; `ours`: of the relay's own user or root.

        What it holds counts in the shares of `user`.
        """
        number = self._number()
        session = Session(port, number, self._entropy(32), self.limits.aliases, remote, ours, user)
        self.sessions[number] = self.neighbors[number] = session
        return session

    def session_down(self, session: Session) -> None:
        """The connection is gone, however it ended. Idempotent."""
        if session.closed:
            return
        session.forget()
        del self.sessions[session.number], self.neighbors[session.number]
        self._pulsing.pop(session.number, None)
        for member in list(session.members.values()):
            if not member.left:
                self._from_sessions.leave(member)
        for (pattern, group), key_ids in session.subscriptions.items():
            self.interest.unsubscribe(session, pattern, group, key_ids)
            self.mesh.wanted(pattern, key_ids, group, session.user, -1, self.now_us)
        if session.places:
            self.quotas.subscriptions.give(session.user, session.places)
        for watch in session.watches.values():
            self.interest.unwatch(watch)
            self.quotas.watches.give(session.user, len(watch.key_ids))
        self._calls.neighbor_down(session, self.now_us)
        self.drains.forget(session, self.now_us)
        self.stores.gone(session, self.now_us)
        session.empty()

    def hello(self, dial_us: int) -> frames.LinkHello:
        """Return the greeting of a new link; `dial_us` is our clock when we dialled, 0 if we accepted."""
        limits = (self.message_limit, self.limits.aliases)
        return self.mesh.hello(dial_us, self.now_us, limits, self.site, self.label)

    @property
    def fresh(self) -> bool:
        """Whether no publication and no broadcast was routed yet, and none elsewhere that would have come here."""
        return self.alone and not self._casts.begun

    def link_up(self, port: Port, hello: frames.LinkHello) -> Link:
        """Both relays have greeted, and the certificate named the relay of `hello`; an older link to it is down already."""
        self.alone = False
        number = self._number()
        link = self.mesh.link_up(port, number, hello, self.now_us)
        if hello.site and not self.sites.site:
            self.sites.site = printable(hello.site)
        self.neighbors[number] = link
        self.watch_pulse(link)
        return link

    def link_down(self, link: Link) -> None:
        """The link is gone, however it ended. Idempotent."""
        if link.closed:
            return
        self.mesh.link_down(link, self.now_us)
        link.forget()
        del self.neighbors[link.number], self._pulsing[link.number]
        self._calls.neighbor_down(link, self.now_us)
        self.drains.forget(link, self.now_us)
        self.settling.forget(link)
        self.audiences.forget(link)

    @property
    def site(self) -> str:
        """The name of our site; empty while this relay knows none."""
        return self.sites.site

    def wan_up(self, port: Port, hello: frames.LinkHello, site: str, cost_ms: int) -> Wan:
        """Two gateways have greeted, and the certificate named the relay of `hello` and its `site`; an older one to it is down already."""
        self.alone = False
        number = self._number()
        wan = Wan(port, number, hello, site, self.relay_id, self.now_us)
        wan.label = printable(hello.label)
        self.abroad.wan_up(wan, cost_ms, self.now_us)
        self.neighbors[number] = wan
        self.watch_pulse(wan)
        return wan

    def wan_down(self, wan: Wan) -> None:
        """The WAN connection is gone, however it ended. Idempotent."""
        if wan.closed:
            return
        self.abroad.wan_down(wan, self.now_us, silent=self.drains.has_heard(wan))
        wan.forget()
        del self.neighbors[wan.number], self._pulsing[wan.number]
        self._calls.neighbor_down(wan, self.now_us)
        self.drains.forget(wan, self.now_us)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def frame_in(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Route the frame at `buf[start:end]`, which may be changed in place.

        Raises:
            PeerProtocolError: the session or relay broke the protocol; the caller tells it and ends it.
        """
        self.entry(neighbor)(buf, start, end)

    def entry(
        self, neighbor: Neighbor, heard: Callable[[int], None] | None = None
    ) -> Callable[[memoryview, int, int], None]:
        """Return `frame_in` of one session or link, one call shorter. `heard`: told the size of each frame of `WEIGHTY_KINDS`."""
        table = self._session_table
        if isinstance(neighbor, Link):
            table = self._link_table
        elif isinstance(neighbor, Wan):
            table = self._wan_table
        if heard is not None:
            table = [
                _weighed(take, heard) if kind in WEIGHTY_KINDS else take
                for kind, take in enumerate(table)
            ]
        pulse = neighbor.pulse
        if pulse is not None:

            def far_frame_in(buf: memoryview, start: int, end: int) -> None:
                pulse.last_us = self.now_us
                table[buf[start + KIND_AT]](neighbor, buf, start, end)

            return far_frame_in

        def frame_in(buf: memoryview, start: int, end: int) -> None:
            table[buf[start + KIND_AT]](neighbor, buf, start, end)

        return frame_in

    def writable(self, neighbor: Neighbor) -> None:
        """The port has room again: what was dropped meanwhile is told."""
        if neighbor.gaps and not neighbor.closed:
            neighbor.tell_gaps()

    @property
    def deadline_us(self) -> int:
        """When `expire` is due at the latest, by the clock of `now_us`."""
        mine = min(
            self._calls.deadline_us, self._pulse_us, self.drains.deadline_us, self.slow.deadline_us,
            self.settling.deadline_us, self.audiences.deadline_us,
        )  # fmt: skip
        return min(
            self.mesh.deadline_us, self.abroad.deadline_us, self._reach.deadline_us, self.stores.deadline_us, mine
        )  # fmt: skip

    def expire(self) -> None:
        """Do what is due at `now_us`: beats, what changed, calls that wait; connections that are silent for too long end."""
        if self.now_us >= self._pulse_us:
            self._beat()
        if self.now_us >= self.mesh.deadline_us:
            self.mesh.expire(self.now_us)
        if self.now_us >= self._calls.deadline_us:
            self._calls.expire(self.now_us)
        if self.now_us >= self.drains.deadline_us:
            self.drains.expire(self.now_us)
        if self.now_us >= self.stores.deadline_us:
            self.stores.expire(self.now_us)
        if self.now_us >= self.slow.deadline_us:
            self.slow.expire(self.now_us)
        if self.now_us >= self.settling.deadline_us:
            self.settling.expire(self.now_us)
        if self.now_us >= self.audiences.deadline_us:
            self.audiences.expire(self.now_us)
        if self.now_us >= self._reach.deadline_us:
            self._reach.expire(self.now_us)
        if (
            self.now_us >= self.abroad.deadline_us
        ):  # last: others' changes are to be told to other sites, too
            self.abroad.expire(self.now_us)

    def watch_pulse(self, neighbor: Neighbor) -> None:
        """Beat to a neighbor on another host from now on, and end it when it is silent."""
        self._pulsing[neighbor.number] = neighbor
        self._pulse_us = 0

    def _beat(self) -> None:
        soonest = NEVER_US
        for neighbor in list(self._pulsing.values()):
            pulse = neighbor.pulse
            if pulse is None:
                continue
            if pulse.dead(self.now_us):
                neighbor.port.abort("it has been silent for too long")
                if isinstance(neighbor, Link):
                    self.link_down(neighbor)
                elif isinstance(neighbor, Wan):
                    self.wan_down(neighbor)
                elif isinstance(neighbor, Session):
                    self.session_down(neighbor)
                continue
            if self.now_us >= pulse.beat_us - BEAT_STEP_US:
                version = 0
                if neighbor.hop_class:
                    version = (self.abroad if isinstance(neighbor, Wan) else self.mesh).version
                neighbor.control(pulse.beat(self.now_us, version))
            soonest = min(soonest, pulse.deadline_us)
        self._pulse_us = soonest

    def wait_for_return(self, members: int, until_us: int) -> None:
        """This relay had so many members before it was restarted: calls that nobody serves wait until as many are here, or it is `until_us`."""
        self._calls.awaited, self._calls.awaited_until_us = members, until_us

    def wait_for_links(self, count: int, now_us: int) -> None:
        """This relay had so many links and WAN connections more before it was restarted, and lets sessions in without them."""
        self.now_us = now_us
        for number in range(count):
            self._casts.away.left(number, final=True)

    def drain(self, grace_ms: int) -> None:
        """The relay is about to stop: members and callers hear of it, new sessions are told at once."""
        self.draining = True
        self.stores.end(self.now_us)
        self.mesh.leave()
        self.abroad.leave()
        for session in self.sessions.values():
            if session.greeted:
                session.control(frames.Drain(grace_ms))
        there = [neighbor for neighbor in self.neighbors.values() if neighbor.greeted]
        self.drains.begin(there, grace_ms, self.now_us)

    def unread(self, session: Session) -> None:
        """This relay stops, and has not read all that a session sent: whoever would have got it elsewhere hears of it."""
        self._casts.unread(session)

    def end(self, session: Session, *, complete: bool) -> None:
        """Say goodbye to a store: it is sent nothing more. `complete`: see `frames.Bye`."""
        self._from_sessions.end(session, complete=complete and session.minor >= HEARD_MINOR)

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        self._calls.called(neighbor, buf, start, end, self.now_us)

    def _leave_held(self, session: Session, leave: frames.Leave) -> None:
        self._from_sessions.on_leave(session, leave)

    def _end_held(self, session: Session) -> None:
        self._from_sessions.end(session)

    # -- aliases ---------------------------------------------------------------------------------------------

    def declare(self, neighbor: Neighbor, declared: frames.Declare) -> None:
        """Take an alias; raises PeerProtocolError."""
        if declared.kind not in DECLARED_KINDS:
            raise PeerProtocolError(f"alias for frames of kind 0x{declared.kind:02x}")
        if declared.alias >= self.limits.aliases:
            raise PeerProtocolError(
                f"alias {declared.alias} is over the limit of {self.limits.aliases}"
            )
        try:
            (check_topic if declared.kind == Kind.PUBLISH else check_cluster)(declared.name)
        except InvalidName as err:
            raise PeerProtocolError(str(err)) from err
        if declared.kind in (Kind.PUBLISH, Kind.BROADCAST):
            neighbor.casts = True
        routes = neighbor.routes
        if declared.alias >= len(routes):
            size = min(self.limits.aliases, max(16, 2 * declared.alias + 1))
            routes.extend([None] * (size - len(routes)))
        before = routes[declared.alias]
        if before is not None:
            before.release()
            neighbor.group_bytes -= sum(map(len, before.only))
        route = routes[declared.alias] = Route(neighbor, declared, self.neighbors)
        if declared.groups and neighbor.hop_class:  # a session's go where its relay says
            size = sum(map(len, declared.groups))
            if neighbor.group_bytes + size <= MAX_GROUP_BYTES:
                neighbor.group_bytes += size
                route.only = tuple(declared.groups)
            else:
                neighbor.untaken += len(declared.groups)

    # -- reports ---------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> tuple[int, int]:
        """Calls that have not ended, surveys as many times as they were handed over, and tunnels."""
        neighbors = self.neighbors.values()
        handed = sum(len(neighbor.handed) for neighbor in neighbors)
        tunnels = sum(len(neighbor.tunnels) for neighbor in neighbors) // 2
        return handed - tunnels + len(self._calls.parking.waiting), tunnels

    @property
    def held_messages(self) -> int:
        """Messages that ports took and have not written."""
        waiting = sum(neighbor.port.held_messages for neighbor in self.neighbors.values())
        return waiting + len(self._calls.parking.waiting)

    def _members(self) -> Iterator[Member]:
        for session in self.sessions.values():
            yield from session.members.values()

    def status(self) -> dict[str, object]:
        """Return a snapshot of tables and counters, ready for JSON."""
        return {
            "relay": self.relay_id.hex(),
            "site": self.site,
            "draining": self.draining,
            "sessions": [
                {
                    "session": session.number,
                    "label": session.label,
                    "pid": session.pid,
                    "user": session.user,
                    "members": len(session.members),
                    "subscriptions": len(session.subscriptions),
                    "running": len(session.handed),
                    "waiting": session.pending,
                    "tunnels": len(session.tunnels),
                    "held": session.port.held_messages,
                    "keys": session.shown_keys,
                }
                for session in self.sessions.values()
            ],
            "clusters": self.interest.cluster_counts(),
            "clusters_not_shown": max(0, self.interest.names - MAX_SHOWN),
            "accounts": self.accounts.report(self.held_messages),
            **self.mesh.status(self.now_us),
            **self.abroad.status(),
            "slow": self.slow.report(self.now_us),
            "parked": len(self._calls.parking.waiting),
            "quotas": self.quotas.status(),
            **self.status_extra(),
        }

    def numbers(self, limited: str) -> dict[str, object]:
        """Return the part of the snapshot without names. `limited` says why there is no more.

        It has no "clusters", so that nobody who checks for a name takes an empty list for an answer.
        """
        return {
            "relay": self.relay_id.hex(),
            "site": self.site,
            "draining": self.draining,
            "limited": limited,
            "sessions": [],
            "links": [],
            "counts": {
                "sessions": len(self.sessions),
                "clusters": self.interest.names,
                "links": len(self.mesh.links),
                "sites": len(self.sites.ways),
            },
            "accounts": self.accounts.report(self.held_messages),
        }


def _weighed(take: Callable[..., None], heard: Callable[[int], None]) -> Callable[..., None]:
    """Return what takes a frame, and says then how long it was."""

    def weighed(neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        take(neighbor, buf, start, end)
        heard(end - start)

    return weighed


def _table(
    casts: Casts, calls: Calls, call: Callable[..., None], control: Callable[..., None]
) -> list[Callable[..., None]]:
    """Return what takes a frame, by its kind."""
    table = [control] * 256
    table[Kind.PUBLISH] = table[Kind.BROADCAST] = casts.cast
    table[Kind.REQUEST] = table[Kind.PUSH] = table[Kind.SURVEY] = table[Kind.TUNNEL_OPEN] = call
    table[Kind.STREAM] = call
    table[Kind.REPLY] = table[Kind.FAULT] = table[Kind.ANSWER] = calls.answered
    table[Kind.STREAM_REPLY] = calls.answered
    tunnel = calls.tunnels.frame
    table[Kind.TUNNEL_ACCEPT] = table[Kind.TUNNEL_DATA] = table[Kind.TUNNEL_END] = tunnel
    return table
