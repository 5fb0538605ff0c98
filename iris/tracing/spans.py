"""The spans that Iris makes: their names, kinds, attributes and errors.

They follow the semantic conventions for messaging (https://opentelemetry.io/docs/specs/semconv/messaging/), version
1.41. Attributes that only Iris has begin with `messaging.iris.`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider

from iris.core.bundle import Headers
from iris.core.faults import Refusal
from iris.core.message import Message
from iris.describing import library_version
from iris.errors import DecodeError, IrisError, RemoteError
from iris.handlers import ArgumentError
from iris.logs import error_text
from iris.tracing.context import Propagation, links_to
from iris.wire.texts import encodable

SCHEMA: Final = "https://opentelemetry.io/schemas/1.41.0"
SYSTEM: Final = "messaging.system"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
SUBSCRIPTION: Final = "messaging.destination.subscription.name"
GROUP: Final = "messaging.consumer.group.name"
COUNT: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
KIND: Final = "messaging.iris.kind"
METHOD: Final = "messaging.iris.method"
OFFSET: Final = "messaging.iris.offset"
CODE: Final = "messaging.iris.code"
MAY_HAVE_RUN: Final = "messaging.iris.may_have_run"
ACCEPTED: Final = "messaging.iris.accepted"
FAILED: Final = "messaging.iris.failed"

SERVED: Final = frozenset({"request", "survey", "tunnel"})
"""Kinds whose sender waits for the handler: CLIENT and SERVER spans. All others have PRODUCER and CONSUMER spans."""


class Spans:
    """Makes spans with one OpenTelemetry tracer."""

    def __init__(
        self, provider: TracerProvider | None, propagator: TextMapPropagator | None
    ) -> None:
        self._tracer = trace.get_tracer("iris", library_version(), provider, SCHEMA)
        self.propagation = Propagation(propagator)

    def send(
        self, operation: str, name: object, headers: Headers | None, method: str = ""
    ) -> tuple[Span, Headers | None]:
        """Start the span of a message that is about to be sent; return it, and the headers that carry its context.

        `name` is where it goes, as the program passed it to the call, which may refuse it. The span is a child of the
        current one. If the sender's own headers carry a context, they stay as they are, and the span links to it.
        """
        destination = encodable(name) if isinstance(name, str) else type(name).__name__
        span = self._sending(operation, destination, headers, method)
        if headers is not None and not isinstance(headers, dict):
            return span, headers  # the call says what is wrong with them
        return span, self.propagation.inject(span, headers, destination)

    def _sending(
        self, operation: str, destination: str, headers: Headers | None, method: str
    ) -> Span:
        attributes = {
            SYSTEM: "iris",
            OPERATION: operation,
            OPERATION_TYPE: "send",
            DESTINATION: destination,
        }
        name = f"{operation} {destination}"
        if method:
            attributes[METHOD] = method
            name = f"{name}/{method}"
        links = None
        if headers and self.propagation.own(headers):
            links = self.propagation.link(headers)
        kind = SpanKind.CLIENT if operation in SERVED else SpanKind.PRODUCER
        return self._tracer.start_span(name, kind=kind, attributes=attributes, links=links)

    def process(
        self, kind: str, name: str, headers: Headers | None, *, shown: str = "", group: str = "", method: str = ""
    ) -> tuple[Span, Context]:  # fmt: skip
        """Start the span of a handler; return it, and the context in which the handler is to run.

        It is a child of the span in which the message was sent, whatever is current here. `shown` is the filter of a
        subscription, which names the span instead of the topic.
        """
        context = self.propagation.extract(headers)
        attributes = {
            SYSTEM: "iris",
            OPERATION: "process",
            OPERATION_TYPE: "process",
            DESTINATION: name,
            KIND: kind,
        }
        title = f"process {shown or name}"
        if shown:
            attributes[SUBSCRIPTION] = shown
        if group:
            attributes[GROUP] = group
        if method:
            attributes[METHOD] = method
            title = f"{title}/{method}"
        if kind in SERVED:
            span = self._tracer.start_span(
                title, context, kind=SpanKind.SERVER, attributes=attributes
            )
        else:
            span = self._tracer.start_span(
                title, context, kind=SpanKind.CONSUMER, attributes=attributes, links=links_to(context)
            )  # fmt: skip
        return span, trace.set_span_in_context(span, context)

    def work(self, message: Message, *, continued: bool) -> Span:
        """Start the span of what a program does with a message that it iterated over.

        It is a child of the current span, or if there is none and the message is `continued`, of the span in which it
        was sent. It links to that one in any case.
        """
        sent = self.propagation.extract(message.headers)
        current = trace.get_current_span().get_span_context()
        attributes = {
            SYSTEM: "iris",
            OPERATION: "process",
            OPERATION_TYPE: "process",
            DESTINATION: message.name,
        }
        return self._tracer.start_span(
            f"process {message.name}", sent if continued and not current.is_valid else None, kind=SpanKind.CONSUMER,
            attributes=attributes, links=links_to(sent),
        )  # fmt: skip

    def receive(
        self, destination: str, messages: Sequence[Message], attributes: dict[str, Any], *, batch: bool = False
    ) -> None:  # fmt: skip
        """Make the span of messages that are given to the program, which asked for them; it links to each of them."""
        attributes |= {
            SYSTEM: "iris",
            OPERATION: "receive",
            OPERATION_TYPE: "receive",
            DESTINATION: destination,
        }
        if batch:
            attributes[COUNT] = len(messages)
        links: list[Link] = []
        for message in messages:
            links += self.propagation.link(message.headers)
        self._tracer.start_span(
            f"receive {destination}", kind=SpanKind.CLIENT, attributes=attributes, links=links
        ).end()


class Sending:
    """The span of what is sent inside the block. It ends with the block, and fails with it."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if error is not None:
            failed(self._span, error)
        self._span.end()


def failed(span: Span, error: BaseException) -> None:
    """Record that what a span stands for has failed with `error`."""
    if not span.is_recording():
        return
    span.set_attribute(ERROR_TYPE, error_type(error))
    span.set_status(StatusCode.ERROR, encodable(error_text(error)))
    if isinstance(error, IrisError):
        may_have_run = getattr(error, "may_have_run", None)
        if may_have_run is not None:
            span.set_attribute(MAY_HAVE_RUN, may_have_run)
        if isinstance(error, RemoteError) and error.code is not None:
            span.set_attribute(CODE, error.code)


def handler_failed(span: Span, error: BaseException) -> None:
    """Record that a handler raised. A `Refusal` is an answer like any other, so it sets no error."""
    if not span.is_recording():
        return
    if isinstance(error, Refusal):
        span.set_attribute(CODE, error.code)
        return
    failed(span, error)
    if not isinstance(error, (ArgumentError, asyncio.CancelledError)):
        # Not record_exception, which raises if the exception's __str__ does.
        attributes = {
            "exception.type": error_type(error),
            "exception.message": encodable(error_text(error)),
            "exception.stacktrace": encodable("".join(traceback.format_exception(error))),
        }
        span.add_event("exception", attributes)


def error_type(error: BaseException) -> str:
    """Return the name of an error: without its module if it is Python's or Iris' own."""
    if isinstance(error, ArgumentError):
        return DecodeError.__name__  # as callers and the documentation call it
    kind = type(error)
    module = kind.__module__
    own = module == "builtins" or module.startswith(("iris.", "asyncio."))
    return kind.__qualname__ if own else f"{module}.{kind.__qualname__}"
