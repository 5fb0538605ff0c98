"""Fixtures: a network of machines back to back, whose relay's account must balance at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from protocol.kit import Network
from protocol.stores import Relay, open_store, relay_of

from relay.store.store import Store


@pytest.fixture
def net() -> Iterator[Network]:
    network = Network()
    yield network
    network.check()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def relay(store: Store) -> Relay:
    """See `relay_of`."""
    return relay_of(store)
