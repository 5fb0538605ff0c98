"""The declarer's alias table: numbers are reused by redeclaring what was used longest ago."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iris.core.aliases import Alias, AliasTable


def filled(limit: int) -> tuple[AliasTable[str], dict[str, Alias]]:
    table: AliasTable[str] = AliasTable(limit)
    return table, {f"k{i}": table.add(f"k{i}", i) for i in range(limit)}


def test_numbers_are_given_out_from_zero_and_found_again() -> None:
    table, aliases = filled(4)
    assert [alias.number for alias in aliases.values()] == [0, 1, 2, 3]
    assert all(table.get(key) is alias for key, alias in aliases.items())
    assert table.get("other") is None
    assert len(table) == 4


def test_a_full_table_declares_the_least_recently_used_again() -> None:
    table, aliases = filled(8)
    aliases["k0"].used = 100
    fresh = table.add("new", 101)
    assert fresh.number == 1
    assert aliases["k1"].number == -1, "whoever cached it sees that it is gone"
    assert table.get("k1") is None
    assert table.get("k0") is aliases["k0"]
    assert aliases["k0"].number == 0


def test_an_eighth_is_evicted_at_once_so_that_sorting_is_seldom() -> None:
    table, aliases = filled(64)
    numbers = [table.add(f"new{i}", 100 + i).number for i in range(8)]
    assert sorted(numbers) == list(range(8))
    assert [alias.number for alias in aliases.values()][:9] == [-1] * 8 + [8]
    assert len(table) == 64


def test_what_was_evicted_can_be_declared_again_under_another_number() -> None:
    table, aliases = filled(8)
    table.add("new", 50)
    again = table.add("k0", 51)
    assert again is table.get("k0")
    assert again.number >= 0
    assert again is not aliases["k0"]


@given(st.lists(st.integers(0, 30), max_size=300))
def test_two_keys_never_share_a_number(keys: list[int]) -> None:
    table: AliasTable[int] = AliasTable(10)
    seen: dict[int, Alias] = {}
    for tick, key in enumerate(keys):
        alias = table.get(key)
        if alias is None:
            alias = seen[key] = table.add(key, tick)
        alias.used = tick
        held = [other.number for other in seen.values() if other.number >= 0]
        assert alias.number >= 0
        assert len(held) == len(set(held)) == len(table) <= 10
        assert max(held) < 10
