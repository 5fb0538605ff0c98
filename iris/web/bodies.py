"""Reads the body of a request, within a limit of time and one of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from iris.web.problems import Problem

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

BODY_S: Final = 30.0
"""Time for a request to send its body."""


async def read_body(
    scope: Scope, receive: Receive, *, limit_bytes: int, within_s: float = BODY_S, take: Callable[[int], None] | None = None,
) -> bytes:  # fmt: skip
    """Return the body of a request. `take` is called with the size of each part, and may raise.

    Raises:
        Problem: it is over `limit_bytes` (413), was not here `within_s` (408), or ended early (400).
    """
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise Problem(400, "the body ended early", kind="body", may_have_run=False)
                part = event.get("body", b"")
                if take is not None:
                    take(len(part))
                if len(body) + len(part) > limit_bytes:
                    raise _too_large(limit_bytes)
                body += part
                if not event.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {within_s:g} s", kind="body", headers={"connection": "close"}, may_have_run=False) from None  # fmt: skip


def _too_large(limit_bytes: int) -> Problem:
    return Problem(413, f"the body is over the limit of {limit_bytes} bytes", kind="too-large", may_have_run=False)  # fmt: skip
