"""Strangers attack the port for browsers: each attack is cut and counted, and a session beside it goes on.

Other attacks have tests in test_web.py (frames, origins, half-open connections, browsers that do not read) and in
test_web_tickets.py (tickets).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integration.web_kit import (
    HOME,
    LOGIN,
    NETWORK,
    SIGNER,
    STRANGER,
    WIDE,
    alice,
    login,
    tickets,
    url,
)
from support.browsers import Page
from support.waiting import PATIENCE_S, eventually, until
from support.web import AMBIGUOUS
from websockets.exceptions import WebSocketException

from iris.crypto.keys import public_id
from iris.tickets import Issuer
from iris.wire import frames
from iris.wire.codec import encode_control
from relay.config import dev
from relay.daemon import Relay

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: iris.1\r\n"
)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that admits browsers with tickets of two issuers."""
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    other = replace(login(), name="other", public_keys=(STRANGER.public_key,))
    made = Relay(
        replace(
            dev(directory / "relay.sock"), listen=("ws://127.0.0.1:0",), origins=(HOME,), tickets=True,
            issuers=(login(), other), network_keys=(NETWORK,), hello_timeout_s=1.0,
        )
    )  # fmt: skip
    await made.start()
    yield made
    await made.stop(drain_s=0)


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_what_a_proxy_may_read_in_another_way_is_refused(relay: Relay, sent: bytes) -> None:
    sent = sent.replace(b"POST /body", b"GET /").replace(
        b"host: localhost", UPGRADE.partition(b"\r\n")[2].removesuffix(b"\r\n")
    )
    async with Raw(relay) as stranger:
        stranger.writer.write(sent)
        assert (await stranger.rest()).startswith(b"HTTP/1.1 400 ")
    assert relay.web is not None
    assert relay.web.status()["refused"] == {"bad upgrade": 1}


class Raw:
    """A TCP connection to the port."""

    def __init__(self, relay: Relay) -> None:
        self._port = int(url(relay).rpartition(":")[2])

    async def __aenter__(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def rest(self) -> bytes:
        """Return all that the relay sends until it closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


async def works(page: Page) -> None:
    await page.say(frames.Ping(9))
    assert (await page.receive(frames.Pong)).id == 9


def refusals(relay: Relay) -> dict[str, int]:
    assert relay.web is not None
    return relay.web.refusals


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 1000,
        b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: relay\r\nContent-Length: 5\r\n\r\nhello",
        UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n",
        UPGRADE.replace(b"Version: 13", b"Version: 12") + b"\r\n",
        UPGRADE.replace(b"AAAA==", b"") + b"\r\n",
        UPGRADE + b"Origin: https://app.example\r\nOrigin: https://evil.example\r\n\r\n",
        UPGRADE + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
        UPGRADE + b"".join(b"X%d: x\r\n" % number for number in range(2000)) + b"\r\n",
        b"GET /" + b"x" * 100_000,
        UPGRADE + b" folded: x\r\n\r\n",
    ],
)
async def test_what_is_no_upgrade_is_refused_and_counted(relay: Relay, sent: bytes) -> None:
    async with Page(url(relay)) as page, Raw(relay) as attack:
        await page.greet(ticket=alice())
        attack.writer.write(sent)
        answer = await attack.rest()
        assert b" 101 " not in answer
        await eventually(lambda: sum(refusals(relay).values()) == 1)
        assert refusals(relay).keys() <= {"bad upgrade", "no upgrade in time"}
        await works(page)


async def test_an_upgrade_that_comes_byte_by_byte_is_cut_in_time(relay: Relay) -> None:
    async with Page(url(relay)) as page, Raw(relay) as attack:
        await page.greet(ticket=alice())

        async def drip() -> None:
            while True:
                attack.writer.write(b"X")
                await asyncio.sleep(0.02)

        attack.writer.write(UPGRADE)
        dripping = asyncio.create_task(drip())
        assert b" 101 " not in await attack.rest()
        dripping.cancel()
        assert refusals(relay) == {"no upgrade in time": 1}
        await works(page)


async def test_a_hello_that_comes_byte_by_byte_is_cut_in_time(relay: Relay) -> None:
    async with Page(url(relay)) as page, Raw(relay) as attack:
        await page.greet(ticket=alice())
        attack.writer.write(UPGRADE + b"\r\n")

        async def drip() -> None:
            # The header of a masked frame of 60,000 bytes, and then its bytes.
            attack.writer.write(b"\x82\xfe\xea\x60\0\0\0\0")
            while True:
                attack.writer.write(b"\0")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        answer = await attack.rest()
        dripping.cancel()
        assert b" 101 " in answer
        assert b"HELLO was not received within 1 s" in answer
        await works(page)


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def signed(algorithm: str, *, secret: bytes = b"") -> str:
    """Return a ticket of other algorithms, with the claims and the `kid` of one that is valid."""
    _, body, signature = alice().split(".")
    head = {"alg": algorithm, "typ": "JWT", "kid": public_id(SIGNER.public_key).hex()}
    text = b64(json.dumps(head).encode()) + b"." + body.encode()
    if secret:
        signature = b64(hmac.digest(secret, text, hashlib.sha256)).decode()
    return f"{text.decode()}.{'' if algorithm.lower() == 'none' else signature}"


def of_the_other_issuer() -> str:
    """Return a ticket that one issuer of the relay signed in the name of another one."""
    text = Issuer(STRANGER, NETWORK.fingerprint).issue("alice", allow=WIDE, life_s=600)
    _, body, signature = text.split(".")
    head = b64(json.dumps({"alg": "EdDSA", "typ": "JWT", "kid": public_id(SIGNER.public_key).hex()}).encode())  # fmt: skip
    return f"{head.decode()}.{body}.{signature}"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: signed("none"), "ticket malformed"),
        (lambda: signed("nOnE"), "ticket malformed"),
        (lambda: signed("HS256", secret=SIGNER.public_key), "ticket malformed"),
        (lambda: signed("HS256", secret=LOGIN.public_key.encode()), "ticket malformed"),
        (lambda: signed("RS256"), "ticket malformed"),
        (lambda: signed("EdDSA", secret=SIGNER.public_key), "ticket forged"),
        (of_the_other_issuer, "ticket forged"),
        (lambda: alice().rpartition(".")[0] + ".", "ticket forged"),
        (lambda: "." * 8000, "ticket malformed"),
        (lambda: "x" * 8192, "ticket malformed"),
    ],
)
async def test_a_ticket_of_another_algorithm_or_another_issuers_name_admits_nobody(
    relay: Relay, make: Any, reason: str
) -> None:
    async with Page(url(relay), origin=HOME) as page:
        await page.say(frames.Hello(1, 8, mono_us=1, ticket=make()))
        code, why = await page.closed()
    assert code == 4003
    assert why.startswith(reason)
    assert refusals(relay) == {reason: 1}
    assert tickets(relay)["admitted"] == 0


async def test_a_storm_of_reconnects_leaves_nothing_behind(relay: Relay) -> None:
    assert relay.web is not None
    ends = 0

    async def storm(number: int) -> None:
        nonlocal ends
        for turn in range(5):
            try:
                async with Page(url(relay), origin=HOME) as page:
                    if number % 3:
                        text = LOGIN.issue(f"guest {number}", allow=WIDE, life_s=600)
                        await page.say(frames.Hello(1, 8, mono_us=1, ticket=text))
                    if number % 3 == 2:
                        await page.receive(frames.Welcome)
            except (OSError, WebSocketException, TimeoutError):
                pass  # the relay made room for a newer one
            ends += turn == 4

    async with Page(url(relay)) as page:
        await page.greet(ticket=alice())
        async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(storm(number))
        assert ends == 60
        await works(page)
        await until(lambda: len(relay.hub.ports) == 1)
        assert tickets(relay)["subjects"] == 1
        await eventually(lambda: relay.web is not None and relay.web.status()["connections"] == 1)
        assert relay.web.status()["half_open"] == 0
        assert relay.hub.users.held == {"ticket issuer login": 1}


PING = b"\x89\x80" + bytes(4)
EMPTY = b"\x00\x80" + bytes(4)
"""A fragment without content."""
EMPTY_MESSAGE = b"\x82\x80" + bytes(4)


@pytest.mark.parametrize(
    "idle", [PING, EMPTY, EMPTY_MESSAGE], ids=["pings", "empty fragments", "empty messages"]
)
@pytest.mark.parametrize("greets", [False, True], ids=["a stranger", "a session"])
async def test_who_sends_only_frames_without_content_is_cut_and_counted(
    relay: Relay, idle: bytes, greets: bool
) -> None:
    hello = encode_control(frames.Hello(1, 8, mono_us=1, ticket=alice()))
    size = b"\xfe" + len(hello).to_bytes(2)
    begin = b"\x82" + size + bytes(4) + hello if greets else b""
    begin += b"\x02\x81" + bytes(4) + b"\x10" if idle == EMPTY else b""
    async with Page(url(relay)) as page, Raw(relay) as attack:
        await page.greet(ticket=alice())
        attack.writer.write(UPGRADE + b"\r\n" + begin + 20_000 * idle)
        assert b"too many pings, pongs or empty frames" in await attack.rest()
        await works(page)
    assert refusals(relay) == {"too many empty frames": 1}


async def test_a_session_may_send_some_pings(relay: Relay) -> None:
    async with Page(url(relay)) as page:
        await page.greet(ticket=alice())
        for _ in range(8):
            await page.socket.ping()
        await works(page)
