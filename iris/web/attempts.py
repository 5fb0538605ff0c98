"""How often an address may present a wrong token.

A right token always passes: tokens are too long to guess, and else one program with a wrong token would keep out all
others of its host or behind its proxy. What is limited is what wrong ones cost: answers, and lines in the log.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

BURST: Final = 10
"""Wrong tokens that an address may present at once."""
INTERVAL_S: Final = 6.0
"""Time after which it may present another one."""
MAX_ADDRESSES: Final = 4096


class Attempts:
    """Wrong tokens of each address, in bounded memory. When the table is full, all new addresses share one limit."""

    def __init__(self, *, max_addresses: int = MAX_ADDRESSES) -> None:
        self._max_addresses = max_addresses
        self._free_at_s: OrderedDict[str, float] = OrderedDict()
        """Address -> the time at which nothing is held against it. Those that failed last are at the end."""

    def __len__(self) -> int:
        return len(self._free_at_s)

    def wait_s(self, address: str, now_s: float) -> float:
        """Count a wrong token. Return 0 if it is within the limit, else the seconds to wait before the next one.

        One over the limit does not make the wait longer.
        """
        key = _network(address)
        table = self._free_at_s
        if key not in table and len(table) >= self._max_addresses:
            self._forget(now_s)
            if len(table) >= self._max_addresses:
                key = ""
        free_at_s = max(table.get(key, now_s), now_s)
        over_s = free_at_s - now_s - (BURST - 1) * INTERVAL_S
        if over_s > 0:
            return over_s
        table[key] = free_at_s + INTERVAL_S
        table.move_to_end(key)
        return 0.0

    def _forget(self, now_s: float) -> None:
        """Remove the addresses with nothing held against them."""
        for key in [key for key, free_at_s in self._free_at_s.items() if free_at_s <= now_s]:
            del self._free_at_s[key]


def _network(address: str) -> str:
    """Return what counts as one sender: an IPv4 address, or the /64 of an IPv6 address, which one host may fill."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if parsed.version == 4:
        return str(parsed)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)).network_address)
