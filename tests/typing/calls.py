"""What type checkers know about the results of calls. mypy and pyright check this file; it never runs.

`assert_type` fails if a checker infers another type. A comment `type: ignore[…]` marks a mistake that both checkers
must find; where they do not, they report the comment as unnecessary.
"""

from typing import Any, assert_type

import msgspec

import iris
from iris import blocking


class Receipt(msgspec.Struct):
    number: int


async def requests(client: iris.Client) -> None:
    assert_type(await client.request("orders", b"", timeout=1.0, type=Receipt), Receipt)
    assert_type(await client.request("orders", b"", timeout=1.0, type=list[Receipt]), list[Receipt])
    assert_type(await client.request("orders", b"", timeout=1.0, type=iris.Message), iris.Message)
    assert_type(
        await client.request("orders", b"", timeout=1.0, type=Receipt | None), Receipt | None
    )
    assert_type(
        await client.request("orders", b"", timeout=1.0, type=int | list[str]), int | list[str]
    )
    assert_type(await client.request("orders", b"", timeout=1.0), Any)
    number: str = (await client.request("orders", b"", timeout=1.0, type=Receipt)).number  # type: ignore[assignment]
    del number


async def many(client: iris.Client) -> None:
    async for outcome in client.request_many("orders", [b""], timeout=1.0, type=Receipt):
        assert_type(outcome.result(), Receipt)
        assert_type(outcome.reply, Receipt | None)
    async for either in client.request_many("orders", [b""], timeout=1.0, type=int | str):
        assert_type(either.result(), int | str)


async def surveys(client: iris.Client) -> None:
    async for answer in client.survey("orders", b"", timeout=1.0, type=Receipt):
        assert_type(answer, Receipt)
    async for member, maybe in client.survey("orders", b"", timeout=1.0, type=int | None).items():
        assert_type(member, str)
        assert_type(maybe, int | None)
    async for message in client.survey("orders", b"", timeout=1.0):
        assert_type(message, iris.Message)


def decoding(message: iris.Message) -> None:
    assert_type(message.decode(Receipt), Receipt)
    assert_type(message.decode(dict[str, int]), dict[str, int])
    assert_type(message.decode(int | None), int | None)


async def one_at_a_time(client: iris.Client, tunnel: iris.Tunnel) -> None:
    async with client.subscribe("orders.>") as messages:
        assert_type(await anext(messages), iris.Message)
        assert_type(await messages.next(timeout=1.0), iris.Message)
    assert_type(await client.streams.read("orders").next(timeout=1.0), iris.StreamMessage)
    assert_type(
        await client.streams.read("orders").batches().next(timeout=1.0), list[iris.StreamMessage]
    )
    async with client.streams.consumer("orders", "invoices") as work:
        assert_type(await work.next(timeout=1.0), iris.StreamMessage)
    assert_type(await client.watch_members("orders").next(timeout=1.0), iris.Members)
    assert_type(await tunnel.next(timeout=1.0), bytes)


def one_at_a_time_in_threads(client: blocking.Client) -> None:
    with client.subscribe("orders.>") as messages:
        assert_type(next(messages), iris.Message)
        assert_type(messages.next(timeout=1.0), iris.Message)
    assert_type(client.streams.read("orders").next(timeout=1.0), iris.StreamMessage)
    assert_type(client.streams.read("orders").batches().next(timeout=1.0), list[iris.StreamMessage])
    with client.streams.consumer("orders", "invoices") as work:
        assert_type(work.next(timeout=1.0), iris.StreamMessage)
    assert_type(client.watch_members("orders").next(timeout=1.0), iris.Members)
    with client.tunnel("orders", timeout=1.0) as tunnel:
        assert_type(tunnel.next(timeout=1.0), bytes)


def threads(client: blocking.Client) -> None:
    assert_type(client.request("orders", b"", timeout=1.0, type=Receipt), Receipt)
    assert_type(client.request("orders", b"", timeout=1.0, type=int | None), int | None)
    assert_type(client.survey("orders", b"", timeout=1.0, type=Receipt), blocking.Answers[Receipt])
    for outcome in client.request_many("orders", [b""], timeout=1.0, type=Receipt):
        assert_type(outcome.result(), Receipt)
