"""Sessions over WebSocket: every pattern, what a browser may not do, and what it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.browsers import Page, browser
from support.waiting import eventually, until
from support.web import certificate
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

import iris
from iris import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConfigError
from iris.extras import install_line
from iris.logs import event_of
from iris.wire import frames
from iris.wire.codec import encode_control
from relay.config import RelayConfig, dev
from relay.daemon import Relay
from relay.net import websession

KEY = ClusterKey(bytes(range(32)))
KEYS = Keyring({"default": (KEY,)})
HOME = "https://app.example"


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that accepts browsers on loopback, without tickets."""
    relay = await started(tmp_path)
    yield relay
    await relay.stop(drain_s=0)


async def started(tmp_path: Path, **changes: Any) -> Relay:
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    config = dev(directory / "relay.sock")
    settings: dict[str, Any] = {"listen": ("ws://127.0.0.1:0",), "origins": (HOME,), **changes}
    made = Relay(replace(config, **settings))
    await made.start()
    return made


def replace(config: RelayConfig, **changes: Any) -> RelayConfig:
    return dataclasses.replace(config, **changes)


def url(relay: Relay) -> str:
    assert relay.web is not None
    return relay.web.addresses[0]


def near(relay: Relay) -> iris.Client:
    return iris.connect(relay.config.socket_path, keyring=KEYS)


def refusals(relay: Relay) -> dict[str, int]:
    assert relay.web is not None
    return relay.web.refusals


def everything(pushed: list[bytes], casts: list[bytes]) -> iris.Service:
    service = iris.Service("all")
    service.on_request(lambda payload: payload)
    service.on_push(pushed.append)
    service.on_broadcast(casts.append)
    service.on_survey(lambda payload: b"here")

    @service.on_tunnel
    async def tunnel(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message * 2)

    return service


@pytest.mark.parametrize("web_serves", [False, True])
async def test_every_pattern_works_over_websocket_both_ways(relay: Relay, web_serves: bool) -> None:
    pushed: list[bytes] = []
    casts: list[bytes] = []
    got: list[bytes] = []
    async with near(relay) as here, browser(url(relay), KEYS) as there:
        server, caller = (there, here) if web_serves else (here, there)
        async with server.serve(everything(pushed, casts)):
            big = bytes(900_000)
            assert await caller.request("all", b"hello", timeout=20) == b"hello"
            assert await caller.request("all", big, timeout=20) == big
            await caller.push("all", b"pushed")
            await caller.broadcast("all", b"cast")
            assert [a.payload async for a in caller.survey("all", b"?", timeout=20)] == [b"here"]
            async with caller.tunnel("all", timeout=20) as tunnel:
                await tunnel.send(b"ab")
                assert await tunnel.recv() == b"abab"
            async with server.subscribe("news.*", lambda message: got.append(message.payload)):
                await caller.publish("news.today", b"sun")
                await until(lambda: bool(pushed and casts and got))
    assert (pushed, casts, got) == ([b"pushed"], [b"cast"], [b"sun"])


async def test_deadlines_are_mapped_between_the_clocks(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websession, "PING_S", 0.0)
    async with Page(url(relay)) as page:
        await page.greet(mono_us=1_000_000_000_000_000)
        (port,) = [port for port in relay.hub.ports if port.session.web]
        first = port.session.clock_us
        assert first == pytest.approx(time.monotonic_ns() // 1000 - 1_000_000_000_000_000, abs=20e6)
        ping = await page.receive(frames.Ping)
        assert isinstance(ping.mono_us, int)
        # the browser's clock ran while it was asleep, so the offset of HELLO is too large
        await page.say(frames.Pong(ping.id, 1_000_000_900_000_000))
        await until(lambda: port.session.clock_us < first - 800_000_000)
        await page.say(frames.Ping(7))
        pong = await page.receive(frames.Pong)
        assert pong.id == 7
        assert isinstance(pong.mono_us, int)


@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [
        ({"origin": "https://evil.example"}, 403, "origin not allowed"),
        ({"origin": "null"}, 403, "origin not allowed"),
        ({"subprotocols": []}, 400, "bad upgrade"),
        ({"subprotocols": ["iris.2"]}, 400, "bad upgrade"),
    ],
)
async def test_an_upgrade_that_is_not_allowed_is_refused_counted_and_logged_with_its_origin(
    relay: Relay, headers: Any, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from websockets.asyncio.client import connect

    with pytest.raises(InvalidStatus) as caught:
        await connect(url(relay), **{"subprotocols": ["iris.1"], **headers})
    assert caught.value.response.status_code == status
    assert refusals(relay) == {reason: 1}
    (line,) = [r.__dict__["fields"] for r in caplog.records if event_of(r) == "web.refused"]
    assert line.get("origin") == headers.get("origin")
    assert (line["address"], line["reason"]) == ("127.0.0.1", reason)


async def test_a_page_of_an_allowed_origin_may_connect_and_nothing_is_compressed(
    relay: Relay,
) -> None:
    async with Page(url(relay), origin=HOME) as page:
        welcome = await page.greet()
        assert welcome.mono_us > 0
        assert page.socket.protocol.extensions == []


HELLO = encode_control(frames.Hello(1, 8, mono_us=1))
PING = encode_control(frames.Ping(1))


@pytest.mark.parametrize(
    ("messages", "code", "reason"),
    [
        (["text"], 1003, "messages must be binary"),
        ([HELLO, PING[:-1]], 4000, "a message must hold whole frames"),
        ([HELLO + PING + b"\x05"], 4000, "a message must hold whole frames"),
        ([PING], 4000, "Ping before HELLO"),
        ([HELLO, HELLO], 4000, "unexpected Hello frame"),
        ([HELLO, b"\5\0"], 4000, "a message must hold whole frames"),
        ([encode_control(frames.Hello(1, 0))], 4000, "HELLO over TLS or WebSocket must carry mono_us"),
        ([HELLO, encode_control(frames.Release(KEY.key_id))], 4000, "RELEASE from a session over WebSocket"),
        ([HELLO, encode_control(frames.Beat(1))], 4000, "BEAT from a session"),
        ([bytes(65_541)], 1009, "before HELLO"),
        ([[HELLO[:5], bytes(65_541)]], 1009, "before HELLO"),
        ([HELLO, bytes(2 << 20)], 1009, ""),
        ([[HELLO, *[bytes(60_000)] * 20]], 4000, "a frame declares 0 bytes"),
        ([[HELLO, b"\xff\xff\1\0", b"\x47"]], 4000, "a frame declares 131071 bytes"),
    ],
)  # fmt: skip
async def test_what_breaks_a_rule_ends_that_session_with_a_code_and_no_other(
    relay: Relay, messages: list[Any], code: int, reason: str
) -> None:
    async with Page(url(relay)) as other, Page(url(relay)) as page:
        await other.greet()
        for message in messages:
            await page.socket.send(message)
        found = await page.closed()
        assert found[0] == code
        assert reason in found[1]
        await other.say(frames.Ping(9))
        assert (await other.receive(frames.Pong)).id == 9
    await until(lambda: not relay.hub.ports)


async def test_connections_that_say_nothing_are_closed(tmp_path: Path) -> None:
    relay = await started(tmp_path, hello_timeout_s=0.1)
    try:
        async with Page(url(relay)) as page:
            code, reason = await page.closed()
            assert (code, reason) == (4000, "HELLO was not received within 0.1 s")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(url(relay).rpartition(":")[2])
        )
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert refusals(relay)["no upgrade in time"] == 1
    finally:
        await relay.stop(drain_s=0)


async def test_a_message_of_fragments_without_an_end_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websession, "PING_S", 0.05)
    relay = await started(tmp_path, frame_timeout_s=0.2)
    try:
        async with Page(url(relay)) as page:
            await page.greet()

            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield b""
                    await asyncio.sleep(0.02)

            sending = asyncio.create_task(page.socket.send(endless()))
            code, reason = await page.closed()
            with pytest.raises(ConnectionClosed):
                await sending
            assert code == 4000
            assert "0.2 s" in reason
    finally:
        await relay.stop(drain_s=0)


async def test_a_peer_that_sends_pings_and_reads_nothing_fills_no_memory(relay: Relay) -> None:
    async with Page(url(relay)) as page, Page(url(relay)) as other:
        await page.greet()
        await other.greet()
        page.socket.transport.pause_reading()
        pings = Frame(Opcode.PING, bytes(125)).serialize(mask=True) * 1000
        for _ in range(100):  # 13 MB, more than the kernel holds
            page.socket.transport.write(pings)
            await asyncio.sleep(0)
        await until(lambda: page.socket.transport.get_write_buffer_size() == 0)
        await other.say(frames.Ping(9))
        assert (await other.receive(frames.Pong)).id == 9
        waiting = [port._connection._transport.get_write_buffer_size() for port in relay.hub.ports]
        assert max(waiting) < 1 << 20


async def test_strangers_make_room_for_the_next_and_sessions_stay(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.web.MAX_HALF_OPEN", 2)
    async with Page(url(relay)) as page:
        await page.greet()
        async with Page(url(relay)) as first, Page(url(relay)), Page(url(relay)) as third:
            assert (await first.closed())[0] == 1006  # without a close frame
            await third.greet()
            await page.say(frames.Ping(9))
            assert (await page.receive(frames.Pong)).id == 9
    assert refusals(relay) == {"too many half-open": 1}


async def test_a_session_that_answers_no_pings_ends(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websession, "DEAD_S", 0.2)
    async with Page(url(relay)) as page:
        await page.greet()
        assert await page.closed() == (4001, "no pong was received for 0.2 s")


async def test_a_browser_that_reads_nothing_is_dropped_for_and_delays_nobody(relay: Relay) -> None:
    async with (
        Page(url(relay)) as page, browser(url(relay), KEYS) as reads, near(relay) as here,
        browser(url(relay), KEYS, label="stuck") as stuck,
    ):  # fmt: skip
        await page.greet()
        got: list[int] = []
        async with (
            reads.subscribe("ticks", lambda message: got.append(1)),
            stuck.subscribe("ticks", lambda message: None),
        ):
            (port,) = [port for port in relay.hub.ports if port.session.label == "stuck"]
            port.pause_writing()
            relay.driver.budget.limit_bytes = 1 << 20
            for _ in range(300):
                await here.publish("ticks", bytes(10_000))
            await eventually(lambda: len(got) == 300)
            assert port.unwritten_bytes <= (1 << 20) + websession.WRITE_BYTES
            await until(lambda: relay.router.accounts.report(0)["dropped"] != {})
            relay.driver.budget.limit_bytes = 128 << 20
            port.resume_writing()


async def test_a_relay_that_stops_closes_with_going_away(tmp_path: Path) -> None:
    relay = await started(tmp_path)
    async with Page(url(relay)) as page, Page(url(relay)) as stranger:
        await page.greet()
        stopping = asyncio.create_task(relay.stop(drain_s=0.2))
        assert await stranger.closed() == (1001, "the relay is stopping")
        await page.receive(frames.Drain)
        await page.say(frames.Bye())
        await page.receive(frames.Bye)
        assert (await page.closed())[0] == 1001
        await stopping


async def test_a_session_that_says_bye_is_closed_normally(relay: Relay) -> None:
    async with Page(url(relay)) as page:
        await page.greet()
        await page.say(frames.Bye())
        await page.receive(frames.Bye)
        assert await page.closed() == (1000, "")


async def test_a_browser_reconnects_and_its_subscriptions_come_back(relay: Relay) -> None:
    got: list[bytes] = []
    async with (
        browser(url(relay), KEYS) as there, near(relay) as here,
        there.subscribe("news", lambda message: got.append(message.payload)),
    ):  # fmt: skip
        (port,) = [port for port in relay.hub.ports if port.session.label == "browser"]
        port.abort("cut by the test")
        await until(lambda: port not in relay.hub.ports)
        await until(lambda: any(p.session.subscriptions for p in relay.hub.ports))
        await here.publish("news", b"back")
        await until(lambda: got == [b"back"])


async def test_sessions_over_wss_and_a_renewed_certificate(tmp_path: Path) -> None:
    cert, key, first = certificate(tmp_path)
    relay = await started(tmp_path, listen=("wss://127.0.0.1:0",), wss_cert=cert, wss_key=key)
    try:
        shown = partial(
            ssl.get_server_certificate, ("127.0.0.1", int(url(relay).rpartition(":")[2]))
        )
        tls = ssl.create_default_context(cafile=cert)
        async with browser(url(relay), KEYS, tls=tls) as there, near(relay) as here:
            async with here.serve(everything([], [])):
                assert await there.request("all", bytes(500_000), timeout=20) == bytes(500_000)
            _, _, second = certificate(tmp_path, "renewed")
            relay.reload(relay.config)
            assert ssl.PEM_cert_to_DER_cert(await asyncio.to_thread(shown)) == second != first
            cert.write_text("not a certificate")
            relay.reload(relay.config)
            assert ssl.PEM_cert_to_DER_cert(await asyncio.to_thread(shown)) == second
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(url(relay).rpartition(":")[2])
        )
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await until(lambda: refusals(relay).get("not TLS") == 1)
    finally:
        await relay.stop(drain_s=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"listen": ("ws://10.0.0.1:7432",)}, "not on loopback"),
        ({"listen": ("ws://relay.example:7432",)}, "with an IP address of this host"),
        ({"listen": ("wss://127.0.0.1:7432",)}, "wss:// needs a web certificate"),
        ({"listen": ("tls://127.0.0.1:7432",)}, "a development relay"),
        ({"wss_key": Path("/k")}, "no use without a certificate"),
        ({"origins": ("https://app.example/",)}, "is not an origin"),
        ({"origins": ("*",)}, "is not an origin"),
        ({"origins": ("app.example",)}, "is not an origin"),
        ({"listen": ("wss://0.0.0.0:1",), "wss_cert": Path("/c")}, "only listeners on loopback can do without"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_with_what_to_do(changes: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(dev(Path("/run/relay.sock")), **changes)


def test_without_the_packages_the_relay_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    config = replace(dev(tmp_path / "relay.sock"), listen=("ws://127.0.0.1:0",))
    with pytest.raises(ConfigError, match=re.escape(install_line("wss"))):
        Relay(config)
