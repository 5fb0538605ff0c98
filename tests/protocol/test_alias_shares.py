"""Aliases: what one user can make a relay hold, and what becomes of the frames under an alias that was refused."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from protocol.kit import KEY, Network
from protocol.test_quotas import Party, never
from protocol.test_sites import reply

from iris.errors import Overloaded, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import END, HOP
from iris.wire.frames import Declare, Fail, Serving, Unrouted
from iris.wire.kinds import Cause, Kind
from iris.wire.runs import answer_run, call_run
from relay.core.limits import WEB_ALIASES, Limits

KEY_ID = KEY.key_id
SENDER = bytes(16)


def party(net: Network, user: str = "uid 1") -> Party:
    return Party(net.router, user)


def declare(
    party: Party, alias: int, kind: Kind = Kind.REQUEST, name: str = "db"
) -> list[Unrouted]:
    """Declare an alias; return what the relay refuses."""
    party.say(Declare(alias, kind, name, KEY_ID, SENDER))
    return party.received(Unrouted)


def crowded() -> tuple[Network, Party]:
    """Return a network whose relay accepts 16 aliases, and a session whose user has used up its share of them."""
    net = Network(limits=Limits(all_aliases=16))
    first = party(net)
    assert not [each for alias in range(12) for each in declare(first, alias)]
    return net, first


def data(kind: int, alias: int, hop: int, count: int = 1) -> bytes:
    size = HOP.size - 4 + END.size + 12
    return HOP.pack(size, kind, 0, alias, hop, 0) + END.pack(0, 0, count, 0) + bytes(12)


def test_sessions_of_one_user_share_aliases_and_leave_a_quarter_to_others() -> None:
    net, first = crowded()
    second, other = party(net), party(net, "uid 2")
    for alias, session in ((12, first), (0, second)):
        (refused,) = declare(session, alias)
        assert (refused.alias, refused.full, refused.count) == (alias, True, 0)
        assert "the sessions of uid 1 already use their share of the relay's aliases (12 of 16" in refused.cause  # fmt: skip
    assert not [each for alias in range(4) for each in declare(other, alias)]
    (refused,) = declare(other, 4)
    assert "the relay's limit of 16 aliases is reached" in refused.cause
    status: Any = net.router.status()["quotas"]
    assert status["aliases"] == {"held": 16, "limit": 16, "refused": 3}
    net.router.session_down(first.session)
    assert not declare(second, 0)
    net.router.session_down(second.session)
    net.router.session_down(other.session)
    assert net.router.quotas.aliases.status()["held"] == 0
    assert not net.router.quotas.aliases.held


def test_a_number_that_is_declared_again_takes_no_more_of_the_share() -> None:
    net, first = crowded()
    assert not [each for name in "abc" for each in declare(first, 3, Kind.PUBLISH, name)]
    assert net.router.quotas.aliases.total == 12
    for _ in net.router.forget_routes(first.session, KEY_ID):
        continue
    assert net.router.quotas.aliases.total == 0
    assert not declare(first, 0)


@pytest.mark.parametrize(
    "kind", [Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.STREAM]
)
def test_a_call_under_a_refused_alias_fails_at_once_and_the_session_goes_on(kind: Kind) -> None:
    net, _ = crowded()
    late = party(net)
    declare(late, 0, kind)
    late.say(data(kind, 0, 7))
    (fail,) = late.received(Fail)
    assert (fail.hop, fail.cause, fail.may_have_run) == (7, Cause.OVERLOADED, False)
    assert "the sessions of uid 1" in fail.detail
    assert net.router.accounts.balance() == 0
    assert not late.session.closed


def test_each_call_of_a_run_under_a_refused_alias_fails() -> None:
    net, _ = crowded()
    late = party(net)
    declare(late, 0)
    late.say(call_run(0, 0, 5, 0, END.pack(0, 0, 1, 0), (b"a", b"b", b"c")))
    assert [fail.hop for fail in late.received(Fail)] == [5, 6, 7]
    assert net.router.accounts.refused == 3


def test_casts_under_a_refused_alias_are_counted() -> None:
    net, _ = crowded()
    late = party(net)
    declare(late, 0, Kind.PUBLISH)
    late.say(frames.Wait(0, 1))
    late.say(data(Kind.PUBLISH, 0, 0, 2))
    account: Any = net.router.accounts.report(0)
    assert account["dropped"] == {"alias refused": 2}
    assert net.router.accounts.balance() == 0


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.SURVEY])
def test_an_answer_under_a_refused_alias_ends_the_call_of_its_caller(
    kind: Kind, many: bool
) -> None:
    net = Network(limits=Limits(all_aliases=4))
    member, caller = party(net), party(net, "uid 2")
    serving = {each: Serving(8, 1 << 20) for each in (Kind.REQUEST, Kind.SURVEY)}
    assert not member.ask(lambda number: frames.Join(number, "db", [KEY_ID], serving))
    assert not [each for alias in range(3) for each in declare(member, alias)]
    declare(caller, 0, kind)
    caller.say(data(kind, 0, 9))
    (hop,) = member.session.in_flight
    answer = {Kind.REQUEST: Kind.REPLY, Kind.SURVEY: Kind.ANSWER}[kind]
    assert declare(member, 3, answer)
    caller.port.out.clear()
    if many:
        member.say(answer_run(3, END.pack(0, 0, 1, 0), [hop], [b"body"]))
    else:
        member.say(data(answer, 3, hop))
    if kind == Kind.REQUEST:
        (fail,) = caller.received(Fail)
        assert (fail.hop, fail.cause, fail.may_have_run) == (9, Cause.LOST, True)
        assert "dropped the member's answer: the relay's limit of 4 aliases" in fail.detail
    else:
        (done,) = caller.received(frames.Done)
        assert len(done.lost) == 1
    assert not member.session.in_flight
    assert caller.session.pending == 0
    assert net.router.accounts.balance() == 0


def test_an_alias_that_stands_for_nothing_is_a_breach_unless_the_relay_refused_one() -> None:
    _, first = crowded()
    with pytest.raises(PeerProtocolError, match="alias 12 was not declared"):
        first.say(data(Kind.REQUEST, 12, 1))
    declare(first, 12)
    with pytest.raises(PeerProtocolError, match="alias 3 was not declared for this kind"):
        first.say(data(Kind.PUSH, 3, 1))
    with pytest.raises(PeerProtocolError, match="reserved for this relay"):
        first.say(data(Kind.REQUEST, 12, (1 << 63) + 1))
    with pytest.raises(PeerProtocolError, match="cannot hold 20 messages"):
        first.say(data(Kind.PUBLISH, 12, 0, 20))


def test_numbers_far_beyond_the_aliases_of_a_session_make_no_table_grow() -> None:
    net = Network()
    sparse = party(net)
    (refused,) = declare(sparse, 60_000)
    assert "alias 60000 is far beyond the 0 that this session has" in refused.cause
    assert not sparse.session.routes
    assert not declare(sparse, 1023)
    assert net.router.quotas.aliases.refused == 1


def test_the_aliases_of_one_user_take_bounded_memory_however_many_sessions_it_has() -> None:
    net = Network(limits=Limits(all_aliases=256))
    sessions = [party(net) for _ in range(32)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for session in sessions:
            for alias in range(256):
                declare(session, alias, name=f"cluster-{alias}")
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert net.router.quotas.aliases.total == 192
    assert grown < 192 * 2048 + 32 * 65_536 / 2, grown


def test_a_session_over_websocket_may_declare_fewer_aliases() -> None:
    net = Network()
    port = party(net).port
    session = net.router.session_up(port, remote=True, web=True)
    session.greeted = True
    session.proven.add(KEY_ID)
    with pytest.raises(
        PeerProtocolError, match=f"alias {WEB_ALIASES} is over the limit of {WEB_ALIASES}"
    ):
        net.router.check_alias(session, Declare(WEB_ALIASES, Kind.REQUEST, "db", KEY_ID, SENDER))
    net.router.check_alias(session, Declare(WEB_ALIASES - 1, Kind.REQUEST, "db", KEY_ID, SENDER))


# -- the client's end ----------------------------------------------------------------------------------------------


def taken(net: Network, count: int) -> Party:
    """Return a session of the clients' user that has `count` aliases."""
    held = party(net, "this process")
    assert not [each for alias in range(count) for each in declare(held, alias)]
    return held


def test_a_client_that_gets_no_alias_gets_overloaded_and_goes_on_when_there_is_room() -> None:
    net = Network(limits=Limits(all_aliases=16))
    alice, bob = net.host("alice"), net.host("bob")
    bob.serve("db", reply(b"pong"))
    net.run()
    held = taken(net, 12)
    first = alice.request("db", b"?")
    net.run()
    with pytest.raises(Overloaded, match="share of the relay's aliases") as refused:
        _ = first.value
    assert not refused.value.may_have_run
    net.router.session_down(held.session)
    second = alice.request("db", b"?")
    net.run()
    assert second.value == b"pong"


def test_a_client_that_gets_no_more_aliases_uses_those_that_it_has_for_something_else() -> None:
    net = Network(limits=Limits(all_aliases=16))
    alice, bob = net.host("alice"), net.host("bob")
    inbox = bob.subscribe(">")
    net.run()
    taken(net, 8)
    for number in range(10):
        alice.publish(f"t{number}", b"%d" % number)
        net.run()
    assert inbox.payloads == [b"%d" % number for number in range(10) if number != 4]
    assert [(lost.name, lost.count) for lost in alice.losses] == [("t4", 1)]
    assert "share of the relay's aliases" in alice.losses[0].cause
    assert net.router.accounts.balance() == 0


def test_tunnels_need_one_alias_after_the_other() -> None:
    net = Network(limits=Limits(all_aliases=16))
    alice, bob = net.host("alice"), net.host("bob")
    service = bob.serve("db", never)
    net.run()
    for _ in range(40):
        alice.open_tunnel("db")
        net.run()
    assert net.router.quotas.aliases.total == 1
    assert len(service.tunnels) == 40
