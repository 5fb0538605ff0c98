"""The points at which a test kills a store or fails its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def points(numbers: Iterable[int], every: int) -> list[Any]:
    """Return test parameters: each `every`-th number runs in `make test`, all of them in `make proof AREA=points`."""
    return [
        number if place % every == every // 2 else pytest.param(number, marks=pytest.mark.slow)
        for place, number in enumerate(numbers)
    ]
