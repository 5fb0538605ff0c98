"""Tracing across processes: a member of `iris run` and a caller, collected in memory and over OTLP.

The receiver of OTLP is an HTTP server of the test, which decodes what it gets as a collector would.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import commands
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S, wait_until

import iris.blocking
from iris import keyfiles
from iris.tracing import Tracing

pytestmark = pytest.mark.timeout(90)
ROOT: Final = Path(__file__).parents[2]

SERVICE = """
import iris

service = iris.Service("shop")

@service.on_request
async def place(lamp: str, client: iris.Client) -> str:
    if lamp == "candle":
        raise ValueError("no candles")
    await client.publish("orders.new", lamp)
    return f"placed {lamp}"

@service.on_push(threads=2)
def remind(lamp: str) -> None: ...

@service.on_request("keep")
async def keep(lamp: str, client: iris.Client) -> int:
    return await client.streams.append("orders", lamp, timeout=20.0)
"""
IN_MEMORY = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import iris.tracing

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
iris.tracing.instrument(provider)

@service.on_request("spans")
def spans(payload: bytes) -> list[list[str]]:
    def shown(context):
        return f"{context.trace_id:032x}-{context.span_id:016x}" if context else ""
    return [
        [span.name, span.kind.name, shown(span.context), shown(span.parent), (span.attributes or {}).get("error.type", "")]
        for span in exporter.get_finished_spans()
    ]
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with the module of the service, and a relay with throw-away keys."""
    with commands.short_directory("iris-otel-") as root:
        (root / "app.py").write_text(SERVICE)
        (root / "inmemory.py").write_text(SERVICE + IN_MEMORY)
        with dev_relay(root, "--data", str(root / "data")):
            yield root
        assert commands.processes_under(root) == []


@pytest.fixture
def shell(home: Path) -> Iterator[Shell]:
    shell = Shell(home, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    yield shell
    shell.finish()


def connected(home: Path, provider: TracerProvider) -> iris.blocking.Client:
    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    relay = home / "iris" / "relay.sock"
    return iris.blocking.connect(relay, keyring=keyring, tracing=Tracing(provider))


def serve(client: iris.blocking.Client) -> None:
    """Return when there is a member of shop."""
    client.wait_for_members("shop", 1, timeout=PATIENCE_S)


def key(span: Any) -> str:
    """Return the trace and the span of a span or a link, as text."""
    return f"{span.context.trace_id:032x}-{span.context.span_id:016x}"


def test_a_trace_goes_through_two_processes_and_back(home: Path, shell: Shell) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    process = shell.start("run", "inmemory")
    with connected(home, provider) as client, client.subscribe("orders.>") as orders:
        serve(client)
        with provider.get_tracer("test").start_as_current_span("checkout") as root:
            assert client.request("shop", "lamp", timeout=5.0, type=str) == "placed lamp"
            assert next(orders).decode(str) == "lamp"
            client.push("shop", "lamp")
            with pytest.raises(iris.RemoteError):
                client.request("shop", "candle", timeout=5.0)

        def spans() -> list[list[str]]:
            found: list[list[str]] = client.request("shop", b"", timeout=5.0, method="spans", type=list[list[str]])  # fmt: skip
            return [span for span in found if not span[0].endswith("/spans")]

        wait_until(lambda: len(spans()) == 4)
        theirs = spans()
    process.terminate()
    end(process)
    mine = {span.name: key(span) for span in reversed(exporter.get_finished_spans())}
    published, handled = theirs[:2]
    assert published[:2] == ["publish orders.new", "PRODUCER"]
    assert handled[:2] == ["process shop", "SERVER"]
    assert published[3] == handled[2]
    assert handled[3] == mine["request shop"]
    pushed, failed = sorted(theirs[2:], key=lambda span: span[1])
    assert pushed[:2] == ["process shop", "CONSUMER"]
    assert pushed[3] == mine["push shop"]
    assert failed[4] == "ValueError"
    (received,) = [s for s in exporter.get_finished_spans() if s.name == "receive orders.new"]
    (link,) = received.links
    assert key(link) == published[2]
    assert link.context.is_remote
    trace_id = f"{root.get_span_context().trace_id:032x}"
    assert {span[2].split("-")[0] for span in theirs} == {trace_id}


def created(client: iris.blocking.Client) -> bool:
    """Create the stream orders; return False if the store has not started yet."""
    try:
        client.streams.create("orders")
    except iris.StreamUnavailable:
        return False
    return True


def test_a_record_that_another_process_appended_is_linked_to(home: Path, shell: Shell) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    process = shell.start("run", "inmemory")
    with connected(home, provider) as client:
        serve(client)
        wait_until(lambda: created(client))
        assert client.request("shop", "lamp", timeout=20.0, method="keep", type=int) == 0
        with client.streams.consumer("orders", "invoices") as work:
            message = next(iter(work))
            assert message.decode(str) == "lamp"
            work.ack(message)
        theirs = client.request("shop", b"", timeout=5.0, method="spans", type=list[list[str]])
    process.terminate()
    end(process)
    appended, handled = theirs
    assert appended[:2] == ["append orders", "PRODUCER"]
    assert appended[3] == handled[2]
    (received,) = [span for span in exporter.get_finished_spans() if span.name == "receive orders"]
    assert [key(link) for link in received.links] == [appended[2]]
    assert received.parent is None


class Receiver:
    """An OTLP receiver on a loopback port."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Spans, with the name of the service that sent them."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                if scope.scope.name == "iris":
                    self.spans += [(names["service.name"], span) for span in scope.spans]

    def named(self, service: str, name: str) -> list[Any]:
        return [span for owner, span in self.spans if (owner, span.name) == (service, name)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def add_entry_point(home: Path) -> None:
    """Install the entry points of this working copy; the environment may have those of another one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group,) = (g for g in project["entry-points"] if g.startswith("opentelemetry"))
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    info = home / "iris_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: iris-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def test_opentelemetry_instrument_traces_a_service_that_knows_nothing_of_it(
    home: Path, shell: Shell, receiver: Receiver
) -> None:
    add_entry_point(home)
    environ = {
        **shell.environ,
        "PYTHONPATH": os.pathsep.join([str(home), str(ROOT)]),
        "OTEL_SERVICE_NAME": "the shop",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    run = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", run, *commands.command("run", "app", "--log-format=text")],
        env=environ, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    shell.started.append(process)
    provider = TracerProvider(resource=Resource({"service.name": "the caller"}))
    exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    with connected(home, provider) as client:
        serve(client)
        assert client.request("shop", "lamp", timeout=5.0, type=str) == "placed lamp"
        with pytest.raises(iris.RemoteError):
            client.request("shop", "candle", timeout=5.0)
    provider.shutdown()
    process.terminate()
    end(process)  # it exports the rest as it ends
    asked, refused = receiver.named("the caller", "request shop")
    handled, failed = receiver.named("the shop", "process shop")
    (published,) = receiver.named("the shop", "publish orders.new")
    assert (handled.trace_id, handled.parent_span_id) == (asked.trace_id, asked.span_id)
    assert (published.trace_id, published.parent_span_id) == (handled.trace_id, handled.span_id)
    assert (asked.kind, handled.kind, published.kind) == (3, 2, 4)  # CLIENT, SERVER, PRODUCER
    texts = {a.key: a.value.string_value for a in handled.attributes}
    assert texts["messaging.system"] == "iris"
    assert texts["messaging.destination.name"] == "shop"
    assert failed.parent_span_id == refused.span_id
    for span, kind in ((refused, "RemoteError"), (failed, "ValueError")):
        assert span.status.code == 2
        assert {a.key: a.value.string_value for a in span.attributes}["error.type"] == kind
    (event,) = failed.events
    assert event.name == "exception"
