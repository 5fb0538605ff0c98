"""OpenTelemetry: one trace from a request through two services to a subscriber, as a tree of spans."""

import asyncio

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import iris
from iris.tracing import Tracing

exporter = InMemorySpanExporter()  # a real program exports to a collector: OTLPSpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))

shop, stock = iris.Service("shop"), iris.Service("stock")
noted = asyncio.Event()


@shop.on_request("place")
async def place(lamp: str, client: iris.Client) -> str:
    left = await client.request("stock", lamp, timeout=1.0, type=int)
    await client.publish("orders.new", lamp)
    return f"placed {lamp}, {left} left"


@stock.on_request
def take(lamp: str) -> int:
    if lamp == "candle":
        raise iris.Refusal("out_of_stock")
    return 6


@stock.on_publish("orders.>")
async def note(lamp: str) -> None:
    noted.set()


def show(spans: list[ReadableSpan], parent: int | None = None, depth: int = 0) -> None:
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent and span.context:
            error = (span.attributes or {}).get("error.type", "")
            print(f"{'  ' * depth}{span.name} {span.kind.name} {error}".rstrip())
            show(spans, span.context.span_id, depth + 1)


async def main() -> None:
    made = iris.connect(embedded=True, tracing=Tracing(provider))
    async with made as client, client.serve(shop), client.serve(stock):
        print(await client.request("shop", "lamp", timeout=1.0, method="place", type=str))
        await noted.wait()
        try:
            await client.request("stock", "candle", timeout=1.0)
        except iris.RemoteError as error:
            print(error)
    show(list(exporter.get_finished_spans()))


asyncio.run(main())
