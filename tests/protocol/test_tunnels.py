"""Tunnels between two sessions, without an event loop: the handshake, credit, and all ways to end."""

from __future__ import annotations

import msgspec
import pytest
from protocol.kit import FRESHNESS_US, KEY, OTHER_KEY, Host, Network, control_of, kind_of

from iris.core.guard import Guard
from iris.core.tunnel import CHUNK_COST, FIRST_WINDOW, MAX_GROWN, MAX_WINDOW, TunnelEnd
from iris.core.tunnels import HALF_OPEN_US, MAX_HALF_OPEN
from iris.errors import Closed, NoMembers, Overloaded, TunnelBroken
from iris.wire import frames
from iris.wire.codec import ALIAS_AT, HOP, RELAY_HOP, REWRITE, encode_control, tunnel_frame
from iris.wire.kinds import Cause, Kind, Refusal


def opened(
    net: Network, headers: dict[str, str] | None = None
) -> tuple[Host, Host, TunnelEnd, TunnelEnd]:
    """Return (opener's host, member's host, opener's end, member's end)."""
    opener, member = net.host("opener"), net.host("member")
    service = member.serve("db")
    left = opener.open_tunnel("db", headers)
    net.run()
    assert left.open
    assert len(service.tunnels) == 1
    return opener, member, left, service.tunnels[0]


def drain(end: TunnelEnd) -> list[bytes]:
    """Return the complete messages received so far."""
    messages, parts = [], b""
    while (chunk := end.next_chunk()) is not None:
        flags, data = chunk
        if flags == 4:
            parts = b""
            continue
        parts += data
        if flags & 2:
            messages.append(parts)
            parts = b""
    return messages


def test_an_opening_that_a_relay_hands_to_another_cluster_opens_nothing(net: Network) -> None:
    opener, member = net.host(), net.host()
    meant, other = member.serve("guest"), member.serve("admin")

    def splice(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) != Kind.DECLARE or (body := control_of(frame)).name != "guest":
            return [frame]
        elsewhere = msgspec.structs.replace(body, name="admin", member=other.member)
        return [encode_control(elsewhere)]

    net.tamper = splice
    left = opener.open_tunnel("guest", {"as": "guest"})
    net.run()
    assert left.broken
    assert meant.tunnels == other.tunnels == []
    assert member.session.dropped["unreadable"] == 1


def close(net: Network, *ends: TunnelEnd) -> None:
    for end in ends:
        end.close()
    net.run()


def test_headers_reach_the_handler_and_messages_pass_both_ways(net: Network) -> None:
    opener, member, left, right = opened(net, {"a": "b"})
    assert right.headers == {"a": "b"}
    left.write(memoryview(b"question"), 0)
    right.write(memoryview(b"answer"), 0)
    opener.session.tunnels.dirty.append(left)
    member.session.tunnels.dirty.append(right)
    net.run()
    assert drain(right) == [b"question"]
    assert drain(left) == [b"answer"]
    close(net, left)


@pytest.mark.parametrize("size", [0, 1, 65_471, 65_472])
def test_a_message_within_the_first_window_is_whole(net: Network, size: int) -> None:
    _opener, _member, left, right = opened(net)
    data = memoryview(bytes(range(256)) * 257)[:size]
    sent, _ = left.write(data, 0)
    net.run()
    assert sent == size
    assert drain(right) == [bytes(data)]
    close(net, left)


@pytest.mark.parametrize("size", [65_473, 65_513, 65_514, 65_515, 65_519, 65_520])
def test_a_message_around_the_size_of_a_record_is_whole(net: Network, size: int) -> None:
    _opener, _member, left, right = opened(net)
    data = memoryview(bytes(range(256)) * 257)[:size]
    sent, received = 0, b""
    for _ in range(4):
        sent, _ = left.write(data, sent)
        net.run()
        while (chunk := right.next_chunk()) is not None:
            received += chunk[1]
        net.run()
    assert sent == size
    assert received == data
    close(net, left)


def test_a_sender_stops_when_its_credit_is_spent_and_goes_on_with_more(net: Network) -> None:
    _, _, left, right = opened(net)
    data = memoryview(bytes(10 * FIRST_WINDOW))
    sent, _ = left.write(data, 0)
    assert sent == FIRST_WINDOW - CHUNK_COST
    net.run()
    assert right.buffered == FIRST_WINDOW
    assert left.credit == 0
    assert left.write(data, sent) == (sent, False), "not a byte before the reader consumed some"
    received = 0
    for _ in range(100):
        while (chunk := right.next_chunk()) is not None:
            received += len(chunk[1])
        net.run()
        sent, _ = left.write(data, sent)
        net.run()
        assert right.buffered <= MAX_WINDOW
    assert sent == len(data)
    while (chunk := right.next_chunk()) is not None:
        received += len(chunk[1])
    assert received == len(data)
    close(net, left)


@pytest.mark.parametrize("way", ["close", "peer closes", "both finish", "broken", "session lost"])
def test_what_a_window_grew_by_is_there_for_others_when_the_tunnel_has_ended(
    net: Network, way: str
) -> None:
    _, member, left, right = opened(net)
    growth = member.session.tunnels._growth
    data = memoryview(bytes(1 << 20))
    drain(right)
    stop, _ = left.write(data, 0)
    net.run()
    drain(right)
    assert growth.left < MAX_GROWN
    if way == "close":
        right.close()
    elif way == "peer closes":
        left.close()
    elif way == "both finish":
        left.write(data, stop)
        left.abort()
        left.finish()
        right.finish()
    elif way == "broken":
        right.fail("a handler failed", notify=True)
    else:
        member.lose()
    net.run()
    assert growth.left == MAX_GROWN
    assert not left.broken or way in ("broken", "session lost")


def test_more_than_was_granted_breaks_the_tunnel(net: Network) -> None:
    _, _, left, right = opened(net)
    left.credit += 1
    left.write(memoryview(bytes(FIRST_WINDOW + 1)), 0)
    net.run()
    assert "more tunnel bytes than the window" in right.broken
    assert left.broken


def test_an_aborted_message_is_discarded_and_the_next_one_is_whole(net: Network) -> None:
    _, _, left, right = opened(net)
    left.write(memoryview(bytes(2 * FIRST_WINDOW)), 0)
    net.run()
    left.abort()
    net.run()
    assert drain(right) == []
    net.run()
    left.write(memoryview(b"next"), 0)
    net.run()
    assert drain(right) == [b"next"]
    close(net, left)


def test_finish_is_one_way_and_both_finishes_end_it_well(net: Network) -> None:
    opener, member, left, right = opened(net)
    left.write(memoryview(b"last"), 0)
    left.finish()
    net.run()
    assert right.peer_finished
    assert drain(right) == [b"last"]
    with pytest.raises(Closed):
        left.check_sending()
    right.write(memoryview(b"still"), 0)
    right.finish()
    net.run()
    assert drain(left) == [b"still"]
    assert left.ended
    assert right.ended
    assert not left.broken
    assert not right.broken
    assert not opener.session.tunnels.ends, "both sides have forgotten it"
    assert not member.session.tunnels.ends


@pytest.mark.parametrize("side", ["opener", "member"])
def test_close_by_either_side_delivers_what_came_before_and_leaves_nothing_behind(
    net: Network, side: str
) -> None:
    opener, member, left, right = opened(net)
    closing, other = (left, right) if side == "opener" else (right, left)
    closing.write(memoryview(b"last"), 0)
    closing.close()
    closing.close()
    net.run()
    assert drain(other) == [b"last"]
    assert other.peer_closed
    assert not other.broken
    with pytest.raises(Closed, match="the peer closed it"):
        other.check_sending()
    assert not opener.session.tunnels.ends
    assert not member.session.tunnels.ends


@pytest.mark.parametrize("lost", ["opener", "member"])
def test_a_lost_session_breaks_the_tunnel_on_the_other_side(net: Network, lost: str) -> None:
    opener, member, left, right = opened(net)
    (opener if lost == "opener" else member).lose()
    net.run()
    for end in (left, right):
        assert end.broken
        with pytest.raises(TunnelBroken):
            end.check_sending()


def test_a_record_left_out_or_changed_breaks_the_tunnel_on_both_sides(net: Network) -> None:
    _, _, left, right = opened(net)
    net.tamper = lambda host, frame: [] if kind_of(frame) == Kind.TUNNEL_DATA else [frame]
    left.write(memoryview(b"lost"), 0)
    net.run()
    net.tamper = lambda host, frame: [frame]
    left.write(memoryview(b"next"), 0)
    net.run()
    assert drain(right) == []
    assert right.broken
    assert left.broken


def test_a_repeated_record_breaks_the_tunnel(net: Network) -> None:
    _, _, left, right = opened(net)
    net.tamper = lambda host, frame: [frame] * (2 if kind_of(frame) == Kind.TUNNEL_DATA else 1)
    left.write(memoryview(b"once"), 0)
    net.run()
    assert right.broken
    assert left.broken


def test_an_end_that_the_relay_makes_up_is_not_taken_for_a_close(net: Network) -> None:
    opener, member, left, right = opened(net)
    left.write(memoryview(b"x"), 0)
    net.run()
    member.receive(tunnel_frame(Kind.TUNNEL_END, right.hop, bytes((Cause.CLOSED,))))
    assert right.broken
    assert not right.peer_finished
    opener.lose()
    member.lose()
    net.run()


def test_a_replayed_first_message_starts_no_handler_and_expires(net: Network) -> None:
    seen: list[bytes] = []

    def watch(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.TUNNEL_OPEN:
            seen.append(frame)
        return [frame]

    net.tamper = watch
    _opener, member, left, right = opened(net)
    service = next(iter(member.services.values()))
    for n in range(3):
        changed = bytearray(seen[0])
        alias = HOP.unpack_from(changed)[3]
        REWRITE.pack_into(changed, ALIAS_AT, alias, RELAY_HOP | 900 + n)
        member.receive(bytes(changed))
    net.run()
    assert service.tunnels == [right]
    assert len(member.session.tunnels.ends) == 4
    net.pass_time(HALF_OPEN_US / 1e6 + 0.1)
    assert len(member.session.tunnels.ends) == 1
    assert service.tunnels == [right]
    close(net, left)


def test_half_open_tunnels_are_bounded(net: Network) -> None:
    opener, member = net.host(), net.host()
    service = member.serve("db", concurrency=1 << 20)
    net.tamper = lambda host, frame: [] if kind_of(frame) == Kind.TUNNEL_ACCEPT else [frame]
    ends = [opener.open_tunnel("db") for _ in range(MAX_HALF_OPEN + 5)]
    net.run()
    assert service.tunnels == []
    refused = [end for end in ends if end.error is not None]
    assert len(refused) == 5
    assert all(isinstance(end.error, Overloaded) for end in refused)
    net.pass_time(HALF_OPEN_US / 1e6 + 0.1)
    assert not member.session.tunnels.ends
    assert all(end.broken for end in ends)


def test_a_holder_of_one_key_does_not_fill_the_half_open_tunnels_of_another(net: Network) -> None:
    guard = Guard(FRESHNESS_US)
    guard.keys = 2
    thief, caller = net.host(keys=(OTHER_KEY,)), net.host()
    member = net.host(keys=(KEY, OTHER_KEY), guard=guard)
    member.serve("theirs", concurrency=1 << 20, keys=(OTHER_KEY,))
    service = member.serve("mine")
    net.tamper = lambda host, frame: (
        [] if host is thief and kind_of(frame) == Kind.TUNNEL_ACCEPT else [frame]
    )
    ends = [thief.open_tunnel("theirs") for _ in range(MAX_HALF_OPEN + 5)]
    net.run()
    refused = [end for end in ends if end.error is not None]
    assert len(ends) - len(refused) == 3 * MAX_HALF_OPEN // 4
    mine = caller.open_tunnel("mine")
    net.run()
    assert mine.open
    assert len(service.tunnels) == 1
    net.pass_time(HALF_OPEN_US / 1e6 + 0.1)
    net.tamper = lambda host, frame: [frame]
    again = thief.open_tunnel("theirs")
    net.run()
    assert again.open
    again.close()
    close(net, mine)


def test_the_second_handshake_message_cannot_be_sent_twice(net: Network) -> None:
    net.tamper = lambda host, frame: [frame] * (2 if kind_of(frame) == Kind.TUNNEL_ACCEPT else 1)
    opener, member = net.host(), net.host()
    member.serve("db")
    left = opener.open_tunnel("db")
    net.run()
    assert left.broken
    assert not opener.session.tunnels.ends


def test_a_tunnel_to_nobody_says_why(net: Network) -> None:
    opener = net.host()
    left = opener.open_tunnel("db")
    net.run()
    assert isinstance(left.error, NoMembers)
    assert left.broken


def test_a_refused_tunnel_goes_to_another_member(net: Network) -> None:
    opener = net.host()
    first, second = net.host().serve("db"), net.host().serve("db")
    first.refusal = Refusal.FULL
    ends = [opener.open_tunnel("db") for _ in range(3)]
    net.run()
    assert all(end.open for end in ends)
    assert len(second.tunnels) == 3
    close(net, *ends)


def test_when_the_tunnels_share_of_a_port_is_full_the_tunnel_breaks_on_both_ends(
    net: Network,
) -> None:
    _, member, left, right = opened(net)
    member.port.room = 0
    left.write(memoryview(b"x"), 0)
    net.run()
    assert left.broken
    assert right.broken
    assert net.router.accounts.dropped == {"tunnel share full": 1}


def test_giving_up_before_it_is_open_notifies_the_member(net: Network) -> None:
    opener, member = net.host(), net.host()
    service = member.serve("db")
    left = opener.open_tunnel("db")
    opener.speak()
    opener.session.tunnels.drop(left)
    net.run()
    assert service.tunnels == []
    assert not member.session.tunnels.ends
    assert not opener.session.tunnels.ends


def test_the_relay_bounds_what_one_session_may_declare_as_one_tunnel_twice(net: Network) -> None:
    opener, _, left, _ = opened(net)
    opener.session.out.hops = left.hop - 1
    opener.open_tunnel("db")
    net.run()
    assert f"hop id {left.hop} is already in use" in opener.ended_because
    assert isinstance(frames.Error(opener.ended_because), frames.Error)
    opener.session.end("over")
    net.run()


def test_empty_messages_cost_credit_so_that_a_reader_who_does_not_read_holds_few(
    net: Network,
) -> None:
    _, _, left, right = opened(net)
    sent = 0
    while left.credit >= CHUNK_COST:
        assert left.write(memoryview(b""), 0) == (0, True)
        sent += 1
    assert left.write(memoryview(b""), 0) == (0, False), "an empty one waits for credit, too"
    net.run()
    assert sent == FIRST_WINDOW // CHUNK_COST
    assert right.buffered == FIRST_WINDOW
    close(net, left)
