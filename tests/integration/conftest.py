"""Fixtures: a relay that accepts sessions over TLS, a cluster with a store, linked relays, and sites with gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored, two_stores
from support.gateways import eu, world  # noqa: F401 - fixtures
from support.links import site  # noqa: F401 - a fixture

from iris.crypto.keys import NetworkKey
from iris.remote import create_access
from relay.config import RelayConfig
from relay.daemon import Relay

NETWORK = NetworkKey(bytes(range(32)))


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that accepts sessions over TLS on a free port, without links."""
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    config = RelayConfig(
        socket_path=directory / "relay.sock", network_keys=(NETWORK,), mdns=False, port=0, bind=("127.0.0.1",),
        listen=("tls://127.0.0.1:0",), drain_timeout_s=1.0,
    )  # fmt: skip
    relay = Relay(config)
    await relay.start()
    yield relay
    await relay.stop(drain_s=0)


@pytest.fixture
def access(tmp_path: Path) -> Path:
    """An access file for `relay`."""
    path = tmp_path / "access.pem"
    create_access(path, NETWORK)
    return path


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Any]:
    """A cluster with a store, and two clients of it."""
    async with stored(tmp_path) as made:
        yield made


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Any]:
    """A cluster, two clients, and the second of two stores."""
    async with two_stores(tmp_path) as made:
        yield made
