"""A subscription gets all events that programs of the bridge publish after it, however busy the host is."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interop.iris1 import binding
from interop.iris1.binding import blob
from interop.iris1.kit import bridged, collecting, until
from interop.iris1.offence import connection, greeted
from interop.iris1.test_process import Process
from support.relays import Daemon
from support.waiting import wait_until

import iris

pytestmark = pytest.mark.timeout(60)

TOPICS = [f"topic-{number}" for number in range(7)]
SUBSCRIBES = b"".join(b"\x06" + blob(topic.encode()) for topic in TOPICS)
PUBLISHES = b"".join(b"\x08" + blob(topic.encode()) + blob(b"event") for topic in TOPICS)
DELIVERED = PUBLISHES
"""The operation code of a delivered event equals that of a published one, so the frames are equal."""
BUSY = "while True: pass"


@pytest.mark.parametrize("publishes_first", [False, True])
async def test_what_is_said_after_a_subscription_comes_after_it(publishes_first: bool) -> None:
    """The bridge reads both sockets in one turn, in either order: the last of seven topics misses nothing."""
    async with bridged() as side:
        ends = [await greeted(side), await greeted(side)]
        if publishes_first:
            ends.reverse()
        subscriber, publisher = ends
        for _ in range(5):
            await side.cluster.settle()
            publisher.send(b"\x08\x07nothing\x01x" if publishes_first else b"")
            subscriber.send(SUBSCRIBES)
            publisher.send(PUBLISHES)
            assert await subscriber.read(len(DELIVERED)) == DELIVERED
            subscriber.send(SUBSCRIBES.replace(b"\x06\x07", b"\x07\x07"))
            await until(lambda: not connection(side, subscriber)._topics)


async def test_what_is_said_after_many_subscriptions_comes_after_all_of_them() -> None:
    """They take many turns, between which another program has its turns."""
    async with bridged() as side:
        subscriber, publisher = await greeted(side), await greeted(side)
        subscriber.send(b"".join(b"\x06" + blob(b"t%d" % turn) for turn in range(300)))
        publisher.send(b"\x08" + blob(b"t299") + blob(b"event"))
        wanted = b"\x08" + blob(b"t299") + blob(b"event")
        assert await subscriber.read(len(wanted)) == wanted


async def test_a_service_of_ours_that_is_asked_after_a_subscription_publishes_to_it() -> None:
    """The relay knows the subscription before it routes another program's request."""
    async with bridged() as side, side.cluster.client() as native:
        service = iris.Service("ours")

        @service.on_request
        async def publishes(request: bytes) -> bytes:
            await native.publish(TOPICS[-1], b"event")
            return request

        wanted = b"\x08" + blob(TOPICS[-1].encode()) + blob(b"event")
        async with native.serve(service):
            subscriber, caller = await greeted(side), await greeted(side)
            await side.cluster.settle()
            subscriber.send(SUBSCRIBES)
            caller.send(b"\x04\x00" + blob(b"ours") + blob(b"x") + b"\x88\x27")
            assert await caller.read(6) == b"\x05\x00\x00\x01\x01x"
            assert await subscriber.read(len(wanted)) == wanted


async def test_who_goes_while_it_subscribes_stops_nobody() -> None:
    async with bridged() as side:
        leaving, publisher, subscriber = [await greeted(side) for _ in range(3)]
        subscriber.send(b"\x06\x01t")
        await until(lambda: connection(side, subscriber)._topics)
        for ending in (b"\x02", b"\xff", b""):
            raw = leaving if not ending else await greeted(side)
            raw.send(b"".join(b"\x06" + blob(b"t%d" % turn) for turn in range(300)) + ending)
            publisher.send(b"\x08\x01t\x01x")
            if not ending:
                raw.writer.transport.abort()
            assert await subscriber.read(5) == b"\x08\x01t\x01x"
        await until(lambda: not side.bridge.barrier.subscribing)


async def test_without_a_relay_events_wait_for_it_and_not_for_subscriptions() -> None:
    async with bridged() as side:
        subscriber, publisher = await side.connect(), await side.connect()
        await side.cluster.stop_relay()
        received: list[bytes] = []
        subscriber.subscribe("topic", collecting(received))
        for _ in range(20):
            publisher.publish("topic", b"x")
        await side.cluster.start_relay()
        await until(lambda: len(received) == 20)
        await asyncio.gather(subscriber.close(), publisher.close())


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Process]:
    with Daemon(tmp_path) as relay:
        process = Process(relay, "--listen", "127.0.0.1:0")
        try:
            yield process
        finally:
            process.process.send_signal(signal.SIGCONT)
            process.process.kill()
            process.process.wait()


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep every processor busy."""
    idlers = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        yield
    finally:
        for idler in idlers:
            idler.kill()
            idler.wait()


async def publish_to_all(port: int, between: Callable[[], None]) -> None:
    """TestPublish with ten connections; `between` is called when all have subscribed, before anybody publishes."""
    everybody = [await binding.Binding().open(port) for _ in range(10)]
    received: dict[tuple[int, str], list[bytes]] = {}
    for number, one in enumerate(everybody):
        for topic in TOPICS:
            one.subscribe(topic, collecting(received.setdefault((number, topic), [])))
    await asyncio.sleep(0)  # what was written has been sent
    between()
    for number, one in enumerate(everybody):
        for turn in range(15):
            for topic in TOPICS:
                one.publish(topic, b"%d/%d" % (number, turn))
    try:
        await until(lambda: all(len(got) == 150 for got in received.values()))
    except TimeoutError:
        missed = {where: 150 - len(got) for where, got in received.items() if len(got) != 150}
        raise AssertionError(f"missed: {missed}") from None
    await asyncio.gather(*(one.close() for one in everybody))


async def test_a_bridge_that_was_stopped_meanwhile_misses_no_event(bridge: Process) -> None:
    """The bridge resumes with subscriptions and events in all sockets at once."""
    port = await asyncio.to_thread(bridge.port)

    def stop() -> None:
        loop = asyncio.get_running_loop()
        bridge.process.send_signal(signal.SIGSTOP)
        loop.call_later(0.1, bridge.process.send_signal, signal.SIGCONT)  # all is written by then

    for _ in range(3):
        await publish_to_all(port, stop)


async def test_beside_busy_processors_no_subscription_misses_an_event(
    bridge: Process, busy: None
) -> None:
    port = await asyncio.to_thread(bridge.port)
    await publish_to_all(port, lambda: None)


def test_it_says_in_its_log_when_a_subscription_is_in_effect(tmp_path: Path) -> None:
    with Daemon(tmp_path) as relay:
        process = Process(relay, "--listen", "127.0.0.1:0", "--log-level", "DEBUG")
        try:
            with socket.create_connection(("127.0.0.1", process.port())) as link:
                link.sendall(binding.hello() + b"\x06\x01t\x08\x01t\x01x")
                data = b""
                while not data.endswith(b"\x08\x01t\x01x"):
                    data += link.recv(4096)
            wait_until(lambda: process.lines("bridge.subscribed"))
            (line,) = process.lines("bridge.subscribed")
            assert line["topic"] == "t"
        finally:
            process.process.kill()
            process.process.wait()
