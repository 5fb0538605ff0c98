"""What the buttons of a page do: pause and resume consumers, look at dead letters, and have them delivered again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from msgspec import Struct

from iris.client import Client
from iris.documents import as_bytes
from iris.errors import IrisError, NoStream, RelayUnavailable, StreamError, StreamUnavailable
from iris.logs import logger
from iris.streams import StreamMessage
from iris.web.problems import Problem
from iris.wire.names import plural, printable

T = TypeVar("T")

log = logger(__name__)

TIMEOUT_S: Final = 10.0
MAX_ACTIONS: Final = 8
"""Actions under way at a time."""
PEEKED: Final = 20
"""Dead letters that are shown at a time, the oldest."""
SHOWN_BYTES: Final = 4096
"""Bytes of a payload that are shown."""
SHOWN_TEXT: Final = 512
SHOWN_HEADERS: Final = 32


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """What a page wants to be done."""

    action: Literal["pause", "resume", "redrive"]
    stream: str
    consumer: str
    uuid: str = ""
    """Identity of the stream, in hex, so that one that was created again is not taken for it."""


class Actions:
    """Carries out what pages want, with a client that connects when it is first needed."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._running = 0

    async def act(self, order: Order, caller: str) -> str:
        """Carry out an order, and return a sentence that says what was done. Raises Problem."""

        async def do(client: Client) -> str:
            streams, name, consumer = client.streams, order.stream, order.consumer
            if order.action == "pause":
                await streams.pause_consumer(name, consumer, uuid=order.uuid, timeout=TIMEOUT_S)
                return f"{consumer} is paused: it receives nothing until it is resumed."
            if order.action == "resume":
                await streams.resume_consumer(name, consumer, uuid=order.uuid, timeout=TIMEOUT_S)
                return f"{consumer} is resumed."
            done = await streams.redrive(name, consumer, uuid=order.uuid, timeout=TIMEOUT_S)
            gone = (
                f" {plural(done.gone, 'message')} are no longer in the stream." if done.gone else ""
            )
            left = (
                f" {done.left} are left, because the consumer is full: redrive again later."
                if done.left
                else ""
            )
            return f"{plural(done.redriven, 'message')} will be delivered to {consumer} again.{gone}{left}"

        said = await self._with_client(do)
        log.info("dashboard.changed", extra={"fields": {"user": caller, "action": order.action, "stream": order.stream, "consumer": order.consumer}})  # fmt: skip
        return said

    async def peek(self, stream: str, uuid: str, consumer: str) -> list[dict[str, Any]]:
        """Return the oldest dead letters of a consumer, ready for JSON. Raises Problem."""

        async def do(client: Client) -> list[dict[str, Any]]:
            found = await client.streams.dead_letters(
                stream, consumer, limit=PEEKED, uuid=uuid, timeout=TIMEOUT_S
            )
            return [_shown(message) for message in found]

        return await self._with_client(do)

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _with_client(self, do: Callable[[Client], Awaitable[T]]) -> T:
        if self._running >= MAX_ACTIONS:
            raise Problem(
                503, f"{MAX_ACTIONS} actions are under way; try again", headers={"retry-after": "1"}
            )
        self._running += 1
        try:
            return await do(await self._opened())
        except IrisError as error:
            raise Problem(_status(error), printable(str(error))) from error
        finally:
            self._running -= 1

    async def _opened(self) -> Client:
        async with self._opening:
            if self._client is None:
                client = self._connect()
                await client.open()
                self._client = client
            return self._client


def _status(error: IrisError) -> int:
    """Return the HTTP status that says whose turn it is after an error."""
    if isinstance(error, NoStream):
        return 404
    if isinstance(error, (RelayUnavailable, StreamUnavailable)):
        return 503
    return 409 if isinstance(error, StreamError) else 400


def _shown(message: StreamMessage) -> dict[str, Any]:
    """Return a dead letter as a page shows it: an object as JSON. Its texts hold no control characters."""
    data = as_bytes(message)
    shown = data[:SHOWN_BYTES]
    try:
        # The end may be in the middle of a character.
        text, binary = (
            shown.decode(errors="strict" if len(shown) == len(data) else "ignore"),
            False,
        )
    except UnicodeDecodeError:
        text, binary = shown.hex(" "), True
    dead = message.dead
    return {
        "offset": dead.offset if dead is not None else message.offset,
        "topic": _text(message.name),
        "why": _text(dead.reason) if dead is not None else "",
        "deliveries": dead.deliveries if dead is not None else message.deliveries,
        "stored_us": message.stored_us,
        "headers": {
            _text(name): _text(value) for name, value in list((message.headers or {}).items())[:SHOWN_HEADERS]
        },
        "bytes": len(message.payload),
        "binary": binary,
        "payload": "\n".join(printable(line) for line in text.split("\n")),
    }  # fmt: skip


def _text(text: str) -> str:
    return printable(text[:SHOWN_TEXT])
