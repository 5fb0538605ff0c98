"""How much the tables of an object hold: what a relay must not keep of connections that have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Final

OURS: Final = ("relay.", "iris.")
TABLES: Final = (dict, list, set, deque, frozenset)


def tables(*roots: object) -> dict[str, int]:
    """Return, for every container that is reachable from `roots` through objects of ours, how many entries it has.

    The key is the class and the attribute; containers of the same attribute of several objects count together, and so
    do those within a container. Each object is visited once. Modules, classes and functions are not looked into, but
    what a bound method is bound to is.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    keep: list[Any] = []
    """What was visited, so that no id is used twice."""
    while todo:
        path, thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        keep.append(thing)
        if isinstance(thing, TABLES):
            found[path] = found.get(path, 0) + len(thing)
            todo += ((path, each) for each in _entries(thing))
        if isinstance(thing, tuple):
            todo += ((path, each) for each in thing)
        if bound := getattr(thing, "__self__", None):
            todo.append((path, bound))
        if type(thing).__module__.startswith(OURS):
            todo += (
                (f"{type(thing).__name__}.{name}", value) for name, value in _attributes(thing)
            )
    return found


def _entries(table: Collection[Any]) -> Iterator[Any]:
    if isinstance(table, dict):
        yield from table.keys()
        yield from table.values()
    else:
        yield from table


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    yield from getattr(thing, "__dict__", {}).items()
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return which tables have more entries than before, and how many more."""
    return {path: n - before.get(path, 0) for path, n in after.items() if n > before.get(path, 0)}
