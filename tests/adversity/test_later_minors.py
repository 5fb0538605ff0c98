"""Peers of a later minor version: fields that nobody knows are ignored, and a kind that nobody knows is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from adversity.kit import Wire, control_frame
from adversity.liar import WELCOME, Liar, Peer, acknowledging
from adversity.test_links import Impostor as Neighbor
from support.browsers import Page
from support.gateways import Impostor as Gateway
from support.gateways import World
from support.later import LATER, later
from support.links import hub, start
from support.relays import KEY
from support.waiting import eventually

from iris.wire import frames, link_frames
from iris.wire.frames import Control, Serving
from iris.wire.kinds import NO_KEY, STORES, Kind
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)
UNKNOWN = control_frame(0x3E, b"\x80")
NAMED = "frame kind 0x3e is not known"


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = await start(tmp_path / "relay", listen=("ws://127.0.0.1:0",), tickets=False)
    yield relay
    await relay.stop(drain_s=0)


def hello(mono_us: int = 0) -> bytes:
    return later(frames.Hello(1, LATER, "later", 1, mono_us))


async def test_a_session_is_served(relay: Relay) -> None:
    async with Wire(relay.config.socket_path, KEY) as session:
        await session.send(hello())
        session.welcome = await session.expect(frames.Welcome)
        await session.send(later(session.proof(KEY)))
        await session.send(later(frames.Subscribe(1, "a", [KEY.key_id])))
        assert not (await session.expect(frames.Ack)).error
        await session.send(UNKNOWN)
        assert NAMED in (await session.expect(frames.Error)).detail


async def test_a_store_is_up_when_it_answers(relay: Relay) -> None:
    async with Wire(relay.config.socket_path, KEY) as store:
        await store.send(hello())
        store.welcome = await store.expect(frames.Welcome)
        serving = {int(Kind.STREAM): Serving(8, 1 << 20)}
        await store.send(later(frames.Join(1, STORES, [NO_KEY], serving)))
        assert not (await store.expect(frames.Ack)).error
        await store.send(later(frames.Pong((await store.expect(frames.Ping)).id)))
        await store.send(UNKNOWN)
        assert NAMED in (await store.expect(frames.Error)).detail


async def test_a_browser_is_served(relay: Relay) -> None:
    assert relay.web is not None
    async with Page(relay.web.addresses[0]) as page:
        await page.say(hello(1))
        await page.receive(frames.Welcome)
        await page.say(later(frames.Ping(9)))
        assert (await page.receive(frames.Pong)).id == 9
        await page.say(UNKNOWN)
        assert NAMED in (await page.closed())[1]


async def test_a_relay_is_linked(relay: Relay) -> None:
    async with Neighbor(relay) as neighbor:
        await neighbor.say(later(neighbor.hello()))
        await neighbor.receive(link_frames.Interest)
        await neighbor.say(later(link_frames.Interest(0, 0, reset=True)))
        await eventually(lambda: neighbor.relay_id in relay.router.links)
        await neighbor.say(UNKNOWN)
        assert NAMED in (await neighbor.receive(frames.Error)).detail
    await eventually(lambda: not hub(relay).ports)


async def test_a_gateway_is_met(world: World, eu: Relay) -> None:
    async with Gateway(world, eu) as gateway:
        await gateway.say(later(gateway.hello()))
        await eventually(lambda: gateway.relay_id in eu.router.wans)
        await gateway.say(UNKNOWN)
        assert NAMED in (await gateway.receive(frames.Error)).detail


async def test_a_client_uses_a_relay(tmp_path: Path) -> None:
    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, frames.Status):
            peer.send(later(frames.Report(body.id, '{"later": true}')))
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script, greeting=later(WELCOME)) as liar, liar.client() as ours:
        assert await ours.status() == {"later": True}
