"""What is counted for somebody is counted no more once it ended, whichever way it ended."""

from __future__ import annotations

from protocol.kit import KEY, Network
from protocol.test_quotas import HOUR_S, Party

from iris.wire import frames
from iris.wire.codec import END, HOP, tunnel_frame
from iris.wire.frames import FLAG_REFUSED, Cause, Kind, Refusal, Serving

KEY_ID = KEY.key_id
KINDS = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN)


def call(party: Party, kind: Kind, hop: int, *, name: str = "db", deadline_us: int = 0) -> None:
    """Send a call of any kind under an alias of its own."""
    if not party.session.routes:
        for alias, each in enumerate(KINDS):
            party.say(frames.Declare(alias, each, name, KEY_ID, bytes(16)))
    body = END.pack(0, 0, 1, 0) + bytes(64)
    party.say(HOP.pack(22 + len(body), kind, 0, KINDS.index(kind), hop, deadline_us) + body)


def serve(party: Party, name: str = "db", concurrency: int = 8) -> None:
    kinds: dict[int, Serving] = {kind: Serving(concurrency, 1 << 20) for kind in KINDS}
    assert not party.ask(lambda number: frames.Join(number, name, party.keys, kinds))


def handed(party: Party) -> list[bytes]:
    """Return the calls that a member's session was handed since this was asked last."""
    calls = [bytes(frame) for frame in party.port.out if frame[4] in KINDS]
    party.port.out.clear()
    return calls


def test_a_request_that_waits_under_the_hop_id_of_a_tunnel_s_opening_ends_without_it() -> None:
    """Otherwise a second opening of that id is taken, and of the first one the member never hears again."""
    net = Network(relays=2)
    ends = net.link(0, 1)
    far = Party(net.routers[1])
    serve(far)
    net.run()
    net.cut(ends)
    caller = Party(net.router)
    late_us = net.router.now_us + 60_000_000
    call(caller, Kind.TUNNEL_OPEN, 5, deadline_us=late_us)
    call(caller, Kind.REQUEST, 5, deadline_us=net.router.now_us + 1_000)
    net.pass_time(0.5)
    (fail,) = caller.heard(frames.Fail)
    assert (fail.hop, fail.cause) == (5, Cause.EXPIRED)
    assert net.router._calls.parking.holds_opening(caller.session, 5)
    caller.say(tunnel_frame(Kind.TUNNEL_END, 5, b"\1"))
    assert not net.router._calls.parking.waiting
    assert caller.session.pending == 0
    net.link(0, 1)
    net.run()
    assert not handed(far)


def test_a_call_that_was_given_up_is_handed_to_nobody_else() -> None:
    """Its caller has heard that it is lost, and nothing would end it a second time."""
    net = Network(relays=2)
    net.link(0, 1)
    other = Party(net.routers[1])
    serve(other, concurrency=1000)
    near = Party(net.router)
    serve(near, concurrency=10_000)
    net.run()
    caller = Party(net.router)
    for hop, kind in enumerate((Kind.REQUEST, Kind.PUSH), 1):
        call(caller, kind, hop)
    calls = handed(near)
    assert len(calls) == 2
    net.pass_time(HOUR_S + 180)
    assert len(caller.heard(frames.Fail)) == 2
    for frame in calls:
        back = bytearray(frame)
        back[5] = FLAG_REFUSED | Refusal.FULL << 4
        near.say(bytes(back))
    net.run()
    assert not handed(other)
    assert not caller.heard(frames.Fail)
    assert caller.session.pending == 0
    assert not near.session.handed
    assert all(router.accounts.balance() == 0 for router in net.routers)
