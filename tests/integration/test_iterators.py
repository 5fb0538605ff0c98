"""Async iterators: a wait that is cancelled takes nothing and ends nothing, wherever it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import pkgutil
import signal
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.trace import TracerProvider
from support.waiting import PATIENCE_S, until, wait_until

import iris
import iris.blocking
from iris.iterating import Items
from iris.testing import LocalCluster
from iris.tracing import Tracing
from iris.watch import MIN_INTERVAL_S, Watch

COUNT = 5
"""Items of each iterator."""
TURNS = 16
"""The cancellations come after 0 to at least this many turns of the event loop."""

INTERNAL = {
    # Iterated over by one coroutine of the library, which a cancellation ends.
    "iris.streams.redriving.Letters.of",
}
OTHER_PROGRAMS = ("iris.cli", "iris.dashboard", "iris.web", "iris.spark")
"""What is not imported by users of the library, or has no iterators for them."""


class Case(NamedTuple):
    """An iterator whose items have the values 0, 1, …, COUNT - 1."""

    iterator: Any
    value: Callable[[Any], list[object]]
    """The values of an item."""
    produce: Callable[[int], Awaitable[object]] | None = None
    """Lets a value arrive; None if all do by themselves."""
    ordered: bool = True
    latest: bool = False
    """Whether values may be left out for later ones."""


Open = Callable[[LocalCluster], contextlib.AbstractAsyncContextManager[Case]]
CASES: dict[str, Open] = {}


def case(open: Callable[[LocalCluster], AsyncIterator[Case]]) -> None:
    CASES[open.__name__] = contextlib.asynccontextmanager(open)


def payload(message: iris.Message) -> list[object]:
    return [int(message.payload)]


def payloads(batch: list[iris.Message]) -> list[object]:
    return [int(message.payload) for message in batch]


@contextlib.asynccontextmanager
async def subscribed(client: iris.Client, sender: iris.Client) -> AsyncIterator[Case]:
    async with client.subscribe("topic.>") as messages:

        async def publish(number: int) -> None:
            await sender.publish("topic.new", b"%d" % number)

        yield Case(messages, payload, publish)


@case
async def subscription(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        cluster.client() as client,
        cluster.client() as sender,
        subscribed(client, sender) as found,
    ):
        yield found


@case
async def traced_subscription(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        cluster.client(tracing=Tracing(TracerProvider())) as client,
        cluster.client() as sender,
        subscribed(client, sender) as found,
    ):
        yield found


@case
async def subscription_without_a_block(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with cluster.client() as client, cluster.client() as sender:
        messages = client.subscribe("topic.>")
        await messages.ready()

        async def publish(number: int) -> None:
            await sender.publish("topic.new", b"%d" % number)

        yield Case(aiter(messages), payload, publish)


@contextlib.asynccontextmanager
async def members(cluster: LocalCluster) -> AsyncIterator[None]:
    """Serve `COUNT` members, each of which answers with its number."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(COUNT):
            service = iris.Service("members")
            service.on_survey(_answering(number))
            await stack.enter_async_context(cluster.serve(service))
        yield


def _answering(number: int) -> Callable[[bytes], Awaitable[bytes]]:
    async def answer(message: bytes) -> bytes:
        for _ in range(number):
            await asyncio.sleep(0)
        return b"%d" % number

    return answer


@case
async def survey(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with members(cluster), cluster.client() as client:
        answers = client.survey("members", b"", timeout=PATIENCE_S)
        yield Case(aiter(answers), payload, ordered=False)
        assert not answers.missing
        assert len(answers.answered) == COUNT


@case
async def items_of_a_survey(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with members(cluster), cluster.client() as client:
        answers = client.survey("members", b"", timeout=PATIENCE_S)
        yield Case(answers.items(), lambda item: payload(item[1]), ordered=False)


async def _echo(message: bytes) -> bytes:
    await asyncio.sleep(0)
    return message


async def _passing(call: Any, call_next: iris.CallNext) -> Any:
    return await call_next(call)


@contextlib.asynccontextmanager
async def asked(cluster: LocalCluster, client: iris.Client) -> AsyncIterator[Case]:
    service = iris.Service("echo")
    service.on_request(_echo)
    async with cluster.serve(service), client:
        numbers = (b"%d" % number for number in range(COUNT))
        outcomes = client.request_many("echo", numbers, timeout=PATIENCE_S, in_flight=3)
        yield Case(outcomes, lambda outcome: [int(outcome.result())], ordered=False)


@case
async def request_many(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with asked(cluster, cluster.client()) as found:
        yield found


@case
async def request_many_inside_middleware(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with asked(cluster, cluster.client(middleware=[_passing])) as found:
        yield found


@case
async def traced_request_many(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with asked(cluster, cluster.client(tracing=Tracing(TracerProvider()))) as found:
        yield found


@contextlib.asynccontextmanager
async def tunnelled(cluster: LocalCluster) -> AsyncIterator[tuple[iris.Tunnel, iris.Tunnel]]:
    """Yield both ends of a tunnel."""
    service = iris.Service("tunnels")
    ends: list[iris.Tunnel] = []
    ended = asyncio.Event()

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        ends.append(tunnel)
        await ended.wait()

    async with (
        cluster.serve(service),
        cluster.client() as client,
        client.tunnel("tunnels", timeout=PATIENCE_S) as tunnel,
    ):
        await until(lambda: ends)
        yield tunnel, ends[0]
        ended.set()


@case
async def tunnel(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with tunnelled(cluster) as (receiver, sender):

        async def send(number: int) -> None:
            await sender.send(b"%d" % number)
            if number == COUNT - 1:
                await sender.finish()

        yield Case(receiver, lambda data: [int(data)], send)


@case
async def chunks_of_a_tunnel(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with tunnelled(cluster) as (receiver, sender):
        size = 0

        def value(chunk: bytes) -> list[object]:
            """Return the numbers of the MiB that are complete with this chunk."""
            nonlocal size
            before, size = size, size + len(chunk)
            assert set(chunk) <= {before >> 20, size - 1 >> 20}
            return [*range(before >> 20, size >> 20)]

        sending = asyncio.create_task(
            sender.send(b"".join(bytes([number]) * (1 << 20) for number in range(COUNT)))
        )
        yield Case(receiver.recv_chunks(), value)
        await sending


@contextlib.asynccontextmanager
async def appended(
    cluster: LocalCluster, partitions: int = 1, *, traced: bool = False
) -> AsyncIterator[tuple[iris.Client, Callable[[int], Awaitable[object]]]]:
    tracing = Tracing(TracerProvider()) if traced else None
    async with cluster.client(tracing=tracing) as client:
        await client.streams.create("log", partitions=partitions)

        async def append(number: int) -> None:
            await client.streams.append("log", b"%d" % number, key=str(number))

        yield client, append
        await client.streams.delete("log")


@case
async def reader(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with appended(cluster) as (client, append), client.streams.read("log") as messages:
        yield Case(messages, payload, append)


@case
async def reader_of_partitions(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with appended(cluster, 3) as (client, append), client.streams.read("log") as messages:
        yield Case(messages, payload, append, ordered=False)


@case
async def reader_of_one_partition(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with appended(cluster, 3) as (client, _):

        async def append(number: int) -> None:
            await client.streams.append("log", b"%d" % number, partition=2)

        async with client.streams.read("log", partition=2) as messages:
            yield Case(messages, payload, append)


@case
async def batches_of_a_reader(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with appended(cluster) as (client, append), client.streams.read("log") as messages:
        yield Case(messages.batches(), payloads, append)


@case
async def consumer(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        appended(cluster) as (client, append),
        client.streams.consumer("log", "worker", prefetch=3) as work,
    ):
        yield Case(work, _acked(work, payload), append)


@case
async def traced_consumer(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        appended(cluster, traced=True) as (client, append),
        client.streams.consumer("log", "worker", prefetch=3) as work,
    ):
        yield Case(work, _acked(work, payload), append)


@case
async def consumer_of_partitions(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        appended(cluster, 3) as (client, append),
        client.streams.consumer("log", "worker", shared=True) as work,
    ):
        yield Case(work, _acked(work, payload), append, ordered=False)


@case
async def batches_of_a_consumer(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with (
        appended(cluster) as (client, append),
        client.streams.consumer("log", "worker") as work,
    ):
        yield Case(work.batches(), _acked(work, payloads), append)


def _acked(work: Any, values: Callable[[Any], list[object]]) -> Callable[[Any], list[object]]:
    def value(item: Any) -> list[object]:
        work.ack(*(item if isinstance(item, list) else [item]))
        return values(item)

    return value


@case
async def watch_members(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with cluster.client() as client, contextlib.AsyncExitStack() as stack:

        async def join(number: int) -> None:
            service = iris.Service("members")
            service.on_request(_echo)
            await stack.enter_async_context(cluster.serve(service))

        yield Case(
            client.watch_members("members"), lambda found: [len(found) - 1], join, latest=True
        )


@case
async def watch_of_the_network(cluster: LocalCluster) -> AsyncIterator[Case]:
    async with cluster.client() as client, Watch(client, interval_s=MIN_INTERVAL_S) as watch:
        yield Case(watch.updates(), lambda network: [network.serial - 1], latest=True)


# -- the promise -----------------------------------------------------------------------------------------------


async def take(found: Case, turns: int, values: list[object]) -> None:
    """Take an item, and cancel that after some turns of the event loop."""

    if len(values) == COUNT and not found.latest:
        return  # the end comes next

    async def one() -> None:
        item = await anext(found.iterator)
        values.extend(found.value(item))

    task = asyncio.create_task(one())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def rest(found: Case, values: list[object]) -> None:
    """Take items until the last one has come."""
    async with asyncio.timeout(PATIENCE_S):
        while COUNT - 1 not in values if found.latest else len(values) < COUNT:
            values.extend(found.value(await anext(found.iterator)))


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    streams = any(word in str(request.node.name) for word in ("reader", "consumer"))
    async with LocalCluster(data=tmp_path / "data" if streams else None) as it:
        yield it


@pytest.mark.parametrize("name", CASES)
async def test_a_cancelled_wait_takes_nothing_and_ends_nothing(
    name: str, cluster: LocalCluster
) -> None:
    # The cancellations of one round come one turn apart.
    step = 5 if name == "watch_of_the_network" else 3
    for turns in range(0, TURNS, step):
        values: list[object] = []
        async with CASES[name](cluster) as found:
            for number in range(COUNT):
                await take(found, turns, values)
                producing = None
                if found.produce is not None:
                    producing = asyncio.create_task(found.produce(number))  # type: ignore[arg-type]  # a coroutine
                await take(found, turns + 1, values)
                if producing is not None:
                    await producing
                await take(found, turns + 2, values)
            await rest(found, values)
            if not found.latest:
                assert values == [*range(COUNT)] if found.ordered else len(values) == COUNT
                assert sorted(values, key=str) == [*range(COUNT)]


@pytest.mark.parametrize("name", CASES)
async def test_waits_with_a_timeout_are_the_same_as_one_wait(
    name: str, cluster: LocalCluster
) -> None:
    values: list[object] = []
    async with CASES[name](cluster) as found:
        for number in range(COUNT):
            for timeout in (0, 0.001):
                with contextlib.suppress(TimeoutError, StopAsyncIteration):
                    item = await asyncio.wait_for(anext(found.iterator), timeout)
                    values.extend(found.value(item))
            if found.produce is not None:
                await found.produce(number)
        await rest(found, values)


@pytest.mark.parametrize("name", CASES)
async def test_a_next_that_gets_nothing_in_time_takes_nothing_and_ends_nothing(
    name: str, cluster: LocalCluster
) -> None:
    values: list[object] = []
    late: list[iris.RequestTimeout] = []
    async with CASES[name](cluster) as found:
        for number in range(COUNT):
            for _ in range(3):
                if len(values) == COUNT:
                    continue  # the end comes next
                try:
                    values.extend(found.value(await found.iterator.next(timeout=0.001)))
                except iris.RequestTimeout as error:
                    late.append(error)
            if found.produce is not None:
                await found.produce(number)
        assert late or found.produce is None
        assert {str(error).partition(": ")[2] for error in late} <= {
            "nothing arrived within 0.001 s"
        }
        assert not any(error.may_have_run for error in late)
        while COUNT - 1 not in values if found.latest else len(values) < COUNT:
            values.extend(found.value(await found.iterator.next(timeout=PATIENCE_S)))
        if not found.latest:
            assert values == [*range(COUNT)] if found.ordered else len(values) == COUNT
            assert sorted(values, key=str) == [*range(COUNT)]
        for wrong in (0, -1.0):
            with pytest.raises(iris.ConfigError, match=f"timeout must be above 0 s, not {wrong}"):
                await found.iterator.next(timeout=wrong)


@pytest.mark.parametrize("name", ["survey", "request_many", "tunnel", "chunks_of_a_tunnel"])
async def test_a_next_at_the_end_raises_what_anext_raises(name: str, cluster: LocalCluster) -> None:
    values: list[object] = []
    async with CASES[name](cluster) as found:
        for number in range(COUNT):
            if found.produce is not None:
                await found.produce(number)
        while len(values) < COUNT:
            values.extend(found.value(await found.iterator.next()))
        for timeout in (PATIENCE_S, None):
            with pytest.raises(StopAsyncIteration):
                await found.iterator.next(timeout=timeout)


async def test_an_error_that_only_looks_like_a_timeout_is_the_error_of_next(
    cluster: LocalCluster,
) -> None:
    async def late(call: Any, call_next: iris.CallNext) -> Any:
        raise TimeoutError("of the middleware")

    async with cluster.client(middleware=[late]) as client:
        outcomes = client.request_many("echo", [b""], timeout=PATIENCE_S)
        with pytest.raises(TimeoutError, match="of the middleware"):
            await outcomes.next(timeout=PATIENCE_S)
        await cluster.stop_relay()
        await until(lambda: client._runtime.session is None)
        survey = aiter(client.survey("members", b"", timeout=0.05))
        with pytest.raises(iris.ConnectionLost):
            await survey.next(timeout=PATIENCE_S)
        await cluster.start_relay()


async def test_every_iterator_of_the_library_is_tested_here(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    tested: set[type] = set()
    async with LocalCluster(data=tmp_path / "streams") as with_streams:
        for open in CASES.values():
            async with open(with_streams) as found:
                if found.produce is not None:
                    for number in range(COUNT):
                        await found.produce(number)
                await rest(found, [])
                tested.add(type(found.iterator))
    iterators, generators = set(), set()
    for owner, name, value in _definitions():
        if inspect.isasyncgenfunction(value):
            generators.add(f"{owner}.{name}")
        if inspect.isclass(value) and "__anext__" in vars(value) and not inspect.isabstract(value):
            iterators.add(value)
    assert all(issubclass(iterator, Items) for iterator in iterators), "they have `next`"
    assert generators == INTERNAL
    assert iterators - tested == set()


def _definitions() -> list[tuple[str, str, object]]:
    """Return (where, name, object) of all functions, methods and classes of the library."""
    found: list[tuple[str, str, object]] = []
    for info in pkgutil.walk_packages(iris.__path__, "iris."):
        if info.name.startswith(OTHER_PROGRAMS):
            continue
        module = importlib.import_module(info.name)
        own = [
            (name, value)
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == info.name
        ]
        for name, value in own:
            found.append((info.name, name, value))
            if isinstance(value, type):
                found += [
                    (f"{info.name}.{name}", method, function)
                    for method, function in vars(value).items()
                    if isinstance(function, types.FunctionType)
                ]
    return found


# -- ends ------------------------------------------------------------------------------------------------------

LEFT: dict[str, Callable[[iris.Client], Any]] = {
    "subscribe": lambda client: client.subscribe("topic.>"),
    "survey": lambda client: client.survey("echo", b"", timeout=PATIENCE_S),
    "items": lambda client: client.survey("echo", b"", timeout=PATIENCE_S).items(),
    "request_many": lambda client: client.request_many("echo", [b"", b"never"], timeout=PATIENCE_S),
    "watch_members": lambda client: client.watch_members("echo"),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("form", ["plain", "middleware", "traced"])
@pytest.mark.parametrize("left", ["dropped", "closed"])
async def test_an_iterator_that_is_left_early_holds_nothing_more(
    name: str, form: str, left: str, cluster: LocalCluster
) -> None:
    never = asyncio.Event()
    service = iris.Service("echo")

    @service.on_request
    @service.on_survey
    async def echo(message: bytes) -> None:
        if message == b"never" or (name in ("survey", "items") and not first):
            await never.wait()
        first.clear()

    first = [True]
    client = cluster.client(
        middleware=[_passing] if form == "middleware" else (),
        tracing=Tracing(TracerProvider()) if form == "traced" else None,
    )
    async with cluster.serve(service), cluster.serve(service), client, cluster.client() as sender:
        before = asyncio.all_tasks()
        iterator = aiter(LEFT[name](client))
        taking = asyncio.create_task(anext(iterator))
        await cluster.settle()
        await sender.publish("topic.new", b"")
        await taking
        del taking
        if left == "closed":
            await iterator.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
        del iterator
        gc.collect()
        await cluster.settle()
        session = client._runtime.session
        assert session is not None
        assert not session.requests._pending
        assert not client._runtime.registry.watchers
        assert not client._runtime.registry.subscriptions()
        started = asyncio.all_tasks() - before
        assert not [task for task in started if task.get_name() == "iris-request"]
        never.set()


async def test_chunks_that_are_left_early_let_others_receive_the_next_message(
    cluster: LocalCluster,
) -> None:
    async with tunnelled(cluster) as (receiver, sender):
        sending = asyncio.create_task(sender.send(bytes(3 << 20)))
        chunks = receiver.recv_chunks()
        first = await anext(chunks)
        assert len(first) < 3 << 20
        waiting = asyncio.create_task(receiver.recv())
        await take(Case(chunks, lambda chunk: []), 1, [])
        del chunks
        gc.collect()
        await sending
        await sender.send(b"next")
        assert await waiting == b"next"


async def test_several_tasks_may_take_items_of_one_iterator(cluster: LocalCluster) -> None:
    for name in ("subscription", "survey", "request_many", "request_many_inside_middleware"):
        values: list[object] = []

        async def some(found: Case, values: list[object] = values) -> None:
            async for item in found.iterator:
                values.extend(found.value(item))

        async with CASES[name](cluster) as found:
            tasks = [asyncio.create_task(some(found)) for _ in range(3)]
            if found.produce is not None:
                for number in range(COUNT):
                    await found.produce(number)
            await until(lambda values=values: len(values) == COUNT)  # type: ignore[misc]
            if name == "subscription":
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(values, key=str) == [*range(COUNT)]


async def test_a_survey_whose_first_wait_was_cancelled_keeps_its_timeout(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        await cluster.stop_relay()
        await until(lambda: client._runtime.session is None)
        answers = aiter(client.survey("members", b"", timeout=0.05))
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(answers), 0.001)
        with pytest.raises(iris.ConnectionLost):
            await anext(answers)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        await cluster.start_relay()


@pytest.mark.parametrize("middleware", [False, True])
async def test_a_wait_for_a_relay_that_is_cancelled_loses_no_request(
    cluster: LocalCluster, middleware: bool
) -> None:
    service = iris.Service("echo")
    service.on_request(_echo)
    async with cluster.client(middleware=[_passing] if middleware else ()) as client:
        await cluster.stop_relay()
        await until(lambda: client._runtime.session is None)
        numbers = (b"%d" % number for number in range(COUNT))
        outcomes = client.request_many("echo", numbers, timeout=PATIENCE_S)
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(outcomes), 0.001)
        await cluster.start_relay()
        async with cluster.serve(service):
            replies = [int(outcome.result()) async for outcome in outcomes]
        assert sorted(replies) == [*range(COUNT)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of SIGINT, which a shell's background job does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted() -> Iterator[tuple[Any, Any, Callable[[], None]]]:
    """A blocking client, its subscription, and a function that interrupts this thread once that waits."""
    main = threading.main_thread().ident
    assert main is not None
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    with (
        iris.blocking.connect(embedded=True, keyring=keyring) as client,
        client.subscribe("topic.>") as messages,
    ):
        subscription: Any = messages._items  # to see when it waits

        def interrupt() -> None:
            wait_until(lambda: [one for one in subscription._waiters if not one.done()])
            signal.pthread_kill(main, signal.SIGINT)

        yield client, messages, interrupt


@pytest.mark.usefixtures("interruptible")
def test_a_next_of_the_blocking_client_that_is_interrupted_takes_nothing() -> None:
    with interrupted() as (client, messages, interrupt):
        for number in range(COUNT):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                next(messages)
            thread.join(PATIENCE_S)
            client.publish("topic.new", b"%d" % number)
            client.flush()
            assert next(messages).payload == b"%d" % number


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_next_with_a_timeout_takes_nothing_either() -> None:
    with interrupted() as (client, messages, interrupt):
        for number, timeout in enumerate((None, 1.0, PATIENCE_S)):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                messages.next(timeout=timeout)
            thread.join(PATIENCE_S)
            begun = messages._next
            if timeout == 1.0:
                wait_until(lambda ended=begun: ended.done())  # type: ignore[misc]
            for _ in range(2):
                with pytest.raises(iris.RequestTimeout):
                    messages.next(timeout=0.1)
            client.publish("topic.new", b"%d" % number)
            client.flush()
            assert messages.next(timeout=PATIENCE_S).payload == b"%d" % number
