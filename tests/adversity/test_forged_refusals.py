"""A relay answers every call of a channel itself, with a refusal: callers get an error in time, at small cost, and
nothing is done twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored
from support.waiting import eventually

import iris
from iris.errors import StreamError
from iris.wire.consumers import ConsumerInfo
from iris.wire.streams import Append, Change, Delete, Knock, Refused, encode
from relay.store.channels import Channels
from relay.store.consumer_calls import ConsumerCalls
from relay.store.session import StoreSession

pytestmark = pytest.mark.timeout(60)
SECONDS = 0.8
WRITES = (Append, Change, Delete)


class Forger:
    """Replaces each authenticated answer by a refusal with `code`, if that is set; counts the knocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = ""
        self.writes: bool | None = None
        """Refuse only calls that write (True), only others (False), or all (None)."""
        self.knocks = 0
        self.done: list[Any] = []
        """Calls that the store got, except those that open a channel."""
        answer, door = StoreSession.answer, Channels.door

        def forged(session: StoreSession, question: Any, body: bytes) -> None:
            if (
                self.code
                and question.channel is not None
                and self.writes
                in (
                    None,
                    isinstance(question.call, WRITES),
                )
            ):
                question.channel = None
                body = encode(Refused(self.code, "says the relay"))
                self.done.append(question.call)
            answer(session, question, body)

        def counted(channels: Channels, question: Any, call: Knock, *more: Any) -> Any:
            self.knocks += 1
            return door(channels, question, call, *more)

        monkeypatch.setattr(StoreSession, "answer", forged)
        monkeypatch.setattr(Channels, "door", counted)


async def read(client: iris.Client) -> None:
    async with client.streams.read("orders", patience=SECONDS) as reader:
        await anext(reader)


async def consume(client: iris.Client) -> None:
    async with client.streams.consumer("orders", "work", patience=SECONDS) as work:
        await work.batch()


CALLS: dict[str, Callable[[iris.Client], Awaitable[Any]]] = {
    "append": lambda client: client.streams.append("orders", b"once", timeout=SECONDS),
    "append at": lambda client: client.streams.append("orders", b"once", expect=1, timeout=SECONDS),
    "describe": lambda client: client.streams.describe("orders", timeout=SECONDS),
    "change": lambda client: client.streams.change("orders", max_messages=9, timeout=SECONDS),
    "delete": lambda client: client.streams.delete("orders", timeout=SECONDS),
    "consumers": lambda client: client.streams.consumers("orders", timeout=SECONDS),
    "list": lambda client: client.streams.list(timeout=SECONDS),
    "read": read,
    "consume": consume,
}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "channel") for name in CALLS),
        *(("append", code) for code in ("no-stream", "revision", "leaving")),
    ],
)
async def test_a_forged_refusal_of_every_call_ends_in_time_and_does_nothing_twice(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger = Forger(monkeypatch)
    async with stored(tmp_path) as (_, client, other):
        await client.streams.create("orders")
        assert await client.streams.append("orders", b"first") == 0
        forger.code, forger.knocks = code, 0
        began_s, cpu_s = time.monotonic(), time.process_time()
        with pytest.raises(StreamError):
            async with asyncio.timeout(SECONDS + 15):
                await CALLS[name](client)
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        assert forger.knocks < 60, f"{forger.knocks} knocks in {took_s:.1f} s, {cpu_s:.2f} s of CPU"
        forger.code = ""
        if name == "append":
            await client.streams.append("orders", b"last", timeout=10)
        found = await other.streams.describe("orders")
        async with other.streams.read("orders", follow=False) as reader:
            said = [message.payload async for message in reader]
        assert said.count(b"once") <= 1, said
        assert said[0] == b"first"
        assert found.end == len(said)


async def test_a_change_whose_answers_are_withheld_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger = Forger(monkeypatch)
    async with stored(tmp_path) as (_, client, other):
        await client.streams.create("orders")
        forger.code, forger.writes = "channel", True
        with pytest.raises(StreamError) as refused:
            await client.streams.change("orders", max_messages=9, timeout=SECONDS)
        assert refused.value.may_have_run
        forger.code = ""
        known = await other.streams._stores.describe("orders", "", timeout=5.0)
        assert (known.revision, known.order.definition.max_messages) == (1, 9)
        assert {encode(call) for call in forger.done} == {encode(forger.done[0])}, (
            "the same order each time"
        )


async def test_an_append_whose_first_answer_is_withheld_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger = Forger(monkeypatch)
    async with stored(tmp_path) as (_, client, _other):
        await client.streams.create("orders")
        forger.code = "no-stream"
        appending = asyncio.create_task(
            client.streams.append_many("orders", [b"%d" % n for n in range(20)])
        )
        await eventually(lambda: bool(forger.done))
        forger.code = ""
        assert await appending == list(range(20))
        assert (await client.streams.describe("orders")).end == 20


async def test_a_store_that_always_has_more_is_asked_for_no_more_than_a_store_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def endless(
        consuming: ConsumerCalls, after: str, *, workers: bool
    ) -> tuple[list[ConsumerInfo], bool]:
        asked.append(after)
        infos = [ConsumerInfo(f"c{len(asked):06}.{n}", *[False] * 2, *[0] * 6) for n in range(10)]
        return infos, True

    monkeypatch.setattr(ConsumerCalls, "described", endless)
    monkeypatch.setattr("iris.streams.listing.MAX_FOUND", 200)
    async with stored(tmp_path) as (_, client, _other):
        await client.streams.create("orders")
        async with asyncio.timeout(20):
            assert len(await client.streams.consumers("orders")) == 200
        assert len(asked) == 20
