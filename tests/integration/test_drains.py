"""A relay drains, and its clients reconnect to another one by themselves: real relays on sockets of this process."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, echo_service
from support.waiting import until

import iris
from iris.crypto.keys import ClusterKey
from iris.logs import event_of
from relay.config import RelayConfig
from relay.daemon import Relay

KEYRING = iris.Keyring.single(ClusterKey(bytes(range(32))))
WAIT_S = 10.0
pytestmark = pytest.mark.timeout(60)


class Host:
    """A host's relay, which is stopped and started again."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.socket = directory / "relay.sock"
        self._settings = {"mdns": False, "drain_timeout_s": WAIT_S, **settings}
        self.relay: Relay

    async def start(self) -> None:
        self.relay = Relay(RelayConfig(socket_path=self.socket, **self._settings))
        await self.relay.start()

    async def restart(self) -> None:
        await self.relay.stop()
        await self.start()

    def client(self, label: str, **settings: Any) -> iris.Client:
        settings = {"reconnect_min_s": 0.005, "reconnect_max_s": 0.02, **settings}
        config = iris.ClientConfig(relay=self.socket, label=label, **settings)
        return iris.connect(keyring=KEYRING, config=config)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path)
    await host.start()
    yield host
    await host.relay.stop(drain_s=0)


async def test_clients_leave_a_relay_that_stops_and_it_need_not_wait(host: Host) -> None:
    async with host.client("a") as a, host.client("b") as b:
        async with b.serve(echo_service()), b.subscribe("t.>", Collector()):
            assert await a.request("echo", b"1", timeout=WAIT_S) == b"1"
            async with asyncio.timeout(WAIT_S / 2):
                await host.relay.stop()
            assert not host.relay.hub.ports
            await host.start()
            await a.wait_for_members("echo", 1, timeout=WAIT_S)
            assert await a.request("echo", b"2", timeout=WAIT_S) == b"2"


async def test_what_runs_at_a_relay_that_stops_is_finished_and_new_calls_wait_for_the_next(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "iris.client")
    service = iris.Service("slow")
    started, release = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        started.set()
        await release.wait()
        return payload

    async with host.client("caller") as caller, host.client("member") as member:
        async with member.serve(service):
            running = asyncio.create_task(caller.request("slow", b"first", timeout=WAIT_S))
            await started.wait()
            stopping = asyncio.create_task(host.relay.stop())
            await until(
                lambda: [event_of(r) for r in caplog.records].count("client.relay_draining") == 2
            )
            later = asyncio.create_task(caller.status(timeout=WAIT_S))
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in (stopping, later, running))
            release.set()
            assert await running == b"first"
            await stopping
            await host.start()
            assert (await later)["relay"] == host.relay.router.relay_id.hex()


@pytest.mark.parametrize("kind", ["publish", "broadcast"])
async def test_what_was_accepted_before_and_during_a_drain_is_received_or_reported(
    host: Host, kind: str
) -> None:
    got, lost = Collector(), Collector()
    service = iris.Service("all")
    service.on_broadcast(got)
    service.on_loss(lost.gap)
    accepted = 0
    async with host.client("pub") as pub, host.client("sub") as sub:
        async with contextlib.AsyncExitStack() as stack:
            if kind == "publish":
                await stack.enter_async_context(sub.subscribe("all", got, on_loss=lost.gap))
            else:
                await stack.enter_async_context(sub.serve(service))

            async def send(count: int) -> None:
                nonlocal accepted
                for _ in range(count):
                    send = pub.publish if kind == "publish" else pub.broadcast
                    await send("all", b"%d" % accepted)
                    accepted += 1

            await send(100)
            stopping = asyncio.create_task(host.relay.stop())
            for _ in range(20):
                await send(50)
                await asyncio.sleep(0)
            await stopping
            await host.start()
            await sub.flush(timeout=WAIT_S)
            await send(1)
            await until(lambda: accepted - 1 in got.numbers)
            assert got.numbers == sorted(set(got.numbers))
            assert lost.gaps, "somebody who moves cannot know what it missed"
            # All that was accepted before the relay said DRAIN came, and what was accepted after it waits for the next.
            assert got.numbers[:100] == list(range(100))
            # A receiver that is back later than the sender misses what the sender kept for the next relay. The gap says
            # so; of broadcasts the sender is told, too.
            if kind == "publish":
                assert not pub.losses
            else:
                await until(
                    lambda: len(got.numbers) + sum(one.count for one in pub.losses) == accepted
                )
                assert {one.cause for one in pub.losses} <= {"no members"}
