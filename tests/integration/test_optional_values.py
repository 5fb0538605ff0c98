"""None, and values of a union, arrive as they were sent: as a reply, as an argument, in a publication, in a stream."""

from __future__ import annotations

import asyncio
import enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NewType, Optional

import msgspec
import pytest

import iris
import iris.blocking
from iris.testing import LocalCluster


class Order(msgspec.Struct, tag=True):
    number: int


class Shipment(msgspec.Struct, tag=True):
    weight: float


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


Sku = NewType("Sku", str)
TYPES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "struct": (Order | None, [Order(7), None]),
    "structs": (Order | Shipment | None, [Order(7), Shipment(1.5), None]),
    "optional": (Optional[Order], [Order(7), None]),  # noqa: UP045 - the form under test
    "text": (str | None, ["text", "ä", "", None]),
    "bytes": (bytes | None, [b"raw", b"", b"\x90", b"\xc0", b"\xff", None]),
    "both": (bytes | int | None, [b"raw", 7, None]),
    "text or struct": (Order | str | None, [Order(7), "text", None]),
    "int": (int | None, [0, 7, None]),
    "float": (float | None, [0.0, 1.5, None]),
    "bool": (bool | None, [False, True, None]),
    "list": (list[int] | None, [[], [1, 2], None]),
    "dict": (dict[str, int | None] | None, [{}, {"a": 1, "b": None}, None]),
    "literal": (Literal["a", "b"] | None, ["a", "b", None]),
    "literal alone": (Literal["a", "b"], ["a", "b"]),
    "enum": (Color | None, [Color.RED, Color.BLUE, None]),
    "enum alone": (Color, [Color.RED]),
    "new type": (Sku | None, [Sku("a"), None]),
    "short text": (Annotated[str, msgspec.Meta(max_length=5)] | None, ["12345", None]),
    "nothing": (type(None), [None]),
    "any": (Any, [b"raw", 7, None, {"a": 1}]),
}  # fmt: skip
KINDS: Final = ("push", "broadcast", "publish", "subscribe")


def echo(kind: Any, seen: list[Any] | None = None) -> Any:
    """Return a handler with an argument and a result of this type."""

    def handler(value: Any) -> Any:
        if seen is not None:
            seen.append(value)
        return value

    handler.__annotations__ = {"value": kind, "return": kind}
    return handler


@pytest.mark.parametrize("name", TYPES)
async def test_a_reply_and_an_argument_arrive_as_they_were_sent(name: str) -> None:
    kind, values = TYPES[name]
    service = iris.Service("shop")
    seen: list[Any] = []
    service.on_request(echo(kind, seen))
    service.on_request("method")(echo(kind, seen))
    service.on_survey(echo(kind, seen))
    async with LocalCluster() as cluster, cluster.serve(service), cluster.client() as client:
        for value in values:
            seen.clear()
            reply = await client.request("shop", value, timeout=5.0, type=kind)
            assert (reply, type(reply)) == (value, type(value))
            assert await client.request("shop", value, timeout=5.0, type=kind, method="method") == value  # fmt: skip
            survey = client.survey("shop", value, timeout=5.0, type=kind)
            assert [answer async for answer in survey] == [value]
            many = client.request_many("shop", [value, value], timeout=5.0, type=kind)
            assert [outcome.result() async for outcome in many] == [value, value]
            assert seen == [value] * 5
            assert {type(each) for each in seen} == {type(value)}


@pytest.mark.parametrize(
    ("name", "way"),
    # A handler of `Client.subscribe` whose parameter may be anything receives the whole message.
    [(name, way) for name in TYPES for way in KINDS if (name, way) != ("any", "subscribe")],
)
async def test_an_argument_without_a_reply_arrives_as_it_was_sent(name: str, way: str) -> None:
    kind, values = TYPES[name]
    service = iris.Service("shop")
    seen: list[Any] = []
    handler = echo(kind, seen)
    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as receiver:
        if way == "subscribe":
            await receiver.subscribe("orders", handler).ready()
        elif way == "publish":
            service.on_publish("orders")(handler)
        else:
            getattr(service, f"on_{way}")(handler)
        async with receiver.serve(service):
            for value in values:
                if way in ("push", "broadcast"):
                    await getattr(sender, way)("shop", value)
                else:
                    await sender.publish("orders", value)
            await sender.flush()
            await cluster.settle()
        assert seen == values
        assert [type(each) for each in seen] == [type(value) for value in values]
        assert receiver.stats().failed_handlers == 0


@pytest.mark.parametrize("name", TYPES)
async def test_a_message_of_a_stream_decodes_to_what_was_appended(
    name: str, tmp_path: Path
) -> None:
    kind, values = TYPES[name]
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as client:
        await client.streams.create("orders")
        for value in values:
            await client.streams.append("orders", value)
        await client.streams.append_many("orders", values)
        found = [m.decode(kind) async for m in client.streams.read("orders", follow=False)]
    assert found == [*values, *values]
    assert [type(each) for each in found] == [type(value) for value in (*values, *values)]


async def test_none_is_none_in_every_form_of_a_reply() -> None:
    service = iris.Service("shop")

    @service.on_request
    def nothing(payload: bytes) -> None: ...

    @service.on_request("reply")
    def with_headers(payload: bytes) -> iris.Reply:
        return iris.Reply(None, {"a": "b"})

    @service.on_request("later")
    def later(request: iris.Request) -> None:
        deferred = request.defer()
        asyncio.get_running_loop().call_soon(deferred.reply, None)

    @service.on_request("empty")
    def empty(payload: bytes) -> str:
        return ""

    async with LocalCluster() as cluster, cluster.serve(service), cluster.client() as client:
        for method in (None, "reply", "later"):
            assert await client.request("shop", b"", timeout=5.0, method=method) is None
            assert await client.request("shop", b"", timeout=5.0, method=method, type=Order | None) is None  # fmt: skip
        message = await client.request("shop", b"", timeout=5.0, method="reply", type=iris.Message)
        assert (message.value, message.headers) == (None, {"a": "b"})
        assert await client.request("shop", b"", timeout=5.0, method="empty") == b""
        assert await client.request("shop", b"", timeout=5.0, method="empty", type=str | None) == ""


async def test_a_value_outside_a_union_is_refused_with_the_type_that_was_wanted() -> None:
    service = iris.Service("shop")
    service.on_request(echo(Any))
    wrong: list[tuple[Any, Any]] = [
        (Order | None, "text"), (Order | None, b"\xff"), (Literal["a"] | None, "b"), (Color, "green"), (str | None, b"\xff"),
        (str | None, 7), (bytes | None, 7), (type(None), "text"), (int | None, "7"), (Order, None),
        (Annotated[str, msgspec.Meta(max_length=2)] | None, "long"),
    ]  # fmt: skip
    async with LocalCluster() as cluster, cluster.serve(service), cluster.client() as client:
        for kind, value in wrong:
            with pytest.raises(iris.DecodeError, match=r"the reply of \d+ bytes? ") as caught:
                await client.request("shop", value, timeout=5.0, type=kind)
            assert caught.value.may_have_run


def test_a_thread_gets_none() -> None:
    service = iris.Service("shop")

    @service.on_request
    def find(number: int) -> Order | None:
        return Order(number) if number else None

    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    with (
        iris.blocking.connect(embedded=True, keyring=keyring) as client,
        client.serve(service),
    ):
        assert client.request("shop", 7, timeout=5.0, type=Order | None) == Order(7)
        assert client.request("shop", 0, timeout=5.0, type=Order | None) is None
        assert client.request("shop", 0, timeout=5.0) is None
