"""What a request over HTTP says: its name, headers, body and timeout. Everything that is wrong is a `Problem`."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import msgpack  # type: ignore[import-untyped]  # it ships no types
import msgspec

from iris.core.bundle import MAX_HEADERS_BYTES
from iris.web.problems import Problem
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.replies import JSON, MSGPACK

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

MESSAGE_HEADER: Final = "iris-header-"
"""Start of the HTTP headers that become headers of the message, under the rest of their name."""
TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""HTTP headers that become headers of the message under their own name (W3C Trace Context)."""
_TRUE: Final = {"true": True, "1": True, "false": False, "0": False}
_NUMBER: Final = re.compile(r"[0-9]{1,10}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")


class Room:
    """How many calls are under way, and how many bytes of bodies are held for them."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self.calls = 0
        self.bytes = 0
        self.refused: Counter[str] = Counter()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call while the block runs. Raises Problem 503 if there are too many."""
        if self.calls >= self._config.max_calls:
            raise self._full(f"{self.calls} calls are under way, the limit of this bridge")
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def take(self, size: int) -> None:
        """Count bytes of a body. Raises Problem 503 if too many are held."""
        if self.bytes + size > self._config.calls_bytes:
            raise self._full("the bridge holds as many bytes of bodies as it may")
        self.bytes += size

    def _full(self, detail: str) -> Problem:
        self.refused["full"] += 1
        return full(detail)


class Asked:
    """One request: its headers by name, and its query by name."""

    def __init__(self, scope: Scope, receive: Receive, config: HttpConfig, room: Room) -> None:
        self.scope = scope
        self.receive = receive
        self.config = config
        self._room = room
        self._held_bytes = 0
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def query(self) -> dict[str, str]:
        """Return the parameters of the query. Raises Problem."""
        try:
            pairs = parse_qsl(self.scope["query_string"].decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=16)  # fmt: skip
        except ValueError:
            raise bad("the query cannot be read; write it as NAME=VALUE&NAME=VALUE") from None
        return dict(pairs)

    def timeout(self) -> float:
        """Return the timeout in seconds: Iris-Timeout, or the default. Raises Problem."""
        text = self.headers.get("iris-timeout")
        if text is None:
            return self.config.default_timeout_s
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not 0.001 <= value <= self.config.max_timeout_s:
            raise bad(f"Iris-Timeout: {text[:40]!r} is not a number of seconds from 0.001 to {self.config.max_timeout_s:g}")  # fmt: skip
        return value

    def flag(self, name: str) -> bool:
        """Return a header that is true or false; False without it. Raises Problem."""
        text = self.headers.get(name.lower(), "false")
        if text.lower() not in _TRUE:
            raise bad(f"{name}: {text[:40]!r} is not true or false")
        return _TRUE[text.lower()]

    def number(self, name: str) -> int | None:
        """Return a header that is a whole number; None without it. Raises Problem."""
        text = self.headers.get(name.lower())
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise bad(f"{name}: {text[:40]!r} is not a whole number")
        return int(text)

    def message_headers(self) -> dict[str, str] | None:
        """Return the headers of the message, from those that begin with Iris-Header-. Raises Problem."""
        found = {
            name.removeprefix(MESSAGE_HEADER): _utf8(name, value)
            for name, value in self.headers.items()
            if name.startswith(MESSAGE_HEADER) or name in TRACE_HEADERS
        }
        if found.pop("", None) is not None:
            raise bad("Iris-Header-: write the name of the header after it, such as Iris-Header-Order: 7")  # fmt: skip
        if (
            sum(len(name) + len(value.encode()) for name, value in found.items())
            > MAX_HEADERS_BYTES
        ):
            raise Problem(431, f"the headers of the message are over the limit of {MAX_HEADERS_BYTES} bytes", kind="too-large", may_have_run=False)  # fmt: skip
        return found or None

    async def payload(self) -> Any:
        """Return the payload that the body stands for: an object if it is JSON or MessagePack, else its bytes.

        Raises Problem: too large, too slow, or not what its Content-Type says.
        """
        body = await self._body()
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):  # fmt: skip
            try:
                return msgspec.json.decode(body)
            except (ValueError, RecursionError) as error:
                raise bad(f"the body is not JSON: {error}; send another Content-Type to send it as it is") from error  # fmt: skip
        if kind in MSGPACK:
            try:
                msgpack.unpackb(body, timestamp=3, strict_map_key=False)
            except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
                raise bad(f"the body is not MessagePack: {error}") from error
            return msgspec.Raw(body)
        return body

    def release(self) -> None:
        """Give back the room of the body."""
        self._room.bytes -= self._held_bytes
        self._held_bytes = 0

    async def _body(self) -> bytes:
        limit = self.config.max_body_bytes
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.config.body_s):
                while True:
                    event = await self.receive()
                    if event["type"] == "http.disconnect":
                        raise Problem(400, "the body ended early", kind="body", may_have_run=False)
                    part = event.get("body", b"")
                    self._room.take(len(part))
                    self._held_bytes += len(part)
                    if self._held_bytes > limit:
                        raise _too_large(limit)
                    parts.append(part)
                    if not event.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {self.config.body_s:g} s", kind="body", headers={"connection": "close"}, may_have_run=False) from None  # fmt: skip


def bad(detail: str) -> Problem:
    """Return the problem of a request that cannot be understood."""
    return Problem(400, detail, kind="invalid", may_have_run=False)


def full(detail: str) -> Problem:
    """Return the problem of a request for which the bridge has no room now."""
    return Problem(503, detail, kind="full", headers={"retry-after": "1"}, may_have_run=False)


def path_parts(raw_path: bytes) -> list[str]:
    """Return the parts of a path, decoded after it was split: "%2F" is a character of a name. Raises Problem."""
    try:
        return [unquote_to_bytes(part).decode() for part in raw_path.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise bad("the path is not UTF-8; write other bytes of a name as %XX of their UTF-8") from None  # fmt: skip


def _utf8(name: str, value: str) -> str:
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise bad(f"{name}: the value is not UTF-8") from None


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is over the limit of {limit} bytes", kind="too-large", may_have_run=False)  # fmt: skip
