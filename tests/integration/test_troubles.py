"""What a program loses in its own queue, and that its handlers raise, is what operators see: real processes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import Shell, end
from support.dashboards import Dashboard
from support.pages import Scraped, scrape
from support.relays import Daemon
from support.waiting import PATIENCE_S, until, wait_until

import iris
from iris.testing import LocalCluster
from iris.watch import Network, Watch

pytestmark = pytest.mark.timeout(120)

SLOW = """
import asyncio
import iris

async def slow(message):
    await asyncio.sleep(1000)

async def main():
    async with iris.connect() as client:
        async with client.subscribe("ticks.>", slow, limit_bytes=20_000):
            print("ready", flush=True)
            await asyncio.sleep(1000)

asyncio.run(main())
"""
SHOP = """
import iris

orders = iris.Service("orders")

@orders.on_request
async def place(number: int) -> int:
    if number % 10 == 0:
        raise ValueError("a bug in one call of ten")
    return number
"""
LOAD = """
import asyncio, contextlib
import iris

async def main():
    async with iris.connect() as client:
        for number in range(1000):
            await client.publish("ticks.a", bytes(1000))
            await client.flush()
        for number in range(200):
            with contextlib.suppress(iris.RemoteError):
                await client.request("orders", number, timeout=10)

asyncio.run(main())
"""


class Troubled:
    """A relay with a subscriber that lost most of 1,000 publications, and a service of which one call in ten raised."""

    def __init__(self, shell: Shell, relay: Daemon, slow: int, service: int) -> None:
        self.shell, self.relay = shell, relay
        self.slow, self.service = slow, service
        """Process ids."""

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.shell("status", "--json"))
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["cause"]: row for row in self.status()["troubles"]["latest"]}


@pytest.fixture(scope="module")
def troubled() -> Iterator[Troubled]:
    with (
        commands.short_directory("iris-troubles-") as root,
        Daemon(root, "--metrics", "127.0.0.1:0", "--no-mdns") as relay,
    ):
        shell = Shell(root)
        for name, text in (("slow.py", SLOW), ("shop.py", SHOP), ("load.py", LOAD)):
            (root / name).write_text(text)
        assert shell.run("check", "--skip", "clock").returncode == 0, "all is well before"
        service = shell.start("run", "shop:orders")
        wait_until(lambda: shell.run("members", "orders").returncode == 0)
        slow = subprocess.Popen(
            [sys.executable, "slow.py"], env=shell.environ, cwd=root, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert slow.stdout is not None
            assert slow.stdout.readline() == b"ready\n"
            subprocess.run([sys.executable, "load.py"], env=shell.environ, cwd=root, check=True)
            found = Troubled(shell, relay, slow.pid, service.pid)
            wait_until(lambda: {"queue full", "handler failed"} <= found.rows().keys())
            wait_until(lambda: found.rows()["handler failed"]["count"] == 20)
            wait_until(lambda: found.rows()["queue full"]["count"] >= 980)
            yield found
        finally:
            slow.kill()
            slow.communicate()
        service.terminate()
        end(service)
        shell.finish()
        relay.stop()


def test_the_status_has_a_line_for_each_program_and_cause(troubled: Troubled) -> None:
    lost, failed = (troubled.rows()[cause] for cause in ("queue full", "handler failed"))
    assert (lost["pid"], lost["names"]) == (troubled.slow, {"ticks.>": lost["count"]})
    assert (failed["pid"], failed["names"]) == (troubled.service, {"orders": 20})
    text = troubled.shell("status").decode()
    assert re.search(
        rf"reported: \S+ \(pid {troubled.slow}, .*\): lost {lost['count']} messages of ticks.>: its own queue was full; "
        r"the last \d+ min \d+ s ago",
        text,
    )
    assert f"(pid {troubled.service}" in text
    assert "20 calls of orders failed: a handler raised an exception" in text


def test_the_check_warns_and_says_what_to_do(troubled: Troubled) -> None:
    said = troubled.shell.process("check", "--skip", "clock", code=1).decode()
    first, *lines = said.splitlines()
    assert first.startswith("iris warning: programs: ")
    (line,) = [line for line in lines if "programs" in line]
    assert line.startswith("warning  programs ")
    assert f"(pid {troubled.slow}) lost" in line
    assert "let publishers wait (when_full)" in line
    assert f"(pid {troubled.service}) 20 calls of orders failed" in line
    assert "its log has the error (client.handler_failed)" in line


def test_the_metrics_have_counters_by_cause_and_by_program(troubled: Troubled) -> None:
    address = troubled.status()["metrics"]["address"]
    pages: list[Scraped] = []

    def current() -> bool:
        pages.append(scrape(address))
        return pages[-1].sum("iris_relay_reported_total", cause="handler failed") == 20

    wait_until(current)
    lost = troubled.rows()["queue full"]
    assert pages[-1].sum("iris_relay_reported_total", cause="queue full") == lost["count"]
    by_program = {"program": lost["label"], "cause": "queue full"}
    assert pages[-1].sum("iris_relay_program_reported_total", **by_program) == lost["count"]


async def watched(troubled: Troubled) -> Network:
    async with asyncio.timeout(60):
        return await Watch(troubled.relay.socket, keyring=iris.Keyring({})).once(0.3)


async def test_a_watch_without_any_key_finds_both_in_need_of_attention(troubled: Troubled) -> None:
    network = await watched(troubled)
    why = {slow.who: "; ".join(slow.why) for slow in network.slow if slow.kind == "program"}
    assert len(why) == 2
    (lost,) = (text for who, text in why.items() if f"(pid {troubled.slow})" in who)
    (failed,) = (text for who, text in why.items() if f"(pid {troubled.service})" in who)
    assert "messages of ticks.>: its own queue was full" in lost
    assert "20 calls of orders failed" in failed
    programs = {program.pid: program for program in network.programs}
    assert programs[troubled.slow].lost_messages >= 980
    assert programs[troubled.service].failed == 20
    assert {drop.cause for drop in network.drops} >= {"queue full: ticks.>"}


def test_top_and_the_dashboard_show_both(troubled: Troubled, tmp_path: Path) -> None:
    text = troubled.shell("top", "--once", "--interval", "0.3").decode()
    assert "its own queue was full" in text
    assert "20 calls of orders failed" in text
    from integration.test_dashboard import Events

    with Dashboard(tmp_path / "page", troubled.relay.socket, keys=False) as dashboard:
        events = Events(dashboard)
        network = events.next("network")
        events.close()
    assert {each["kind"] for each in network["slow"]} == {"program"}
    assert len(network["slow"]) == 2
    assert {each["cause"] for each in network["troubles"]} == {"queue full", "handler failed"}


# -- when a client reports ---------------------------------------------------------------------------------------


async def rows(client: iris.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.status())["troubles"]["latest"]
    return found


async def test_a_client_that_closes_reports_first_what_it_lost_a_moment_ago() -> None:
    async with LocalCluster() as cluster, cluster.client() as pub:
        async with cluster.client() as sub, sub.subscribe("t", limit_bytes=2000) as messages:
            for _ in range(10):
                await pub.publish("t", bytes(1000))
                await pub.flush()
            await until(lambda: messages.lost_messages)
            lost = messages.lost_messages
        (row,) = await rows(pub)
        assert (row["cause"], row["count"], row["names"]) == ("queue full", lost, {"t": lost})


async def test_what_was_lost_without_a_relay_is_reported_to_the_next_one() -> None:
    async with LocalCluster() as cluster, cluster.client() as sub, sub.subscribe("t"):
        await cluster.stop_relay()
        await until(lambda: sub.losses)
        await cluster.start_relay()
        async with cluster.client() as asking:
            async with asyncio.timeout(PATIENCE_S):
                while not await rows(asking):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.05)
            (row,) = await rows(asking)
            assert row["cause"] == "uncounted"
            assert (row["count"], row["names"]) == (1, {"t": 1})


async def test_a_report_waits_while_the_relay_does_not_read() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        attachment = client._runtime.attached()
        attachment.blocked = True  # as if much were unwritten
        client._runtime.troubles.count("missing", "t")
        client._runtime.troubles.flush()
        assert await rows(client) == []
        attachment.blocked = False
        client._runtime.troubles.flush()
        (row,) = await rows(client)
        assert row["count"] == 1


async def test_a_client_without_losses_sends_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris.troubles.REPORT_S", 0.01)
    from relay.core.troubles import Troubles

    got: list[object] = []
    monkeypatch.setattr(Troubles, "reported", lambda self, session, trouble: got.append(trouble))
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        client.serve(service),
        client.subscribe("t", got.append),
    ):
        await client.request("echo", b"x", timeout=10)
        await client.publish("nobody.listens", b"x")
        await client.broadcast("nobody", b"x")
        await client.flush()
        assert not client._runtime.troubles._timer
    assert got == []


async def test_a_push_that_nobody_gets_and_a_callback_that_raises_are_reported() -> None:
    def broken(payload: bytes) -> None:
        raise ValueError("broken")

    async with LocalCluster() as cluster, cluster.client() as asking:
        async with cluster.client() as client, client.subscribe("t.*", broken):
            await client.push("nobody", b"x")
            await client.publish("t.a", b"x")
            await client.flush()
            await until(lambda: client.counters.get("failed handlers"))
        found = {row["cause"]: row["names"] for row in await rows(asking)}
    assert found == {"not sent": {"nobody": 1}, "handler failed": {"t.*": 1}}
