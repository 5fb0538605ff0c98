"""How long calls may still take, as it travels."""

from __future__ import annotations

import math

import pytest

from iris.deadlines import milliseconds
from iris.errors import ConfigError


@pytest.mark.parametrize(
    ("timeout", "wanted"), [(0.0001, 1), (1.5, 1500), (5e6, 0xFFFFFFFF), (math.inf, 0xFFFFFFFF)]
)
def test_a_timeout_fits_its_field_however_long_it_is(timeout: float, wanted: int) -> None:
    assert milliseconds(timeout) == wanted


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan])
def test_a_timeout_that_is_not_above_0_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        milliseconds(timeout)
