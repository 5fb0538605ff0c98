"""Members that were here or elsewhere until a moment ago, for the answers to calls that nobody serves now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from relay.core.neighbor import Address

SEEN_US: Final = 600_000_000
"""How long it is known that there were members."""
MAX_SEEN: Final = 4096
"""Limit of addresses; over it, the one whose members left first is forgotten."""
MAX_AT_ONCE: Final = 1024
"""Addresses that are noted when a connection with all its members is lost."""


class _Last(NamedTuple):
    """The last members of an address that left."""

    kinds: frozenset[int]
    where: str
    until_us: int


class Seen:
    """When and where addresses had members last."""

    def __init__(self) -> None:
        self._last: OrderedDict[Address, _Last] = OrderedDict()

    def left(self, address: Address, kinds: Iterable[int], where: str, until_us: int) -> None:
        """Note that a member that serves `kinds` has left; it was connected to `where`, for people."""
        before = self._last.pop(address, None)
        served = frozenset(kinds)
        if before is not None and until_us - before.until_us < SEEN_US:
            served |= before.kinds
        self._last[address] = _Last(served, where, until_us)
        while len(self._last) > MAX_SEEN or until_us - next(iter(self._last.values())).until_us >= SEEN_US:  # fmt: skip
            self._last.popitem(last=False)

    def lost(
        self, addresses: Iterable[tuple[Address, Iterable[int]]], where: str, until_us: int
    ) -> None:
        """Note that a connection to members was lost; of very many addresses, only some."""
        for address, kinds in islice(addresses, MAX_AT_ONCE):
            self.left(address, kinds, where, until_us)

    def last(self, kind: int, address: Address, now_us: int) -> tuple[str, int] | None:
        """Return (where the last members that served `kind` were, µs since they left); None if none are known."""
        last = self._last.get(address)
        if last is None or kind not in last.kinds or now_us - last.until_us >= SEEN_US:
            return None
        return last.where, max(0, now_us - last.until_us)
