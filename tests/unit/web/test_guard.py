"""The guard before every page and bridge over HTTP: Host, Origin, token, and the headers of answers."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from iris.web.attempts import BURST
from iris.web.guard import Guard, caller_of
from iris.web.problems import Problem
from iris.web.tokens import Tokens

TOKEN = "a-token-of-enough-characters-0123456789"
BEARER = (b"authorization", f"Bearer {TOKEN}".encode())
HOST = (b"host", b"127.0.0.1:8081")


async def show(scope: Any, receive: Any, send: Any) -> None:
    """The application: it says who asked, or fails as it is told."""
    match scope["path"]:
        case "/problem":
            raise Problem(409, "no", kind="conflict", may_have_run=True)
        case "/broken":
            raise ValueError(f"secret {TOKEN}")
        case "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("too late")
    body = caller_of(scope).name.encode()
    headers = (
        [(b"Content-Security-Policy", b"default-src 'self'")] if scope["path"] == "/page" else []
    )
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def guard(**settings: Any) -> Guard:
    return Guard(show, Tokens.single(TOKEN, "me", {"see": [">"]}), **settings)


async def asked(
    guarded: Guard,
    *headers: tuple[bytes, bytes],
    path: str = "/",
    method: str = "GET",
    client: str = "192.0.2.1",
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("no body is read")

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": list(headers),
        "client": (client, 1),
    }
    await guarded(scope, receive, send)
    names = [name.lower() for name, _ in sent[0]["headers"]]
    assert len(names) == len(set(names)), "a header is given twice"
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1].get("body", b"")


def problem(body: bytes) -> Any:
    return json.loads(body)


@pytest.mark.parametrize("host", [b"127.0.0.1:8081", b"localhost", b"LOCALHOST:1", b"[::1]:8081", b"192.0.2.7", b"iris.example:8081"])  # fmt: skip
async def test_a_request_that_names_this_service_and_has_a_token_is_handled(host: bytes) -> None:
    status, headers, body = await asked(guard(hosts=["iris.example"]), (b"host", host), BEARER)
    assert (status, body) == (200, b"me")
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"content-security-policy"].startswith(b"default-src 'none'")
    assert headers[b"cache-control"] == b"no-store"


@pytest.mark.parametrize("host", [b"evil.example", b"localhost.evil.example", b"127.0.0.1.evil.example:8081", b"", b"127.0.0.1@evil.example", b"[::1].evil.example", b"\xff"])  # fmt: skip
async def test_a_name_that_was_made_to_lead_here_is_refused_even_with_a_token(host: bytes) -> None:
    guarded = guard()
    status, headers, body = await asked(guarded, (b"host", host), BEARER)
    assert status == 421
    assert problem(body)["status"] == 421
    assert headers[b"content-type"] == b"application/problem+json"
    assert guarded.denied == {"host": 1}


async def test_no_host_and_two_hosts_are_refused() -> None:
    assert (await asked(guard(), BEARER))[0] == 421
    assert (await asked(guard(), HOST, (b"Host", b"evil.example"), BEARER))[0] == 421


async def test_a_page_of_another_origin_is_refused_even_with_a_token() -> None:
    guarded = guard(origins=["https://app.example"])
    for origin in (
        b"https://evil.example",
        b"null",
        b"http://127.0.0.1:3000",
        b"https://app.example.evil.example",
    ):
        status, headers, _ = await asked(guarded, HOST, (b"origin", origin), BEARER)
        assert status == 403
        assert b"access-control-allow-origin" not in headers
    assert guarded.denied == {"origin": 4}


async def test_a_page_of_the_service_itself_is_not_another_origin() -> None:
    for origin in (b"http://127.0.0.1:8081", b"https://127.0.0.1:8081"):
        assert (await asked(guard(), HOST, (b"origin", origin), BEARER))[0] == 200


async def test_a_page_of_a_listed_origin_may_read_answers_and_errors() -> None:
    guarded = guard(origins=["https://app.example"])
    origin = (b"origin", b"https://app.example")
    for headers in ((HOST, origin, BEARER), (HOST, origin)):
        _, got, _ = await asked(guarded, *headers)
        assert got[b"access-control-allow-origin"] == b"https://app.example"
        assert got[b"cross-origin-resource-policy"] == b"cross-origin"
        assert b"access-control-allow-credentials" not in got


async def test_a_preflight_is_answered_without_a_token_for_listed_origins_alone() -> None:
    guarded = guard(origins=["https://app.example"])
    wanted = (b"access-control-request-method", b"POST")
    status, headers, _ = await asked(
        guarded, HOST, (b"origin", b"https://app.example"), wanted, method="OPTIONS"
    )
    assert status == 204
    assert headers[b"access-control-allow-headers"] == b"*, Authorization"
    status, _, _ = await asked(
        guarded, HOST, (b"origin", b"https://evil.example"), wanted, method="OPTIONS"
    )
    assert status == 403


@pytest.mark.parametrize(
    "given",
    [
        (),
        ((b"authorization", b"Bearer"),),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Basic " + TOKEN.encode()),),
        ((b"authorization", TOKEN.encode()),),
        (BEARER, BEARER),
        ((b"authorization", b"Bearer \xff\xfe"),),
        ((b"authorization", b"Bearer wrong-" + TOKEN.encode()),),
        ((b"cookie", b"session=" + TOKEN.encode()),),
    ],
)
async def test_without_exactly_one_known_token_nothing_is_handled(given: Any) -> None:
    guarded = guard()
    status, headers, body = await asked(guarded, HOST, *given)
    assert status == 401
    assert headers[b"www-authenticate"].startswith(b'Bearer realm="iris"')
    assert TOKEN.encode() not in body
    assert guarded.denied == {"token": 1}


async def test_wrong_tokens_are_limited_but_never_keep_out_a_right_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = guard()
    wrong = (b"authorization", b"Bearer wrong")
    statuses = [(await asked(guarded, HOST, wrong))[0] for _ in range(BURST + 2)]
    assert statuses == [401] * BURST + [429, 429]
    _, headers, _ = await asked(guarded, HOST, wrong)
    assert int(headers[b"retry-after"]) >= 1
    assert (await asked(guarded, HOST, BEARER))[0] == 200
    assert (await asked(guarded, HOST, wrong, client="192.0.2.2"))[0] == 401
    assert (await asked(guarded, HOST))[0] == 401  # no token is not a wrong one
    assert [record.getMessage() for record in caplog.records] == [
        f"web.wrong_token: A request from {address} had an unknown token and was refused."
        for address in ("192.0.2.1", "192.0.2.2")
    ]


async def test_a_token_may_come_in_the_cookie_that_the_application_names() -> None:
    guarded = guard(cookie="iris")
    assert (await asked(guarded, HOST, (b"cookie", f"a=b; iris={TOKEN}".encode())))[0] == 200
    assert (await asked(guarded, HOST, (b"cookie", b"iris=wrong")))[0] == 401
    assert (await asked(guarded, HOST, (b"cookie", b"\xff;;=\x01")))[0] == 401


async def test_an_open_path_needs_no_token_but_the_right_host_and_origin() -> None:
    guarded = guard(open_paths=["/openapi.json", "/static/"])
    for path in ("/openapi.json", "/static/page.js"):
        assert (await asked(guarded, HOST, path=path))[0] == 200
        assert (await asked(guarded, (b"host", b"evil.example"), path=path))[0] == 421
        assert (await asked(guarded, HOST, (b"origin", b"https://evil.example"), path=path))[
            0
        ] == 403
    assert (await asked(guarded, HOST, path="/openapi.json/"))[0] == 401
    assert (await asked(guarded, HOST, path="/static"))[0] == 401
    assert (await asked(guarded, HOST, BEARER, path="/openapi.json"))[2] == b"me"


async def test_an_open_root_opens_the_root_alone() -> None:
    guarded = guard(open_paths=["/"])
    assert (await asked(guarded, HOST, path="/"))[0] == 200
    assert (await asked(guarded, HOST, path="/events"))[0] == 401
    assert (await asked(guarded, HOST, path="//"))[0] == 401


async def test_an_application_sets_its_own_headers() -> None:
    _, headers, _ = await asked(guard(), HOST, BEARER, path="/page")
    assert headers[b"Content-Security-Policy"] == b"default-src 'self'"
    _, headers, _ = await asked(guard(headers={"Referrer-Policy": "origin"}), HOST, BEARER)
    assert headers[b"referrer-policy"] == b"origin"


async def test_a_problem_of_the_application_is_sent_as_problem_details() -> None:
    status, headers, body = await asked(guard(), HOST, BEARER, path="/problem")
    assert status == 409
    assert headers[b"content-type"] == b"application/problem+json"
    assert problem(body) == {"type": "/problems/conflict", "title": "Conflict", "status": 409, "detail": "no", "may_have_run": True}  # fmt: skip


async def test_an_exception_of_the_application_is_logged_and_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status, _, body = await asked(guard(), HOST, BEARER, path="/broken")
    assert status == 500
    assert b"secret" not in body
    assert "ValueError" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


async def test_an_answer_that_fails_half_way_is_not_completed() -> None:
    with pytest.raises(ValueError, match="too late"):
        await asked(guard(), HOST, BEARER, path="/late")
