"""Requests, pushes, broadcasts, surveys and publications over HTTP.

Each function has read the headers of its request when it begins, so that what is wrong with them is said before
anything is sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

import iris
from iris.documents import as_document, as_error
from iris.pushing import push_routed
from iris.web.sending import send_parts, send_whole, while_connected
from relay.bridges.http.replies import JSON, NDJSON, header_pairs, problem_of, reply_of
from relay.bridges.http.requests import Asked, bad

if TYPE_CHECKING:
    from starlette.types import Send


async def request(client: iris.Client, cluster: str, asked: Asked, send: Send) -> None:
    """Send a request to one member, and answer with its reply. A client that disconnects ends the call."""
    timeout, headers = asked.timeout(), asked.message_headers()
    idempotent = asked.flag("Iris-Idempotent")
    call = client.request(
        cluster, await asked.payload(), timeout=timeout, headers=headers, idempotent=idempotent, type=iris.Message,
        member=asked.headers.get("iris-member"), method=asked.headers.get("iris-method"),
    )  # fmt: skip
    reply: iris.Message = await while_connected(asked.receive, call)
    kind, body = reply_of(reply, asked.headers.get("accept", "*/*"))
    await send_whole(send, 200, kind, body, header_pairs(reply))


async def push(client: iris.Client, cluster: str, asked: Asked, send: Send) -> None:
    """Send a push, and answer 202 when the relay has routed it."""
    timeout, headers = asked.timeout(), asked.message_headers()
    method = asked.headers.get("iris-method")
    await push_routed(client._runtime, cluster, await asked.payload(), timeout=timeout, headers=headers, method=method)  # fmt: skip
    await send_whole(send, 202, "", b"")


async def broadcast(client: iris.Client, cluster: str, asked: Asked, send: Send) -> None:
    """Broadcast, and answer 202 when the relay has routed it."""
    timeout, headers, scope = asked.timeout(), asked.message_headers(), _scope(asked)
    await client.broadcast(cluster, await asked.payload(), headers=headers, scope=scope)
    await client.flush(timeout=timeout)
    await send_whole(send, 202, "", b"")


async def publish(client: iris.Client, topic: str, asked: Asked, send: Send) -> None:
    """Publish, and answer 202 with the number of subscribers when the relay has routed it."""
    headers = asked.message_headers()
    count = await client.publish(topic, await asked.payload(), headers=headers, count=True)
    await send_whole(send, 202, JSON, msgspec.json.encode({"subscribers": count}))


async def survey(client: iris.Client, cluster: str, asked: Asked, send: Send) -> None:
    """Ask all members, and answer with a line of JSON for each answer as it arrives; the last line sums them up.

    Lines, and not events: a survey ends, and cannot be resumed.
    """
    timeout, headers, scope = asked.timeout(), asked.message_headers(), _scope(asked)
    answers = client.survey(
        cluster, await asked.payload(), timeout=timeout, headers=headers, scope=scope, method=asked.headers.get("iris-method"),
    )  # fmt: skip
    await send_parts(
        asked.scope, asked.receive, send, NDJSON, _lines(answers), stall_s=asked.config.stall_s
    )


async def _lines(answers: iris.Survey[Any]) -> AsyncGenerator[bytes, None]:
    """Iterate over the lines of a survey. Raises IrisError instead of the first one."""
    answered = False
    last: dict[str, Any] = {}
    try:
        # Closed at once if sending fails, so that members are told that the caller has left.
        async with aclosing(aiter(answers)) as found:
            async for message in found:
                answered = True
                yield _line(as_document(message))
    except iris.IrisError as error:
        if not answered:
            raise
        last["error"] = problem_of(error).document
    for member, failed in answers.errors.items():
        yield _line({"member": member, **as_error(failed)})
    done = {
        "answered": len(answers.answered),
        "failed": len(answers.errors),
        "missing": answers.missing,
    }
    yield _line({"done": {**done, **last}})


def _scope(asked: Asked) -> iris.Scope:
    text = asked.headers.get("iris-scope", "federation")
    if text == "site":
        return "site"
    if text == "federation":
        return "federation"
    raise bad(f"Iris-Scope: {text[:40]!r} is not site or federation")


def _line(document: Any) -> bytes:
    return msgspec.json.encode(document) + b"\n"
