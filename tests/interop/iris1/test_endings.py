"""The effects on clients when the relay ends, keys change, or the bridge stops."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest
from interop.iris1 import binding
from interop.iris1.binding import blob, hello, number
from interop.iris1.kit import Echo, bridged, collecting, until
from interop.iris1.offence import WELCOME, Mute, greeted, sleeper

import iris
from relay.bridges.iris1.connection import ClientConnection

pytestmark = pytest.mark.timeout(60)

HASTY = iris.ClientConfig(drain_timeout_s=0.2)
"""Configuration for clients whose handlers never end, for which a longer wait is useless."""


async def test_a_lost_relay_ends_calls_as_timeouts_and_comes_back_unnoticed() -> None:
    async with (
        bridged() as side,
        side.cluster.client(config=HASTY) as native_client,
        AsyncExitStack() as serving,
    ):
        echo = Echo()
        await side.register("echo", echo)
        await serving.enter_async_context(native_client.serve(sleeper("ours")))
        client = await side.connect()
        received: list[bytes] = []
        client.subscribe("topic", collecting(received))
        assert await client.request("echo", b"1", 5000) == b"1"
        line, near = await client.tunnel("ours", 5000), await client.tunnel("echo", 5000)
        await side.cluster.stop_relay()
        with pytest.raises(binding.TimedOut):
            await client.request("ours", b"2", 100)
        with pytest.raises(binding.Closed, match="relay"):
            await line.recv()
        await near.send(b"here")  # between programs of the bridge nothing is lost
        assert await near.recv() == b"here"
        assert await client.request("echo", b"2", 5000) == b"2"
        client.publish("topic", b"kept")
        with pytest.raises(binding.Denied, match="relay"):
            await binding.Binding().open(side.port)
        await side.cluster.start_relay()
        async with side.cluster.client() as native:
            await native.wait_for_members("echo", 1, timeout=10)
        assert await client.request("echo", b"3", 5000) == b"3"
        await until(lambda: received == [b"kept"])
        await client.close()
        assert any(cause.startswith("gaps of unknown length") for cause in side.counters)


async def test_events_that_wait_for_a_relay_when_their_client_closes_are_counted() -> None:
    async with bridged() as side:
        client = await side.connect()
        await side.cluster.stop_relay()
        for _ in range(3):
            client.publish("topic", b"x")
        await client.close()
        assert side.counters == {"lost on the way: the client was closed without a relay": 3}
        await side.cluster.start_relay()


async def test_a_changed_keyring_is_taken_up_by_every_client_and_who_cannot_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = iris.ClusterKey(b"o" * 32), iris.ClusterKey(b"n" * 32)
    keyring = iris.Keyring.single(old)
    async with bridged() as side, AsyncExitStack() as serving:
        side.bridge.connect = lambda label: side.cluster.client(keyring=keyring, config=HASTY)
        echo = Echo()
        service = await side.register("rq", echo)
        client = await side.connect()
        native_old = await serving.enter_async_context(
            side.cluster.client(keyring=keyring, config=HASTY)
        )
        await serving.enter_async_context(native_old.serve(sleeper("ours")))
        line, near = await client.tunnel("ours", 20_000), await client.tunnel("rq", 20_000)
        joining = await side.raw()
        joining.send(hello(b"rq"))
        await until(lambda: len(side.bridge._admitted) == 3)
        keyring = iris.Keyring.single(new)
        assert await side.bridge.reload_keys(keyring) == 0
        with pytest.raises(binding.Closed, match="ended the session"):
            await line.recv()
        await near.send(b"here")  # what stays in the bridge needs no key
        assert await near.recv() == b"here"
        assert await joining.read(len(WELCOME)) == WELCOME
        async with side.cluster.client(keyring=keyring) as native:
            assert len(await native.wait_for_members("rq", 2, timeout=20)) == 2
            await joining.hang_up()
            await until(lambda: len(side.bridge.connections) == 2)
            assert await native.request("rq", b"x", timeout=20) == b"x"
            assert await client.request("rq", b"y", 20_000) == b"y"
        elsewhere = iris.Keyring({"other": [new]})
        assert await side.bridge.reload_keys(elsewhere) == 1
        assert "bridge.keys_not_reloaded" in caplog.text
        await asyncio.gather(service.close(), client.close())


async def test_close_forgets_requests_and_refuses_tunnels_that_are_being_built() -> None:
    """As in the original: a timeout after CLOSE would be reported to a caller that has closed and does not wait."""
    async with bridged() as side:
        mute = Mute()
        await side.register("mute", mute)
        raw = await greeted(side)
        for id in range(3):
            raw.send(b"\x04" + number(id) + blob(b"mute") + blob(b"x") + number(250))
        await until(lambda: len(mute.received) == 3)
        raw.send(b"\x09\x07" + blob(b"nobody") + number(60_000) + b"\x02")
        assert await raw.rest() == b"\x0a\x07\x01" + b"\x02\x00"
        late = await greeted(side)
        late.send(b"\x04\x01" + blob(b"mute") + blob(b"x") + number(30) + b"\x02")
        assert await late.rest() == b"\x02\x00"
        assert not side.counters["requests unanswered: timeout"]


async def test_close_is_answered_at_once_while_the_bridge_stops() -> None:
    async with bridged(drain_s=60.0) as side:
        mute = Mute()
        await side.register("mute", mute)
        client = await side.connect()
        asked = asyncio.create_task(client.request("mute", b"x", 600_000))
        await until(lambda: mute.received)
        stopping = asyncio.create_task(side.bridge.stop())
        await until(lambda: all(c._ending for c in side.bridge.connections))
        await client.close()
        with pytest.raises(binding.Closed):
            await asked
        assert not stopping.done()
        for one in side.bridge.connections:
            one.give_up()
        await stopping


async def test_a_connection_that_is_accepted_while_the_bridge_stops_is_closed() -> None:
    async with bridged(handshake_s=600.0) as side:
        await (await side.connect()).close()
        await side.bridge.stop()
        late = ClientConnection(side.bridge)
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: late, ours)
            await until(lambda: not side.bridge.connections)
            assert theirs.recv(1) == b""


async def test_events_without_a_relay_beyond_the_bound_end_the_connection_with_the_reason() -> None:
    async with bridged(session={"offline_bytes": 10_000}) as side:
        client = await side.connect()
        await side.cluster.stop_relay()
        for _ in range(20):
            client.publish("topic", bytes(1000))
        async with asyncio.timeout(10):
            await client.ended.wait()
        assert client.closed
        assert "relay" in client.closed
        assert side.counters["refused"] == 1
        await side.cluster.start_relay()


async def test_a_relay_that_takes_no_more_stops_the_sender_and_nothing_is_lost() -> None:
    async with bridged(session={"write_high_bytes": 4096}) as side, side.cluster.client() as native:
        received: list[bytes] = []
        cast: list[bytes] = []
        service = iris.Service("bc")

        @service.on_broadcast
        def receive(message: bytes) -> None:
            cast.append(message)

        async with (
            native.serve(service),
            native.subscribe("t", lambda m: received.append(m.payload)),
        ):
            client = await side.connect()
            wanted = [b"%d" % turn + bytes(5000) for turn in range(600)]
            for message in wanted:
                client.publish("t", message)
                client.broadcast("bc", message)
            await client.close()
            await until(lambda: len(received) == len(cast) == len(wanted))
            assert received == cast == wanted


async def test_one_of_several_addresses_may_be_absent_and_all_of_them_not() -> None:
    absent = ("2001:db8::1", 0)
    async with bridged(listen=(absent, ("127.0.0.1", 0)), allow_remote=True) as side:
        await (await side.connect()).close()
    with pytest.raises(iris.ConfigError, match="does not have that address"):
        async with bridged(listen=(absent,), allow_remote=True):
            raise AssertionError
    with pytest.raises(iris.ConfigError, match="not a loopback address"):
        async with bridged(listen=(("0.0.0.0", 0),)):
            raise AssertionError


async def test_it_listens_on_both_loopback_addresses() -> None:
    async with bridged(listen=(("127.0.0.1", 0), ("::1", 0))) as side:
        for host, port in side.bridge.addresses:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(hello())
            assert await reader.readexactly(len(WELCOME)) == WELCOME
            writer.close()
            await writer.wait_closed()


async def test_stopping_finishes_what_was_accepted_and_says_why() -> None:
    release = asyncio.Event()

    class Waiting(Echo):
        async def request(self, request: bytes) -> bytes:
            self.received.append(request)
            await release.wait()
            return request

    async with bridged(drain_s=5.0) as side, side.cluster.client() as native:
        waiting = Waiting()
        service = await side.register("waiting", waiting)
        client = await side.connect()
        asked = asyncio.create_task(client.request("waiting", b"x", 60_000))
        ours = asyncio.create_task(native.request("waiting", b"y", timeout=60))
        await until(lambda: len(waiting.received) == 2)
        stopping = asyncio.create_task(side.bridge.stop())
        await until(lambda: all(c._ending for c in side.bridge.connections))
        with pytest.raises(binding.TimedOut):
            await client.request("waiting", b"new", 60_000)
        async with asyncio.timeout(5):
            async for members in native.watch_members("waiting"):
                if not members:
                    break
        release.set()
        assert await asked == b"x"
        assert await ours == b"y"
        await stopping
        await asyncio.gather(service.ended.wait(), client.ended.wait())
        assert service.closed == client.closed == "the bridge stopped"
        assert waiting.dropped == ["the bridge stopped"]
