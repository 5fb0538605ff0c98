"""A hostile relay misuses honest frames: every misuse is noticed."""

from __future__ import annotations

import pytest
from protocol.kit import FRESHNESS_US, KEY, OTHER_KEY, Host, Network, Result, control_of, kind_of

from iris.core.bundle import encode_bundle
from iris.core.guard import Guard
from iris.core.interfaces import Delivery
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import WINDOW_COUNTERS
from iris.errors import (
    ConnectionLost,
    Overloaded,
    RelayError,
    RemoteError,
    RequestTimeout,
)
from iris.wire import frames
from iris.wire.codec import (
    ALIAS_AT,
    BODY_AT,
    END_AT,
    FLAGS_AT,
    HOP,
    RELAY_HOP,
    REWRITE,
    encode_control,
)
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal


def echo(delivery: Delivery) -> None:
    delivery.reply(delivery.message.payload, None, False)


class Recorder:
    """A relay that copies frames of some kinds, and is honest otherwise."""

    def __init__(self, net: Network, *kinds: Kind) -> None:
        self.frames: list[bytes] = []
        self.kinds = kinds
        net.tamper = self.see

    def see(self, host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) in self.kinds:
            self.frames.append(frame)
        return [frame]


def with_hop(frame: bytes, hop: int) -> bytes:
    """Return the frame with the hop id that the relay would give it if it delivered the frame again."""
    changed = bytearray(frame)
    REWRITE.pack_into(changed, ALIAS_AT, HOP.unpack_from(frame)[3], hop)
    return bytes(changed)


# -- replay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PUSH])
def test_a_replayed_message_runs_once(net: Network, kind: Kind) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", lambda d: echo(d) if kind == Kind.REQUEST else d.finish())
    seen = Recorder(net, kind)
    if kind == Kind.REQUEST:
        caller.request("db", b"x")
    else:
        caller.push("db", b"x")
    net.run()
    for n in range(3):
        member.receive(with_hop(seen.frames[0], RELAY_HOP | 5000 + n))
    assert len(service.deliveries) == 1
    assert member.session.dropped == {"replayed": 3, "refused: replayed": 3}
    member.session.out.chunks.clear()


def test_a_replay_after_a_reconnect_is_refused_too(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    seen = Recorder(net, Kind.REQUEST, Kind.DECLARE)
    caller.request("db", b"x")
    net.run()
    member.lose()
    again = net.host(guard=member.guard)
    service = again.serve("db", echo)
    declared, request = seen.frames[0], next(f for f in seen.frames if kind_of(f) == Kind.REQUEST)
    body = control_of(declared)
    again.receive(encode_control(frames.Declare(0, body.kind, body.name, body.key_id, body.sender_id, member=service.member)))  # fmt: skip
    changed = bytearray(request)
    REWRITE.pack_into(changed, ALIAS_AT, 0, RELAY_HOP | 1)
    again.receive(bytes(changed))
    assert service.deliveries == []
    assert again.session.dropped["replayed"] == 1
    again.session.out.chunks.clear()


def test_a_message_refused_before_it_ran_may_come_again(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    service.refusal = Refusal.FULL
    seen = Recorder(net, Kind.REQUEST)
    caller.request("db", b"x")
    net.run()
    service.refusal = None
    member.receive(with_hop(seen.frames[0], RELAY_HOP | 9))
    assert [d.message.payload for d in service.deliveries] == [b"x"]
    member.session.out.chunks.clear()


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_counter_below_the_window_is_stale_and_only_an_idempotent_request_is_sealed_again(
    net: Network, idempotent: bool
) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    held: list[bytes] = []

    def hold(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.REQUEST and not held:
            held.append(frame)
            return []
        return [frame]

    net.tamper = hold
    answer = caller.request("db", b"late", idempotent=idempotent)
    net.run()
    caller.session.out._sealers[KEY.key_id, ""][0]._counter += WINDOW_COUNTERS
    caller.request("db", b"early")
    net.run()
    net.tamper = lambda host, frame: [frame]
    member.receive(held[0])
    net.run()
    runs = [b"early", b"late"] if idempotent else [b"early"]
    assert [d.message.payload for d in service.deliveries] == runs
    assert member.session.dropped["stale"] == 1
    if idempotent:
        assert answer.value == b"late"
    else:
        assert isinstance(answer.error, RelayError)
        assert answer.error.may_have_run


def test_publications_and_broadcasts_late_or_repeated_are_dropped(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox, service = receiver.subscribe("a"), receiver.serve("a")
    seen = Recorder(net, Kind.PUBLISH, Kind.BROADCAST)
    for n in range(3):
        sender.publish("a", b"p%d" % n)
        sender.publish("a", b"b%d" % n, kind=Kind.BROADCAST)
    net.run()
    assert len(seen.frames) == 6
    for frame in seen.frames:
        receiver.receive(frame)
    assert inbox.payloads == [b"p0", b"p1", b"p2"]
    assert [m.payload for m in service.casts] == [b"b0", b"b1", b"b2"]
    assert receiver.session.dropped == {"late or repeated": 6}
    assert not inbox.gaps


def test_what_a_relay_leaves_out_is_reported_when_the_next_arrives(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.publish("a", b"0")
    net.run()
    net.tamper = lambda host, frame: [] if kind_of(frame) == Kind.PUBLISH else [frame]
    sender.publish("a", b"1", b"2", b"3")
    net.run()
    net.tamper = lambda host, frame: [frame]
    sender.publish("a", b"4")
    net.run()
    assert inbox.payloads == [b"0", b"4"]
    assert [(gap.count, gap.cause) for gap in inbox.gaps] == [(3, "missing on the way")]


def test_bundles_in_another_order_are_a_gap_and_never_out_of_order(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.publish("a", b"0")
    net.run()
    held: list[bytes] = []

    def swap(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.PUBLISH:
            return [frame]
        if not held:
            held.append(frame)
            return []
        return [frame, held[0]]

    net.tamper = swap
    sender.publish("a", b"1")
    sender.publish("a", b"2")
    net.run()
    assert inbox.payloads == [b"0", b"2"]
    assert [gap.count for gap in inbox.gaps] == [1]


# -- shares of the tables ----------------------------------------------------------------------------------------


def sharing(net: Network, **bounds: int) -> Host:
    """Return a process that serves under both keys, with small tables."""
    guard = Guard(FRESHNESS_US, **bounds)
    guard.keys = 2
    return net.host("both", keys=(KEY, OTHER_KEY), guard=guard)


@pytest.mark.parametrize("flooding", [KEY, OTHER_KEY])
def test_a_holder_of_one_key_does_not_fill_the_replay_windows_of_another(
    net: Network, flooding: ClusterKey
) -> None:
    other = OTHER_KEY if flooding is KEY else KEY
    member = sharing(net, max_senders=16)
    member.serve("theirs", echo, keys=(flooding,))
    mine = member.serve("mine", echo, keys=(other,))
    answers = [net.host(keys=(flooding,)).request("theirs") for _ in range(40)]
    net.run()
    refused = [answer for answer in answers if answer.error is not None]
    assert len(answers) - len(refused) == 12  # its share of 4, and the 8 that any key may use
    assert all(isinstance(answer.error, Overloaded) for answer in refused)
    assert member.guard.refused_senders == 28
    honest = [net.host(keys=(other,)).request("mine", b"x") for _ in range(4)]
    net.run()
    assert [answer.value for answer in honest] == [b"x"] * 4
    assert len(mine.deliveries) == 4


@pytest.mark.parametrize("kind", [Kind.PUBLISH, Kind.BROADCAST])
def test_a_holder_of_one_key_does_not_fill_the_sequences_of_another(
    net: Network, kind: Kind
) -> None:
    receiver = sharing(net, max_sequences=16)
    mine, theirs = receiver.serve("mine"), receiver.serve("theirs", keys=(OTHER_KEY,))
    inbox = receiver.subscribe("mine")
    receiver.subscribe("theirs", key=OTHER_KEY)
    for _ in range(40):
        net.host(keys=(OTHER_KEY,)).publish("theirs", b"flood", kind=kind)
    net.run()
    cause = "too many senders to keep apart"
    assert [lost.cause for lost in receiver.losses] == [cause] * 28
    assert len(theirs.casts) == (12 if kind == Kind.BROADCAST else 0)
    for n in range(4):
        net.host().publish("mine", b"%d" % n, kind=kind)
    net.run()
    got = [m.payload for m in mine.casts] if kind == Kind.BROADCAST else inbox.payloads
    assert got == [b"0", b"1", b"2", b"3"]
    assert len(receiver.losses) == 28


def test_entries_of_one_key_are_free_for_others_when_they_are_too_old(net: Network) -> None:
    member = sharing(net, max_senders=4)
    member.serve("theirs", echo, keys=(OTHER_KEY,))
    for _ in range(3):
        net.host(keys=(OTHER_KEY,)).request("theirs")
    net.run()
    fourth = net.host(keys=(OTHER_KEY,)).request("theirs")
    net.run()
    assert isinstance(fourth.error, Overloaded)
    net.pass_time(2 * FRESHNESS_US / 1e6 + 2)
    fifth = net.host(keys=(OTHER_KEY,)).request("theirs", b"x")
    net.run()
    assert fifth.value == b"x"
    mine = [member.guard.sender(KEY.key_id, bytes(15) + bytes((n,)), net.now_us) for n in range(4)]
    assert [entry is not None for entry in mine] == [True, True, True, False]
    assert member.guard.refused_senders == 2


# -- freshness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [-601, 601])
def test_a_request_from_a_clock_too_far_off_is_refused_by_an_error_that_says_how_far(
    net: Network, ahead_s: int
) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    caller.clock_us = ahead_s * 1_000_000
    answer = caller.request("db")
    net.run()
    assert service.deliveries == []
    assert isinstance(answer.error, RemoteError)
    assert not answer.error.may_have_run
    assert f"{-ahead_s:+.1f} s from the member's clock" in str(answer.error)
    assert member.session.dropped == {"too old": 1}


def test_a_clock_just_within_the_limit_is_accepted(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", echo)
    caller.clock_us = FRESHNESS_US - 1
    answer = caller.request("db", b"x")
    net.run()
    assert answer.value == b"x"


def test_publications_from_a_clock_too_far_off_are_reported_as_lost_with_the_difference(
    net: Network,
) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.clock_us = -700 * 1_000_000
    sender.session.turn(net.now_us + sender.clock_us, net.mono_us)
    sender.publish("a", b"x", b"y")
    net.run()
    assert inbox.payloads == []
    assert [(gap.count, gap.cause) for gap in inbox.gaps] == [(2, "sent +700 s from our clock")]


def test_a_push_from_a_clock_too_far_off_is_reported_to_its_sender(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", lambda delivery: delivery.finish())
    caller.clock_us = 700 * 1_000_000
    caller.push("db")
    net.run()
    assert service.deliveries == []
    assert [loss.count for loss in caller.losses] == [1]


# -- forgery -----------------------------------------------------------------------------------------------------


def test_a_reply_swapped_with_another_is_refused(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    answers = [caller.request("db", b"%d" % n) for n in range(2)]
    net.run()
    held: list[bytes] = []

    def swap(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.REPLY:
            return [frame]
        held.append(frame)
        if len(held) < 2:
            return []
        first, second = (bytearray(f) for f in held)
        first[END_AT:], second[END_AT:] = held[1][END_AT:], held[0][END_AT:]
        return [bytes(first), bytes(second)]

    net.tamper = swap
    for delivery in service.deliveries:
        delivery.reply(b"reply to " + delivery.message.payload, None, False)
        net.run()
    for answer in answers:
        assert isinstance(answer.error, ConnectionLost)
        assert answer.error.may_have_run
        assert "cannot be read" in str(answer.error)
    assert caller.session.dropped == {"unreadable": 2}


def test_a_reply_that_a_relay_repeats_is_late(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", echo)
    seen = Recorder(net, Kind.REPLY)
    answer = caller.request("db", b"x")
    net.run()
    caller.receive(seen.frames[0])
    assert answer.value == b"x"
    assert caller.session.dropped == {"late answers": 1}


def test_an_error_turned_into_a_reply_is_refused(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", lambda d: d.fault("no", may_have_run=True))
    fault_alias: list[frames.Declare] = []

    def disguise(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.DECLARE and (body := control_of(frame)).kind == Kind.FAULT:
            fault_alias.append(body)
            return [encode_control(frames.Declare(body.alias, Kind.REPLY, body.name, body.key_id, body.sender_id))]  # fmt: skip
        if kind_of(frame) == Kind.FAULT:
            changed = bytearray(frame)
            changed[4] = Kind.REPLY
            return [bytes(changed)]
        return [frame]

    net.tamper = disguise
    answer = caller.request("db")
    net.run()
    assert fault_alias
    assert isinstance(answer.error, ConnectionLost)


@pytest.mark.parametrize("kind", [Kind.PUBLISH, Kind.REQUEST])
def test_a_message_spliced_to_another_address_does_not_open(net: Network, kind: Kind) -> None:
    sender, receiver = net.host(), net.host()
    inbox, service = receiver.subscribe(">"), receiver.serve("admin", echo)
    receiver.serve("guest", echo)
    answers: list[Result] = []

    def splice(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.DECLARE and host is receiver:
            body = control_of(frame)
            name = {"guest": "admin", "guest.topic": "admin.topic"}.get(body.name, body.name)
            member = service.member if body.name == "guest" else 0
            return [
                encode_control(
                    frames.Declare(
                        body.alias, body.kind, name, body.key_id, body.sender_id, member=member
                    )
                )
            ]
        return [frame]

    net.tamper = splice
    if kind == Kind.PUBLISH:
        sender.publish("guest.topic", b"x")
    else:
        answers.append(sender.request("guest", b"x"))
    net.run()
    assert inbox.payloads == []
    assert service.deliveries == []
    if kind == Kind.PUBLISH:
        assert [gap.count for gap in inbox.gaps] == [1]
    else:
        assert isinstance(answers[0].error, RelayError)
        assert not answers[0].error.may_have_run


@pytest.mark.parametrize(
    "at", [END_AT, END_AT + 8, END_AT + 12, END_AT + 16, BODY_AT, BODY_AT + 12, -1]
)
def test_a_changed_byte_of_what_is_authenticated_is_noticed(net: Network, at: int) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")

    def damage(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.PUBLISH:
            return [frame]
        changed = bytearray(frame)
        changed[at] ^= 1
        return [bytes(changed)]

    net.tamper = damage
    sender.publish("a", b"x")
    net.run()
    assert inbox.payloads == []
    assert len(inbox.gaps) == 1


def test_a_bundle_that_does_not_hold_as_many_messages_as_it_says_is_lost_as_a_whole(
    net: Network,
) -> None:
    """The count is also sealed. Only a member can falsify it, and then only the relays' accounts are wrong."""
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    out = sender.session.out
    for first, count in ((0, 1), (1, 3)):
        body = encode_bundle([b"x", b"y"], None, False)
        out._seal(out.flow(Kind.PUBLISH, "a", KEY), body, 0, 0, 0, count, first, b"")
    net.run()
    assert inbox.payloads == []
    assert [(gap.count, gap.cause) for gap in inbox.gaps] == [
        (1, "a bundle holds 2 messages, but its frame says 1"),
        (3, "a bundle holds 2 messages, but its frame says 3"),
    ]


def test_a_request_that_a_relay_hands_over_after_its_deadline_does_not_run(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)

    def hold(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.REQUEST:
            member.session.mono_us += 1_000_001
        return [frame]

    net.tamper = hold
    answer = caller.request("db", b"x", timeout_ms=1000)
    net.run()
    assert service.deliveries == []
    assert isinstance(answer.error, RequestTimeout)
    assert not answer.error.may_have_run


def test_hop_fields_are_the_relays_and_change_nothing_that_is_sealed(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")

    def rewrite(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.PUBLISH:
            return [frame]
        return [with_hop(frame, 12345)]

    net.tamper = rewrite
    sender.publish("a", b"x")
    net.run()
    assert inbox.payloads == [b"x"]


def test_a_refused_message_sent_to_a_caller_ends_the_session_as_the_relays_error(
    net: Network,
) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", echo)

    def flag(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.REQUEST:
            return [frame]
        changed = bytearray(frame)
        changed[FLAGS_AT] = FLAG_REFUSED
        return [bytes(changed)]

    net.tamper = flag
    answer = caller.request("db")
    net.run()
    assert "refused" in member.ended_because
    assert isinstance(answer.error, ConnectionLost)
