"""Sends answers: whole, or in parts to a reader that may be slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive, Send

T = TypeVar("T")


class Gone(Exception):
    """Whoever asked has disconnected, so nobody wants an answer."""


async def send_whole(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    own = [(b"content-length", str(len(body)).encode()), *headers]
    if kind:
        own.append((b"content-type", kind.encode()))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, kind: str) -> None:
    """Begin an answer that comes in parts. Proxies are asked not to collect it."""
    headers = [(b"content-type", kind.encode()), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(send: Send, data: bytes) -> None:
    """Send a part; waits while the reader is slow."""
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def finish(send: Send) -> None:
    """End an answer that came in parts."""
    await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects; then Gone is raised."""
    async with watched(receive):
        return await work


@asynccontextmanager
async def watched(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, and raise Gone. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise Gone from None
        raise
    finally:
        watching.cancel()
