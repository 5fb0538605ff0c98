"""Simulated sessions, which send plain frames without keys and seals: they call, serve, stall, refuse and leave.

Every data frame has a tag in its body, by which the `Ledger` recognizes it anywhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from iris.wire import frames
from iris.wire.codec import (
    BODY_AT,
    BUNDLE,
    END,
    END_AT,
    FLAGS_AT,
    HOP,
    KIND_AT,
    TUNNEL_BODY_AT,
    decode_control,
    encode_control,
    tunnel_frame,
)
from iris.wire.frames import Serving
from iris.wire.kinds import (
    ANSWER_RUN_KINDS,
    FIRST_DATA_KIND,
    FLAG_REFUSED,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    SERVED_KINDS,
    TUNNEL_KINDS,
    Cause,
    Kind,
    Refusal,
)
from iris.wire.runs import answer_run, call_run
from support.sim.ledger import MAGIC, TAG, Cast, singles, tag_of
from support.sim.waiting import SimPublisher, SimSink, Waiting

if TYPE_CHECKING:
    from support.sim.network import SimNetwork, SimRelay
    from support.sim.wires import Pipe

KEY: Final = bytes(range(16))
OTHER_KEY: Final = bytes(range(1, 17))
PAYLOAD_BYTES: Final = 64
"""Size of a payload, with room for the offsets of a small bundle."""
_NEVER_US: Final = 1 << 60
FOREVER_US: Final = 1 << 50
"""Time of a handler that never answers."""
ANSWERED_BY: Final[dict[int, Kind]] = {
    Kind.SURVEY: Kind.ANSWER,
    Kind.STREAM: Kind.STREAM_REPLY,
}
ALL_KINDS: Final = tuple(sorted(SERVED_KINDS - {Kind.STREAM}))


class SimCall:
    """A request, push, survey or tunnel opening, and its outcome."""

    def __init__(
        self, session: SimSession, kind: int, name: str, tag: int, hop: int, site: str = "", member: str = ""
    ) -> None:  # fmt: skip
        self.session = session
        self.site = site
        self.member = member
        """Id of the one member that it is for; empty if the relays choose one."""
        self.kind = kind
        self.name = name
        self.tag = tag
        self.hop = hop
        self.sent_us = session.net.now_us
        self.deadline_us = 0
        """Deadline in the network's time."""
        self.done_us = 0
        self.outcome = ""
        """ "reply", "fault", "done" (a survey), "accepted" (a tunnel), "handed" (a push that did not fail), a cause
        in lower case, "timeout", "cancelled" by its caller, or "closed" with its session.
        """
        self.may_have_run = True
        self.detail = ""
        self.by = ""
        """Id of the member that replied."""
        self.roster: list[str] = []
        self.answers: list[str] = []
        """Members that answered a survey."""
        self.lost: list[str] = []

    def end(self, outcome: str) -> None:
        """Set the outcome. A second outcome is a violation."""
        net = self.session.net
        if self.outcome:
            net.violate(f"{self} ended as {self.outcome!r} and again as {outcome!r}")
        self.outcome = outcome
        self.done_us = net.now_us
        net.note(f"{self} {outcome} {self.detail}")
        net.ledger.ended(self)

    def __repr__(self) -> str:
        return f"{Kind(self.kind).name.lower()} {self.tag} to {self.name!r} of {self.session}"


class Work:
    """A message that was dispatched to a member."""

    __slots__ = ("deadline_us", "finished_us", "frame", "hop", "kind", "route", "tag")

    def __init__(self, frame: bytes, route: frames.Declare) -> None:
        _, self.kind, _, _, self.hop, self.deadline_us = HOP.unpack_from(frame)
        self.frame = frame
        self.route = route
        self.tag = tag_of(frame)
        self.finished_us = 0


class SimMember:
    """One membership. It runs `concurrency` handlers at once, each for `service_us`, and queues further messages."""

    def __init__(self, session: SimSession, name: str, key: bytes, concurrency: int) -> None:
        self.session = session
        self.name = name
        self.key = key
        self.concurrency = concurrency
        self.serial = 0
        self.joined_us = 0
        self.kinds: Sequence[int] = ALL_KINDS
        self.service_us = 500
        self.refuse: Refusal | None = None
        self.leaving = False
        self.faults = False
        self.cancels = False
        """Whether it asked for callers that left, whose handlers end then."""
        self.running: dict[int, Work] = {}
        """Hop id -> running message."""
        self.waiting: deque[Work] = deque()
        self.executed: list[int] = []
        """Tags of the messages that ran."""
        self.casts: list[int] = []

    @property
    def member_id(self) -> str:
        return f"{self.session.relay.relay_id.hex()}.{self.serial}"

    def take(self, work: Work) -> None:
        """Run a message, queue it, or refuse it."""
        if self.refuse is not None:
            self.session.refuse(work, self.refuse)
            return
        self.waiting.append(work)
        self.pump()

    def pump(self) -> None:
        """Start queued messages while handlers are free."""
        net = self.session.net
        while self.waiting and len(self.running) < self.concurrency:
            work = self.waiting.popleft()
            if work.deadline_us and work.deadline_us <= self.session.mono_us:
                self.session.refuse(work, Refusal.EXPIRED)
                continue
            self.running[work.hop] = work
            self.executed.append(work.tag)
            net.ledger.executed(work, self)
            if self.service_us < FOREVER_US:
                net.clock.after(self.service_us, self.finish, work)

    def finish(self, work: Work) -> None:
        """Let a handler return: answer, or return the credit."""
        if work.finished_us:
            return
        self._end(work, Kind.FAULT if self.faults else Kind.REPLY)

    def _end(self, work: Work, kind: Kind) -> None:
        work.finished_us = self.session.net.now_us
        del self.running[work.hop]
        self.session.answer(work, self, kind)
        self.pump()

    def caller_left(self, hop: int) -> None:
        """End the message with this hop id, whose caller has left: cancel its handler, or do not run it."""
        ledger = self.session.net.ledger
        if (work := self.running.get(hop)) is not None:
            ledger.cancelled(work, self)
            self._end(work, Kind.FAULT)
        for work in [work for work in self.waiting if work.hop == hop]:
            self.waiting.remove(work)
            ledger.given_up(work, self)
            self.session.answer(work, self, Kind.FAULT)

    def finish_all(self) -> None:
        """Let handlers return that would run forever."""
        for work in list(self.running.values()):
            self.finish(work)


class SimTunnel:
    """One end of a tunnel. It numbers its messages, and checks that it receives those of the peer without a gap."""

    def __init__(self, session: SimSession, hop: int, pair: int, opener: bool) -> None:
        self.session = session
        self.hop = hop
        self.pair = pair
        """Tag of the tunnel's opening, known to both ends."""
        self.opener = opener
        self.state = "opening" if opener else "open"
        self.cause: Cause | None = None
        self.sent = 0
        self.received = 0

    def send(self, count: int = 1) -> None:
        """Send `count` messages."""
        for _ in range(count):
            if self.state != "open":
                return
            body = TAG.pack(MAGIC, self.session.net.ledger.new_tag()) + struct.pack(
                "<QQ", self.pair, self.sent
            )
            self.sent += 1
            self.session.say(tunnel_frame(Kind.TUNNEL_DATA, self.hop, body))

    def close(self, cause: Cause = Cause.CLOSED) -> None:
        """Close the tunnel from this end."""
        if self.state in ("open", "opening"):
            self.session.say(tunnel_frame(Kind.TUNNEL_END, self.hop, bytes((cause,))))
            self.ended(cause)

    def got(self, frame: bytes) -> None:
        """Check a received message."""
        pair, number = struct.unpack_from("<QQ", frame, TUNNEL_BODY_AT + TAG.size)
        if pair != self.pair:
            self.session.net.violate(
                f"tunnel {self.pair} of {self.session} got a frame of tunnel {pair}"
            )
        if number != self.received:
            self.session.net.violate(
                f"tunnel {pair}: {self.session} got message {number} where {self.received} was due"
            )
        self.received += 1

    def ended(self, cause: Cause) -> None:
        """Note that the tunnel has ended."""
        self.state = "ended"
        self.cause = cause
        self.session.tunnels.pop(self.hop, None)
        self.session.net.note(f"tunnel {self.pair} ended at {self.session}: {cause.name}")


class SimWatch:
    """The members of a cluster, as notified to a session."""

    def __init__(self, name: str, key: bytes) -> None:
        self.name = name
        self.key = key
        self.members: set[str] = set()
        self.changes = 0
        """Number of notifications."""

    def on_change(self, change: frames.Membership, net: SimNetwork) -> None:
        self.changes += bool(change.joined or change.left)
        for info in change.joined:
            if info.member in self.members:
                net.violate(
                    f"a watch of {self.name!r} was notified twice that {info.member} joined"
                )
            self.members.add(info.member)
        for member in change.left:
            if member not in self.members:
                net.violate(
                    f"a watch of {self.name!r} was notified that {member} left, which was no member"
                )
            self.members.discard(member)


class SimSession:
    """The session of one process with its relay."""

    def __init__(
        self,
        relay: SimRelay,
        label: str,
        keys: Sequence[bytes],
        to_relay: Pipe,
        singly: bool = False,
    ) -> None:
        self.relay = relay
        self.singly = singly
        """It sends each answer as a frame of its own."""
        self.net = relay.net
        self.uid = self.net.ledger.new_tag()
        self.label = label
        self.keys = tuple(keys)
        self.sender_id = self.net.rng.randbytes(16)
        self.to_relay = to_relay
        self.from_relay: Pipe
        self.offset_us = relay.offset_us
        self.closed = False
        self.leaving = False
        self.stalled = False
        self.members: dict[int, SimMember] = {}
        self.former: list[SimMember] = []
        """Members that left, whose handlers may still run."""
        self.subscriptions: dict[tuple[str, str, bytes], int] = {}
        """(filter, group, key) -> time at which the relay confirmed it."""
        self.watches: dict[int, SimWatch] = {}
        self.calls: dict[int, SimCall] = {}
        self.tunnels: dict[int, SimTunnel] = {}
        self.casts: list[int] = []
        """Tags of received publications, in order."""
        self.gaps: list[frames.Gap] = []
        self.document = ""
        self._hop = 0
        self._id = 0
        self._acks: dict[int, Callable[[frames.Ack], None]] = {}
        self._aliases: dict[tuple[int, str, bytes, bytes, str, str], int] = {}
        self._routes: dict[int, frames.Declare] = {}
        self._sequences: dict[tuple[int, str, bytes, str], int] = {}
        self._back: list[tuple[Work, Refusal]] | None = None
        """Refused calls of the run that is being handled."""
        self._answers: list[tuple[int, int, int, bytes]] = []
        """Answers of this instant, as (kind, alias, hop id, body)."""
        self.waiting = Waiting(self)
        self.say(encode_control(frames.Hello(PROTOCOL_VERSION, PROTOCOL_MINOR, label, self.uid)))

    def __repr__(self) -> str:
        return f"{self.label}@{self.relay.host}"

    @property
    def mono_us(self) -> int:
        """Time of the host's monotonic clock."""
        return self.net.now_us + self.offset_us

    # -- saying ----------------------------------------------------------------------------------------------

    def say(self, frame: bytes) -> None:
        if not self.closed and not self.leaving:
            self.to_relay.put(frame)

    def _ask(
        self, make: Callable[[int], frames.Control], acked: Callable[[frames.Ack], None]
    ) -> None:
        self._id += 1
        self._acks[self._id] = acked
        self.say(encode_control(make(self._id)))

    def serve(
        self, name: str, *, key: bytes = KEY, kinds: Sequence[int] = ALL_KINDS, concurrency: int = 16,
        limit_bytes: int = 1 << 20, cancel: bool = False,
    ) -> SimMember:  # fmt: skip
        """Join a cluster. The member's `serial` is set when the relay has answered."""
        member = SimMember(self, name, key, concurrency)
        member.kinds = kinds
        member.cancels = cancel
        serving = {int(kind): Serving(concurrency, limit_bytes, cancel) for kind in kinds}

        def joined(ack: frames.Ack) -> None:
            member.serial = ack.member
            member.joined_us = self.net.now_us
            self.members[ack.member] = member
            self.net.note(f"{self} serves {name!r} as {ack.member}")

        self._ask(lambda number: frames.Join(number, name, [key], serving), joined)
        return member

    def leave(self, member: SimMember) -> None:
        """Leave the cluster; messages that were dispatched before are still finished."""

        def left(ack: frames.Ack) -> None:
            self.members.pop(member.serial, None)
            self.former.append(member)
            self.net.note(f"{self} left {member.name!r}")

        member.leaving = True
        member.refuse = Refusal.LEAVING
        self._ask(lambda number: frames.Leave(number, member.serial), left)

    def subscribe_waiting(
        self, pattern: str, *, group: str = "", key: bytes = KEY, pace_us: int = 0
    ) -> SimSink:
        """Subscribe so that publishers wait; one bundle is handled each `pace_us`."""
        sink = self.waiting.subscribe((pattern, group, key), pace_us)
        self.subscribe(pattern, group=group, key=key)
        return sink

    def subscribe(self, pattern: str, *, group: str = "", key: bytes = KEY) -> None:
        """Subscribe. `subscriptions` shows when the relay has confirmed it."""
        subscription = (pattern, group, key)
        self.subscriptions[subscription] = _NEVER_US

        def subscribed(ack: frames.Ack) -> None:
            if subscription in self.subscriptions:
                self.subscriptions[subscription] = self.net.now_us

        self._ask(lambda number: frames.Subscribe(number, pattern, [key], group), subscribed)

    def unsubscribe(self, pattern: str, group: str, key: bytes) -> None:
        """End a subscription."""
        del self.subscriptions[(pattern, group, key)]
        self.waiting.unsubscribe((pattern, group, key))
        self._ask(lambda number: frames.Unsubscribe(number, pattern, group), lambda ack: None)

    def watch(self, name: str, *, key: bytes = KEY) -> SimWatch:
        """Watch the members of a cluster."""
        watch = SimWatch(name, key)
        self._id += 1
        self.watches[self._id] = watch
        self.say(encode_control(frames.Members(self._id, name, [key], True)))
        return watch

    def ask_status(self) -> None:
        """Request the status document, which is in `document` once it has arrived."""
        self._id += 1
        self.say(encode_control(frames.Status(self._id)))

    def alias(self, kind: int, name: str, key: bytes, site: str = "", member: str = "") -> int:
        """Return the alias of this address; declare it before its first use."""
        # Messages to some sites only have their own sequence, and therefore their own sender.
        sender_id = hashlib.blake2b(self.sender_id + site.encode(), digest_size=16).digest() if site else self.sender_id  # fmt: skip
        route = (kind, name, key, sender_id, site, member)
        alias = self._aliases.get(route)
        if alias is None:
            alias = self._aliases[route] = len(self._aliases)
            declared = frames.Declare(alias, kind, name, key, sender_id, site=site)
            if member:
                relay, _, serial = member.partition(".")
                declared = replace(declared, relay=bytes.fromhex(relay), member=int(serial))
            self.say(encode_control(declared))
        return alias

    def cast(
        self, kind: int, name: str, count: int = 1, *, key: bytes = KEY, size: int = PAYLOAD_BYTES, site: str = ""
    ) -> int:  # fmt: skip
        """Publish or broadcast a bundle of `count` messages; return its tag."""
        tag = self.net.ledger.new_tag()
        self.net.ledger.comes_from(tag, self.relay.site)
        route = (kind, name, key, site)
        first = self._sequences.get(route, 0)
        self._sequences[route] = first + count
        body = TAG.pack(MAGIC, tag).ljust(max(size, 4 * count + 1), b".")
        alias = self.alias(kind, name, key, site)
        if not site:
            self.net.ledger.cast_sent(Cast(self, (kind, name, key), tag, first, count))
            if kind == Kind.PUBLISH:
                self.waiting.sent(name, key, BODY_AT + len(body))
        self.say(
            HOP.pack(46 + len(body), kind, 0, alias, 0, 0)
            + END.pack(self.net.now_us, 0, count, first)
            + body
        )
        return tag

    def publish(
        self, topic: str, count: int = 1, *, key: bytes = KEY, size: int = PAYLOAD_BYTES, site: str = ""
    ) -> int:  # fmt: skip
        return self.cast(Kind.PUBLISH, topic, count, key=key, size=size, site=site)

    def publish_waiting(
        self, topic: str, count: int = 1, *, key: bytes = KEY, size: int = PAYLOAD_BYTES
    ) -> SimPublisher:
        """Publish when there is credit, after the messages that already wait for it."""
        return self.waiting.publish(topic, key, count, size)

    def broadcast(self, name: str, count: int = 1, *, key: bytes = KEY, site: str = "") -> int:
        return self.cast(Kind.BROADCAST, name, count, key=key, site=site)

    def call(
        self, kind: int, name: str, *, key: bytes = KEY, timeout_ms: int = 1000, size: int = PAYLOAD_BYTES, site: str = "",
        member: str = "",
    ) -> SimCall:  # fmt: skip
        """Send a request, push, survey or tunnel opening; with `member`, to the one member with this id."""
        tag = self.net.ledger.new_tag()
        self._hop += 1
        call = SimCall(self, kind, name, tag, self._hop, site, member)
        alias = self.alias(kind, name, key, site, member)
        self.calls[call.hop] = call
        call.deadline_us = self.net.now_us + 1000 * timeout_ms
        body = TAG.pack(MAGIC, tag).ljust(size, b".")
        self.net.ledger.sent(call)
        self.say(
            HOP.pack(46 + len(body), kind, 0, alias, call.hop, call.deadline_us + self.offset_us)
            + END.pack(self.net.now_us, timeout_ms, 1, tag)
            + body
        )
        self.net.clock.at(call.deadline_us, self._timeout, call)
        return call

    def run(
        self, kind: int, name: str, count: int, *, key: bytes = KEY, timeout_ms: int = 1000, site: str = "", member: str = ""
    ) -> list[SimCall]:  # fmt: skip
        """Send `count` requests or pushes as one frame; with `member`, to the one member with this id."""
        alias = self.alias(kind, name, key, site, member)
        deadline_us = self.net.now_us + 1000 * timeout_ms
        calls = []
        for _ in range(count):
            self._hop += 1
            call = SimCall(self, kind, name, self.net.ledger.new_tag(), self._hop, site, member)
            call.deadline_us = deadline_us
            self.calls[call.hop] = call
            self.net.ledger.sent(call)
            self.net.clock.at(deadline_us, self._timeout, call)
            calls.append(call)
        bodies = [TAG.pack(MAGIC, call.tag).ljust(PAYLOAD_BYTES, b".") for call in calls]
        end = END.pack(self.net.now_us, timeout_ms, 1, 0)
        self.say(call_run(alias, 0, calls[0].hop, deadline_us + self.offset_us, end, bodies))
        return calls

    def cancel(self, *calls: SimCall) -> None:
        """Leave calls of this session that have no outcome, and report that."""
        left = [call for call in calls if not call.outcome]
        for call in left:
            call.end("cancelled")
        self._report_left(left)

    def _report_left(self, calls: Sequence[SimCall]) -> None:
        hops = [call.hop for call in calls if call.kind in (Kind.REQUEST, Kind.SURVEY)]
        if hops:
            self.say(encode_control(frames.CallerLeft(hops)))

    def request(
        self, name: str, *, key: bytes = KEY, timeout_ms: int = 1000, size: int = PAYLOAD_BYTES, site: str = ""
    ) -> SimCall:  # fmt: skip
        return self.call(Kind.REQUEST, name, key=key, timeout_ms=timeout_ms, size=size, site=site)

    def push(self, name: str, *, key: bytes = KEY, site: str = "") -> SimCall:
        return self.call(Kind.PUSH, name, key=key, site=site)

    def survey(
        self, name: str, *, key: bytes = KEY, timeout_ms: int = 1000, site: str = ""
    ) -> SimCall:
        return self.call(Kind.SURVEY, name, key=key, timeout_ms=timeout_ms, site=site)

    def open_tunnel(
        self, name: str, *, key: bytes = KEY, timeout_ms: int = 1000, site: str = "", member: str = ""
    ) -> SimTunnel:  # fmt: skip
        call = self.call(
            Kind.TUNNEL_OPEN, name, key=key, timeout_ms=timeout_ms, site=site, member=member
        )
        tunnel = self.tunnels[call.hop] = SimTunnel(self, call.hop, call.tag, opener=True)
        return tunnel

    def refuse(self, work: Work, reason: Refusal) -> None:
        """Refuse a message by sending it back. Calls of one run with the same reason go in one frame."""
        self.net.note(f"{self} refuses {work.tag}: {reason.name}")
        if self._back is not None:
            self._back.append((work, reason))
            return
        frame = bytearray(work.frame)
        frame[FLAGS_AT] = FLAG_REFUSED | reason << 4
        self.say(bytes(frame))

    def _refuse_run(self, back: list[tuple[Work, Refusal]], deadline_us: int) -> None:
        while back:
            first, reason = back[0]
            together = 1
            while (
                together < len(back)
                and back[together][1] is reason
                and back[together][0].hop == first.hop + together
            ):
                together += 1
            works = [work for work, _ in back[:together]]
            flags = FLAG_REFUSED | reason << 4
            end = first.frame[END_AT:BODY_AT]
            bodies = [work.frame[BODY_AT:] for work in works]
            self.say(call_run(0, flags, first.hop, deadline_us, end, bodies))
            del back[:together]

    def answer(self, work: Work, member: SimMember, kind: int) -> None:
        """Send the answer of a member whose handler returns."""
        if work.kind == Kind.PUSH:
            self.say(encode_control(frames.Credit(member.serial, Kind.PUSH, [work.hop])))
            return
        if kind == Kind.REPLY:
            kind = ANSWERED_BY.get(work.kind, kind)
        body = TAG.pack(MAGIC, work.tag) + member.member_id.encode()
        alias = self.alias(kind, work.route.name, work.route.key_id)
        if kind in ANSWER_RUN_KINDS and not self.singly:
            if not self._answers:
                self.net.clock.after(0, self.flush)
            self._answers.append((kind, alias, work.hop, body))
            return
        self._say_answer(kind, alias, work.hop, body)

    def _say_answer(self, kind: int, alias: int, hop: int, body: bytes) -> None:
        self.say(
            HOP.pack(46 + len(body), kind, 0, alias, hop, 0)
            + END.pack(self.net.now_us, 0, 1, 0)
            + body
        )

    def flush(self) -> None:
        """Send the answers of this instant, those under one alias together."""
        answers, self._answers = self._answers, []
        for kind, alias in dict.fromkeys((kind, alias) for kind, alias, _, _ in answers):
            ours = [(hop, body) for _, other, hop, body in answers if other == alias]
            if len(ours) == 1:
                self._say_answer(kind, alias, *ours[0])
            else:
                end = END.pack(self.net.now_us, 0, 1, 0)
                hops, bodies = [hop for hop, _ in ours], [body for _, body in ours]
                self.say(answer_run(alias, end, hops, bodies))

    # -- what it should get ----------------------------------------------------------------------------------

    def wants(self, topic: str, key: bytes, since_us: int = _NEVER_US) -> int:
        """Return 1 if a subscription without a group has matched `topic` since `since_us`, else 0."""
        return int(
            any(
                not group and own == key and known_us <= since_us and self.matches(pattern, topic)
                for (pattern, group, own), known_us in self.subscriptions.items()
            )
        )

    def wants_in_group(self, topic: str, key: bytes) -> int:
        """Return 1 if any subscription matches `topic`, else 0."""
        return int(any(own == key and self.matches(pattern, topic) for pattern, _, own in self.subscriptions))  # fmt: skip

    @staticmethod
    def matches(pattern: str, topic: str) -> bool:
        """Return whether a filter matches. Independent of the relay's topic tree, to check it."""
        wanted, tokens = pattern.split("."), topic.split(".")
        if wanted[-1] == ">":
            wanted = wanted[:-1]
            if len(tokens) <= len(wanted):
                return False
            tokens = tokens[: len(wanted)]
        return len(wanted) == len(tokens) and all(
            w in ("*", t) for w, t in zip(wanted, tokens, strict=True)
        )

    # -- going away ------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Stop reading until `wake`."""
        if not self.stalled and not self.closed:
            self.stalled = True
            self.net.ledger.fault_begins()
            self.net.note(f"{self} stalls")
            self.from_relay.stop()

    def wake(self) -> None:
        if self.stalled:
            self.stalled = False
            self.net.ledger.fault_ends()
            self.net.note(f"{self} wakes")
            self.from_relay.go()

    def bye(self) -> None:
        """End the session with a goodbye, after all frames are sent."""
        self.wake()
        self.flush()
        self.say(encode_control(frames.Bye()))
        self.leaving = True

    def die(self) -> None:
        """End without a goodbye. Frames in transit still arrive, but nothing more is received."""
        if not self.closed:
            self.net.note(f"{self} dies")
            self.to_relay.hang_up()
            self.connection_lost()

    def connection_lost(self) -> None:
        """End all calls, tunnels and members, because the relay or this process has ended."""
        if self.closed:
            return
        self.wake()
        self.closed = True
        self.from_relay.close()
        for call in list(self.calls.values()):
            if not call.outcome:
                call.end("closed")
        self.calls.clear()
        for tunnel in list(self.tunnels.values()):
            tunnel.ended(Cause.LOST)
        self.relay.sessions.pop(self.uid, None)

    def _timeout(self, call: SimCall) -> None:
        if call.outcome:
            return
        if call.kind == Kind.PUSH:
            call.end("handed")
        else:
            self.net.ledger.timed_out(call)
            call.end("timeout")
            self._report_left([call])
        if call.kind == Kind.TUNNEL_OPEN and call.hop in self.tunnels:
            self.tunnels[call.hop].close(Cause.BROKEN)

    # -- hearing ---------------------------------------------------------------------------------------------

    def frame(self, data: bytes) -> None:
        """Handle a frame from the relay."""
        kind = data[KIND_AT]
        if kind < FIRST_DATA_KIND:
            self._control(decode_control(memoryview(data), 0, len(data)))
        elif kind in (Kind.PUBLISH, Kind.BROADCAST):
            self._cast(kind, data)
        elif kind in (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY):
            self._answered(kind, data)
        elif kind in TUNNEL_KINDS:
            self._tunnel(kind, data)
        elif kind == Kind.CALLS:
            self._handed_run(data)
        elif kind == Kind.ANSWERS:
            for single in singles(data, kind):
                self._answered(Kind.REPLY, single)
        else:
            self._handed(data)

    def _route(self, kind: int, alias: int) -> frames.Declare:
        route = self._routes.get(alias)
        if route is None or route.kind != kind:
            self.net.violate(
                f"{self} got a {Kind(kind).name} under alias {alias}, which stands for {route}"
            )
        assert route is not None
        if route.key_id not in self.keys:
            self.net.violate(f"{self} got a {Kind(kind).name} under a key that it does not hold")
        return route

    def _cast(self, kind: int, data: bytes) -> None:
        _, alias, _, count, first = BUNDLE.unpack_from(data)
        route = self._route(kind, alias)
        taken = self.net.ledger.cast_arrived(self, route, tag_of(data), first, count)
        if kind == Kind.PUBLISH:
            self.waiting.arrived(alias, len(data), taken)
        if not taken:
            return
        if kind == Kind.PUBLISH:
            self.casts.append(tag_of(data))
        elif (member := self.members.get(route.member)) is not None:
            member.casts.append(tag_of(data))

    def _handed(self, data: bytes) -> None:
        _, kind, _, alias, hop, _ = HOP.unpack_from(data)
        route = self._route(kind, alias)
        work = Work(data, route)
        self.net.ledger.handed(work, self)
        member = self.members.get(route.member)
        if member is None or kind not in member.kinds:
            self.refuse(work, Refusal.LEAVING)
        elif kind != Kind.TUNNEL_OPEN:
            member.take(work)
        elif member.refuse is not None:
            self.refuse(work, member.refuse)
        elif hop in self.tunnels:
            self.net.violate(f"{self} got a second tunnel {hop}")
        else:
            self.net.ledger.executed(work, member)
            self.tunnels[hop] = SimTunnel(self, hop, work.tag, opener=False)
            body = TAG.pack(MAGIC, self.net.ledger.new_tag()) + struct.pack("<Q", work.tag)
            self.say(tunnel_frame(Kind.TUNNEL_ACCEPT, hop, body))

    def _handed_run(self, data: bytes) -> None:
        _, _, _, alias, _, deadline_us = HOP.unpack_from(data)
        self._back = back = []
        for single in singles(data, self._routes[alias].kind):
            self._handed(single)
        self._back = None
        self._refuse_run(back, deadline_us)

    def _answered(self, kind: int, data: bytes) -> None:
        _, _, _, alias, hop, _ = HOP.unpack_from(data)
        self._route(kind, alias)
        call = self.calls.get(hop)
        if call is None:
            self.net.violate(f"{self} got a {Kind(kind).name} for hop {hop}, which it never used")
            return
        if tag_of(data) != call.tag:
            self.net.violate(f"{call} got the answer of {tag_of(data)}")
        if call.outcome in ("timeout", "cancelled"):
            return
        by = data[BODY_AT + TAG.size :].decode()
        if call.kind == Kind.SURVEY:
            if call.outcome:
                self.net.violate(f"{call} got an answer of {by} after it ended as {call.outcome!r}")
            if by in call.answers:
                self.net.violate(f"{call} got two answers of {by}")
            call.answers.append(by)
        else:
            call.by = by
            call.end("fault" if kind == Kind.FAULT else "reply")

    def _tunnel(self, kind: int, data: bytes) -> None:
        hop = HOP.unpack_from(data)[4]
        tunnel = self.tunnels.get(hop)
        if tunnel is None:
            return  # this end closed it, and the frame was in transit
        if kind == Kind.TUNNEL_ACCEPT:
            if tunnel.state != "opening":
                self.net.violate(f"tunnel {tunnel.pair} was accepted while it was {tunnel.state}")
            tunnel.state = "open"
            self.calls[hop].end("accepted")
        elif kind == Kind.TUNNEL_DATA:
            tunnel.got(data)
        else:
            if tunnel.state == "opening" and not self.calls[hop].outcome:
                self.calls[hop].end("broken")
            tunnel.ended(Cause(data[TUNNEL_BODY_AT]))

    def _control(self, body: Any) -> None:
        if isinstance(body, frames.Declare):
            self._routes[body.alias] = body
            self.waiting.declared(body)
        elif isinstance(body, frames.Ack):
            if body.error:
                self.net.violate(f"{self} received an error: {body.error}")
            self._acks.pop(body.id)(body)
        elif isinstance(body, frames.Fail):
            self._failed(body)
        elif isinstance(body, frames.Roster):
            self.calls[body.hop].roster += body.members
        elif isinstance(body, frames.Done):
            call = self.calls[body.hop]
            call.lost += body.lost
            if call.outcome not in ("timeout", "cancelled"):
                self.net.ledger.survey_done(call)
                call.end("done")
        elif isinstance(body, frames.Membership):
            if body.id in self.watches:
                self.watches[body.id].on_change(body, self.net)
        elif isinstance(body, frames.Gap):
            self.gaps.append(body)
            self.net.ledger.gap_received(self, body)
        elif isinstance(body, frames.Wait):
            self.waiting.asked(body)
        elif isinstance(body, frames.Window):
            self.waiting.credits.window(body)
        elif isinstance(body, frames.Ping):
            self.flush()
            self.say(encode_control(frames.Pong(body.id)))
        elif isinstance(body, frames.CallerLeft):
            self._callers_left(body.hops)
        elif isinstance(body, frames.Report):
            self.document = body.document
        elif isinstance(body, frames.Error):
            self.net.violate(f"{self} was cut off: {body.detail}")
        elif isinstance(body, frames.Bye):
            self.connection_lost()

    def _callers_left(self, hops: Sequence[int]) -> None:
        for member in [*self.members.values(), *self.former]:
            for hop in hops if member.cancels else ():
                member.caller_left(hop)

    def _failed(self, fail: frames.Fail) -> None:
        call = self.calls.get(fail.hop)
        if call is None:
            self.net.violate(f"{self} received a FAIL for hop {fail.hop}, which it never used")
            return
        if call.outcome in ("timeout", "handed", "cancelled"):
            return
        call.detail = fail.detail
        call.may_have_run = fail.may_have_run
        call.end(Cause(fail.cause).name.lower())
        if call.kind == Kind.TUNNEL_OPEN and fail.hop in self.tunnels:
            self.tunnels[fail.hop].ended(Cause(fail.cause))
