"""docs/failures.md is true: its Python blocks run, one after the other, as one program."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import iris
from iris import log_texts
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"


@pytest.fixture
def quiet_logging() -> Iterator[None]:
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
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("no members have joined under this name; ")
    assert out[1].startswith("push nobody no members have joined under this name")
    assert out[2] == "broadcast nobody no members"


def test_the_page_names_every_field_of_stats_and_only_errors_and_events_that_exist() -> None:
    text = PAGE.read_text("utf-8")
    for kind in (iris.Stats, iris.SubscriptionStats, iris.ServiceStats, iris.HandlerStats):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, field.name
    section = text.partition("## Errors")[2].partition("## The log")[0]
    errors = re.findall(r"^\| `(\w+)`", section, re.M)
    assert len(errors) > 8
    for error in errors:
        assert issubclass(getattr(iris, error), iris.IrisError)
    for event in re.findall(r"`((?:client|service)\.\w+)`", text.partition("## The log")[2]):
        known = event in log_texts.SENTENCES or hasattr(iris.Client, event.partition(".")[2])
        assert known or event in ("client.losses", "client.counters"), event
