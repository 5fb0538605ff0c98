"""The parsers of bytes from others. Each target takes any bytes: they are accepted, or raise the one documented
error.

`TARGETS` maps a name to a function of bytes, so that other fuzzers can drive the same code. Every test run repeats the
inputs in `corpus/<name>/`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from iris.core.bundle import (
    decode_bundle,
    decode_keyed,
    decode_single,
    encode_bundle,
    encode_single,
)
from iris.core.guard import Guard
from iris.core.inbound import InFlow
from iris.core.interfaces import Loss
from iris.core.session import Session
from iris.core.tunnel import FIRST_WINDOW, MAX_WINDOW, Growth, TunnelEnd
from iris.crypto.channel import Channel
from iris.crypto.keyring import Keyring, parse_network_keys
from iris.crypto.keys import ClusterKey, IssuerKey, StoreKey, public_id
from iris.crypto.tickets import TicketError, read_ticket
from iris.errors import (
    DecodeError,
    IrisError,
    KeyringError,
    PeerProtocolError,
    RemoteError,
    SealError,
)
from iris.wire import frames, link_frames, streams
from iris.wire.codec import (
    HOP,
    FrameReader,
    ReceiveBuffer,
    decode_control,
    encode_control,
)
from iris.wire.frames import Serving
from iris.wire.kinds import PROTOCOL_MINOR, Kind, Refusal
from iris.wire.names import check_cluster, check_topic
from relay.bridges.iris1.core.frames import Request, TunInit, Violation
from relay.bridges.iris1.core.machine import Machine, State
from relay.config import dev
from relay.core.ports import Held
from relay.core.router import Router
from relay.net.fragments import Assembly
from relay.net.ports import Driver
from relay.net.sessions import SessionHub
from relay.net.websession import WebConnection
from relay.store.channels import Channels
from relay.store.errors import ChannelRefused
from relay.store.session import StoreSession

KEY: Final = ClusterKey(bytes(range(32)))
ISSUER: Final = IssuerKey(bytes(range(32)))
NOW_US: Final = 1_700_000_000_000_000
CLUSTER: Final = "db"
SERVED: Final = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST, Kind.TUNNEL_OPEN)
DECLARED: Final = (*SERVED, Kind.PUBLISH, Kind.REPLY, Kind.FAULT, Kind.ANSWER)
"""The kinds of aliases 0 to 8, which the fuzzed session has declared."""


def split(data: bytes) -> Iterator[bytes]:
    """Split `data` into frames at the lengths in it, with the rest as the last frame. All lengths are made true."""
    pos = 0
    while len(data) - pos > 4:
        size = max(2, int.from_bytes(data[pos : pos + 2], "little"))
        body = data[pos + 4 : pos + 4 + size]
        pos += 4 + size
        if len(body) >= 2:
            yield len(body).to_bytes(4, "little") + body


def control(data: bytes) -> None:
    """Decode a control frame: if it is accepted, it is encoded and decoded to the same again."""
    frame = memoryview(len(data).to_bytes(4, "little") + data.ljust(2, b"\0"))
    try:
        body = decode_control(frame, 0, len(frame))
    except PeerProtocolError:
        return
    again = memoryview(encode_control(body))
    assert decode_control(again, 0, len(again)) == body


def reader(data: bytes) -> None:
    """Read a byte stream in reads whose sizes the first bytes choose: frames are unchanged, until one is wrong."""
    sizes, stream = data[:8] or b"\1", data[8:]
    got: list[bytes] = []
    limit = 100_000
    shared = ReceiveBuffer(8192)
    under_test = FrameReader(
        lambda buf, start, end: got.append(bytes(buf[start:end])), shared, limit
    )
    pos = turn = 0
    wrong = False
    try:
        while pos < len(stream):
            buffer = under_test.get_buffer()
            size = min(len(buffer), 1 + 16 * sizes[turn % len(sizes)], len(stream) - pos)
            assert size > 0
            buffer[:size] = stream[pos : pos + size]
            pos += size
            turn += 1
            under_test.received(size)
    except PeerProtocolError:
        wrong = True
    whole = b"".join(got)
    assert stream.startswith(whole)
    assert all(int.from_bytes(frame[:4], "little") == len(frame) - 4 for frame in got)
    left = stream[len(whole) :]
    if wrong:
        assert not 2 <= int.from_bytes(left[:4], "little") <= limit
    else:
        assert under_test.held_bytes == len(left)
        assert len(left) < 4 or int.from_bytes(left[:4], "little") > len(left) - 4


def bundle(data: bytes) -> None:
    """Decode the plain text of a bundle from a holder of the key."""
    with contextlib.suppress(DecodeError):
        one = decode_single(data)
        assert decode_single(encode_single(*one)) == (one[0], one[1] or None, *one[2:])
    try:
        payloads, keys, headers, packed = decode_keyed(data)
    except DecodeError:
        return
    assert payloads
    assert headers is None or len(headers) == len(payloads)
    assert keys is None or len(keys) == len(payloads)
    assert decode_bundle(data) == (payloads, headers, packed)
    again = decode_keyed(encode_bundle(payloads, headers, packed, keys))
    assert again[:2] == (payloads, keys)
    assert [h or None for h in again[2] or [None] * len(payloads)] == [
        h or None for h in headers or [None] * len(payloads)
    ]
    assert again[3] == packed


def keyring(data: bytes) -> None:
    """Parse the text of a key file."""
    text = data.decode(errors="replace")
    for parse in (Keyring.parse, parse_network_keys):
        try:
            found: Any = parse(text)
        except KeyringError as err:
            said = [word for word in str(err).split() if len(word) >= 43 and word in text]
            if said:
                raise AssertionError("a secret in an error") from err
        else:
            if isinstance(found, Keyring):
                assert Keyring.parse(found.dump()) == found


def tunnel(data: bytes) -> None:
    """Receive records of a tunnel whose peer holds the key: first the items as they are, then single ones."""
    sent: list[bytes] = []
    ends = [
        TunnelEnd(
            CLUSTER, KEY, bytes(16), 1, initiator=initiator, ephemeral=bytes([7 + initiator] * 32),
            emit=sent.append, mark_dirty=lambda end: None, growth=Growth(),
        )
        for initiator in (True, False)
    ]  # fmt: skip
    opener, member = ends
    opener.accepted(memoryview(member.answer(memoryview(opener.hello()))))
    opener.flush()
    member.received(memoryview(sent[-1][26:]))
    assert member.open
    assert opener._send is not None
    read = 0
    for number, plain in enumerate((data[:60_000], *split(data[:60_000]))):
        member.received(memoryview(opener._send.encrypt(plain if number == 0 else plain[4:])))
        assert member.buffered <= MAX_WINDOW
        assert member.broken or member.credit <= MAX_WINDOW + FIRST_WINDOW
        if number % 3 == 0:
            while (chunk := member.next_chunk()) is not None:
                read += len(chunk[1])
        if member.broken:
            assert not member.buffered
            break
    member.received(memoryview(data[:60_000]))  # this is not a record
    assert member.broken or member.ended
    assert read <= len(data) * 2


class _Port:
    """A port that accepts frames, and refuses every `full`th."""

    def __init__(self, full: int) -> None:
        self.full = full
        self.taken = 0
        self.frames: list[bytes] = []
        self.held_messages = 0
        self.crowded = False

    unread = False

    def has_room(self, size: int) -> bool:
        return True

    def discard(self, held: Held) -> int:
        return 0

    def _take(self, frame: bytes) -> bool:
        self.taken += 1
        if self.full and self.taken % self.full == 0:
            return False
        self.frames.append(frame)
        return True

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        return self._take(bytes(buf[start:end]))

    def send(self, frame: bytes, count: int) -> bool:
        return self._take(frame)

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        return self._take(bytes(buf[start:end]))

    def control(self, frame: bytes) -> None:
        if frame[4] != Kind.TUNNEL_END:
            decode_control(
                memoryview(frame), 0, len(frame)
            )  # a session must be able to decode our frames
        self.frames.append(frame)

    def finish(self) -> None:
        self.frames.clear()

    def abort(self, reason: str) -> None:
        self.frames.clear()


def router(data: bytes) -> None:
    """Route frames of a session that has proven a key, beside two honest ones: it is ended, or everything works."""
    full, data = (data[0] % 7, data[1:]) if data else (0, b"")
    relay = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
    relay.now_us = NOW_US

    def take(session: Any, frame: bytes) -> None:
        buf = memoryview(bytearray(frame))
        relay.frame_in(session, buf, 0, len(buf))

    def attach(port: _Port) -> Any:
        session = relay.session_up(port)
        take(session, encode_control(frames.Hello(1, PROTOCOL_MINOR)))
        signature = KEY.sign_proof(
            relay_id=bytes(16), session_id=session.session_id, challenge=session.challenge
        )
        take(session, encode_control(frames.Prove(0, KEY.public_key, signature)))
        return session

    ids = [KEY.key_id]
    serving = {int(kind): Serving(2, 1000, cancel=True) for kind in SERVED}
    member = attach(_Port(full))
    take(member, encode_control(frames.Join(1, CLUSTER, ids, serving)))
    take(member, encode_control(frames.Subscribe(2, ">", ids)))
    take(member, encode_control(frames.Subscribe(2, "*", ids, "g")))
    take(member, encode_control(frames.Members(3, CLUSTER, ids, watch=True)))
    fuzzed = attach(_Port(full))
    take(fuzzed, encode_control(frames.Join(1, CLUSTER, ids, serving)))
    for alias, kind in enumerate(DECLARED):
        declared = frames.Declare(alias, kind, CLUSTER, KEY.key_id, bytes([alias] * 16))
        take(fuzzed, encode_control(declared))
    for frame in split(data):
        try:
            take(fuzzed, frame)
        except PeerProtocolError:
            break
        finally:
            assert relay.accounts.balance() == 0, relay.accounts.report(0)
        relay.writable(fuzzed)
        relay.writable(member)
    relay.session_down(fuzzed)
    assert relay.accounts.balance() == 0
    assert not member.pending
    assert not any(handed.origin is fuzzed for handed in member.in_flight.values()) or fuzzed.closed
    assert all(load.messages >= 0 for m in member.members.values() for load in m.loads.values())
    relay.session_down(member)
    assert not relay.sessions
    assert not relay.interest.names
    assert not relay.interest._clusters
    assert not relay.interest._topics
    assert not len(relay.interest.watches)
    assert relay.accounts.balance() == 0


def link(data: bytes) -> None:
    """Route frames of a relay with the network key, beside an honest member and caller: the link ends, or everything
    works.
    """
    full, data = (data[0] % 7, data[1:]) if data else (0, b"")
    relay = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
    relay.now_us = NOW_US

    def take(neighbor: Any, frame: bytes) -> None:
        buf = memoryview(bytearray(frame))
        relay.frame_in(neighbor, buf, 0, len(buf))

    session = relay.session_up(_Port(full))
    take(session, encode_control(frames.Hello(1, PROTOCOL_MINOR)))
    signature = KEY.sign_proof(
        relay_id=bytes(16), session_id=session.session_id, challenge=session.challenge
    )
    take(session, encode_control(frames.Prove(0, KEY.public_key, signature)))
    serving = {int(kind): Serving(2, 1000) for kind in SERVED}
    ids = [KEY.key_id]
    take(session, encode_control(frames.Join(1, CLUSTER, ids, serving)))
    take(session, encode_control(frames.Subscribe(2, ">", ids)))
    take(session, encode_control(frames.Subscribe(2, "*", ids, "g")))
    take(session, encode_control(frames.Members(3, "far", ids, watch=True)))
    fuzzed = relay.link_up(
        _Port(full), link_frames.LinkHello(1, 0, b"\1" * 16, 1, NOW_US, 1 << 20, addresses=["a:1"])
    )
    far = link_frames.MemberEntry(1, "far", ids, {int(kind): 2 for kind in SERVED})
    wanted = link_frames.TopicEntry(CLUSTER, KEY.key_id, "", 1)
    take(fuzzed, encode_control(link_frames.Interest(0, 1, [far], [], [wanted], True)))
    for alias, kind in enumerate(DECLARED):
        sender = bytes([alias] * 16)
        mesh = {"hop_class": 1}
        take(
            fuzzed, encode_control(frames.Declare(alias, kind, CLUSTER, KEY.key_id, sender, **mesh))
        )
        name = CLUSTER if kind == Kind.PUBLISH else "far"
        take(session, encode_control(frames.Declare(alias, kind, name, KEY.key_id, sender)))
        if kind in SERVED:  # the other relay has a call of ours
            call = HOP.pack(48, kind, 0, alias, alias, 0) + bytes(8) + b"\1\0\0\0" * 2 + bytes(10)
            take(session, call)
    for frame in split(data):
        relay.now_us += 300_000
        try:
            take(fuzzed, frame)
        except PeerProtocolError:
            break
        finally:
            if relay.deadline_us <= relay.now_us:
                relay.expire()
            assert relay.accounts.balance() == 0, relay.accounts.report(0)
        relay.writable(fuzzed)
        if fuzzed.closed:
            break
    relay.link_down(fuzzed)
    relay.now_us += 10_000_000
    relay.expire()
    assert not relay.links
    assert not relay.mesh.copies
    assert not relay.interest._peers
    assert not any(handed.origin is session for handed in fuzzed.in_flight.values())
    assert relay.accounts.balance() == 0, relay.accounts.report(0)
    relay.session_down(session)
    assert not relay.neighbors
    assert not relay.interest._topics
    assert relay.accounts.balance() == 0


def assembly(data: bytes) -> None:
    """Assemble long frames of a link from pieces: complete frames come out, within the limit."""
    limit = 1 << 20
    parts = Assembly(limit)
    came = 0
    for frame in split(data):
        buf = memoryview(bytearray(frame))
        try:
            whole = parts.add(buf, 0, len(buf))
        except PeerProtocolError:
            return
        came += len(frame)
        assert parts.held_bytes <= came
        if whole is not None:
            assert int.from_bytes(whole[:4], "little") == len(whole) - 4
            assert len(whole) - 4 <= limit


class _Owner:
    """A client with all features, which only reads its deliveries."""

    number = 1

    def __init__(self) -> None:
        self.delivered: list[Any] = []

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        return KEY if key_id == KEY.key_id else None

    def binding(self, flow: InFlow) -> Any:
        return self if flow.member == 7 else None

    def sinks(self, flow: InFlow) -> list[Any]:
        return [self]

    def draining(self) -> None: ...
    def lost(self, lost: Loss) -> None: ...
    def other_keys(self, topic: str, key_id: bytes, others: dict[str, int]) -> None: ...
    def out_full(self) -> None: ...
    def gap(self, gap: Loss) -> None: ...

    def admit(self, kind: int, size: int) -> None:
        return None

    def dispatch(self, delivery: Any) -> None:
        self.delivered.append(delivery)

    def call(self, delivery: Any, method: str) -> None:
        self.delivered.append(delivery)

    def broadcast(self, messages: list[Any], size: int) -> None:
        self.delivered += messages

    deliver = broadcast

    def tunnel(self, end: TunnelEnd) -> None:
        self.delivered.append(end)

    # a survey's sink, and a waiter
    def roster(self, members: list[str]) -> None: ...
    def answer(self, message: Any) -> None:
        self.delivered.append(message)

    def fault(self, member: str, error: RemoteError) -> None:
        self.delivered.append(error)

    def done(self, *lost: Any) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        if not isinstance(result, frames.Ack | frames.Report | frames.Pong | frames.Welcome):
            self.delivered.append(result)

    def set_exception(self, exception: BaseException) -> None:
        assert isinstance(exception, IrisError)


def session(data: bytes) -> None:
    """Receive frames of a relay without keys: the client raises only IrisError, and delivers nothing."""
    owner: Any = _Owner()
    under_test = Session(
        owner, Guard(600_000_000), lambda size: bytes(size), label="", pid=0, message_limit=1 << 20
    )
    under_test.on_welcome = owner
    under_test.turn(NOW_US, NOW_US)

    def take(frame: bytes) -> None:
        buf = memoryview(bytearray(frame))
        under_test.frame(buf, 0, len(buf))
        under_test.flush()

    early, data = (data[0] & 1, data[1:]) if data else (0, b"")
    if not early:
        take(encode_control(frames.Welcome(1, 0, bytes(16), bytes(8), bytes(32), 1 << 20)))
        under_test.turn(NOW_US, NOW_US)
        for kind, survey in ((Kind.REQUEST, None), (Kind.SURVEY, owner)):
            under_test.requests.send(
                kind, CLUSTER, KEY, b"x", None, False,
                timeout_ms=1000, waiter=None if survey else owner, survey=survey,
            )  # fmt: skip
        under_test.requests.push(CLUSTER, KEY, b"x", None, False, 1000)
        under_test.tunnels.open(CLUSTER, KEY, None, 1000)
        under_test.ask(frames.Ping, owner)
        under_test.ask(frames.Status, owner)
        under_test.watch(CLUSTER, [KEY.key_id], lambda membership: None, stay=True)
        for alias, kind in enumerate(DECLARED):
            member = 7 if kind in SERVED else 0
            declared = frames.Declare(
                alias, kind, CLUSTER, KEY.key_id, bytes([alias] * 16), member=member
            )
            take(encode_control(declared))
    try:
        for frame in split(data):
            take(frame)
        under_test.expire(NOW_US + 10_000_000)
    except IrisError as err:
        under_test.end(str(err))
    assert not owner.delivered


def stream_call(data: bytes) -> None:
    """Decode a call to a store: if it is accepted, it is encoded and decoded to the same again."""
    try:
        call = streams.decode_call(data)
    except DecodeError:
        return
    assert streams.decode_call(streams.encode(call)) == call


def stream_answer(data: bytes) -> None:
    """Decode a store's answer, likewise."""
    try:
        answer = streams.decode_answer(data)
    except DecodeError:
        return
    assert streams.decode_answer(streams.encode(answer)) == answer


class _Store:
    """A store that refuses everything."""

    def __init__(self) -> None:
        self.taken = 0
        self.channels = Channels(StoreKey(bytes(range(32))), bytes)

    def cast_received(self, bundle: Any) -> None:
        self.taken += 1

    def push_received(self, bundle: Any) -> None:
        bundle.session.refuse(bundle, Refusal.LEAVING)

    def gap_received(self, gap: frames.Gap) -> None: ...
    def callers_left(self, hops: Any) -> None: ...
    def draining(self) -> None: ...
    def out_full(self) -> None: ...
    def unseal(self, incoming: Any, end: memoryview, body: memoryview) -> memoryview:
        return self.channels.unseal(incoming, end, body)

    def call_received(self, incoming: Any) -> None:
        assert incoming.channel is None, "a call that its caller did not authenticate"
        incoming.refuse("invalid", "not here")


def store(data: bytes) -> None:
    """Receive frames of a relay at a store: it raises only IrisError."""
    under_test = StoreSession(
        _Store(), lambda size: bytes(size), label="", pid=0, message_limit=1 << 20
    )
    under_test.turn(NOW_US, NOW_US)

    def take(frame: bytes) -> None:
        buf = memoryview(bytearray(frame))
        under_test.frame(buf, 0, len(buf))
        under_test.flush()

    early, data = (data[0] & 1, data[1:]) if data else (0, b"")
    if not early:
        take(encode_control(frames.Welcome(1, 0, bytes(16), bytes(8), bytes(32), 1 << 20)))
        kinds = (Kind.PUBLISH, Kind.BROADCAST, Kind.PUSH, Kind.STREAM)
        for alias, kind in enumerate(kinds):
            take(encode_control(frames.Declare(alias, kind, CLUSTER, KEY.key_id, bytes(16))))
    try:
        for frame in split(data):
            take(frame)
    except IrisError as err:
        under_test.end(str(err))


def channel(data: bytes) -> None:
    """Parse authenticated bodies from a sender without the channel's keys: none opens, and no channel is created."""
    ours, theirs = (
        Channel(1, bytes(16), KEY.key_id, *keys) for keys in ((bytes(64), b"s" * 64), (b"s" * 64, bytes(64)))
    )  # fmt: skip
    end = bytes(24)
    sealed = ours.seal(0, end, data) + data
    assert theirs.accept(end, memoryview(sealed)) == (0, data)
    with suppress(SealError):
        theirs.accept(end, memoryview(data))
        raise AssertionError("opened what nobody sealed")
    with suppress(SealError):
        theirs.accept(end, memoryview(sealed))
        raise AssertionError("accepted twice")
    table = Channels(StoreKey(bytes(range(32))), lambda size: b"e" * size)
    question: Any = SimpleNamespace(name="", key_id=KEY.key_id)
    call = data[:144].ljust(144, b"\0")
    parts = [call[at : at + 32] for at in range(0, 96, 32)]
    with suppress(ChannelRefused):
        table.open(question, streams.Open(parts[0], parts[1], KEY.public_key, parts[2], data[:64].ljust(64)), bytes(16), 0)  # fmt: skip
        raise AssertionError("opened for one who signed nothing")
    with suppress(ChannelRefused):
        table.unseal(question, memoryview(end), memoryview(b"\xc1" + data))
        raise AssertionError("a channel that is not open")
    assert not len(table)


class _OldHost:
    """A host for a client of the first Iris, which answers at once or never."""

    def __init__(self) -> None:
        self.machine: Machine

    def init_received(self, cluster: str) -> None:
        if cluster:
            check_cluster(cluster)
        self.machine.accept()
        for _ in range(3):
            self.machine.dispatch(_OldReceiver(), b"x", 1)
            self.machine.build_tunnel(_OldTunnel())

    def broadcast(self, cluster: str, message: bytes) -> None:
        check_cluster(cluster)

    def publish(self, topic: str, event: bytes) -> None:
        check_topic(topic)

    def request(self, id: int, cluster: str, payload: bytes, timeout_ms: int) -> None:
        if id % 2:
            self.machine.reply(id, payload, success=bool(id % 3))

    def subscribe(self, topic: bytes, name: str) -> None:
        check_topic(name)

    def unsubscribe(self, topic: bytes) -> None:
        return

    def tunnel(self, id: int, cluster: str, timeout_ms: int) -> None:
        if id % 4:
            self.machine.confirm_tunnel(id, _OldTunnel())

    def closing(self) -> None:
        self.machine.end()


class _OldReceiver:
    def answered(self, success: bool, payload: Any) -> None:
        return

    def failed(self, reason: str) -> None:
        return


class _OldTunnel:
    client_end: Any = None

    def opened(self, client_end: Any) -> None:
        return

    def message(self, data: bytes) -> None:
        if len(data) % 2:
            self.client_end.forwarded(len(data))

    def allowed(self) -> None:
        return

    def closed(self, reason: str | None) -> None:
        return


def iris1(data: bytes) -> None:
    """Receive frames of a client of the first Iris, in reads of the size in the first byte: they are valid, or one is
    a Violation.
    """
    step, data = (data[0] + 1, data[1:]) if data else (1, b"")
    host = _OldHost()
    said: list[bytes] = []
    machine = host.machine = Machine(
        host, said.append, Counter(), message_limit=1000, max_calls=8, call_bytes=4000, max_tunnels=8,
        tunnel_message_bytes=100_000, tunnel_bytes=150_000,
    )  # fmt: skip
    owed: Counter[int] = Counter()
    try:
        for start in range(0, len(data), step):
            machine.decoder.feed(data[start : start + step])
            while machine.state in (State.OPENING, State.OPEN):
                frame = machine.decoder.next_frame()
                if frame is None:
                    break
                machine.handle(frame)
                owed[0x05] += isinstance(frame, Request)
                owed[0x0A] += isinstance(frame, TunInit)
            assert machine.decoder.held_bytes < 4 * 65_536 + step
    except Violation:
        machine.end()
    assert 0 <= machine._incoming.held <= 150_000
    assert machine.tunnel_count <= 8
    assert len(machine._pending) <= 8
    machine.end()
    # There is one reply for every request and one confirmation for every tunnel, in all cases.
    for op, count in owed.items():
        assert sum(part[0] == op for part in said) == count


def ticket(data: bytes) -> None:
    """Read a ticket: any text, then any claims that an issuer signed."""
    known = {public_id(ISSUER.public_key): ISSUER.public_key}

    def read(text: str) -> None:
        with suppress(TicketError):
            found = read_ticket(
                text, find_key=known.get, networks=["00" * 16], now_s=NOW_US / 1e6, max_life_s=lambda issuer: 3600
            )  # fmt: skip
            assert found.issued_s < found.expires_s
            assert found.expires_s > NOW_US / 1e6

    read(data.decode("latin-1"))
    kid = public_id(ISSUER.public_key).hex()
    head = base64.urlsafe_b64encode(b'{"alg":"EdDSA","kid":"%s"}' % kid.encode()).rstrip(b"=")
    signed = head + b"." + base64.urlsafe_b64encode(data).rstrip(b"=")
    signature = base64.urlsafe_b64encode(ISSUER.signer.sign(signed)).rstrip(b"=")
    read((signed + b"." + signature).decode())


class _Socket(asyncio.Transport):
    """What a connection of a browser writes to: the first `room` bytes are written, the rest waits."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.waiting = 0
        self.ended = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 4711) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        self.waiting += max(0, sum(map(len, list_of_data)) - self.room)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    abort = close


UPGRADE: Final = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: iris.1\r\n\r\n"
)


def masked(data: bytes) -> bytes:
    """Return a frame of WebSocket for each frame of a session. The frame's flags choose fin and opcode."""
    made = []
    for frame in split(data):
        chosen = frame[5]
        opcode = (0x2, 0x2, 0x0, 0x1, 0x8, 0x9, 0xA, 0x3)[chosen & 7]
        size = bytes([0x80 | len(frame)]) if len(frame) < 126 else b"\xfe" + len(frame).to_bytes(2)
        fin = 0 if chosen & 8 else 0x80
        made.append(bytes([fin | opcode]) + size + bytes(4) + frame[:0xFFFF])
    return b"".join(made)


def web(data: bytes) -> None:
    """Read what a browser sends: raw, or after an upgrade as frames of WebSocket, with or without a HELLO."""
    how, data = (data[0], data[1:]) if data else (0, b"")
    hello = encode_control(frames.Hello(1, PROTOCOL_MINOR, mono_us=1))
    greeting = b"\x82" + bytes([0x80 | len(hello)]) + bytes(4) + hello
    stream = (data, UPGRADE + data, UPGRADE + masked(data), UPGRADE + greeting + masked(data))[
        how & 3
    ]

    async def read() -> None:
        relay = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
        hub = SessionHub(Driver(relay), dev(Path("/run/relay.sock")))
        refused: list[str] = []
        ended: list[Any] = []
        connection = WebConnection(
            hub, tuple, refused=lambda connection, reason: refused.append(reason),
            greeted=lambda connection: None, leaving=lambda connection: None, ended=ended.append,
        )  # fmt: skip
        link = _Socket(0 if how & 4 else 1 << 20)
        connection.connection_made(link)
        if how & 4:
            connection.pause_writing()
        step = 1 + how * 3
        for at in range(0, len(stream), step):
            if link.ended:
                break
            connection.data_received(stream[at : at + step])
            while hub.driver.turns:  # noqa: ASYNC110 - turns have no event
                await asyncio.sleep(0)
            assert link.waiting < 64 << 10
        await asyncio.sleep(0)
        assert len(refused) <= 1, refused
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert ended == [connection]
        assert not relay.sessions
        assert not hub.ports
        assert not hub.users.held
        assert relay.accounts.balance() == 0
        hub.driver.close()

    asyncio.run(read())


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "control": control,
    "reader": reader,
    "bundle": bundle,
    "keyring": keyring,
    "tunnel": tunnel,
    "router": router,
    "session": session,
    "link": link,
    "assembly": assembly,
    "stream_call": stream_call,
    "stream_answer": stream_answer,
    "store": store,
    "channel": channel,
    "iris1": iris1,
    "ticket": ticket,
    "web": web,
}
