"""Plain functions as handlers that return an awaitable, which is awaited, or a generator, which is reported."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest

import iris
from iris.middleware import CallNext
from iris.testing import LocalCluster

Body = Callable[[Any], Awaitable[Any]]


class Plain:
    """Is called as a plain function, and returns what the body returns."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def __call__(self, payload: bytes) -> Awaitable[Any]:
        return self.body(payload)


class Coroutine:
    """Is called as a coroutine function."""

    def __init__(self, body: Body) -> None:
        self.body = body

    async def __call__(self, payload: bytes) -> Any:
        return await self.body(payload)


def decorated(body: Body) -> Callable[[bytes], Awaitable[Any]]:
    def logged(payload: bytes) -> Awaitable[Any]:
        return body(payload)

    return logged


def with_option(body: Body, payload: bytes) -> Awaitable[Any]:
    return body(payload)


def scheduled(body: Body) -> Callable[[bytes], Any]:
    def start(payload: bytes) -> asyncio.Future[Any]:
        return asyncio.ensure_future(body(payload))

    return start


WAYS: Final[dict[str, Callable[[Body], Callable[..., Any]]]] = {
    "lambda": lambda body: lambda payload: body(payload),
    "partial of a plain function": lambda body: functools.partial(with_option, body),
    "partial of a coroutine function": lambda body: functools.partial(body),
    "object": Plain,
    "object with a coroutine": Coroutine,
    "decorated": decorated,
    "future": scheduled,
}
KINDS: Final = ("request", "push", "survey", "broadcast", "publish", "subscribe")
METHODS: Final = ("request", "push", "survey")


class Received:
    """A body that records payloads when it has run to its end, and returns them."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.running = self.most = 0
        self.changed = asyncio.Event()

    async def body(self, payload: Any) -> bytes:
        data = payload.payload if isinstance(payload, iris.Message) else payload
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        if data == b"fail":
            raise RuntimeError("the body failed")
        self.payloads.append(bytes(data))
        self.changed.set()
        return bytes(data)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10.0):
            while len(self.payloads) < count:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def served(
    kind: str, handler: Callable[..., Any], method: str = "", **options: Any
) -> AsyncIterator[tuple[iris.Client, iris.Client]]:
    """Yield (sender, receiver), where the receiver has the handler for messages of a kind."""
    service = iris.Service("shop", **{k: v for k, v in options.items() if k == "middleware"})
    register: dict[str, Any] = {k: v for k, v in options.items() if k != "middleware"}
    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        cluster.client() as receiver,
        contextlib.AsyncExitStack() as stack,
    ):
        if kind == "subscribe":
            await stack.enter_async_context(receiver.subscribe("orders.*", handler))
        else:
            if kind == "publish":
                service.on_publish("orders.*", **register)(handler)
            else:
                on = getattr(service, f"on_{kind}")
                (on(method, **register) if method else on(**register))(handler)
            await stack.enter_async_context(receiver.serve(service))
        yield sender, receiver


async def send(sender: iris.Client, kind: str, payload: bytes, method: str | None = None) -> Any:
    """Send a message, and return what comes back."""
    if kind == "request":
        return await sender.request("shop", payload, timeout=5.0, method=method)
    if kind == "survey":
        survey = sender.survey("shop", payload, timeout=5.0, type=bytes, method=method)
        return next(iter([answer async for answer in survey]))
    if kind == "push":
        return await sender.push("shop", payload, method=method)
    if kind == "broadcast":
        return await sender.broadcast("shop", payload)
    return await sender.publish("orders.new", payload)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_handler_returns_is_awaited(kind: str, way: str) -> None:
    received = Received()
    sent = [b"%d" % number for number in range(5)]
    async with served(kind, WAYS[way](received.body)) as (sender, receiver):
        back = [await send(sender, kind, payload) for payload in sent]
        await received.until(5)
        assert received.payloads == sent
        if kind in ("request", "survey"):
            assert back == sent
        assert receiver.stats().failed_handlers == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_one_at_a_time_and_in_order_where_that_is_promised(kind: str) -> None:
    received = Received()
    sent = [b"%d" % number for number in range(40)]
    async with served(kind, decorated(received.body)) as (sender, _):
        await asyncio.gather(*(send(sender, kind, payload) for payload in sent))
        await received.until(40)
        assert sorted(received.payloads) == sorted(sent)
        if kind in ("broadcast", "publish", "subscribe"):
            assert (received.payloads, received.most) == (sent, 1)
        else:
            assert received.most > 1


@pytest.mark.parametrize("kind", METHODS)
async def test_a_method_is_awaited_and_counted_once(kind: str) -> None:
    received = Received()
    async with served(kind, decorated(received.body), "place") as (sender, receiver):
        for payload in (b"1", b"2", b"3"):
            await send(sender, kind, payload, "place")
        await received.until(3)
        (stats,) = receiver.stats().services[0].handlers
        assert (stats.handled, stats.failed) == (3, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_it_raises_is_reported_and_the_next_one_runs(kind: str) -> None:
    received = Received()
    async with served(kind, decorated(received.body)) as (sender, receiver):
        for payload in (b"fail", b"1", b"fail", b"2"):
            if kind in ("request", "survey") and payload == b"fail":
                with pytest.raises((iris.RemoteError, RuntimeError)):
                    await send(sender, kind, payload)
            else:
                await send(sender, kind, payload)
        await received.until(2)
        assert received.payloads == [b"1", b"2"]
        assert receiver.stats().failed_handlers == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrapper_that_awaits_only_sometimes_keeps_the_order(kind: str) -> None:
    received = Received()
    plain: list[bytes] = []

    def sometimes(payload: bytes) -> Any:
        if payload == b"now":
            plain.append(payload)
            received.changed.set()
            return payload
        return received.body(payload)

    async with served(kind, sometimes) as (sender, _):
        for payload in (b"now", b"later", b"now", b"later", b"now"):
            back = await send(sender, kind, payload)
            assert kind not in ("request", "survey") or back == payload
        await received.until(2)
        async with asyncio.timeout(5.0):
            while len(plain) < 3:
                received.changed.clear()
                await received.changed.wait()
        assert received.payloads == [b"later", b"later"]


async def around(request: iris.Request, call_next: CallNext) -> Any:
    reply = await call_next(request)
    assert not isinstance(reply, Awaitable)
    return reply


@pytest.mark.parametrize("option", [{"threads": 1}, {"middleware": [around]}])
@pytest.mark.parametrize("kind", ["request", "push", "survey", "broadcast", "publish"])
async def test_a_wrapper_in_threads_or_middleware_is_awaited(
    kind: str, option: dict[str, Any]
) -> None:
    received = Received()
    async with served(kind, decorated(received.body), **option) as (sender, receiver):
        for payload in (b"1", b"2"):
            back = await send(sender, kind, payload)
            assert kind not in ("request", "survey") or back == payload
        await received.until(2)
        assert received.payloads == [b"1", b"2"]
        assert receiver.stats().failed_handlers == 0


async def test_a_deferred_reply_answers_although_the_rest_is_awaited() -> None:
    done = asyncio.Event()

    async def later(deferred: iris.Deferred) -> str:
        deferred.reply("deferred")
        done.set()
        return "ignored"

    def handler(request: iris.Request) -> Any:
        return later(request.defer())

    async with served("request", handler) as (sender, _):
        for _ in range(2):
            done.clear()
            assert await sender.request("shop", b"", timeout=5.0, type=str) == "deferred"
            await done.wait()


async def test_a_member_that_stops_answers_what_it_still_awaits() -> None:
    began = asyncio.Event()

    async def body(payload: bytes) -> None:
        began.set()
        await asyncio.Event().wait()

    config = iris.ClientConfig(drain_timeout_s=0.05)
    service = iris.Service("shop")
    service.on_request(decorated(body))
    async with LocalCluster() as cluster, cluster.client() as sender:
        async with cluster.client(config=config) as receiver, receiver.serve(service):
            request = asyncio.create_task(sender.request("shop", b"", timeout=10.0))
            await began.wait()
        with pytest.raises(
            iris.RemoteError, match="the member stopped before it answered"
        ) as caught:
            await request
        assert caught.value.may_have_run


async def test_a_member_that_stops_before_it_awaited_says_that_it_may_have_run() -> None:
    called = asyncio.Event()
    ran: list[bytes] = []

    async def body(payload: bytes) -> None:
        ran.append(payload)

    def handler(payload: bytes) -> Any:
        called.set()  # wakes the task that stops the member before the one that would await the body
        return body(payload)

    service = iris.Service("shop")
    service.on_request(handler)
    config = iris.ClientConfig(drain_timeout_s=0.05)
    async with LocalCluster() as cluster, cluster.client() as sender:
        async with cluster.client(config=config) as receiver, receiver.serve(service) as binding:
            request = asyncio.create_task(sender.request("shop", b"", timeout=10.0))
            await called.wait()
            await binding.stop()
            with pytest.raises(iris.RemoteError, match="stopped before it answered") as caught:
                await request
        assert caught.value.may_have_run
        assert ran == []


# -- generators ----------------------------------------------------------------------------------------------


def generator(payload: bytes) -> Any:
    yield payload


async def async_generator(payload: bytes) -> Any:
    yield payload


class Generator:
    def __call__(self, payload: bytes) -> Any:
        yield payload


@pytest.mark.parametrize(
    "function", [generator, async_generator, Generator(), functools.partial(generator)]
)
@pytest.mark.parametrize("kind", [*KINDS, "tunnel", "loss"])
async def test_a_generator_function_is_refused_when_it_is_registered(
    kind: str, function: Callable[..., Any]
) -> None:
    service = iris.Service("shop")
    async with LocalCluster() as cluster, cluster.client() as client:
        register: Callable[..., Any] = functools.partial(client.subscribe, "orders.*")
        if kind == "publish":
            register = service.on_publish("orders.*")
        elif kind != "subscribe":
            register = getattr(service, f"on_{kind}")
        with pytest.raises(
            iris.ConfigError, match="is a generator function, whose body would never"
        ):
            register(function)
        if kind in METHODS:
            with pytest.raises(iris.ConfigError, match="is a generator function"):
                getattr(service, f"on_{kind}")("place")(function)
        if kind in (*METHODS, "broadcast"):
            with pytest.raises(iris.ConfigError, match="is a generator function"):
                getattr(service, f"on_{kind}")(threads=1)(function)


@pytest.mark.parametrize("make", [generator, async_generator])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_generator_that_a_handler_returns_is_reported_as_its_failure(
    kind: str, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []
    changed = asyncio.Event()

    def handler(payload: bytes) -> Any:
        received.append(payload)
        changed.set()
        return make(payload) if payload == b"bad" else payload

    async with served(kind, handler) as (sender, receiver):
        if kind == "request":
            with pytest.raises(iris.RemoteError, match="whose body never runs") as caught:
                await send(sender, kind, b"bad")
            assert caught.value.may_have_run
        elif kind == "survey":
            survey = sender.survey("shop", b"bad", timeout=5.0)
            assert [answer async for answer in survey] == []
            assert "whose body never runs" in next(iter(survey.failed.values()))
        else:
            await send(sender, kind, b"bad")
        await send(sender, kind, b"good")
        async with asyncio.timeout(5.0):
            while b"good" not in received:
                changed.clear()
                await changed.wait()
        assert receiver.stats().failed_handlers == 1
    assert "whose body never runs" in caplog.text


# -- callbacks -----------------------------------------------------------------------------------------------


async def test_callbacks_for_losses_are_not_awaited_so_coroutine_functions_are_refused() -> None:
    async def missed(lost: Any) -> None: ...

    service = iris.Service("shop")
    with pytest.raises(iris.ConfigError, match="on_loss must be a plain function"):
        service.on_loss(missed)
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.ConfigError, match="on_loss must be a plain function"):
            client.subscribe("orders.*", on_loss=missed)
        with pytest.raises(iris.ConfigError, match="on_loss must be a plain function"):
            client.on_loss = missed
        with pytest.raises(iris.ConfigError, match="on_gap must be a plain function"):
            client.streams.read("orders", on_gap=missed)
        with pytest.raises(iris.ConfigError, match="on_gap must be a plain function"):
            client.streams.consumer("orders", "work", on_gap=missed)


async def test_a_callback_that_returns_an_awaitable_is_reported_as_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def missed(lost: Any) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client:
        client.on_loss = lambda lost: missed(lost)
        await client.push("nobody", b"")
        await client.flush()
        assert client.stats().failed_handlers == 1
    assert "returned a coroutine, which nothing awaits" in caplog.text
