"""iris.metrics: the counters of clients and services in Prometheus' form, from any thread, and what the page says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support import commands
from support.commands import Shell, dev_relay
from support.pages import Scraped
from support.waiting import PATIENCE_S, until

import iris
import iris.blocking
import iris.metrics
from iris.extras import install_line
from iris.metrics.client import SPECS
from iris.metrics.page import Spec
from iris.testing import LocalCluster
from relay.metrics import bridges

PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text("utf-8")


def page(registry: CollectorRegistry) -> Scraped:
    return Scraped(generate_latest(registry).decode())


async def elsewhere(registry: CollectorRegistry) -> Scraped:
    """Collect in another thread, as an HTTP server does."""
    return await asyncio.to_thread(page, registry)


def named(cluster: LocalCluster, label: str) -> iris.Client:
    return cluster.client(config=iris.ClientConfig(label=label))


async def test_each_outcome_of_a_call_is_counted_for_its_handler() -> None:
    service = iris.Service("shop")
    release = asyncio.Event()
    release.set()

    @service.on_request
    async def order(number: int) -> int:
        await release.wait()
        if number < 0:
            raise iris.Refusal("negative")
        return 10 // number

    @service.on_push
    def note(text: str) -> None:
        raise KeyError(text)

    registry = CollectorRegistry()
    async with (
        LocalCluster() as cluster,
        named(cluster, "shop.py") as member,
        cluster.client() as caller,
    ):
        iris.metrics.ClientCollector(member, registry=registry)
        async with member.serve(service):
            assert await caller.request("shop", 5, timeout=10, type=int) == 2
            for wrong in (0, -1, "text"):
                with pytest.raises(iris.RemoteError):
                    await caller.request("shop", wrong, timeout=10)
            await caller.push("shop", "x")
            await until(lambda: member.stats().failed_handlers == 2)
            release.clear()
            first = asyncio.create_task(caller.request("shop", 1, timeout=10))
            await until(lambda: member.stats().services[0].running == 1)
            busy = await elsewhere(registry)
            release.set()
            await first
            found = await elsewhere(registry)
    assert busy.sum("iris_service_running", cluster="shop") == 1
    assert busy.sum("iris_service_queued_bytes", cluster="shop") > 0
    calls = {
        (labels["kind"], labels["outcome"]): value
        for labels, value in found.samples["iris_service_calls_total"]
    }
    assert calls == {
        ("request", "handled"): 2, ("request", "failed"): 1, ("request", "refused"): 2, ("request", "expired"): 0,
        ("push", "handled"): 0, ("push", "failed"): 1, ("push", "refused"): 0, ("push", "expired"): 0,
    }  # fmt: skip
    assert found.sum("iris_service_timed_calls_total", kind="request") >= 2
    assert found.sum("iris_service_handler_max_seconds", kind="request") > 0
    assert found.sum("iris_client_failed_handlers_total", client="shop.py") == 2
    assert found.sum("iris_client_up", client="shop.py") == 1
    assert found.sum("iris_client_connected", client="shop.py") == 1


async def test_the_metrics_are_the_counters_of_stats() -> None:
    registry = CollectorRegistry()
    async with (
        LocalCluster() as cluster,
        named(cluster, "reader") as reader,
        cluster.client() as writer,
    ):
        collector = iris.metrics.ClientCollector(reader, registry=registry)
        async with reader.subscribe("news.>", lambda payload: None, group="g"):
            for _ in range(5):
                await writer.publish("news.a", b"x")
            await until(lambda: reader.stats().received_messages == 5)
            here, there, stats = Scraped(generate_latest(collector).decode()), await elsewhere(registry), reader.stats()  # fmt: skip
    for found in (here, there):
        assert found.sum("iris_client_messages_total", direction="received") == 5
        assert found.sum("iris_client_bytes_total", direction="received") == stats.received_bytes
        (labels, limit), *none = found.samples["iris_subscription_queue_limit_bytes"]
        assert (labels, limit, none) == (
            {"client": "reader", "filter": "news.>", "group": "g"}, stats.subscriptions[0].limit_bytes, []
        )  # fmt: skip


async def test_a_loop_that_is_held_up_is_shown_with_the_counters_from_before() -> None:
    registry = CollectorRegistry()
    async with LocalCluster() as cluster, named(cluster, "busy") as client:
        iris.metrics.ClientCollector(client, registry=registry)
        await client.publish("a", b"")
        assert (await elsewhere(registry)).sum("iris_client_up") == 1
        found: list[Scraped] = []
        scraper = threading.Thread(target=lambda: found.append(page(registry)))
        scraper.start()
        scraper.join()  # holds up this loop until the scraper has given up
    assert found[0].sum("iris_client_up", client="busy") == 0
    assert found[0].sum("iris_client_messages_total", direction="sent") == 1


async def test_a_client_that_is_closed_is_left_out_and_another_can_be_added() -> None:
    registry = CollectorRegistry()
    async with LocalCluster() as cluster:
        async with named(cluster, "first") as first:
            collector = iris.metrics.ClientCollector(first, registry=registry)
        assert (await elsewhere(registry)).labels("iris_client_up", "client") == []
        async with named(cluster, "second") as second, named(cluster, "second") as twin:
            collector.add(second)
            collector.add(twin)
            await second.publish("a", b"")
            await twin.publish("a", b"")
            found = await elsewhere(registry)
    assert found.labels("iris_client_up", "client") == ["second"]
    assert found.sum("iris_client_messages_total", direction="sent") == 2
    with pytest.raises(ValueError, match="Duplicated"):
        iris.metrics.ClientCollector(registry=registry)


def test_a_client_of_threads_has_metrics_also_after_it_is_closed(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with iris.blocking.connect(embedded=True, config=iris.ClientConfig(label="threads")) as client:
        iris.metrics.ClientCollector(client, registry=registry)
        client.publish("a", b"")
        found = page(registry)
    assert found.sum("iris_client_messages_total", client="threads", direction="sent") == 1
    assert page(registry).samples.get("iris_client_up", []) == []


async def test_the_histogram_has_a_series_for_each_method_and_none_for_methods_that_do_not_exist() -> (
    None
):
    registry = CollectorRegistry()
    service = iris.Service("shop", middleware=[iris.metrics.handler_times(registry)])

    @service.on_request("price")
    async def price(item: str) -> int:
        return 7

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await client.request("shop", "pear", timeout=10, method="price")
        with pytest.raises(iris.RemoteError):
            await client.request("shop", "pear", timeout=10, method="p" * 60)
        found = page(registry)
    name = "iris_service_handler_duration_seconds_count"
    assert found.samples[name] == [({"cluster": "shop", "method": "price"}, 1.0)]


def test_without_the_package_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['prometheus_client'] = None\nimport iris.metrics"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"iris.metrics needs prometheus-client: {install_line('metrics')}" in done.stderr


async def test_the_python_blocks_of_the_page_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    assert len(blocks) == PAGE.count("```python") == 2
    body = textwrap.indent("import iris\n" + "\n".join(blocks) + "\n", "    ")
    space: dict[str, Any] = {}
    exec(compile(f"async def program(client):\n{body}", "monitoring.md", "exec"), space)
    before = set(prometheus_client.REGISTRY._collector_to_names)
    async with LocalCluster() as cluster, named(cluster, "docs") as client:
        await space["program"](client)
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"http://127.0.0.1:91\d\d/metrics", out.pop(0))
    assert out == [
        """['iris_service_handler_duration_seconds_count{cluster="reports",method=""} 1.0']""",
        """['iris_service_calls_total{client="docs",cluster="reports",kind="request",method="",outcome="handled"} 1.0']""",
    ]


@pytest.mark.parametrize(
    ("heading", "specs"), [("your own programs", SPECS), ("bridges", bridges.SPECS)]
)
def test_a_table_of_the_page_lists_exactly_the_metrics(
    heading: str, specs: tuple[Spec, ...]
) -> None:
    text = PAGE.partition(f"## Metrics of {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", text, re.M)
    assert rows == [
        (spec.name, ", ".join(f"`{label}`" for label in spec.labels), spec.help) for spec in specs
    ]


async def scraped(port: int) -> Scraped:
    """Return the page that is served at a port."""
    url = f"http://127.0.0.1:{port}/metrics"

    def get() -> str:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    return Scraped(await asyncio.to_thread(get))


async def test_a_lifespan_may_serve_metrics_again_and_again_in_one_process() -> None:
    ports: list[int] = []

    @asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        async with iris.metrics.serve(client, 9100) as port:
            ports.append(port)
            yield

    before = set(prometheus_client.REGISTRY._collector_to_names)
    for _ in range(2):
        async with LocalCluster() as cluster, named(cluster, "served") as client:
            one = iris.Service("one", lifespan=lifespan)
            two = iris.Service("two", lifespan=lifespan)
            for service in (one, two):
                service.on_request(lambda text: text)
            async with client.serve(one), client.serve(two):
                await client.request("one", b"x", timeout=5)
                assert ports[0] == ports[1], "a process has one page"
                found = await scraped(ports.pop())
                assert found.sum("iris_service_calls_total", cluster="one", outcome="handled") == 1
                assert found.sum("iris_client_up", client="served") == 1
        assert set(prometheus_client.REGISTRY._collector_to_names) == before
        with pytest.raises(OSError, match="refused"):
            await scraped(ports.pop())


async def test_a_port_in_use_is_passed_over_and_a_wrong_address_is_named() -> None:
    registry = CollectorRegistry()
    async with LocalCluster() as cluster, named(cluster, "served") as client:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with iris.metrics.serve(client, port, registry=registry) as found:
                assert port < found < port + 64
        with pytest.raises(iris.ConfigError, match=r"cannot listen at 192\.0\.2\.1:9100: "):
            async with iris.metrics.serve(client, 9100, "192.0.2.1", registry=registry):
                pytest.fail("it was served")
        assert registry._collector_to_names == {}


def test_each_worker_of_the_tutorials_service_has_a_page() -> None:
    """The metrics of step 6 also let the tests of step 5 pass."""
    steps = Path(__file__).parents[2] / "examples" / "tutorial"
    with commands.short_directory("iris-pages-") as root, dev_relay(root, "--data", str(root / "data")):  # fmt: skip
        for step in range(1, 7):
            shutil.copytree(steps / f"step{step}", root, dirs_exist_ok=True)
        shell = Shell(root)
        workers = shell.start("run", "departures", "--workers", "2")
        try:
            assert workers.stderr is not None
            found: set[int] = set()
            while len(found) < 2:
                line = json.loads(workers.stderr.readline())
                if line["event"] == "metrics.serving":
                    found.add(int(line["address"].rpartition(":")[2]))
            for port in found:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:  # fmt: skip
                    assert b"iris_client_up" in answer.read()
        finally:
            workers.terminate()
            workers.communicate(timeout=PATIENCE_S)
            shell.finish()
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "pytest_iris", "-p", "no:cacheprovider", "test_departures.py"],
            cwd=root, env=shell.environ, capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert tests.returncode == 0, tests.stdout
