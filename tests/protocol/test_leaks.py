"""Counts for a session, user or key are reduced when an entry ends, in whatever way it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from protocol.kit import KEY, OTHER_KEY, Network
from protocol.test_quotas import HOUR_S, Party, receive

from iris.core import inbound as inbound_module
from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import END, HOP, PREFIX, encode_control, tunnel_frame
from iris.wire.frames import Serving
from iris.wire.kinds import FLAG_REFUSED, Cause, HopClass, Kind, Refusal
from relay.core import parts as parts_module
from relay.core.limits import Limits
from relay.core.neighbor import Dispatched

KEY_ID = KEY.key_id
KINDS = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN)


def call(party: Party, kind: Kind, hop: int, *, name: str = "db", deadline_us: int = 0) -> None:
    """Send a call of any kind under a new alias."""
    if not party.session.routes:
        for alias, each in enumerate(KINDS):
            party.say(frames.Declare(alias, each, name, KEY_ID, bytes(16)))
    body = END.pack(0, 0, 1, 0) + bytes(64)
    party.say(HOP.pack(22 + len(body), kind, 0, KINDS.index(kind), hop, deadline_us) + body)


def serve(party: Party, name: str = "db", concurrency: int = 8) -> None:
    kinds: dict[int, Serving] = {kind: Serving(concurrency, 1 << 20) for kind in KINDS}
    assert not party.ask(lambda number: frames.Join(number, name, party.keys, kinds))


def handed(party: Party) -> list[bytes]:
    """Return the calls dispatched to a member's session since the last call of this function."""
    calls = [bytes(frame) for frame in party.port.out if frame[4] in KINDS]
    party.port.out.clear()
    return calls


def test_a_request_that_waits_under_the_hop_id_of_a_tunnel_s_opening_ends_without_it() -> None:
    """Otherwise a second opening with that id would be accepted, and the member would never get the first one's end."""
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
    (fail,) = caller.received(frames.Fail)
    assert (fail.hop, fail.cause) == (5, Cause.EXPIRED)
    assert net.router._calls.parking.holds_opening(caller.session, 5)
    caller.say(tunnel_frame(Kind.TUNNEL_END, 5, b"\1"))
    assert not net.router._calls.parking.waiting
    assert caller.session.pending == 0
    net.link(0, 1)
    net.run()
    assert not handed(far)


def test_a_call_that_was_given_up_is_handed_to_nobody_else() -> None:
    """Its loss was reported to the caller, and nothing would end it a second time."""
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
    assert len(caller.received(frames.Fail)) == 2
    for frame in calls:
        back = bytearray(frame)
        back[5] = FLAG_REFUSED | Refusal.FULL << 4
        near.say(bytes(back))
    net.run()
    assert not handed(other)
    assert not caller.received(frames.Fail)
    assert caller.session.pending == 0
    assert not near.session.in_flight
    assert all(router.accounts.balance() == 0 for router in net.routers)


# -- what strangers may make each change or call cost -------------------------------------------------------------


def test_watches_of_a_name_under_other_keys_are_not_looked_at() -> None:
    """Any session may watch a name under a made-up key, which must not cost members that join there."""
    router = Network().router
    other_id = OTHER_KEY.key_id
    looked_at = 0

    class Ids(tuple[bytes, ...]):
        """The key ids of a watch, which count how often they are read."""

        __slots__ = ()

        def __iter__(self) -> Iterator[bytes]:
            nonlocal looked_at
            looked_at += 1
            return super().__iter__()

    stranger, member, watcher = Party(router, keys=(other_id,)), Party(router), Party(router)
    for number in range(50):
        stranger.say(frames.Members(number, "db", [other_id], True))
    watcher.say(frames.Members(1, "db", [KEY_ID, KEY_ID], True))
    for watch in stranger.session.watches.values():
        watch.key_ids = Ids(watch.key_ids)
    stranger.received(object)
    watcher.received(object)
    serve(member)
    assert len(watcher.received(frames.Membership)) == 1
    assert not stranger.received(object)
    assert looked_at == 0
    watcher.say(frames.Unwatch(1))
    router.session_down(stranger.session)
    router.session_down(member.session)
    assert not watcher.received(object)
    assert not len(router.interest.watches)


def test_a_watch_under_two_keys_is_notified_once_of_a_member_under_both() -> None:
    router = Network().router
    keys = (KEY_ID, OTHER_KEY.key_id)
    watcher, member = Party(router, keys=keys), Party(router, keys=keys)
    watcher.say(frames.Members(1, "db", [*keys, KEY_ID], True))
    watcher.received(object)
    assert router.quotas.watches.total == 2
    serve(member)
    (received,) = watcher.received(frames.Membership)
    assert len(received.joined) == 1
    router.session_down(member.session)
    (received,) = watcher.received(frames.Membership)
    assert len(received.left) == 1
    watcher.say(frames.Members(2, "db", [KEY_ID], True))
    watcher.say(frames.Unwatch(1))
    assert router.quotas.watches.total == 1
    router.session_down(watcher.session)
    assert (router.quotas.watches.total, router.quotas.watches.held) == (0, {})


def test_sessions_that_have_used_up_what_may_wait_cost_one_look_a_second_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a scan for each, a few sessions at their own limit would keep the relay from all other calls."""
    net = Network(limits=Limits(pending=4))
    member = Party(net.router)
    serve(member, concurrency=1000)
    late_us = net.router.now_us + 1_000
    callers = [Party(net.router) for _ in range(20)]
    for caller in callers:
        for hop in range(1, 5):
            call(caller, Kind.PUSH, hop, deadline_us=late_us)
    looks = 0

    class Counted(dict[int, Dispatched]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    member.session.in_flight = Counted(member.session.in_flight)
    net.pass_time(1)
    for caller in callers:
        call(caller, Kind.PUSH, 5)
    assert not any(caller.received(frames.Fail) for caller in callers)
    assert [caller.session.pending for caller in callers] == [1] * 20
    assert looks == 1
    for caller in callers:
        for hop in range(6, 10):
            call(caller, Kind.PUSH, hop, deadline_us=net.router.now_us + 1_000)
        (fail,) = caller.received(frames.Fail)
        assert fail.cause == Cause.OVERLOADED
    assert looks == 1


# -- what is kept of the groups that a DECLARE names ----------------------------------------------------------------


def long_groups(number: int) -> list[str]:
    """Return 200 names of groups, 40 KB together, that no other number has."""
    return [f"{number}-{n}-".ljust(200, "x") for n in range(200)]


def test_groups_that_a_session_names_are_not_kept() -> None:
    """Only relays may name groups. 65,536 aliases of 64 KB would let one session use 4 GB."""
    router = Network().router
    party = Party(router)
    for alias in range(8):
        party.say(frames.Declare(alias, Kind.PUBLISH, "t", KEY_ID, bytes(16), True, long_groups(alias)))  # fmt: skip
    assert not party.session.closed
    assert [route.only_groups for route in party.session.routes[:8] if route] == [()] * 8


def test_groups_that_a_relay_names_are_kept_within_a_bound_and_its_link_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "MAX_GROUP_BYTES", 100_000)
    net = Network(relays=2)
    end, _ = net.link(0, 1)

    def declare(alias: int, groups: list[str]) -> None:
        body = frames.Declare(
            alias, Kind.PUBLISH, "t", KEY_ID, bytes(16), False, groups, hop_class=HopClass.MESH
        )
        assert not receive(end, body)

    for alias in range(4):
        declare(alias, long_groups(alias))
    kept = [len(route.only_groups) for route in end.link.routes[:4] if route]
    assert (kept, end.link.dropped_entries) == ([200, 200, 0, 0], 400)
    declare(0, ["g"])
    declare(2, long_groups(2))
    kept = [len(route.only_groups) for route in end.link.routes[:4] if route]
    assert (kept, end.link.dropped_entries) == ([1, 200, 200, 0], 400)
    assert not end.link.closed


def test_groups_that_a_relay_names_to_a_client_are_kept_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbound_module, "MAX_GROUP_BYTES", 100_000)
    net = Network()
    alice = net.host("alice")
    inbox = alice.subscribe("t", group="g")

    def declare(alias: int, groups: list[str], key_id: bytes = KEY_ID) -> None:
        alice.receive(
            encode_control(
                frames.Declare(alias, Kind.PUBLISH, "t", key_id, bytes(16), False, groups)
            )
        )

    for alias in range(100, 102):
        declare(alias, long_groups(alias))
    strange = OTHER_KEY.key_id
    for alias in range(102, 110):  # also of keys that are not ours
        declare(alias, long_groups(alias), strange if alias % 2 else KEY_ID)
    flows, unknown = alice.session._inbound._flows, alice.session._inbound._unknown
    assert [len(flow.groups) for flow in flows[100:110] if flow] == [200, 200, 0, 0, 0, 0]
    assert [len(declared.groups) for declared in unknown.values()] == [0] * 4
    declare(100, [])
    declare(101, [])
    bob = net.host("bob")
    bob.publish("t", b"one")
    net.run()
    assert inbox.payloads == [b"one"]
    assert not alice.ended_because


# -- what STATUS tells ----------------------------------------------------------------------------------------------


def test_status_gives_a_session_of_another_user_numbers_alone_whoever_asks_at_the_same_time() -> (
    None
):
    net = Network()
    router = net.router
    member = Party(router, "uid 1")
    member.session.label, member.session.pid = "billing", 4711
    serve(member, "payroll")
    ours, theirs = Party(router), Party(router, "uid 2")
    theirs.session.ours = False
    parties = (ours, theirs, ours, theirs)
    for number, party in enumerate(parties):
        party.say(frames.Status(number))
    documents = {}
    for party in (ours, theirs):
        reports = party.received(frames.Report)
        assert [report.id for report in reports] == [n for n, p in enumerate(parties) if p is party]
        documents[party] = {report.document for report in reports}
        assert len(documents[party]) == 1
    (full,), (limited,) = documents[ours], documents[theirs]
    for secret in ("billing", "4711", "payroll", "uid 1", "uid 2", KEY_ID.hex()[:8]):
        assert secret in full or secret == KEY_ID.hex()[:8]
        assert secret not in limited
    assert json.loads(limited).keys() == {"relay", "site", "draining", "limited", "sessions", "links", "counts", "accounts", "troubles"}  # fmt: skip
    assert json.loads(limited)["counts"]["sessions"] == 3


@pytest.mark.parametrize("body", [b"", b"\x80", b"\x81\xa2id\xff", b"\x81\xa2id\xcf" + b"\xff" * 8, b"\x81\xa2id\x01" + bytes(70_000)])  # fmt: skip
def test_a_status_of_the_wrong_size_or_form_ends_its_session_alone(body: bytes) -> None:
    router = Network().router
    other, party = Party(router), Party(router, "uid 2")
    kind = frames.Status.FRAME
    with pytest.raises(PeerProtocolError, match="STATUS frame"):
        party.say(PREFIX.pack(2 + len(body), kind, 0) + body)
    other.received(object)
    other.say(frames.Status(1))
    assert len(other.received(frames.Report)) == 1
