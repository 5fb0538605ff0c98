"""docs/tracing.md is true: its Python blocks run, one after the other, as one program, and it names all attributes."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import iris
from iris.testing import LocalCluster
from iris.tracing import spans as names

pytestmark = pytest.mark.timeout(60)

PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"


async def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(blocks) == PAGE.read_text("utf-8").count("```python")
    body = textwrap.indent("\n".join(blocks), "    ")
    space: dict[str, Any] = {"asyncio": asyncio, "iris": iris}
    exec(compile(f"async def program(connect, provider):\n{body}", str(PAGE), "exec"), space)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with LocalCluster() as cluster, asyncio.timeout(30):
        await space["program"](cluster.client, provider)
    assert capsys.readouterr().out.splitlines() == ["placed lamp", "lamp"]
    spans = exporter.get_finished_spans()
    parents = {span.context.span_id: span.name for span in spans if span.context}
    assert [(span.name, span.parent and parents[span.parent.span_id]) for span in spans] == [
        ("publish orders.new", "process shop"),
        ("process shop", "request shop"),
        ("request shop", "checkout"),
        ("checkout", None),
        ("publish orders.new", None),
        ("receive orders.new", None),
        ("process orders.new", "publish orders.new"),
        ("request nobody", None),
    ]


def test_the_page_names_each_attribute() -> None:
    attributes = {
        value for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and value.startswith(("messaging.", "error."))
    }  # fmt: skip
    assert len(attributes) == 15
    named = set(re.findall(r"^\| `((?:messaging|error)\.[a-z_.]+)` \|", PAGE.read_text(), re.M))
    assert named == attributes
