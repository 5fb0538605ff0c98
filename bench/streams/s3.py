"""Amazon S3 as a process of this machine (moto), which counts what it is asked: `python -m streams.s3 PORT`.

It keeps objects in memory. GET /-/counts returns {"puts": number, "sizes": [bytes of each object of a journal]}.
"""

from __future__ import annotations

import http.client
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

NAME: Final = "iris-bench"
COUNTS: Final = "/-/counts"


def environ(port: int) -> dict[str, str]:
    """Return what a client of the service needs."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
    }


def counts(port: int) -> dict[str, Any]:
    """Return what the service counted since its start."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    link.request("GET", COUNTS)
    found: dict[str, Any] = json.loads(link.getresponse().read())
    link.close()
    return found


class Counting:
    """A WSGI application that counts the PUTs of another one."""

    def __init__(self, inner: Callable[..., Iterable[bytes]]) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._puts = 0
        self._sizes: list[int] = []

    def __call__(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if path == COUNTS:
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"puts": self._puts, "sizes": self._sizes}).encode()]
        with self._lock:  # the service looks and writes in two steps
            if request["REQUEST_METHOD"] == "PUT":
                self._puts += 1
                if "/journal/" in path:
                    self._sizes.append(int(request.get("CONTENT_LENGTH") or 0))
            return self._inner(request, start)


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    port = int(sys.argv[1])
    served = Counting(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", port, served, threaded=True)
    made = threading.Thread(target=_make_bucket, args=(port,))
    made.start()
    server.serve_forever()


def _make_bucket(port: int) -> None:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    link.request("PUT", f"/{NAME}")
    link.getresponse().read()
    link.close()


if __name__ == "__main__":
    main()
