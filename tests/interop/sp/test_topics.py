"""PUB and SUB."""

from __future__ import annotations

import asyncio
import signal

import pynng
from interop.sp.kit import Bridge, World, eventually, nngcat


async def test_a_pub_program_publishes_to_the_topics_that_its_messages_name(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client, client.subscribe("legacy.>") as subscription:
        messages = aiter(subscription)
        cat = ["--pub", "--dial", bridge.url("sub"), "--data", "sensor.7|20 C|dry", "--delay", "1"]
        async with nngcat(*cat), asyncio.timeout(20):
            message = await anext(messages)
    assert (message.name, message.payload) == ("legacy.sensor.7", b"20 C|dry")


async def test_messages_without_a_topic_are_counted_and_harm_nobody(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client, client.subscribe("legacy.>") as subscription:
        with pynng.Pub0(dial=bridge.url("sub")) as socket:
            await eventually(lambda: socket.pipes)  # PUB sends to whom it knows
            before = bridge.status("sub")["losses"].get("malformed", 0)
            for bad in (b"", b"no separator", b"|empty", b"two words|x", b"\xff|x", b"a" * 300 + b"|x", b"a.*|x"):  # fmt: skip
                await socket.asend(bad)
            await socket.asend(b"good|x")
            async with asyncio.timeout(20):
                message = await anext(aiter(subscription))
        assert message.name == "legacy.good"
        await bridge.until_lost("sub", "malformed", before + 7)


async def test_an_entry_with_a_topic_publishes_whole_messages_of_its_prefixes(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client, client.subscribe("whole") as subscription:
        with pynng.Pub0(dial=bridge.url("sub-whole")) as socket:
            await eventually(lambda: socket.pipes)
            for data in (b"a|1", b"c|2", b"b"):
                await socket.asend(data)
            messages = aiter(subscription)
            async with asyncio.timeout(20):
                received = [(await anext(messages)).payload for _ in range(2)]
    assert received == [b"a|1", b"b"]


async def test_a_sub_program_selects_topics_by_prefix(world: World, bridge: Bridge) -> None:
    arguments = ["--sub", "--dial", bridge.url("pub"), "--quoted"]
    async with world.client() as client, nngcat(*arguments, "--subscribe", "sensor.") as some, nngcat(*arguments, "--subscribe", "sensor.7|") as exact:  # fmt: skip

        async def publish() -> None:
            while True:  # until both have connected: PUB tells nobody
                for topic, payload in (("alarm", "fire"), ("sensor.70", "1"), ("sensor.7", "2")):
                    await client.publish(f"legacy.{topic}", payload)
                await asyncio.sleep(0.05)

        publishing = asyncio.create_task(publish())
        received = {await some.line() for _ in range(4)}
        assert await exact.line() == "sensor.7|2"
        publishing.cancel()
    assert received == {"sensor.70|1", "sensor.7|2"}


async def test_a_bare_entry_sends_payloads_alone_in_order(world: World, bridge: Bridge) -> None:
    async with world.client() as client:
        with pynng.Sub0(
            dial=bridge.url("pub-bare"), topics="", recv_timeout=200, recv_buffer_size=1000
        ) as socket:
            while True:
                await client.publish("plain", b"begin")
                try:
                    assert await socket.arecv() == b"begin"
                    break
                except pynng.Timeout:
                    continue
            socket.recv_timeout = 20_000
            for number in range(300):
                await client.publish("plain", b"%d" % number)
            received = []
            while len(received) < 300:
                if (data := await socket.arecv()) != b"begin":
                    received.append(int(data))
    assert received == list(range(300))


async def test_a_publication_that_several_filters_select_is_sent_once(world: World) -> None:
    entry = f'[[socket]]\nprotocol = "pub"\nname = "over"\ntopics = ["many.*", "many.>", "many.a"]\nlisten = "{world.ipc("over")}"\n'
    bridge = Bridge(world, entry)
    async with world.client() as client:
        with pynng.Sub0(dial=bridge.url("over"), topics="many.", recv_timeout=20_000) as socket:
            await bridge.until_peers("over", 1)
            topics = ("many.a", "many.b", "many.a.b", "many.a")
            for topic in topics:
                await client.publish(topic, topic)
            received = [await socket.arecv() for _ in topics]
    assert sorted(received) == sorted(f"{topic} {topic}".encode() for topic in topics)
    assert await asyncio.to_thread(bridge.end) == 0
    assert bridge.events("bridge.status")[-1]["to_sp"] == 4


async def test_every_publication_is_sent_or_counted_once(world: World) -> None:
    entry = f'[[socket]]\nprotocol = "pub"\nname = "all"\ntopics = ["all"]\nlisten = "{world.ipc("all")}"\n'
    bridge = Bridge(world, entry)
    async with world.client() as client:
        bridge.process.send_signal(signal.SIGSTOP)
        for _ in range(100):
            await client.publish("all", bytes(900_000))
        await client.flush()
        bridge.process.send_signal(signal.SIGCONT)
        await client.publish("all", b"the next tells how many were lost")

        def counted() -> int:
            lost: dict[str, int] = bridge.status("all")["losses"]
            return sum(lost.values())

        await eventually(lambda: counted() >= 101)
    assert await asyncio.to_thread(bridge.end) == 0
    lost = bridge.events("bridge.status")[-1]["losses"]
    assert sum(lost.values()) == 101
    assert lost["no peer"] < 101, "the relay dropped none, so this proves nothing"


async def test_publications_without_an_sp_peer_are_counted(world: World, bridge: Bridge) -> None:
    async with world.client() as client:
        await eventually(lambda: not bridge.status("pub-bare")["peers"])
        await client.publish("plain", b"to nobody")
        await bridge.until_lost("pub-bare", "no peer")


async def test_what_iris_publishes_may_not_pass_for_another_topic(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client:
        await client.publish("legacy.a|b", b"x")
        await bridge.until_lost("pub", "malformed")
