"""A network of machines back to back; its relay's account has to balance at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from protocol.kit import Network


@pytest.fixture
def net() -> Iterator[Network]:
    network = Network()
    yield network
    network.check()
