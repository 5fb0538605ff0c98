"""Strangers, impostors and floods at a gateway: they are refused, counted and logged once, and no connection suffers
from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import ssl
import struct

import pytest
from support.connection import blind
from support.gateways import (
    RELAY,
    Impostor,
    Stranger,
    World,
    gateways,
    hub,
    joined,
    name_of,
    port,
    refused,
    still_meets,
)
from support.links import hub as links
from support.waiting import eventually

from iris.crypto.keys import SiteKey
from iris.wire import frames, link_frames
from iris.wire.codec import encode_control
from iris.wire.frames import Control
from relay.daemon import Relay
from relay.net.gateways import MAX_CONNECTIONS, GatewayPort
from relay.net.tls import LINK_ALPN, SESSION_ALPN, WAN_ALPN

pytestmark = pytest.mark.timeout(60)


async def test_who_names_no_site_that_is_pinned_is_refused_before_it_sees_a_certificate(
    world: World, eu: Relay
) -> None:
    for name in ("gw.eu.example", "f" * 32, name_of(world.key("eu")), name_of(SiteKey(bytes(32)))):
        stranger = Impostor(world, eu)
        stranger.name = name
        await refused(eu, "unknown site", stranger)
    assert hub(eu).refusals == {"unknown site": 4}
    await still_meets(world, eu)


async def test_who_shows_no_certificate_or_speaks_another_protocol_is_refused(
    world: World, eu: Relay
) -> None:
    await refused(eu, "no certificate", Stranger(eu, blind(WAN_ALPN), name_of(world.key("us"))))
    for alpn in (LINK_ALPN, SESSION_ALPN, "iris-wan/2"):
        await refused(eu, "protocol version", Impostor(world, eu, alpn=alpn))
    old = blind(WAN_ALPN)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    await refused(eu, "TLS version", Stranger(eu, old, name_of(world.key("us"))))
    await still_meets(world, eu)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
        encode_control(frames.Hello(1, 0)),
        encode_control(link_frames.LinkHello(1, 0, RELAY, 5, 5, 1 << 20, site="us")),
        bytes(1000),
        b"\xff" * 1000,
    ],
)
async def test_what_is_not_tls_is_refused(said: bytes, world: World, eu: Relay) -> None:
    await refused(eu, "not TLS", Stranger(eu), said)
    await still_meets(world, eu)


async def test_a_handshake_that_goes_on_and_on_is_cut(world: World, eu: Relay) -> None:
    record = b"\x16\x03\x01" + struct.pack(">H", 16_384)
    hello = b"\x01" + (130_000).to_bytes(3, "big")
    said = record + hello + bytes(16_380) + (record + bytes(16_384)) * 4
    await refused(eu, "too long a handshake", Stranger(eu), said)
    await still_meets(world, eu)


async def test_who_says_nothing_or_half_of_something_is_cut(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.HELLO_S", 0.3)
    hello = encode_control(Impostor(world, eu).hello())
    async with Stranger(eu) as silent, Stranger(eu) as begun, Impostor(world, eu) as shaken:
        await begun.say(b"\x16\x03\x01\x02\x00\x01\x00")
        await shaken.say(hello[:20])
        for stranger in (silent, begun, shaken):
            await stranger.gone()
    assert hub(eu).refusals == {"timeout": 3}
    monkeypatch.undo()
    await still_meets(world, eu)


async def test_a_gateway_that_is_dialled_and_says_nothing_is_given_up_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.HELLO_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        us = await world.start("us", world.peer("eu", url))
        await eventually(lambda: hub(us).refusals.get("timeout", 0) >= 2)
        (there,) = gateways(us)["peers"][0]["addresses"]
        assert "no answer" in there["error"]
        await world.stop(us)


async def test_of_too_many_half_open_connections_the_oldest_of_the_busiest_host_is_dropped(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flooding host only displaces its own connections: a distant, slow gateway can still connect."""
    monkeypatch.setattr("relay.net.hub.MAX_HALF_OPEN", 8)
    monkeypatch.setattr(
        "relay.net.hub.HELLO_S", 60.0
    )  # the time of this test is too short for a timeout
    loop = asyncio.get_running_loop()
    async with Stranger(eu, host="127.0.0.3") as slow, Stranger(eu, host="127.0.0.4") as slower:
        await eventually(lambda: len(hub(eu).ports) == 2)
        flood = []
        for number in range(1, 41):
            knocking = socket.socket()
            knocking.setblocking(False)
            knocking.bind(("127.0.0.2", 0))
            await loop.sock_connect(knocking, ("127.0.0.1", hub(eu).addresses[0][1]))
            flood.append(knocking)
            await eventually(
                lambda number=number: (
                    len(hub(eu).ports) - 2 + hub(eu).refusals.get("too many half-open", 0) >= number
                )
            )
            assert gateways(eu)["half_open"] <= 8
        assert hub(eu).refusals == {"too many half-open": 34}
        hosts = {p.address.rpartition(":")[0] for p in hub(eu).ports}
        assert hosts == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
        us = await world.start("us", world.peer("eu", eu))
        await eventually(lambda: us.router.wans)
        for stranger in (slow, slower):
            await stranger.say(b"GET /")
            await stranger.gone()
        assert hub(eu).refusals["not TLS"] == 2
        for one in flood:
            one.close()


async def test_a_flood_of_connections_that_come_and_go_leaves_nothing(
    world: World, eu: Relay
) -> None:
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    ours = port(eu, us)
    loop = asyncio.get_running_loop()

    async def knock(number: int) -> None:
        with socket.socket() as stranger:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, ("127.0.0.1", hub(eu).addresses[0][1]))
            if number % 3:
                await loop.sock_sendall(stranger, os.urandom(1 + number % 700))
            if number % 2:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    for start in range(0, 600, 50):
        await asyncio.gather(*(knock(number) for number in range(start, start + 50)))
    await eventually(lambda: hub(eu).ports == {ours} and not hub(eu)._acceptor.attaching)
    assert gateways(eu)["half_open"] == 0
    assert joined((eu, us))


def client_hello(context: ssl.SSLContext, name: str) -> bytes:
    """Return the CLIENT_HELLO of a dialler."""
    sent = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them changed, cut or repeated."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
        if not data:
            data += b"\x16"
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
async def test_handshakes_that_begin_damaged_cost_their_connection_alone(
    seed: int, world: World, eu: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    garbled: list[object] = []
    # `ssl` reports server names that are not text through this hook; the daemon counts them.
    monkeypatch.setattr("sys.unraisablehook", garbled.append)
    rng = random.Random(seed)
    impostor = Impostor(world, eu)
    assert impostor.context is not None
    whole = client_hello(impostor.context, impostor.name)
    for _ in range(100):
        async with Stranger(eu) as stranger:
            await stranger.say(damaged(whole, rng))
            if rng.random() < 0.5:
                await stranger.say(rng.randbytes(rng.randrange(1, 3000)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await stranger.gone()
    await eventually(lambda: not hub(eu).ports)
    assert not [record for record in caplog.records if record.exc_info]
    assert sum(hub(eu).refusals.values()) == 100
    await still_meets(world, eu)


@pytest.mark.parametrize(
    ("reason", "detail", "hello"),
    [
        ("another site's name", "of site us", {"site": "ap"}),
        ("another site's name", "of site us", {"site": ""}),
        ("another relay's id", "another relay", {"relay_id": b"\x43" * 16}),
        ("protocol version", "version 2", {"version": 2}),
        ("protocol error", "both sides dialled, or neither", {"dial_us": 0}),
    ],
)
async def test_an_invalid_hello_is_refused_with_its_reason(
    reason: str, detail: str, hello: dict[str, object], world: World, eu: Relay
) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.say(impostor.hello(**hello))
        assert detail in (await impostor.receive(frames.Error)).detail
        await impostor.gone()
    assert hub(eu).refusals == {reason: 1}
    await still_meets(world, eu)


async def test_a_gateway_that_is_dialled_and_says_another_sites_name_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    eu = await world.start("eu", world.peer("us"))
    hello = GatewayPort._hello

    def lie(self: GatewayPort) -> link_frames.LinkHello:
        said = hello(self)
        return link_frames.LinkHello(**{name: getattr(said, name) for name in said.__struct_fields__} | {"site": "ap"}) if said.site == "eu" else said  # fmt: skip

    monkeypatch.setattr(GatewayPort, "_hello", lie)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: hub(us).refusals.get("another site's name"))
    assert not us.router.wans


async def test_a_site_cannot_have_a_relay_id_of_another_site_or_of_ours(
    world: World, eu: Relay
) -> None:
    us = await world.start("us", world.peer("eu", eu))
    mate = await world.start("eu", world.peer("us"), join=(f"127.0.0.1:{links(eu).port}",))
    await eventually(lambda: joined((eu, us)) and mate.router.relay_id in eu.router.links)
    for taken in (us.router.relay_id, mate.router.relay_id):
        async with Impostor(world, eu, "ap", taken) as impostor:
            await impostor.say(impostor.hello())
            assert "relay id" in (await impostor.receive(frames.Error)).detail
            await impostor.gone()
    assert hub(eu).refusals == {"another site's relay id": 2}
    assert joined((eu, us))


async def test_a_gateway_that_has_our_own_id_is_nobody_to_meet(world: World, eu: Relay) -> None:
    async with Impostor(world, eu, relay_id=eu.router.relay_id) as impostor:
        await impostor.say(impostor.hello())
        await impostor.gone()
    assert not eu.router.wans
    assert hub(eu).refusals == {}


async def test_one_site_has_so_many_connections_and_no_more(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_CONNECTIONS >= 16
    monkeypatch.setattr("relay.net.gateways.MAX_CONNECTIONS", 2)
    one, two, three = (Impostor(world, eu, relay_id=bytes([n]) * 16) for n in (1, 2, 3))
    async with one, two, three:
        await one.meet()
        await two.meet()
        await three.say(three.hello())
        assert "2 connections" in (await three.receive(frames.Error)).detail
        again = Impostor(world, eu, relay_id=one.relay_id)
        async with again:
            await again.say(again.hello(dial_us=6))  # replaces its older connection
            await again.receive(link_frames.LinkHello)
            await one.gone()
            await eventually(lambda: len(hub(eu).up) == 2)
        async with Impostor(world, eu, "ap") as other:
            await other.meet()
    assert hub(eu).refusals == {"too many gateways": 1}
    assert hub(eu).replaced == 1


@pytest.mark.parametrize(
    "said",
    [
        frames.Beat(1),
        frames.Hello(1, 0),
        b"\x03\0\0\0\x27\0\0",
        b"\x01\0\0\0\x20",
        (1 << 20).to_bytes(4, "little") + bytes(100),
        b"\xff\xff\xff\xff" + bytes(100),
        bytes(100),
    ],
)
async def test_the_first_frame_is_hello_and_short(
    said: Control | bytes, world: World, eu: Relay
) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.say(said)
        assert (await impostor.receive(frames.Error)).detail
        await impostor.gone()
    assert hub(eu).refusals == {"protocol error": 1}
    await still_meets(world, eu)


@pytest.mark.parametrize("seed", range(3))
async def test_greetings_that_are_damaged_cost_their_connection_alone(
    seed: int, world: World, eu: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        async with Impostor(world, eu) as impostor:
            await impostor.say(damaged(encode_control(impostor.hello(label="x" * 64)), rng))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await impostor.gone()
    await eventually(lambda: not hub(eu).ports and not eu.router.wans)
    assert not [record for record in caplog.records if record.exc_info]
    await still_meets(world, eu)


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff" + bytes(100), bytes(100), b"\x09\0\0\0" + b"\xfe" * 9])  # fmt: skip
async def test_a_gateway_that_breaks_the_protocol_loses_its_connection_and_nobody_elses(
    said: bytes, world: World, eu: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    async with Impostor(world, eu, "ap") as impostor:
        await impostor.meet()
        await eventually(lambda: len(eu.router.wans) == 2)
        await impostor.say(said)
        await impostor.gone()
    await eventually(lambda: joined((eu, us)))
    assert hub(eu).protocol_errors == 1
    assert "gateway.protocol_error" in caplog.text
    assert "gateway.up" in caplog.text
    assert "link.up" not in caplog.text


async def test_a_gateway_that_falls_silent_is_given_up(world: World, eu: Relay) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.meet()
        await eventually(lambda: eu.router.wans)
        await impostor.gone()
    assert not eu.router.wans
