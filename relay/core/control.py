"""Control frames of sessions: keys, aliases, members, subscriptions, watches and status reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
from msgspec import UNSET

from iris.core.heartbeat import ClockSamples, Heartbeat
from iris.crypto.keys import verify_proof
from iris.errors import InvalidName, LocalProtocolError, OpenError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import FRAME_OVERHEAD, MAX_REPORT_BYTES, decode_control
from iris.wire.frames import MAX_KEY_IDS
from iris.wire.kinds import (
    HERE,
    NO_KEY,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    SERVED_KINDS,
    STORES,
    Cause,
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
from relay.core.documents import Document
from relay.core.grants import barred, take_grant
from relay.core.parts import SCANNED, Parts, node_count
from relay.core.refused_aliases import RefusedAliases
from relay.core.session import Member, Session, Watch
from relay.core.watches import INFOS

MAX_WATCHES: Final = 1024
"""Limit of watches of one session."""
MAX_STARTING: Final = 8
"""Limit of relays named as having a store that is starting."""
NOT_OURS: Final = (
    "names are shown only to the relay's own user and to root on its host; run the command there"
)
TOO_LONG: Final = "the full report does not fit in one frame"
MAX_REPORTS: Final = 16
"""Limit of answers to STATUS that are being made; each may hold as many bytes as a frame."""
TOO_MANY: Final = f"{MAX_REPORTS} other sessions are asking for the full report; ask again"
GROUPS_AT_ONCE: Final = 64
"""Subscriptions of a session that says BYE that are ended before others get their turn."""
MAX_GROUPS: Final = 128
"""Limit of queue groups of one session: one DECLARE may have to name them all."""


class SessionControl:
    """Handles the control frames of all sessions of one router."""

    def __init__(self, router: Parts, calls: Calls) -> None:
        self._router = router
        self._answers = calls.answers
        self._leaving = calls.leaving
        self.refused = RefusedAliases(router.accounts, calls.answers)
        self._next_serial = 1
        self._reports = 0
        """Answers to STATUS that are being made."""
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            frames.Prove: self._on_prove,
            frames.Release: self._on_release,
            frames.Grant: self._on_grant,
            frames.Declare: self._on_declare,
            frames.Join: self._on_join,
            frames.Leave: router.leave_asked,
            frames.Subscribe: self._on_subscribe,
            frames.Unsubscribe: self._on_unsubscribe,
            frames.Credit: self._on_credit,
            frames.Members: self._on_members,
            frames.Unwatch: self._on_unwatch,
            frames.Status: self._on_status,
            frames.Ping: self._on_ping,
            frames.Pong: self._on_pong,
            frames.Settle: router.settling.ask,
            frames.Topic: self._on_topic,
            frames.Wait: self._on_wait,
            frames.Window: router.credits.window,
            frames.Direct: router.direct.asked,
            frames.Carried: router.direct.carried,
            frames.Trouble: router.troubles.reported,
            frames.Beat: self._on_beat,
            frames.CallerLeft: self._on_left,
            frames.Ticket: self._on_ticket,
            frames.Bye: self._on_bye,
        }

    def frame(self, session: Session, buf: memoryview, start: int, end: int) -> bool:
        """Handle one control frame, which may cost more than its length tells; raises PeerProtocolError."""
        session.controlled_us = self._router.now_us
        body = decode_control(buf, start, end)
        if not session.greeted:
            if not isinstance(body, frames.Hello):
                raise PeerProtocolError(f"{type(body).__name__} before HELLO")
            self._on_hello(session, body)
            return True
        handler = self._handlers.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"unexpected {type(body).__name__} frame from a session")
        try:
            handler(session, body)
        except LocalProtocolError as err:
            raise PeerProtocolError(f"the answer does not fit in a control frame: {err}") from err
        return True

    def _on_hello(self, session: Session, hello: frames.Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise PeerProtocolError(
                f"the client speaks protocol version {hello.version}, this relay {PROTOCOL_VERSION}; upgrade the older one"
            )
        if session.remote:
            if not hello.mono_us:
                raise PeerProtocolError("HELLO over TLS or WebSocket must carry mono_us")
            if session.web:  # the timers of hidden tabs run too seldom for heartbeats
                session.samples = ClockSamples(hello.mono_us, self._router.now_us)
                session.clock_us = session.samples.clock_us
                if self._router.admission is not None:
                    text = "" if hello.ticket is UNSET else hello.ticket
                    self._router.admission.admit(session, text, self._router.wall_us or 0)
            else:
                session.pulse = Heartbeat(hello.mono_us, self._router.now_us)
                session.clock_us = session.pulse.clock_us
                self._router.watch_pulse(session)
        session.greeted = True
        # The label is shown in terminals, so it must not contain control characters.
        session.label = printable(hello.label)
        session.pid = hello.pid
        session.control(
            frames.Welcome(
                PROTOCOL_VERSION,
                PROTOCOL_MINOR,
                self._router.relay_id,
                session.session_id,
                session.challenge,
                self._router.message_limit,
                self._router.site,
                self._router.limits.aliases_of(web=session.web),
                self._router.now_us if session.remote else 0,
            )
        )
        if self._router.draining:
            session.control(frames.Drain(0))

    def _on_beat(self, session: Session, beat: frames.Beat) -> None:
        session.beat_came(beat, self._router.now_us)

    def _on_ping(self, session: Session, ping: frames.Ping) -> None:
        self._sample(session, ping)
        mono_us = self._router.now_us if session.samples is not None else UNSET
        session.control(frames.Pong(ping.id, mono_us))

    def _sample(self, session: Session, frame: frames.Ping | frames.Pong) -> None:
        if session.samples is not None and frame.mono_us is not UNSET:
            session.samples.add(frame.mono_us, self._router.now_us)
            session.clock_us = session.samples.clock_us

    def _on_pong(self, session: Session, pong: frames.Pong) -> None:
        self._sample(session, pong)
        self._router.drains.answered(session, pong, self._router.now_us)
        self._router.stores.answered(session, pong, self._router.now_us)

    def _on_prove(self, session: Session, prove: frames.Prove) -> None:
        keys = self._router.quotas.keys
        if not keys.has_room(session.user):
            raise PeerProtocolError(keys.full(session.user, "proven keys"))
        session.proofs += 1
        keys.take(session.user)
        if session.proofs > self._router.limits.keys:
            raise PeerProtocolError(f"a session may prove at most {self._router.limits.keys} keys")
        try:
            key_id = verify_proof(
                prove.public_key, prove.signature,
                relay_id=self._router.relay_id, session_id=session.session_id, challenge=session.challenge, channel=session.channel,
            )  # fmt: skip
        except OpenError as err:
            raise PeerProtocolError("the proof does not match its key and our challenge") from err
        session.proven.add(key_id)

    def _on_release(self, session: Session, release: frames.Release) -> None:
        key_id = release.key_id
        if session.web:  # it could make us check signatures without end
            raise PeerProtocolError("RELEASE from a session over WebSocket")
        if key_id not in session.proven:
            raise PeerProtocolError(
                f"RELEASE of key {key_id.hex()[:8]}, which this session has not proven"
            )
        work = self._release(session, key_id)
        if len(session.subscriptions) + session.keyed + len(session.routes) > SCANNED:
            session.unfinished = work
        else:
            for _ in work:
                pass

    def _release(self, session: Session, key_id: bytes) -> Iterator[None]:
        """Forget a key of a session and its aliases under it, in parts. Raises PeerProtocolError."""
        members = (member.key_ids for member in list(session.members.values()))
        watches = (watch.key_ids for watch in list(session.watches.values()))
        looked_at = 0
        for key_ids in chain(members, list(session.subscriptions.values()), watches):
            if key_id in key_ids:
                raise PeerProtocolError(
                    f"RELEASE of key {key_id.hex()[:8]}, which a member, subscription or watch of this session uses"
                )
            looked_at += 1 + len(key_ids)
            if looked_at >= SCANNED:
                looked_at = 0
                yield
        session.proven.discard(key_id)
        session.proofs -= 1
        self._router.quotas.keys.give(session.user)
        yield from self._router.forget_routes(session, key_id)

    def _on_ticket(self, session: Session, ticket: frames.Ticket) -> None:
        admission = self._router.admission
        if not session.web or admission is None:
            raise PeerProtocolError("TICKET from a session that needs none")
        error = admission.renew(session, ticket.ticket, self._router.wall_us or 0)
        session.control(frames.Ack(ticket.id, error))

    def _denied(self, session: Session, verb: str, name: str, key_ids: Sequence[bytes]) -> str:
        """Return why the ticket of a session does not allow a verb, or an empty text."""
        admission = self._router.admission
        return "" if admission is None else admission.refusal(session, (verb,), name, key_ids)

    def _on_grant(self, session: Session, grant: frames.Grant) -> None:
        session.control(frames.Ack(grant.id, take_grant(session, grant, self._router.relay_id)))

    def _on_declare(self, session: Session, declared: frames.Declare) -> None:
        # An answer goes by its hop id; calls without a key are to the stores themselves.
        open_to_all = declared.kind == Kind.STREAM_REPLY or (
            declared.kind == Kind.STREAM and declared.key_id == NO_KEY
        )
        if declared.key_id not in session.proven and not open_to_all:
            raise PeerProtocolError(
                f"alias under key {declared.key_id.hex()[:8]}, which this session has not proven"
            )
        if declared.hop_class != HopClass.LOCAL:
            raise PeerProtocolError(f"a session may not declare hop class {declared.hop_class}")
        if declared.site not in ("", HERE) and (error := _grammar(check_site, declared.site)):
            raise PeerProtocolError(error)
        self._router.check_alias(session, declared)
        alias, admission = declared.alias, self._router.admission
        address = declared.kind, declared.name, declared.key_id
        if admission is not None and (denied := admission.denial(session, *address)):
            if alias < len(session.routes):
                self._router.forget_alias(session, alias)
            self.refused.refuse(session, alias, *address, Cause.REFUSED, denied)
        elif error := self._router.alias_error(session, alias):
            self.refused.refuse(session, alias, *address, Cause.OVERLOADED, error)
        else:
            self._router.declare(session, declared)
            session.refused.pop(alias, None)

    def deny(self, session: Session, alias: int, why: str) -> None:
        """End an alias that the ticket of a session no longer allows."""
        route = session.routes[alias]
        if route is not None:
            self._router.forget_alias(session, alias)
            self.refused.refuse(
                session, alias, route.kind, route.name, route.key_id, Cause.REFUSED, why
            )

    def _on_wait(self, session: Session, wait: frames.Wait) -> None:
        known = wait.alias < len(session.routes) and session.routes[wait.alias] is not None
        if known or not session.refused:
            self._router.credits.asked(session, wait)

    def _on_join(self, session: Session, join: frames.Join) -> None:
        error = barred(session, join)
        if not error and len(session.members) >= self._router.limits.joins:
            error = f"this session already has {self._router.limits.joins} members, which is the limit; join from another process"
        key_ids = tuple(dict.fromkeys(join.key_ids))
        if not error:
            error = self._members_error(session, len(key_ids))
        if not error and not set(join.kinds) <= SERVED_KINDS:
            error = "unknown kind in JOIN; a member can serve requests, pushes, surveys, broadcasts, tunnels and streams"
        if not error:
            error = _grammar(check_cluster, join.name)
        if not error:
            error = self._denied(session, "serve", join.name, key_ids)
        if not error and session.web and Kind.STREAM in join.kinds:
            error = "a session over WebSocket cannot be a store"
        if error:
            session.control(frames.Ack(join.id, error))
            return
        serial = self._next_serial
        self._next_serial += 1
        session.keyed += len(key_ids)
        self._router.quotas.members.take(session.user, len(key_ids))
        methods = 0 if join.methods is UNSET else join.methods
        tag = printable(join.tag)
        member = Member(session, serial, join.name, key_ids, join.kinds, tag, methods)
        session.members[serial] = member
        self._leaving.asked = self._leaving.asked or bool(member.cancels)
        self._router.interest.join(member)
        self._router.advertiser.joined(member, self._router.now_us)
        session.control(frames.Ack(join.id, "", serial, self._router.fresh))
        if join.name == STORES and NO_KEY in key_ids:
            self._router.stores.joined(session, self._router.now_us)
        watches = self._router.interest.watches
        if member.listed and watches.expects(join.name, key_ids):
            watches.joined(join.name, key_ids, self._info(member))

    def _members_error(self, session: Session, count: int) -> str:
        """Return why a session may not have `count` more members (counted once per key id), or an empty text."""
        members = self._router.quotas.members
        if session.keyed + count > max(MAX_KEY_IDS, members.limit // 4):
            return (
                f"a session may have at most {members.limit // 4} members, each counted once per key; "
                "join the others from another process"
            )
        if members.has_room(session.user, count):
            return ""
        return members.full(session.user, "members, each counted once per key")

    def _on_subscribe(self, session: Session, subscribe: frames.Subscribe) -> None:
        key = (subscribe.filter, subscribe.group)
        granted = [
            key_id
            for key_id in subscribe.key_ids
            if ("topic", subscribe.filter, key_id) in session.granted
        ]
        unproven = [key_id for key_id in subscribe.key_ids if key_id not in granted]
        error = self._unproven(session, unproven) or _grammar(check_filter, subscribe.filter)
        if not error and subscribe.group:
            error = _grammar(check_group, subscribe.group)
        if not error:
            error = self._denied(session, "subscribe", subscribe.filter, subscribe.key_ids)
        if not error and key in session.subscriptions:
            error = f"this session is already subscribed to {subscribe.filter!r}"
        nodes = node_count(subscribe.filter, subscribe.key_ids)
        if not error and session.topic_nodes + nodes > self._router.limits.subscriptions:
            error = f"the subscriptions of this session would exceed {self._router.limits.subscriptions} tokens; use fewer or shorter filters"
        table = self._router.quotas.subscriptions
        if not error and not table.has_room(session.user, nodes):
            error = table.full(session.user, "subscription tokens")
        groups = session.groups
        if not error and subscribe.group:
            if subscribe.group not in groups and len(groups) >= MAX_GROUPS:
                error = f"this session is already in {MAX_GROUPS} queue groups, which is the limit; use another process"
            else:
                error = self._router.advertiser.group_error(
                    subscribe.group, subscribe.key_ids, session.user
                )
            if not error:
                groups[subscribe.group] = groups.get(subscribe.group, 0) + 1
        if not error:
            key_ids = session.subscriptions[key] = tuple(dict.fromkeys(subscribe.key_ids))
            session.topic_nodes += nodes
            table.take(session.user, nodes)
            self._router.interest.subscribe(session, subscribe.filter, subscribe.group, key_ids)
            self._router.advertiser.count_subscription(
                subscribe.filter, key_ids, subscribe.group, session.user, 1, self._router.now_us
            )
        session.control(frames.Ack(subscribe.id, error, fresh=self._router.fresh))

    def _on_unsubscribe(self, session: Session, unsubscribe: frames.Unsubscribe) -> None:
        if (unsubscribe.filter, unsubscribe.group) not in session.subscriptions:
            session.control(
                frames.Ack(
                    unsubscribe.id, f"this session is not subscribed to {unsubscribe.filter!r}"
                )
            )
            return

        def done() -> None:
            if not session.closed:
                session.control(frames.Ack(unsubscribe.id))

        pattern, group = unsubscribe.filter, unsubscribe.group
        self._router.end_subscription(session, pattern, group, done, stay=unsubscribe.stay is True)

    def _on_credit(self, session: Session, credit: frames.Credit) -> None:
        # After LEAVE the member may be forgotten, and what it finishes then needs no credit.
        member = session.members.get(credit.member)
        load = member.loads.get(credit.kind) if member is not None else None
        if load is not None:
            self._answers.credited(session, load, credit, self._router.now_us)

    def _on_left(self, session: Session, left: frames.CallerLeft) -> None:
        self._leaving.callers_left(session, left, self._router.now_us)

    def _on_members(self, session: Session, ask: frames.Members) -> None:
        if self._unproven(session, [k for k in ask.key_ids if not ask.streams or k != NO_KEY]):
            raise PeerProtocolError("MEMBERS under a key that this session has not proven")
        if error := _grammar(check_cluster, ask.name):
            raise PeerProtocolError(error)
        if self._router.admission is not None and (
            error := self._router.admission.members(
                session, ask.name, ask.key_ids, streams=ask.streams
            )
        ):
            if ask.streams:  # as if no store had it, which every client understands
                session.control(frames.Membership(ask.id, [], []))
            else:
                session.control(frames.Ack(ask.id, error))
            return
        if ask.watch and not ask.streams:
            if ask.id in session.watches:
                raise PeerProtocolError(f"watch id {ask.id} is already in use")
            table = self._router.quotas.watches
            key_ids = tuple(dict.fromkeys(ask.key_ids))
            error = ""
            if len(session.watches) >= MAX_WATCHES:
                error = f"this session already has {MAX_WATCHES} watches, which is the limit"
            elif not table.has_room(session.user, len(key_ids)):
                error = table.full(session.user, "watches, each counted once per key")
            if error:
                session.control(frames.Ack(ask.id, error))
                return
            table.take(session.user, len(key_ids))
            session.watches[ask.id] = Watch(session, ask.id, ask.name, key_ids)
        if ask.succeeding is not UNSET:
            self._router.stores.succeeds(session, ask.succeeding, self._router.now_us)
        session.unfinished = self._answer_members(session, ask)

    def _answer_members(self, session: Session, ask: frames.Members) -> Iterator[None]:
        """Send a session who is there, in parts, and then what has changed meanwhile, if it watches."""
        version = self._router.interest.version
        others = self._router.interest.other_keys(ask.name, ask.key_ids)
        for there in (self._router.mesh, self._router.sites):
            for short, count in there.other_keys(ask.name, ask.key_ids).items():
                others[short] = others.get(short, 0) + count
        remote = {} if ask.streams else self._router.sites.members(ask.name, ask.key_ids)
        starting = self._router.mesh.starting_stores()[:MAX_STARTING] if ask.streams else []
        found = self._found(ask)
        part = [*islice(found, INFOS)]
        known = {info.member for info in part}
        first: tuple[Any, ...] = (others, False, remote, starting)
        while True:
            following = [*islice(found, INFOS)]
            known.update(info.member for info in following)
            body = frames.Membership(ask.id, list(part), [], *first)
            session.control(msgspec.structs.replace(body, more=bool(following)))
            yield
            if not following:
                break
            part, first = following, ()
        watch = session.watches.get(ask.id)
        if watch is not None and ask.watch:
            self._router.interest.watches.add(watch)
            if self._router.interest.version != version:
                yield from self._catch_up(session, ask, known)

    def _found(self, ask: frames.Members) -> Iterator[frames.MemberInfo]:
        for member in self._router.interest.members(ask.name, ask.key_ids, streams=ask.streams):
            yield self._info(member)
        yield from self._router.mesh.infos(ask.name, ask.key_ids, streams=ask.streams)

    def _catch_up(self, session: Session, ask: frames.Members, known: set[str]) -> Iterator[None]:
        """Send a session that watches from now on what has changed since it was sent who is there."""
        now = {info.member: info for info in self._found(ask)}
        joined = [info for member, info in now.items() if member not in known]
        left = [member for member in known if member not in now]
        for at in range(0, max(len(joined), len(left)), INFOS):
            part = joined[at : at + INFOS]
            session.control(frames.Membership(ask.id, part, left[at : at + INFOS]))
            yield

    def _on_topic(self, session: Session, topic: frames.Topic) -> None:
        if self._unproven(session, (topic.key_id,)):
            raise PeerProtocolError("TOPIC under a key that this session has not proven")
        if error := _grammar(check_topic, topic.name):
            raise PeerProtocolError(error)
        if error := self._denied(session, "publish", topic.name, (topic.key_id,)):
            raise PeerProtocolError(error)
        self._router.audiences.ask(session, topic)

    def _on_unwatch(self, session: Session, unwatch: frames.Unwatch) -> None:
        watch = session.watches.pop(unwatch.id, None)
        if watch is not None:
            self._router.interest.watches.remove(watch)
            self._router.quotas.watches.give(session.user, len(watch.key_ids))

    def _on_status(self, session: Session, status: frames.Status) -> None:
        limited = "" if session.ours else NOT_OURS
        if not limited and self._reports >= MAX_REPORTS:
            limited = TOO_MANY
        if limited:
            self._report(session, status, limited)
        else:
            work = self._report_in_parts(session, status)
            if next(work, self) is None:  # from here on it counts, and ends with its session
                session.unfinished = work

    def _report_in_parts(self, session: Session, status: frames.Status) -> Iterator[None]:
        self._reports += 1
        try:
            document = Document()
            parts = self._router.status_in_parts()
            for part in parts:
                document.add(part)
                if document.size > MAX_REPORT_BYTES - FRAME_OVERHEAD:
                    self._report(session, status, TOO_LONG)
                    return
                yield
                if session.closed:
                    return
            session.control(frames.Report(status.id, str(document)))
        finally:  # also if the session ends meanwhile
            self._reports -= 1

    def _report(self, session: Session, status: frames.Status, limited: str) -> None:
        """Answer STATUS without names."""
        document = Document()
        document.add(self._router.numbers(limited))
        session.control(frames.Report(status.id, str(document)))

    def _on_bye(self, session: Session, bye: frames.Bye) -> None:
        # Frames of one session are handled in order, so everything before BYE is routed.
        session.unfinished = self._end_groups(session)

    def _end_groups(self, session: Session) -> Iterator[None]:
        """Leave the queue groups of a session, in parts, and then say goodbye to it."""
        groups = [each for each in session.subscriptions if each[1]]
        left = 1 + len(groups)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left and not session.closed and not self._router.drains.keep_bye(session):
                self._router.goodbye(session)

        if session.leaving > len(session.staying):
            left += 1
            self._router.known(done)
        for number, (pattern, group) in enumerate(groups, 1):
            self._router.end_subscription(session, pattern, group, done)
            if number % GROUPS_AT_ONCE == 0:
                yield
        session.unfinished = None  # this is the end of it, and goodbye completes what is left
        done()

    def _info(self, member: Member) -> frames.MemberInfo:
        return frames.MemberInfo(
            self._router.member_id(member), list(member.loads), list(member.key_ids), self._router.relay_id.hex(), self._router.site,
            member.session.label, member.tag, member.methods or UNSET,
        )  # fmt: skip

    def _unproven(self, session: Session, key_ids: Sequence[bytes]) -> str:
        for key_id in key_ids:
            if key_id not in session.proven:
                return f"this session has not proven key {key_id.hex()[:8]}"
        return ""


def _grammar(check: Callable[[str], str], name: str) -> str:
    try:
        check(name)
    except InvalidName as err:
        return str(err)
    return ""
