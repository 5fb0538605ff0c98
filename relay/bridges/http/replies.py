"""Replies and errors of Iris as HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

import iris
from iris.core.faults import BAD_PAYLOAD, NO_METHOD
from iris.documents import as_error
from iris.web.problems import Problem

RAW: Final = "application/octet-stream"
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
MSGPACK: Final = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")
BEGIN: Final = b"retry: 1000\n: connected\n\n"
"""Start of an event stream: browsers connect again after a second."""
HEARTBEAT: Final = b": \n\n"
_AGAIN: Final = {"retry-after": "1"}
_FIELD: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")


def reply_of(message: iris.Message, accept: str) -> tuple[str, bytes]:
    """Return (media type, body) of a reply: an object as JSON or MessagePack, bytes as they are.

    `accept` chooses only among what the reply can be. A handler has run, so nothing is refused for its sake.
    """
    wanted = _accepted(accept)
    if message.packed:
        best = max((JSON, *MSGPACK), key=lambda name: _quality(wanted, name))
        if best == JSON:
            try:
                return JSON, msgspec.json.encode(message.value)
            except (iris.DecodeError, TypeError, ValueError, RecursionError):
                best = MSGPACK[0]  # such as maps with keys that JSON cannot have
        return best, message.payload
    if _quality(wanted, "text/plain") > _quality(wanted, RAW):
        try:
            message.payload.decode()
            return TEXT, message.payload
        except UnicodeDecodeError:
            pass  # it is sent as bytes
    return RAW, message.payload


def header_pairs(message: iris.Message) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message as HTTP headers, without those that HTTP cannot carry."""
    return [
        (b"iris-header-" + name.lower().encode(), value.encode())
        for name, value in (message.headers or {}).items()
        if _FIELD.fullmatch(name) and _VALUE.fullmatch(value)
    ]


def problem_of(error: iris.IrisError) -> Problem:
    """Return the problem that an error means for the caller over HTTP."""
    ran = bool(getattr(error, "may_have_run", False))
    text = str(error)
    match error:
        case iris.RemoteError():
            return _of_member(error)
        case iris.NoMembers():
            return Problem(
                503, text, kind="no-members", title="No members", headers=_AGAIN, may_have_run=ran
            )
        case iris.Overloaded():
            return Problem(
                503, text, kind="overloaded", title="Overloaded", headers=_AGAIN, may_have_run=ran
            )
        case iris.RequestTimeout():
            return Problem(504, text, kind="timeout", title="Timeout", may_have_run=ran)
        case iris.ConnectionLost():
            if not ran:  # nothing was sent, because there is no relay
                return Problem(
                    503, text, kind="no-relay", title="No relay", headers=_AGAIN, may_have_run=False
                )
            return Problem(
                502, text, kind="connection-lost", title="Connection lost", may_have_run=True
            )
        case iris.RelayError():
            return Problem(502, text, kind="relay", title="Refused by a relay", may_have_run=ran)
        case iris.NoStream():
            return Problem(404, text, kind="no-stream", title="No such stream", may_have_run=False)
        case iris.OffsetConflict():
            return Problem(
                412,
                text,
                kind="offset-conflict",
                title="Another offset",
                end=error.end,
                may_have_run=False,
            )
        case iris.AmbiguousStream():
            return Problem(
                409, text, kind="ambiguous-stream", title="Several streams", may_have_run=False
            )
        case iris.StreamUnavailable():
            if isinstance(error.__cause__, iris.NoStream) and not ran:
                return Problem(404, text, kind="no-stream", title="No store", may_have_run=False)
            status = 504 if ran else 503
            return Problem(
                status,
                text,
                kind="store-unavailable",
                title="Store unavailable",
                headers={} if ran else _AGAIN,
                may_have_run=ran,
            )
        case iris.StreamDamaged():
            return Problem(
                500, text, kind="stream-damaged", title="Stream damaged", may_have_run=ran
            )
        case iris.StreamError():
            return Problem(
                409, text, kind="stream", title="Refused by the stream", may_have_run=ran
            )
        case iris.MessageTooLarge():
            return Problem(413, text, kind="too-large", may_have_run=False)
        case iris.KeyringError():
            return Problem(
                403, text, kind="no-key", title="The bridge has no key", may_have_run=False
            )
        case iris.InvalidName() | iris.EncodeError() | iris.ConfigError():
            return Problem(400, text, kind="invalid", may_have_run=False)
        case iris.RelayUnavailable() | iris.Closed():
            return Problem(
                503, text, kind="no-relay", title="No relay", headers=_AGAIN, may_have_run=False
            )
    return Problem(502, text, kind="failed", may_have_run=True)


def _of_member(error: iris.RemoteError) -> Problem:
    found = as_error(error)
    more = {
        name: found[name] for name in ("code", "details", "may_have_run") if found[name] is not None
    }
    if error.code == NO_METHOD:
        return Problem(404, error.detail, kind="no-method", title="No such method", **more)
    if error.code == BAD_PAYLOAD or (
        error.code is None and not error.may_have_run
    ):  # earlier members say no code
        return Problem(
            422, error.detail, kind="not-accepted", title="Not accepted by the member", **more
        )
    if error.code is not None:
        return Problem(422, error.detail, kind="refused", title="Refused by the member", **more)
    return Problem(502, error.detail, kind="handler-failed", title="The handler failed", **more)


def _accepted(accept: str) -> list[tuple[str, float]]:
    found = []
    for part in accept.split(",")[:32]:
        name, *settings = (each.strip().lower() for each in part.split(";"))
        quality = 1.0
        for setting in settings:
            if setting.startswith("q="):
                try:
                    quality = min(max(float(setting[2:]), 0.0), 1.0)
                except ValueError:
                    quality = 0.0
        if name:
            found.append((name, quality))
    return found


def _quality(accepted: Iterable[tuple[str, float]], name: str) -> float:
    """Return how much a media type is wanted (RFC 9110, 12.5.1): the most specific range counts."""
    best, specific = 0.0, -1
    for range_, quality in accepted:
        if range_ == name:
            rank = 2
        elif range_ == name.partition("/")[0] + "/*":
            rank = 1
        elif range_ == "*/*":
            rank = 0
        else:
            continue
        if rank > specific:
            best, specific = quality, rank
    return best
