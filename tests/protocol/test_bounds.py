"""What one frame, or one look of a relay, can cost at most: counted in steps."""

from __future__ import annotations

from itertools import product

import pytest
from protocol.kit import KEY, Network
from protocol.test_quotas import Party

from iris.wire import frames
from iris.wire.codec import END, HOP
from iris.wire.kinds import Kind
from relay.core import casts
from relay.core.interest import MAX_WIDTH, Interest
from relay.core.limits import Limits
from relay.core.surveys import PART

LEVELS = 12


def test_a_question_about_a_topic_looks_at_a_bounded_number_of_nodes() -> None:
    interest = Interest()
    party = Party(Network().router)
    for tokens in product("a*", repeat=LEVELS):
        interest.subscribe(party.session, ".".join(tokens), "", [KEY.key_id])
    topic = ".".join("a" * LEVELS)
    assert 0 < interest.audience(topic, KEY.key_id) <= MAX_WIDTH < 2**LEVELS
    assert interest.audience(".".join("b" * LEVELS), KEY.key_id) == 1


def test_ten_thousand_subscribers_of_a_topic_are_counted() -> None:
    interest = Interest()
    router = Network().router
    for _ in range(10_000):
        interest.subscribe(Party(router).session, "news", "", [KEY.key_id])
    assert interest.audience("news", KEY.key_id) == 10_000


def serving(router: object, members: int, kind: int) -> Party:
    party = Party(router)  # type: ignore[arg-type]  # a Router
    for number in range(members):
        kinds = {kind: frames.Serving(1 << 20, 1 << 30)}
        party.say(frames.Join(number, "db", [KEY.key_id], kinds))
    party.port.out.clear()
    return party


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.SURVEY])
def test_a_frame_to_many_members_is_sent_in_parts(kind: int) -> None:
    """The next frame of its sender is handled after the last part, so that the order stays."""
    assert casts.PART == PART
    router = Network(limits=Limits()).router
    members = 10 * PART
    receiver, sender = serving(router, members, kind), Party(router)
    sender.say(frames.Declare(0, kind, "db", KEY.key_id, bytes(16)))
    entry = router.entry(sender.session)
    frame = memoryview(bytearray(HOP.pack(62, kind, 0, 0, 5, 0) + END.pack(0, 0, 1, 0) + bytes(16)))
    assert entry(frame, 0, len(frame)) is True

    def data() -> int:
        return sum(each[4] == kind for each in receiver.port.out)

    seen = [data()]
    work = sender.session.unfinished
    assert work is not None
    for _ in work:
        seen.append(data())
    assert seen == [min(PART * part, members) for part in range(members // PART + 1)]
    sender.session.unfinished = None
    accounts = router.accounts
    assert accounts.balance() == 0
    assert accounts.out == members


def test_members_that_leave_while_a_broadcast_is_sent_in_parts_are_left_out() -> None:
    router = Network().router
    stays, leaves = serving(router, 2 * PART, Kind.BROADCAST), serving(router, 2 * PART, Kind.BROADCAST)  # fmt: skip
    sender = Party(router)
    sender.say(frames.Declare(0, Kind.BROADCAST, "db", KEY.key_id, bytes(16)))
    frame = memoryview(bytearray(HOP.pack(62, Kind.BROADCAST, 0, 0, 0, 0) + END.pack(0, 0, 1, 0) + bytes(16)))  # fmt: skip
    router.entry(sender.session)(frame, 0, len(frame))
    assert sender.session.unfinished is not None
    next(sender.session.unfinished)
    router.session_down(leaves.session)
    sender.session.complete()
    assert sum(each[4] == Kind.BROADCAST for each in stays.port.out) == 2 * PART
    assert router.accounts.dropped == {"session lost": 2 * PART}
    assert router.accounts.balance() == 0


def test_a_sender_that_leaves_has_sent_its_last_frame_to_all() -> None:
    router = Network().router
    receiver, sender = serving(router, 4 * PART, Kind.BROADCAST), Party(router)
    sender.say(frames.Declare(0, Kind.BROADCAST, "db", KEY.key_id, bytes(16)))
    frame = memoryview(bytearray(HOP.pack(62, Kind.BROADCAST, 0, 0, 0, 0) + END.pack(0, 0, 1, 0) + bytes(16)))  # fmt: skip
    router.entry(sender.session)(frame, 0, len(frame))
    router.session_down(sender.session)
    assert sum(each[4] == Kind.BROADCAST for each in receiver.port.out) == 4 * PART


@pytest.mark.parametrize("unread", [False, True])
def test_a_link_with_bytes_that_were_not_read_is_not_silent(unread: bool) -> None:
    net = Network(relays=2)
    one, other = net.link(0, 1)
    other.out.clear()
    one.unread = unread
    router = one.router
    router.now_us += 10_000_000
    router.expire()
    assert one.link.closed is not unread
    one.unread = False
    router.now_us += 10_000_000
    router.expire()
    assert one.link.closed
