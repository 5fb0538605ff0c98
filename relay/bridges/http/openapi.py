"""The bridge in OpenAPI 3.1, as it serves it at /openapi.json. A test has schemathesis hold the bridge to it."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from iris.wire.names import MAX_METHOD_BYTES
from relay.bridges.http.config import HttpConfig

_PROBLEM: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "examples": ["/problems/no-members"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What was wrong, and what to do next."},
        "may_have_run": {"type": "boolean", "description": "False only if nothing has run or was stored, so that sending it again is safe."},
        "code": {"type": "string", "description": "The code with which the handler refused."},
        "details": {"description": "The details with which the handler refused."},
        "end": {"type": "integer", "description": "The offset that the next message of the stream gets."},
    },
}  # fmt: skip
_MESSAGE: Final = {
    "type": "object",
    "required": ["name", "payload", "encoding"],
    "properties": {
        "name": {"type": "string", "description": "The topic, cluster or stream."},
        "payload": {"description": "As `encoding` says."},
        "encoding": {"enum": ["utf-8", "base64", "object", "msgpack"], "description": "utf-8: text; base64: bytes that are not UTF-8; object: an object; msgpack: base64 of an object that JSON cannot represent."},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        "member": {"type": "string"},
    },
}  # fmt: skip
_BODY: Final = {
    "description": "JSON and MessagePack are sent as objects, anything else as the bytes that it is.",
    "content": {
        "application/json": {"schema": {}},
        "application/octet-stream": {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}},
        "text/plain": {"schema": {"type": "string"}},
    },
}  # fmt: skip
_STATUS: Final = {
    400: "The request cannot be understood: a name, a header, the query or the body.",
    401: "There is no known token.",
    403: "The token does not allow it, or the bridge has no key for the name.",
    404: "There is no such stream, or the member has no such method.",
    408: "The body did not arrive in time.",
    409: "The stream refused it.",
    412: "The message would have got another offset.",
    413: "The body or the message is too large.",
    421: "The Host header does not name this service.",
    422: "The member refused the message.",
    429: "Too many wrong tokens came from this address.",
    431: "The headers of the message are too large.",
    500: "The stream is damaged.",
    502: "The handler failed, or the connection to it was lost.",
    503: "No members, all at capacity, no relay, or the bridge is full. Nothing has run.",
    504: "There was no answer in time. It may have run.",
}
_EVERY: Final = (400, 401, 403, 421, 429, 502, 503)
_CALL: Final = (404, 408, 413, 422, 431, 504)


@cache
def document(config: HttpConfig) -> bytes:
    """Return the description as JSON text."""
    timeout = _header("Iris-Timeout", f"Seconds to wait, at most {config.max_timeout_s:g}.", {"type": "number", "minimum": 0.001, "maximum": config.max_timeout_s, "default": config.default_timeout_s})  # fmt: skip
    method = _header("Iris-Method", "The handler to call.", {"type": "string", "pattern": f"^[A-Za-z][A-Za-z0-9_.-]{{0,{MAX_METHOD_BYTES - 1}}}$"})  # fmt: skip
    member = _header("Iris-Member", "The one member to send it to, by its id.", {"type": "string", "pattern": "^[0-9a-f]{32}\\.[1-9][0-9]{0,17}$"})  # fmt: skip
    again = _header("Iris-Idempotent", "Whether the request may run twice, so that it is sent again if a member is lost.", {"type": "boolean"})  # fmt: skip
    scope = _header("Iris-Scope", "Reach members of this site, or of all sites.", {"enum": ["site", "federation"]})  # fmt: skip
    cluster, topic, filter, stream = (
        _path("name", f"The {what}.", schema)
        for what, schema in (("cluster", _NAME), ("topic", _NAME), ("topic filter", _FILTER), ("stream", _NAME))
    )  # fmt: skip
    accepted = {"202": {"description": "The relay has routed it."}}
    paths: dict[str, Any] = {
        "/clusters/{name}/request": {"post": _operation("request", "Send a request to one member.", [cluster, timeout, method, member, again], {"200": _answer("The reply: an object as JSON or MessagePack, as Accept says; anything else as it is.", {"application/json": {}, "application/msgpack": {}, "application/octet-stream": {}, "text/plain": {}})}, _CALL)},
        "/clusters/{name}/push": {"post": _operation("push", "Send a message to one member, without a reply.", [cluster, timeout, method], accepted, _CALL)},
        "/clusters/{name}/broadcast": {"post": _operation("broadcast", "Send a message to every member.", [cluster, timeout, scope], accepted, _CALL)},
        "/clusters/{name}/survey": {"post": _operation("survey", "Ask every member. Answers arrive as lines of JSON; the last one has the member `done`.", [cluster, timeout, method, scope], {"200": _answer("Lines of JSON.", {"application/x-ndjson": {}})}, _CALL)},
        "/topics/{name}": {
            "post": _operation("publish", "Publish to all subscribers of a topic.", [topic], {"202": _answer("The relay has routed it.", {"application/json": {"type": "object", "required": ["subscribers"], "properties": {"subscribers": {"type": ["integer", "null"]}}}})}, (408, 413, 431, 504)),
            "get": _events("subscribe", "Receive what is published to topics that match a filter.", [filter], "Events: a message has no event name; `loss` has the count of messages that did not arrive."),
        },
        "/streams/{name}": {
            "post": _operation(
                "append", "Append a message; answers when it is on disk.",
                [stream, timeout, _header("Idempotency-Key", "Id of the message: within the stream's dedup_window it is stored once.", {"type": "string", "minLength": 1, "maxLength": 255}),
                 _header("Iris-Expect", "The offset that the message must get.", {"type": "integer", "minimum": 0, "maximum": 10**17}),
                 _header("Iris-Key", "Key of the message, for compaction.", {"type": "string", "minLength": 1}), _header("Iris-Tombstone", "Whether the message deletes its key.", {"type": "boolean"})],
                {"201": _answer("Stored.", {"application/json": {"type": "object", "required": ["offset"], "properties": {"offset": {"type": "integer"}, "partition": {"type": "integer"}}}})}, (404, 408, 409, 412, 413, 431, 500, 504),
            ),
            "get": _events(
                "read", "Receive the messages of a stream from an offset on.",
                [stream, _header("Last-Event-ID", "Start after this offset.", {"type": "integer", "minimum": 0, "maximum": 10**17}), _query("start", "Where to start: first, last, new, an offset or an ISO time.", {"type": "string", "pattern": "^(first|last|new|[0-9]{1,18}|[0-9]{4}-.+)$"}),
                 _query("follow", "Whether to continue with new messages.", {"type": "boolean", "default": True})],
                "Events: a message has its offset as id and no event name; `gap`, `error` and `end` say what their name says.", (404, 409, 500, 504),
            ),
        },
        "/live": {"get": _health("Whether the bridge runs.")},
        "/ready": {"get": _health("Whether its relay answers.")},
    }  # fmt: skip
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Iris", "version": "1",
                "description": "The HTTP bridge of Iris. Headers of a message are HTTP headers that begin with Iris-Header-.",
            },
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                "schemas": {"Problem": _PROBLEM, "Message": _MESSAGE},
            },
        }
    )  # fmt: skip


_TOKEN: Final = r"[^\s.*>\x00-\x1f\x7f-\x9f]+"
_NAME: Final = {"type": "string", "pattern": rf"^{_TOKEN}(\.{_TOKEN})*$", "maxLength": 255}
_FILTER: Final = {"type": "string", "pattern": rf"^(>|({_TOKEN}|\*)(\.({_TOKEN}|\*))*(\.>)?)$", "maxLength": 255}  # fmt: skip


def _path(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": text, "schema": schema}


def _header(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": schema}


def _query(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _answer(text: str, kinds: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {kind: {"schema": schema} for kind, schema in kinds.items()}}  # fmt: skip


def _problems(statuses: tuple[int, ...]) -> dict[str, Any]:
    reference = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {str(status): {"description": _STATUS[status], "content": reference} for status in sorted({*_EVERY, *statuses})}  # fmt: skip


def _operation(
    verb: str,
    text: str,
    parameters: list[dict[str, Any]],
    answers: dict[str, Any],
    statuses: tuple[int, ...],
) -> dict[str, Any]:
    return {
        "operationId": verb, "summary": text, "parameters": parameters, "requestBody": _BODY,
        "responses": {**answers, **_problems(statuses)},
    }  # fmt: skip


def _events(
    verb: str,
    text: str,
    parameters: list[dict[str, Any]],
    events: str,
    statuses: tuple[int, ...] = (),
) -> dict[str, Any]:
    answer = {
        "200": _answer(
            events,
            {
                "text/event-stream": {
                    "type": "object",
                    "properties": {
                        "event": {"type": "string"},
                        "id": {"type": "string"},
                        "data": {"type": "string"},
                    },
                }
            },
        )
    }
    return {"operationId": verb, "summary": text, "parameters": parameters, "responses": {**answer, **_problems(statuses)}}  # fmt: skip


def _health(text: str) -> dict[str, Any]:
    answers = {"200": _answer("Yes.", {"text/plain": {"type": "string"}}), **_problems((504,))}
    return {"summary": text, "security": [], "responses": answers}
