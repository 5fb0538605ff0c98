"""Tracing in one process: which spans there are, how they hang together, and what tracing leaves as it is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.waiting import PATIENCE_S, until

import iris
import iris.blocking
import iris.tracing
from iris.extras import install_line
from iris.testing import LocalCluster
from iris.tracing import Tracing

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traces(SpanProcessor):
    """Spans of one provider, as they end, and the number of those that were started."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.provider.add_span_processor(self)
        self.started = 0
        self.tracing = Tracing(self.provider)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.started += 1

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    async def ended(self, name: str, count: int = 1) -> list[ReadableSpan]:
        await until(lambda: len(self.named(name)) >= count)
        found = self.named(name)
        assert len(found) == count
        return found

    @contextlib.contextmanager
    def root(self) -> Iterator[trace.Span]:
        with self.provider.get_tracer("test").start_as_current_span("root") as span:
            yield span


def ids(span: ReadableSpan | trace.Span | None) -> tuple[int, int]:
    """Return (trace id, span id)."""
    assert span is not None
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent is not None else None


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def facts(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes that differ between spans of Iris."""
    attributes = dict(span.attributes or {})
    assert attributes.pop("messaging.system") == "iris"
    return {
        name.removeprefix("messaging.").removeprefix("iris."): value
        for name, value in attributes.items()
    }


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: LocalCluster, traces: Traces) -> AsyncIterator[iris.Client]:
    """A traced client of the cluster, which is not that of the services."""
    async with cluster.client(tracing=traces.tracing) as client:
        yield client


@pytest.fixture
async def member(cluster: LocalCluster, traces: Traces) -> AsyncIterator[iris.Client]:
    """A traced client of the cluster, for services."""
    async with cluster.client(tracing=traces.tracing) as client:
        yield client


# -- what there is -----------------------------------------------------------------------------------------------


async def test_a_request_is_the_parent_of_its_handler(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_request
    async def place(number: int) -> int:
        with traces.provider.get_tracer("test").start_as_current_span("inside"):
            return number

    async with member.serve(service):
        with traces.root() as root:
            assert await client.request("shop", 7, timeout=5.0) == 7
    asked, handled, inside = (traces.one(n) for n in ("request shop", "process shop", "inside"))
    assert (parent(asked), asked.kind) == (ids(root), SpanKind.CLIENT)
    assert (parent(handled), handled.kind) == (ids(asked), SpanKind.SERVER)
    assert parent(inside) == ids(handled)
    assert asked.start_time is not None
    assert handled.start_time is not None
    assert asked.start_time <= handled.start_time
    assert facts(asked) == {"operation.name": "request", "operation.type": "send", "destination.name": "shop"}  # fmt: skip
    assert facts(handled) == {
        "operation.name": "process", "operation.type": "process", "destination.name": "shop", "kind": "request",
    }  # fmt: skip
    assert asked.status.status_code is handled.status.status_code is StatusCode.UNSET
    assert asked.instrumentation_scope is not None
    assert asked.instrumentation_scope.name == "iris"


async def test_a_method_is_in_the_names_of_both_spans(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_request("place")
    def place(number: int) -> int:
        return number

    async with member.serve(service):
        await client.request("shop", 7, timeout=5.0, method="place")
    for name in ("request shop/place", "process shop/place"):
        assert facts(traces.one(name))["method"] == "place"


async def test_pushes_broadcasts_and_publications_are_parents_of_each_handler_and_linked(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_push
    async def remind(number: int) -> None: ...

    @service.on_broadcast
    def reload(number: int) -> None: ...

    @service.on_publish("orders.>", group="g")
    async def note(number: int) -> None: ...

    @service.on_publish("orders.*")
    def note_all(number: int) -> None: ...

    async with member.serve(service):
        with traces.root():
            await client.push("shop", 1)
            await client.broadcast("shop", 2)
            assert client.offer_broadcast("shop", 3)
            await client.publish("orders.new", 4)
            assert client.offer("orders.old", 5)
        handled = await traces.ended("process shop", 3)
        handled += await traces.ended("process orders.>", 2)
        handled += await traces.ended("process orders.*", 2)
    senders = {
        ids(span): span.name
        for name in ("push shop", "broadcast shop", "publish orders.new", "publish orders.old")
        for span in traces.named(name)
    }
    assert sorted(senders.values()) == ["broadcast shop", "broadcast shop", "publish orders.new", "publish orders.old", "push shop"]  # fmt: skip
    for span in handled:
        assert span.kind is SpanKind.CONSUMER
        assert links(span) == [parent(span)]
        sender = senders[links(span)[0]]
        assert sender.split()[0] == facts(span)["kind"]
        assert sender.split()[1] == facts(span)["destination.name"]
    for name in ("push shop", "publish orders.new"):
        assert traces.one(name).kind is SpanKind.PRODUCER
    group = traces.named("process orders.>")[0]
    assert facts(group)["destination.subscription.name"] == "orders.>"
    assert facts(group)["consumer.group.name"] == "g"
    assert "consumer.group.name" not in facts(traces.named("process orders.*")[0])


async def test_a_survey_is_the_parent_of_each_answer(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_survey
    def count(number: int) -> int:
        return 10 // number

    async with member.serve(service):
        with traces.root() as root:
            assert [a.value async for a in client.survey("shop", 5, timeout=5.0)] == [2]
            assert [a async for a in client.survey("shop", 0, timeout=5.0)] == []
    with pytest.raises(iris.NoMembers):
        assert not [a async for a in client.survey("nobody", 0, timeout=5.0)]
    assert facts(traces.one("survey nobody"))["error.type"] == "NoMembers"
    client.survey("unasked", 0, timeout=5.0)
    good, bad = traces.named("survey shop")
    assert parent(good) == ids(root)
    assert good.kind is SpanKind.CLIENT
    assert (facts(good)["batch.message_count"], facts(good)["failed"]) == (1, 0)
    assert (facts(bad)["batch.message_count"], facts(bad)["failed"]) == (0, 1)
    assert [parent(span) for span in traces.named("process shop")] == [ids(good), ids(bad)]
    assert traces.named("process shop")[0].kind is SpanKind.SERVER


async def test_many_requests_have_one_span(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_request
    def place(number: int) -> int:
        return 10 // number

    async with member.serve(service):
        outcomes = client.request_many("shop", [0, 1, 2], timeout=5.0)
        assert not traces.spans
        assert sorted([outcome.reply or 0 async for outcome in outcomes]) == [0, 5, 10]
        async for _ in client.request_many("shop", [1, 2, 3], timeout=5.0):
            break
    gc.collect()
    whole, broken_off = await traces.ended("request shop", 2)
    assert (facts(whole)["batch.message_count"], facts(whole)["failed"]) == (3, 1)
    assert facts(broken_off)["batch.message_count"] == 1
    assert broken_off.status.status_code is StatusCode.UNSET
    handled = traces.named("process shop")
    assert [parent(span) for span in handled[:3]] == [ids(whole)] * 3
    assert {parent(span) for span in handled[3:]} == {ids(broken_off)}


async def test_a_tunnel_has_one_span_on_each_side(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("archive")

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        while True:  # ended by EndOfTunnel, which is not an error
            await tunnel.send(await tunnel.recv())

    async with member.serve(service):
        with traces.root() as root:
            async with client.tunnel("archive", timeout=5.0, headers={"a": "b"}) as tunnel:
                assert tunnel.headers.keys() == {"a", "traceparent"}
                for number in range(5):
                    await tunnel.send(str(number))
                    assert await tunnel.recv() == str(number).encode()
                assert not traces.spans
        (handled,) = await traces.ended("process archive")
    opened = traces.one("tunnel archive")
    assert (parent(opened), opened.kind) == (ids(root), SpanKind.CLIENT)
    assert (parent(handled), handled.kind) == (ids(opened), SpanKind.SERVER)
    assert handled.status.status_code is StatusCode.UNSET
    assert facts(handled)["kind"] == "tunnel"


async def test_a_loop_over_a_subscription_gets_a_linked_span_for_each_message(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    async with member.subscribe("orders.>", group="g") as orders:
        with traces.root():
            await client.publish("orders.new", b"x")
        async for message in orders:
            with traces.tracing.process(message) as span:
                assert trace.get_current_span() is span
            break
        assert not trace.get_current_span().get_span_context().is_valid
    published, received = traces.one("publish orders.new"), traces.one("receive orders.new")
    assert (received.kind, links(received)) == (SpanKind.CLIENT, [ids(published)])
    assert parent(received) is None
    assert facts(received)["consumer.group.name"] == "g"
    processed = traces.one("process orders.new")
    assert (processed.kind, links(processed)) == (SpanKind.CONSUMER, [ids(published)])
    assert parent(processed) == ids(published)  # nothing else is current


async def test_appends_travel_with_their_records_and_consumers_link_to_them(
    traces: Traces, tmp_path: Path
) -> None:
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client(tracing=traces.tracing) as client,
    ):
        await client.streams.create("orders")
        with traces.root() as root:
            await client.streams.append("orders", b"a", headers={"h": "1"})
            await client.streams.append("orders", b"b", expect=1)
            await client.streams.append_many("orders", [b"c", b"d"])
        async with client.streams.consumer("orders", "invoices") as work:
            held = []
            async for message in work:
                held.append(message)
                with traces.tracing.process(message):
                    work.ack(message)
                if len(held) == 3:
                    break
            work.ack(*held)
        async with client.streams.consumer("orders", "audit") as work:
            batch = await work.batch()
            work.ack_through(batch[-1])
    first, second, many = traces.named("append orders")
    assert [parent(span) for span in (first, second, many)] == [ids(root)] * 3
    assert [facts(span).get("offset") for span in (first, second, many)] == [0, 1, None]
    assert facts(many)["batch.message_count"] == 2
    assert many.kind is SpanKind.PRODUCER
    assert [m.headers and m.headers.get("h") for m in held][:2] == ["1", None]
    received = traces.named("receive orders")
    assert [links(span) for span in received[:3]] == [[ids(first)], [ids(second)], [ids(many)]]
    assert [facts(span)["offset"] for span in received[:3]] == [0, 1, 2]
    assert facts(received[0])["consumer.group.name"] == "invoices"
    assert {ids(first), ids(second), ids(many)} >= set(links(received[-1]))
    assert facts(received[-1])["batch.message_count"] == len(batch)
    processed = traces.named("process orders")[0]
    assert parent(processed) is None  # a record may be old: its work is a trace of its own
    assert links(processed) == [ids(first)]


# -- errors ------------------------------------------------------------------------------------------------------


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_failed_calls_have_iris_own_error_names(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop", limits=iris.Limits(concurrency=1, queue_bytes=1))
    release, entered = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def place(what: str) -> str:
        if what == "refuse":
            raise iris.Refusal("out_of_stock", left=2)
        if what == "fail":
            raise ValueError("no such lamp")
        entered.set()
        await release.wait()
        return what

    async def error_of(what: object, cluster: str = "shop", timeout: float = 5.0) -> ReadableSpan:
        with pytest.raises(iris.IrisError) as caught:
            await client.request(cluster, what, timeout=timeout)
        span = traces.named(f"request {cluster}")[-1]
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None
        assert span.attributes["error.type"] == type(caught.value).__name__
        assert span.attributes["messaging.iris.may_have_run"] is caught.value.may_have_run  # type: ignore[attr-defined]  # both kinds have it
        assert span.status.description is not None
        assert str(caught.value) in span.status.description
        return span

    async with member.serve(service):
        assert facts(await error_of("refuse"))["code"] == "out_of_stock"
        assert "code" not in facts(await error_of("fail"))
        assert facts(await error_of("x", "nobody"))["error.type"] == "NoMembers"
        assert facts(await error_of(b"\xff"))["may_have_run"] is False  # it is not text
        waiting = asyncio.create_task(client.request("shop", "wait", timeout=5.0))
        await entered.wait()
        assert facts(await error_of("one too many"))["error.type"] == "Overloaded"
        waiting.cancel()
        await asyncio.wait([waiting])
        assert facts(traces.named("request shop")[-1])["error.type"] == "CancelledError"
        release.set()
        await traces.ended("process shop", 4)
        release.clear()
        assert facts(await error_of("late", timeout=0.05))["error.type"] == "RequestTimeout"
        release.set()
    refused, failed, wrong, *_ = traces.named("process shop")
    assert facts(refused)["code"] == "out_of_stock"
    assert refused.status.status_code is StatusCode.UNSET  # a refusal is an answer
    assert "error.type" not in facts(refused)
    assert facts(failed)["error.type"] == "ValueError"
    assert failed.status.description == "ValueError: no such lamp"
    (event,) = failed.events
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "ValueError"
    assert "no such lamp" in str(event.attributes["exception.stacktrace"])
    assert facts(wrong)["error.type"] == "DecodeError"
    assert not wrong.events


async def test_a_handler_whose_exception_has_no_text_is_answered_as_without_tracing(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_request
    def place(number: int) -> int:
        raise Odd

    async with member.serve(service):
        with pytest.raises(iris.RemoteError, match="its __str__ raised RuntimeError"):
            await client.request("shop", 1, timeout=5.0)
    handled = traces.one("process shop")
    assert facts(handled)["error.type"] == f"{__name__}.Odd"
    assert len(handled.events) == 1


async def test_texts_that_no_exporter_can_encode_do_not_cost_a_batch_of_spans(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")
    name = os.fsdecode(b"lamp-\xff")  # has a lone surrogate, as names of files may

    @service.on_request
    def place(number: int) -> int:
        raise OSError(name)

    @service.on_push
    def remind(request: iris.Request) -> None:
        raise iris.Refusal("closed", name)

    async with member.serve(service):
        with pytest.raises(iris.RemoteError):
            await client.request("shop", 1, timeout=5.0)
        await client.push("shop", 1)
        await traces.ended("process shop", 2)
    with pytest.raises(iris.InvalidName):
        await client.publish(name, b"")
    with pytest.raises(iris.IrisError):
        await client.streams.append(name, b"", timeout=0.1)
    encoded = encode_spans(traces.spans).SerializeToString()
    assert b"process shop" in encoded
    assert encoded.count(b"lamp-?") >= 5


async def test_the_log_names_a_handler_as_without_tracing(
    client: iris.Client, member: iris.Client, caplog: pytest.LogCaptureFixture
) -> None:
    service = iris.Service("shop")

    def place(by: str, number: int) -> None:
        raise ValueError(by)

    class Note:
        async def __call__(self, number: int) -> None:
            raise ValueError

    service.on_push(functools.partial(place, "me"))
    service.on_request(Note())
    async with member.serve(service):
        await client.push("shop", 1)
        with pytest.raises(iris.RemoteError):
            await client.request("shop", 1, timeout=5.0)
        await until(lambda: len(caplog.records) == 2)
    names = [record.fields["function"].rpartition("<locals>.")[2] for record in caplog.records]  # type: ignore[attr-defined]  # of Iris
    assert names == ["place", "Note"]


async def test_a_handler_that_is_cancelled_with_its_caller_ends_its_span(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")
    entered = asyncio.Event()

    @service.on_request(on_cancel="cancel")
    async def place(number: int) -> int:
        entered.set()
        await asyncio.Event().wait()
        return number

    async with member.serve(service):
        asking = asyncio.create_task(client.request("shop", 1, timeout=5.0))
        await entered.wait()
        asking.cancel()
        (handled,) = await traces.ended("process shop")
        await asyncio.wait([asking])
    assert facts(handled)["error.type"] == "CancelledError"
    assert handled.status.status_code is StatusCode.ERROR
    assert not handled.events


async def test_a_handler_that_still_runs_when_its_service_stops_ends_its_span(
    traces: Traces, cluster: LocalCluster, client: iris.Client
) -> None:
    service = iris.Service("shop")
    entered = asyncio.Event()

    @service.on_request
    async def place(number: int) -> int:
        entered.set()
        await asyncio.Event().wait()
        return number

    config = iris.ClientConfig(drain_timeout_s=0.05)
    async with cluster.client(tracing=traces.tracing, config=config) as member:
        async with member.serve(service):
            asking = asyncio.create_task(client.request("shop", 1, timeout=5.0))
            await entered.wait()
        with pytest.raises(iris.RemoteError):
            await asking
    assert facts(traces.one("process shop"))["error.type"] == "CancelledError"


async def test_a_call_that_is_cancelled_at_any_await_ends_its_span(
    traces: Traces, client: iris.Client, member: iris.Client, caplog: pytest.LogCaptureFixture
) -> None:
    service = iris.Service("shop")

    @service.on_request(on_cancel="cancel")
    async def place(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @service.on_survey(on_cancel="cancel")
    async def count(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        await tunnel.send(await tunnel.recv())

    async def survey() -> None:
        async with contextlib.aclosing(aiter(client.survey("shop", 1, timeout=5.0))) as answers:
            async for _ in answers:
                ...

    async def many() -> None:
        outcomes: Any = client.request_many("shop", [1, 2], timeout=5.0)
        async with contextlib.aclosing(outcomes):
            async for _ in outcomes:
                ...

    async def tunnel() -> None:
        async with client.tunnel("shop", timeout=5.0) as tunnel:
            await tunnel.send(b"x")
            await tunnel.recv()

    calls = {
        "request shop": lambda: client.request("shop", 1, timeout=5.0),
        "push nobody": lambda: client.push("nobody", 1),
        "publish orders": lambda: client.publish("orders", 1, count=True),
        "survey shop": survey,
        "request many": many,
        "tunnel shop": tunnel,
    }
    started = 0
    async with member.serve(service):
        for call in calls.values():
            for turns in range(1, 25):
                task: asyncio.Task[Any] = asyncio.ensure_future(call())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                started += 1
    sent = [span for span in traces.spans if not span.name.startswith("process ")]
    assert len(sent) == started
    handled = len(traces.spans) - started
    assert 0 < handled == traces.started - started
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_tunnel_whose_handler_raises_has_errors_on_both_sides(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("archive")

    @service.on_tunnel
    async def fail(tunnel: iris.Tunnel) -> None:
        raise OSError("disk on fire")

    async with member.serve(service):
        with pytest.raises(iris.TunnelBroken):
            async with client.tunnel("archive", timeout=5.0) as tunnel:
                await tunnel.recv()
        (handled,) = await traces.ended("process archive")
    assert facts(handled)["error.type"] == "OSError"
    assert facts(traces.one("tunnel archive"))["error.type"] == "TunnelBroken"
    with pytest.raises(iris.NoMembers):
        await client.open_tunnel("nobody", timeout=5.0)
    assert facts(traces.one("tunnel nobody"))["error.type"] == "NoMembers"


async def test_what_cannot_be_sent_is_refused_as_without_tracing(
    traces: Traces, client: iris.Client
) -> None:
    wrong: Any = {"a": 1}
    with pytest.raises(iris.IrisError, match="header names and values must be str"):
        await client.publish("orders", b"", headers=wrong)
    with pytest.raises(iris.InvalidName):
        client.request_many("shop", [b""], timeout=5.0, method="no method")
    with pytest.raises(TypeError, match="cluster"):
        await client.request(payload=b"", timeout=5.0)  # type: ignore[call-overload]  # that is the test
    with pytest.raises(iris.MessageTooLarge):
        client.offer("orders", bytes(2 << 20))
    await client.publish(topic="orders", payload=b"named")
    spans = traces.named("publish orders")
    assert [facts(span).get("error.type") for span in spans] == ["EncodeError", "MessageTooLarge", None]  # fmt: skip


# -- where a handler runs ----------------------------------------------------------------------------------------


async def test_a_handler_in_threads_has_the_context_of_its_message(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")
    tracer = traces.provider.get_tracer("test")
    barrier = threading.Barrier(8, timeout=PATIENCE_S)

    @service.on_request(threads=8)
    def place(number: int) -> int:
        barrier.wait()
        with tracer.start_as_current_span(f"in thread {number}"):
            return int(str(baggage.get_baggage("number")))

    async def ask(number: int) -> None:
        token = context.attach(baggage.set_baggage("number", str(number)))
        try:
            with tracer.start_as_current_span(f"root {number}"):
                assert await client.request("shop", number, timeout=5.0) == number
        finally:
            context.detach(token)

    async with member.serve(service):
        await asyncio.gather(*map(ask, range(8)))
    for number in range(8):
        inside = traces.one(f"in thread {number}")
        (handled,) = [span for span in traces.named("process shop") if ids(span) == parent(inside)]
        (asked,) = [span for span in traces.named("request shop") if ids(span) == parent(handled)]
        assert parent(asked) == ids(traces.one(f"root {number}"))


async def test_a_task_that_a_handler_starts_belongs_to_its_trace_and_nothing_else_does(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")
    tracer = traces.provider.get_tracer("test")
    go = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later() -> None:
        await go.wait()
        with tracer.start_as_current_span("later"):
            pass

    @service.on_request
    async def place(number: int) -> bool:
        current = trace.get_current_span().get_span_context().is_valid
        if number:
            tasks.append(asyncio.create_task(later()))
        return current

    async with cluster_of(member).client() as untraced, member.serve(service):
        assert await client.request("shop", 1, timeout=5.0)
        # The same worker serves the next one, which has no context.
        await untraced.request("shop", 0, timeout=5.0)
        go.set()
        await asyncio.gather(*tasks)
    first, second = traces.named("process shop")
    assert parent(traces.one("later")) == ids(first)
    assert parent(second) is None
    assert ids(first)[0] != ids(second)[0]


async def test_what_was_current_when_a_client_connected_is_not_the_parent_of_its_handlers(
    traces: Traces, cluster: LocalCluster, client: iris.Client
) -> None:
    service = iris.Service("shop")

    @service.on_request
    def place(number: int) -> int:
        return number

    @service.on_publish("orders")
    def note(number: int) -> None: ...

    token = context.attach(baggage.set_baggage("of", "start-up"))
    try:
        with traces.root():
            async with (
                cluster.client(tracing=traces.tracing) as member,
                cluster.client() as plain,
                member.serve(service),
            ):
                await plain.request("shop", 1, timeout=5.0)
                await plain.publish("orders", 1)
                await traces.ended("process orders")
    finally:
        context.detach(token)
    assert parent(traces.one("process shop")) is None
    assert parent(traces.one("process orders")) is None


async def test_a_deferred_reply_ends_the_span_of_its_handler(
    traces: Traces, client: iris.Client, member: iris.Client
) -> None:
    service = iris.Service("shop")
    held: list[iris.Deferred] = []

    @service.on_request
    def place(request: iris.Request) -> None:
        held.append(request.defer())
        with pytest.raises(iris.ConfigError, match="deferred already"):
            request.defer()

    async with member.serve(service):
        tasks = [asyncio.create_task(client.request("shop", n, timeout=5.0)) for n in range(4)]
        await until(lambda: len(held) == 4)
        assert not traces.named("process shop")
        held[0].reply("late")
        held[0].reply("again")
        held[1].fail("broken")
        held[2].fail(iris.Refusal("closed"))
        del held[3]
        gc.collect()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert replies[0] == b"late"
    assert [type(reply) for reply in replies[1:]] == [iris.RemoteError] * 3
    late, broken, closed, dropped = traces.named("process shop")
    assert late.status.status_code is StatusCode.UNSET
    assert broken.status.description == "broken"
    assert facts(broken)["error.type"] == "RemoteError"
    assert facts(closed)["code"] == "closed"
    assert "without answering" in str(dropped.status.description)


async def test_middleware_is_inside_the_span_of_a_handler_and_around_that_of_a_call(
    traces: Traces, cluster: LocalCluster
) -> None:
    current: list[bool] = []

    async def refuse(request: iris.Request, call_next: iris.CallNext) -> Any:
        current.append(trace.get_current_span().get_span_context().is_valid)
        request.headers = None
        if request.value == 1:
            raise iris.Refusal("unauthorized")
        return await call_next(request)

    async def retry(call: iris.Call, call_next: iris.CallNext) -> Any:
        assert call.headers is None
        try:
            return await call_next(call)
        except iris.RemoteError:
            call.payload = 2
            return await call_next(call)

    service = iris.Service("shop", middleware=[refuse])

    @service.on_request
    def place(request: iris.Request) -> Any:
        return request.value

    made = cluster.client(tracing=traces.tracing, middleware=[retry])
    async with made as client, client.serve(service):
        assert await client.request("shop", 1, timeout=5.0) == 2
    assert current == [True, True]
    asked, handled = traces.named("request shop"), traces.named("process shop")
    assert [parent(span) for span in handled] == [ids(span) for span in asked]
    assert facts(handled[0])["code"] == "unauthorized"


def cluster_of(client: iris.Client) -> LocalCluster:
    """Return the cluster of a client that `LocalCluster.client` made."""
    connector: Any = client._connector
    found: LocalCluster = connector.__self__._cluster
    return found


# -- headers -----------------------------------------------------------------------------------------------------


async def test_headers_of_the_sender_arrive_as_they_are_and_stay_as_they_were(
    client: iris.Client, member: iris.Client, traces: Traces
) -> None:
    service = iris.Service("shop")

    @service.on_request
    def seen(request: iris.Request) -> dict[str, str]:
        return request.headers or {}

    mine = {"tenant": "acme"}
    async with member.serve(service):
        found = await client.request("shop", b"", timeout=5.0, headers=mine)
        assert mine == {"tenant": "acme"}
        assert found.keys() == {"tenant", "traceparent"}
        assert await client.request("shop", b"", timeout=5.0, headers={"traceparent": GOOD}) == {
            "traceparent": GOOD
        }
    asked, handled = traces.named("request shop")[-1], traces.named("process shop")[-1]
    trace_id, span_id = (int(part, 16) for part in GOOD.split("-")[1:3])
    assert parent(handled) == (trace_id, span_id)
    assert links(asked) == [(trace_id, span_id)]


async def test_a_peer_that_sends_garbage_as_context_is_served(
    cluster: LocalCluster, member: iris.Client, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    service = iris.Service("shop")

    @service.on_request
    async def place(number: int) -> int:
        return number

    async with cluster.client() as peer, member.serve(service):
        for number, value in enumerate(("", "x" * 2000, "00-\x00-\x00-00", "ff" + GOOD[2:])):
            headers = {"traceparent": value, "tracestate": "\x00=" * 99, "baggage": "%,,;=" * 99}
            assert await peer.request("shop", number, timeout=5.0, headers=headers) == number
    handled = traces.named("process shop")
    assert len(handled) == 4
    assert [parent(span) for span in handled] == [None] * 4
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_full_headers_lose_the_context_and_not_the_message(
    client: iris.Client, member: iris.Client, traces: Traces
) -> None:
    service = iris.Service("shop")

    @service.on_request
    def seen(request: iris.Request) -> list[str]:
        return sorted(request.headers or {})

    async with member.serve(service):
        full = {"tenant": "t" * 3050}
        assert await client.request("shop", b"", timeout=5.0, headers=full) == ["tenant"]


async def test_a_sender_that_samples_nothing_says_so(cluster: LocalCluster, member: iris.Client, traces: Traces) -> None:  # fmt: skip
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    service = iris.Service("shop")

    @service.on_request
    def sampled(request: iris.Request) -> bool:
        return int((request.headers or {})["traceparent"][-2:], 16) & 1 == 1

    quiet = Tracing(TracerProvider(sampler=ALWAYS_OFF))
    async with cluster.client(tracing=quiet) as client, member.serve(service):
        assert await client.request("shop", b"", timeout=5.0) is False
    assert not traces.spans


# -- switching on and off ----------------------------------------------------------------------------------------


def test_nothing_of_opentelemetry_is_imported_without_tracing() -> None:
    program = "import sys, iris, iris.blocking, iris.testing; iris.connect(); print([m for m in sys.modules if 'telemetry' in m or m.startswith('iris.tracing')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_without_opentelemetry_the_error_says_what_to_install() -> None:
    program = "import sys; sys.modules['opentelemetry.trace'] = None; import iris; iris.connect(tracing=True)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (
        f"ImportError: iris.tracing needs opentelemetry-api: {install_line('otel')}" in done.stderr
    )


@pytest.fixture
def instrumented(traces: Traces) -> Iterator[None]:
    iris.tracing.instrument(traces.provider)
    yield
    iris.tracing.uninstrument()


async def test_without_tracing_a_client_is_the_one_it_was(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        assert not {"request", "push", "publish", "offer"} & vars(client).keys()
        async with cluster.serve(iris.Service("shop")), client.subscribe("x") as subscription:
            assert type(subscription) is iris.Subscription


async def test_an_instrumented_process_traces_clients_that_choose_nothing(
    instrumented: None, traces: Traces, cluster: LocalCluster
) -> None:
    async with cluster.client() as client, cluster.client(tracing=False) as other:
        await client.publish("orders", b"")
        await other.publish("orders", b"")
    assert len(traces.spans) == 1
    message = iris.Message(b"", "orders", {"traceparent": GOOD})
    with iris.tracing.process(message):
        pass
    assert parent(traces.one("process orders")) == tuple(int(x, 16) for x in GOOD.split("-")[1:3])
    iris.tracing.uninstrument()
    async with cluster.client() as client:
        await client.publish("orders", b"")
    assert len(traces.spans) == 2


async def test_the_instrumentor_of_opentelemetry_switches_tracing(
    traces: Traces, cluster: LocalCluster
) -> None:
    from iris.tracing.instrumentor import IrisInstrumentor

    IrisInstrumentor().instrument(tracer_provider=traces.provider)
    try:
        async with cluster.client() as client:
            await client.publish("orders", b"")
    finally:
        IrisInstrumentor().uninstrument()
    async with cluster.client() as client:
        await client.publish("orders", b"")
    assert len(traces.spans) == 1


async def test_tracing_without_a_provider_costs_no_message(cluster: LocalCluster) -> None:
    """As in a program that did not set up the SDK: there is nothing to carry."""
    service = iris.Service("shop")

    @service.on_request
    def seen(request: iris.Request) -> bool:
        return request.headers is None

    async with cluster.client(tracing=True) as client, client.serve(service):
        assert await client.request("shop", b"", timeout=5.0) is True


def test_what_is_not_tracing_is_refused() -> None:
    wrong: Any = TracerProvider()
    with pytest.raises(iris.ConfigError, match=r"pass Tracing\(provider\)"):
        iris.connect(tracing=wrong)


def test_a_thread_without_a_loop_is_the_parent_of_its_calls(traces: Traces) -> None:
    service = iris.Service("shop")

    @service.on_request(threads=1)
    def place(number: int) -> int:
        return number

    with (
        iris.blocking.connect(embedded=True, tracing=traces.tracing) as client,
        client.serve(service),
        traces.root() as root,
    ):
        assert client.request("shop", 1, timeout=5.0) == 1
        with client.subscribe("orders") as orders:
            client.publish("orders", b"")
            next(orders)
    assert parent(traces.one("request shop")) == ids(root)
    assert parent(traces.one("process shop")) == ids(traces.one("request shop"))
    assert parent(traces.one("publish orders")) == ids(root)
    assert links(traces.one("receive orders")) == [ids(traces.one("publish orders"))]


async def test_a_member_that_is_lost_ends_the_span_of_its_caller(
    traces: Traces, cluster: LocalCluster, client: iris.Client
) -> None:
    service = iris.Service("shop")
    entered, release = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def place(number: int) -> int:
        entered.set()
        await release.wait()
        return number

    async with cluster.serve(service) as member:
        asking = asyncio.create_task(client.request("shop", 1, timeout=5.0))
        await entered.wait()
        cluster.lose(member)
        with pytest.raises(iris.ConnectionLost):
            await asking
        release.set()
    assert facts(traces.one("request shop"))["error.type"] == "ConnectionLost"


@pytest.mark.parametrize("kind", ["request", "publish"])
async def test_what_a_plain_function_returns_is_awaited_inside_its_span(
    cluster: LocalCluster, client: iris.Client, traces: Traces, kind: str
) -> None:
    current: list[tuple[int, int]] = []

    async def body(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        current.append(ids(trace.get_current_span()))
        if payload == b"2":
            raise ValueError("no")
        return payload

    def handler(payload: bytes) -> Any:
        return body(payload)

    service = iris.Service("shop")
    (service.on_request if kind == "request" else service.on_publish("orders"))(handler)
    async with client.serve(service):
        for payload in (b"1", b"2", b"3"):
            if kind == "publish":
                await client.publish("orders", payload)
            elif payload == b"2":
                with pytest.raises(iris.RemoteError, match="ValueError: no"):
                    await client.request("shop", payload, timeout=5.0)
            else:
                assert await client.request("shop", payload, timeout=5.0) == payload
        spans = await traces.ended("process shop" if kind == "request" else "process orders", 3)
    assert [ids(span) for span in spans] == current
    assert [span.status.status_code is StatusCode.ERROR for span in spans] == [False, True, False]
