"""What a client calls if it is traced. `iris.tracing` implements it with OpenTelemetry, which only that package needs.

A client looks for its tracer once, when it is created, and then replaces its own calls.
"""

from __future__ import annotations

from typing import Any, Protocol

from iris.handlers import Handler
from iris.subscription import Subscription


class Tracer(Protocol):
    """Puts spans around what one or several clients send and receive."""

    def trace_calls(self, client: Any) -> None:
        """Replace the calls of a client by calls inside spans."""

    def trace_handler(self, handler: Handler) -> Handler:
        """Return a resolved handler of a service that makes a span for each message or tunnel.

        A handler of publications stays as it is, because its subscription makes the spans.
        """

    def subscription(self, *arguments: Any, **options: Any) -> Subscription:
        """Return a subscription, as `Subscription` does, that makes a span for each message."""

    def streams(self, runtime: Any) -> Any:
        """Return the streams of a client, whose appends and consumers make spans."""


class _Default:
    tracer: Tracer | None = None


def default_tracer() -> Tracer | None:
    """Return the tracer of clients that are created without a choice; None unless this process is instrumented."""
    return _Default.tracer


def set_default_tracer(tracer: Tracer | None) -> None:
    """Choose the tracer of clients that are created from now on without a choice."""
    _Default.tracer = tracer
