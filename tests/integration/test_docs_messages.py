"""docs/messages.md is true: its Python blocks run, one after the other, as one program."""

from __future__ import annotations

import asyncio
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import iris
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"


@pytest.fixture
def quiet_logging() -> Any:
    """The page adds a handler to the library's log."""
    log = logging.getLogger("iris")
    before = list(log.handlers)
    yield
    log.handlers[:] = before


async def test_the_blocks_of_the_page_run(
    quiet_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(blocks) == PAGE.read_text("utf-8").count("```python")
    body = textwrap.indent("\n".join(blocks), "    ")
    space: dict[str, Any] = {"asyncio": asyncio, "iris": iris, "logging": logging}
    exec(compile(f"async def program(client, other):\n{body}", str(PAGE), "exec"), space)
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client() as other,
        asyncio.timeout(30),
    ):
        await space["program"](client, other)
    out = capsys.readouterr().out
    assert out.startswith("push thumbnails 1 no members have joined under this name; ")
    assert out.endswith("again\n")
