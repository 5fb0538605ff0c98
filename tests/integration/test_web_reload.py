"""Sessions over WebSocket obey what SIGHUP changes for their tickets: issuers, and the list of revoked tickets."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integration.web_kit import (
    KEYS,
    LOGIN,
    NETWORK,
    STRANGER,
    WIDE,
    alice,
    login,
    near,
    service,
    tickets,
    url,
)
from integration.web_kit import relay as relay
from support.browsers import Page, browser
from support.waiting import until

from iris.crypto.scopes import Scope
from iris.errors import RelayError
from iris.wire import frames
from relay.config import dev
from relay.core import issuers
from relay.daemon import Relay


def change(relay: Relay, **changes: Any) -> None:
    """Give the relay another issuer, as SIGHUP does."""
    relay.reload(replace(relay.config, issuers=(login(**changes),)))


async def works(page: Page) -> None:
    await page.say(frames.Ping(9))
    assert (await page.receive(frames.Pong)).id == 9


async def test_revoked_tickets_and_removed_issuers_end_their_sessions_on_reload(
    relay: Relay, tmp_path: Path
) -> None:
    revoked = tmp_path / "revoked.txt"
    revoked.write_text("# of last week\nlost-phone\nsubject bob\n")
    async with (
        Page(url(relay)) as lost, Page(url(relay)) as bob, Page(url(relay)) as stays,
    ):  # fmt: skip
        await lost.greet(ticket=alice(id="lost-phone"))
        await bob.greet(ticket=LOGIN.issue("bob", allow=WIDE, life_s=60))
        await stays.greet(ticket=alice())
        relay.reload(replace(relay.config, revoked_tickets=revoked))
        assert await lost.closed() == await bob.closed() == (4004, "the ticket was revoked")
        async with Page(url(relay)) as again:
            await again.say(frames.Hello(1, 8, mono_us=1, ticket=alice(id="lost-phone")))
            assert (await again.closed())[1] == "ticket revoked"
        revoked.unlink()
        relay.reload(relay.config)  # is logged, and the old list stays
        relay.reload(replace(relay.config, issuers=(replace_key(login()),)))
        assert await stays.closed() == (4004, "the ticket's issuer was removed")


async def test_an_issuer_that_may_allow_less_binds_the_sessions_that_there_are(
    relay: Relay,
) -> None:
    narrow = replace(login(), allow=Scope({"subscribe": ["chat.>"], "publish": ["chat.>"]}))
    async with (
        near(relay) as here, browser(url(relay), KEYS, ticket=alice()) as there, here.serve(service("delays")),
        there.subscribe("chat.a", lambda message: None),
    ):  # fmt: skip
        assert await there.request("delays", b"1", timeout=20) == b"1"
        (session,) = [port.session for port in relay.hub.ports if port.session.web]
        assert session.ticket is not None
        relay.reload(replace(relay.config, issuers=(narrow,)))
        await until(lambda: session.ticket is not None and session.ticket.checked > 1)
        with pytest.raises(RelayError, match="does not allow request"):
            await there.request("delays", b"2", timeout=20)
        relay.reload(
            replace(relay.config, issuers=(replace(narrow, allow=Scope({"read": ["x"]})),))
        )
        await until(lambda: session.ticket is None)
    assert tickets(relay)["ended"] == {"the ticket's issuer may allow less now": 1}


def replace_key(issuer: issuers.Issuer) -> issuers.Issuer:
    return replace(issuer, public_keys=(STRANGER.public_key,))


OLDER = "the ticket is older than its issuer allows now"


async def test_a_shorter_life_counts_from_the_issue_of_the_tickets_that_there_are(
    relay: Relay,
) -> None:
    now_s = time.time()
    async with Page(url(relay)) as old, Page(url(relay)) as aging, Page(url(relay)) as renewed:
        await old.greet(ticket=alice(now_s=now_s - 100))
        await aging.greet(ticket=alice(now_s=now_s - 56))
        await renewed.greet(ticket=alice(now_s=now_s - 56))
        change(relay, max_life_s=60)
        assert await old.closed() == (4004, OLDER)
        await works(aging)
        await renewed.say(frames.Ticket(5, alice()))  # of 600 s
        assert (await renewed.receive(frames.Ack)).error.startswith("ticket valid for too long")
        await renewed.say(frames.Ticket(6, alice(life_s=60)))
        assert not (await renewed.receive(frames.Ack)).error
        assert await aging.closed() == (4004, OLDER)
        assert time.time() >= now_s + 3
        await works(renewed)
    assert tickets(relay)["ended"] == {OLDER: 2}


async def test_a_life_that_is_made_longer_again_ends_nobody(relay: Relay) -> None:
    async with Page(url(relay)) as page:
        await page.greet(ticket=alice(now_s=time.time() - 100))
        (session,) = [port.session for port in relay.hub.ports]
        change(relay, max_life_s=60)
        change(relay)
        await until(lambda: session.ticket is not None and session.ticket.checked == 3)
        await works(page)
    assert tickets(relay)["ended"] == {}


async def test_sessions_over_a_smaller_limit_of_a_subject_end_the_newest_first(
    relay: Relay,
) -> None:
    fewer = "the ticket's issuer allows fewer sessions of a subject now"
    async with (
        Page(url(relay)) as first, Page(url(relay)) as second, Page(url(relay)) as third, Page(url(relay)) as bob,
    ):  # fmt: skip
        for page in (first, second, third):
            await page.greet(ticket=alice())
        await bob.greet(ticket=LOGIN.issue("bob", allow=WIDE, life_s=60))
        change(relay, sessions_per_subject=1)
        change(relay, sessions_per_subject=2)
        assert await third.closed() == (4004, fewer)
        change(relay, sessions_per_subject=1)
        # A ticket that was renewed meanwhile does not save a session.
        await second.say(frames.Ticket(5, alice()))
        assert await second.closed() == (4004, fewer)
        for page in (first, bob):
            await works(page)
        async with Page(url(relay)) as again:
            await again.say(frames.Hello(1, 8, mono_us=1, ticket=alice()))
            assert (await again.closed())[1].startswith("too many sessions of a subject")
    assert tickets(relay)["ended"] == {fewer: 2}
    await until(lambda: not relay.hub.ports)
    assert tickets(relay)["subjects"] == 0


async def test_an_issuer_that_gets_another_name_keeps_its_sessions(relay: Relay) -> None:
    async with Page(url(relay)) as page:
        await page.greet(ticket=alice())
        relay.reload(replace(relay.config, issuers=(replace(login(), name="signin"),)))
        await page.say(frames.Ticket(5, alice()))
        assert not (await page.receive(frames.Ack)).error
        await works(page)
        assert tickets(relay)["subjects"] == 1
    await until(lambda: not relay.hub.ports)
    assert tickets(relay)["subjects"] == 0


async def test_a_relay_that_starts_without_issuers_obeys_those_that_are_added_later(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    relay = Relay(replace(dev(directory / "relay.sock"), listen=("ws://127.0.0.1:0",), network_keys=(NETWORK,)))  # fmt: skip
    await relay.start()
    try:
        async with browser(url(relay), KEYS) as before:
            relay.reload(replace(relay.config, issuers=(login(),)))
            async with (
                near(relay) as here, here.serve(service("delays")), here.serve(service("hidden")),
                browser(url(relay), KEYS, ticket=alice()) as there,
            ):  # fmt: skip
                assert await there.request("delays", b"1", timeout=20) == b"1"
                with pytest.raises(RelayError, match="does not allow request"):
                    await there.request("hidden", b"1", timeout=20)
                assert await before.request("hidden", b"1", timeout=20) == b"1"
    finally:
        await relay.stop(drain_s=0)
