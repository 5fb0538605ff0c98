"""Messages between programs of one bridge: once, in order and within the limits, whatever other programs there are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from interop.iris1 import binding
from interop.iris1.binding import Tunnel, blob, number
from interop.iris1.kit import Echo, Side, bridged, collecting, until
from interop.iris1.offence import Mute, connection, greeted

import iris
from iris.core.local_senders import MAX_RETIRED, LocalSenders
from iris.wire.kinds import Kind
from relay.bridges.iris1.bridge import Bridge
from relay.bridges.iris1.local import SHARED_BYTES, SHARED_REQUESTS
from relay.bridges.iris1.local_tunnel import AHEAD_BYTES, LocalTunnelEnd, local_tunnel

pytestmark = pytest.mark.timeout(60)


class Naming(Echo):
    """Answers requests with its name."""

    def __init__(self, name: bytes) -> None:
        super().__init__()
        self.name = name

    async def request(self, request: bytes) -> bytes:
        self.received.append(request)
        return self.name


def native(name: str, received: list[bytes]) -> iris.Service:
    service = iris.Service(name)

    @service.on_request
    async def answer(request: bytes) -> bytes:
        received.append(request)
        return b"native"

    @service.on_broadcast
    def receive(message: bytes) -> None:
        received.append(message)

    return service


async def members_known(side: Side, cluster: str, count: int) -> None:
    """Return when the bridge knows `count` members of a cluster."""
    await until(lambda: side.bridge.local._groups[cluster].total == count)


# -- events and broadcasts ---------------------------------------------------------------------------------------------


async def test_casts_arrive_once_and_in_order_at_programs_of_both_kinds() -> None:
    async with bridged() as side, side.cluster.client() as client:
        theirs: list[list[bytes]] = [[], []]
        ours: list[bytes] = []
        echoes = [Echo(), Echo()]
        services = [await side.register("cl", echo) for echo in echoes]
        for service, received in zip(services, theirs, strict=True):
            service.subscribe("topic", collecting(received))
        sender = await side.connect()
        async with (
            client.serve(native("cl", ours)),
            client.subscribe("topic", lambda message: ours.append(message.payload)),
        ):
            wanted = [b"%d" % turn for turn in range(600)]
            for turn, message in enumerate(wanted):
                if turn % 3:
                    sender.publish("topic", message)
                else:
                    sender.broadcast("cl", message)
                if turn % 100 == 99:
                    await sender.settled()
            await until(lambda: len(ours) == 600)
            await side.cluster.settle()
            await asyncio.gather(*(one.settled() for one in (*services, sender)))
            casts = [m for turn, m in enumerate(wanted) if not turn % 3]
            events = [m for turn, m in enumerate(wanted) if turn % 3]
            assert [m for m in ours if int(m) % 3] == events
            assert [m for m in ours if not int(m) % 3] == casts
            assert theirs == [events, events]
            assert [echo.received for echo in echoes] == [casts, casts]
            await client.publish("topic", b"from ours")
            await client.broadcast("cl", b"from ours")
            await until(
                lambda: all(h[-1] == b"from ours" for h in [*theirs, *(e.received for e in echoes)])
            )
        assert set(side.counters) == {"requests unanswered: no members"}  # of `settled`


async def test_casts_between_two_bridges_of_a_relay_arrive_once() -> None:
    async with bridged() as side:
        other = Bridge(side.bridge.config, side.bridge.connect)
        await other.start()
        port = other.addresses[0][1]
        try:
            received: dict[str, list[bytes]] = {"here": [], "there": []}
            here = await side.connect()
            there = await binding.Binding().open(port)
            here.subscribe("topic", collecting(received["here"]))
            there.subscribe("topic", collecting(received["there"]))
            await asyncio.gather(here.settled(), there.settled())
            for turn in range(100):
                here.publish("topic", b"h%d" % turn)
                there.publish("topic", b"t%d" % turn)
            await until(lambda: all(len(got) >= 200 for got in received.values()))
            await asyncio.gather(here.settled(), there.settled())
            await side.cluster.settle()
            for got in received.values():
                assert [m for m in got if m[:1] == b"h"] == [b"h%d" % turn for turn in range(100)]
                assert [m for m in got if m[:1] == b"t"] == [b"t%d" % turn for turn in range(100)]
            await there.close()
        finally:
            await other.stop()


async def test_events_arrive_once_while_sessions_change() -> None:
    """Lost relays and changed keys give every program a new session, with a new sender id."""
    key = iris.ClusterKey(b"k" * 32)
    async with bridged() as side:
        config = iris.ClientConfig(drain_timeout_s=0.2, reconnect_min_s=0.005, reconnect_max_s=0.02)
        keyring = iris.Keyring.single(key)
        side.bridge.connect = lambda label: side.cluster.client(keyring=keyring, config=config)
        received: list[bytes] = []
        one, two = await side.connect(), await side.connect()
        one.subscribe("topic", collecting(received))
        said: list[bytes] = []

        def say(count: int) -> None:
            for _ in range(count):
                said.append(b"%d" % len(said))
                two.publish("topic", said[-1])

        say(50)
        await two.settled()
        reloading = asyncio.create_task(side.bridge.reload_keys(iris.Keyring.single(key)))
        while not reloading.done():
            say(5)
            await asyncio.sleep(0)
        assert await reloading == 0
        await side.cluster.stop_relay()
        say(50)
        await side.cluster.start_relay()
        await asyncio.wait_for(two.settled(), 10)
        say(50)
        await until(lambda: len(received) >= len(said))
        await side.cluster.settle()
        await one.settled()
        assert received == said
        assert not side.counters["lost on the way: missing on the way"]


async def test_losses_of_copies_that_were_delivered_here_are_not_reported() -> None:
    async with bridged() as side:
        client = await side.connect()
        client.subscribe("topic", collecting([]))
        client.publish("topic", b"x")
        await client.settled()
        (ours_there,) = side.bridge.connections
        assert ours_there.client is not None
        session = ours_there.client._attached().session
        assert session is not None
        (sender_id, *_) = side.bridge.local.local_senders._ids
        ours = ours_there.client.keyring.for_topic("topic")[0]
        gap = iris.wire.frames.Gap(
            Kind.PUBLISH, "topic", ours.key_id, sender_id, 0, 3, "slow receiver"
        )
        session.casts.gap(gap)
        assert set(side.counters) == {"requests unanswered: no members"}  # of `settled`
        assert not session.dropped.get("lost")
        await client.close()


def test_a_company_forgets_members_that_left_but_not_those_that_stay() -> None:
    local_senders = LocalSenders()
    local_senders.add(b"here")
    for turn in range(MAX_RETIRED + 10):
        local_senders.add(b"%d" % turn)
        local_senders.retire([b"%d" % turn])
    assert b"here" in local_senders
    assert b"9" not in local_senders
    assert b"10" in local_senders
    assert len(local_senders._ids) == MAX_RETIRED + 1


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_members_here_are_preferred_and_share_among_themselves() -> None:
    async with bridged() as side, side.cluster.client() as client:
        ours: list[bytes] = []
        echoes = [Naming(b"%d" % turn) for turn in range(3)]
        for echo in echoes:
            await side.register("cl", echo)
        async with client.serve(native("cl", ours)):
            caller = await side.connect()
            for _ in range(30):
                await caller.request("cl", b"x", 5000)
            assert [len(echo.received) for echo in echoes] == [10, 10, 10]
            assert not ours
            assert await client.request(
                "cl", b"x", timeout=5
            )  # who is not of the bridge is not affected


async def test_members_elsewhere_get_their_share_when_those_here_are_full() -> None:
    async with bridged() as side, side.cluster.client() as client:
        ours: list[bytes] = []
        mute = Mute()
        await side.register("cl", mute)
        caller = await side.connect()
        async with client.serve(native("cl", ours)):
            await members_known(side, "cl", 2)
            asked = [asyncio.create_task(caller.request("cl", b"x", 60_000)) for _ in range(100)]
            await until(
                lambda: (
                    sum(one.machine.dispatched for one in side.bridge.connections) + len(ours)
                    == 100
                )
            )
            await until(lambda: sum(task.done() for task in asked) == len(ours))
            assert (
                len(ours) >= (100 - SHARED_REQUESTS) // 4
            )  # of what the relay was asked, it gives each the same
            assert len(mute.received) >= SHARED_REQUESTS
            assert all(task.result() == b"native" for task in asked if task.done())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_member_that_is_alone_gets_all_requests_up_to_its_bound() -> None:
    async with bridged(max_calls=50) as side:
        mute = Mute()
        await side.register("cl", mute)
        await members_known(side, "cl", 1)
        callers = [await side.connect(), await side.connect()]
        asked = [
            asyncio.create_task(caller.request("cl", b"x", 60_000))
            for caller in callers
            for _ in range(30)
        ]
        await until(lambda: sum(task.done() for task in asked) == 10)
        assert len(mute.received) <= 50
        assert side.counters["requests over the bound"] >= 1
        for task in asked:
            if task.done():
                assert isinstance(task.exception(), binding.TimedOut)
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_requests_of_many_bytes_do_not_cut_a_member_that_is_slow() -> None:
    """Beyond a limit in bytes the relay holds requests; all are answered in the end."""
    async with bridged(queue_bytes=24 << 20) as side:
        service = await greeted(side, b"cl")
        await members_known(side, "cl", 1)
        callers = [await side.connect() for _ in range(5)]
        service.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport
        asked = [
            asyncio.create_task(caller.request("cl", bytes(1 << 20), 60_000))
            for caller in callers
            for _ in range(4)
        ]
        theirs = connection(side, service)
        await until(lambda: theirs.local_request_bytes == 16 << 20)
        await until(lambda: theirs.machine.dispatched == len(asked))
        assert theirs.local_request_bytes == SHARED_BYTES
        service.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answers = b"".join(b"\x05" + number(id) + b"\x01\x01y" for id in range(len(asked)))
        service.send(answers)
        assert await asyncio.gather(*asked) == [b"y"] * len(asked)
        assert theirs.local_request_bytes == 0
        assert not side.counters["slow clients cut"]


async def test_a_fault_of_the_bridge_ends_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bridged() as side:
        one, other = await greeted(side), await greeted(side)

        def broken(**_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(connection(side, one), "process", broken)
        one.send(b"\x08\x01t\x01x")
        other.send(b"\x06\x01t\x08\x01t\x01x")
        assert await other.read(5) == b"\x08\x01t\x01x"
        assert await one.rest() == b""
        assert side.counters["faults of the bridge"]
        assert "bridge.fault" in caplog.text


async def test_a_late_reply_is_nobodys_though_the_callers_id_is_in_use_again() -> None:
    async with bridged(grace_s=20.0) as side:
        service, caller = await greeted(side, b"cl"), await greeted(side)
        ask = b"\x04\x07" + blob(b"cl") + blob(b"x")
        caller.send(ask + number(20))
        assert await service.read(5) == b"\x04\x00\x01x" + number(20)
        assert await caller.read(3) == b"\x05\x07\x01"
        caller.send(ask + number(5000))
        assert await service.read(6) == b"\x04\x01\x01x" + number(5000)
        service.send(b"\x05\x00\x01\x04late" + b"\x05\x01\x01\x06second")
        assert await caller.read(11) == b"\x05\x07\x00\x01\x06second"
        service.send(b"\x05\x00\x01\x05again")
        await until(lambda: side.counters["late replies"])
        assert side.counters["requests unanswered: timeout"] == 1


async def test_a_service_that_never_answers_is_counted_and_owes_nothing_after() -> None:
    async with bridged(grace_s=0.02) as side:
        service, caller = await greeted(side, b"cl"), await greeted(side)
        caller.send(b"\x04\x07" + blob(b"cl") + blob(b"x") + number(20))
        assert await caller.read(3) == b"\x05\x07\x01"
        await until(lambda: side.counters["services that did not answer"])
        assert not any(
            one.machine.dispatched or one.machine.pending for one in side.bridge.connections
        )
        service.send(b"\x05\x00\x01\x04late")
        await until(lambda: side.counters["late replies"])


@pytest.mark.parametrize("ending", [b"\x02", b"\xff", b""])
async def test_a_service_that_goes_ends_what_it_owes_at_once(ending: bytes) -> None:
    async with bridged() as side:
        service, caller = await greeted(side, b"cl"), await greeted(side)
        caller.send(b"\x04\x07" + blob(b"cl") + blob(b"x") + number(60_000))
        await service.read(7)
        if ending:
            service.send(ending)
        else:
            service.writer.transport.abort()
        assert await caller.read(3) == b"\x05\x07\x01"
        caller.send(b"\x04\x08" + blob(b"cl") + blob(b"x") + number(60_000))
        assert await caller.read(3) == b"\x05\x08\x01"  # it is a member no more


async def test_a_caller_that_goes_leaves_nothing() -> None:
    async with bridged() as side:
        service, caller = await greeted(side, b"cl"), await greeted(side)
        caller.send(b"\x04\x07" + blob(b"cl") + blob(b"x") + number(60_000))
        await service.read(7)
        caller.send(b"\x02")
        assert await caller.rest() == b"\x02\x00"
        service.send(b"\x05\x00\x01\x04late")
        await until(lambda: not any(one.machine.dispatched for one in side.bridge.connections))


async def test_an_oversized_reply_is_a_fault() -> None:
    async with bridged() as side:
        service, caller = await greeted(side, b"cl"), await side.connect()
        asked = asyncio.create_task(caller.request("cl", b"x", 20_000))
        await service.read(7)
        service.send(b"\x05\x00\x01" + blob(bytes(5 << 20)))
        with pytest.raises(binding.Remote, match="over the limit"):
            await asked
        assert side.counters["oversized"] == 1


# -- tunnels -----------------------------------------------------------------------------------------------------------


class Accepting(Echo):
    """Accepts tunnels and does not use them."""

    def __init__(self) -> None:
        super().__init__()
        self.tunnels: asyncio.Queue[Tunnel] = asyncio.Queue()

    async def tunnel(self, tunnel: Tunnel) -> None:
        await self.tunnels.put(tunnel)


async def test_messages_of_all_sizes_arrive_in_order_and_a_slow_reader_sets_the_pace() -> None:
    async with bridged(tunnel_bytes=8 << 20) as side:
        accepting = Accepting()
        await side.register("tn", accepting)
        client = await side.connect()
        ours, theirs = await client.tunnel("tn", 5000), await accepting.tunnels.get()
        sizes = [1, 65_536, 65_537, AHEAD_BYTES + 1, 3 << 20, 2, 1 << 20, 7] * 3
        messages = [bytes([turn]) * size for turn, size in enumerate(sizes)]

        async def send() -> None:
            for message in messages:
                await ours.send(message)

        sending = asyncio.create_task(send())
        for message in messages:
            assert await theirs.recv() == message
        await sending
        await ours.close()
        with pytest.raises(binding.Closed):
            await theirs.recv()
        await until(
            lambda: all(
                one.machine.outgoing.held == one.machine._incoming.held == 0
                for one in side.bridge.connections
            )
        )


async def test_what_was_sent_before_the_close_arrives() -> None:
    async with bridged() as side:
        accepting = Accepting()
        await side.register("tn", accepting)
        client = await side.connect()
        for size in (1, 300_000):
            ours, theirs = await client.tunnel("tn", 5000), await accepting.tunnels.get()
            for turn in range(20):
                await ours.send(bytes([turn]) * size)
            closing = asyncio.create_task(ours.close())
            got = [(await theirs.recv())[0] for _ in range(20)]
            assert got == list(range(20))
            await closing


async def test_a_program_that_is_lost_breaks_its_tunnels_for_the_other_end() -> None:
    async with bridged() as side:
        accepting = Accepting()
        service = await side.register("tn", accepting)
        client = await side.connect()
        ours = await client.tunnel("tn", 5000)
        await accepting.tunnels.get()
        service.abort()
        with pytest.raises(binding.Closed, match="disconnected"):
            await ours.recv()


async def test_tunnels_over_the_members_bound_are_refused() -> None:
    async with bridged(max_tunnels=2) as side:
        await side.register("tn", Accepting())
        clients = [await side.connect() for _ in range(3)]
        for client in clients[:2]:
            await client.tunnel("tn", 5000)
        line = await clients[2].tunnel("tn", 2000)  # open, as far as the relay knows
        with pytest.raises(binding.Closed, match="broke it"):
            await line.recv()


async def test_ends_of_a_tunnel_behave_as_those_of_any_tunnel() -> None:
    async def message(end: LocalTunnelEnd) -> bytes:
        return b"".join([part async for part in end.recv_chunks()])

    one, two = local_tunnel("tn")
    await one.send(b"a")
    long = asyncio.create_task(one.send(bytes(AHEAD_BYTES + 1)))
    await asyncio.sleep(0)
    assert not long.done()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    await one.send(b"b")
    assert await message(two) == b"a"
    assert await message(two) == b"b"  # what was given up on the way is not there
    long = asyncio.create_task(one.send(bytes(AHEAD_BYTES + 1)))
    await asyncio.sleep(0)
    await two.close()
    for sending in (long, one.send(b"c")):
        with pytest.raises(iris.Closed):
            await sending
    with pytest.raises(iris.EndOfTunnel):
        await message(one)
    one, two = local_tunnel("tn")
    waiting = asyncio.create_task(message(two))
    await asyncio.sleep(0)
    one.fail("enough")
    broken: list[Any] = [waiting, one.send(b"x"), two.send(b"x"), message(one)]
    for each in broken:
        with pytest.raises(iris.TunnelBroken, match="enough"):
            await each
