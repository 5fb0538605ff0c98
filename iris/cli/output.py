"""Standard output: raw bytes, one JSON object per line, or tables for people."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from iris.core.message import MEMBER_HEADER, Message
from iris.errors import DecodeError, RemoteError
from iris.wire.names import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def write(data: bytes) -> None:
    """Write bytes to standard output and flush, so that the reader of a pipe gets them at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def cell(value: object) -> Text:
    """Return a table cell for text from elsewhere: control characters are replaced, and markup is not interpreted."""
    from rich.text import Text

    return Text(printable(str(value)))


def write_json(document: object) -> None:
    """Write a document as one line of JSON."""
    write(msgspec.json.encode(document) + b"\n")


def as_document(message: Message, **more: object) -> dict[str, Any]:
    """Return the JSON document of a message: name, payload, encoding of the payload, member, headers, and `more`.

    | encoding | payload is |
    |---|---|
    | "utf-8" | the text that was sent |
    | "base64" | base64 of bytes that are not UTF-8 |
    | "object" | the object that was sent |
    | "msgpack" | base64 of an object's MessagePack that JSON cannot represent |
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


def as_error(error: RemoteError) -> dict[str, Any]:
    """Return the JSON document of an error of a member: text, code, details, and whether it may have run."""
    details: Any = error.details
    try:
        msgspec.json.encode(details)
    except (TypeError, ValueError, RecursionError):  # such as maps with keys that JSON cannot have
        details = repr(details)
    return {
        "error": error.detail,
        "code": error.code,
        "details": details,
        "may_have_run": error.may_have_run,
    }


def as_bytes(message: Message) -> bytes:
    """Return the payload as it was sent, or as JSON if it is an object."""
    if not message.packed:
        return message.payload
    payload, encoding = _readable(message)
    return message.payload if encoding == "msgpack" else msgspec.json.encode(payload)


def show(message: Message, *, as_json: bool, end: bytes | None = b"\n") -> None:
    """Write one message and then `end`; with `as_json`, a line of JSON.

    `end=None` stands for a newline unless the message ends with one.
    """
    if as_json:
        write_json(as_document(message))
        return
    data = as_bytes(message)
    if end is None:
        end = b"" if data.endswith(b"\n") else b"\n"
    write(data + end)


def show_bytes(data: bytes, *, as_json: bool) -> None:
    """Write one tunnel message as a line."""
    if as_json:
        payload, encoding = _text(data)
        write_json({"payload": payload, "encoding": encoding})
    else:
        write(data + b"\n")


def console() -> Console:
    """Return a rich console on stdout, 160 columns wide if stdout is not a terminal."""
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
