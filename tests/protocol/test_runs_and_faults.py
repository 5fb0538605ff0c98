"""A fault in one call only affects that call: the others of its run, and the session, continue."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from protocol.kit import KEY, Host, Network

from iris.core import outbound
from iris.core.interfaces import Delivery
from iris.crypto import sframe
from iris.errors import LocalProtocolError
from iris.wire.kinds import Kind
from relay.core.limits import Limits


def echo(delivery: Delivery) -> None:
    delivery.reply(b"re " + delivery.message.payload, None, False)


def fails(host: Host, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the host's next seals fail; return the function that ends this."""
    sealer = host.session.out.flow(kind, "db", KEY).sealer
    good = sealer._encrypt

    def bad(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(sealer, "_encrypt", bad)
    return lambda: monkeypatch.setattr(sealer, "_encrypt", good)


def in_another_thread(function: Callable[[], object]) -> list[Exception]:
    caught: list[Exception] = []

    def body() -> None:
        try:
            function()
        except Exception as err:
            caught.append(err)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return caught


def test_a_call_that_cannot_be_sealed_leaves_nothing(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)
    heal = fails(caller, Kind.REQUEST, monkeypatch)
    with pytest.raises(MemoryError):
        caller.request("db", b"lost")
    heal()
    net.run()
    assert caller.ended_because == ""
    result = caller.request("db", b"y")
    net.run()
    assert result.value == b"re y"


def test_an_answer_that_cannot_be_sealed_costs_no_other(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db")
    results = [caller.request("db", b"%d" % n) for n in range(3)]
    net.run()
    first, second, third = service.deliveries
    echo(first)
    heal = fails(member, Kind.REPLY, monkeypatch)
    with pytest.raises(MemoryError):
        echo(second)
    heal()
    echo(third)
    net.run()
    assert [results[0].value, results[2].value] == [b"re 0", b"re 2"]
    echo(second)
    net.run()
    assert results[1].value == b"re 1"


def test_a_call_from_another_thread_fails_alone(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)
    first = caller.request("db", b"1")
    net.run()
    assert first.value == b"re 1"
    (error,) = in_another_thread(lambda: caller.request("db", b"2"))
    assert isinstance(error, LocalProtocolError)
    net.run()
    assert caller.ended_because == ""


def test_an_answer_from_another_thread_fails_alone(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db")
    results = [caller.request("db", b"%d" % n) for n in range(4)]
    net.run()
    echo(service.deliveries[0])
    net.run()
    echo(service.deliveries[1])
    (error,) = in_another_thread(lambda: echo(service.deliveries[2]))
    assert isinstance(error, LocalProtocolError)
    echo(service.deliveries[3])
    net.run()
    assert [results[n].value for n in (0, 1, 3)] == [b"re 0", b"re 1", b"re 3"]
    echo(service.deliveries[2])
    net.run()


@pytest.mark.parametrize("aliases", [1, 4, 8, 32, 64])
def test_runs_of_more_addresses_than_there_are_aliases_find_theirs_one_after_the_other(
    aliases: int,
) -> None:
    net = Network(limits=Limits(aliases=aliases))
    caller = net.host("caller")
    for n in range(40):
        net.host(f"m{n}").serve(f"db{n}", echo)
    results = [caller.request(f"db{n}", b"x") for n in range(1, 40)]
    results += [caller.request("db0", b"x") for _ in range(40)]
    net.run()
    results += [caller.request(f"db{n}", b"x") for n in range(40)]
    net.run()
    assert all(result.value == b"re x" for result in results)
    net.check()


def test_a_survey_beside_runs_finds_an_alias_among_few() -> None:
    net = Network(limits=Limits(aliases=2))
    caller, member = net.host("caller"), net.host("member")
    for n in range(4):
        member.serve(f"db{n}", echo)
    results = [caller.request(f"db{n}", b"x") for n in range(1, 4)]
    answers = caller.survey("db0", b"s")
    net.run()
    results += [caller.request(f"db{n}", b"x") for n in range(1, 4)]
    net.run()
    assert all(result.value == b"re x" for result in results)
    assert answers.payloads == [b"re s"]
    net.check()


def test_runs_of_many_addresses_do_not_pass_the_last_counter_of_their_sender(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = 1 << 16
    monkeypatch.setattr(outbound, "SEALS_PER_SENDER", last)
    monkeypatch.setattr(sframe, "SEALS_PER_SENDER", last)
    caller, member = net.host("caller"), net.host("member")
    for n in range(40):
        member.serve(f"db{n}", echo)
    sealer, _ = caller.session.out._sealer(KEY, "")
    while sealer.counter < last - 300:
        sealer.seal(b"", b"")
    results = [caller.request(f"db{n}", b"x") for _ in range(15) for n in range(40)]
    net.run()
    assert all(result.value == b"re x" for result in results)
