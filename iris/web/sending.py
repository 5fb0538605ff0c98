"""Sends answers: whole, or in parts to a reader that may be slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from iris.web.guard import cut
from iris.wire.texts import json_bytes

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

EVENTS: Final = "text/event-stream"
"""Media type of server-sent events."""


class Gone(Exception):
    """Whoever asked has disconnected, so nobody wants an answer."""


class Stalled(Exception):
    """Whoever asked has taken nothing for too long; the connection was ended."""


async def send_whole(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    own = [(b"content-length", str(len(body)).encode()), *headers]
    if kind:
        own.append((b"content-type", kind.encode()))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def send_parts(
    scope: Scope, receive: Receive, send: Send, kind: str, parts: AsyncGenerator[bytes], *, stall_s: float
) -> None:  # fmt: skip
    """Send an answer that comes in parts, and begins with the first of them. Proxies are asked not to collect it.

    `parts` is closed at the end. The body of the request must have been read.

    Raises:
        Gone: the client has disconnected.
        Stalled: it has taken nothing for `stall_s`.
        Exception: as `parts`; nothing was sent if it is before the first one.
    """

    async def pass_on(message: Message) -> None:
        try:
            async with asyncio.timeout(stall_s):
                await send(message)
        except TimeoutError:
            cut(scope)
            raise Stalled from None

    started = False
    async with watched(receive), aclosing(parts) as found:
        async for part in found:
            if not started:
                started = True
                headers = [(b"content-type", kind.encode()), (b"x-accel-buffering", b"no")]
                await pass_on({"type": "http.response.start", "status": 200, "headers": headers})
            await pass_on({"type": "http.response.body", "body": part, "more_body": True})
    await pass_on({"type": "http.response.body", "body": b""})


def event(document: Any, kind: str = "", id: str = "") -> bytes:
    """Return a server-sent event. JSON has no line breaks, so the data is one line."""
    head = (f"event: {kind}\n" if kind else "") + (f"id: {id}\n" if id else "")
    return head.encode() + b"data: " + json_bytes(document) + b"\n\n"


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
