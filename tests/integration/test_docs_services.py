"""docs/services.md is true: its Python blocks run, one after the other, as one program."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "services.md"


async def test_the_blocks_of_the_page_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)
    assert len(blocks) == text.count("```python")
    body = textwrap.indent("\n".join(blocks), "    ")
    space: dict[str, Any] = {"__name__": "page"}
    exec(
        compile(f"async def program(client):\n{body}", str(PAGE), "exec", dont_inherit=True), space
    )
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client() as client,
        asyncio.timeout(30),
    ):
        await space["program"](client)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed[:2]) == ["order 7 is placed", "placed 7"]
    assert printed[2:] == [
        "30",
        "closed",
        "shipped 8",
        "report 7",
        "('Call', 'request', 'pay') ('Request', 'request', 'pay')",
        "safe 7 is open",
        "unauthorized",
    ]
