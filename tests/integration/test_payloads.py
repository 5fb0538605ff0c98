"""Typed payloads: a handler's annotation chooses what it gets, and what does not fit never runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from support.waiting import until

import iris
from iris.core.message import encode_payload
from iris.logs import event_of
from iris.testing import LocalCluster


class Point(msgspec.Struct):
    x: int
    y: int = 0


@dataclasses.dataclass
class Order:
    number: int
    tags: list[str]


async def asked(service: iris.Service, *payloads: object, **kwargs: Any) -> list[Any]:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        return [await client.request(service.name, p, timeout=5, **kwargs) for p in payloads]


async def test_structs_and_dataclasses_come_and_go_as_messagepack() -> None:
    service = iris.Service("typed")

    @service.on_request
    def run(point: Point) -> Order:
        assert type(point) is Point
        return Order(point.x, [str(point.y)])

    assert await asked(service, Point(1, 2)) == [{"number": 1, "tags": ["2"]}]
    assert await asked(service, Point(3), type=Order) == [Order(3, ["0"])]


async def test_a_coroutine_handler_takes_a_dataclass() -> None:
    service = iris.Service("typed")

    @service.on_request
    async def run(order: Order) -> int:
        return order.number + len(order.tags)

    assert await asked(service, Order(40, ["a", "b"])) == [42]


@pytest.mark.parametrize(
    ("wanted", "sent", "got"),
    [
        (bytes, b"raw", b"raw"), (str, "text", "text"), (str, b"text", "text"), (int, 7, 7), (float, 1.5, 1.5),
        (bool, True, True), (list[int], [1, 2], [1, 2]), (dict[str, int], {"a": 1}, {"a": 1}),
        (int | None, None, None), (tuple[int, str], [1, "x"], (1, "x")), (bytes, [1], b"\x91\x01"),
        (object, {"any": [1]}, {"any": [1]}),
    ],
)  # fmt: skip
async def test_builtin_annotations_decode_into_their_type(
    wanted: Any, sent: object, got: object
) -> None:
    service = iris.Service("typed")
    seen: list[object] = []

    def run(value: Any) -> None:
        seen.append(value)

    run.__annotations__["value"] = wanted
    service.on_request(run)
    await asked(service, sent)
    assert seen == [got]
    assert type(seen[0]) is type(got)


async def test_a_handler_without_annotation_gets_bytes_if_raw_else_the_object() -> None:
    service = iris.Service("any")
    seen: list[object] = []
    service.on_request(lambda value: seen.append(value))
    await asked(service, b"raw", "text", {"a": [1, None, b"b"]}, 7, None, [])
    assert seen == [b"raw", b"text", {"a": [1, None, b"b"]}, 7, None, []]


@pytest.mark.parametrize("coroutine", [False, True])
async def test_a_body_that_does_not_decode_is_an_error_that_says_so_and_did_not_run(
    coroutine: bool,
) -> None:
    service = iris.Service("typed")
    ran: list[Point] = []

    async def later(point: Point) -> None:
        ran.append(point)

    def now(point: Point) -> None:
        ran.append(point)

    service.on_request(later if coroutine else now)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for payload in (b"\xff\xff", {"y": 1}, "text", b""):
            with pytest.raises(iris.RemoteError, match="as Point") as caught:
                await client.request("typed", payload, timeout=5)
            assert not caught.value.may_have_run
        await client.request("typed", Point(1), timeout=5)
        assert ran == [Point(1)]
        assert "failed handlers" not in client.counters


async def test_an_object_that_cannot_be_sent_is_refused_at_the_caller() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.EncodeError, match="cannot encode a value of type object"):
            await client.request("typed", object(), timeout=5)
        for cause in (TypeError, ValueError, iris.DecodeError):  # the last one for one more version
            with pytest.raises(cause):
                await client.publish("t", {1j: 2})
        with pytest.raises(iris.EncodeError, match="surrogates not allowed"):
            await client.push("t", "\udc80")
        outcomes = [each async for each in client.request_many("typed", [object()], timeout=5)]
        assert isinstance(outcomes[0].error, iris.EncodeError)
        with pytest.raises(iris.EncodeError):
            client.survey("typed", object(), timeout=5)
        with pytest.raises(iris.EncodeError):
            await client.streams.append("s", object())


@pytest.mark.parametrize("coroutine", [False, True])
async def test_an_error_of_encoding_or_decoding_inside_a_handler_says_that_it_ran(
    coroutine: bool,
) -> None:
    service = iris.Service("inner")

    def now(payload: bytes) -> None:
        if payload:
            iris.Message(b"text", "t").decode(int)
        raise iris.EncodeError("cannot encode it")

    async def later(payload: bytes) -> None:
        now(payload)

    service.on_request(later if coroutine else now)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for payload, kind in ((b"", "EncodeError"), (b"x", "DecodeError")):
            with pytest.raises(iris.RemoteError, match=kind) as caught:
                await client.request("inner", payload, timeout=5)
            assert caught.value.may_have_run
        assert client.counters["failed handlers"] == 2


async def test_a_reply_that_does_not_fit_the_type_says_that_the_handler_has_run() -> None:
    service = iris.Service("typed")
    service.on_request(lambda value: "text")
    service.on_survey(lambda value: "text")
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        said = "the reply of 4 bytes is text or bytes, not Point; use type=str or type=bytes"
        with pytest.raises(iris.DecodeError, match=said) as caught:
            await client.request("typed", b"", timeout=5, type=Point)
        assert caught.value.may_have_run
        many = client.request_many("typed", [b""], timeout=5, type=Point)
        (outcome,) = [each async for each in many]
        assert isinstance(outcome.error, iris.DecodeError)
        assert outcome.error.may_have_run
        with pytest.raises(iris.DecodeError) as caught:
            [each async for each in client.survey("typed", b"", timeout=5, type=Point)]
        assert caught.value.may_have_run
    assert not iris.DecodeError.may_have_run


async def test_a_raw_payload_for_a_typed_handler_is_answered_with_what_to_do() -> None:
    service = iris.Service("typed")

    @service.on_request
    def run(order: dict) -> None: ...  # type: ignore[type-arg]  # as users write it

    with pytest.raises(iris.RemoteError) as caught:
        await asked(service, "7")
    assert str(caught.value) == (
        "typed: a payload of 1 byte was sent as bytes or text, not as dict; send an object "
        "(on the command line with --pack), or annotate the parameter as str or bytes"
    )
    with pytest.raises(iris.RemoteError) as caught:
        await asked(service, 700)
    assert str(caught.value) == "typed: a payload of 3 bytes does not decode as dict: Expected `object`, got `int`"  # fmt: skip


async def test_a_push_that_does_not_decode_is_one_line_in_the_log_of_the_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = iris.Service("typed")

    @service.on_push
    def run(point: Point) -> None: ...

    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        cluster.client() as member,
        member.serve(service),
    ):
        await sender.push("typed", "text")
        await until(lambda: len(sender.losses) == 1)
        assert "could not decode the payload (see its log)" in sender.losses[0].cause
        assert member.counters["failed handlers"] == 1
    (record,) = (r for r in caplog.records if event_of(r) == "client.handler_failed")
    assert record.exc_info is None
    assert (
        "does not fit its parameter and was not handled: a payload of 4 bytes"
        in record.getMessage()
    )


def test_the_error_of_a_value_that_cannot_be_sent_says_its_type_once() -> None:
    with pytest.raises(iris.EncodeError) as caught:
        encode_payload(object())
    assert str(caught.value) == "cannot encode a value of type object; send bytes instead"
    with pytest.raises(
        iris.EncodeError,
        match=r"of type dict \(it holds a value of type object\); send bytes instead",
    ):
        encode_payload({"inner": object()})


def test_an_object_of_a_known_library_is_told_what_to_send() -> None:
    numpy, pydantic = pytest.importorskip("numpy"), pytest.importorskip("pydantic")
    order = pydantic.create_model("Order", number=(int, 1))
    for value, fix in ((order(), "model_dump(mode='json')"), (numpy.arange(3), "tolist()")):
        kind = type(value).__name__
        with pytest.raises(iris.EncodeError) as caught:
            encode_payload(value)
        assert str(caught.value) == f"cannot encode a value of type {kind}; send its {fix} instead"
        with pytest.raises(iris.EncodeError) as caught:
            encode_payload([value])
        assert str(caught.value) == (
            f"cannot encode a value of type list (it holds a value of type {kind}); send its {fix} instead"
        )


async def test_a_reply_that_cannot_be_sent_is_a_remote_error() -> None:
    service = iris.Service("typed")
    service.on_request(lambda value: object())
    with pytest.raises(iris.RemoteError, match="cannot encode a value of type"):
        await asked(service, b"")


async def test_headers_that_are_too_long_or_no_text_are_refused_at_the_caller() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        for headers in ({"a": "x" * 4000}, {"a": 1}):
            with pytest.raises(iris.IrisError):
                await client.publish("t", b"", headers=headers)  # type: ignore[arg-type]  # the mistake under test
            with pytest.raises(iris.IrisError):
                await client.request("t", b"", timeout=1, headers=headers)  # type: ignore[arg-type]  # as above


async def test_the_whole_message_is_there_for_who_asks() -> None:
    service = iris.Service("whole")
    seen: list[iris.Message] = []

    @service.on_request
    def run(message: iris.Message) -> None:
        seen.append(message)

    await asked(service, {"a": 1}, headers={"h": "v"})
    (message,) = seen
    assert (message.name, message.packed, message.headers) == ("whole", True, {"h": "v"})
    assert message.value == {"a": 1}
    assert message.decode(dict[str, int]) == {"a": 1}
    with pytest.raises(iris.DecodeError):
        message.decode(int)


async def test_a_client_that_compresses_is_understood_by_all() -> None:
    text = "a departure from JFK to LAX, on time; " * 500
    service = iris.Service("archive")

    @service.on_request
    def run(payload: bytes) -> bytes:
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as plain,
        cluster.client(config=iris.ClientConfig(compress=True)) as small,
        plain.serve(service),
        plain.subscribe("flights.>") as subscription,
    ):
        assert await small.request("archive", text, timeout=5, type=str) == text
        await small.publish("flights.JFK", text, headers={"k": "v"})
        message = await anext(aiter(subscription))
        assert message.payload.decode() == text
        assert message.headers == {"k": "v"}


@pytest.mark.parametrize("text", ["7", "x", "\u041f", "\u00c2", ""])
def test_text_is_never_taken_for_a_number(text: str) -> None:
    """The byte of "7" is the number 55 in MessagePack, and two bytes of Cyrillic are a negative one."""
    for wanted in (int, float, bool, int | None):
        with pytest.raises(iris.DecodeError, match="was sent as bytes or text"):
            iris.Message(text.encode(), "numbers").decode(wanted)


def test_a_map_or_array_that_the_sender_encoded_itself_is_decoded() -> None:
    assert iris.Message(b"\x81\xa1x\x01", "points").decode(dict[str, int]) == {"x": 1}
    assert iris.Message(b"\x93\x01\x02\x03", "points").decode(list[int]) == [1, 2, 3]
