"""Standard output: raw bytes, one JSON object per line, or tables for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from iris.core.message import Message
from iris.documents import as_bytes, as_document, text_of
from iris.wire.names import printable, visible
from iris.wire.texts import json_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def write(data: bytes) -> None:
    """Write bytes to standard output and flush, so that the reader of a pipe gets them at once.

    A pipe or a file gets the bytes as they are. On a terminal they are shown with control characters escaped, because
    others chose them.
    """
    if sys.stdout.isatty():
        data = visible(data.decode(errors="backslashreplace")).encode()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """Write a line of text."""
    write(text.encode(errors="surrogateescape") + b"\n")


def cell(value: object) -> Text:
    """Return a table cell for text from elsewhere: control characters are replaced, and markup is not interpreted."""
    from rich.text import Text

    return Text(printable(str(value)))


def write_json(document: object) -> None:
    """Write a document as one line of JSON."""
    write(json_bytes(document) + b"\n")


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
        payload, encoding = text_of(data)
        write_json({"payload": payload, "encoding": encoding})
    else:
        write(data + b"\n")


def console() -> Console:
    """Return a rich console on stdout, 160 columns wide if stdout is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)
