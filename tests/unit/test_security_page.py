"""SECURITY.md: every test that the page names exists, and every claim names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/[\w/]+\.py)?)(?:::(test_\w+))?`")


def _named() -> list[tuple[str, str]]:
    """Return (file, test) of each test on the page. `::test` alone belongs to the file named before it in its row."""
    named = []
    for line in (ROOT / "SECURITY.md").read_text().splitlines():
        file = ""
        for path, test in NAMED.findall(line):
            file = path or file
            if file:
                named.append((file, test))
    return named


def test_every_test_that_the_page_names_is_there() -> None:
    missing = []
    for file, test in _named():
        if not (ROOT / file).is_file():
            missing.append(file)
            continue
        tree = ast.parse((ROOT / file).read_text())
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
        if test and test not in functions:
            missing.append(f"{file}::{test}")
    assert missing == []


def test_each_claim_names_a_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    claims = page[page.index("## What shows it\n") : page.index("## Not covered\n")]
    rows = [line.strip("|").split(" | ") for line in claims.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "claim"]
    assert len(rows) > 20
    assert [row for row in rows if len(row) != 3 or "`tests/" not in row[2]] == []
