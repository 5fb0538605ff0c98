"""docs/methods.md is true: its Python blocks run, one after the other, as one program."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import iris
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
PRINTED = """\
placed
True
no_method False
out_of_stock 2 True
shop: out_of_stock: come back on Monday (sku='lamp', left=2)
2.1 request price str {'type': 'number'} 1
[True]
0 None sold_out
1 1 None
"""


async def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(blocks) == PAGE.read_text("utf-8").count("```python")
    body = textwrap.indent("\n".join(blocks), "    ")
    space: dict[str, Any] = {"iris": iris}
    exec(compile(f"async def program(client, other):\n{body}", str(PAGE), "exec"), space)
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as other:
        await space["program"](client, other)
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == sorted(PRINTED.splitlines())
