"""Reads the settings of rate quotas, `session_rate` and `address_rate`. `relay.core.rates` applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iris.errors import ConfigError, InvalidName
from iris.wire.names import check_filter

MAX_ADDRESS_RATES: Final = 256
MAX_RATE: Final = 10**12
"""Most messages or bytes a second that a quota can allow."""


def parse_rate(setting: str, text: str) -> tuple[int, int]:
    """Return (messages, bytes) a second of a quota, 0 for no limit; raises ConfigError."""
    numbers = [number.strip() for number in text.split(":")] if text.strip() else []
    whole = [n.isascii() and n.isdigit() and len(n) <= 13 and int(n) <= MAX_RATE for n in numbers]
    if len(numbers) > 2 or not all(whole):
        raise ConfigError(
            f"{setting}: {text!r} is not MESSAGES or MESSAGES:BYTES, whole numbers a second up to {MAX_RATE}"
        )
    messages, size, *_ = (*map(int, numbers), 0, 0)
    return messages, size


def parse_address_rates(texts: Sequence[str]) -> list[tuple[str, tuple[int, int]]]:
    """Return (filter, (messages, bytes) a second) of each entry of `address_rate`; raises ConfigError."""
    if len(texts) > MAX_ADDRESS_RATES:
        raise ConfigError(
            f"address_rate: {len(texts)} entries are over the limit of {MAX_ADDRESS_RATES}; use filters (orders.>)"
        )
    found: dict[str, tuple[int, int]] = {}
    for text in texts:
        pattern, _, quota = text.partition("=")
        if not quota.strip():
            raise ConfigError(f"address_rate: {text!r} lacks a rate; write FILTER=MESSAGES:BYTES")
        try:
            pattern = check_filter(pattern.strip())
        except InvalidName as err:
            raise ConfigError(f"address_rate: {err}") from err
        if pattern in found:
            raise ConfigError(f"address_rate: {pattern} is given twice; keep one")
        found[pattern] = parse_rate("address_rate", quota)
    return list(found.items())
