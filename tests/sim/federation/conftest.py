"""Fixture: a federation, in virtual time."""

from __future__ import annotations

import pytest
from sim.kit import federation
from support.sim import SimNetwork


@pytest.fixture
def net() -> SimNetwork:
    """Three sites of three relays, joined by gateways."""
    return federation()
