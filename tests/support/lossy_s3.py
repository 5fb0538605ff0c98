"""Amazon S3 as a service of this machine, behind a proxy that harms requests on purpose.

with Service() as service:
    with Group(directory, service.url, **service.environ) as group: ...
    service.faults = harm(4, "lost", "late")
"""

from __future__ import annotations

import http.client
import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Literal, Self

from moto.server import ThreadedMotoServer

Fault = Literal["", "lost", "cut", "late", "slow", "refused", "denied"]
"""lost: carried out, and not answered; cut: not carried out, and not answered; late: not answered, and carried out
afterwards; slow: answered late; refused: 409, not carried out, as S3 does when two requests meet;
denied: 403, as with credentials that are not valid any more."""
LATE_S: Final = 0.3
TIMEOUT_S: Final = 30


def never(method: str, path: str) -> Fault:
    """Harm nothing."""
    return ""


def harm(every: int, *faults: Fault) -> Callable[[str, str], Fault]:
    """Return a function that harms each PUT whose number can be divided by `every`, with one fault after another."""
    puts, turns = itertools.count(1), itertools.cycle(faults)

    def choose(method: str, path: str) -> Fault:
        return next(turns) if method == "PUT" and not next(puts) % every else ""

    return choose


class Service:
    """The service and its proxy. A context manager that ends both."""

    def __init__(self, *, strip: str = "") -> None:
        """`strip`: a request header that the service ignores."""
        self.faults: Callable[[str, str], Fault] = never
        self.done: Counter[str] = Counter()
        """How often each fault was done."""
        self.strip = strip.lower()
        self.name = f"iris-{secrets.token_hex(4)}"  # all services of a process share their buckets
        self._lock = threading.Lock()
        self._late: list[threading.Thread] = []
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._proxy = _Proxy(self)
        self._thread = threading.Thread(target=self._proxy.serve_forever, args=(0.05,), daemon=True)
        self._at = ("127.0.0.1", 0)

    @property
    def url(self) -> str:
        """The bucket, for `--bucket`."""
        return f"s3://{self.name}/streams"

    @property
    def environ(self) -> dict[str, str]:
        """What a store needs to find the service."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def __enter__(self) -> Self:
        self._moto.start()
        self._at = self._moto.get_host_and_port()
        self._thread.start()
        status, _, _ = self.forward("PUT", f"/{self.name}", {}, b"")
        assert status == http.client.OK
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._proxy.shutdown()
        self._proxy.server_close()
        self._thread.join()
        for late in self._late:
            late.join()
        self._moto.stop()

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send a request to the service; return its status, headers and body."""
        with self._lock:  # the stand-in looks and writes in two steps
            link = http.client.HTTPConnection(*self._at, timeout=TIMEOUT_S)
            try:
                link.request(method, path, body, headers)
                answer = link.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            finally:
                link.close()

    def later(self, *request: Any) -> None:
        """Send a request when its sender has given up."""

        def run() -> None:
            time.sleep(LATE_S)  # what is slow here is the network
            self.forward(*request)

        thread = threading.Thread(target=run)
        self._late.append(thread)
        thread.start()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, service: Service) -> None:
        self.service = service
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A store that was killed does not read its answers."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _do(self) -> None:
        service = self.server.service
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the store was killed meanwhile
            self.close_connection = True
            return
        headers = {key: value for key, value in self.headers.items() if key.lower() not in {service.strip, "connection"}}  # fmt: skip
        request = self.command, self.path, headers, body
        fault = service.faults(self.command, self.path)
        service.done[fault] += 1
        if fault in ("cut", "late"):
            if fault == "late":
                service.later(*request)
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(LATE_S)  # what is slow here is the network
        if fault == "refused":
            status, answered, content = 409, [], b""
        elif fault == "denied":
            status, answered, content = 403, [], b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        else:
            status, answered, content = service.forward(*request)
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response_only(status)
        size = str(len(content))
        for key, value in answered:
            if key.lower() == "content-length":
                size = value  # of an answer to HEAD: that of the object
            elif key.lower() not in {"connection", "transfer-encoding"}:
                self.send_header(key, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _do  # noqa: N815 - as the base class looks for them
