"""Decides where every frame goes; never waits, reads a clock, draws entropy or opens a socket.

Whoever drives it (the daemon, or a test with virtual time) sets `now_us`, hands in sessions and whole frames, and settles
the ports after each batch. Bodies are never looked at: a data frame is routed by its alias and hop id alone, which are
overwritten in place.

    session ── DECLARE ──► Route ── interest (members, subscribers) ──► Target ── alias there ──► port
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from iris.crypto.keys import verify_proof
from iris.errors import InvalidName, LocalProtocolError, OpenError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    BODY_AT,
    CAST,
    END_AT,
    KIND_AT,
    decode_control,
    encode_control,
)
from iris.wire.frames import DECLARED_KINDS, PROTOCOL_MINOR, PROTOCOL_VERSION, SERVED_KINDS, Kind
from iris.wire.names import check_cluster, check_filter, check_group, check_topic
from relay.core.calls import Calls
from relay.core.interest import Interest, Member, Watch
from relay.core.ports import Accounts, Port
from relay.core.session import Route, Session, Target

MAX_WATCHES: Final = 1024
MAX_GROUPS: Final = 128
"""Queue groups of one session: all of them may have to be named in one DECLARE."""
_FIRST: Final = END_AT + 16


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
        site: str = "",
    ) -> None:  # fmt: skip
        self.relay_id = relay_id
        self.site = site
        self.now_us = 0
        self.accounts = Accounts()
        self.interest = Interest()
        self.sessions: dict[int, Session] = {}
        self.limits = limits or Limits()
        self.message_limit = message_limit
        self.draining = False
        self.status_extra: Callable[[], dict[str, object]] = dict
        self._entropy = entropy
        self._document = ""
        self._document_us = 0
        self._next_session = 1
        self._next_serial = 1
        self._calls = calls = Calls(
            relay_id, self.accounts, self.interest, self.limits, self.sessions
        )
        table: list[Callable[[Session, memoryview, int, int], None]] = [self._control] * 256
        table[Kind.PUBLISH] = table[Kind.BROADCAST] = self._cast
        table[Kind.REQUEST] = table[Kind.PUSH] = self._call
        table[Kind.TUNNEL_OPEN] = self._call
        table[Kind.SURVEY] = self._call
        table[Kind.REPLY] = table[Kind.FAULT] = table[Kind.ANSWER] = calls.answered
        table[Kind.TUNNEL_ACCEPT] = table[Kind.TUNNEL_DATA] = table[Kind.TUNNEL_END] = calls.tunnel
        self._table = table
        self._controls: dict[type, Callable[[Session, Any], None]] = {
            frames.Prove: self._on_prove,
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
            frames.Bye: self._on_bye,
        }

    # -- driving ---------------------------------------------------------------------------------------------

    def session_up(self, port: Port) -> Session:
        """A connection came; it has yet to say HELLO."""
        number = self._next_session
        self._next_session += 1
        session = self.sessions[number] = Session(
            port, number, self._entropy(32), self.limits.aliases
        )
        return session

    def session_down(self, session: Session) -> None:
        """The connection is gone, however it ended. Idempotent."""
        if session.closed:
            return
        session.forget()
        del self.sessions[session.number]
        for member in list(session.members.values()):
            if not member.left:
                self._leave(member)
        for (pattern, group), key_ids in session.subscriptions.items():
            self.interest.unsubscribe(session, pattern, group, key_ids)
        for watch in session.watches.values():
            self.interest.unwatch(watch)
        self._calls.session_down(session)

    def frame_in(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        """Route the frame at `buf[start:end]`, which may be changed in place.

        Raises:
            PeerProtocolError: the session broke the protocol; the caller tells it and ends it.
        """
        self._table[buf[start + KIND_AT]](session, buf, start, end)

    def entry(self, session: Session) -> Callable[[memoryview, int, int], None]:
        """Return `frame_in` of one session, one call shorter."""
        table = self._table

        def frame_in(buf: memoryview, start: int, end: int) -> None:
            table[buf[start + KIND_AT]](session, buf, start, end)

        return frame_in

    def writable(self, session: Session) -> None:
        """The session's port has room again: what was dropped meanwhile is told."""
        if session.gaps and not session.closed:
            session.tell_gaps()

    def drain(self, grace_ms: int) -> None:
        """The relay is about to stop: members and callers hear of it, new sessions are told at once."""
        self.draining = True
        for session in self.sessions.values():
            if session.greeted:
                session.control(frames.Drain(grace_ms))

    # -- casts -----------------------------------------------------------------------------------------------

    def _cast(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        """Publish or broadcast: to every target, each frame as it came but for its alias."""
        if end - start < BODY_AT:
            raise PeerProtocolError("a data frame is cut short")
        kind, alias, count = CAST.unpack_from(buf, start)
        try:
            route = session.routes[alias]
        except IndexError:
            route = None
        if route is None or route.kind != kind:
            raise PeerProtocolError(f"alias {alias} was not declared for this kind of frame")
        interest = self.interest
        if route.version != interest.version:
            self._resolve(route)
        if not 0 < 4 * count < end - start:  # each message has an offset of 4 bytes
            raise PeerProtocolError(f"{count} messages in a frame of {end - start} bytes")
        accounts = self.accounts
        accounts.in_ += count
        interest.tick = tick = interest.tick + 1
        target = route.single
        if target is not None:
            known = target.alias
            if known.number < 0:
                if not target.port.has_room(end - start):
                    self._too_slow(target, buf, start, count)
                    return
                known = target.declare(tick)
            known.used = tick
            ALIAS.pack_into(buf, start + ALIAS_AT, known.number)
            if target.port.forward(buf, start, end, count):
                accounts.out += count
            else:
                self._too_slow(target, buf, start, count)
            return
        targets = route.many
        if route.groups:
            targets = self._choose(route)
        if not targets:
            accounts.drop("unwanted", count)
            return
        accounts.copied += count * (len(targets) - 1)
        frame = bytearray(buf[start:end])
        for target in targets:
            if not target.port.has_room(len(frame)):
                self._too_slow(target, buf, start, count)
                continue
            ALIAS.pack_into(frame, ALIAS_AT, target.number(tick))
            if target.port.send(bytes(frame), count):
                accounts.out += count
            else:
                self._too_slow(target, buf, start, count)

    def _too_slow(self, target: Target, buf: memoryview, start: int, count: int) -> None:
        self.accounts.drop("slow receiver", count)
        first = int.from_bytes(buf[start + _FIRST : start + _FIRST + 8], "little")
        target.session.dropped(target.delivery, first, count)

    def _resolve(self, route: Route) -> None:
        """Find who gets this route's casts while the interest stays as it is."""
        route.targets.clear()
        route.groups = ()
        if route.kind == Kind.BROADCAST:
            loads = self.interest.loads(route.name, route.key_id, Kind.BROADCAST)
            route.many = [route.target(load.member.session, load.member.serial) for load in loads]
        else:
            plain, groups = self.interest.subscribers(route.name, route.key_id)
            if groups:
                route.many = ()
                route.groups = [("", plain), *groups.items()]
            else:
                route.many = [route.target(session, 0) for session in plain]
        route.single = route.many[0] if len(route.many) == 1 else None
        route.version = self.interest.version

    def _choose(self, route: Route) -> Sequence[Target]:
        """Choose one session per queue group for a bundle; one that is slow is passed over."""
        route.turn += 1
        (_, plain), *groups = route.groups
        chosen: dict[int, list[str]] = {session.number: [] for session in plain}
        sessions = {session.number: session for session in plain}
        for name, candidates in groups:
            first = route.turn % len(candidates)
            order = [*candidates[first:], *candidates[:first]]
            session = next((s for s in order if not s.port.held_messages), order[0])
            sessions[session.number] = session
            chosen.setdefault(session.number, []).append(name)
        alone = {session.number for session in plain}
        return [
            route.target(sessions[number], 0, number in alone, tuple(names))
            for number, names in chosen.items()
        ]

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, session: Session, buf: memoryview, start: int, end: int) -> None:
        self._calls.called(session, buf, start, end, self.now_us)

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
        session.greeted = True
        # Shown in terminals: no session may move somebody's cursor.
        session.label = "".join(c if c.isprintable() else "?" for c in hello.label)
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
            )
        )
        if self.draining:
            session.control(frames.Drain(0))

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

    def _on_declare(self, session: Session, declared: frames.Declare) -> None:
        if declared.kind not in DECLARED_KINDS:
            raise PeerProtocolError(f"alias for frames of kind 0x{declared.kind:02x}")
        if declared.alias >= self.limits.aliases:
            raise PeerProtocolError(
                f"alias {declared.alias} is over the limit of {self.limits.aliases}"
            )
        if declared.key_id not in session.proven:
            raise PeerProtocolError(
                f"alias under key {declared.key_id.hex()[:8]}, which was not proven"
            )
        try:
            (check_topic if declared.kind == Kind.PUBLISH else check_cluster)(declared.name)
        except InvalidName as err:
            raise PeerProtocolError(str(err)) from err
        routes = session.routes
        if declared.alias >= len(routes):
            size = min(self.limits.aliases, max(16, 2 * declared.alias + 1))
            routes.extend([None] * (size - len(routes)))
        routes[declared.alias] = Route(session, declared)

    def _on_join(self, session: Session, join: frames.Join) -> None:
        error = self._unproven(session, join.key_ids)
        if not error and len(session.members) >= self.limits.joins:
            error = f"this session already has {self.limits.joins} members"
        if not error and not set(join.kinds) <= SERVED_KINDS:
            error = "a member serves requests, pushes, surveys, broadcasts and tunnels only"
        if not error:
            error = _grammar(check_cluster, join.name)
        if error:
            session.control(frames.Ack(join.id, error))
            return
        serial = self._next_serial
        self._next_serial += 1
        member = Member(session, serial, join.name, tuple(dict.fromkeys(join.key_ids)), join.kinds)
        session.members[serial] = member
        self.interest.join(member)
        session.control(frames.Ack(join.id, "", serial))
        for watch in self.interest.watchers(member):
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
        member.forget_if_done()
        for watch in self.interest.watchers(member):
            if not watch.session.closed:
                watch.session.control(
                    frames.Membership(watch.number, left=[self.member_id(member)])
                )

    def _on_subscribe(self, session: Session, subscribe: frames.Subscribe) -> None:
        place = (subscribe.filter, subscribe.group)
        error = self._unproven(session, subscribe.key_ids) or _grammar(
            check_filter, subscribe.filter
        )
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
                groups[subscribe.group] = groups.get(subscribe.group, 0) + 1
        if not error:
            key_ids = session.subscriptions[place] = tuple(dict.fromkeys(subscribe.key_ids))
            session.places += places
            self.interest.subscribe(session, subscribe.filter, subscribe.group, key_ids)
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
        session.control(frames.Ack(unsubscribe.id))

    def _on_credit(self, session: Session, credit: frames.Credit) -> None:
        # After LEAVE the member is gone, and what it finishes then needs no credit.
        member = session.members.get(credit.member)
        load = member.loads.get(credit.kind) if member is not None else None
        if load is not None:
            self._calls.credited(session, load, credit.hops)

    def _on_members(self, session: Session, ask: frames.Members) -> None:
        if self._unproven(session, ask.key_ids):
            raise PeerProtocolError("members asked for under a key that was not proven")
        if error := _grammar(check_cluster, ask.name):
            raise PeerProtocolError(error)
        if ask.watch:
            if len(session.watches) >= MAX_WATCHES or ask.id in session.watches:
                raise PeerProtocolError(f"more than {MAX_WATCHES} watches, or one id twice")
            watch = session.watches[ask.id] = Watch(session, ask.id, ask.name, tuple(ask.key_ids))
            self.interest.watch(watch)
        found = [self._info(member) for member in self.interest.members(ask.name, ask.key_ids)]
        session.control(
            frames.Membership(ask.id, found, [], self.interest.others(ask.name, ask.key_ids))
        )

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
            member.session.label,
        )  # fmt: skip

    @property
    def held_messages(self) -> int:
        """Messages that ports took and have not written."""
        return sum(session.port.held_messages for session in self.sessions.values())

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
            **self.status_extra(),
        }

    def _unproven(self, session: Session, key_ids: Sequence[bytes]) -> str:
        for key_id in key_ids:
            if key_id not in session.proven:
                return f"key {key_id.hex()[:8]} was not proven in this session"
        return ""


def _places(pattern: str, key_ids: Sequence[bytes]) -> int:
    """Return how many nodes of the topic tree a subscription takes at most."""
    return len(set(key_ids)) * (pattern.count(".") + 1)


def _grammar(check: Callable[[str], str], name: str) -> str:
    try:
        check(name)
    except InvalidName as err:
        return str(err)
    return ""
