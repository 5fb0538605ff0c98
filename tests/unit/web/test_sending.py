"""Answers in parts: to who takes them, who stalls, and who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from iris.web.guard import CUT
from iris.web.sending import EVENTS, Gone, Stalled, event, send_parts

PATIENCE_S = 20.0


class Client:
    """Whoever asked. It takes `takes` messages of the answer, then nothing more, and leaves when `leaving` is set."""

    def __init__(self, takes: int = 1 << 30) -> None:
        self.takes = takes
        self.leaving = asyncio.Event()
        self.got: list[dict[str, Any]] = []
        self.cut = 0
        self.closed = False

    async def receive(self) -> dict[str, Any]:
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.got) == self.takes:
            await asyncio.Event().wait()
        self.got.append(message)

    def end(self) -> None:
        self.cut += 1

    async def parts(self, *parts: bytes, last: BaseException | None = None) -> AsyncGenerator[bytes]:  # fmt: skip
        try:
            for part in parts:
                yield part
            if last is not None:
                raise last
        finally:
            self.closed = True

    async def asks(self, parts: AsyncGenerator[bytes], *, stall_s: float = PATIENCE_S) -> None:
        scope = {"state": {CUT: self.end}}
        await send_parts(scope, self.receive, self.send, EVENTS, parts, stall_s=stall_s)


async def test_who_takes_everything_gets_the_parts_and_an_end() -> None:
    client = Client()
    await client.asks(client.parts(b"a", b"b"))
    begun, *bodies = client.got
    assert (begun["status"], dict(begun["headers"])[b"content-type"]) == (200, EVENTS.encode())
    assert [(one["body"], one.get("more_body", False)) for one in bodies] == [(b"a", True), (b"b", True), (b"", False)]  # fmt: skip
    assert (client.closed, client.cut) == (True, 0)


@pytest.mark.parametrize("takes", range(4))  # the head, two parts, and the end
async def test_the_connection_of_who_takes_nothing_any_more_is_ended(takes: int) -> None:
    client = Client(takes)
    with pytest.raises(Stalled):
        await client.asks(client.parts(b"a", b"b"), stall_s=0.001)
    assert (client.closed, client.cut, len(client.got)) == (True, 1, takes)


async def test_the_parts_for_who_leaves_are_closed() -> None:
    client = Client(takes=2)
    client.leaving.set()
    with pytest.raises(Gone):
        await client.asks(client.parts(b"a", b"b"))
    assert (client.closed, client.cut) == (True, 0)


async def test_an_error_before_the_first_part_leaves_nothing_sent() -> None:
    client = Client()
    with pytest.raises(
        TimeoutError, match="no reply"
    ):  # and it is not taken for a client that stalls
        await client.asks(client.parts(last=TimeoutError("no reply")))
    assert (client.got, client.cut) == ([], 0)


def test_an_event_is_one_line_of_data_below_its_kind_and_id() -> None:
    assert event({"text": "a\nb"}, "end", "7") == b'event: end\nid: 7\ndata: {"text":"a\\nb"}\n\n'
    assert event([]) == b"data: []\n\n"
