"""Programs of the first Iris and native ones in one cluster: every pattern, in both directions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from interop.iris1 import binding
from interop.iris1.kit import Echo, Handler, Tunnel, bridged, collecting, until

import iris
from relay.bridges.iris1.core.names import cluster_name, topic_name

pytestmark = pytest.mark.timeout(60)


def native(name: str) -> tuple[iris.Service, list[bytes]]:
    """Return a native service whose answers contain its name, and the list of its events."""
    service = iris.Service(name)
    received: list[bytes] = []

    @service.on_request
    def answer(request: bytes) -> Any:
        match request:
            case b"fail":
                raise ValueError("no such thing")
            case b"nothing":
                return None
            case b"object":
                return {"a": 1}
            case b"text":
                return "größer"
        return b"native:" + request

    @service.on_broadcast
    def receive(message: bytes) -> None:
        received.append(message)

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            if message == b"break":
                raise ValueError("broken on purpose")
            await tunnel.send(b"native:" + message)

    return service, received


class Old(Echo):
    """A service of the first Iris whose answers say so."""

    async def request(self, request: bytes) -> bytes:
        if request == b"fail":
            raise binding.Remote("nö".encode())
        if request == b"nothing":
            return b""
        return b"old:" + request


async def test_a_request_reaches_members_of_both_kinds_from_callers_of_both_kinds() -> None:
    async with bridged() as side, side.cluster.client() as client:
        service, _ = native("mixed")
        async with client.serve(service):
            old = await side.register("mixed", Old())
            await client.wait_for_members("mixed", 2, timeout=5)
            pure = await side.connect()
            wanted = {b"native:x", b"old:x"}
            got: set[bytes] = set()
            while got != wanted:
                answers = (client.request("mixed", b"x", timeout=5) for _ in range(10))
                got |= set(await asyncio.gather(*answers))
            got = set()
            while got != wanted:
                answers = (pure.request("mixed", b"x", 5000) for _ in range(10))
                got |= set(await asyncio.gather(*answers))
            await old.close()
            await pure.close()


async def test_a_caller_of_the_first_iris_gets_what_a_service_of_ours_returns() -> None:
    async with (
        bridged() as side,
        side.cluster.client() as client,
        client.serve(native("ours")[0]),
    ):
        pure = await side.connect()
        assert await pure.request("ours", b"x", 1000) == b"native:x"
        assert await pure.request("ours", b"nothing", 1000) == b""
        assert await pure.request("ours", b"text", 1000) == "größer".encode()
        assert await pure.request("ours", b"object", 1000) == b"\x81\xa1a\x01"  # MessagePack
        with pytest.raises(binding.Remote) as raised:
            await pure.request("ours", b"fail", 1000)
        assert raised.value.text == b"ValueError: no such thing"


async def test_a_caller_of_ours_gets_what_a_service_of_the_first_iris_replies() -> None:
    async with bridged() as side, side.cluster.client() as client:
        await side.register("theirs", Old())
        assert await client.request("theirs", b"x", timeout=5) == b"old:x"
        assert await client.request("theirs", b"nothing", timeout=5) == b""
        with pytest.raises(iris.RemoteError) as raised:
            await client.request("theirs", b"fail", timeout=5)
        assert raised.value.detail == "nö"


async def test_a_caller_of_ours_may_say_its_timeout_and_the_service_judges_expiry() -> None:
    async with bridged() as side, side.cluster.client() as client:
        raw = await side.raw()
        raw.send(binding.hello(b"theirs"))
        await raw.read(30)
        headers = {"iris1-timeout-ms": "1234"}
        asked = asyncio.create_task(client.request("theirs", b"x", timeout=5, headers=headers))
        assert await raw.read(6) == b"\x04\x00\x01x" + binding.number(1234)
        raw.send(b"\x05\x00\x01\x01y")
        assert await asked == b"y"
        asked = asyncio.create_task(client.request("theirs", b"x", timeout=5))
        assert await raw.read(7) == b"\x04\x01\x01x" + binding.number(60_000)
        raw.send(b"\x05\x01\x01\x01z")
        assert await asked == b"z"


async def test_a_service_that_never_replies_costs_its_callers_their_timeout_and_nothing_stays() -> (
    None
):
    class Mute(Handler):
        async def request(self, request: bytes) -> bytes:
            raise asyncio.CancelledError

    async with bridged(native_timeout_s=0.05, grace_s=0.05) as side:
        await side.register("mute", Mute())
        # For its caller: on a busy machine the request would expire on its way, and the service not be asked.
        side.bridge.config = replace(side.bridge.config, grace_s=3.0)
        pure = await side.connect()
        with pytest.raises(binding.TimedOut):
            await pure.request("mute", b"x", 20)
        async with side.cluster.client() as client:
            with pytest.raises(iris.RemoteError, match="did not answer within"):
                await client.request("mute", b"x", timeout=5)
        await until(lambda: side.counters["services that did not answer"] == 2)


async def test_a_broadcast_reaches_members_of_both_kinds_from_senders_of_both_kinds() -> None:
    async with bridged() as side, side.cluster.client() as client:
        service, received = native("mixed")
        async with client.serve(service):
            old = Echo()
            await side.register("mixed", old)
            pure = await side.connect()
            pure.broadcast("mixed", b"1")
            await until(lambda: received == [b"1"] and old.received == [b"1"])
            await client.broadcast("mixed", b"2")
            await until(lambda: received == [b"1", b"2"] and old.received == [b"1", b"2"])


async def test_an_event_reaches_subscribers_of_both_kinds_from_publishers_of_both_kinds() -> None:
    async with bridged() as side, side.cluster.client() as client:
        ours: list[bytes] = []
        theirs: list[bytes] = []
        pure = await side.connect()
        pure.subscribe("news.eu", collecting(theirs))
        async with client.subscribe("news.>", lambda message: ours.append(message.payload)):
            await pure.settled()
            await side.cluster.settle()
            pure.publish("news.eu", b"1")
            await until(lambda: ours == [b"1"] and theirs == [b"1"])
            await client.publish("news.eu", b"2")
            await client.publish("news.us", b"3")
            await until(lambda: ours == [b"1", b"2", b"3"] and theirs == [b"1", b"2"])
            pure.unsubscribe("news.eu")
            await pure.settled()
            await side.cluster.settle()
            await client.publish("news.eu", b"4")
            await until(lambda: len(ours) == 4)
            await pure.settled()
            assert theirs == [b"1", b"2"]


async def test_events_of_one_publisher_arrive_in_order() -> None:
    async with bridged() as side:
        theirs: list[bytes] = []
        pure = await side.connect()
        pure.subscribe("news", collecting(theirs), binding.Limits(threads=1))
        wanted = [b"%d" % number for number in range(3000)]
        for event in wanted:  # right behind the subscription: none may be lost
            pure.publish("news", event)
        await until(lambda: len(theirs) == len(wanted))
        assert theirs == wanted


async def test_a_topic_that_looks_like_a_filter_is_one_topic() -> None:
    async with bridged() as side, side.cluster.client() as client:
        theirs: list[bytes] = []
        pure = await side.connect()
        for topic in ("a.*", ">", "two words"):
            pure.subscribe(topic, collecting(theirs))
        await pure.settled()
        await side.cluster.settle()
        await client.publish("a.b", b"not for it")
        for topic in ("a.*", ">", "two words"):
            pure.publish(topic, topic.encode())
        await until(lambda: len(theirs) == 3)
        assert sorted(theirs) == [b">", b"a.*", b"two words"]
        async with client.serve(native(cluster_name(b"db:1 x"))[0]):
            assert await pure.request("db:1 x", b"x", 1000) == b"native:x"
        assert topic_name(b"two words") == "two%20words"


async def test_tunnels_join_programs_of_both_kinds_in_both_directions() -> None:
    async with bridged() as side, side.cluster.client() as client:
        async with client.serve(native("ours")[0]):
            pure = await side.connect()
            line = await pure.tunnel("ours", 1000)
            for message in (b"x", bytes(3 << 20)):
                await line.send(message)
                assert await line.recv() == b"native:" + message
            await line.close()
        await side.register("theirs", Echo())
        async with client.tunnel("theirs", timeout=5) as tunnel:
            for message in (b"x", bytes(3 << 20)):
                await tunnel.send(message)
                assert await tunnel.recv() == message
        async with client.tunnel("theirs", timeout=5) as tunnel:
            await tunnel.send(b"last")
            assert await tunnel.recv() == b"last"
            await tunnel.finish()
            with pytest.raises(iris.EndOfTunnel):
                await tunnel.recv()


async def test_a_tunnel_that_breaks_on_our_side_is_closed_with_a_reason() -> None:
    async with (
        bridged() as side,
        side.cluster.client() as client,
        client.serve(native("ours")[0]),
    ):
        pure = await side.connect()
        line = await pure.tunnel("ours", 1000)
        await line.send(b"break")
        with pytest.raises(binding.Closed, match="broke"):
            await line.recv()


async def test_a_client_that_vanishes_breaks_its_tunnels_on_our_side() -> None:
    async with bridged() as side, side.cluster.client() as client:
        accepted: asyncio.Queue[Tunnel] = asyncio.Queue()

        class Accepting(Echo):
            async def tunnel(self, tunnel: Tunnel) -> None:
                await accepted.put(tunnel)

        old = await side.register("theirs", Accepting())
        async with client.tunnel("theirs", timeout=5) as tunnel:
            await accepted.get()
            old.abort()
            with pytest.raises(iris.TunnelBroken):
                await tunnel.recv()


async def test_what_was_sent_before_a_close_is_received_after_it() -> None:
    async with bridged() as side, side.cluster.client() as client:
        service = iris.Service("ours")
        got: list[bytes] = []
        ended = asyncio.Event()

        @service.on_tunnel
        async def collect(tunnel: iris.Tunnel) -> None:
            async for message in tunnel:
                got.append(message)
            ended.set()

        async with client.serve(service):
            pure = await side.connect()
            line = await pure.tunnel("ours", 1000)
            for number in range(20):
                await line.send(b"%d" % number * 50_000)
            await line.close()
            async with asyncio.timeout(10):
                await ended.wait()
        assert got == [b"%d" % number * 50_000 for number in range(20)]
