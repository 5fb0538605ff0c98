"""The picture of imports: files of the product import each other without a circle, and not for types alone."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("iris", "relay", "pyspark_iris", "pytest_iris")
TREES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(file.read_text())
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
}  # fmt: skip


def imported(tree: ast.Module) -> set[str]:
    """Return the product's modules that a file imports anywhere: at its top, in a function, or for types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                within = f"{node.module}.{alias.name}"
                found.add(within if within in TREES else node.module)
    return found & TREES.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that reach one another (Tarjan, 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == numbers[module]:
            at = path.index(module)
            circle = path[at:]
            del path[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph):
        if module not in numbers:
            visit(module)
    return found


def test_circles_are_found() -> None:
    assert circles(
        {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    ) == [
        ["d", "e"],
        ["a", "b", "c"],
    ]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles({module: imported(tree) - {module} for module, tree in TREES.items()}) == []


LAYERS = (
    "iris.errors",
    "iris.wire",
    "iris.crypto",
    "iris.core",
    "iris",
    "relay.core",
    "relay",
    "iris.cli",
    "relay.__main__",
    "relay.store.__main__",
)
"""From the ground up. A module is of the one that most of its name begins with."""
REACH_UP = {"iris.connection", "iris.testing"}
"""They start a relay in this process when they are asked to, and import it then."""


def layer(module: str) -> int:
    """Return how far up a module stands."""
    names = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return LAYERS.index(max(names, key=len))


def test_nothing_above_is_imported_not_even_for_its_types() -> None:
    guilty = [
        (module, other)
        for module, tree in TREES.items()
        if module.startswith(("iris", "relay")) and module not in REACH_UP
        for other in sorted(imported(tree))
        if layer(other) > layer(module)
    ]
    assert guilty == []
