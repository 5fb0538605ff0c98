"""docs/messages.md is true: its first Python block is a program, and runs with all other blocks inside it."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
PLACE = re.compile(r"^( +)\.\.\. .*\n", re.M)
"""The line of the program that stands for the other blocks."""


def program() -> str:
    """Return the program of the page, with the other blocks in place of its `...`."""
    page = PAGE.read_text("utf-8")
    first, *others = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    assert 1 + len(others) == page.count("```python")
    (place,) = PLACE.finditer(first)
    body = textwrap.indent("\n".join(others), place.group(1))
    return first[: place.start()] + body + first[place.end() :]


async def test_the_program_of_the_page_runs_with_its_other_blocks(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(), "utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, err
    first, last = out.splitlines()
    assert first.startswith("push thumbnails 1 no members have joined under this name; ")
    assert last == "again"
