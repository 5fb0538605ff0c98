"""What type checkers say about handlers. mypy and pyright check this file; it never runs.

A comment `type: ignore[…]` marks a mistake that both checkers must find; where they do not, they report the comment as
unnecessary.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, assert_type

import msgspec

import iris


class Order(msgspec.Struct):
    number: int


class Pool:
    pass


@asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[Pool]:
    yield Pool()


service = iris.Service("orders", lifespan=lifespan)


@service.on_request
async def place(order: Order, client: iris.Client, request: iris.Request, pool: Pool) -> str:
    return f"{order.number}"


@service.on_request("cancel", on_cancel="cancel")
async def cancel(number: int) -> None: ...


@service.on_request("print", threads=4)
def print_order(order: Order) -> bytes:
    return b""


@service.on_push
def remind(customer: str) -> None: ...


@service.on_survey
async def count(question: str) -> int:
    return 1


@service.on_tunnel
async def stream(tunnel: iris.Tunnel) -> None: ...


@service.on_publish("orders.>", group="notes")
async def note(order: Order) -> None: ...


@service.on_loss
def gap(lost: iris.Loss) -> None: ...


async def handlers_keep_their_types(client: iris.Client, request: iris.Request) -> None:
    assert_type(await place(Order(1), client, request, Pool()), str)
    assert_type(print_order(Order(1)), bytes)
    assert_type(await count("?"), int)


def wrong_handlers() -> None:
    other = iris.Service("wrong")

    @other.on_request  # type: ignore[type-var]
    def no_parameter() -> None: ...

    @other.on_tunnel  # type: ignore[type-var]
    def plain_tunnel(tunnel: iris.Tunnel) -> None: ...

    @other.on_request(on_cancel="cancel")  # type: ignore[type-var]
    def plain_cancel(order: Order) -> None: ...


async def wrong_calls(client: iris.Client) -> None:
    await client.request("orders", b"")  # type: ignore[call-overload]
    await client.push(b"orders", b"")  # type: ignore[arg-type]
    value: Any = await client.request("orders", b"", timeout=1.0)
    del value


async def on_both_sides(call: iris.Call | iris.Request, call_next: iris.CallNext) -> Any:
    assert_type(call.method, str)
    kind: str = call.kind
    del kind
    return await call_next(call)


around = iris.Service("around", middleware=[on_both_sides])
caller = iris.connect(middleware=[on_both_sides])
