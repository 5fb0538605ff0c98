"""Fixtures for tests of programs that use Iris. pytest loads this module by itself where Iris is installed.

    async def test_an_order_is_placed(iris_cluster):
        async with iris_cluster.serve(service), iris_cluster.client() as client:
            assert await client.request("orders", b"espresso", timeout=5.0) == b"placed"

The asynchronous fixtures need pytest-asyncio, or a test that anyio runs. Iris is imported when a test first uses a
fixture, so that other tests start as fast as before.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

if TYPE_CHECKING:
    import iris
    import iris.blocking
    from iris.testing import LocalCluster

F = TypeVar("F", bound=Callable[..., Any])


def async_fixture(function: F) -> F:
    """Make a fixture of an asynchronous generator, for pytest-asyncio if it is installed, else for anyio."""
    try:
        import pytest_asyncio
    except ImportError:
        return cast("F", pytest.fixture(function))
    return cast("F", pytest_asyncio.fixture(function))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker with which a test chooses the seed of its cluster."""
    config.addinivalue_line(
        "markers", "iris_seed(number): seed of the ids and keys of the iris_cluster of this test"
    )


def _seed(request: pytest.FixtureRequest) -> int:
    marker = request.node.get_closest_marker("iris_seed")
    return 0 if marker is None else int(marker.args[0])


@async_fixture
async def iris_cluster(request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    """A relay in this process (`iris.testing.LocalCluster`), to which a test adds clients and services.

    At the end of the test it checks that no message was lost without being counted.
    """
    from iris.testing import LocalCluster

    async with LocalCluster(seed=_seed(request)) as cluster:
        yield cluster


@async_fixture
async def iris_stream_cluster(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[LocalCluster]:
    """`iris_cluster` with a store for durable streams, in the test's temporary directory."""
    from iris.testing import LocalCluster

    async with LocalCluster(seed=_seed(request), data=tmp_path / "iris-data") as cluster:
        yield cluster


@async_fixture
async def iris_client(iris_cluster: LocalCluster) -> AsyncIterator[iris.Client]:
    """A connected client of `iris_cluster`."""
    async with iris_cluster.client() as client:
        yield client


@pytest.fixture
def iris_blocking() -> Iterator[iris.blocking.Client]:
    """A connected `iris.blocking.Client` with a relay of its own, for tests without an event loop."""
    import iris
    import iris.blocking

    keyring = iris.Keyring.single(iris.ClusterKey(os.urandom(32)))
    with iris.blocking.connect(embedded=True, keyring=keyring) as client:
        yield client
