"""Fixtures: sites with gateways."""

from __future__ import annotations

from support.gateways import eu, world  # noqa: F401 - fixtures
