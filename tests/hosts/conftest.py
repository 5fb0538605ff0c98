"""Hosts for tests: network namespaces, which are removed after each test, however it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts.kit import Network
from support.namespaces import Lan, why_not
from support.required import cannot

LOG_BYTES = 6000

networks = pytest.StashKey[list[Network]]()


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_built() -> None:
    if reason := why_not():
        cannot("HOSTS", f"no tests on real hosts: {reason}")


@pytest.fixture
def lan(_hosts_can_be_built: None) -> Iterator[Lan]:
    """A LAN without hosts."""
    with Lan() as built:
        yield built


@pytest.fixture
def make_network(
    lan: Lan, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., Network]:
    """Return a function that creates a named network with new keys and no relay, on the LAN of this test."""
    made = request.node.stash.setdefault(networks, [])

    def make(name: str = "net") -> Network:
        network = Network(lan, tmp_path, name)
        made.append(network)
        return network

    return make


@pytest.fixture
def network(make_network: Callable[..., Network]) -> Network:
    """A network without relays, on the LAN of this test."""
    return make_network()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]  # pytest's own names, untyped
    report = yield
    if report.failed:
        for network in item.stash.get(networks, []):
            for name, relay in network.relays.items():
                if relay.log.exists():
                    report.sections.append((f"relay of {name}", relay.log.read_text()[-LOG_BYTES:]))
    return report
