"""What a request over HTTP says: its name, headers, body and timeout. Everything that is wrong is a `Problem`."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import msgpack  # type: ignore[import-untyped]  # it ships no types
import msgspec

from iris.core.bundle import MAX_HEADERS_BYTES
from iris.web.bodies import read_body
from iris.web.guard import caller_of
from iris.web.problems import Problem
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.replies import JSON, MSGPACK
from relay.bridges.http.shares import Share

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

MESSAGE_HEADER: Final = "iris-header-"
"""Start of the HTTP headers that become headers of the message, under the rest of their name."""
TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""HTTP headers that become headers of the message under their own name (W3C Trace Context)."""
_TRUE: Final = {"true": True, "1": True, "false": False, "0": False}
_NUMBER: Final = re.compile(r"[0-9]{1,10}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")


class Room:
    """What the tokens of a bridge share: connections in use, calls under way, and bytes of bodies that are held.

    One token may have all but the last quarter of each.
    """

    def __init__(self, config: HttpConfig, connections: int) -> None:
        self.refused: Counter[str] = Counter()
        self.connections = Share(connections, "connections in use", self.refused)
        self.calls = Share(config.max_calls, "calls under way", self.refused)
        self._bytes = Share(config.calls_bytes, "bytes of bodies", self.refused)

    @property
    def bytes(self) -> int:
        """Bytes of bodies that are held."""
        return self._bytes.total

    def take(self, user: str, size: int) -> None:
        """Count bytes of a body. Raises Problem 503 if too many are held."""
        self._bytes.check(user, size)
        self._bytes.take(user, size)

    def give(self, user: str, size: int) -> None:
        """Count bytes no more."""
        if size:
            self._bytes.give(user, size)


class Asked:
    """One request: its headers by name, and its query by name."""

    def __init__(self, scope: Scope, receive: Receive, config: HttpConfig, room: Room) -> None:
        self.scope = scope
        self.receive = receive
        self.config = config
        self.user = caller_of(scope).name
        """Name of the token; empty for a request without one."""
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
        body = await read_body(
            self.scope, self.receive, limit_bytes=self.config.max_body_bytes, within_s=self.config.body_s, take=self._take
        )  # fmt: skip
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
        self._room.give(self.user, self._held_bytes)
        self._held_bytes = 0

    def _take(self, size: int) -> None:
        self._room.take(self.user, size)
        self._held_bytes += size


def bad(detail: str) -> Problem:
    """Return the problem of a request that cannot be understood."""
    return Problem(400, detail, kind="invalid", may_have_run=False)


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
