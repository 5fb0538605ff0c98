"""Foreign programs: nngcat of Debian's nng-utils, and pynng."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from interop.sp.kit import NNGCAT, Bridge, World, a_world, make_ws_bridge
from support.required import cannot

TIMEOUT_S = 60
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _foreign_programs() -> None:
    reason = "" if NNGCAT else "nngcat is not installed (apt-get install nng-utils)"
    try:
        import pynng  # noqa: F401 - only whether it is there
    except ImportError as err:
        reason = str(err)
    if reason:
        cannot("NNG", f"no tests of the SP bridge: {reason}")


@pytest.fixture(scope="session")
def world(_foreign_programs: None) -> Iterator[World]:
    """A relay for all tests that do not end it."""
    yield from a_world()


@pytest.fixture
def bridge(shared_bridge: Bridge) -> Iterator[Bridge]:
    """The shared bridge, for tests that do not end it. After each test it has no peer left."""
    yield shared_bridge
    shared_bridge.until_alone()


@pytest.fixture(scope="session")
def shared_bridge(world: World) -> Bridge:
    """A bridge process with an entry for each pattern and transport."""
    tls = f'tls_cert = "{world.root}/server.pem"\ntls_key = "{world.root}/server.key"'
    rep = 'protocol = "rep"\ncluster = "answers"\ntimeout_s = 3'
    return Bridge(
        world,
        "\n".join(
            f"[[socket]]\n{entry}\n"
            for entry in (
                f'{rep}\nname = "rep-ipc"\nlisten = "{world.ipc("rep")}"',
                f'{rep}\nname = "rep-tcp"\nlisten = "tcp://127.0.0.1:0"',
                f'{rep}\nname = "rep-tls"\nlisten = "tls+tcp://127.0.0.1:0"\n{tls}',
                f'{rep}\nname = "rep-mutual"\nlisten = "tls+tcp://127.0.0.1:0"\n{tls}\ntls_ca = "{world.root}/server.pem"',
                f'protocol = "rep"\ncluster = "missing"\nname = "rep-error"\nerror_reply = "!"\nlisten = "{world.ipc("rep-error")}"',
                f'protocol = "rep"\ncluster = "missing"\nname = "rep-silent"\nlisten = "{world.ipc("rep-silent")}"',
                f'protocol = "req"\ncluster = "asked"\nname = "req"\ntimeout_s = 3\nlisten = "{world.ipc("req")}"',
                f'protocol = "req"\ncluster = "asked-by-dialling"\nname = "req-dial"\ndial = "{world.ipc("req-dial")}"',
                f'protocol = "respondent"\ncluster = "crowd"\nname = "respondent"\ntimeout_s = 3\nlisten = "{world.ipc("respondent")}"',
                f'protocol = "surveyor"\ncluster = "surveyed"\nname = "surveyor"\ntimeout_s = 3\nlisten = "{world.ipc("surveyor")}"',
                f'protocol = "surveyor"\ncluster = "surveyed-all"\nname = "surveyor-all"\nanswers = "all"\ntimeout_s = 0.7\nlisten = "{world.ipc("surveyor-all")}"',
                f'protocol = "sub"\nname = "sub"\nlisten = "{world.ipc("sub")}"\nunder = "legacy."\nseparator = "|"',
                f'protocol = "sub"\nname = "sub-whole"\nlisten = "{world.ipc("sub-whole")}"\ntopic = "whole"\nprefixes = ["a", "b"]',
                f'protocol = "pub"\nname = "pub"\nlisten = "{world.ipc("pub")}"\nunder = "legacy."\nseparator = "|"\ntopics = ["legacy.>"]',
                'protocol = "pub"\nname = "pub-bare"\nlisten = "tcp://127.0.0.1:0"\nbare = true\ntopics = ["plain"]',
                f'protocol = "pull"\ncluster = "work"\nname = "pull"\nlisten = "{world.ipc("pull")}"',
                f'protocol = "pull"\ncluster = "later"\nname = "pull-later"\nlisten = "{world.ipc("pull-later")}"',
                f'protocol = "push"\ncluster = "worked"\nname = "push"\nlisten = "{world.ipc("push")}"',
                f'protocol = "bus"\ncluster = "bus"\nname = "bus"\nlisten = "{world.ipc("bus")}"',
                f'protocol = "pair"\ncluster = "archive"\nname = "pair-in"\ntimeout_s = 2\nlisten = "{world.ipc("pair-in")}"',
                f'protocol = "pair"\ncluster = "paired"\nname = "pair-out"\ndirection = "out"\nlisten = "{world.ipc("pair-out")}"',
            )
        ),
    )


@pytest.fixture(scope="session")
def _ws_bridges(world: World) -> list[Bridge]:
    return []


@pytest.fixture
def ws_bridge(world: World, _ws_bridges: list[Bridge]) -> Bridge:
    """A separate bridge for ws and wss: nng 1.11 may crash when such a connection ends, and the next test gets a
    new one.
    """
    if not _ws_bridges or _ws_bridges[-1].hit_by_nng:
        _ws_bridges.append(make_ws_bridge(world))
    return _ws_bridges[-1]
