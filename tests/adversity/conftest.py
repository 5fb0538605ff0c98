"""Fixtures: sites with gateways, and an end to what hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.gateways import eu, world  # noqa: F401 - fixtures


@pytest.fixture
async def nothing_hangs() -> AsyncIterator[None]:
    """A test that uses it fails before its time is over."""
    async with asyncio.timeout(20):
        yield
