"""Middleware that measures the calls of handlers as a histogram."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from iris.handlers import Request
from iris.middleware import CallNext, Middleware

BUCKETS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds in seconds."""


def handler_times(
    registry: CollectorRegistry | None = REGISTRY, *, buckets: Sequence[float] = BUCKETS
) -> Middleware:
    """Return middleware for `iris.Service(…, middleware=[…])` that measures each call of a handler.

    The histogram `iris_service_handler_duration_seconds` has the labels `cluster` and `method`. Make one middleware for
    each registry and pass it to several services. Calls that raise are measured, too.

    Raises ValueError if `registry` has this histogram already.
    """
    histogram = Histogram(
        "iris_service_handler_duration_seconds", "Time that a call of a handler takes, with the middleware inside this one.",
        ("cluster", "method"), registry=registry, buckets=buckets,
    )  # fmt: skip

    # A method reaches a handler only if the service has it, so callers cannot make series.
    series: dict[tuple[str, str], Histogram] = {}

    async def timing(request: Request, call_next: CallNext) -> Any:
        key = request.name, request.method
        observed = series.get(key)
        if observed is None:
            observed = series[key] = histogram.labels(*key)
        started_s = time.perf_counter()
        try:
            return await call_next(request)
        finally:
            observed.observe(time.perf_counter() - started_s)

    return timing
