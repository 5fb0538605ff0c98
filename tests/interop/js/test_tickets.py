"""A JavaScript client shows tickets, renews them, and is told what they do not allow."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from integration.stores import stored
from interop.js.kit import KEY, Node, Page, Raised

import iris
from iris.crypto.keys import IssuerKey, NetworkKey
from iris.crypto.scopes import Scope
from iris.tickets import Issuer
from relay.config import dev
from relay.core import issuers
from relay.daemon import Relay
from relay.net.web import WebListener

NETWORK = NetworkKey(bytes(range(32)))
SIGNER = IssuerKey(bytes(range(1, 33)))
LOGIN = Issuer(SIGNER, NETWORK.fingerprint)
ALLOW = {"request": ["delays"], "subscribe": ["news.>"]}


@pytest.fixture
async def page(node: Node, tmp_path: Path) -> AsyncIterator[Page]:
    """A page of a relay that requires tickets, with a service at two names; not connected yet."""
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    login = issuers.Issuer("login", (SIGNER.public_key,), Scope(ALLOW))
    config = replace(
        dev(directory / "relay.sock"), listen=("ws://127.0.0.1:0",), tickets=True, issuers=(login,), network_keys=(NETWORK,)
    )  # fmt: skip
    relay = Relay(config)
    await relay.start()
    assert relay.web is not None
    one, two = iris.Service("delays"), iris.Service("secrets")
    one.on_request(lambda payload: payload)
    two.on_request(lambda payload: payload)
    keyring = iris.Keyring.single(KEY)
    async with (
        iris.connect(config.socket_path, keyring=keyring) as client,
        client.serve(one),
        client.serve(two),
    ):
        page = node.page(relay.web.addresses[0])
        yield page
        await page.close()
    await relay.stop(drain_s=0)


async def test_a_session_without_a_ticket_is_refused_with_the_reason(page: Page) -> None:
    with pytest.raises(Raised, match="no ticket") as raised:
        await page.connect()
    assert raised.value.name == "LocalProtocolError"
    with pytest.raises(Raised, match="ticket malformed"):
        await page.connect("ticket: 'a.b.c', waitMs: 20000")


async def test_a_ticket_allows_what_it_names_and_nothing_else(page: Page) -> None:
    ticket = LOGIN.issue("alice", allow=ALLOW, life_s=600)
    await page.connect(f"ticket: {ticket!r}")
    assert await page.run("return s.client.request('delays', 'x', {}).then(text)") == "x"
    with pytest.raises(Raised) as refused:
        await page.run("await s.client.request('secrets', 'x')")
    assert (refused.value.name, refused.value.fields["mayHaveRun"]) == ("RelayError", False)
    await page.run("s.news = s.client.subscribe('news.a'); await s.news.ready")
    with pytest.raises(Raised, match="the relay refused SUBSCRIBE"):
        await page.run("await s.client.subscribe('other').ready")
    with pytest.raises(Raised, match="the relay refused SUBSCRIBE"):
        await page.run("for await (const _ of s.client.subscribe('another'));")


async def test_a_ticket_is_renewed_before_it_expires(page: Page) -> None:
    now_s = time.time()
    tickets = [LOGIN.issue("alice", allow=ALLOW, life_s=life, now_s=now_s) for life in (4, 600)]
    await page.run("s.tickets = args.tickets", tickets=tickets)
    await page.connect("ticket: async () => s.tickets.shift()")
    await page.run("await until(() => s.tickets.length === 0); await s.client.flush();")
    while time.time() < now_s + 5.1:
        assert await page.run("return s.client.request('delays', 'x').then(text)") == "x"
        await page.run("await new Promise((resolve) => setTimeout(resolve, 500))")
    assert await page.run("return s.losses") == []


async def test_an_append_that_the_ticket_does_not_allow_fails_at_once(
    node: Node, tmp_path: Path
) -> None:
    allow = {"read": ["departures"]}
    login = issuers.Issuer("login", (SIGNER.public_key,), Scope(allow))
    async with stored(tmp_path) as (cluster, client, _):
        hub = cluster.relay.hub
        hub.config = replace(
            hub.config, listen=("ws://127.0.0.1:0",), tickets=True, issuers=(login,), network_keys=(NETWORK,)
        )  # fmt: skip
        listener = WebListener(hub, hub.config)
        listener.check_tickets(lambda: {NETWORK.fingerprint.hex()})
        listener.listen(hub.config.web_listen)
        listener.accept()
        page = node.page(listener.addresses[0])
        try:
            await client.streams.create("departures")
            key = cluster.keyring.for_cluster("departures")[0].reveal()
            ticket = LOGIN.issue("alice", allow=allow, life_s=600)
            await page.connect(f"ticket: {ticket!r}, keyring: {{default: {key!r}}}")
            with pytest.raises(Raised, match="does not allow append") as raised:
                await page.run(
                    "await s.client.streams.append('departures', 'x', {timeoutMs: 3_600_000})"
                )
            assert raised.value.name == "StreamUnavailable"
            # Only the relay says that it is not stored.
            assert raised.value.fields["mayHaveRun"] is True
        finally:
            await page.close()
            await listener.close()
