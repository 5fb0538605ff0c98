"""A JavaScript client shows tickets, renews them, and is told what they do not allow."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from integration.web_kit import LOGIN, NETWORK, SIGNER, ticketed
from interop.js.kit import KEY, Node, Page, Raised

import iris
from iris.crypto.scopes import VERBS, Scope
from relay.config import dev
from relay.core import issuers
from relay.daemon import Relay

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


LONG = "{timeoutMs: 600_000}"
DENIED = {
    f"s.client.request('secret', 'x', {LONG})": ("RelayError", "request", "secret", False),
    f"s.client.push('secret', 'x', {LONG})": (None, "push", "secret", None),
    f"iterate(s.client.survey('secret', 'x', {LONG}))": ("RelayError", "survey", "secret", False),
    "s.client.broadcast('secret', 'x')": (None, "broadcast", "secret", None),
    "s.client.publish('secret.a', 'x')": (None, "publish", "secret.a", None),
    "s.client.subscribe('secret.a').ready": ("LocalProtocolError", "subscribe", "secret.a", None),
    "iterate(s.client.subscribe('secret.b'))": ("LocalProtocolError", "subscribe", "secret.b", None),
    "s.client.serve(new iris.Service('secret').onRequest(() => 1))": ("LocalProtocolError", "serve", "secret", None),
    f"s.client.tunnel('secret', {LONG})": ("RelayError", "tunnel", "secret", False),
    "s.client.members('secret', 600_000)": ("LocalProtocolError", "members", "secret", None),
    "iterate(s.client.streams.read('writable'))": ("StreamError", "read", "writable", False),
    "s.client.streams.find('writable', 0)": ("StreamError", "read", "writable", False),
    # Only the relay says that it is not stored.
    f"s.client.streams.append('readable', 'x', {LONG})": ("StreamUnavailable", "append", "readable", True),
    "s.client.streams.describe('hidden')": ("NoStream", "read or consume or append", "hidden", False),
    "iterate(s.client.streams.read('hidden'))": ("NoStream", "read or consume or append", "hidden", False),
    f"s.client.streams.append('hidden', 'x', {LONG})": ("NoStream", "read or consume or append", "hidden", False),
}  # fmt: skip
"""What a ticket that allows to read "readable" and to append to "writable" denies: name of the error (None: it is
reported to `onLoss`), verb, address, and whether it may have run."""


async def test_every_verb_that_a_ticket_denies_fails_at_once_with_its_name(
    node: Node, tmp_path: Path
) -> None:
    async with ticketed(tmp_path, {verb: [">"] for verb in VERBS}) as (cluster, client, listener):
        page = node.page(listener.addresses[0])
        key = cluster.keyring.for_cluster("readable")[0].reveal()
        try:
            for name in ("readable", "writable", "hidden"):
                await client.streams.create(name)
                await client.streams.append(name, "1")
            ticket = LOGIN.issue("alice", allow={"read": ["readable"], "append": ["writable"]}, life_s=600)  # fmt: skip
            await page.connect(f"ticket: {ticket!r}, keyring: {{default: {key!r}}}")
            await page.run("s.iterate = async (items) => { for await (const _ of items); }")
            for call, (error, verb, address, may_have_run) in DENIED.items():
                why = f"the ticket does not allow {verb} for '{address}'"
                code = f"const {{iterate}} = s; await {call};"
                if error is None:
                    await page.run(f"{code} await until(() => s.losses.length);")
                    (lost,) = await page.run("return s.losses.splice(0)")
                    assert (lost["name"], lost["count"], lost["cause"]) == (address, 1, why)
                    continue
                with pytest.raises(Raised) as raised:
                    await page.run(code)
                assert (raised.value.name, raised.value.fields.get("mayHaveRun")) == (error, may_have_run), call  # fmt: skip
                assert why in raised.value.fields["message"], call
            await page.run("for await (const {text} of s.client.streams.read('readable', {start: 'first'})) { s.got = text; break; }")  # fmt: skip
            assert await page.run("return s.got") == "1"
            assert await page.run("return s.client.streams.append('writable', '2')") == 1
        finally:
            await page.close()
