"""What a ticket does not allow fails at once, names the verb and the address, is counted, and sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from integration.stores import whole
from integration.web_kit import OTHER, alice, service, ticketed
from support.browsers import Page, browser
from support.waiting import PATIENCE_S

import iris
from iris.cli.status import _print_tables
from iris.crypto.scopes import VERBS
from iris.errors import LocalProtocolError, RelayError
from iris.metrics.page import Page as MetricPage
from iris.wire import frames
from iris.wire.consumers import Consumers, DescribeConsumers
from iris.wire.kinds import NO_KEY
from relay.core import admitted
from relay.metrics.figures import SPECS, Labels, fill

LONG_S = 600.0
"""Timeout of every call: what fails at once does not wait for it."""
ALLOW = {"read": ["readable"], "append": ["writable"]}
ALL = {verb: [">"] for verb in VERBS}
"""What the issuer may allow."""


async def survey(there: iris.Client) -> None:
    async for _ in there.survey("secret", b"?", timeout=LONG_S):
        pass


async def tunnel(there: iris.Client) -> None:
    async with there.tunnel("secret", timeout=LONG_S):
        pass


async def subscribe(there: iris.Client) -> None:
    async with there.subscribe("secret.a", lambda message: None):
        pass


async def serve(there: iris.Client) -> None:
    async with there.serve(service("secret")):
        pass


def consume(stream: str) -> Callable[[iris.Client], Awaitable[object]]:
    async def work(there: iris.Client) -> None:
        async with there.streams.consumer(stream, "board") as consumer:
            await anext(aiter(consumer))

    return work


class Denied(NamedTuple):
    """A call that the ticket does not allow. `error` None: it is reported to `on_loss` instead."""

    call: Callable[[iris.Client], Awaitable[object]]
    error: type[Exception] | None
    verb: str
    address: str
    may_have_run: bool | None = None
    counted: str = ""
    """Verb under which it is counted, if that is another one."""


TABLE = {
    "request": Denied(lambda c: c.request("secret", b"?", timeout=LONG_S), RelayError, "request", "secret", False),
    "push": Denied(lambda c: c.push("secret", b"?"), None, "push", "secret"),
    "survey": Denied(survey, RelayError, "survey", "secret", False),
    "broadcast": Denied(lambda c: c.broadcast("secret", b"?"), None, "broadcast", "secret"),
    "publish": Denied(lambda c: c.publish("secret.a", b"?"), None, "publish", "secret.a"),
    "subscribe": Denied(subscribe, LocalProtocolError, "subscribe", "secret.a"),
    "serve": Denied(serve, LocalProtocolError, "serve", "secret"),
    "tunnel": Denied(tunnel, RelayError, "tunnel", "secret", False),
    "members": Denied(lambda c: c.members("secret"), LocalProtocolError, "members", "secret"),
    "read": Denied(lambda c: whole(c, "writable"), iris.StreamError, "read", "writable", False),
    "fetch": Denied(lambda c: c.streams.fetch("writable", 0, timeout=LONG_S), iris.StreamError, "read", "writable", False),
    "find": Denied(lambda c: c.streams.find("writable", datetime(2026, 1, 1, tzinfo=UTC), timeout=LONG_S), iris.StreamError, "read", "writable", False),
    # Only the relay says that it was not stored, so it may have been.
    "append": Denied(lambda c: c.streams.append("readable", b"x", timeout=LONG_S), iris.StreamUnavailable, "append", "readable", True),
    "consume": Denied(consume("readable"), iris.StreamError, "consume", "readable", False),
    "consumers": Denied(lambda c: c.streams.consumers("readable", timeout=LONG_S), iris.StreamError, "consume", "readable", False),
    "delete-consumer": Denied(
        lambda c: c.streams.delete_consumer("readable", "board", timeout=LONG_S), iris.StreamError, "delete-consumer", "readable", True
    ),
    "change": Denied(lambda c: c.streams.change("writable", max_bytes=1 << 20, timeout=LONG_S), iris.StreamError, "change", "writable", True),
    "delete": Denied(lambda c: c.streams.delete("writable", timeout=LONG_S), iris.StreamError, "delete", "writable", True),
    "create": Denied(lambda c: c.streams.create("new", timeout=LONG_S), iris.StreamError, "create", "stores", None),
    **{
        f"{what} of a stream that the ticket does not name": Denied(call, iris.NoStream, "read or consume or append", "hidden", False, "stream")
        for what, call in {
            "describe": lambda c: c.streams.describe("hidden", timeout=LONG_S),
            "read": lambda c: whole(c, "hidden"),
            "append": lambda c: c.streams.append("hidden", b"x", timeout=LONG_S),
            "consume": consume("hidden"),
            "delete": lambda c: c.streams.delete("hidden", timeout=LONG_S),
        }.items()
    },
}  # fmt: skip


async def test_every_verb_that_a_ticket_denies_fails_at_once_with_its_name_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handled: list[bytes] = []
    secret = service("secret")
    for register in (secret.on_push, secret.on_broadcast, secret.on_survey):
        register(lambda payload: handled.append(payload))

    @secret.on_tunnel
    async def talk(tunnel: iris.Tunnel) -> None:
        handled.append(b"tunnel")

    async with ticketed(tmp_path, ALL) as (cluster, client, listener), client.serve(secret):
        for name in ("readable", "writable", "hidden"):
            await client.streams.create(name)
            await client.streams.append(name, b"1")
        text = alice(allow=ALLOW)
        async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
            losses: list[iris.Loss] = []
            there.on_loss = losses.append
            counted: dict[str, int] = {}
            for name, denied in TABLE.items():
                why = f"the ticket does not allow {denied.verb} for '{denied.address}'"
                async with asyncio.timeout(PATIENCE_S):
                    if denied.error is None:
                        await denied.call(there)
                        await there.flush(timeout=LONG_S)
                        (lost,) = losses
                        assert (lost.name, lost.count, lost.cause) == (denied.address, 1, why), name
                        losses.clear()
                    else:
                        with pytest.raises(denied.error) as raised:
                            await denied.call(there)
                        assert type(raised.value) is denied.error, name
                        assert why in str(raised.value), name
                        if denied.may_have_run is not None:
                            assert raised.value.may_have_run is denied.may_have_run, name
                found = dict(cluster.relay.router.admission.status()["denied"])
                verb = denied.counted or denied.verb
                grown = {each for each in found if found[each] != counted.get(each)}
                # Before a stream is created, its client looks whether it exists.
                assert grown - ({"stream"} if name == "create" else set()) == {verb}, name
                counted = found
            assert await there.streams.list() == []
            assert [m.payload for m in await whole(there, "readable")] == [b"1"]
            assert await there.streams.append("writable", b"2") == 1
        report = await client.status()
        queues = {"bytes": 0, "limit_bytes": 9, "full": 0, "shed": 0}
        users = {"held": 0, "limit": 9, "refused": 0}
        report.update(
            web=listener.status(), queues=queues, users=users, protocol_errors=0, turned_away=0
        )
    assert handled == []
    assert counted.keys() >= set(VERBS)
    page = MetricPage(SPECS)
    fill(page, report, Labels(), "1")
    (family,) = [each for each in page.families() if each.name == "iris_relay_web_tickets_denied"]
    counted["stores"] = 1  # for the list above
    assert {each.labels["verb"]: each.value for each in family.samples} == counted
    _print_tables(report, {})
    said = " ".join(capsys.readouterr().out.split())
    assert "refused to browsers by their tickets: 1 request, 1 push," in said


async def take(there: iris.Client, consumer: str, create: bool = True) -> bytes:
    """Return the first message of a consumer of the stream "orders"."""
    async with (
        asyncio.timeout(PATIENCE_S),
        there.streams.consumer("orders", consumer, shared=True, create=create) as work,
    ):
        return (await anext(aiter(work))).payload


async def test_a_ticket_with_consume_creates_no_consumer(tmp_path: Path) -> None:
    async with ticketed(tmp_path, ALL) as (cluster, client, listener):
        await client.streams.create("orders")
        await client.streams.append("orders", b"1")
        text = alice(allow={"consume": ["orders"]})
        async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
            with pytest.raises(
                iris.StreamError, match="'page' of 'orders' to be created: no ticket"
            ):
                await take(there, "page")
            assert await client.streams.consumers("orders", timeout=LONG_S) == []
            with pytest.raises(iris.StreamError, match="the stream has no consumer 'page'"):
                await take(there, "page", create=False)
            assert await client.streams.consumers("orders", timeout=LONG_S) == []
            assert await take(client, "page") == b"1"
            assert await take(there, "page", create=False) == b"1"
            with pytest.raises(iris.StreamError, match="set create=False"):
                await take(there, "page")
            (found,) = await there.streams.consumers("orders", timeout=LONG_S)
            assert found.name == "page"
        assert cluster.relay.router.admission.status()["denied"]["consume"] == 2


async def test_a_ticket_may_name_the_consumers_that_it_allows(tmp_path: Path) -> None:
    allow = {"consume": ["orders#page-*", "orders#board"]}
    for issuer, ticket in ((ALL, allow), (allow, {"consume": ["orders"]})):
        directory = tmp_path / str(len(issuer))
        directory.mkdir()
        async with ticketed(directory, issuer) as (cluster, client, listener):
            await client.streams.create("orders")
            await client.streams.append("orders", b"1")
            for name in ("page-1", "board", "board2", "invoices"):
                await take(client, name)
            text = alice(allow=ticket)
            async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
                for name in ("page-1", "board"):
                    assert await take(there, name, create=False) == b"1"
                for name in ("board2", "invoices"):
                    why = f"the ticket does not allow consume for consumer '{name}' of 'orders'"
                    with pytest.raises(iris.StreamError, match=why):
                        await take(there, name, create=False)
                with pytest.raises(iris.StreamError, match="consume for the list of consumers"):
                    await there.streams.consumers("orders", timeout=LONG_S)


async def test_a_worker_with_a_ticket_stands_by_and_learns_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ticketed(tmp_path, ALL) as (cluster, client, listener):
        await client.streams.create("orders")
        await client.streams.append("orders", b"1")
        text = alice(allow={"consume": ["orders"]})
        async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
            work = client.streams.consumer("orders", "page")
            async with asyncio.timeout(PATIENCE_S):
                await anext(work)
            other = there.streams.consumer("orders", "page", create=False)
            waiting = asyncio.create_task(anext(other))

            async def standing() -> int:
                (found,) = await client.streams.consumers("orders")
                assert len(found.active) == 1
                return found.standing

            async with asyncio.timeout(PATIENCE_S):
                while await standing() != 1:  # noqa: ASYNC110 - the store has no event for it
                    await asyncio.sleep(0.02)
            (found,) = await there.streams.consumers("orders")
            assert (found.active, found.standing_by, found.standing) == ([], [], 1)
            with pytest.raises(iris.StreamError, match="does not allow hand-over for 'orders'"):
                await there.streams.handover_consumer("orders", "page")
            assert not waiting.done()
            monkeypatch.setattr(admitted, "MAX_WORKERS", 1)
            with pytest.raises(iris.StreamError, match="has 1 workers that are active or stand by"):
                await anext(there.streams.consumer("orders", "page", create=False))
            await work.close()
            async with asyncio.timeout(PATIENCE_S):
                message = await waiting
            assert (message.payload, message.deliveries, other.active) == (b"1", 1, True)
            await other.close()
            async with there.streams.consumer("orders", "page", create=False) as another:
                async with asyncio.timeout(PATIENCE_S):
                    assert (await anext(another)).payload == b"1"  # the closed one does not count


async def test_no_ticket_lists_the_workers_of_a_consumer(tmp_path: Path) -> None:
    async with ticketed(tmp_path, ALL) as (cluster, client, listener):
        await client.streams.create("orders")
        text = alice(allow={"consume": ["orders"]})
        async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
            call = DescribeConsumers(workers=True)
            with pytest.raises(
                iris.StreamError, match="workers of 'orders' to be listed: no ticket"
            ):
                await there.streams._stores.ask_stream(
                    "orders", "", call, Consumers, timeout=LONG_S
                )


@pytest.mark.parametrize("others", [(NO_KEY,), (NO_KEY, OTHER.key_id), (OTHER.key_id, NO_KEY)])
async def test_a_session_with_a_ticket_learns_no_stores_whichever_key_it_names_first(
    tmp_path: Path, others: tuple[bytes, ...]
) -> None:
    async with ticketed(tmp_path, ALL) as (cluster, _, listener):
        keys = [*cluster.keyring.entries()["default"], OTHER]
        key_ids = [keys[0].key_id, *others]
        async with Page(listener.addresses[0]) as page:
            welcome = await page.greet(ticket=alice(allow=ALLOW))
            for key in keys:
                signature = key.sign_proof(
                    relay_id=welcome.relay_id, session_id=welcome.session_id, challenge=welcome.challenge
                )  # fmt: skip
                await page.say(frames.Prove(0, key.public_key, signature))
            await page.say(frames.Members(1, "readable", key_ids, streams=True))
            assert (await page.receive(frames.Membership)).joined == []
        assert cluster.relay.router.admission.status()["denied"] == {"stores": 1}
