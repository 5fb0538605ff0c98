"""A stand-in for Google Cloud Storage: as much of its XML API as a bucket uses.

It was written after cloud.google.com/storage/docs/xml-api, because no emulator that can be installed has that API.

with CloudStorage(directory) as gcs:
    bucket = open_bucket(gcs.url)  # with gcs.environ
"""

from __future__ import annotations

import email.utils
import hashlib
import itertools
import json
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_RANGE: Final = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class CloudStorage:
    """The service, with one bucket. A context manager that ends it."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for the file of its credentials."""
        self.name = f"iris-{secrets.token_hex(4)}"
        self._server = _Server(self.name)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._account = directory / "account.json"
        account = {
            "gcs_base_url": f"http://127.0.0.1:{self._server.server_port}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        self._account.write_text(json.dumps(account))

    @property
    def url(self) -> str:
        """The bucket, for `--bucket`."""
        return f"gs://{self.name}/streams"

    @property
    def environ(self) -> dict[str, str]:
        """What a store needs to find the service."""
        return {"GOOGLE_SERVICE_ACCOUNT": str(self._account)}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, tuple[int, bytes]] = {}
        """Path -> (generation, content)."""
        self.generations = itertools.count(1)
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        match = self.headers.get("x-goog-if-generation-match")
        with self.server.lock:
            if match == "0" and self.path in self.server.objects:
                self._refuse(412, "PreconditionFailed")
                return
            assert match in (None, "0"), match
            generation = next(self.server.generations)
            self.server.objects[self.path] = generation, content
        self._answer(200, b"", generation, content)

    def do_GET(self) -> None:
        found = self.server.objects.get(self.path)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        generation, content = found
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, content, generation, content)
            return
        asked = _RANGE.fullmatch(wanted)
        assert asked is not None, wanted
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        if first > last:
            self._refuse(416, "InvalidRange")
            return
        part = content[first : last + 1]
        self._answer(
            206,
            part,
            generation,
            content,
            ("Content-Range", f"bytes {first}-{last}/{len(content)}"),
        )

    do_HEAD = do_GET  # noqa: N815 - the same

    def do_DELETE(self) -> None:
        with self.server.lock:
            found = self.server.objects.pop(self.path, None)
        if found is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(204, b"", *found)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(
        self, status: int, body: bytes, generation: int, content: bytes, *more: tuple[str, str]
    ) -> None:
        self._send(
            status,
            body,
            ("ETag", f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'),
            ("Last-Modified", email.utils.formatdate(usegmt=True)),
            ("x-goog-generation", str(generation)),
            *more,
        )

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
