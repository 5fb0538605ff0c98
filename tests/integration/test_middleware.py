"""Middleware: one form around handlers and around calls, and nothing where there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.waiting import PATIENCE_S, until

import iris
import iris.blocking
from iris.handlers import Handler
from iris.parameters import Provided
from iris.testing import LocalCluster


class Order(msgspec.Struct):
    number: int


class Recorder:
    """Middleware that records when it is entered and left, and what passes."""

    def __init__(self, name: str, events: list[Any]) -> None:
        self.name = name
        self.events = events

    async def __call__(self, request: Any, call_next: iris.CallNext) -> Any:
        self.events.append(f"{self.name} in")
        try:
            result = await call_next(request)
        except BaseException as err:
            self.events.append(f"{self.name} {type(err).__name__}")
            raise
        self.events.append(f"{self.name} {result!r}")
        return result


async def test_the_first_middleware_is_outermost_around_each_kind_of_handler() -> None:
    events: list[Any] = []
    service = iris.Service("orders", middleware=[Recorder("a", events), Recorder("b", events)])

    @service.on_request
    async def place(order: Order) -> int:
        return order.number

    @service.on_push
    def remind(order: Order) -> None: ...

    @service.on_survey(threads=1)
    def count(order: Order, request: iris.Request) -> int:
        return order.number

    @service.on_broadcast
    def reload(order: Order) -> None: ...

    @service.on_publish("orders.>")
    def note(order: Order) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        assert await client.request("orders", Order(1), timeout=PATIENCE_S) == 1
        assert events == ["a in", "b in", "b 1", "a 1"]
        events.clear()
        answers = client.survey("orders", Order(2), timeout=PATIENCE_S)
        assert [message.value async for message in answers] == [2]
        assert events == ["a in", "b in", "b 2", "a 2"]
        for send in (
            client.push("orders", Order(3)),
            client.broadcast("orders", Order(4)),
            client.publish("orders.new", Order(5)),
        ):
            events.clear()
            await send
            await until(lambda: len(events) == 4)
            assert events == ["a in", "b in", "b None", "a None"]


async def test_one_middleware_sees_the_same_names_at_the_caller_and_at_the_service() -> None:
    seen: list[tuple[type, str, str, str]] = []

    async def note(call: iris.Call | iris.Request, call_next: iris.CallNext) -> Any:
        seen.append((type(call), call.kind, call.name, call.method))
        return await call_next(call)

    service = iris.Service("orders", middleware=[note])
    handled: list[str] = []

    @service.on_request("place", threads=1)
    def place(request: iris.Request) -> None:
        handled.append(request.kind)

    @service.on_push
    def remind(request: iris.Request, client: iris.Client) -> None:
        handled.append(request.kind)

    @service.on_survey
    def count(payload: bytes) -> None: ...

    @service.on_broadcast
    def reload(request: iris.Request) -> None:
        handled.append(request.kind)

    @service.on_publish("news.>", threads=1)
    def read(request: iris.Request) -> None:
        handled.append(request.kind)

    async with (
        LocalCluster() as cluster,
        cluster.client(middleware=[note]) as client,
        client.serve(service),
        client.subscribe("news.>", read),
    ):
        await client.request("orders", b"", timeout=PATIENCE_S, method="place")
        await client.push("orders", b"")
        await until(lambda: len(handled) == 2)
        assert [_ async for _ in client.survey("orders", b"", timeout=PATIENCE_S)]
        await client.broadcast("orders", b"")
        await until(lambda: len(handled) == 3)
        await client.publish("news.today", b"")
        await until(lambda: len(handled) == 5)
    assert handled == ["request", "push", "broadcast", "publish", "publish"]
    assert seen == [
        (iris.Call, "request", "orders", "place"),
        (iris.Request, "request", "orders", "place"),
        (iris.Call, "push", "orders", ""),
        (iris.Request, "push", "orders", ""),
        (iris.Request, "survey", "orders", ""),
        (iris.Request, "broadcast", "orders", ""),
        (iris.Request, "publish", "news.today", ""),
    ]


async def test_middleware_of_a_client_can_change_the_method() -> None:
    async def upgrade(call: iris.Call, call_next: iris.CallNext) -> Any:
        call.method = "" if call.method else "place"
        return await call_next(call)

    service = iris.Service("orders")

    @service.on_request
    def other(request: iris.Request) -> str:
        return request.method

    service.on_request("place")(other)
    async with (
        LocalCluster() as cluster,
        cluster.client(middleware=[upgrade]) as client,
        client.serve(service),
    ):
        assert await client.request("orders", b"", timeout=PATIENCE_S, type=str) == "place"
        assert await client.request("orders", b"", timeout=PATIENCE_S, method="x") == b""


async def test_middleware_changes_what_the_handler_receives_and_what_the_caller_gets() -> None:
    async def change(request: iris.Request, call_next: iris.CallNext) -> Any:
        request.headers = {**(request.headers or {}), "user": "smith"}
        return iris.Reply(await call_next(request), {"took": "1"})

    service = iris.Service("orders", middleware=[change])

    @service.on_request
    def place(message: iris.Message) -> Any:
        return message.headers

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        reply = await client.request(
            "orders", b"", timeout=PATIENCE_S, headers={"a": "b"}, type=iris.Message
        )
        assert reply.value == {"a": "b", "user": "smith"}
        assert reply.headers == {"took": "1"}


async def test_middleware_refuses_before_the_handler_runs() -> None:
    ran: list[bytes] = []

    async def authorised(request: iris.Request, call_next: iris.CallNext) -> Any:
        if (request.headers or {}).get("token") != "secret":
            raise iris.Refusal("unauthorized")
        return await call_next(request)

    service = iris.Service("orders", middleware=[authorised])
    service.on_request(ran.append)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError) as caught:
            await client.request("orders", b"1", timeout=PATIENCE_S)
        assert caught.value.code == "unauthorized"
        await client.request("orders", b"2", timeout=PATIENCE_S, headers={"token": "secret"})
    assert ran == [b"2"]


async def test_what_the_handler_raises_passes_through_middleware() -> None:
    events: list[Any] = []
    service = iris.Service("orders", middleware=[Recorder("a", events)])

    @service.on_request
    def place(order: Order) -> None:
        raise OSError("disk on fire")

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="OSError: disk on fire"):
            await client.request("orders", Order(1), timeout=PATIENCE_S)
        with pytest.raises(iris.RemoteError, match="as Order") as caught:
            await client.request("orders", {"number": "x"}, timeout=PATIENCE_S)
        assert not caught.value.may_have_run
    assert events == ["a in", "a OSError", "a in", "a ArgumentError"]


async def test_a_request_inside_middleware_can_be_deferred_and_has_its_deadline() -> None:
    events: list[Any] = []
    service = iris.Service("orders", middleware=[Recorder("a", events)])
    waiting: list[iris.Deferred] = []

    @service.on_request
    def place(request: iris.Request) -> None:
        assert request.remaining() <= PATIENCE_S
        waiting.append(request.defer())

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        asking = asyncio.create_task(client.request("orders", b"", timeout=PATIENCE_S))
        await until(lambda: bool(waiting))
        waiting[0].reply("later")
        assert await asking == b"later"


async def test_methods_are_inside_middleware_and_keep_their_name() -> None:
    seen: list[str] = []

    async def naming(request: iris.Request, call_next: iris.CallNext) -> Any:
        seen.append(request.method)
        return await call_next(request)

    service = iris.Service("orders", middleware=[naming])

    @service.on_request("place")
    def place(number: int, request: iris.Request) -> Any:
        return number, request.method

    @service.on_request("wait", threads=1)
    def wait(request: iris.Request) -> Any:
        request.defer()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        asked = {"timeout": PATIENCE_S}
        assert await client.request("orders", 7, method="place", **asked) == [7, "place"]
        with pytest.raises(iris.RemoteError, match="runs in threads cannot defer"):
            await client.request("orders", 7, method="wait", **asked)
    assert seen == ["place", "wait"]


async def test_a_member_that_stops_cancels_middleware() -> None:
    events: list[Any] = []
    service = iris.Service("orders", middleware=[Recorder("a", events)])

    @service.on_request
    async def place(payload: bytes) -> None:
        await asyncio.Event().wait()

    config = iris.ClientConfig(drain_timeout_s=0.01)
    async with LocalCluster() as cluster, cluster.client() as client:
        async with cluster.client(config=config) as server, server.serve(service):
            asking = asyncio.create_task(client.request("orders", b"", timeout=PATIENCE_S))
            await until(lambda: bool(events))
        with pytest.raises(iris.RemoteError, match="stopped before it answered"):
            await asking
    assert events == ["a in", "a CancelledError"]


async def test_tunnels_and_losses_pass_no_middleware() -> None:
    events: list[Any] = []
    service = iris.Service("orders", middleware=[Recorder("a", events)])

    @service.on_tunnel
    async def carry(tunnel: iris.Tunnel) -> None:
        await tunnel.send(await tunnel.recv())

    service.on_loss(events.append)
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        client.serve(service),
        client.tunnel("orders", timeout=PATIENCE_S) as tunnel,
    ):
        await tunnel.send(b"x")
        assert await tunnel.recv() == b"x"
    assert events == []


def test_a_handler_without_middleware_is_not_wrapped() -> None:
    def place(order: Order) -> None: ...

    handler = Handler(place)
    assert handler.resolved(Provided(iris.connect())) is handler
    plain, wrapped = iris.connect(), iris.connect(middleware=[Recorder("a", [])])
    assert "request" not in vars(plain)
    assert "push" not in vars(plain)
    assert {"request", "push"} <= vars(wrapped).keys()


@pytest.mark.parametrize("wrong", [lambda request, call_next: None, 7])
def test_middleware_that_is_no_coroutine_function_is_named_at_once(wrong: Any) -> None:
    with pytest.raises(
        iris.ConfigError, match=r"middleware must be coroutine functions, but .* is not; define"
    ):
        iris.Service("orders", middleware=[wrong])
    with pytest.raises(iris.ConfigError, match="middleware must be coroutine functions"):
        iris.connect(middleware=[wrong])


class TestCalls:
    """Middleware of a client."""

    async def test_it_sees_requests_and_pushes_and_can_change_them(self) -> None:
        seen: list[Any] = []

        async def token(call: iris.Call, call_next: iris.CallNext) -> Any:
            seen.append((call.kind, call.name, call.payload, call.options))
            call.headers = {**(call.headers or {}), "token": "secret"}
            return await call_next(call)

        service = iris.Service("orders")
        got: list[Any] = []

        @service.on_request
        def place(request: iris.Request) -> Any:
            return request.headers

        @service.on_push
        def remind(message: iris.Message) -> None:
            got.append(message.headers)

        async with LocalCluster() as cluster, cluster.client() as server, server.serve(service):
            client = cluster.client(middleware=[token])
            async with client:
                answer = await client.request(
                    "orders", Order(1), timeout=PATIENCE_S, headers={"a": "b"}, idempotent=True,
                    type=dict[str, str],
                )  # fmt: skip
                assert answer == {"a": "b", "token": "secret"}
                await client.push("orders", b"x")
                await until(lambda: bool(got))
        assert got == [{"token": "secret"}]
        assert seen == [
            ("request", "orders", Order(1), {"idempotent": True, "type": dict[str, str]}),
            ("push", "orders", b"x", {}),
        ]

    async def test_it_can_repeat_a_call_and_answer_without_one(self) -> None:
        events: list[Any] = []

        async def retry(call: iris.Call, call_next: iris.CallNext) -> Any:
            try:
                return await call_next(call)
            except iris.NoMembers as err:
                events.append(err.may_have_run)
                call.name = "spare"
                return await call_next(call)

        service = iris.Service("spare")
        service.on_request(lambda payload: payload)
        async with iris.connect(embedded=True, middleware=[retry]) as client, client.serve(service):
            assert await client.request("orders", b"x", timeout=PATIENCE_S) == b"x"
        assert events == [False]

    def test_a_blocking_client_has_middleware_too(self) -> None:
        events: list[Any] = []
        service = iris.Service("echo")
        service.on_request(lambda payload: payload)
        with (
            iris.blocking.connect(embedded=True, middleware=[Recorder("a", events)]) as client,
            client.serve(service),
        ):
            assert client.request("echo", b"x", timeout=PATIENCE_S) == b"x"
            assert events == ["a in", "a b'x'"]
