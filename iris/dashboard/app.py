"""The addresses of the dashboard, and who may use which.

    GET  /  /dashboard.css  /dashboard.js  /icon.svg   the page; it holds no secret, so it needs no token
    GET  /events                                       what it draws, as server-sent events; `view`
    GET  /dead-letters?stream=…&consumer=…             dead letters, opened with the keys of this process; `peek`
    POST /actions                                      pause, resume and redrive; `manage`

Each token may do what its verbs allow, and `peek` and `manage` name streams.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from iris.dashboard.actions import Actions, Order
from iris.dashboard.feed import Feed
from iris.web.bodies import BODY_S, read_body
from iris.web.guard import Guard, caller_of
from iris.web.problems import Problem
from iris.web.sending import EVENTS, Gone, Stalled, send_parts
from iris.web.tokens import Tokens
from iris.wire.names import printable
from iris.wire.texts import json_bytes

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

VERBS: Final = ("view", "peek", "manage")
"""What a token may allow."""
EVERYTHING: Final = {verb: [">"] for verb in VERBS}
MAX_PAGES: Final = 64
"""Pages that are open at a time."""
STALLED_S: Final = 15.0
"""Time for a page to take an event. The stream of one that does not is ended; it asks for another."""
MAX_BODY_BYTES: Final = 16 << 10
RETRY_S: Final = 10
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
}
PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Dashboard:
    """The application. `guard` is what a server serves."""

    def __init__(
        self, feed: Feed, tokens: Tokens, actions: Actions | None, *, hosts: Collection[str] = (), hello: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Without `actions` pages can only look. `hello` is sent to each page first."""
        self._feed = feed
        self._actions = actions
        self._hello = hello
        self._pages = 0
        static = files("iris.dashboard") / "static"
        self._files = {
            path: ((static / name).read_bytes(), kind) for path, (name, kind) in PAGE.items()
        }
        routes = [*(Route(path, self._file) for path in PAGE), Route("/events", self._events)]
        if actions is not None:
            routes.append(Route("/actions", self._act, methods=["POST"]))
            routes.append(Route("/dead-letters", self._peek))
        self.guard = Guard(
            Router(routes, redirect_slashes=False), tokens, hosts=hosts, open_paths=tuple(PAGE), headers=HEADERS
        )  # fmt: skip

    async def _file(self, request: Request) -> Response:
        content, kind = self._files[request.url.path]
        return Response(content, media_type=kind)

    async def _events(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        if not caller.may_filter("view", ">"):
            raise Problem(
                403, f'the token {caller.name!r} does not allow this; it needs allow.view = [">"]'
            )
        if self._pages >= MAX_PAGES:
            raise Problem(
                503, f"{MAX_PAGES} pages are open; close one", headers={"retry-after": str(RETRY_S)}
            )
        self._pages += 1
        may = caller.verbs if self._actions is not None else []
        return _EventStream(
            self._feed.events({**self._hello, "user": caller.name, "may": may}), self._left
        )

    def _left(self) -> None:
        self._pages -= 1

    async def _act(self, request: Request) -> Response:
        assert self._actions is not None
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise Problem(
                415, "send the action as JSON, with the header Content-Type: application/json"
            )
        body = await read_body(
            request.scope, request.receive, limit_bytes=MAX_BODY_BYTES, within_s=BODY_S
        )
        try:
            order = msgspec.json.decode(body, type=Order)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(400, f"the action cannot be read: {printable(str(error))}") from error
        caller = _allowed(request, "manage", order.stream)
        return _json({"done": await self._actions.act(order, caller)})

    async def _peek(self, request: Request) -> Response:
        assert self._actions is not None
        asked = request.query_params
        stream = asked.get("stream", "")
        _allowed(request, "peek", stream)
        found = await self._actions.peek(stream, asked.get("uuid", ""), asked.get("consumer", ""))
        return _json({"letters": found})


def _allowed(request: Request, verb: str, stream: str) -> str:
    """Return the name of the caller, if its token allows `verb` for a stream. Raises Problem."""
    caller = caller_of(request.scope)
    if not caller.may(verb, stream):
        raise Problem(403, f"the token {caller.name!r} does not allow this; it needs {printable(stream)!r} in allow.{verb}")  # fmt: skip
    return caller.name


def _json(document: dict[str, Any]) -> Response:
    return Response(json_bytes(document), media_type="application/json")


class _EventStream(Response):
    """Sends events until they end, the page leaves, or takes nothing for `STALLED_S`."""

    def __init__(self, events: AsyncGenerator[bytes], ended: Callable[[], None]) -> None:
        """`ended` is called when it is over."""
        super().__init__()
        self._events = events
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_parts(scope, receive, send, EVENTS, self._events, stall_s=STALLED_S)
        except (Gone, Stalled):
            pass  # a page that is still there asks again
        finally:
            self._ended()
