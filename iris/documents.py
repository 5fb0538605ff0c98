"""Messages and errors as JSON documents, as the command prints them and the HTTP bridge sends them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from iris.core.message import MEMBER_HEADER, Message
from iris.errors import DecodeError, RemoteError

if TYPE_CHECKING:
    from iris.streams.records import StreamMessage

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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


def stream_document(message: StreamMessage) -> dict[str, Any]:
    """Return the JSON document of a stream's message."""
    document: dict[str, Any] = {
        "offset": message.offset,
        "time": time_text(message.stored_us),
        "sent": time_text(message.sent_us),
        **as_document(message),
    }
    if message.partition:
        document["partition"] = message.partition
    if message.tombstone:
        document["tombstone"] = True
    dead = message.dead
    if dead is not None:
        document["dead"] = {
            "offset": dead.offset, "consumer": dead.consumer, "deliveries": dead.deliveries, "reason": dead.reason,
        }  # fmt: skip
    return document


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


def time_text(time_us: int) -> str | None:
    """Return a time as ISO 8601 in UTC, which `parse_time` accepts; None if it is after the year 9999."""
    try:
        moment = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _readable(message: Message) -> tuple[Any, str]:
    if not message.packed:
        return text_of(message.payload)
    try:
        value = message.value
        msgspec.json.encode(value)
    except (DecodeError, TypeError, ValueError, RecursionError):
        return base64.b64encode(message.payload).decode(), "msgpack"
    return value, "object"


def text_of(data: bytes) -> tuple[str, str]:
    """Return (payload, encoding) of bytes, as in `as_document`."""
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"
