"""A relay advertises a store that is starting; calls of streams wait, at both relays, until it lists its streams."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, Host, Network, Result, kind_of

from iris.errors import NoMembers, RequestTimeout
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import Serving
from iris.wire.kinds import NO_KEY, STORES, Kind
from relay.core.quotas import RELAYS_STORE
from relay.core.stores import BACK_US, HUNG_LOOKS

SERVING = {int(Kind.STREAM): Serving(16, 1 << 20)}


def call(host: Host, name: str = "orders", timeout_ms: int = 60_000) -> Result:
    """Make a call to a stream, which is not answered here."""
    result = Result()
    host.session.turn(host.net.now_us, host.mono_us)
    host.session.out.prove(KEY)
    host.session.store_calls.plain(
        name, KEY, b"?", timeout_ms=timeout_ms, waiter=result, shown=name
    )  # type: ignore[arg-type]  # as a session's own waiter
    host.net.run()
    return result


def join(host: Host, name: str, key_id: bytes) -> None:
    """Serve streams, as a store does."""
    host.session.out.prove(KEY)
    host.session.ask(lambda number: frames.Join(number, name, [key_id], SERVING), Result())


def up(host: Host) -> None:
    """Register as a store with the stream `orders`."""
    join(host, STORES, NO_KEY)
    join(host, "orders", KEY.key_id)
    host.net.run()


@pytest.mark.parametrize("relay", [0, 1])
def test_a_call_waits_for_a_store_that_is_started_wherever_it_comes_from(relay: int) -> None:
    net = Network(relays=2)
    net.link(0, 1)
    net.router.stores.starts_one(net.router.now_us)
    net.run()
    caller = net.host("caller", relay=relay)
    waiting, vain = call(caller), call(caller, "nothing")
    assert not waiting.done()
    assert len(net.routers[relay].mesh.starting_stores()) == 1
    store = net.host("store", user=RELAYS_STORE)
    net.tamper = lambda host, frame: () if kind_of(frame) == Kind.STREAM else (frame,)
    up(store)
    assert not waiting.done()
    assert len(store.peer.in_flight) == 1, "it was handed over"
    with pytest.raises(NoMembers):
        _ = vain.value
    assert not net.routers[relay].mesh.starting_stores()


def test_streams_are_waited_for_and_nothing_else_is() -> None:
    net = Network()
    net.router.stores.starts_one(net.router.now_us)
    answer = net.host("caller").request("orders")
    net.run()
    with pytest.raises(NoMembers):
        _ = answer.value


def test_a_call_that_waits_in_vain_says_what_for() -> None:
    net = Network()
    net.router.stores.starts_one(net.router.now_us)
    waiting = call(net.host("caller"), timeout_ms=500)
    net.pass_time(1)
    with pytest.raises(RequestTimeout, match="a store is still starting"):
        _ = waiting.value


@pytest.mark.parametrize("ours", [True, False])
def test_a_store_that_was_lost_is_waited_for(ours: bool) -> None:
    """The relay waits for its own store until it returns, and for another one for a limited time."""
    net = Network(relays=2)
    net.link(0, 1)
    store = net.host("store", user=RELAYS_STORE if ours else "uid 7")
    if ours:
        net.router.stores.starts_one(net.router.now_us)
    up(store)
    caller = net.host("caller", relay=1)
    store.lose()
    net.run()
    waiting = call(caller)
    assert not waiting.done()
    net.pass_time(BACK_US / 1e6 + 0.1)
    assert waiting.done() is not ours


def test_a_relay_that_stops_waits_for_no_store() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    net.router.stores.starts_one(net.router.now_us)
    net.run()
    waiting = call(net.host("caller", relay=1))
    assert not waiting.done()
    net.router.drain(10_000)
    net.run()
    with pytest.raises(NoMembers):
        _ = waiting.value


def asks(store: Host) -> None:
    """Ask for the other stores, as a store of a bucket does all the time."""
    store.say(encode_control(frames.Members(1, STORES, [NO_KEY], False, True, False)))
    store.net.run()


def test_a_store_of_a_bucket_that_hangs_is_given_up_and_one_that_asks_is_not() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    hangs, runs, disk = (net.host(name, user=f"uid {n}") for n, name in enumerate(("hangs", "runs", "disk")))  # fmt: skip
    for store in (hangs, runs, disk):
        up(store)
    asks(hangs)
    for _ in range(2 * HUNG_LOOKS):
        asks(runs)
        net.pass_time(0.49)
    assert not hangs.peer.closed
    for _ in range(6):
        asks(runs)
        net.pass_time(0.49)
    assert hangs.peer.closed
    assert not runs.peer.closed
    assert not disk.peer.closed  # nobody would take over from it
    assert len([*net.routers[1].mesh.infos(STORES, [NO_KEY], streams=True)]) == 2


def test_a_relay_that_was_asleep_does_not_take_its_stores_for_hung() -> None:
    net = Network()
    store = net.host("store", user=RELAYS_STORE)
    up(store)
    asks(store)
    net.pass_time(3600)
    assert not store.peer.closed
    net.router.drain(10_000)
    for _ in range(2 * HUNG_LOOKS):
        net.pass_time(1)
    assert not store.peer.closed  # it is waited for as long as the drain says
