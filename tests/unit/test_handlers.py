"""What a handler's annotation asks for, and how what it returns travels."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.waiting import PATIENCE_S

import iris
from iris.core.message import Message
from iris.errors import ConfigError, DecodeError, IrisError
from iris.handlers import Handler, Reply, Request, encode_reply
from iris.parameters import Provided
from iris.testing import LocalCluster


class Point(msgspec.Struct):
    x: int


class Nowhere:
    """Its annotation is not a name that can be found."""


class Model:
    """A class of another library, which msgspec can only check."""


def raw(payload: bytes, *, packed: bool = False) -> Message:
    return Message(payload, "db", {"h": "v"}, packed, b"s" * 16)


def wanted_by(function: Any) -> Any:
    return Handler(function).wanted


def test_the_annotation_of_the_only_parameter_is_what_it_gets() -> None:
    def none(payload): ...  # type: ignore[no-untyped-def]  # the case under test
    def anything(payload: Any) -> None: ...
    def whole(message: Message) -> None: ...
    def request(message: Request) -> None: ...
    def struct(point: Point) -> None: ...
    async def union(value: int | None) -> None: ...

    assert [wanted_by(f) for f in (none, anything, whole, request, struct, union)] == [
        None, None, Message, Request, Point, int | None,
    ]  # fmt: skip


def test_annotations_that_are_text_are_evaluated() -> None:
    def later(point: "Point") -> None: ...  # noqa: UP037 - the case under test

    assert wanted_by(later) is Point


def test_parameters_with_defaults_are_the_handlers_own() -> None:
    def closure(payload: bytes, number: int = 3) -> None: ...

    assert wanted_by(closure) is bytes


def test_methods_partials_callables_and_builtins_are_handlers() -> None:
    class Thing:
        def method(self, payload: str) -> None: ...

        def __call__(self, payload: int) -> None: ...

    def two(first: int, payload: bytes) -> None: ...

    assert wanted_by(Thing().method) is str
    assert Handler(Thing()).convert(raw(b"\x07", packed=True)) in (7,)
    assert Handler(functools.partial(two, 1)).convert(raw(b"x")) == b"x"
    assert Handler([].append).convert(raw(b"x")) == b"x"
    assert wanted_by(lambda payload: payload) is None


@pytest.mark.parametrize("function", [lambda: None, lambda a, b: None])
def test_a_handler_has_one_argument_for_the_payload(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"one argument|only one can receive"):
        Handler(function)


def test_an_annotation_that_cannot_be_evaluated_is_said_at_once() -> None:
    def bad(payload: "Nonexistent") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037 - the case

    with pytest.raises(ConfigError, match=r"annotation of handler 'bad': .*Nonexistent"):
        Handler(bad)


def test_coroutine_functions_are_told_apart() -> None:
    async def coroutine(payload: bytes) -> None: ...

    assert Handler(coroutine).is_coroutine
    assert not Handler(lambda payload: None).is_coroutine


def test_what_does_not_fit_raises_decode_error_and_names_the_type() -> None:
    def point(point: Point) -> None: ...
    def text(text: str) -> None: ...

    assert Handler(point).convert(raw(b"\x81\xa1x\x07", packed=True)) == Point(7)
    with pytest.raises(DecodeError, match="as Point"):
        Handler(point).convert(raw(b"\x81\xa1x\xa1y", packed=True))
    with pytest.raises(DecodeError, match="as str"):
        Handler(text).convert(raw(b"\xff"))


@pytest.mark.parametrize("hint", [Model, list[Model], Model | None, Model | int])
async def test_a_type_that_nothing_decodes_into_is_refused_before_anything_is_sent(
    hint: Any,
) -> None:
    def place(order: Any, client: iris.Client) -> None: ...

    place.__annotations__["order"] = hint
    service = iris.Service("orders")
    service.on_request(place)
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(
            ConfigError, match=r"handler 'place', parameter 'order.*Model.*use a msgspec\.Struct"
        ):
            await client.serve(service).__aenter__()
        with pytest.raises(ConfigError, match=r"cannot be decoded as .*Model"):
            await client.request("orders", b"", timeout=PATIENCE_S, type=hint)
        with pytest.raises(ConfigError, match=r"cannot be decoded as .*Model"):
            client.survey("orders", b"", timeout=PATIENCE_S, type=hint)
        with pytest.raises(ConfigError, match=r"cannot be decoded as .*Model"):
            client.request_many("orders", [b""], timeout=PATIENCE_S, type=hint)
        with pytest.raises(ConfigError, match="handler 'place'"):
            client.subscribe("orders.>", place)


@pytest.mark.parametrize(
    "hint", [object, numbers.Number, Sequence[int], Point, list[Point], int | str, bytes, tuple[int, ...]]
)  # fmt: skip
def test_a_class_that_only_a_decoded_value_can_tell_is_accepted(hint: Any) -> None:
    def place(order: Any) -> None: ...

    place.__annotations__["order"] = hint
    assert Handler(place).resolved(Provided(Nowhere())).wanted == hint


def test_a_request_where_nothing_can_be_answered_is_the_message_and_says_so() -> None:
    def request(message: Request) -> None: ...

    for message in (Handler(request).convert(raw(b"x")),):
        assert isinstance(message, Request)
        assert (message.payload, message.headers, message.source) == (b"x", {"h": "v"}, b"s" * 16)
        with pytest.raises(ConfigError, match="deferred"):
            message.defer()


@pytest.mark.parametrize(
    ("value", "payload", "packed"),
    [
        (None, b"\xc0", True), (b"", b"", False), (b"x", b"x", False), ("ü", "ü".encode(), False), (bytearray(b"x"), b"x", False),
        (memoryview(b"x"), b"x", False), ([1], b"\x91\x01", True), (0, b"\x00", True), (False, b"\xc2", True),
        (Point(1), b"\x81\xa1x\x01", True),
    ],
)  # fmt: skip
def test_bytes_and_text_travel_raw_and_the_rest_as_messagepack(
    value: object, payload: bytes, packed: bool
) -> None:
    assert encode_reply(value) == (payload, None, packed)
    assert encode_reply(Reply(value, {"a": "b"})) == (payload, {"a": "b"}, packed)
    assert encode_reply(Reply(value, {})) == (payload, None, packed)


@pytest.mark.parametrize(
    "value", [object(), {1j: 1}, Reply("x", {"a": 1}), Reply("x", {"a": "x" * 5000})]
)  # type: ignore[dict-item]
def test_an_answer_that_cannot_travel_is_an_error(value: object) -> None:
    with pytest.raises(IrisError):
        encode_reply(value)


def test_a_service_has_one_handler_of_a_kind() -> None:
    service = iris.Service("db")
    service.on_request(lambda payload: payload)
    with pytest.raises(ConfigError, match="already"):
        service.on_request(lambda payload: payload)
    service.on_push(lambda payload: None)
    assert len(service.kinds) == 2


@pytest.mark.parametrize("name", ["", "a b", "a.*", ">"])
def test_a_service_needs_a_cluster_name(name: str) -> None:
    with pytest.raises(iris.InvalidName):
        iris.Service(name)


@pytest.mark.parametrize("limits", [{"concurrency": 0}, {"queue_bytes": 0}, {"tunnels": -1}])
def test_limits_are_at_least_one(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        iris.Limits(**limits)
