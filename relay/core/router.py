"""Decides where every frame goes; never waits, reads a clock, draws entropy or opens a socket.

Whoever drives it (the daemon, or a test with virtual time) sets `now_us`, hands in sessions and whole frames, and settles
the ports after each batch. Bodies are never looked at: a data frame is routed by its alias and hop id alone, which are
overwritten in place.

    session ── DECLARE ──► Route ── interest (members, subscribers, links) ──► Target ── alias there ──► port
    link    ── DECLARE ──► Route ── interest (members, subscribers)        ──► Target ── alias there ──► port

Casts, calls (with surveys and tunnels) and the mesh have a module each; here is what sessions ask for by control frames.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from iris.core.pulse import Pulse
from iris.crypto.keys import verify_proof
from iris.errors import InvalidName, LocalProtocolError, OpenError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import KIND_AT, decode_control, encode_control
from iris.wire.frames import (
    DECLARED_KINDS,
    NO_KEY,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    SERVED_KINDS,
    HopClass,
    Kind,
)
from iris.wire.names import (
    check_cluster,
    check_filter,
    check_group,
    check_site,
    check_topic,
    printable,
)
from relay.core.calls import Calls
from relay.core.casts import Casts
from relay.core.federation import Federation
from relay.core.grants import barred, take_grant
from relay.core.interest import Interest, Member, Watch
from relay.core.link import Link
from relay.core.mesh import NEVER_US, Mesh
from relay.core.policy import Policy
from relay.core.ports import Accounts, Port
from relay.core.session import Neighbor, Route, Session
from relay.core.sites import Wan

MAX_WATCHES: Final = 1024
BEAT_STEP_US: Final = 100_000
"""Beats due within this go together, so that many links cost one round a second."""
MAX_INFOS: Final = 4096
"""Members named in one frame."""
_ANSWER_KINDS: Final = (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY)
"""They go where what they answer came from."""
MAX_GROUPS: Final = 128
"""Queue groups of one session: all of them may have to be named in one DECLARE."""


class Limits:
    """What one session may hold at this relay."""

    __slots__ = ("aliases", "joins", "keys", "pending", "subscriptions")

    def __init__(
        self, *, aliases: int = 65_536, joins: int = 1024, keys: int = 1024, pending: int = 65_536,
        subscriptions: int = 65_536,
    ) -> None:  # fmt: skip
        self.aliases = aliases
        self.joins = joins
        self.keys = keys
        self.pending = pending
        self.subscriptions = subscriptions


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
        self.message_limit = message_limit
        self.draining = False
        self.status_extra: Callable[[], dict[str, object]] = dict
        self._entropy = entropy
        self._document = ""
        self._document_us = 0
        self._next_number = 1
        self._next_serial = 1
        self._casts = casts = Casts(self.accounts, self.interest)
        self.mesh = Mesh(relay_id, self.interest, casts)
        self.mesh.members = self._members
        self.links = self.mesh.links
        self.abroad = Federation(
            self.interest, self.mesh, casts, policy or Policy(), self._number, site
        )
        self.wans = self.abroad.wans
        self._calls = calls = Calls(
            relay_id, self.accounts, self.interest, self.mesh, self.limits, self.neighbors
        )
        casts.abroad = calls.abroad = self.abroad
        self._session_table = _table(casts, calls, self._call, self._control)
        self._link_table = _table(casts, calls, self._call, self._link_control)
        self._wan_table = _table(casts, calls, self._call, self._wan_control)
        self._link_controls: dict[type, Callable[[Link, Any], None]] = {
            **self.mesh.controls(),
            frames.Declare: self._on_link_declare,
            frames.Beat: self._on_link_beat,
            frames.Gap: self._on_link_gap,
            frames.Fail: calls.failed_by_link,
            frames.Credit: calls.credited_by_link,
            frames.Roster: calls.surveys.roster,
            frames.Done: calls.surveys.done,
            frames.Bye: self._on_link_bye,
            frames.Error: self._on_link_error,
        }
        self._wan_controls: dict[type, Callable[[Wan, Any], None]] = {
            frames.Interest: lambda wan, told: self.abroad.on_interest(wan, told, self.now_us),
            frames.Resync: lambda wan, _: self.abroad.on_resync(wan, self.now_us),
            frames.Declare: self._on_wan_declare,
            frames.Beat: self._on_wan_beat,
            frames.Gap: self._on_wan_gap,
            frames.Fail: self._on_wan_fail,
            frames.Credit: calls.credited_by_link,
            frames.Roster: self._on_wan_roster,
            frames.Done: self._on_wan_done,
            frames.Bye: self._on_wan_bye,
            frames.Error: self._on_wan_error,
        }
        self._controls: dict[type, Callable[[Session, Any], None]] = {
            frames.Prove: self._on_prove,
            frames.Grant: self._on_grant,
            frames.Declare: self._on_declare,
            frames.Join: self._on_join,
            frames.Leave: self._on_leave,
            frames.Subscribe: self._on_subscribe,
            frames.Unsubscribe: self._on_unsubscribe,
            frames.Credit: self._on_credit,
            frames.Members: self._on_members,
            frames.Unwatch: self._on_unwatch,
            frames.Status: self._on_status,
            frames.Ping: lambda session, ping: session.control(frames.Pong(ping.id)),
            frames.Pong: lambda session, pong: None,
            frames.Beat: self._on_beat,
            frames.Bye: self._on_bye,
        }

    # -- driving ---------------------------------------------------------------------------------------------

    def session_up(self, port: Port, *, remote: bool = False, ours: bool = True) -> Session:
        """A connection came, from another host if it is `remote`, of the relay's own user or root if it is `ours`; it has yet to say HELLO."""
        number = self._number()
        session = Session(port, number, self._entropy(32), self.limits.aliases, remote, ours)
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
                self._leave(member)
        for (pattern, group), key_ids in session.subscriptions.items():
            self.interest.unsubscribe(session, pattern, group, key_ids)
            self.mesh.wanted(pattern, key_ids, group, -1, self.now_us)
        for watch in session.watches.values():
            self.interest.unwatch(watch)
        self._calls.neighbor_down(session)

    def hello(self, dial_us: int) -> frames.LinkHello:
        """Return the greeting of a new link; `dial_us` is our clock when we dialled, 0 if we accepted."""
        limits = (self.message_limit, self.limits.aliases)
        return self.mesh.hello(dial_us, self.now_us, limits, self.site, self.label)

    def link_up(self, port: Port, hello: frames.LinkHello) -> Link:
        """Both relays have greeted, and the certificate named the relay of `hello`; an older link to it is down already."""
        number = self._number()
        link = self.mesh.link_up(port, number, hello, self.now_us)
        if hello.site and not self.abroad.site:
            self.abroad.site = printable(hello.site)
        self.neighbors[number] = self._pulsing[number] = link
        self._pulse_us = 0
        return link

    def link_down(self, link: Link) -> None:
        """The link is gone, however it ended. Idempotent."""
        if link.closed:
            return
        self.mesh.link_down(link, self.now_us)
        link.forget()
        del self.neighbors[link.number], self._pulsing[link.number]
        self._calls.neighbor_down(link)

    @property
    def site(self) -> str:
        """The name of our site; empty while this relay knows none."""
        return self.abroad.site

    def wan_up(self, port: Port, hello: frames.LinkHello, site: str, cost_ms: int) -> Wan:
        """Two gateways have greeted, and the certificate named the relay of `hello` and its `site`; an older one to it is down already."""
        number = self._number()
        wan = Wan(port, number, hello, site, self.relay_id, self.now_us)
        wan.label = printable(hello.label)
        self.abroad.wan_up(wan, cost_ms, self.now_us)
        self.neighbors[number] = self._pulsing[number] = wan
        self._pulse_us = 0
        return wan

    def wan_down(self, wan: Wan) -> None:
        """The WAN connection is gone, however it ended. Idempotent."""
        if wan.closed:
            return
        self.abroad.wan_down(wan, self.now_us)
        wan.forget()
        del self.neighbors[wan.number], self._pulsing[wan.number]
        self._calls.neighbor_down(wan)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def frame_in(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        """Route the frame at `buf[start:end]`, which may be changed in place.

        Raises:
            PeerProtocolError: the session or relay broke the protocol; the caller tells it and ends it.
        """
        self.entry(neighbor)(buf, start, end)

    def entry(self, neighbor: Neighbor) -> Callable[[memoryview, int, int], None]:
        """Return `frame_in` of one session or link, one call shorter."""
        table = self._session_table
        if isinstance(neighbor, Link):
            table = self._link_table
        elif isinstance(neighbor, Wan):
            table = self._wan_table
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
        mine = min(self._calls.deadline_us, self._pulse_us)
        return min(self.mesh.deadline_us, self.abroad.deadline_us, mine)

    def expire(self) -> None:
        """Do what is due at `now_us`: beats, what changed, calls that wait; connections that are silent for too long end."""
        if self.now_us >= self._pulse_us:
            self._beat()
        if self.now_us >= self.mesh.deadline_us:
            self.mesh.expire(self.now_us)
        if self.now_us >= self.abroad.deadline_us:
            self.abroad.expire(self.now_us)
        if self.now_us >= self._calls.deadline_us:
            self._calls.unpark(self.now_us)

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

    def drain(self, grace_ms: int) -> None:
        """The relay is about to stop: members and callers hear of it, new sessions are told at once."""
        self.draining = True
        self.mesh.leave()
        self.abroad.leave()
        for session in self.sessions.values():
            if session.greeted:
                session.control(frames.Drain(grace_ms))

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, neighbor: Neighbor, buf: memoryview, start: int, end: int) -> None:
        self._calls.called(neighbor, buf, start, end, self.now_us)

    # -- links -----------------------------------------------------------------------------------------------

    def _link_control(self, link: Link, buf: memoryview, start: int, end: int) -> None:
        body = decode_control(buf, start, end)
        handler = self._link_controls.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"a relay does not send {type(body).__name__} now")
        handler(link, body)

    def _on_link_declare(self, link: Link, declared: frames.Declare) -> None:
        far = declared.hop_class == HopClass.TO_WAN
        if not far and declared.hop_class not in (HopClass.MESH, HopClass.FROM_WAN):
            raise PeerProtocolError(f"hop class {declared.hop_class} over a link")
        if bool(declared.site) != far or (far and declared.kind in _ANSWER_KINDS):
            raise PeerProtocolError("a site that does not go with the hop class")
        self._declare(link, declared)
        if far:
            rule = self.abroad.barred(declared, printable(declared.site), entering=False)
            link.routes[declared.alias].barred = rule  # type: ignore[union-attr]

    def _on_link_beat(self, link: Link, beat: frames.Beat) -> None:
        self._heard(link, beat)
        self.mesh.beat(link, beat.version)

    def _heard(self, neighbor: Neighbor, beat: frames.Beat) -> None:
        if neighbor.pulse is None:
            raise PeerProtocolError("BEAT in a session of this host")
        neighbor.pulse.heard(beat, self.now_us)
        neighbor.clock_us = neighbor.pulse.clock_us

    def _on_link_gap(self, link: Link, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(f"a gap in frames of kind 0x{gap.kind:02x}")
        self._casts.gap_from_link(link, gap)

    # -- other sites -----------------------------------------------------------------------------------------

    def _wan_control(self, wan: Wan, buf: memoryview, start: int, end: int) -> None:
        body = decode_control(buf, start, end)
        handler = self._wan_controls.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"a gateway does not send {type(body).__name__} now")
        handler(wan, body)

    def _on_wan_declare(self, wan: Wan, declared: frames.Declare) -> None:
        # What comes from another site stays in this one.
        if declared.hop_class != HopClass.TO_WAN:
            raise PeerProtocolError(f"hop class {declared.hop_class} from another site")
        if declared.site != self.site:
            raise PeerProtocolError(f"a message for {declared.site!r}, and this is {self.site}")
        self._declare(wan, declared)
        if declared.kind not in _ANSWER_KINDS:
            rule = self.abroad.barred(declared, wan.site, entering=True)
            wan.routes[declared.alias].barred = rule  # type: ignore[union-attr]

    def _on_wan_beat(self, wan: Wan, beat: frames.Beat) -> None:
        self._heard(wan, beat)
        self.abroad.beat(wan, beat.version, self.now_us)

    def _on_wan_gap(self, wan: Wan, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(f"a gap in frames of kind 0x{gap.kind:02x}")
        if gap.site != self.site:
            raise PeerProtocolError(f"a gap for {gap.site!r}, and this is {self.site}")
        if gap.count and not self.abroad.policy.entering(gap.kind, gap.name, gap.key_id):
            cause = printable(gap.cause)
            self._casts.gap_from_wan(wan, msgspec.structs.replace(gap, cause=cause), self.now_us)

    def _on_wan_fail(self, wan: Wan, fail: frames.Fail) -> None:
        # What another site says is shown to people here.
        self._calls.failed_by_link(
            wan, msgspec.structs.replace(fail, detail=printable(fail.detail))
        )

    def _on_wan_roster(self, wan: Wan, roster: frames.Roster) -> None:
        members = [printable(member) for member in roster.members]
        self._calls.surveys.roster(wan, frames.Roster(roster.hop, members))

    def _on_wan_done(self, wan: Wan, done: frames.Done) -> None:
        self._calls.surveys.done(wan, frames.Done(done.hop, [printable(m) for m in done.lost]))

    def _on_wan_bye(self, wan: Wan, bye: frames.Bye) -> None:
        """The gateway stops, and has sent all that it had."""
        wan.bye = True
        wan.port.finish()
        self.wan_down(wan)

    def _on_wan_error(self, wan: Wan, error: frames.Error) -> None:
        """The other gateway says which rule we broke, and ends the connection."""
        wan.port.abort(f"the other gateway says: {printable(error.detail)}")
        self.wan_down(wan)

    def _on_link_bye(self, link: Link, bye: frames.Bye) -> None:
        """The relay stops, and has sent all that it had."""
        link.bye = True
        link.port.finish()
        self.link_down(link)

    def _on_link_error(self, link: Link, error: frames.Error) -> None:
        """The other relay says which rule we broke, and ends the link."""
        link.port.abort(f"the other relay says: {error.detail}")
        self.link_down(link)

    # -- control ---------------------------------------------------------------------------------------------

    def _control(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        body = decode_control(buf, start, end)
        if not session.greeted:
            if not isinstance(body, frames.Hello):
                raise PeerProtocolError(f"{type(body).__name__} before HELLO")
            self._on_hello(session, body)
            return
        handler = self._controls.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"a session does not send {type(body).__name__} now")
        try:
            handler(session, body)
        except LocalProtocolError as err:
            raise PeerProtocolError(f"the answer is too long: {err}") from err

    def _on_hello(self, session: Session, hello: frames.Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise PeerProtocolError(
                f"you speak version {hello.version}, this relay speaks {PROTOCOL_VERSION}"
            )
        if session.remote:
            if not hello.mono_us:
                raise PeerProtocolError("HELLO over TLS without the time")
            session.pulse = Pulse(hello.mono_us, self.now_us)
            session.clock_us = session.pulse.clock_us
            self._pulsing[session.number] = session
            self._pulse_us = 0
        session.greeted = True
        # Shown in terminals: no session may move somebody's cursor.
        session.label = printable(hello.label)
        session.pid = hello.pid
        session.control(
            frames.Welcome(
                PROTOCOL_VERSION,
                PROTOCOL_MINOR,
                self.relay_id,
                session.session_id,
                session.challenge,
                self.message_limit,
                self.site,
                self.limits.aliases,
                self.now_us if session.remote else 0,
            )
        )
        if self.draining:
            session.control(frames.Drain(0))

    def _on_beat(self, session: Session, beat: frames.Beat) -> None:
        self._heard(session, beat)

    def _on_prove(self, session: Session, prove: frames.Prove) -> None:
        session.proofs += 1
        if session.proofs > self.limits.keys:
            raise PeerProtocolError(f"more than {self.limits.keys} keys")
        try:
            key_id = verify_proof(
                prove.public_key, prove.signature,
                relay_id=self.relay_id, session_id=session.session_id, challenge=session.challenge,
            )  # fmt: skip
        except OpenError as err:
            raise PeerProtocolError("the proof of a key does not hold") from err
        session.proven.add(key_id)

    def _on_grant(self, session: Session, grant: frames.Grant) -> None:
        session.control(frames.Ack(grant.id, take_grant(session, grant, self.relay_id)))

    def _on_declare(self, session: Session, declared: frames.Declare) -> None:
        # An answer goes to whom its hop id says; calls under no key are to the stores themselves.
        open_to_all = declared.kind == Kind.STREAM_REPLY or (
            declared.kind == Kind.STREAM and declared.key_id == NO_KEY
        )
        if declared.key_id not in session.proven and not open_to_all:
            raise PeerProtocolError(
                f"alias under key {declared.key_id.hex()[:8]}, which was not proven"
            )
        if declared.hop_class != HopClass.LOCAL:
            raise PeerProtocolError(f"hop class {declared.hop_class} in a session")
        if declared.site not in ("", frames.HERE) and (
            error := _grammar(check_site, declared.site)
        ):
            raise PeerProtocolError(error)
        self._declare(session, declared)

    def _declare(self, neighbor: Neighbor, declared: frames.Declare) -> None:
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
        routes = neighbor.routes
        if declared.alias >= len(routes):
            size = min(self.limits.aliases, max(16, 2 * declared.alias + 1))
            routes.extend([None] * (size - len(routes)))
        before = routes[declared.alias]
        if before is not None:
            before.release()
        routes[declared.alias] = Route(neighbor, declared, self.neighbors)

    def _on_join(self, session: Session, join: frames.Join) -> None:
        error = barred(session, join)
        if not error and len(session.members) >= self.limits.joins:
            error = f"this session already has {self.limits.joins} members"
        if not error and not set(join.kinds) <= SERVED_KINDS:
            error = (
                "a member serves requests, pushes, surveys, broadcasts, tunnels and streams only"
            )
        if not error:
            error = _grammar(check_cluster, join.name)
        if error:
            session.control(frames.Ack(join.id, error))
            return
        serial = self._next_serial
        self._next_serial += 1
        key_ids = tuple(dict.fromkeys(join.key_ids))
        member = Member(session, serial, join.name, key_ids, join.kinds, printable(join.tag))
        session.members[serial] = member
        self.interest.join(member)
        self.mesh.joined(member, self.now_us)
        session.control(frames.Ack(join.id, "", serial))
        for watch in self._watchers(member):
            watch.session.control(frames.Membership(watch.number, joined=[self._info(member)]))

    def _on_leave(self, session: Session, leave: frames.Leave) -> None:
        member = session.members.get(leave.member)
        if member is None or member.left:
            session.control(frames.Ack(leave.id, f"member {leave.member} is not of this session"))
            return
        self._leave(member)
        session.control(frames.Ack(leave.id))

    def _leave(self, member: Member) -> None:
        member.left = True
        self.interest.leave(member)
        self.mesh.left(member, self.now_us)
        member.forget_if_done()
        for watch in self._watchers(member):
            if not watch.session.closed:
                watch.session.control(
                    frames.Membership(watch.number, left=[self.member_id(member)])
                )

    def _watchers(self, member: Member) -> Sequence[Watch]:
        return self.interest.watchers(member.name, member.key_ids) if member.listed else ()

    def _on_subscribe(self, session: Session, subscribe: frames.Subscribe) -> None:
        place = (subscribe.filter, subscribe.group)
        granted = [
            key_id
            for key_id in subscribe.key_ids
            if ("topic", subscribe.filter, key_id) in session.granted
        ]
        unproven = [key_id for key_id in subscribe.key_ids if key_id not in granted]
        error = self._unproven(session, unproven) or _grammar(check_filter, subscribe.filter)
        if not error and subscribe.group:
            error = _grammar(check_group, subscribe.group)
        if not error and place in session.subscriptions:
            error = f"already subscribed to {subscribe.filter!r}"
        places = _places(subscribe.filter, subscribe.key_ids)
        if not error and session.places + places > self.limits.subscriptions:
            error = f"the subscriptions of this session are over {self.limits.subscriptions} tokens"
        groups = session.groups
        if not error and subscribe.group:
            if subscribe.group not in groups and len(groups) >= MAX_GROUPS:
                error = f"this session is already in {MAX_GROUPS} queue groups"
            else:
                error = self.mesh.group_error(subscribe.group, subscribe.key_ids)
            if not error:
                groups[subscribe.group] = groups.get(subscribe.group, 0) + 1
        if not error:
            key_ids = session.subscriptions[place] = tuple(dict.fromkeys(subscribe.key_ids))
            session.places += places
            self.interest.subscribe(session, subscribe.filter, subscribe.group, key_ids)
            self.mesh.wanted(subscribe.filter, key_ids, subscribe.group, 1, self.now_us)
        session.control(frames.Ack(subscribe.id, error))

    def _on_unsubscribe(self, session: Session, unsubscribe: frames.Unsubscribe) -> None:
        key_ids = session.subscriptions.pop((unsubscribe.filter, unsubscribe.group), None)
        if key_ids is None:
            session.control(frames.Ack(unsubscribe.id, f"not subscribed to {unsubscribe.filter!r}"))
            return
        if unsubscribe.group:
            session.groups[unsubscribe.group] -= 1
            if not session.groups[unsubscribe.group]:
                del session.groups[unsubscribe.group]
        session.places -= _places(unsubscribe.filter, key_ids)
        self.interest.unsubscribe(session, unsubscribe.filter, unsubscribe.group, key_ids)
        self.mesh.wanted(unsubscribe.filter, key_ids, unsubscribe.group, -1, self.now_us)
        session.control(frames.Ack(unsubscribe.id))

    def _on_credit(self, session: Session, credit: frames.Credit) -> None:
        # After LEAVE the member is gone, and what it finishes then needs no credit.
        member = session.members.get(credit.member)
        load = member.loads.get(credit.kind) if member is not None else None
        if load is not None:
            self._calls.credited(session, load, credit.hops)

    def _on_members(self, session: Session, ask: frames.Members) -> None:
        if self._unproven(session, [k for k in ask.key_ids if not ask.streams or k != NO_KEY]):
            raise PeerProtocolError("members asked for under a key that was not proven")
        if error := _grammar(check_cluster, ask.name):
            raise PeerProtocolError(error)
        if ask.watch and not ask.streams:
            if len(session.watches) >= MAX_WATCHES or ask.id in session.watches:
                raise PeerProtocolError(f"more than {MAX_WATCHES} watches, or one id twice")
            watch = session.watches[ask.id] = Watch(session, ask.id, ask.name, tuple(ask.key_ids))
            self.interest.watch(watch)
        here = self.interest.members(ask.name, ask.key_ids, streams=ask.streams)
        found = [self._info(member) for member in here]
        found += self.mesh.infos(ask.name, ask.key_ids, streams=ask.streams)
        others = self.interest.others(ask.name, ask.key_ids)
        for there in (self.mesh, self.abroad):
            for short, count in there.others(ask.name, ask.key_ids).items():
                others[short] = others.get(short, 0) + count
        away = {} if ask.streams else self.abroad.members(ask.name, ask.key_ids)
        for at in range(0, max(1, len(found)), MAX_INFOS):
            part, more = found[at : at + MAX_INFOS], at + MAX_INFOS < len(found)
            first = ({}, more, {}) if at else (others, more, away)
            session.control(frames.Membership(ask.id, part, [], *first))

    def _on_unwatch(self, session: Session, unwatch: frames.Unwatch) -> None:
        watch = session.watches.pop(unwatch.id, None)
        if watch is not None:
            self.interest.unwatch(watch)

    def _on_status(self, session: Session, status: frames.Status) -> None:
        if self._document_us != self.now_us or not self._document:  # many may ask at once
            self._document, self._document_us = json.dumps(self.status()), self.now_us
        session.control(frames.Report(status.id, self._document))

    def _on_bye(self, session: Session, bye: frames.Bye) -> None:
        # Everything before it is routed: the frames of one session are taken in order.
        if session.gaps:
            session.tell_gaps()
        session.port.control(encode_control(frames.Bye()))
        session.port.finish()
        self.session_down(session)

    # -- reports ---------------------------------------------------------------------------------------------

    def member_id(self, member: Member) -> str:
        """Return relay id (hex), '.', serial: never reused."""
        return f"{self.relay_id.hex()}.{member.serial}"

    def _info(self, member: Member) -> frames.MemberInfo:
        return frames.MemberInfo(
            self.member_id(member), list(member.loads), list(member.key_ids), self.relay_id.hex(), self.site,
            member.session.label, member.tag,
        )  # fmt: skip

    @property
    def held_messages(self) -> int:
        """Messages that ports took and have not written."""
        waiting = sum(neighbor.port.held_messages for neighbor in self.neighbors.values())
        return waiting + len(self._calls.parked)

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
                    "members": len(session.members),
                    "subscriptions": len(session.subscriptions),
                    "running": len(session.handed),
                    "waiting": session.pending,
                    "tunnels": len(session.tunnels),
                    "held": session.port.held_messages,
                }
                for session in self.sessions.values()
            ],
            "clusters": self.interest.cluster_counts(),
            "accounts": self.accounts.report(self.held_messages),
            **self.mesh.status(self.now_us),
            **self.abroad.status(),
            "parked": len(self._calls.parked),
            **self.status_extra(),
        }

    def _unproven(self, session: Session, key_ids: Sequence[bytes]) -> str:
        for key_id in key_ids:
            if key_id not in session.proven:
                return f"key {key_id.hex()[:8]} was not proven in this session"
        return ""


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


def _places(pattern: str, key_ids: Sequence[bytes]) -> int:
    """Return how many nodes of the topic tree a subscription takes at most."""
    return len(set(key_ids)) * (pattern.count(".") + 1)


def _grammar(check: Callable[[str], str], name: str) -> str:
    try:
        check(name)
    except InvalidName as err:
        return str(err)
    return ""
