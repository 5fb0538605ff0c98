"""A relay's metrics and health over HTTP: true, bounded, and without any effect on the relay."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.commands import command
from support.links import Site
from support.pages import Scraped, get, scrape
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, until, wait_until

import iris
import iris.blocking
from iris.errors import ConfigError
from iris.extras import install_line
from relay.config import RelayConfig
from relay.daemon import Relay
from relay.metrics.server import ASKED_S, MAX_CONNECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
ANY_PORT = "127.0.0.1:0"


def address(relay: Relay) -> str:
    assert relay.metrics is not None
    return relay.metrics.address


async def scraped(relay: Relay) -> Scraped:
    return await asyncio.to_thread(scrape, address(relay))


async def got(relay: Relay, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    return await asyncio.to_thread(get, address(relay), path, headers)


async def test_the_account_on_the_pages_of_a_network_is_complete(site: Site) -> None:
    """Two relays under requests, pushes and publications, also to nobody."""
    one = await site.start(metrics=ANY_PORT)
    two = await site.start(one, metrics=ANY_PORT)
    await until(lambda: one.router.links and two.router.links)
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    received: list[object] = []
    async with (
        client(one.config.socket_path) as member,
        client(two.config.socket_path) as caller,
        member.serve(service),
        member.subscribe("news.>", received.append),
    ):
        await caller.wait_for_members("echo", 1, timeout=PATIENCE_S)
        await caller.wait_for_subscribers("news.a", 1, timeout=PATIENCE_S)
        for number in range(20):
            await caller.request("echo", b"x", timeout=PATIENCE_S)
            await caller.publish("news.a", str(number).encode())
            await member.publish("nobody.listens", b"")
        await until(lambda: len(received) == 20)
        with pytest.raises(iris.NoMembers):
            await caller.request("nobody", b"", timeout=5)
        await member.request("echo", b"x", timeout=PATIENCE_S)  # behind all that it published
        pages = [await scraped(one), await scraped(two)]
    for page in pages:
        assert page.account() == 0
        assert page.sum("iris_relay_messages_in_total") > 20
        assert page.sum("iris_relay_links") == 1
        (host,) = page.labels("iris_relay_link_rtt_seconds", "host")
        assert page.sum("iris_relay_link_frames_total", host=host, direction="in") > 0
    assert pages[0].sum("iris_relay_messages_unwanted_total") == 20
    assert pages[1].sum("iris_relay_messages_refused_total") == 1
    assert pages[0].sum("iris_relay_cluster_members", cluster="echo") == 1


def test_the_table_of_the_page_lists_exactly_the_metrics_of_a_running_relay(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, "--data", str(tmp_path / "data"), "--metrics", ANY_PORT) as daemon,
        iris.blocking.connect(daemon.socket, keyring=iris.Keyring({})) as asking,
    ):
        found = scrape(asking.status()["metrics"]["address"])
    text = PAGE.read_text("utf-8").partition("## Metrics of a relay")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", text, re.M)
    assert {name for name, _, _ in rows} == found.names
    assert len(rows) == len(found.names)
    for name, labels, meaning in rows:
        for sample, _ in found.samples.get(name, ()):
            assert set(re.findall(r"`(\w+)`", labels)) == set(sample), name
        if "_process_" not in name:
            family = found.families[
                name.removesuffix("_total") if name not in found.families else name
            ]
            assert family.documentation == meaning, name


async def test_a_port_in_use_is_an_error_at_the_start_and_nothing_is_left_bound(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir(0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        config = RelayConfig(socket_path=tmp_path / "run" / "relay.sock", dev=True, metrics=where)
        relay = Relay(config)
        with pytest.raises(ConfigError) as raised:
            await relay.start()
        await relay.stop(drain_s=0)
    assert str(raised.value) == (
        f"metrics: cannot serve metrics: Address already in use: {where}; stop what listens there, or choose another port"
    )
    assert not config.socket_path.exists()


@pytest.mark.parametrize(
    "wrong", ["9464", "host:9464", "127.0.0.1:", "127.0.0.1:70000", "1.2.3.4:-1"]
)
def test_an_address_that_cannot_be_is_named(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^metrics: '{wrong}' is not HOST:PORT with an IP address"
    ):
        RelayConfig(socket_path=Path("/x"), metrics=wrong)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from relay.metrics.supervisor import check_installed; check_installed()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"metrics: needs prometheus-client: {install_line('metrics')}" in done.stderr


async def test_health_says_whether_the_relay_serves_and_other_paths_do_not_exist(
    site: Site,
) -> None:
    relay = await site.start(metrics=ANY_PORT)
    assert await got(relay, "/live") == (200, "ok\n")
    assert await got(relay, "/ready?x=1") == (200, "ok\n")
    assert (await got(relay, "/other"))[0] == 404
    relay.router.draining = True
    await until_ready_is(relay, (503, "the relay is stopping\n"))
    assert await got(relay, "/live") == (200, "ok\n")


async def until_ready_is(relay: Relay, wanted: tuple[int, str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await got(relay, "/ready") != wanted:
            pass  # the status is asked for again after a second


async def test_a_page_on_loopback_is_not_for_names_that_lead_there(site: Site) -> None:
    relay = await site.start(metrics=ANY_PORT)
    for host in ("localhost:1", "127.0.0.1", "[::1]:9464", "localhost"):
        assert (await got(relay, "/live", {"Host": host}))[0] == 200, host
    for host in ("evil.example", "evil.example:9464", "127.0.0.1.evil.example:80", ""):
        assert (await got(relay, "/metrics", {"Host": host}))[0] == 403, host


async def test_the_process_is_started_again_and_scrapers_only_wait(site: Site) -> None:
    relay = await site.start(metrics=ANY_PORT)
    assert (await got(relay, "/live"))[0] == 200
    assert relay.metrics is not None
    first = relay.metrics.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert (await got(relay, "/live"))[0] == 200
    assert relay.metrics.pid not in (first, None)


async def test_a_relay_that_does_not_answer_is_down_on_its_page_and_not_ready(
    tmp_path: Path,
) -> None:
    def check(daemon: Daemon) -> None:
        with iris.blocking.connect(daemon.socket, keyring=iris.Keyring({})) as asking:
            where = asking.status()["metrics"]["address"]
        assert get(where, "/ready") == (200, "ok\n")
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            while get(where, "/ready")[0] == 200:
                pass  # until the last status is a second old
            assert scrape(where).sum("iris_relay_up") == 0
            assert get(where, "/live") == (200, "ok\n"), "it is given time"
        finally:
            daemon.process.send_signal(signal.SIGCONT)

    daemon = Daemon(tmp_path, "--metrics", ANY_PORT)
    with daemon:
        await asyncio.to_thread(check, daemon)


async def test_the_process_ends_with_a_relay_that_is_killed(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "--metrics", ANY_PORT)
    with daemon:
        async with client(daemon.socket, key=iris.ClusterKey(bytes(32))) as asking:
            pid = (await asking.status())["metrics"]["pid"]
        daemon.process.kill()
        daemon.process.wait()
        await until(lambda: not running(pid))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_scrapers_that_hang_are_cut_and_others_are_answered_meanwhile(site: Site) -> None:
    """More connections than are allowed, which send half a request; the oldest make room."""
    relay = await site.start(metrics=ANY_PORT)
    host, _, port = address(relay).rpartition(":")
    assert (await got(relay, "/live"))[0] == 200
    hanging = [socket.create_connection((host, int(port))) for _ in range(MAX_CONNECTIONS + 8)]
    try:
        for each in hanging:
            each.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        page = await scraped(relay)
        assert page.sum("iris_relay_up") == 1
        for each in hanging:
            each.settimeout(ASKED_S + PATIENCE_S)
            assert await asyncio.to_thread(each.recv, 1) == b""
    finally:
        for each in hanging:
            each.close()
    async with asyncio.timeout(PATIENCE_S):
        while (await scraped(relay)).sum("iris_metrics_connections_cut_total") < len(hanging):
            pass


async def test_a_flood_of_scrapers_costs_the_relay_one_status_a_second(site: Site) -> None:
    relay = await site.start(metrics=ANY_PORT)
    asked = 0
    status = relay.router.status

    def counted() -> dict[str, object]:
        nonlocal asked
        asked += 1
        return status()

    relay.router.status = counted  # type: ignore[method-assign]  # counts
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(20):
        pages = await asyncio.gather(*(scraped(relay) for _ in range(8)))
        assert all(page.sum("iris_relay_up") == 1 for page in pages)
    assert asked <= loop.time() - began_s + 1


async def test_a_request_that_is_none_ends_its_connection_only(site: Site) -> None:
    relay = await site.start(metrics=ANY_PORT)
    host, _, port = address(relay).rpartition(":")

    def send(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            try:
                return connection.recv(64)
            except ConnectionResetError:
                return b""

    for data in (
        b"\x00\xff\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"",
    ):
        answer = await asyncio.to_thread(send, data)
        assert b" 200 " not in answer
    assert (await got(relay, "/live"))[0] == 200


def test_a_relay_with_a_store_passes_iris_check_and_fails_it_when_the_store_cannot_serve(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"

    def checked(*more: str) -> tuple[int, dict[str, Any]]:
        done = warm.run(
            command("check", "--json", "--skip", "clock", *more),
            env=daemon.environ,
            timeout=PATIENCE_S,
        )
        return done.returncode, json.loads(done.stdout)

    with Daemon(tmp_path, "--data", str(data)) as daemon:
        code, found = checked()
        assert (code, found["status"]) == (0, "ok")
        assert [each["check"] for each in found["checks"]] == [
            "relay",
            "links",
            "store",
            "programs",
            "keys",
        ]
        daemon.stop()
    data.chmod(0o777)  # which a store refuses
    with daemon:
        wait_until(lambda: checked()[0] == 2)
        code, found = checked()
    (store,) = [each for each in found["checks"] if each["check"] == "store"]
    assert (code, store["state"]) == (2, "critical")
    assert store["detail"].startswith("cannot serve: data: other users may write to")
