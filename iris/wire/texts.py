"""Texts of this host, as paths and names, made so that others can decode them.

Linux lets a path, a host name and an argument hold any bytes. Python shows those that are not UTF-8 as lone surrogates
(PEP 383), which neither MessagePack nor JSON can hold: one of them would cost the whole frame or document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from iris.wire.names import printable

_encode: Final = msgspec.msgpack.Encoder().encode
_LONE: Final = re.compile(
    r"(\\\\|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})|\\ud[89a-f][0-9a-f]{2}"
)
"""In JSON: an escaped backslash or a pair of surrogates, which stay; or a lone surrogate."""


def encodable(text: str) -> str:
    """Return text with "?" in place of each lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def cleaned(document: Any, clean: Callable[[str], str] = printable) -> Any:
    """Return a document whose texts `clean` has changed: without unprintable characters unless it is given."""
    match document:
        case str():
            return clean(document)
        case list() | tuple():
            return [cleaned(each, clean) for each in document]
        case dict():
            return {cleaned(key, clean): cleaned(value, clean) for key, value in document.items()}
    return document


def sound_json(text: str) -> str:
    """Return JSON text that `json.dumps` made, which is ASCII, with "?" in place of each lone surrogate."""
    return _LONE.sub(lambda found: found[1] or "?", text) if "\\ud" in text else text


def json_bytes(document: object) -> bytes:
    """Return what msgspec can encode as JSON, with "?" in place of each lone surrogate of its texts."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return sound_json(json.dumps(msgspec.to_builtins(document))).encode()


def encode_cleaned(body: msgspec.Struct) -> bytes:
    """Return the MessagePack of a struct with "?" in place of each lone surrogate of its texts."""
    return _encode(cleaned(msgspec.to_builtins(body, builtin_types=(bytes,)), encodable))
