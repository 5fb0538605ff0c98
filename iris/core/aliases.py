"""Aliases in one direction of a connection: short numbers that replace the constant fields of a sender and an address.

The side that declares an alias chooses its number. When all numbers are in use, the least recently used eighth is
freed. Code that caches an `Alias` sees its `number` become -1 and must look it up again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

MAX_ALIASES: Final = 65_536
K = TypeVar("K", bound=Hashable)


class Alias:
    """One declared alias. `number` is -1 once it was freed; the sender sets `used` to its tick at each use."""

    __slots__ = ("number", "used")

    def __init__(self, number: int, used: int) -> None:
        self.number = number
        self.used = used


class AliasTable(Generic[K]):
    """The declaring side's table: key -> alias, and the free numbers. Holds at most `limit` aliases."""

    __slots__ = ("_by_key", "_by_number", "_free", "_limit", "_next", "_past")

    def __init__(self, limit: int = MAX_ALIASES) -> None:
        self._by_key: dict[K, Alias] = {}
        self._by_number: dict[int, K] = {}
        self._past: dict[int, K] = {}
        self._free: list[int] = []
        self._next = 0
        self._limit = limit

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: K) -> Alias | None:
        """Return the alias declared for `key`, or None."""
        return self._by_key.get(key)

    def key_of(self, number: int) -> K | None:
        """Return the key that `number` was last declared for, or None if it was freed without `remember`."""
        key = self._by_number.get(number)
        return self._past.get(number) if key is None else key

    def forget_past(self) -> None:
        """Forget the keys that `free` remembered. Call it when no frame sent under them is queued any more."""
        if self._past:
            self._past.clear()

    def add(self, key: K, tick: int) -> Alias:
        """Return a new alias for `key`. The caller must declare it before use; `tick` is any rising number."""
        if len(self._by_key) >= self._limit:
            self._evict()
        elif not self._free:
            self._free.append(self._next)
            self._next += 1
        alias = self._by_key[key] = Alias(self._free.pop(), tick)
        self._by_number[alias.number] = key
        self._past.pop(alias.number, None)
        return alias

    def free(self, key: K, *, remember: bool = False) -> None:
        """Free the number of `key`, if it has one.

        With `remember`, `key_of` still finds the key, because frames under it may be queued.
        """
        alias = self._by_key.pop(key, None)
        if alias is not None:
            del self._by_number[alias.number]
            if remember:
                self._past[alias.number] = key
            self._free.append(alias.number)
            alias.number = -1

    def refused(self, number: int, *, full: bool) -> None:
        """Free a number whose declaration the other side refused.

        `full`: it accepts no more aliases, so from now on numbers that it did accept are declared again.
        """
        key = self._by_number.get(number)
        if key is not None:
            self.free(key)
        if full and number in self._free:
            # It comes last, behind the numbers that the other side has accepted.
            self._free.remove(number)
            self._free.insert(0, number)
            self._limit = max(1, len(self._by_key))

    def take_apart(self, size: int) -> Iterator[int]:
        """Forget all keys, `size` of them at a time, because nothing is declared any more; yield how many each time."""
        by_key, by_number = self._by_key, self._by_number
        while by_key:
            count = min(size, len(by_key))
            for _ in range(count):
                _, alias = by_key.popitem()
                del by_number[alias.number]
            yield count

    def _evict(self) -> None:
        oldest = sorted(self._by_key.items(), key=lambda item: (item[1].used, item[1].number))
        for key, alias in oldest[: max(1, self._limit // 8)]:
            self._free.append(alias.number)
            del self._by_number[alias.number]
            alias.number = -1
            del self._by_key[key]
