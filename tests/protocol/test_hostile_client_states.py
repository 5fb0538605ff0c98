"""A relay that sends each frame in each state of a client's session: that session ends with a named error, or
nothing happens at all.

Each table that frames from a relay can make grow has a limit, and a defined outcome when it is full.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from protocol.kit import FRESHNESS_US, KEY, OTHER_KEY, START_US, Answers, Network, Result

from iris.core import guard as guard_module
from iris.core import inbound as inbound_module
from iris.core import session as session_module
from iris.core import tunnels as tunnels_module
from iris.core.aliases import MAX_ALIASES
from iris.core.conversation import State
from iris.core.guard import Guard, Shares
from iris.core.inbound import Inbound
from iris.core.session import Session
from iris.errors import IrisError, PeerProtocolError, RelayUnavailable, RequestTimeout
from iris.wire import frames, link_frames
from iris.wire.codec import END, HOP, RELAY_HOP, encode_control
from iris.wire.frames import Control, Serving
from iris.wire.kinds import (
    DECLARED_KINDS,
    FLAG_MORE,
    FLAG_REFUSED,
    TUNNEL_KINDS,
    UNKNOWN_COUNT,
    UNLIMITED,
    Cause,
    Kind,
    Refusal,
)
from iris.wire.link_frames import CONTROLS

SENDER = b"\x55" * 16
DATA = [kind for kind in Kind if kind >= 0x40]
DECLARED = [kind for kind in DATA if kind in DECLARED_KINDS]
STATES = ("connecting", "up", "busy", "holding", "ended")
WELCOME = frames.Welcome(1, 1, b"R" * 16, b"S" * 8, b"C" * 32, 1 << 20)
HOPS = (0, 1, 2, 3, 4, 5, 6, 7, RELAY_HOP | 1, RELAY_HOP | 2, (1 << 64) - 1)


def bodies() -> dict[type, list[Control]]:
    """Return some valid control frames of each type."""
    info = frames.MemberInfo("m", [64], [KEY.key_id], "r")
    declares = [
        frames.Declare(alias, kind, "db", key_id, SENDER, plain, groups, member)
        for alias, kind in enumerate(DECLARED)
        for key_id in (KEY.key_id, OTHER_KEY.key_id)
        for plain, groups, member in ((True, [], 1), (False, ["g"], 9))
    ]
    gaps = [
        frames.Gap(kind, "db", KEY.key_id, SENDER, first, count, "lost", plain, ["g"], 1)
        for kind in (*[Kind.PUBLISH] * 9, *[Kind.BROADCAST] * 9, Kind.REQUEST)
        for first in (0, (1 << 63) - 1)
        for count in (0, 7, UNKNOWN_COUNT)
        for plain in (True, False)
    ]
    made: dict[type, list[Any]] = {
        frames.Hello: [frames.Hello(1, 1)],
        frames.Welcome: [WELCOME, frames.Welcome(9, 0, b"R" * 16, b"S" * 8, b"C" * 32, 1 << 20)],
        frames.Error: [frames.Error("you are out")],
        frames.Bye: [frames.Bye(), frames.Bye("stopping")],
        frames.Drain: [frames.Drain(0), frames.Drain(5000)],
        frames.Ack: [frames.Ack(n, error, 3) for n in range(9) for error in ("", "no")],
        frames.Prove: [frames.Prove(1, bytes(32), bytes(64))],
        frames.Grant: [frames.Grant(1, b"", bytes(32), bytes(64), bytes(64))],
        frames.Declare: declares,
        frames.Join: [frames.Join(1, "db", [KEY.key_id], {64: Serving(1, 1)})],
        frames.Leave: [frames.Leave(1, 1)],
        frames.Subscribe: [frames.Subscribe(1, "t", [KEY.key_id])],
        frames.Unsubscribe: [frames.Unsubscribe(1, "t")],
        frames.Credit: [frames.Credit(1, Kind.PUSH, [1])],
        frames.Share: [frames.Share("t", KEY.key_id, 16), frames.Share("nobody", bytes(16), 1)],
        frames.Wait: [frames.Wait(n, n, n == 1) for n in range(9)],
        frames.Window: [
            frames.Window(n, serial, limit)
            for n in range(3)
            for serial in (0, 1, 2)
            for limit in (0, 1 << 17, UNLIMITED)
        ],
        frames.Unrouted: [
            frames.Unrouted(kind, "t", KEY.key_id, 7, "no")
            for kind in (*[Kind.PUBLISH] * 9, *[Kind.BROADCAST] * 9, Kind.REQUEST)
        ],
        frames.CallerLeft: [frames.CallerLeft([]), frames.CallerLeft(list(HOPS))],
        frames.Gap: gaps,
        frames.Fail: [frames.Fail(hop, cause, "stale") for hop in HOPS for cause in (*Cause, 250)],
        frames.Roster: [frames.Roster(hop, ["m"]) for hop in HOPS],
        frames.Done: [frames.Done(hop, ["m"]) for hop in HOPS],
        frames.Members: [frames.Members(1, "db", [KEY.key_id], True)],
        frames.Membership: [
            frames.Membership(n, [info], ["m"], {"ab": 1}, n % 2 == 0, {"x": 1}) for n in range(9)
        ],
        frames.Unwatch: [frames.Unwatch(1)],
        frames.Status: [frames.Status(1)],
        frames.Report: [frames.Report(n, "{}") for n in range(9)],
        frames.Ping: [frames.Ping(1)],
        frames.Ticket: [frames.Ticket(n, "a.b.c") for n in range(9)],
        frames.Release: [frames.Release(KEY.key_id), frames.Release(bytes(16))],
        frames.Pong: [frames.Pong(n) for n in range(9)],
        frames.Settle: [frames.Settle(1)],
        frames.Topic: [frames.Topic(1, "t", bytes(16))],
        frames.Audience: [frames.Audience(n, 1, 1, []) for n in range(9)],
        link_frames.LinkHello: [link_frames.LinkHello(1, 1, b"R" * 16, 0, 1, 1 << 20)],
        frames.Beat: [frames.Beat(1, 2, 3)],
        link_frames.Interest: [link_frames.Interest(0, 1)],
        link_frames.Resync: [link_frames.Resync(1)],
        link_frames.Loads: [link_frames.Loads([])],
        frames.Direct: [frames.Direct(hop) for hop in HOPS],
        frames.Pair: [frames.Pair(hop, bytes(16)) for hop in HOPS],
        frames.Fetch: [frames.Fetch(bytes(16))],
        frames.Carried: [frames.Carried(1, 2, 3, 4)],
        frames.Trouble: [
            frames.Trouble([frames.TroubleEntry("missing", 2, {"t": n})]) for n in (1, 2, 3)
        ],
        link_frames.AskPeers: [link_frames.AskPeers()],
        link_frames.Peers: [link_frames.Peers([])],
    }
    return made


BODIES = bodies()


def data(rng: random.Random, kind: int) -> bytes:
    """Return a random data frame: truncated, with unknown aliases and hop ids, or with flags."""
    end = (
        b""
        if kind in TUNNEL_KINDS
        else END.pack(START_US, 0, rng.choice((0, 1, 2)), rng.choice((0, 1)))
    )
    body = end + rng.randbytes(rng.choice((0, 0, 1, 16, 60, 300)))
    body = body if rng.random() < 0.97 else body[: rng.choice((0, 5))]
    alias = DECLARED.index(kind) if kind in DECLARED else 0
    alias = alias if rng.random() < 0.98 else rng.choice((15, 0xFFFFFFFF))
    flags = (
        0
        if rng.random() < 0.95
        else rng.choice((FLAG_MORE, FLAG_REFUSED | Refusal.FULL << 4, 0xFF))
    )
    return (
        HOP.pack(22 + len(body), kind, flags, alias, rng.choice(HOPS), rng.choice((0, 1, -1)))
        + body
    )


def any_frame(rng: random.Random) -> bytes:
    if rng.random() < 0.45:
        return data(rng, rng.choice(DATA))
    # Frames that end a session are rare, so that the others are received, too.
    common = (
        frames.Declare,
        frames.Gap,
        frames.Fail,
        frames.Ack,
        frames.Membership,
        frames.Roster,
        frames.Done,
    )
    kinds = list(common) if rng.random() < 0.98 else list(BODIES)
    return encode_control(rng.choice(BODIES[rng.choice(kinds)]))


class Relay:
    """A client's session whose relay is this test. Its own frames are discarded."""

    def __init__(self, net: Network, guard: Guard, state: str) -> None:
        self.host = host = net.host("victim", guard=guard)
        self.results: list[Result] = [Result() for _ in range(6)]
        if state != "connecting":
            host.serve("db", lambda delivery: delivery.reply(b"pong", None, False))
            host.subscribe("db")
        if state == "connecting":
            host.session = Session(
                host, guard, net.entropy, label="victim", pid=7, message_limit=1 << 20
            )
            host._to_session.on_frame = host.session.frame
            host.session.turn(START_US, 1_000_000)
        net.hosts.remove(host)
        session = self.session = host.session
        if state == "busy":
            for alias, kind in enumerate(DECLARED):
                self.receive(
                    encode_control(frames.Declare(alias, kind, "db", KEY.key_id, SENDER, member=1))
                )
            self.survey = Answers()
            self.results[0] = host.request("db", b"ping", idempotent=True)
            host.send("db", b"ping", survey=self.survey)
            host.push("db")
            self.tunnel = host.open_tunnel("db")
            session.store_calls.send(
                "stores", None, b"call", timeout_ms=1000, waiter=self.results[1]
            )
            session.store_calls.send("db", KEY, b"call", timeout_ms=1000, waiter=self.results[2])
            session.ask(lambda number: frames.Subscribe(number, "t", [KEY.key_id]), self.results[3])
            session.ask(frames.Status, self.results[4])
            session.ask(frames.Ping, self.results[5])
            session.watch("db", [KEY.key_id], lambda received: None, stay=True)
            session.flush()
        elif state == "holding":
            session.hold_casts()
        elif state == "ended":
            session.end("the relay said goodbye")

    def receive(self, frame: bytes) -> IrisError | None:
        return self._try(lambda: self.session.frame(memoryview(bytearray(frame)), 0, len(frame)))

    def releases(self) -> IrisError | None:
        return self._try(self.session.release_casts)

    def _try(self, step: Callable[[], None]) -> IrisError | None:
        try:
            step()
            self.session.flush()
        except IrisError as err:
            return err
        return None


def test_each_control_frame_is_tried() -> None:
    assert BODIES.keys() == set(CONTROLS)


@pytest.mark.parametrize("state", STATES)
def test_a_frame_in_whatever_state_ends_the_session_by_name_or_nothing(state: str) -> None:
    """An exception of another type than our protocol errors would be an "internal error", and fails the test."""
    rng = random.Random(state)
    frames_to_try = [encode_control(body) for several in BODIES.values() for body in several]
    frames_to_try += [data(rng, kind) for kind in DATA for _ in range(12)]
    net, guard = Network(), Guard(FRESHNESS_US)
    other = net.host("other", guard=guard)
    victim = Relay(net, guard, state)
    for index, frame in enumerate(frames_to_try):
        if index % 40 == 0 or victim.session.state.value != state_of(state):
            victim = Relay(net, guard, state)
        err = victim.receive(frame)
        assert err is None or isinstance(err, PeerProtocolError | RelayUnavailable), err
        if err is not None:
            assert str(err)
            victim.session.end(str(err))
            victim = Relay(net, guard, state)
    net.host("server").serve("web", lambda delivery: delivery.reply(b"pong", None, False))
    answer = other.request("web")
    net.run()
    assert answer.value == b"pong"


def state_of(state: str) -> str:
    return state if state in ("connecting", "ended") else "up"


@pytest.mark.parametrize("seed", range(40))
def test_any_frames_one_after_the_other_end_the_session_by_name_or_nothing(seed: int) -> None:
    rng = random.Random(seed)
    net, guard = Network(), Guard(FRESHNESS_US)
    victim = Relay(net, guard, "busy" if seed % 2 else "holding")
    for _ in range(300):
        err = victim.receive(any_frame(rng))
        assert err is None or isinstance(err, PeerProtocolError | RelayUnavailable), err
        if rng.random() < 0.02 and victim.session.state is State.UP:
            if seed % 4 == 0:
                err = victim.releases()
            victim.session.turn(START_US, victim.session.mono_us + 700_000)
            victim.session.expire(victim.session.mono_us)
        if err is not None:
            break
    victim.session.end("it is over")
    assert victim.session.state is State.ENDED
    if seed % 2:
        assert all(result.done() for result in victim.results)
        assert victim.survey.end is not None
        assert victim.tunnel.broken or victim.tunnel.error is not None
    assert not victim.session.tunnels.ends
    assert not victim.session.requests._pending


def test_the_end_of_a_survey_ends_no_request() -> None:
    """Otherwise the caller of the request would wait forever, beyond its timeout."""
    net = Network()
    alice = net.host("alice")
    net.host("bob").serve("db", lambda delivery: None)
    answer = alice.request("db", timeout_ms=1000)
    net.run()
    (hop,) = alice.session.requests._pending
    for body in (frames.Roster(hop, ["m"]), frames.Done(hop, ["m"])):
        alice.receive(encode_control(body))
    assert not answer.done()
    net.pass_time(2)
    with pytest.raises(RequestTimeout, match="no reply within 1 s"):
        _ = answer.value


def test_nothing_runs_after_the_relay_said_goodbye() -> None:
    """The client counts all answers as lost then, so it would run calls whose answers cannot arrive."""
    net = Network()
    member, caller = net.host("member"), net.host("caller")
    ran: list[bytes] = []
    member.serve("db", lambda delivery: ran.append(delivery.message.payload))
    inbox = member.subscribe("db")
    caller.publish("db", b"first")
    caller.request("db", b"one")
    net.run()
    assert (ran, inbox.payloads) == ([b"one"], [b"first"])
    caller.request("db", b"two")
    caller.publish("db", b"second")
    caller.speak()
    sent = list(member.port.out)
    member.port.out.clear()
    assert len(sent) == 2
    member.receive(encode_control(frames.Bye("stopping")))
    for frame in sent:
        member.receive(frame)
    assert (ran, inbox.payloads) == ([b"one"], [b"first"])
    assert member.session.dropped["after BYE"] == 2


# -- tables ---------------------------------------------------------------------------------------------------------


def sender(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_senders_beyond_the_table_are_refused_and_counted() -> None:
    """`_senders`: 65,536 (`MAX_SENDERS`), refused as full; `_full_until_us`: one entry for each table."""
    guard = Guard(FRESHNESS_US, max_senders=8, max_sequences=8)
    taken = [guard.sender(KEY.key_id, sender(n), START_US) is not None for n in range(20)]
    assert (taken.count(True), guard.refused_senders) == (8, 12)
    # Each key has its own half, and no fresh entry is removed.
    guard.keys = 2
    assert guard.sender(OTHER_KEY.key_id, sender(1), START_US) is not None
    assert len(guard._senders) == 9
    later_us = START_US + 3 * FRESHNESS_US
    assert guard.sender(KEY.key_id, sender(99), later_us) is not None
    assert len(guard._senders) == 1
    assert len(guard._full_until_us) == 1
    assert sum(guard._sender_shares._used.values()) == 1


def test_sequences_beyond_the_table_are_refused_and_counted() -> None:
    """`_sequences`: 262,144 (`MAX_SEQUENCES`), reported as lost; `_reported`: 4,096, then the oldest is removed."""
    guard = Guard(FRESHNESS_US, max_senders=8, max_sequences=8)
    flow_keys = [(int(Kind.PUBLISH), 0, "t", KEY.key_id, sender(n)) for n in range(6000)]
    taken = [guard.sequence(key, START_US) is not None for key in flow_keys[:20]]
    assert (taken.count(True), guard.refused_senders) == (8, 12)
    for key in flow_keys[20:]:
        guard.reported(key)
    assert len(guard._reported) == guard_module.MAX_REPORTED == 4096
    assert flow_keys[20] not in guard._reported
    assert flow_keys[-1] in guard._reported
    assert guard.reported(flow_keys[0]) is guard._sequences[flow_keys[0]]


@pytest.mark.parametrize(("table", "most"), [("senders", 65_536), ("sequences", 262_144)])
def test_the_tables_of_a_process_have_the_size_that_the_text_says(table: str, most: int) -> None:
    guard = Guard(FRESHNESS_US)
    assert getattr(guard, f"_{table[:-1]}_shares")._limit == most


def test_aliases_and_what_is_kept_for_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_flows`, `_strange`, `replies`, `_group_bytes`: one for each of 65,536 aliases; `_openers`: 16,384, created
    again when they are declared again.
    """
    assert (MAX_ALIASES, inbound_module.MAX_OPENERS) == (65_536, 16_384)
    monkeypatch.setattr(inbound_module, "MAX_OPENERS", 50)
    keys = {KEY.key_id: KEY}
    inbound = Inbound(keys.get)
    kinds = [Kind.PUBLISH, Kind.STREAM_REPLY, Kind.REQUEST]
    for turn in range(3):
        for alias in range(200):
            kind = kinds[(alias + turn) % 3]
            key_id = OTHER_KEY.key_id if (alias + turn) % 5 == 0 else KEY.key_id
            number = turn * 200 + alias
            inbound.declare(
                frames.Declare(alias, kind, "db", key_id, sender(number), True, [f"g{number}"])
            )
            assert len(inbound._openers) <= 50
    assert len(inbound._flows) <= MAX_ALIASES
    in_use = sum(flow is not None for flow in inbound._flows)
    assert in_use + len(inbound._unknown) + len(inbound.replies) == 200
    assert len(inbound._group_bytes) == 200
    assert inbound._all_group_bytes == sum(inbound._group_bytes.values())
    inbound.declare(frames.Declare(MAX_ALIASES - 1, Kind.PUBLISH, "db", KEY.key_id, SENDER))
    assert len(inbound._flows) == MAX_ALIASES


def test_an_alias_beyond_65_535_ends_the_session() -> None:
    net = Network()
    victim = Relay(net, Guard(FRESHNESS_US), "up")
    body = frames.Declare(MAX_ALIASES, Kind.PUBLISH, "db", KEY.key_id, SENDER)
    err = victim.receive(encode_control(body))
    assert isinstance(err, PeerProtocolError)
    assert "a DECLARE frame cannot be decoded" in str(err)


def test_casts_that_are_held_back_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_held`: 16 MiB, then they are delivered."""
    monkeypatch.setattr(session_module, "MAX_HELD_BYTES", 1000)
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    inbox = alice.subscribe("t")
    alice.session.hold_casts()
    for number in range(30):
        bob.publish("t", b"%d" % number)
        net.run()
        assert alice.session._held_bytes <= 1000 + 200
    assert inbox.payloads == [b"%d" % number for number in range(30)]
    assert not alice.session._held


def test_half_open_tunnels_are_bounded_for_each_key() -> None:
    """`_half_open`: 1,024 of one session, half of them shared out among the keys."""
    assert tunnels_module.MAX_HALF_OPEN == 1024
    shares = Shares(8)
    taken = 0
    while shares.has_room(KEY.key_id, 2):
        shares.take(KEY.key_id)
        taken += 1
    assert taken == 6
    assert shares.has_room(OTHER_KEY.key_id, 2)


def test_what_is_dropped_is_counted_under_a_few_words() -> None:
    """`dropped`: none of its keys comes from a peer."""
    rng = random.Random(1)
    net, guard = Network(), Guard(FRESHNESS_US)
    words: set[str] = set()
    for _ in range(60):
        victim = Relay(net, guard, "busy")
        for _ in range(50):
            if victim.receive(any_frame(rng)) is not None:
                break
        words |= victim.session.dropped.keys()
    assert len(words) > 3
    assert words <= {
        "after BYE", "late answers", "late tunnel frames", "lost", "late or repeated", "stale", "replayed", "too old", "unauthenticated",
        "unreadable", "unwanted", session_module.NOT_OURS, *(f"refused: {reason.name.lower()}" for reason in Refusal),
    }  # fmt: skip
