"""What authors of services test with: LocalCluster, its faults, and the pytest fixtures."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from integration.kit import echo_service
from support.waiting import until

import iris
from iris.testing import LocalCluster

pytest_plugins = ["pytester"]
QUICK = iris.ClientConfig(reconnect_min_s=0.005, reconnect_max_s=0.02)


def slow_service(started: asyncio.Event) -> iris.Service:
    service = iris.Service("slow")

    @service.on_request
    async def work(payload: bytes) -> bytes:
        started.set()
        await asyncio.sleep(3600)
        return payload

    return service


async def test_a_member_lost_in_the_middle_ends_the_request_and_says_that_it_may_have_run() -> None:
    started = asyncio.Event()
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.serve(slow_service(started)) as member,
    ):
        asked = asyncio.create_task(client.request("slow", b"", timeout=30.0))
        await started.wait()
        cluster.lose(member)
        with pytest.raises(iris.ConnectionLost) as raised:
            await asked
        assert raised.value.may_have_run
        with pytest.raises(iris.NoMembers):
            await client.request("slow", b"", timeout=30.0)


async def test_a_lost_member_serves_again_once_it_is_restored() -> None:
    service = echo_service()
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client(config=QUICK) as member,
        member.serve(service),
    ):
        cluster.lose(member)
        await client.wait_for_members("echo", 0, timeout=5.0)
        await until(lambda: len(cluster.relay.hub.ports) == 1)
        cluster.restore(member)
        await client.wait_for_members("echo", 1, timeout=30.0)
        assert await client.request("echo", b"x", timeout=30.0) == b"x"


async def test_a_message_that_is_held_arrives_late_and_the_deadline_has_passed() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.serve(echo_service()) as member,
    ):
        with cluster.hold(member), pytest.raises(iris.RequestTimeout):
            await client.request("echo", b"x", timeout=0.05)
        assert await client.request("echo", b"y", timeout=30.0) == b"y"


async def test_publications_to_a_held_subscriber_arrive_after_it() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client() as reader,
        reader.subscribe("orders.>") as orders,
    ):
        with cluster.hold(reader):
            await client.publish("orders.new", b"x")
            await client.flush()
            waiting = asyncio.create_task(anext(aiter(orders)))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert (await waiting).payload == b"x"


async def test_a_cut_connection_comes_back_and_so_do_its_services() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client(config=QUICK) as member,
        member.serve(echo_service()),
    ):
        before = (await client.members("echo"))[0].member
        cluster.cut(member)
        async for members in client.watch_members("echo"):
            if [info.member for info in members] not in ([], [before]):
                break
        assert await client.request("echo", b"x", timeout=30.0) == b"x"


async def test_after_a_restart_of_the_relay_everything_is_served_again() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client(config=QUICK) as client,
        cluster.client(config=QUICK) as member,
        member.serve(echo_service()),
    ):
        await cluster.restart_relay()
        assert await client.request("echo", b"x", timeout=30.0, idempotent=True) == b"x"


async def test_a_client_of_another_cluster_cannot_be_hurt() -> None:
    async with LocalCluster() as cluster, LocalCluster() as other, other.client() as stranger:
        with pytest.raises(iris.ConfigError, match="does not belong to this LocalCluster"):
            cluster.lose(stranger)


# -- the pytest fixtures -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
addopts = --strict-markers
"""
PROGRAM = """
import asyncio
import pytest
import iris

service = iris.Service("orders")

@service.on_request
def place(order: str) -> str:
    return f"placed {order}"


async def test_cluster_and_client(iris_cluster, iris_client):
    async with iris_cluster.serve(service):
        assert await iris_client.request("orders", "espresso", timeout=30.0, type=str) == "placed espresso"


async def test_streams(iris_stream_cluster):
    async with iris_stream_cluster.client() as client:
        await client.streams.create("log")
        assert await client.streams.append("log", b"x") == 0


def test_threads(iris_blocking):
    with iris_blocking.serve(service):
        assert iris_blocking.request("orders", "tea", timeout=30.0, type=str) == "placed tea"


def first_id(cluster):
    return cluster.keyring.for_cluster("orders")[0].key_id


seeds = []

@pytest.mark.iris_seed(1)
async def test_seed_one(iris_cluster):
    seeds.append(first_id(iris_cluster))

@pytest.mark.iris_seed(2)
async def test_seed_two(iris_cluster):
    assert first_id(iris_cluster) not in seeds
"""


def test_the_fixtures_work_in_the_tests_of_a_project(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROGRAM)
    pytester.makeini(INI)
    result = pytester.runpytest_subprocess("-p", "pytest_iris")
    result.assert_outcomes(passed=5)


def test_a_project_that_uses_no_fixture_does_not_import_iris(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\ndef test_nothing():\n    assert not [m for m in sys.modules if m.split('.')[0] in ('iris', 'relay')]"
    )
    pytester.makeini(INI)
    result = pytester.runpytest_subprocess("-p", "pytest_iris")
    result.assert_outcomes(passed=1)


def test_the_fixtures_are_listed_with_their_purpose(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-p", "pytest_iris", "--fixtures")
    for name in ("iris_cluster", "iris_stream_cluster", "iris_client", "iris_blocking"):
        result.stdout.fnmatch_lines([f"*{name}*"])
    result.stdout.no_fnmatch_line("*no docstring available*iris*")


def test_the_tests_on_the_page_pass(pytester: pytest.Pytester) -> None:
    """docs/testing.md: its service is a module, and its other Python blocks are a module of tests."""
    text = PAGE.read_text("utf-8")
    service, *blocks = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)
    pytester.makepyfile(shop=service, test_shop="\n".join(blocks))
    pytester.makeini(INI)
    result = pytester.runpytest_subprocess("-p", "pytest_iris")
    result.assert_outcomes(passed=sum(block.count("def test_") for block in blocks))
