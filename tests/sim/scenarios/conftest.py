"""Fixture: three relays, in virtual time."""

from __future__ import annotations

import pytest
from support.sim import SimNetwork


@pytest.fixture
def net() -> SimNetwork:
    """Three relays, fully linked, whose hosts' clocks show different times."""
    return SimNetwork(seed=1, relays=3)
