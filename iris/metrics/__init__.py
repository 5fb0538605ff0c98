"""Metrics of a program's clients and services, for Prometheus. Needs the extra [metrics].

    async with iris.connect() as client, iris.metrics.serve(client, 9100):
        ...

They are read from counters that exist, when somebody asks. `handler_times` is middleware that measures each call.
"""

from __future__ import annotations

from iris.extras import install_line

try:
    import prometheus_client  # noqa: F401 - whether it is there
except ImportError as err:
    raise ImportError(f"iris.metrics needs prometheus-client: {install_line('metrics')}") from err

from iris.metrics.client import ClientCollector
from iris.metrics.serving import serve
from iris.metrics.times import handler_times

__all__ = ["ClientCollector", "handler_times", "serve"]
