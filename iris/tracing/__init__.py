"""Tracing with OpenTelemetry. Needs the extra [otel].

    async with iris.connect(tracing=True) as client: ...

Each message that this client sends carries the trace context in its sealed headers. Requests, pushes, surveys,
broadcasts, publications, tunnels and appends get spans, and so do the handlers of the services that it serves.
`instrument()` turns tracing on for all clients of the process, as `opentelemetry-instrument` does.
"""

from __future__ import annotations

from iris.extras import install_line

try:
    import opentelemetry.trace  # noqa: F401 - whether it is there
except ImportError as err:
    raise ImportError(f"iris.tracing needs opentelemetry-api: {install_line('otel')}") from err

from iris.tracing.tracing import Tracing, instrument, process, uninstrument

__all__ = ["Tracing", "instrument", "process", "uninstrument"]
