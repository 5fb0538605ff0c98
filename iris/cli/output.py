"""What goes to standard output: bytes as they came, or one JSON object a line; tables for people."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from iris.core.message import MEMBER_HEADER, Message
from iris.errors import DecodeError
from iris.wire.names import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def write(data: bytes) -> None:
    """Write bytes, at once: a reader of our pipe waits for them."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def cell(value: object) -> Text:
    """Return a table's cell that shows what others wrote as it is: no markup, no control characters."""
    from rich.text import Text

    return Text(printable(str(value)))


def write_json(document: object) -> None:
    """Write one line of JSON."""
    write(msgspec.json.encode(document) + b"\n")


def as_document(message: Message, **more: object) -> dict[str, Any]:
    """Return what `--json` shows of a message: name, payload, how the payload is written, headers.

    `encoding` is "utf-8" (payload is the text), "base64" (of bytes that are no text), "object" (the object that was sent)
    or "msgpack" (base64 of an object's MessagePack, when JSON cannot say it).
    """
    payload, encoding = _readable(message)
    document: dict[str, Any] = {"name": message.name, "payload": payload, "encoding": encoding}
    headers = dict(message.headers or {})
    member = headers.pop(MEMBER_HEADER, "")
    if member:
        document["member"] = member
    if headers:
        document["headers"] = headers
    return {**document, **more}


def as_bytes(message: Message) -> bytes:
    """Return a message as a person or a pipe wants it: bytes as they were sent, objects as JSON."""
    if not message.packed:
        return message.payload
    payload, encoding = _readable(message)
    return message.payload if encoding == "msgpack" else msgspec.json.encode(payload)


def show(message: Message, *, as_json: bool, end: bytes = b"\n") -> None:
    """Write one message; `end` follows it unless it is JSON, which always ends its line."""
    if as_json:
        write_json(as_document(message))
    else:
        write(as_bytes(message) + end)


def show_bytes(data: bytes, *, as_json: bool) -> None:
    """Write one message of a tunnel as a line."""
    if as_json:
        payload, encoding = _text(data)
        write_json({"payload": payload, "encoding": encoding})
    else:
        write(data + b"\n")


def line_end(data: bytes) -> bytes:
    """Return what a single answer ends with: nothing for a pipe, a line end for a person's terminal."""
    return b"\n" if sys.stdout.isatty() and not data.endswith(b"\n") else b""


def console() -> Console:
    """Return a rich console on stdout; what goes into a pipe is not folded at 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def _readable(message: Message) -> tuple[Any, str]:
    if not message.packed:
        return _text(message.payload)
    try:
        value = message.value
        msgspec.json.encode(value)
    except (DecodeError, TypeError, ValueError, RecursionError):
        return base64.b64encode(message.payload).decode(), "msgpack"
    return value, "object"


def _text(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"
