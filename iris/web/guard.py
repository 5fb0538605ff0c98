"""Stands before an application of HTTP: decides which requests it sees, and completes its answers.

In this order:

1. `Host` names this service, else 421. A page whose name was made to lead to this host (DNS rebinding) names itself.
2. `Origin`, which browsers send, is the service's own or listed, else 403. Preflights of listed ones are answered.
3. The token is known, else 401; 429 if the address presented too many wrong ones.

What each caller may do is the application's business: it has the `Caller`.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from iris.logs import Repeats, error_text, logger
from iris.web.attempts import Attempts
from iris.web.problems import MEDIA_TYPE, Problem
from iris.web.tokens import Caller, Tokens

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logger(__name__)

HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of each answer that does not have them."""
CALLER: Final = "iris.caller"
"""Key of the scope under which an application finds its `Caller`."""
CUT: Final = "iris.cut"
"""Key of the state of a request: a function that ends its connection at once."""
_PREFLIGHT_S: Final = 600
_NONE: Final = Caller("", {})


def caller_of(scope: Scope) -> Caller:
    """Return who sent the request. On an open path without a token that is one who may do nothing."""
    caller = scope.get(CALLER, _NONE)
    assert isinstance(caller, Caller)
    return caller


def cut(scope: Scope) -> None:
    """End the connection of a request at once. To close it would wait for a client that takes nothing."""
    scope["state"][CUT]()


class Guard:
    """An ASGI application around another one.

    `hosts` are names under which the service may be reached, besides localhost and numeric addresses; `origins` the
    origins ("https://app.example") whose pages may use it, besides its own. `cookie` names a cookie that may hold the
    token, for pages. `open_paths` need no token; one that ends with "/" stands for all paths below it, but "/"
    for itself alone. `headers` are added to each answer, or replace those of `HEADERS`.

    A `Problem` that the application raises is sent, if nothing was sent before. So is, without detail, any other
    exception; it is logged.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, *, hosts: Collection[str] = (), origins: Collection[str] = (), cookie: str = "",
        open_paths: Collection[str] = (), headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        """The known tokens; assign others to replace them."""
        self.denied: Counter[str] = Counter()
        """Requests that the application did not see: "host", "origin", "token" or "rate" -> count."""
        self._app = app
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._origins = {origin.lower() for origin in origins}
        self._cookie = cookie
        self._open = {path for path in open_paths if path == "/" or not path.endswith("/")}
        self._open_below = tuple(path for path in open_paths if path.endswith("/") and path != "/")
        self._attempts = Attempts()
        self._repeats = Repeats(limit=64)
        named = {**HEADERS, **{name.lower(): value for name, value in (headers or {}).items()}}
        self._headers = {name.encode(): value.encode("latin-1") for name, value in named.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']!r}")
        started = False
        cors: dict[bytes, bytes] = {}

        async def complete(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                given = list(message.get("headers", ()))
                named = {name.lower() for name, _ in given}
                extra = {**self._headers, **cors}
                given += [pair for pair in extra.items() if pair[0] not in named]
                message = {**message, "headers": given}
            await send(message)

        try:
            asked = _headers(scope)
            self._check_host(asked)
            origin = self._check_origin(scope, asked)
            if origin:
                cors.update(_cors(origin))
                if scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
                    await _preflight(complete)
                    return
            if caller := self._check_token(scope, asked):
                scope[CALLER] = caller
            await self._app(scope, receive, complete)
        except Problem as problem:
            if started:
                raise RuntimeError(
                    f"a problem after the answer began: {problem.detail}"
                ) from problem
            await send_problem(complete, problem)
        except Exception as error:
            self._repeats.error(log, "web.failed", type(error).__name__, error, {"path": scope["path"], "error": error_text(error)})  # fmt: skip
            if started:
                raise  # the server closes the connection, so that nobody takes the answer for whole
            await send_problem(complete, Problem(500, "internal error; the log has its traceback"))

    def _check_host(self, asked: Mapping[bytes, list[bytes]]) -> None:
        given = asked.get(b"host", [])
        host = given[0].decode("latin-1") if len(given) == 1 else ""
        name = _without_port(host)
        if name.rstrip(".").lower() in self._hosts or _is_address(name):
            return
        self.denied["host"] += 1
        raise Problem(421, f"this service is not reached as {host[:255]!r}; use its address, or let its operator add the name")  # fmt: skip

    def _check_origin(self, scope: Scope, asked: Mapping[bytes, list[bytes]]) -> str:
        """Return the origin if it is a listed one; "" if it is the service's own, or not a browser's."""
        given = asked.get(b"origin", [])
        if not given:
            return ""
        origin = given[0].decode("latin-1").lower() if len(given) == 1 else "several"
        if origin in self._origins:
            return origin
        host = asked[b"host"][0].decode("latin-1").lower()
        if origin in (f"http://{host}", f"https://{host}"):  # a proxy may speak TLS for us
            return ""
        self.denied["origin"] += 1
        raise Problem(403, f"pages of the origin {origin[:255]!r} may not use this service; its operator can list the origin")  # fmt: skip

    def _check_token(self, scope: Scope, asked: Mapping[bytes, list[bytes]]) -> Caller | None:
        path = scope["path"]
        token = self._token(asked)
        caller = self.tokens.find(token) if token else None
        if caller is not None:
            return caller
        if path in self._open or path.startswith(self._open_below):
            return None
        if not token:
            self.denied["token"] += 1
            raise _unauthorized("this service needs a token; send it as Authorization: Bearer TOKEN", "")  # fmt: skip
        client = scope.get("client") or ("", 0)
        wait_s = self._attempts.wait_s(client[0], time.monotonic())
        if wait_s:
            self.denied["rate"] += 1
            retry = {"retry-after": str(ceil(wait_s))}
            raise Problem(429, "too many wrong tokens from this address", headers=retry)
        self.denied["token"] += 1
        self._repeats.warning(log, "web.wrong_token", client[0], None, {"address": client[0]})
        raise _unauthorized("the token is not known", ', error="invalid_token"')

    def _token(self, asked: Mapping[bytes, list[bytes]]) -> str:
        """Return the token of a request; "" if it has none, or several."""
        given = asked.get(b"authorization", [])
        if len(given) == 1:
            scheme, _, token = given[0].decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
        if given or not self._cookie:
            return ""
        cookies: SimpleCookie = SimpleCookie()
        try:
            for line in asked.get(b"cookie", []):
                cookies.load(line.decode("latin-1"))
        except CookieError:
            return ""
        return cookies[self._cookie].value if self._cookie in cookies else ""


async def send_problem(send: Send, problem: Problem) -> None:
    """Send a problem as the answer of a request."""
    body = problem.body
    headers = [
        (b"content-type", MEDIA_TYPE),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode("latin-1")) for name, value in problem.headers.items()),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    pairs: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for name, value in pairs:
        found.setdefault(name.lower(), []).append(value)
    return found


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _is_address(name: str) -> bool:
    bare = name[1:-1] if name[:1] == "[" and name[-1:] == "]" else name
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


def _cors(origin: str) -> dict[bytes, bytes]:
    return {
        b"access-control-allow-origin": origin.encode("latin-1"),
        b"access-control-expose-headers": b"*",
        b"cross-origin-resource-policy": b"cross-origin",
        b"vary": b"Origin",
    }


async def _preflight(send: Any) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"*, Authorization"),
        (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _unauthorized(detail: str, error: str) -> Problem:
    return Problem(401, detail, headers={"www-authenticate": f'Bearer realm="iris"{error}'})
