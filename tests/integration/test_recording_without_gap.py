"""A relay tells its store that nothing is missing: from then on nobody's publication is taken, whenever who sent it
was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from adversity.kit import Wire
from support.relays import KEY
from support.waiting import PATIENCE_S, eventually

from iris.wire import frames
from iris.wire.kinds import NO_KEY, STORES, Kind
from relay.config import RelayConfig
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)


@contextlib.asynccontextmanager
async def store_of(relay: Relay) -> AsyncIterator[Wire]:
    """A store that reads what it is sent, and stays."""
    async with Wire(relay.config.socket_path, KEY) as store:
        await store.send(frames.Hello(1, 0, "store", os.getpid()))
        store.welcome = await store.expect(frames.Welcome)
        serving = {int(Kind.STREAM): frames.Serving(8, 1 << 20)}
        await store.send(frames.Join(1, STORES, [NO_KEY], serving))
        await store.send(frames.Pong((await store.expect(frames.Ping)).id))
        yield store


async def test_who_greets_after_the_last_word_to_a_store_is_not_let_in(tmp_path: Path) -> None:
    relay = Relay(RelayConfig(socket_path=tmp_path / "relay.sock", dev=True, drain_timeout_s=10))
    await relay.start()
    stopping: asyncio.Task[None] | None = None
    try:
        async with store_of(relay) as store, Wire(relay.config.socket_path, KEY) as late:
            await eventually(lambda: len(relay.hub.ports) == 2)
            stopping = asyncio.create_task(relay.stop())
            await store.expect(frames.Drain)
            await store.send(frames.Pong((await store.expect(frames.Ping)).id))
            bye = await store.expect(frames.Bye)
            with contextlib.suppress(EOFError):  # it is cut
                await late.greet()
                await late.send(late.proof(KEY), late.declare(1, Kind.PUBLISH, "all"))
                await late.send(late.sealed(Kind.PUBLISH, "all", alias=1))
                await late.alive()
            assert bye.complete
            assert not relay.router.accounts.report(0)["in"]
        async with asyncio.timeout(PATIENCE_S):
            await stopping
    finally:
        await (relay.stop(drain_s=0) if stopping is None else stopping)


async def test_who_publishes_is_read_to_its_end_though_it_serves_streams_too(
    tmp_path: Path,
) -> None:
    relay = Relay(RelayConfig(socket_path=tmp_path / "relay.sock", dev=True, drain_timeout_s=0.2))
    await relay.start()
    stopping: asyncio.Task[None] | None = None
    try:
        async with store_of(relay) as store, Wire(relay.config.socket_path, KEY) as both:
            await both.prove(KEY)
            await both.join("orders", Kind.STREAM)
            await both.send(both.declare(1, Kind.PUBLISH, "all"))
            await both.alive()
            stopping = asyncio.create_task(relay.stop())
            await store.expect(frames.Drain)
            await store.send(frames.Pong((await store.expect(frames.Ping)).id))
            assert not (await store.expect(frames.Bye)).complete, "it never said goodbye"
            await both.gone()
        async with asyncio.timeout(PATIENCE_S):
            await stopping
    finally:
        await (relay.stop(drain_s=0) if stopping is None else stopping)
