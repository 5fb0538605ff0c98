"""What several parameters of a handler receive, and what is said about those that cannot be filled."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec
import pytest

import iris
from iris.errors import ConfigError, DecodeError
from iris.handlers import Handler, subscriber
from iris.parameters import Provided

T = TypeVar("T")


class Point(msgspec.Struct):
    x: int


class Pool(Generic[T]):
    pass


class SmallPool(Pool[int]):
    pass


class Wrong:
    pass


POOL = SmallPool()
CLIENT = iris.connect()


def message(payload: bytes = b"\x81\xa1x\x07", *, packed: bool = True) -> iris.Message:
    return iris.Message(payload, "db", {"h": "v"}, packed, b"s" * 16)


def received(function: Any, *provided: object) -> Any:
    handler = Handler(function).resolved(Provided(CLIENT, provided or [POOL]))
    return handler.function(handler.convert(message()))


def test_each_parameter_receives_what_its_annotation_names() -> None:
    def all_(point: Point, client: iris.Client, request: iris.Request, pool: SmallPool) -> Any:
        return point, client, type(request), request.payload, pool

    def reversed_(pool: SmallPool, whole: iris.Message, client: iris.Client, point: Point) -> Any:
        return pool, whole.headers, client, point

    assert received(all_) == (Point(7), CLIENT, iris.Request, message().payload, POOL)
    assert received(reversed_) == (POOL, {"h": "v"}, CLIENT, Point(7))


def test_a_parameter_without_annotation_receives_the_decoded_payload() -> None:
    def handler(client: iris.Client, payload) -> Any:  # type: ignore[no-untyped-def]  # the case under test
        return payload, client

    assert received(handler) == ({"x": 7}, CLIENT)


def test_a_handler_may_leave_the_payload_out() -> None:
    def nothing(client: iris.Client) -> Any:
        return client

    def headers(request: iris.Request, client: iris.Client) -> Any:
        return request.headers, client

    assert received(nothing) is CLIENT
    assert received(headers) == ({"h": "v"}, CLIENT)


def test_an_object_is_found_by_its_class_or_a_base_class() -> None:
    def base(point: Point, pool: Pool) -> Any:  # type: ignore[type-arg]  # the case under test
        return pool

    def generic(point: Point, pool: Pool[int]) -> Any:
        return pool

    assert received(base) is received(generic) is POOL


def test_an_exact_class_is_preferred_to_a_base_class() -> None:
    def base(point: Point, pool: Pool) -> Any:  # type: ignore[type-arg]  # the case under test
        return pool

    plain: Pool[str] = Pool()
    assert received(base, POOL, plain) is plain


def test_keyword_only_parameters_and_methods_and_partials_are_filled() -> None:
    def keyword(point: Point, *, client: iris.Client) -> Any:
        return point, client

    def lone(*, whole: iris.Message) -> Any:
        return whole.payload

    def bound(first: int, point: Point, client: iris.Client) -> Any:
        return first, point, client

    class Thing:
        def method(self, point: Point, client: iris.Client) -> Any:
            return point, client

    assert received(keyword) == received(Thing().method) == (Point(7), CLIENT)
    assert received(lone) == message().payload
    assert received(functools.partial(bound, 1)) == (1, Point(7), CLIENT)


async def test_a_coroutine_function_stays_one() -> None:
    async def handler(point: Point, client: iris.Client) -> Any:
        return point, client

    resolved = Handler(handler).resolved(Provided(CLIENT))
    assert resolved.is_coroutine
    assert await resolved.function(Point(7)) == (Point(7), CLIENT)


def test_a_handler_that_takes_only_its_message_is_not_wrapped() -> None:
    def payload(point: Point) -> None: ...
    def whole(message: iris.Message) -> None: ...
    def own(point: Point, number: int = 3) -> None: ...

    for function in (payload, whole, own, print, lambda payload: payload):
        handler = Handler(function)
        assert handler.resolved(Provided(CLIENT, [POOL])) is handler


def test_a_payload_that_does_not_fit_is_a_decode_error_beside_other_parameters() -> None:
    def handler(payload: int, request: iris.Request, client: iris.Client) -> None: ...

    with pytest.raises(DecodeError, match="as int"):
        received(handler)


def test_a_parameter_that_nothing_fits_is_named_with_what_is_available() -> None:
    def place(point: Point, wrong: Wrong) -> None: ...

    with pytest.raises(ConfigError) as caught:
        received(place)
    assert str(caught.value) == (
        "handler 'place': nothing fits parameter 'wrong: Wrong' ('point: Point' receives the payload); available are "
        "Client, SmallPool, Message, Request; yield an object of this type from the service's lifespan"
    )


def test_a_parameter_that_two_objects_fit_is_named() -> None:
    def place(point: Point, pool: Pool) -> None: ...  # type: ignore[type-arg]  # the case under test

    with pytest.raises(
        ConfigError, match=r"'place', parameter 'pool: Pool': 2 objects of type Pool"
    ):
        received(place, POOL, SmallPool())


def test_two_parameters_for_the_payload_are_an_error_at_registration() -> None:
    service = iris.Service("db")

    with pytest.raises(
        ConfigError, match=r"'place' has 2 parameters for the payload \('a: int', 'b'\)"
    ):

        @service.on_request
        def place(a: int, client: iris.Client, b) -> None: ...  # type: ignore[no-untyped-def]  # the case

    assert not service.handlers


@pytest.mark.parametrize("value", [{}, [], b"", "text", 1, None])
def test_an_object_that_could_be_a_payload_cannot_be_provided(value: object) -> None:
    with pytest.raises(ConfigError, match=f"type {type(value).__name__} .*class of yours"):
        Provided(CLIENT, [value])


class TestSubscriber:
    """Handlers of `Client.subscribe`."""

    def test_what_takes_a_message_is_called_directly(self) -> None:
        def bare(message): ...  # type: ignore[no-untyped-def]  # the case under test
        def anything(message: Any) -> None: ...
        def an_object(message: object) -> None: ...
        def whole(message: iris.Message) -> None: ...
        async def optional(message: iris.Message | None) -> None: ...

        functions: list[Any] = [
            bare,
            anything,
            an_object,
            whole,
            optional,
            [].append,
            lambda message: None,
        ]
        for function in functions:
            assert subscriber(function, Provided(CLIENT)) == function

    def test_a_payload_is_decoded_for_its_annotation(self) -> None:
        got: list[Any] = []

        def typed(point: Point) -> None:
            got.append(point)

        def both(whole, client: iris.Client) -> None:  # type: ignore[no-untyped-def]  # the case under test
            got.extend((whole, client))

        for function in (typed, both):
            subscriber(function, Provided(CLIENT))(message())
        assert got == [Point(7), message(), CLIENT]

    def test_an_annotation_that_cannot_be_evaluated_means_the_message_for_one_version(self) -> None:
        def later(message: Nonexistent) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - the case

        with pytest.warns(DeprecationWarning, match="'later': .* receives the whole message"):
            assert subscriber(later, Provided(CLIENT)) is later
