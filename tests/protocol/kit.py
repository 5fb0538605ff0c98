"""Machines back to back: `iris.core.session.Session` and `relay.core.router.Router` joined by memory, in virtual time.

    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    bob.serve("db", lambda delivery: delivery.reply(b"pong", None, False))
    answer = alice.request("db", b"ping")
    net.run()
    answer.value == b"pong"

Nothing waits and nothing is random: `run` moves bytes until none are left to send. `net.tamper` gets each frame that
the relay sends, and returns the frames to send instead, as a hostile relay would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import UNSET

from iris.core.bundle import Headers
from iris.core.conversation import State
from iris.core.guard import Guard
from iris.core.inbound import InFlow
from iris.core.interfaces import Delivery, Loss
from iris.core.message import Message
from iris.core.requests import Pending
from iris.core.session import Session
from iris.core.tunnel import TunnelEnd
from iris.crypto.keys import ClusterKey
from iris.errors import IrisError, PeerProtocolError, RemoteError
from iris.wire import frames
from iris.wire.codec import (
    KIND_AT,
    FrameReader,
    ReceiveBuffer,
    decode_control,
    encode_control,
)
from iris.wire.frames import Serving
from iris.wire.kinds import SERVED_KINDS, Kind, Refusal
from iris.wire.names import matches
from relay.core.limits import Limits
from relay.core.link import Link
from relay.core.ports import Held
from relay.core.router import Router

KEY = ClusterKey(bytes(range(32)))
OTHER_KEY = ClusterKey(bytes(range(1, 33)))
START_US = 1_700_000_000_000_000
FRESHNESS_US = 600_000_000
LIMIT = 1 << 20
CLOCK_STEP_US = 3_600_000_000


class Result:
    """A waiter, which a reply or an ACK resolves."""

    def __init__(self) -> None:
        self.message: Any = None
        self.error: BaseException | None = None

    @property
    def value(self) -> Any:
        """The payload of the reply. Raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        assert self.message is not None, "not resolved yet"
        return self.message.payload

    def done(self) -> bool:
        return self.message is not None or self.error is not None

    def set_result(self, result: Any, /) -> None:
        assert not self.done()
        self.message = result

    def set_exception(self, exception: BaseException, /) -> None:
        assert not self.done()
        self.error = exception


class Answers:
    """A survey's sink, which collects the answers in order."""

    def __init__(self) -> None:
        self.roster_ids: list[str] = []
        self.payloads: list[bytes] = []
        self.faults: dict[str, str] = {}
        self.end: tuple[list[str], IrisError | None] | None = None

    def roster(self, members: list[str]) -> None:
        self.roster_ids += members

    def answer(self, message: Message) -> None:
        self.payloads.append(message.payload)

    def fault(self, member: str, error: RemoteError) -> None:
        self.faults[member] = error.detail

    def done(self, lost: list[str], error: IrisError | None) -> None:
        assert self.end is None
        self.end = (lost, error)


class Inbox:
    """A subscription, which collects messages and gaps."""

    def __init__(self, pattern: str, group: str) -> None:
        self.pattern = pattern
        self.group = group
        self.messages: list[Message] = []
        self.gaps: list[Loss] = []
        self.waits = False
        self.limit_bytes = LIMIT
        self._held: dict[tuple[str, bytes], int] = {}
        """(topic, publisher) -> bytes not handled yet, if publishers wait for this subscription."""

    def held(self, name: str, source: bytes) -> int:
        return self._held.get((name, source), 0)

    def handle(self, host: Host) -> None:
        """Handle all messages that wait."""
        flows, self._held = self._held, {}
        for flow in flows:
            host.session.casts.windows.freed(*flow)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    def deliver(self, messages: list[Message], size: int) -> None:
        self.messages += messages
        if self.waits:
            flow = (messages[0].name, messages[0].source)
            self._held[flow] = self._held.get(flow, 0) + size

    def gap(self, gap: Loss) -> None:
        self.gaps.append(gap)


class Service:
    """A binding. It passes deliveries to `handler`, or refuses all of them if `refusal` is set."""

    def __init__(self, number: int, handler: Callable[[Delivery], None] | None) -> None:
        self.number = number
        self.handler = handler
        self.refusal: Refusal | None = None
        self.deliveries: list[Delivery] = []
        self.methods: list[str] = []
        """Methods of the calls that named one."""
        self.casts: list[Message] = []
        self.tunnels: list[TunnelEnd] = []
        self.gaps: list[Loss] = []
        self.member = 0

    def admit(self, kind: int, size: int) -> Refusal | None:
        return self.refusal

    def dispatch(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        if self.handler is not None:
            self.handler(delivery)

    def call(self, delivery: Delivery, method: str) -> None:
        self.methods.append(method)
        self.dispatch(delivery)

    def broadcast(self, messages: list[Message], size: int) -> None:
        self.casts += messages

    def tunnel(self, end: TunnelEnd) -> None:
        self.tunnels.append(end)

    def gap(self, gap: Loss) -> None:
        self.gaps.append(gap)


class Port:
    """The relay's side of one host's connection. `room` messages fit before it refuses; None means unlimited."""

    def __init__(self) -> None:
        self.out: deque[bytes] = deque()
        self.room: int | None = None
        self.finished = False
        self.held_messages = 0
        self.crowded = False
        self.takes = True
        """Whether the port accepts frames."""

    def _take(self, frame: bytes, count: int) -> bool:
        if self.room is not None:
            if count > self.room:
                return False
            self.room -= count
        self.out.append(frame)
        return True

    unread = False

    def has_room(self, size: int) -> bool:
        return self.takes

    def discard(self, held: Held) -> int:
        return 0

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        return self._take(bytes(buf[start:end]), count)

    def send(self, frame: bytes, count: int) -> bool:
        return self._take(frame, count)

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        return self._take(bytes(buf[start:end]), 1)

    def control(self, frame: bytes) -> None:
        self.out.append(frame)

    def finish(self) -> None:
        self.finished = True

    def abort(self, reason: str) -> None:
        self.finished = True


class Host:
    """One process: a session, its owner, and its connection."""

    def __init__(
        self, net: Network, label: str, keys: Sequence[ClusterKey], guard: Guard, relay: int = 0, user: str = "this process"
    ) -> None:  # fmt: skip
        self.net = net
        self.router = net.routers[relay]
        self.label = label
        self.keys = {key.key_id: key for key in keys}
        self.key = keys[0]
        self.guard = guard
        self.services: dict[int, Service] = {}
        self.inboxes: list[Inbox] = []
        self.losses: list[Loss] = []
        self.other_key_notes: list[tuple[str, bytes, dict[str, int]]] = []
        """(topic, key id, others) of publications that only holders of other keys subscribe to."""
        self.ended_because = ""
        """The rule that one end reported as broken by the other."""
        self.port = Port()
        self.peer = self.router.session_up(self.port, user=user)
        self.clock_us = 0
        """How far the wall clock of this host is ahead."""
        self.session = Session(self, guard, net.entropy, label=label, pid=7, message_limit=LIMIT)
        self._to_relay = FrameReader(self._at_relay, net.buffer, LIMIT + 4096)
        self._to_session = FrameReader(self.session.frame, net.own_buffer, LIMIT + 4096)
        self.say(encode_control(self.session.greeting))

    @property
    def mono_us(self) -> int:
        """CLOCK_MONOTONIC of this host, the same as its relay's."""
        return self.router.now_us

    # -- Owner ---------------------------------------------------------------------------------------------

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        return self.keys.get(key_id)

    def binding(self, flow: InFlow) -> Service | None:
        return self.services.get(flow.member)

    def sinks(self, flow: InFlow) -> Sequence[Inbox]:
        return [
            inbox
            for inbox in self.inboxes
            if (inbox.group in flow.groups if inbox.group else flow.plain)
            and matches(inbox.pattern, flow.name)
        ]

    def draining(self) -> None: ...

    def lost(self, lost: Loss) -> None:
        self.losses.append(lost)

    def other_keys(self, topic: str, key_id: bytes, others: dict[str, int]) -> None:
        self.other_key_notes.append((topic, key_id, others))

    def out_full(self) -> None: ...

    # -- using it ------------------------------------------------------------------------------------------

    def serve(
        self, name: str, handler: Callable[[Delivery], None] | None = None, *, concurrency: int = 16,
        limit_bytes: int = 1 << 20, keys: Sequence[ClusterKey] = (), only: Sequence[Kind] = (), cancel: bool = False,
        methods: int = 0,
    ) -> Service:  # fmt: skip
        """Join a cluster for all kinds, or for those in `only`. Return when the relay has answered.

        `cancel`: ask for callers that left.
        """
        service = Service(len(self.services) + 1, handler)
        ack = Result()
        ids = [key.key_id for key in keys or (self.key,)]
        for key in keys or (self.key,):
            self.session.out.prove(key)
        kinds = {
            int(kind): Serving(concurrency, limit_bytes, cancel)
            for kind in only or SERVED_KINDS - {Kind.STREAM}
        }
        said = methods or UNSET
        self.session.ask(lambda number: frames.Join(number, name, ids, kinds, methods=said), ack)
        self.net.run()
        assert ack.error is None
        assert not ack.message.error, ack.message.error
        service.member = ack.message.member
        self.services[service.member] = service
        return service

    def subscribe(
        self, pattern: str, *, group: str = "", key: ClusterKey | None = None, waits: bool = False
    ) -> Inbox:
        """Subscribe to a filter. `waits`: publishers wait, and messages are held until `Inbox.handle`."""
        inbox = Inbox(pattern, group)
        inbox.waits = waits
        self.inboxes.append(inbox)
        self.session.casts.subscriptions_changed()
        key = key or self.key
        self.session.out.prove(key)
        ack = Result()
        self.session.ask(lambda number: frames.Subscribe(number, pattern, [key.key_id], group), ack)
        self.net.run()
        assert not ack.message.error, ack.message.error
        return inbox

    def publish(self, topic: str, *payloads: bytes, kind: Kind = Kind.PUBLISH) -> None:
        """Publish the payloads as one bundle."""
        out = self.session.out
        flow = out.flow(kind, topic, self.key)
        for payload in payloads:
            out.add(flow, payload, None, False)
        parts, flow.parts = flow.parts, 1
        out.cut(flow)
        flow.parts = parts

    def publish_waiting(self, topic: str, payload: bytes) -> bool:
        """Publish one bundle if there is credit; return whether it was sent."""
        out = self.session.out
        flow = out.flow(Kind.PUBLISH, topic, self.key)
        credit = out.credit(flow)
        if credit.sent >= credit.limit:
            return False
        out.add(flow, payload, None, False)
        out.cut(flow)
        return True

    def request(
        self, name: str, payload: bytes = b"", *, timeout_ms: int = 1000, idempotent: bool = False,
        headers: Headers | None = None, kind: Kind = Kind.REQUEST, member: str = "", method: str = "",
    ) -> Result:  # fmt: skip
        result = Result()
        self.send(
            name, payload, result, timeout_ms=timeout_ms, idempotent=idempotent, headers=headers, member=member,
            method=method,
        )  # fmt: skip
        return result

    def send(
        self, name: str, payload: bytes, waiter: Result | None = None, *, survey: Answers | None = None,
        timeout_ms: int = 1000, idempotent: bool = False, headers: Headers | None = None, member: str = "",
        method: str = "",
    ) -> Pending:  # fmt: skip
        self.session.turn(self.net.now_us + self.clock_us, self.mono_us)
        return self.session.requests.send(
            Kind.REQUEST if survey is None else Kind.SURVEY, name, self.key, payload, headers, False,
            timeout_ms=timeout_ms, waiter=waiter, survey=survey, idempotent=idempotent, member=member,
            method=method,
        )  # fmt: skip

    def survey(self, name: str, payload: bytes = b"", *, timeout_ms: int = 1000) -> Answers:
        answers = Answers()
        self.send(name, payload, survey=answers, timeout_ms=timeout_ms)
        return answers

    def push(
        self, name: str, payload: bytes = b"", *, timeout_ms: int = 1000, member: str = "", method: str = ""
    ) -> None:  # fmt: skip
        self.session.turn(self.net.now_us + self.clock_us, self.mono_us)
        self.session.requests.push(name, self.key, payload, None, False, timeout_ms, member, method)

    def open_tunnel(
        self, name: str, headers: Headers | None = None, *, member: str = ""
    ) -> TunnelEnd:
        return self.session.tunnels.open(name, self.key, headers, 1000, member)

    def say(self, data: bytes) -> None:
        """Send raw bytes to the relay."""
        feed(self._to_relay, data)

    def receive(self, data: bytes) -> None:
        """Deliver raw bytes to the session, as from the relay."""
        feed(self._to_session, data)

    # -- moving bytes --------------------------------------------------------------------------------------

    def speak(self) -> bool:
        """Deliver the session's pending bytes to the relay; return whether there were any."""
        session = self.session
        session.turn(self.net.now_us + self.clock_us, self.mono_us)
        session.flush()
        if session.state is not State.UP or not session.out.chunks or self.peer.closed:
            return False
        data, session.out.chunks = b"".join(session.out.chunks), []
        self.say(data)
        return True

    def listen(self) -> bool:
        """Deliver the relay's pending frames to the session; return whether there were any."""
        if not self.port.out or self.session.state is State.ENDED:
            self.port.out.clear()
            return False
        self.session.turn(self.net.now_us + self.clock_us, self.mono_us)
        frame = self.port.out.popleft()
        for each in self.net.tamper(self, frame):
            try:
                self.receive(each)
            except IrisError as err:
                self.ended_because = str(err)
                self.lose("protocol error")
                break
        return True

    def lose(self, reason: str = "the connection broke") -> None:
        """Break the connection, and notify both ends."""
        self.router.session_down(self.peer)
        self.port.out.clear()
        self.session.end(reason)

    def _at_relay(self, buf: memoryview, start: int, end: int) -> None:
        if self.peer.closed:
            return
        try:
            self.router.frame_in(self.peer, buf, start, end)
        except PeerProtocolError as err:
            self.ended_because = str(err)
            self.router.session_down(self.peer)
            self.port.control(encode_control(frames.Error(str(err)[:1024])))


class LinkEnd(Port):
    """One relay's side of a link."""

    def __init__(self, net: Network, router: Router) -> None:
        super().__init__()
        self.net = net
        self.router = router
        self.other: LinkEnd
        self.link: Link
        self.why = ""
        self.reader = FrameReader(self._frame, ReceiveBuffer(), 2 * LIMIT)
        self.tamper: Callable[[bytes], Sequence[bytes]] = lambda frame: (frame,)

    def speak(self) -> bool:
        """Deliver the next frame to the other relay; return whether there was one."""
        if not self.out:
            return False
        for frame in self.tamper(self.out.popleft()):
            if not self.other.link.closed:
                feed(self.other.reader, frame)
        return True

    def _frame(self, buf: memoryview, start: int, end: int) -> None:
        try:
            self.router.frame_in(self.link, buf, start, end)
        except PeerProtocolError as err:
            self.why = str(err)
            self.router.link_down(self.link)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.why = reason


class Network:
    """Relays and their hosts. The clock of relay n is `CLOCK_STEP_US` times n ahead of the first one's."""

    def __init__(
        self, *, limits: Limits | None = None, relay_seed: int = 0, relays: int = 1,
        walls: Sequence[Callable[[], int]] = (),
    ) -> None:  # fmt: skip
        """`walls` are the wall clocks of the relays."""
        self.entropy = random.Random(relay_seed).randbytes
        self.now_us = START_US
        self.routers = [
            Router(
                self.entropy(16),
                entropy=self.entropy,
                message_limit=LIMIT,
                limits=limits,
                wall=wall,
            )
            for _, wall in zip_longest(range(relays), walls)
        ]
        self.router = self.routers[0]
        for number, router in enumerate(self.routers):
            router.now_us = 1_000_000 + number * CLOCK_STEP_US
        self.hosts: list[Host] = []
        self.ends: list[LinkEnd] = []
        self.buffer = ReceiveBuffer()
        self.own_buffer = ReceiveBuffer()
        self.tamper: Callable[[Host, bytes], Sequence[bytes]] = lambda host, frame: (frame,)

    @property
    def mono_us(self) -> int:
        """The clock of the first relay."""
        return self.router.now_us

    def host(
        self, label: str = "host", *, keys: Sequence[ClusterKey] = (KEY,), guard: Guard | None = None, relay: int = 0,
        user: str = "this process",
    ) -> Host:  # fmt: skip
        """Return a host whose session is up."""
        host = Host(self, label, keys, guard or Guard(FRESHNESS_US), relay, user)
        self.hosts.append(host)
        self.run()
        assert host.session.state is State.UP
        return host

    def link(self, one: int, other: int) -> tuple[LinkEnd, LinkEnd]:
        """Link two relays; return both ends."""
        routers = self.routers[one], self.routers[other]
        ends = LinkEnd(self, routers[0]), LinkEnd(self, routers[1])
        hellos = routers[0].hello(routers[0].now_us), routers[1].hello(0)
        ends[0].other, ends[1].other = ends[1], ends[0]
        ends[0].link = routers[0].link_up(ends[0], hellos[1])
        ends[1].link = routers[1].link_up(ends[1], hellos[0])
        self.ends += ends
        self.run()
        return ends

    def cut(self, ends: tuple[LinkEnd, LinkEnd]) -> None:
        """Break a link, and notify both relays. Frames in transit are lost."""
        for end in ends:
            self.ends.remove(end)
            end.router.link_down(end.link)
        self.run()

    def run(self) -> None:
        """Move bytes until none are left to send, including those that relays gather for some milliseconds."""
        self._move()
        for _ in range(3 if len(self.routers) > 1 else 0):
            self._advance(5_000)
            self._move()

    def _move(self) -> None:
        busy = True
        while busy:
            busy = False
            for host in self.hosts:
                busy |= host.speak()
            for end in self.ends:
                while end.speak():
                    busy = True
            for host in self.hosts:
                while host.listen():
                    busy = True
            for router in self.routers:  # at the end of a turn
                while not router.interest.watches.deadline_us:
                    router.interest.watches.expire()
                    busy = True

    def _advance(self, us: int) -> None:
        self.now_us += us
        for router in self.routers:
            router.now_us += us
            if router.deadline_us <= router.now_us:
                router.expire()
        for host in self.hosts:
            if host.session.deadline_us <= host.mono_us:
                host.session.turn(self.now_us + host.clock_us, host.mono_us)
                host.session.expire(host.mono_us)

    def pass_time(self, seconds: float) -> None:
        """Let virtual time pass, and handle all deadlines in it."""
        left_us = int(seconds * 1e6)
        while left_us > 0:
            step_us = left_us if len(self.routers) == 1 else min(left_us, 500_000)
            left_us -= step_us
            self._advance(step_us)
            self._move()
        self.run()

    def check(self) -> None:
        """Check that every relay's account balances and that no relay holds messages."""
        for router in self.routers:
            assert router.accounts.balance() == 0, router.accounts.report(0)
            for neighbor in router.neighbors.values():
                assert not neighbor.in_flight
                assert neighbor.pending == 0
                assert not neighbor.tunnels


def kind_of(frame: bytes) -> int:
    return frame[KIND_AT]


def control_of(frame: bytes) -> Any:
    """Return the body of a control frame."""
    return decode_control(memoryview(bytearray(frame)), 0, len(frame))


def feed(reader: FrameReader, data: bytes) -> None:
    pos = 0
    while pos < len(data):
        buffer = reader.get_buffer()
        size = min(len(buffer), len(data) - pos)
        buffer[:size] = data[pos : pos + size]
        pos += size
        reader.received(size)
