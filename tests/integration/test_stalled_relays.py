"""A relay does not read for a while, or stops while its clients end: nobody waits longer than promised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, cut, named, port_of
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)


def stop_reading(cluster: LocalCluster, label: str) -> Callable[[], None]:
    """Let the relay read nothing more of a session, as one that is frozen; the function returned lets it go on."""
    port: Any = port_of(cluster, label)
    port._transport.pause_reading()
    resume: Callable[[], None] = port._transport.resume_reading
    return resume


async def test_publishing_that_waits_goes_on_although_the_relay_does_not_read() -> None:
    got = Collector()
    async with (
        LocalCluster() as cluster,
        named(cluster, "pub", write_high_bytes=4096, stall_s=0.02) as pub,
        cluster.client() as sub,
        sub.subscribe("t", got, when_full="wait"),
    ):
        await pub.publish("t", b"0", when_full="wait")
        await eventually(lambda: got.messages)
        stop_reading(cluster, "pub")
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(200):
                await pub.publish("t", bytes(1000), when_full="wait")
        assert pub._attachment is not None
        assert pub._attachment.blocked
        await cut(cluster, "pub")
        await pub.publish("t", b"last", when_full="wait")
        await eventually(lambda: got.payloads[-1] == b"last")


async def test_what_a_relay_that_does_not_read_has_still_to_get_is_bounded() -> None:
    async with (
        LocalCluster() as cluster,
        named(cluster, "pub", write_high_bytes=4096, stall_s=0.001, offline_bytes=100_000) as pub,
        cluster.client() as sub,
        sub.subscribe("t", lambda _: None, when_full="wait"),
    ):
        await pub.publish("t", b"0", when_full="wait", count=True)
        resume = stop_reading(cluster, "pub")

        async def publish() -> None:
            while True:
                await pub.publish("t", bytes(10_000), when_full="wait")

        with pytest.raises(iris.ConnectionLost, match="does not read") as info:
            await asyncio.wait_for(publish(), PATIENCE_S)
        assert info.value.may_have_run is False
        resume()


class Stuck(threading.Thread):
    """A member in a loop of its own, whose handler never ends before `end`."""

    def __init__(self, relay: Path) -> None:
        super().__init__()
        self.relay = relay
        self.joined, self.running, self.ended = (threading.Event() for _ in range(3))

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        service = iris.Service("stuck")

        @service.on_request
        async def stuck(payload: bytes) -> None:
            self.running.set()
            await asyncio.to_thread(self.ended.wait)

        async with client(self.relay) as member, member.serve(service):
            self.joined.set()
            await asyncio.to_thread(self.ended.wait)


def test_a_client_that_ends_while_it_leaves_a_relay_leaves_no_task_behind(tmp_path: Path) -> None:
    async def main(relay: Daemon) -> None:
        config = iris.ClientConfig(relay=relay.socket, drain_timeout_s=0.02, connect_timeout_s=0.3)
        ending = iris.connect(keyring=iris.Keyring.single(KEY), config=config)
        async with ending:
            call = asyncio.ensure_future(ending.request("stuck", b"", timeout=PATIENCE_S))
            await eventually(member.running.is_set)
            relay.process.terminate()
            await eventually(lambda: ending._attachment and ending._attachment._leaving.pumps)
        left.extend(task for task in asyncio.all_tasks() if task.get_name().startswith("iris"))
        with pytest.raises(iris.ConnectionLost):
            await call

    left: list[asyncio.Task[object]] = []
    with Daemon(tmp_path) as daemon:
        member = Stuck(daemon.socket)
        member.start()
        try:
            assert member.joined.wait(PATIENCE_S)
            asyncio.run(main(daemon))
        finally:
            member.ended.set()
            member.join()
    assert left == []
