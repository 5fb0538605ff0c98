"""Checks of numbers that programs pass: their type and their range."""

from __future__ import annotations

import math
import numbers

from iris.errors import ConfigError


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ConfigError unless `value` is an int from `least` to `most`. The text begins with `name`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    number = int(value)
    if most is None:
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    elif not least <= number <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, not {value}")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Raise ConfigError unless `value` is a number of at least `least`. The text begins with `name`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if not float(value) >= least:
        raise ConfigError(f"{name} must be at least {least:g}, not {value}")
