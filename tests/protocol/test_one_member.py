"""A call to one member reaches that member or ends with a clear error, through one relay and through two."""

from __future__ import annotations

import random

import pytest
from protocol.kit import OTHER_KEY, Host, Network, Service, control_of, kind_of

from iris.core.interfaces import Delivery
from iris.errors import ConnectionLost, NoMembers, Overloaded, RequestError
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.kinds import Kind, Refusal
from relay.core.link import SUSPENDED_US

RELAYS = pytest.mark.parametrize("relays", [1, 2])


def member_id(host: Host, service: Service) -> str:
    return f"{host.router.relay_id.hex()}.{service.member}"


def echo(delivery: Delivery) -> None:
    if delivery.flow.kind == Kind.PUSH:
        delivery.finish()
    else:
        delivery.reply(delivery.message.payload, None, False)


def cluster(relays: int, count: int = 3) -> tuple[Network, Host, list[Host], list[Service]]:
    """Return a network, a caller at the first relay, and members at the last one."""
    net = Network(relays=relays)
    if relays == 2:
        net.link(0, 1)
    caller = net.host("caller")
    hosts = [net.host(f"member {number}", relay=relays - 1) for number in range(count)]
    services = [host.serve("db", echo) for host in hosts]
    net.run()
    return net, caller, hosts, services


@RELAYS
def test_requests_pushes_and_tunnels_reach_the_member_that_is_named_and_no_other(
    relays: int,
) -> None:
    net, caller, hosts, services = cluster(relays)
    one = member_id(hosts[1], services[1])
    answers = [caller.request("db", b"%d" % number, member=one) for number in range(50)]
    caller.push("db", b"p", member=one)
    tunnel = caller.open_tunnel("db", member=one)
    net.run()
    assert [answer.value for answer in answers] == [b"%d" % number for number in range(50)]
    assert [len(service.deliveries) for service in services] == [0, 51, 0]
    assert [len(service.tunnels) for service in services] == [0, 1, 0]
    assert tunnel.open
    caller.session.tunnels.drop(tunnel)
    net.run()
    caller.request("db", b"any")
    net.run()
    assert sum(len(service.deliveries) for service in services) == 52
    net.check()


@RELAYS
def test_calls_to_each_member_do_not_mix(relays: int) -> None:
    net, caller, hosts, services = cluster(relays, 4)
    ids = [member_id(*pair) for pair in zip(hosts, services, strict=True)]
    chosen = random.Random(7).choices(range(4), k=200)
    for number in chosen:
        caller.request("db", b"%d" % number, member=ids[number])
        if number == 0:
            caller.request("db", b"any")
    net.run()
    for number, service in enumerate(services):
        said = {delivery.message.payload for delivery in service.deliveries}
        assert said - {b"any"} == {b"%d" % number}
    net.check()


@RELAYS
@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PUSH, Kind.TUNNEL_OPEN])
def test_a_call_to_a_member_that_has_left_says_so_and_has_not_run(relays: int, kind: Kind) -> None:
    net, caller, hosts, services = cluster(relays)
    gone = member_id(hosts[0], services[0])
    assert caller.request("db", member=gone) is not None
    net.run()
    hosts[0].lose()
    net.hosts.remove(hosts[0])
    net.run()
    error: object
    if kind == Kind.REQUEST:
        answer = caller.request("db", member=gone)
        net.run()
        error = answer.error
    elif kind == Kind.PUSH:
        caller.push("db", member=gone)
        net.run()
        error = caller.losses[0].error
    else:
        tunnel = caller.open_tunnel("db", member=gone)
        net.run()
        error = tunnel.error
    assert isinstance(error, NoMembers)
    assert f"member {gone} has left" in error.detail
    assert not error.may_have_run
    assert [len(service.deliveries) for service in services[1:]] == [0, 0]
    net.check()


@RELAYS
def test_what_the_member_refuses_is_not_offered_to_another(relays: int) -> None:
    net, caller, hosts, services = cluster(relays)
    one = member_id(hosts[0], services[0])
    services[0].refusal = Refusal.FULL
    many = [caller.request("db", member=one) for _ in range(5)]
    net.run()
    for answer in many:
        assert isinstance(answer.error, Overloaded)
        assert one in answer.error.detail
        assert not answer.error.may_have_run
    services[0].refusal = Refusal.LEAVING
    leaving = caller.request("db", member=one)
    net.run()
    assert isinstance(leaving.error, NoMembers)
    assert "has left" in leaving.error.detail
    assert [len(service.deliveries) for service in services] == [0, 0, 0]
    net.check()


def test_a_full_queue_of_the_member_is_said_to_be_full() -> None:
    net = Network()
    caller, slow, idle = net.host(), net.host("slow"), net.host("idle")
    service = slow.serve("db", concurrency=1, limit_bytes=2000)
    idle.serve("db", echo)
    answers = [caller.request("db", bytes(1500), member=member_id(slow, service)) for _ in range(3)]
    net.run()
    assert len(service.deliveries) == 1
    assert [type(answer.error) for answer in answers] == [type(None), Overloaded, Overloaded]
    assert "concurrency 1" in str(answers[1].error)
    service.deliveries[0].reply(b"done", None, False)
    net.run()
    assert answers[0].value == b"done"
    net.check()


@RELAYS
def test_a_member_is_asked_what_it_does_not_serve(
    relays: int,
) -> None:
    net = Network(relays=relays)
    if relays == 2:
        net.link(0, 1)
    caller, host = net.host("caller"), net.host("member", relay=relays - 1)
    service = host.serve("db", echo, only=[Kind.BROADCAST])
    net.run()
    one = member_id(host, service)
    answer = caller.request("db", b"who are you", member=one)
    caller.push("db", b"p", member=one)
    anybody = caller.request("db", b"anybody")
    net.run()
    assert answer.value == b"who are you"
    assert isinstance(anybody.error, NoMembers)
    assert anybody.error.detail == "no members serve requests; 1 member serves: broadcast"
    assert f"{one} does not serve pushes" in str(caller.losses[0].error)
    assert len(service.deliveries) == 1
    net.check()


def test_requests_that_a_member_does_not_serve_are_bounded_and_outlive_its_leave() -> None:
    net = Network()
    caller, host = net.host("caller"), net.host("member")
    service = host.serve("db", only=[Kind.BROADCAST])
    one = member_id(host, service)
    answers = [caller.request("db", bytes(400_000), member=one) for _ in range(4)]
    net.run()
    assert len(service.deliveries) == 2, "1 MiB of them"
    assert [type(answer.error) for answer in answers[2:]] == [Overloaded, Overloaded]
    host.session.control(frames.Leave(999, service.member))
    net.run()
    for delivery in service.deliveries:
        echo(delivery)
    net.run()
    assert answers[0].value == answers[1].value == bytes(400_000)
    assert not host.peer.members
    net.check()


def test_a_store_is_not_sent_requests() -> None:
    net = Network()
    caller, host = net.host("caller"), net.host("member")
    service = host.serve("db", only=[Kind.BROADCAST])
    member = host.peer.members[service.member]
    member.listed = False  # a member that only serves streams is a store
    answer = caller.request("db", member=member_id(host, service))
    net.run()
    assert isinstance(answer.error, NoMembers)
    member.listed = True


def test_the_name_the_key_and_the_relay_must_all_be_those_of_the_member() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    caller = net.host(keys=[OTHER_KEY])
    host, far = net.host("member"), net.host("far", relay=1)
    service, other = host.serve("db", echo), far.serve("db", echo)
    net.run()
    for wrong in (
        caller.request("db", member=member_id(host, service)),  # another key
        host.request("elsewhere", member=member_id(host, service)),
        host.request("db", member=f"{far.router.relay_id.hex()}.{service.member + 7}"),
        host.request("db", member=f"{'ab' * 16}.{service.member}"),
    ):
        net.run()
        assert isinstance(wrong.error, NoMembers), wrong.error
        assert "has left" in wrong.error.detail
    assert len(service.deliveries) == len(other.deliveries) == 0
    net.check()


def test_a_call_waits_for_the_relay_of_the_member_while_its_link_flaps() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    caller, far, near = net.host(), net.host("far", relay=1), net.host("near")
    service, other = far.serve("db", echo), near.serve("db", echo)
    net.run()
    one = member_id(far, service)
    net.cut(ends)
    waiting = caller.request("db", b"x", member=one, timeout_ms=2500)
    net.run()
    assert not waiting.done()
    net.link(0, 1)
    net.pass_time(0.2)
    assert waiting.value == b"x"
    assert len(other.deliveries) == 0
    net.check()


def test_a_call_ends_when_the_relay_of_the_member_does_not_come_back() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    caller, far = net.host(), net.host("far", relay=1)
    service = far.serve("db")
    net.run()
    one = member_id(far, service)
    running = caller.request("db", member=one, timeout_ms=60_000)
    net.run()
    net.cut(ends)
    assert isinstance(running.error, ConnectionLost)
    waiting = caller.request("db", member=one, timeout_ms=60_000)
    net.run()
    assert not waiting.done()
    net.pass_time(SUSPENDED_US / 1e6 + 0.2)
    assert isinstance(waiting.error, NoMembers)
    assert "no relay of this site has this id" in waiting.error.detail


def test_an_idempotent_call_is_sent_again_to_the_same_member_only() -> None:
    net, caller, hosts, services = cluster(1)
    one = member_id(hosts[0], services[0])
    services[0].handler = None
    answer = caller.request("db", b"x", member=one, idempotent=True)
    net.run()
    hosts[0].lose()
    net.hosts.remove(hosts[0])
    net.run()
    assert isinstance(answer.error, NoMembers)
    assert answer.error.may_have_run, "the first attempt may have"
    assert [len(service.deliveries) for service in services] == [1, 0, 0]


@pytest.mark.parametrize("kind", [Kind.SURVEY, Kind.BROADCAST, Kind.PUBLISH])
def test_only_calls_can_be_for_one_member(kind: Kind) -> None:
    net = Network()
    host = net.host()
    host.session.out.prove(host.key)
    declared = frames.Declare(
        9, kind, "db", host.key.key_id, bytes(16), member=1, relay=net.router.relay_id
    )
    host.session.control(declared)
    net.run()
    assert f"{kind.name} cannot be sent to one member" in host.ended_because


def test_a_member_of_another_site_cannot_be_named() -> None:
    net = Network()
    host = net.host()
    host.session.out.prove(host.key)
    declared = frames.Declare(
        9, Kind.REQUEST, "db", host.key.key_id, bytes(16), member=1, site="eu", relay=bytes(16)
    )
    host.session.control(declared)
    net.run()
    assert "another site" in host.ended_because


def test_a_link_carries_no_relay_in_its_declarations() -> None:
    net, caller, hosts, services = cluster(2)
    seen: list[frames.Declare] = []
    end = net.ends[0]
    tamper = end.tamper

    def see(frame: bytes) -> object:
        if kind_of(frame) == Kind.DECLARE:
            seen.append(control_of(frame))
        return tamper(frame)

    end.tamper = see  # type: ignore[assignment]
    caller.request("db", member=member_id(hosts[2], services[2]))
    caller.request("db")
    net.run()
    assert {declared.member for declared in seen} == {0, services[2].member}
    assert b"relay" not in b"".join(encode_control(declared) for declared in seen)


@pytest.mark.parametrize("seed", range(8))
def test_members_that_come_and_go_never_get_what_was_for_another(seed: int) -> None:
    rng = random.Random(seed)
    net = Network(relays=2, relay_seed=seed)
    ends = net.link(0, 1)
    caller = net.host("caller")
    alive: list[tuple[Host, Service]] = []
    known: list[str] = []
    answers = []
    for step in range(120):
        if len(alive) < 2 or rng.random() < 0.15:
            host = net.host("member", relay=rng.randrange(2))
            service = host.serve("db", rng.choice((echo, None)))
            alive.append((host, service))
            known.append(member_id(host, service))
        if len(alive) > 2 and rng.random() < 0.1:
            host, _ = alive.pop(rng.randrange(len(alive)))
            host.lose()
            net.hosts.remove(host)
        if rng.random() < 0.05:
            net.cut(ends)
            net.pass_time(rng.choice((0.1, 4.0)))
            ends = net.link(0, 1)
        one = rng.choice(known)
        answers.append(
            (caller.request("db", one.encode(), member=one, idempotent=step % 3 == 0), one)
        )
        if rng.random() < 0.7:
            net.run()
    net.pass_time(5.0)
    for host, service in alive:
        for delivery in service.deliveries:
            assert delivery.message.payload.decode() == member_id(host, service)
    for answer, one in answers:
        if answer.error is None:
            assert answer.value == one.encode()
        else:
            assert isinstance(answer.error, RequestError)
