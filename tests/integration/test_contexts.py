"""Context variables: what a handler sets for one message is seen by no other message, and by no caller."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from support.waiting import PATIENCE_S, until

import iris
import iris.blocking
from iris.testing import LocalCluster

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")
MESSAGES = 6

Send = Callable[[iris.Client], Awaitable[object]]


async def _request(client: iris.Client) -> None:
    await client.request("tenants", "", timeout=PATIENCE_S)


async def _method(client: iris.Client) -> None:
    await client.request("tenants", "", timeout=PATIENCE_S, method="named")


async def _push(client: iris.Client) -> None:
    await client.push("tenants", "")


async def _survey(client: iris.Client) -> None:
    async for _ in client.survey("tenants", "", timeout=PATIENCE_S):
        pass


async def _broadcast(client: iris.Client) -> None:
    await client.broadcast("tenants", "")


async def _publish(client: iris.Client) -> None:
    await client.publish("tenants.new", "")


async def _tunnel(client: iris.Client) -> None:
    async with client.tunnel("tenants", timeout=PATIENCE_S) as tunnel:
        with pytest.raises(iris.EndOfTunnel):
            await tunnel.recv()


SENDS: dict[str, Send] = {
    "request": _request,
    "method": _method,
    "push": _push,
    "survey": _survey,
    "broadcast": _broadcast,
    "publish": _publish,
}


class Seen(list[str]):
    """What handlers saw in the variable, before each set it to a value of its own."""

    def note(self) -> None:
        self.append(TENANT.get())
        TENANT.set(f"caller {len(self)}")

    def plain(self, message: iris.Message) -> None:
        self.note()

    def awaited(self, message: iris.Message) -> Awaitable[None]:
        """Set the variable before there is a coroutine, as a decorator may."""
        self.note()
        return self._rest(TENANT.get())

    async def _rest(self, mine: str) -> None:
        await asyncio.sleep(0)
        if TENANT.get() != mine:
            self.append(f"{TENANT.get()} instead of {mine}")

    async def at_once(self, message: iris.Message) -> None:
        self.note()

    async def later(self, message: iris.Message) -> None:
        self.note()
        mine = TENANT.get()
        await asyncio.sleep(0)
        assert TENANT.get() == mine
        await asyncio.create_task(self._child(mine))
        assert TENANT.get() == mine

    async def _child(self, mine: str) -> None:
        assert TENANT.get() == mine
        TENANT.set("child")

    async def of_tunnel(self, tunnel: iris.Tunnel) -> None:
        self.note()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[None]:
    before = TENANT.set("the lifespan")
    yield
    assert TENANT.get() == "the lifespan"
    TENANT.reset(before)


def service_of(handler: Callable[[iris.Message], Any], **options: Any) -> iris.Service:
    """Return a service with this handler for messages of every kind."""
    service = iris.Service("tenants", lifespan=lifespan, **options)
    service.on_request(handler)
    service.on_request("named")(handler)
    service.on_push(handler)
    service.on_survey(handler)
    service.on_broadcast(handler)
    service.on_publish("tenants.>")(handler)
    return service


async def send_all(send: Send, client: iris.Client, seen: list[str]) -> None:
    """Send messages one after the other, each from a task that has set the variable, too."""

    async def one(number: int) -> None:
        TENANT.set(f"sender {number}")
        await send(client)

    for number in range(MESSAGES):
        await asyncio.create_task(one(number))
        await until(lambda number=number: len(seen) == number + 1)  # type: ignore[misc]  # the default is a number


@pytest.mark.parametrize("kind", SENDS)
@pytest.mark.parametrize("form", ["plain", "awaited", "at_once", "later"])
async def test_each_message_of_a_service_runs_in_the_context_of_the_lifespan(
    kind: str, form: str
) -> None:
    seen = Seen()
    service = service_of(getattr(seen, form))
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client() as member,
        member.serve(service),
    ):
        await send_all(SENDS[kind], client, seen)
    assert seen == ["the lifespan"] * MESSAGES


@pytest.mark.parametrize("kind", [*SENDS])
async def test_middleware_and_its_handler_share_a_context_that_no_other_message_has(
    kind: str,
) -> None:
    seen = Seen()
    inside: list[str] = []

    async def tenant_of(request: Any, call_next: iris.CallNext) -> Any:
        seen.note()
        return await call_next(request)

    service = service_of(lambda message: inside.append(TENANT.get()), middleware=[tenant_of])
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await send_all(SENDS[kind], client, inside)
    assert seen == ["the lifespan"] * MESSAGES
    assert inside == [f"caller {number + 1}" for number in range(MESSAGES)]


async def test_each_message_that_a_thread_handles_has_a_context_of_its_own() -> None:
    seen = Seen()
    service = iris.Service("tenants", lifespan=lifespan)
    service.on_request(threads=1)(seen.plain)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await send_all(_request, client, seen)
    assert seen == ["the lifespan"] * MESSAGES


async def test_each_tunnel_runs_in_a_context_of_its_own() -> None:
    seen = Seen()
    service = iris.Service("tenants", lifespan=lifespan)
    service.on_tunnel(seen.of_tunnel)
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client() as member,
        member.serve(service),
    ):
        await send_all(_tunnel, client, seen)
    assert seen == ["the lifespan"] * MESSAGES


@pytest.mark.parametrize(
    ("form", "concurrency"),
    [("plain", 1), ("awaited", 1), ("at_once", 1), ("at_once", 4), ("later", 1), ("later", 4)],
)
async def test_each_publication_runs_in_the_context_of_its_subscriber(
    form: str, concurrency: int
) -> None:
    seen = Seen()
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as other:
        TENANT.set("the subscriber")
        async with other.subscribe("tenants.>", getattr(seen, form), concurrency=concurrency):
            TENANT.set("later")
            await send_all(_publish, client, seen)
            for _ in range(MESSAGES):  # in one bundle
                await client.publish("tenants.new", "")
            await until(lambda: len(seen) == 2 * MESSAGES)
    assert seen == ["the subscriber"] * (2 * MESSAGES)


@pytest.mark.parametrize("form", ["plain", "awaited", "later"])
@pytest.mark.parametrize("kind", ["broadcast", "publish"])
async def test_the_messages_of_one_bundle_have_a_context_each(kind: str, form: str) -> None:
    seen = Seen()
    service = service_of(getattr(seen, form))
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for _ in range(MESSAGES):
            await SENDS[kind](client)
        await until(lambda: len(seen) == MESSAGES)
    assert seen == ["the lifespan"] * MESSAGES


class Incomparable:
    """As an array of numbers, whose comparison is not a truth value."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


async def test_values_that_cannot_be_compared_and_those_of_handlers_that_fail_stay_with_their_message() -> (
    None
):
    held: ContextVar[object] = ContextVar("held", default=None)
    begin = held.set(Incomparable())  # the subscriber has such a value, too
    seen: list[object] = []

    def keep(message: iris.Message) -> None:
        seen.append(held.get())
        held.set(Incomparable())
        if len(seen) % 2:
            raise RuntimeError("after it was set")

    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as other:
        first = held.get()
        async with other.subscribe("tenants.>", keep):
            held.reset(begin)
            await client.publish("tenants.new", "")
            await until(lambda: len(seen) == 1)
            for _ in range(MESSAGES):  # in one bundle
                await client.publish("tenants.new", "")
            await until(lambda: len(seen) == MESSAGES + 1)
    assert all(value is first for value in seen)


async def test_calls_that_run_at_once_keep_their_own_values() -> None:
    service = iris.Service("tenants")

    @service.on_request
    async def whose(name: str) -> str:
        TENANT.set(name)
        for _ in range(3):
            await asyncio.sleep(0)
            assert TENANT.get() == name
        return TENANT.get()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for _ in range(3):
            names = [f"tenant {number}" for number in range(20)]
            asked = [client.request("tenants", name, timeout=PATIENCE_S, type=str) for name in names]  # fmt: skip
            assert await asyncio.gather(*asked) == names


async def test_a_handler_that_sets_variables_can_be_cancelled_and_may_return_any_awaitable() -> (
    None
):
    service = iris.Service("tenants")
    states: list[str] = []

    @service.on_request(on_cancel="cancel")
    async def wait(payload: bytes) -> None:
        TENANT.set("waits")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            states.append(TENANT.get())
            raise

    async def future(payload: bytes) -> Any: ...

    def made(payload: bytes) -> asyncio.Future[str]:
        seen = TENANT.get()
        TENANT.set("set by a function that returns a future")
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.get_loop().call_soon(done.set_result, seen)
        return done

    made.__wrapped__ = future  # type: ignore[attr-defined]  # as a decorator leaves it
    asyncio.coroutines._is_coroutine  # noqa: B018 - see below
    made._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for number in range(3):
            with pytest.raises(iris.RequestTimeout):
                await client.request("tenants", b"", timeout=0.05)
            await until(lambda number=number: len(states) == number + 1)  # type: ignore[misc]
    assert states == ["waits"] * 3


async def test_what_a_handler_keeps_in_a_variable_is_freed_after_its_message() -> None:
    class Session:
        """As an object that belongs to one message."""

    held: ContextVar[Session] = ContextVar("held")
    made: list[weakref.ref[Session]] = []
    service = iris.Service("tenants")

    @service.on_request
    async def hold(payload: bytes) -> None:
        session = Session()
        made.append(weakref.ref(session))
        held.set(session)
        await asyncio.sleep(0)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for _ in range(MESSAGES):
            await _request(client)
        await cluster.settle()
        gc.collect()
        assert [ref() for ref in made] == [None] * MESSAGES


async def test_losses_are_reported_in_a_context_of_their_own() -> None:
    seen = Seen()

    def lost(what: iris.Loss) -> None:
        seen.note()

    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as other:
        TENANT.set("the subscriber")
        async with other.subscribe("tenants.>", limit_bytes=1, on_loss=lost):
            TENANT.set("later")
            for _ in range(MESSAGES):
                await client.publish("tenants.new", bytes(100_000))
                await client.flush()
            await until(lambda: len(seen) > 2)
    assert set(seen) == {"the subscriber"}


def test_a_service_of_a_blocking_client_has_one_context_from_its_lifespan_to_its_end() -> None:
    seen = Seen()
    service = service_of(seen.later)
    with iris.blocking.connect(embedded=True) as client, client.serve(service):
        for _ in range(MESSAGES):
            client.request("tenants", "", timeout=PATIENCE_S)
    assert seen == ["the lifespan"] * MESSAGES
