"""The bridge as an ASGI application: its paths, and what each of them needs of a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

import msgspec

import iris
from iris.web.guard import caller_of
from iris.web.problems import Problem
from iris.web.sending import EVENTS, Gone, Stalled, send_parts, send_whole
from iris.wire.names import check_address, check_filter, check_topic, printable
from relay.bridges.http import calls, openapi, streams
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.replies import BEGIN, JSON, problem_of
from relay.bridges.http.requests import Asked, Room, bad, path_parts
from relay.bridges.http.topics import STOPPED, Topics

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

OPEN_PATHS: Final = ("/openapi.json", "/live", "/ready")
"""Paths that need no token. They say nothing about clusters, topics and streams."""
READY_S: Final = 2.0
"""Time for the relay to answer, for /ready."""
_CALLS: Final[dict[str, Callable[[iris.Client, str, Asked, Send], Awaitable[None]]]] = {
    "request": calls.request,
    "push": calls.push,
    "broadcast": calls.broadcast,
    "survey": calls.survey,
}


class Application:
    """What `iris.web.guard.Guard` stands before."""

    def __init__(self, client: iris.Client, config: HttpConfig, connections: int) -> None:
        """`connections` is the largest number of connections, which `config.max_connections` may be over."""
        self.client = client
        self.config = config
        self.room = Room(config, connections)
        self.topics = Topics(client, config)
        self.streams = streams.StreamReaders(client, config)
        self.asked: Counter[str] = Counter()
        """Requests by verb."""
        self.failed: Counter[str] = Counter()
        """Requests that were answered with a problem, by its kind."""

    def end_streams(self) -> None:
        """End all event streams; their clients connect again."""
        self.topics.end()
        self.streams.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request that the guard admitted."""
        asked = Asked(scope, receive, self.config, self.room)
        try:
            with self.room.connections.place(asked.user):
                await self._route(asked, send)
        except Gone:
            self.failed["caller left"] += 1
        except Stalled:
            self.failed["stalled reader"] += 1
        except iris.IrisError as error:
            problem = problem_of(error)
            self.failed[problem.kind] += 1
            raise problem from error
        except Problem as problem:
            self.failed[problem.kind or "invalid"] += 1
            raise
        finally:
            asked.release()

    async def _route(self, asked: Asked, send: Send) -> None:
        method = asked.scope["method"]
        match path_parts(asked.scope["raw_path"]):
            case ["clusters", name, verb] if verb in _CALLS:
                _only(method, "POST")
                await self._call(verb, check_name(check_address, name), asked, send, _CALLS[verb])
            case ["topics", name] if method == "POST":
                await self._call("publish", check_name(check_topic, name), asked, send, calls.publish)  # fmt: skip
            case ["topics", name]:
                _only(method, "GET", "POST")
                await self._subscribe(check_name(check_filter, name), asked, send)
            case ["streams", name] if method == "POST":
                await self._call("append", check_name(check_address, name), asked, send, self._append)  # fmt: skip
            case ["streams", name]:
                _only(method, "GET", "POST")
                await self._read(check_name(check_address, name), asked, send)
            case ["openapi.json"]:
                _only(method, "GET")
                await send_whole(send, 200, JSON, openapi.document(self.config))
            case ["live"]:
                _only(method, "GET")
                await send_whole(send, 200, "text/plain; charset=utf-8", b"ok\n")
            case ["ready"]:
                _only(method, "GET")
                with self.room.calls.place(asked.user):
                    await self.client.flush(timeout=READY_S)
                await send_whole(send, 200, "text/plain; charset=utf-8", b"ok\n")
            case _:
                raise Problem(404, "there is no such path; GET /openapi.json describes all of them", kind="no-path", may_have_run=False)  # fmt: skip

    async def _call(
        self, verb: str, name: str, asked: Asked, send: Send, call: Callable[[iris.Client, str, Asked, Send], Awaitable[None]],
    ) -> None:  # fmt: skip
        if not caller_of(asked.scope).may(verb, name):
            raise _forbidden(verb, name)
        self.asked[verb] += 1
        with self.room.calls.place(asked.user):
            await call(self.client, name, asked, send)

    async def _append(self, client: iris.Client, name: str, asked: Asked, send: Send) -> None:
        stored = await streams.append(client, name, asked)
        await send_whole(send, 201, JSON, msgspec.json.encode(stored))

    async def _subscribe(self, pattern: str, asked: Asked, send: Send) -> None:
        if not caller_of(asked.scope).may_filter("subscribe", pattern):
            raise _forbidden("subscribe", pattern)
        self.asked["subscribe"] += 1
        async with self.topics.reading(pattern, asked.user) as reader:
            parts = self._parts(reader.next)
            await self._stream(asked, send, parts)

    async def _parts(
        self, next: Callable[[float], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes, None]:
        yield BEGIN  # before there is an event
        while part := await next(self.config.heartbeat_s):
            yield part
        yield STOPPED

    async def _read(self, name: str, asked: Asked, send: Send) -> None:
        if not caller_of(asked.scope).may("read", name):
            raise _forbidden("read", name)
        follow = asked.query().get("follow", "true")
        if follow not in ("true", "false"):
            raise bad(f"follow: {follow[:40]!r} is not true or false")
        begin = streams.start_of(asked)
        self.asked["read"] += 1
        parts = self.streams.events_of(name, begin, asked.user, follow=follow == "true")
        await self._stream(asked, send, parts)

    async def _stream(self, asked: Asked, send: Send, parts: AsyncGenerator[bytes, None]) -> None:
        await send_parts(
            asked.scope, asked.receive, send, EVENTS, parts, stall_s=self.config.stall_s
        )


def check_name(check: Callable[[str], object], name: str) -> str:
    """Return a name that `check` accepts. Raises InvalidName."""
    check(name)
    return name


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Problem(405, f"{method[:20]} is not allowed here", kind="method", headers={"allow": ", ".join(allowed)}, may_have_run=False)  # fmt: skip


def _forbidden(verb: str, name: str) -> Problem:
    return Problem(403, f"the token does not allow {verb} for {printable(name)!r}", kind="forbidden", title="Not allowed", may_have_run=False)  # fmt: skip
