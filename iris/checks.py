"""Checks of numbers that programs pass: their type and their range."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

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


def check_number(
    name: str, value: object, least: float = -math.inf, most: float = math.inf, *, unit: str = ""
) -> None:
    """Raise ConfigError unless `value` is a number from `least` to `most`. The text begins with `name`.

    `unit`, such as " s", follows the limits in the text.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if least <= float(value) <= most:
        return
    if math.isfinite(most):
        raise ConfigError(f"{name} must be from {least:g} to {most:g}{unit}, not {value}")
    raise ConfigError(f"{name} must be at least {least:g}{unit}, not {value}")


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is True or False. The text begins with `name`."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def check_many(name: str, messages: object, one: str) -> None:
    """Raise ConfigError unless `messages` can be iterated over for messages. `one` is the call for one message.

    Bytes, text and a dict are one message each, but iterating over them gives numbers, characters or keys.
    """
    if isinstance(messages, bytes | bytearray | memoryview | str | dict) or not isinstance(
        messages, Iterable
    ):
        kind = type(messages).__name__
        raise ConfigError(
            f"{name} must be a list or another iterable of messages, not {kind}; send one message with {one}"
        )


def check_text(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is text or bytes. The text of the error begins with `name`."""
    if not isinstance(value, str | bytes):
        raise ConfigError(f"{name} must be str or bytes, not {value!r}")
