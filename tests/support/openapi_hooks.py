"""Hooks of schemathesis for the HTTP bridge: names that exist, and streams that end."""

from __future__ import annotations

import zlib
from typing import Any

import schemathesis

NAMES = {"topics": "news.a", "streams": "orders", "clusters": "greeter"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give about half of the calls a name that exists, and end reads at the end of the stream."""
    name = (case.path_parameters or {}).get("name")
    if isinstance(name, str) and case.meta and zlib.crc32(name.encode("utf-8", "replace")) % 2:
        case.path_parameters["name"] = NAMES[case.path.split("/")[1]]
    if case.operation.label == "GET /streams/{name}" and str(
        (case.query or {}).get("follow", "true")
    ) in ("true", "True", "1"):
        case.query = {**(case.query or {}), "follow": "false"}
