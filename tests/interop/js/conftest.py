"""The JavaScript client, by the Node that pip installed, beside Python, at relays in processes of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from interop.js.kit import CLIENT, Node, Page, Relays
from support.required import cannot

import iris

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_node() -> Run:
    """Run Node in clients/js with arguments, and return what it wrote."""
    if not (CLIENT / "node_modules" / "esbuild").is_dir():
        cannot(
            "JS", "no tests of the JavaScript client: its packages are not installed; run `make js`"
        )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CLIENT / "node", *arguments],
            env={**os.environ, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def built(run_node: Run) -> str:
    """Build dist/iris.js, and return what the build said."""
    built = run_node("build.js", "--module-only")
    assert built.returncode == 0, built.stdout
    return built.stdout


@pytest.fixture(scope="session")
def node(built: str) -> Iterator[Node]:
    node = Node()
    yield node
    node.end()


@pytest.fixture(scope="session")
def relays(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    relays = Relays(tmp_path_factory.mktemp("relays"))
    yield relays
    relays.end()


@pytest.fixture
async def page(node: Node, relays: Relays) -> AsyncIterator[Page]:
    """A JavaScript client at the first relay."""
    page = node.page(relays.url(0))
    await page.connect()
    yield page
    await page.close()


@pytest.fixture(params=[0, 1], ids=["one-relay", "two-relays"])
async def python(request: pytest.FixtureRequest, relays: Relays) -> AsyncIterator[iris.Client]:
    """A Python client at the same relay, and at the other one."""
    async with relays.client(request.param) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a cluster or topic that no other test uses."""
    return Path(str(request.node.name)).name.replace("[", "-").replace("]", "")[:200]
