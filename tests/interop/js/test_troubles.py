"""A JavaScript client reports to its relay what it lost and that its handlers raised, as a Python one does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from interop.js.kit import Page, Relays
from support.waiting import PATIENCE_S

import iris

SLOW = """
s.subscription = s.client.subscribe(args.name, { limitBytes: 5000 });
await s.subscription.ready;
"""
FAILING = """
s.binding = await s.client.serve(new iris.Service(args.name)
    .onRequest((value) => { if (value % 10 === 0) throw new TypeError("broken"); return value; })
    .onRequest("refuse", () => { throw new iris.Refusal("sold_out"); })
    .onPush(() => { throw new TypeError("broken"); }));
"""


async def reported(client: iris.Client, name: str, cause: str, wanted: int) -> dict[str, Any]:
    """Return the row of a cause and name once it counts so many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for row in (await client.status())["troubles"]["latest"]:
                if row["cause"] == cause and row["names"].get(name, 0) >= wanted:
                    found: dict[str, Any] = row
                    return found
            await asyncio.sleep(0.05)


async def test_a_slow_subscriber_in_javascript_is_shown_by_its_relay(
    page: Page, relays: Relays
) -> None:
    name = "troubles.slow"
    await page.run(SLOW, name=name)
    async with relays.client(0) as client:
        for _ in range(50):
            await client.publish(name, bytes(1000))
            await client.flush()
        row = await reported(client, name, "queue full", 46)
        lost = await page.run("return s.subscription.lostMessages;")
        assert row["label"] == "javascript"
        assert row["names"][name] == lost


async def test_failing_handlers_in_javascript_are_shown_by_their_relay_and_refusals_are_not(
    page: Page, relays: Relays
) -> None:
    name = "troubles-failing"
    await page.run(FAILING, name=name)
    async with relays.client(0) as client:
        for number in range(20):
            with contextlib.suppress(iris.RemoteError):
                await client.request(name, number, timeout=10)
            with contextlib.suppress(iris.RemoteError):
                await client.request(name, number, method="refuse", timeout=10)
        await client.push(name, 1)
        row = await reported(client, name, "handler failed", 3)
        assert row["names"][name] == 3


async def test_a_javascript_client_that_closes_reports_first(page: Page, relays: Relays) -> None:
    name = "troubles-nobody"
    await page.run("await s.client.push(args.name, 1);", name=name)
    await page.run("await until(() => s.losses.length); await s.client.close();")
    async with relays.client(0) as client:
        await reported(client, name, "not sent", 1)
