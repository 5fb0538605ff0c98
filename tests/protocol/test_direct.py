"""Direct tunnels: when they leave the relay, what passes, and that the end of one path is not the other's end."""

from __future__ import annotations

import random

import pytest
from protocol.kit import Host, Network
from protocol.pairs import MemoryPairs
from protocol.test_tunnels import drain

from iris.core.direct import DIRECT_AFTER_BYTES
from iris.core.tunnel import TunnelEnd
from iris.errors import Closed
from iris.wire import frames
from iris.wire.codec import encode_control, tunnel_frame
from iris.wire.kinds import Kind, Refusal
from relay.core.direct import MAX_PAIRS_OF_SESSION
from relay.core.limits import Limits

MIB = 1 << 20
MESSAGE = bytes(range(256)) * 256


def opened(net: Network, *, pairs: bool = True) -> tuple[MemoryPairs, Host, Host, TunnelEnd, TunnelEnd]:  # fmt: skip
    """Return (pairs, opener's host, member's host, opener's end, member's end)."""
    opener, member = net.host("opener"), net.host("member")
    made = MemoryPairs(net, *((opener, member) if pairs else ()))
    service = member.serve("db")
    left = opener.open_tunnel("db")
    net.run()
    return made, opener, member, left, service.tunnels[0]


def carry(pairs: MemoryPairs, source: TunnelEnd, sink: TunnelEnd, size: int) -> int:
    """Send `size` bytes in messages of 64 KiB, check that they arrive, and return their number."""
    count = -(-size // len(MESSAGE))
    came = b""
    for number in range(count):
        message = number.to_bytes(8, "big") + MESSAGE[8:]
        sent, done = source.write(memoryview(message), 0)
        while not done:
            pairs.run()
            while (chunk := sink.next_chunk()) is not None:
                came += chunk[1]
            pairs.run()
            before = sent
            sent, done = source.write(memoryview(message), sent)
            assert done or sent > before, "it makes no progress"
        pairs.run()
        while (chunk := sink.next_chunk()) is not None:
            came += chunk[1]
        assert came == message
        came = b""
    pairs.run()
    return count


def moved(net: Network) -> tuple[MemoryPairs, Host, Host, TunnelEnd, TunnelEnd]:
    """Return the same for a tunnel whose directions both use the pair."""
    made = opened(net)
    pairs, _, _, left, right = made
    carry(pairs, left, right, DIRECT_AFTER_BYTES + MIB)
    assert left.pair is not None
    assert right.pair is not None
    return made


def test_a_tunnel_moves_once_it_has_carried_a_mebibyte_and_not_before(net: Network) -> None:
    pairs, _, _, left, right = opened(net)
    carry(pairs, left, right, DIRECT_AFTER_BYTES - 128 * 1024)
    assert not pairs.pairs
    carry(pairs, left, right, MIB)
    assert len(pairs.pairs) == 1
    assert left.pair is not None
    routed = net.router.accounts.in_
    carry(pairs, left, right, 4 * MIB)
    carry(pairs, right, left, 4 * MIB)
    assert net.router.accounts.in_ == routed, "no record passes through the relay any more"
    left.close()
    pairs.run()
    assert right.ended
    assert not right.broken
    assert all(way.closed for way in pairs.ways)
    assert net.router.direct.status()["open"] == 0


def test_what_the_member_sends_counts_and_the_opener_asks(net: Network) -> None:
    pairs, _, _, left, right = opened(net)
    carry(pairs, right, left, DIRECT_AFTER_BYTES + MIB)
    assert left.pair is not None
    assert right.pair is not None
    left.close()
    pairs.run()


def test_both_ends_say_what_passed_beside_the_relays_account(net: Network) -> None:
    pairs, _, _, left, right = moved(net)
    before = pairs.ways[0].sent_records
    carry(pairs, left, right, 3 * MIB)
    left.close()
    pairs.run()
    status = net.router.direct.status()
    assert status["made"] == 1
    assert status["sent_records"] == status["received_records"] > before
    assert status["sent_bytes"] == status["received_bytes"] > 3 * MIB
    assert net.router.accounts.balance() == 0


@pytest.mark.parametrize("of", ["opener", "member"])
def test_a_session_that_takes_no_descriptors_keeps_its_tunnels_at_the_relay(
    net: Network, of: str
) -> None:
    pairs, opener, member, left, right = opened(net)
    (opener if of == "opener" else member).peer.takes_descriptors = False
    carry(pairs, left, right, DIRECT_AFTER_BYTES + 2 * MIB)
    assert left.pair is None
    assert net.router.direct.refused == {"a session is not of this host": 1}
    left.close()
    pairs.run()


def test_without_a_free_descriptor_the_tunnel_stays_and_it_is_counted(net: Network) -> None:
    pairs, _, _, left, right = opened(net)
    pairs.out_of_descriptors = True
    carry(pairs, left, right, DIRECT_AFTER_BYTES + 2 * MIB)
    assert left.pair is None
    assert net.router.direct.refused == {"no descriptor is free": 1}
    left.close()
    pairs.run()


@pytest.mark.parametrize("of", [0, 1])
def test_an_end_that_is_never_fetched_keeps_the_tunnel_at_the_relay(net: Network, of: int) -> None:
    pairs, opener, member, left, right = opened(net)
    (opener, member)[of].session.tunnels.fetch = lambda token, end: None
    carry(pairs, left, right, DIRECT_AFTER_BYTES + 2 * MIB)
    carry(pairs, right, left, 2 * MIB)
    assert left.pair is right.pair is None
    left.close()
    pairs.run()
    assert not pairs.waiting
    assert net.router.direct.status()["open"] == 0


def test_the_limit_bounds_the_pairs_and_an_ended_tunnel_makes_room(net: Network) -> None:
    net = Network(limits=Limits(direct=4))
    opener, member = net.host("opener"), net.host("member")
    pairs = MemoryPairs(net, opener, member)
    service = member.serve("db")
    lefts = []
    for _ in range(4):
        lefts.append(opener.open_tunnel("db"))
        net.run()
        carry(pairs, lefts[-1], service.tunnels[-1], DIRECT_AFTER_BYTES + MIB)
    assert [left.pair is not None for left in lefts] == [True, True, True, False], "of one user"
    assert net.router.direct.refused == {"the limit is reached": 1}
    lefts[0].close()
    pairs.run()
    again = opener.open_tunnel("db")
    net.run()
    carry(pairs, again, service.tunnels[-1], DIRECT_AFTER_BYTES + MIB)
    assert again.pair is not None
    for left in [*lefts, again]:
        left.close()
    pairs.run()
    net.check()


def test_a_session_has_so_many_ends_and_no_more(net: Network) -> None:
    pairs, opener, _, left, right = opened(net)
    opener.peer.pairs = MAX_PAIRS_OF_SESSION
    carry(pairs, left, right, DIRECT_AFTER_BYTES + MIB)
    assert left.pair is None
    assert net.router.direct.refused == {"a session has as many as it may": 1}
    opener.peer.pairs = 0
    left.close()
    pairs.run()


def test_half_close_passes_and_the_other_direction_goes_on(net: Network) -> None:
    pairs, _, _, left, right = moved(net)
    left.write(memoryview(b"last"), 0)
    left.finish()
    pairs.run()
    assert drain(right) == [b"last"]
    assert right.peer_finished
    carry(pairs, right, left, 3 * MIB)
    right.write(memoryview(b"still"), 0)
    right.finish()
    pairs.run()
    assert drain(left) == [b"still"]
    assert left.ended
    assert right.ended
    assert not left.broken
    assert not right.broken
    assert not net.router.direct.table.total


def test_all_that_was_written_before_close_is_read_though_the_end_overtakes_it(
    net: Network,
) -> None:
    """TUNNEL_END goes through the relay, and the last records through the pair."""
    pairs, _, _, left, right = moved(net)
    right.direct.pair.reading = False  # type: ignore[union-attr]  # its event loop is elsewhere
    left.write(memoryview(b"last"), 0)
    left.close()
    pairs.run()
    assert not left.broken
    assert right.ended
    assert not right.broken
    assert drain(right) == [b"last"]
    with pytest.raises(Closed):
        right.check_sending()


def test_the_end_is_said_once_all_is_written(net: Network) -> None:
    pairs, opener, _, left, right = moved(net)
    way = left.pair
    assert way is not None
    way.room = 0  # type: ignore[attr-defined]
    left.write(memoryview(b"last"), 0)
    left.close()
    net.run()
    assert opener.session.tunnels.queued_bytes > 0
    assert not right.ended
    way.room = 4  # type: ignore[attr-defined]
    pairs.run()
    assert drain(right) == [b"last"]
    assert not right.broken
    assert not opener.session.tunnels.ends


@pytest.mark.parametrize("who", ["opener", "member"])
def test_a_lost_session_breaks_it_at_the_other_end(net: Network, who: str) -> None:
    pairs, opener, member, left, right = moved(net)
    gone, there = (opener, right) if who == "opener" else (member, left)
    gone.lose()
    pairs.run()
    assert "session was lost" in there.broken
    assert pairs.pairs[0].over
    assert all(way.closed for way in pairs.ways)
    assert net.router.direct.status()["open"] == 0


def test_a_pair_that_breaks_breaks_the_tunnel_at_both_ends(net: Network) -> None:
    pairs, _, _, left, right = moved(net)
    pairs.pairs[0].over = True
    pairs.run()
    assert {left.broken, right.broken} <= {"its direct connection broke", "the peer broke it off"}
    assert left.broken
    assert right.broken
    assert net.router.direct.status()["open"] == 0


def test_a_pair_that_the_relay_shuts_because_of_a_close_breaks_nothing(net: Network) -> None:
    """The end of the pair is seen before TUNNEL_END is read, while the other direction has never moved."""
    pairs, opener, member, left, right = opened(net)
    carry(pairs, left, right, DIRECT_AFTER_BYTES + MIB)
    left.write(memoryview(b"last"), 0)
    left.close()
    opener.speak()  # the relay has notified the member, and shut the pair
    assert pairs.pairs[0].over
    (way,) = [w for w in pairs.ways if w.host is member]
    way.drain()
    way.lost = True
    member.session.tunnels.pair_lost(right)
    pairs.run()
    assert not right.broken
    assert drain(right) == [b"last"]


def test_a_record_through_the_relay_after_the_last_one_breaks_the_tunnel(net: Network) -> None:
    pairs, opener, _, left, right = moved(net)
    opener.say(tunnel_frame(Kind.TUNNEL_DATA, left.hop, bytes(64)))
    pairs.run()
    assert "after the peer moved to the socket pair" in right.broken
    assert left.broken


@pytest.mark.parametrize("item", [7, 8])
def test_who_says_ready_or_moved_out_of_turn_breaks_the_tunnel(net: Network, item: int) -> None:
    pairs, _, _, left, right = opened(net)
    left._item(item, b"")
    pairs.run()
    assert f"kind 0x{item:02x}" in right.broken


def test_moved_is_not_said_twice_and_not_before_ready(net: Network) -> None:
    pairs, _, member, left, right = opened(net)
    member.session.tunnels.fetch = lambda token, end: None
    carry(pairs, left, right, DIRECT_AFTER_BYTES + MIB)
    assert right.direct is not None
    left._item(8, b"")
    pairs.run()
    assert "kind 0x08" in right.broken


def test_a_relay_that_grants_a_pair_twice_ends_the_session(net: Network) -> None:
    pairs, opener, _, left, _ = moved(net)
    opener.receive(encode_control(frames.Ping(1)))
    net.tamper = lambda host, frame: (
        [frame, encode_control(frames.Pair(left.hop, bytes(16)))] if host is opener else [frame]
    )
    opener.session.ask(frames.Ping, _Nobody())
    pairs.run()
    assert "a second PAIR" in opener.ended_because


class _Nobody:
    def done(self) -> bool:
        return True

    def set_result(self, result: object, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_an_opening_that_comes_to_nothing_gives_the_pair_back(net: Network, how: str) -> None:
    """The session requests the pair before its tunnel is open."""
    opener, member = net.host("opener"), net.host("member")
    pairs = MemoryPairs(net, opener, member)
    service = member.serve("db")
    if how == "refused":
        service.refusal = Refusal.FULL
    left = opener.open_tunnel("db")
    opener.session.out.control(frames.Direct(left.hop))
    opener.speak()
    assert len(pairs.pairs) == 1
    if how == "lost":
        member.lose()
    pairs.run()
    assert left.broken or left.error is not None
    assert pairs.pairs[0].over
    assert not pairs.waiting
    assert net.router.direct.status()["open"] == 0


def test_a_session_that_never_had_a_pair_reports_nothing(net: Network) -> None:
    host = net.host("liar")
    host.say(encode_control(frames.Carried(1, 1, 1, 1)))
    assert "never had a socket pair" in host.ended_because


def test_a_descriptor_is_not_a_frame_of_a_session(net: Network) -> None:
    host = net.host("confused")
    host.say(encode_control(frames.Fetch(bytes(16))))
    assert "unexpected Fetch frame" in host.ended_because


def test_the_relay_hands_nothing_to_a_tunnel_of_another_session(net: Network) -> None:
    pairs, _, _, left, _ = opened(net)
    stranger = net.host("stranger")
    pairs.admit(stranger)
    stranger.session.out.control(frames.Direct(left.hop))
    pairs.run()
    assert not pairs.pairs
    left.close()
    pairs.run()


def test_a_tunnel_of_two_relays_stays_with_them() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    opener, member = net.host("opener", relay=0), net.host("member", relay=1)
    pairs = MemoryPairs(net, opener, member)
    service = member.serve("db")
    left = opener.open_tunnel("db")
    net.run()
    carry(pairs, left, service.tunnels[0], DIRECT_AFTER_BYTES + MIB)
    assert not pairs.pairs
    assert net.router.direct.refused == {"another relay is on the way": 1}
    left.close()
    pairs.run()


def test_a_session_with_a_tunnel_to_itself_has_both_ends(net: Network) -> None:
    host = net.host("alone")
    pairs = MemoryPairs(net, host)
    service = host.serve("db")
    left = host.open_tunnel("db")
    net.run()
    right = service.tunnels[0]
    carry(pairs, left, right, DIRECT_AFTER_BYTES + 2 * MIB)
    assert left.pair is not None
    assert right.pair is not None
    assert host.peer.pairs == 2
    left.close()
    pairs.run()
    assert host.peer.pairs == 0


def test_a_side_that_finished_before_the_pair_was_there_still_moves_or_ends_well(
    net: Network,
) -> None:
    pairs, _, member, left, right = opened(net)
    held: list[tuple[bytes, TunnelEnd]] = []
    member.session.tunnels.fetch = lambda token, end: held.append((token, end))
    carry(pairs, left, right, DIRECT_AFTER_BYTES + MIB)
    left.write(memoryview(b"last"), 0)
    left.finish()
    pairs.run()
    assert held
    pairs.fetch(member, *held[0])  # `ready` arrives at an end that has finished
    pairs.run()
    assert left.pair is not None
    carry(pairs, right, left, 2 * MIB)
    right.finish()
    pairs.run()
    assert drain(right) == [b"last"]
    assert left.ended
    assert right.ended
    assert not left.broken
    assert not right.broken
    net.check()


class Talk:
    """One direction of a tunnel with random messages: those sent and those received."""

    def __init__(self, source: TunnelEnd, sink: TunnelEnd) -> None:
        self.source = source
        self.sink = sink
        self.sent: list[bytes] = []
        self.came: list[bytes] = []
        self.part = b""
        self.message: memoryview | None = None
        self.at = 0

    def write(self, rng: random.Random) -> None:
        """Begin a message, or continue it."""
        if self.source.ended or self.source.finished:
            return
        if self.message is None:
            data = rng.randbytes(4) * rng.choice((0, 1, 30, 5_000, 16_384, 40_000))
            self.message, self.at = memoryview(data), 0
        self.at, done = self.source.write(self.message, self.at)
        if done:
            self.sent.append(bytes(self.message))
            self.message = None

    def read(self) -> None:
        while (chunk := self.sink.next_chunk()) is not None:
            self.part += chunk[1]
            if chunk[0] & 2:
                self.came.append(self.part)
                self.part = b""


@pytest.mark.parametrize("seed", range(60))
def test_a_tunnel_at_random_loses_nothing_and_ends_as_it_was_ended(seed: int) -> None:
    """Descriptors arrive at any time, or never; relay and pair overtake each other; either end finishes,
    closes or disconnects.
    """
    rng = random.Random(seed)
    net = Network(relay_seed=seed)
    pairs, opener, member, left, right = opened(net)
    late: list[tuple[Host, bytes, TunnelEnd]] = []
    for host in (opener, member):
        host.session.tunnels.fetch = lambda token, end, host=host: late.append((host, token, end))  # type: ignore[misc]
    never = rng.random() < 0.15
    left._until_direct = rng.choice((1, 20_000, 200_000))
    there, back = Talk(left, right), Talk(right, left)
    how = rng.choice(("finish", "close", "lost"))
    steps = rng.randrange(40, 240)
    for _ in range(steps):
        step = rng.random()
        if step < 0.5:
            there.write(rng)
        elif step < 0.6:
            back.write(rng)
        elif step < 0.75:
            (there if rng.random() < 0.7 else back).read()
        elif step < 0.82 and late and not never:
            pairs.fetch(*late.pop(rng.randrange(len(late))))
        elif step < 0.86:
            rng.choice((opener, member)).speak()
        elif step < 0.92:
            rng.choice((opener, member)).listen()
        elif step < 0.97 and pairs.ways:
            way = rng.choice(pairs.ways)
            way.room = rng.randrange(1, 5)
            way.turn()
        else:
            pairs.run()
    assert not left.broken
    assert not right.broken
    if how == "lost":
        opener.lose()
        pairs.run()
        assert "session was lost" in right.broken
    else:
        for talk in (there, back):
            while talk.message is not None:
                pairs.run()
                talk.read()
                talk.write(rng)
        for talk in rng.sample((there, back), 2):
            if how == "finish":
                talk.source.finish()
            for _ in range(rng.randrange(4)):
                rng.choice((opener, member)).speak()
            if late and rng.random() < 0.5:
                pairs.fetch(*late.pop())
            for _ in range(rng.randrange(4)):
                rng.choice((opener, member)).listen()
        if how == "close":
            pairs.run()
            back.read()
            while late and rng.random() < 0.5:
                pairs.fetch(*late.pop())
            left.close()
            for _ in range(rng.randrange(6)):
                rng.choice((opener, member)).speak()
        for _ in range(40):
            pairs.run()
            for talk in (there, back):
                talk.read()
        assert there.came == there.sent
        assert how == "close" or back.came == back.sent
        assert left.ended
        assert right.ended
        assert not left.broken
        assert not right.broken
    for way in pairs.ways:
        assert way.closed
    assert net.router.direct.status()["open"] == 0
    assert not pairs.waiting
    net.check()
