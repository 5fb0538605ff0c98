"""`Tracing`: what `iris.connect(tracing=...)` takes, and the switch for all clients of a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Span, TracerProvider

from iris.core.message import Message
from iris.handlers import Handler
from iris.streams.records import StreamMessage
from iris.subscription import Subscription
from iris.tracer import Tracer, default_tracer, set_default_tracer
from iris.tracing.calls import trace_calls
from iris.tracing.handlers import Processing, TracedHandler, TracedTunnels
from iris.tracing.receiving import TracedStreams, TracedSubscription
from iris.tracing.spans import Spans


class Tracing(Tracer):
    """Traces the clients that it is passed to: `iris.connect(tracing=iris.tracing.Tracing(provider))`.

    `tracer_provider` and `propagator` are by default those of the process, which `opentelemetry.trace` and
    `opentelemetry.propagate` hold, also if they are set later.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        propagator: TextMapPropagator | None = None,
    ) -> None:
        self._spans = Spans(tracer_provider, propagator)

    @contextlib.contextmanager
    def process(self, message: Message) -> Iterator[Span]:
        """Make a span of what the block does with a message that a loop received: `with tracing.process(message):`.

        The span links to the one in which the message was sent. It is a child of the current span. If there is none, a
        message of a stream begins a trace of its own, and any other message continues the trace of its sender.
        """
        continued = not isinstance(message, StreamMessage)
        span = self._spans.work(message, continued=continued)
        with Processing(span, trace.set_span_in_context(span)):
            yield span

    def trace_calls(self, client: Any) -> None:
        trace_calls(client, self._spans)

    def trace_handler(self, handler: Handler) -> Handler:
        if handler.kind_name in ("request", "push", "survey", "broadcast"):
            return TracedHandler(handler, self._spans)
        return (
            TracedTunnels(handler, self._spans) if handler.kind_name == "tunnel_open" else handler
        )

    def subscription(self, *arguments: Any, **options: Any) -> Subscription:
        return TracedSubscription(self._spans, *arguments, **options)

    def streams(self, runtime: Any) -> TracedStreams:
        return TracedStreams(self._spans, runtime)


def instrument(
    tracer_provider: TracerProvider | None = None, *, propagator: TextMapPropagator | None = None
) -> None:
    """Trace all clients of this process that are created from now on, unless they are passed `tracing=False`."""
    set_default_tracer(Tracing(tracer_provider, propagator=propagator))


def uninstrument() -> None:
    """Undo `instrument` for clients that are created from now on."""
    set_default_tracer(None)


def process(message: Message) -> contextlib.AbstractContextManager[Span]:
    """Return `Tracing.process(message)` of the tracing that `instrument` set up, or else of the process' provider."""
    tracing = default_tracer()
    return (tracing if isinstance(tracing, Tracing) else Tracing()).process(message)
