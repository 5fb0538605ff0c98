"""What `opentelemetry-instrument` loads to trace Iris. It is installed with opentelemetry-instrumentation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # it hides its types # fmt: skip

from iris.tracing.tracing import instrument, uninstrument


class IrisInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # so it is Any
    """Traces all clients of the process: `IrisInstrumentor().instrument()` does what `iris.tracing.instrument` does."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()  # it comes with Iris

    def _instrument(self, **options: Any) -> None:
        instrument(options.get("tracer_provider"), propagator=options.get("propagator"))

    def _uninstrument(self, **options: Any) -> None:
        uninstrument()
