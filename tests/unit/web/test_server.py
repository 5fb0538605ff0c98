"""Serving over HTTP: limits of connections, start and stop, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.strangers import Lingering, trusting
from support.waiting import PATIENCE_S, until
from support.web import AMBIGUOUS, ask, certificate, http

from iris import accepting
from iris.errors import ConfigError
from iris.web import connection, server


class App:
    """Answers with its path; "/wait" waits until it is told, "/body" reads the body."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = 0
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            self.waiting += 1
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if scope["path"] == "/body":
            while (await receive()).get("more_body"):
                pass
        body = scope["path"].encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})  # fmt: skip
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(app: Any, **settings: Any) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """Serve; yield the address, and a function that stops and returns when all has ended."""
    stop = asyncio.Event()
    listener = server.listen("listen", "127.0.0.1:0")
    task = asyncio.create_task(server.serve(app, listener, stop, **settings))

    async def end() -> None:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task

    try:
        yield server.address_of(listener), end
    finally:
        await end()


async def test_requests_are_answered_one_after_another_on_one_connection() -> None:
    async with served(App()) as (address, _), http(address) as client:
        for path in ("/a", "/b"):
            client.send("GET", path, {})
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, path.encode())
            assert "server" not in answer.headers


async def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with contextlib.closing(server.listen("--listen", "127.0.0.1:0")) as first, pytest.raises(ConfigError) as refused:  # fmt: skip
        server.listen("--listen", server.address_of(first))
    assert "--listen: cannot listen: Address already in use" in str(refused.value)
    assert "choose another port" in str(refused.value)


@pytest.mark.parametrize("address", ["", "8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "example.com:80", "::1", "127.0.0.1:-1"])  # fmt: skip
def test_an_address_that_is_not_one_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen: .* is not ADDRESS:PORT"):
        server.listen("--listen", address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_other_than_loopback_must_be_allowed(address: str) -> None:
    with pytest.raises(ConfigError, match="is not a loopback address"):
        server.listen("--listen", address)


def test_all_addresses_of_the_host_can_be_allowed() -> None:
    with contextlib.closing(server.listen("--listen", "0.0.0.0:0", allow_remote=True)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


async def test_a_connection_that_trickles_headers_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.05)
    async with served(App()) as (address, _), http(address) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        ended = asyncio.ensure_future(client.ended())
        while not ended.done():
            client.writer.write(b"x: y\r\n")
            await asyncio.wait((ended,), timeout=0.01)
        assert await ended


async def test_a_connection_that_sends_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.05)
    async with served(App()) as (address, _), http(address) as client:
        assert await client.ended()


async def test_a_request_under_way_is_not_cut_by_the_time_for_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.05)
    app = App()
    async with served(app) as (address, _), http(address) as client, http(address) as idle:
        client.send("GET", "/wait", {})
        assert await idle.ended()  # so the time has passed
        app.go.set()
        assert (await client.answer()).body == b"/wait"


async def test_a_body_that_nobody_reads_does_not_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.05)
    async with served(App()) as (address, _), http(address) as client:
        client.writer.write(
            b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\nx"
        )
        assert b"200 OK" in await client.reader.readuntil(b"\r\n\r\n")
        assert await client.reader.readexactly(1) == b"/"
        assert await client.ended()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST /body HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nbroken header\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_ends_its_connection_and_nothing_else(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.2)
    async with served(App()) as (address, _):
        async with http(address) as client:
            client.writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert b" 200 " not in await client.reader.read()
        assert (await ask(address, "GET", "/a")).body == b"/a"


async def test_at_the_limit_of_connections_the_one_that_waits_longest_makes_room() -> None:
    app = App()
    async with served(app, max_connections=3) as (address, _), http(address) as busy:
        busy.send("GET", "/wait", {})
        await until(lambda: app.waiting == 1)
        async with http(address) as old, http(address) as newer:
            assert (await ask(address, "GET", "/a")).body == b"/a"
            assert await old.ended()
            newer.send("GET", "/b", {})
            assert (await newer.answer()).body == b"/b"
        app.go.set()
        assert (await busy.answer()).body == b"/wait"


async def test_at_the_limit_a_connection_is_refused_if_all_others_are_in_use() -> None:
    app = App()
    async with (
        served(app, max_connections=2) as (address, _),
        http(address) as one,
        http(address) as two,
    ):
        for client in (one, two):
            client.send("GET", "/wait", {})
        await until(lambda: app.waiting == 2)
        answer = await ask(address, "GET", "/a")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        app.go.set()
        assert [(await client.answer()).status for client in (one, two)] == [200, 200]


async def test_a_stop_finishes_what_is_under_way() -> None:
    app = App()
    async with served(app) as (address, end), http(address) as client, http(address) as idle:
        client.send("GET", "/wait", {})
        await until(lambda: app.waiting == 1)
        ending = asyncio.create_task(end())
        assert await idle.ended()
        app.go.set()
        assert (await client.answer()).body == b"/wait"
        await ending
        with pytest.raises(ConnectionError):
            await ask(address, "GET", "/a")


async def test_a_stop_is_bounded() -> None:
    app = App()
    async with served(app, grace_s=0) as (address, end), http(address) as client:
        client.send("GET", "/wait", {})
        await until(lambda: app.waiting == 1)
        await end()
        assert app.cancelled == 1
        await client.reader.read()  # to its end


async def test_cancelling_leaves_nothing_behind() -> None:
    app = App()
    listener = server.listen("listen", "127.0.0.1:0")
    address = server.address_of(listener)
    task = asyncio.create_task(server.serve(app, listener, asyncio.Event()))
    async with http(address) as client:
        client.send("GET", "/wait", {})
        await until(lambda: app.waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert app.cancelled == 1
        assert await client.ended()
    with pytest.raises(ConnectionError):
        await ask(address, "GET", "/a")


async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Any) -> None:
    listener = server.listen("listen", "127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        await server.serve(App(), listener, asyncio.Event(), certificate=str(tmp_path / "nothing.pem"))  # fmt: skip
    assert listener.fileno() == -1


def test_ipv6_is_written_in_brackets() -> None:
    try:
        listener = server.listen("listen", "[::1]:0")
    except ConfigError:
        pytest.skip("this host has no IPv6")
    with contextlib.closing(listener):
        assert server.address_of(listener).startswith("[::1]:")
        assert listener.family == socket.AF_INET6


# -- limits that begin before TLS --------------------------------------------------------------------------------


async def ask_tls(address: str, path: str) -> bytes:
    """Ask over TLS; return all that is answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting())
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode()
        )
        return await reader.read()
    finally:
        writer.transport.abort()


async def test_silent_handshakes_count_as_connections_and_the_oldest_makes_room(
    tmp_path: Path,
) -> None:
    cert, key, _ = certificate(tmp_path)
    refused: Counter[str] = Counter()
    async with (
        served(App(), max_connections=3, certificate=str(cert), key=str(key), refused=refused) as (address, _),
        http(address) as first, http(address), http(address) as third,
    ):  # fmt: skip
        async with asyncio.timeout(PATIENCE_S):
            assert (await ask_tls(address, "/a")).endswith(b"/a")
            assert await first.ended()
        assert refused == {connection.TOO_MANY: 1}
        assert not third.reader.at_eof()


async def test_a_handshake_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 0.05)
    cert, key, _ = certificate(tmp_path)
    refused: Counter[str] = Counter()
    async with (
        served(App(), certificate=str(cert), key=str(key), refused=refused) as (address, _),
        http(address) as silent,
    ):
        async with asyncio.timeout(PATIENCE_S):
            assert await silent.ended()
        await until(lambda: refused == {accepting.TOO_LONG: 1})


async def test_a_connection_that_does_not_end_tls_counts_until_it_is_gone(tmp_path: Path) -> None:
    cert, key, _ = certificate(tmp_path)
    refused: Counter[str] = Counter()
    async with (
        served(App(), max_connections=2, certificate=str(cert), key=str(key), refused=refused) as (address, _),
        contextlib.AsyncExitStack() as stack,
    ):  # fmt: skip
        lingering = []
        for _ in range(6):
            lingering.append(Lingering(await stack.enter_async_context(http(address))))
            await lingering[-1].say(
                b"GET /a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", until=b"/a"
            )
        async with asyncio.timeout(PATIENCE_S):
            assert (await ask_tls(address, "/a")).endswith(b"/a")
            for each in lingering[:5]:
                await each.gone()
        assert refused == {connection.TOO_MANY: 5}


async def test_there_are_no_more_connections_than_fit_the_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(accepting, "descriptor_limit", lambda: (used + 20, 8))
    cert, key, _ = certificate(tmp_path)
    refused: Counter[str] = Counter()
    async with (
        served(App(), max_connections=10_000, certificate=str(cert), key=str(key), refused=refused) as (address, _),
        contextlib.AsyncExitStack() as stack,
    ):  # fmt: skip
        silent = [await stack.enter_async_context(http(address)) for _ in range(40)]
        async with asyncio.timeout(PATIENCE_S):
            assert (await ask_tls(address, "/a")).endswith(b"/a")
            assert all([await each.ended() for each in silent[:30]])
        assert refused[connection.TOO_MANY] >= 29


def test_what_fits_the_descriptors_leaves_a_quarter_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = len(os.listdir("/proc/self/fd")) + 1  # the listing itself
    for limit, reserved in ((1024, 256), (1 << 20, accepting.RESERVED)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert accepting.descriptor_limit() == (limit, reserved)
        assert abs(accepting.connections_that_fit(1 << 30) - (limit - reserved - used)) <= 1
        assert accepting.connections_that_fit(10) == 10
        assert accepting.strangers_that_fit(1 << 30, 8) == reserved // 8
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    assert accepting.connections_that_fit(100) == accepting.strangers_that_fit(100, 8) == 1


# -- heads that a proxy may read in another way ------------------------------------------------------------------

TRAILERS = b"POST /body HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize(
    "sent",
    [*AMBIGUOUS.values(), TRAILERS + b"x: y\n\r\n", TRAILERS + b"x: y\r\n z\r\n\r\n"],
    ids=[*AMBIGUOUS, "LF after a trailer", "a folded trailer"],
)
async def test_what_a_proxy_may_read_in_another_way_is_refused_and_ends_the_connection(
    sent: bytes,
) -> None:
    refused: Counter[str] = Counter()
    async with served(App(), refused=refused) as (address, _), http(address) as client:
        client.writer.write(sent + b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answers = await client.reader.read()
        assert answers.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answers.lower()
        assert answers.count(b"HTTP/1.1 ") == 1
        assert refused == {connection.INVALID: 1}


async def test_such_a_request_behind_another_one_is_refused_too() -> None:
    async with served(App()) as (address, _), http(address) as client:
        client.writer.write(
            b"POST /body HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx"
            + AMBIGUOUS["LF after a header"]
        )
        async with asyncio.timeout(PATIENCE_S):
            answers = await client.reader.read()
        assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"400"]


async def test_the_refusal_says_what_was_wrong() -> None:
    async with served(App()) as (address, _), http(address) as client:
        client.writer.write(AMBIGUOUS["both framings"])
        async with asyncio.timeout(PATIENCE_S):
            assert b"both Content-Length and Transfer-Encoding" in await client.reader.read()


async def test_a_head_is_read_whatever_the_pieces_in_which_it_arrives() -> None:
    async with served(App()) as (address, _), http(address) as client:
        for byte in b"POST /body HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nab":
            client.writer.write(bytes((byte,)))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer()).body == b"/body"


async def test_an_invalid_body_after_its_answer_ends_the_connection_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer was sent already, so there is no other one."""
    async with served(App()) as (address, _), http(address) as client:
        client.writer.write(
            b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        assert (await client.start()).status == 200
        client.writer.write(b"zz\r\n")
        with contextlib.suppress(ConnectionError):
            await client.reader.read()
    assert not [each for each in caplog.records if each.name == "asyncio"]
