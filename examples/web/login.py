"""A login handler that hands a page what it needs for a sealed session: a ticket, and keys.

    iris key ticket-issuer issuer.toml          # its public key goes into relay.toml, see docs/web.md
    python examples/web/login.py --issuer issuer.toml --relay wss://relay.example:7432 --origin https://app.example

It serves POST /login, with a name and password as JSON, and POST /ticket, with the cookie that /login set. Both answer
with a ticket for a few minutes; /login adds the keys. What a person may do and the keys for it are in one place, a
`Grant`. demo.py uses this handler with grants of its own. Here the keyring of the host has an entry that derives a key
for each person, and a key of the cluster "delays" that only browsers use, listed second so that services open it:

    [topics."users.*"]
    derive = true
    keys = ["…"]
    [clusters."delays"]
    keys = ["…", "…"]

What a stolen pair of ticket and keys can do: until the ticket expires, open sessions from pages of this origin (other
programs can send any origin), read and publish what is under users.NAME, and call delays. The keys outlive the ticket:
whoever has them, and gets at recorded traffic, can read it. So keep them in memory and not in localStorage, and give
every person the shortest life that the page can live with. Logging out makes no new ticket; "subject NAME" in the
relay's list of revoked tickets ends sessions at once.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from iris import ClusterKey, Keyring, keyfiles
from iris.tickets import Issuer

LIFE_S = 300
LOGIN_S = 8 * 3600
MAX_BODY_BYTES = 4096
COOKIE = "login"
MAX_LOGINS = 10_000
NO_STORE = {"cache-control": "no-store"}


@dataclass(frozen=True)
class Grant:
    """What the page of one person may do, and the keys that it needs for that."""

    allow: Mapping[str, list[str]]
    """Verb -> names and filters."""
    topics: Mapping[str, ClusterKey] = field(default_factory=dict)
    clusters: Mapping[str, ClusterKey] = field(default_factory=dict)
    """Name of a cluster or stream -> key."""


class Logins:
    """Who is logged in: cookie -> (name, when it ends). At most `MAX_LOGINS`; the oldest makes room."""

    def __init__(self, passwords: Mapping[str, tuple[bytes, bytes]]) -> None:
        """`passwords`: name -> (salt, scrypt hash)."""
        self._passwords = passwords
        self._open: dict[str, tuple[str, float]] = {}

    @classmethod
    def made_up(cls, names: Iterable[str]) -> tuple[Logins, dict[str, str]]:
        """Return logins with throw-away passwords, and these by name. A real application has its own."""
        passwords = {name: secrets.token_urlsafe(12) for name in names}
        salt = os.urandom(16)
        kept = {name: (salt, hash_password(text, salt)) for name, text in passwords.items()}
        return cls(kept), passwords

    def check(self, name: str, password: str) -> bool:
        salt, wanted = self._passwords.get(name, (b"", b""))
        # For unknown names, too, so that the time says nothing.
        found = hash_password(password, salt)
        return hmac.compare_digest(found, wanted)

    def begin(self, name: str) -> str:
        if len(self._open) >= MAX_LOGINS:
            del self._open[next(iter(self._open))]
        cookie = secrets.token_urlsafe(32)
        self._open[cookie] = name, time.monotonic() + LOGIN_S
        return cookie

    def name(self, cookie: str) -> str | None:
        name, until_s = self._open.get(cookie, ("", 0.0))
        return name if time.monotonic() < until_s else None


def hash_password(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=1 << 14, r=8, p=1)


def users_grant(keyring: Keyring, name: str) -> Grant:
    """Return what the page of `name` may do: use the topics of this person, and call "delays"."""
    mine, shared = keyring.for_topic(f"users.{name}")[0], keyring.for_cluster("delays")[-1]
    allow = {
        "subscribe": [f"users.{name}", f"users.{name}.>"],
        "publish": [f"users.{name}.>"],
        "request": ["delays"],
    }
    return Grant(allow, topics={f"users.{name}": mine}, clusters={"delays": shared})


def application(
    logins: Logins, issuer: Issuer, grant: Callable[[str], Grant], *, relay: str, origin: str
) -> Starlette:
    """Return the application. The page of `origin` connects to `relay`; `grant` says what a person may do."""

    def ticket(name: str, granted: Grant) -> dict[str, object]:
        keys = [*granted.topics.values(), *granted.clusters.values()]
        text = issuer.issue(name, allow=granted.allow, keys=keys, life_s=LIFE_S, origin=origin)
        return {"name": name, "relay": relay, "ticket": text, "life_s": LIFE_S}

    async def login(request: Request) -> Response:
        if not asked_by(request, origin):
            return refused(403, "this page may not log in here")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refused(413, f"send at most {MAX_BODY_BYTES} bytes")
        try:
            given = json.loads(body)
            name, password = str(given["name"]), str(given["password"])
        except (ValueError, KeyError, TypeError):
            return refused(400, "send name and password as JSON")
        if not await asyncio.to_thread(logins.check, name, password):
            return refused(401, "the name or the password is wrong")
        granted = grant(name)
        keys = {
            "topics": {each: key.reveal() for each, key in granted.topics.items()},
            "clusters": {each: key.reveal() for each, key in granted.clusters.items()},
        }
        answer = JSONResponse({**ticket(name, granted), "keys": keys}, headers=NO_STORE)
        answer.set_cookie(
            COOKIE, logins.begin(name), max_age=LOGIN_S, secure=origin.startswith("https:"), httponly=True, samesite="strict",
        )  # fmt: skip
        return answer

    async def renew(request: Request) -> Response:
        name = logins.name(request.cookies.get(COOKIE, ""))
        if name is None or not asked_by(request, origin):
            return refused(401, "log in first")
        return JSONResponse(ticket(name, grant(name)), headers=NO_STORE)

    return Starlette(
        routes=[Route("/login", login, methods=["POST"]), Route("/ticket", renew, methods=["POST"])]
    )


def refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status, headers=NO_STORE)


def asked_by(request: Request, origin: str) -> bool:
    """Whether the page that asks is ours: other pages of the same browser must not get a ticket."""
    return request.headers.get("origin") == origin


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Log people in, and give their pages tickets and keys."
    )
    parser.add_argument("--issuer", type=Path, required=True)
    parser.add_argument("--relay", required=True, help="wss://HOST:PORT, as pages reach it")
    parser.add_argument("--origin", required=True, help="of the page, such as https://app.example")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    logins, passwords = Logins.made_up(["alice"])
    print(f"alice may log in with {passwords['alice']}", flush=True)
    issuer, keyring = Issuer.load(given.issuer), keyfiles.load_keys(os.environ)
    grant = partial(users_grant, keyring)
    app = application(logins, issuer, grant, relay=given.relay, origin=given.origin)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
