"""The connections of the page of metrics, which several threads change."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import PATIENCE_S
from support.web import AMBIGUOUS

from relay.metrics.server import MAX_CONNECTIONS, MAX_HEAD_BYTES, Server


class _Ending:
    """A connection whose thread removes it from the table at the moment at which it is looked at."""

    began_s = 0.0
    cut = False

    def __init__(self, table: dict[Any, Any], key: object) -> None:
        self._table = table
        self._key = key

    @property
    def asked(self) -> bool:
        self._table.pop(self._key, None)
        return True


def test_a_connection_that_ends_while_room_is_made_does_not_end_the_server() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = Server(listener, source=type("Source", (), {"cut_connections": 0})())  # type: ignore[arg-type]  # only counts
        table: dict[Any, Any] = server._connections
        for _ in range(MAX_CONNECTIONS):
            one = stack.enter_context(socket.socket())
            table[one] = _Ending(table, one)
        new = stack.enter_context(socket.socket())
        assert server.verify_request(new, None) is False, "every connection had asked"
        server.server_close()


class _Page:
    """What a server shows."""

    cut_connections = 0

    def page(self) -> bytes:
        return b"the page\n"

    def not_live(self) -> str:
        return ""

    not_ready = not_live


@pytest.fixture
def served() -> Iterator[Server]:
    """A server that serves in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener, _Page())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(PATIENCE_S)
    server.server_close()


def asked(server: Server, sent: bytes) -> bytes:
    """Return all that is answered."""
    with socket.create_connection(server.server_address, PATIENCE_S) as connection:  # type: ignore[arg-type]  # of the Internet
        connection.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                answer += part
        return answer


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_a_proxy_may_read_in_another_way_is_refused(served: Server, sent: bytes) -> None:
    sent = sent.replace(b"POST /body", b"GET /metrics").replace(b"GET / ", b"GET /metrics ")
    answer = asked(served, sent)
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b"the page" not in answer
    assert served.source.cut_connections == 1
    assert b"the page" in asked(served, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")


def test_a_head_has_a_limit(served: Server) -> None:
    lines = b"x: " + b"y" * 2000 + b"\r\n"
    some, many = MAX_HEAD_BYTES // len(lines) - 1, MAX_HEAD_BYTES // len(lines) + 2
    assert b"the page" in asked(served, b"GET /metrics HTTP/1.1\r\n" + lines * some + b"\r\n")
    assert b" 431 " in asked(served, b"GET /metrics HTTP/1.1\r\n" + lines * many + b"\r\n")


def test_a_connection_that_was_cut_counts_until_its_thread_has_closed_it() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = Server(listener, _Page())
        for _ in range(2 * MAX_CONNECTIONS):
            assert server.verify_request(stack.enter_context(socket.socket()), None)
        assert len(server._connections) == 2 * MAX_CONNECTIONS  # no thread has run yet
        assert not server.verify_request(stack.enter_context(socket.socket()), None)
        assert server.source.cut_connections == MAX_CONNECTIONS + 1
        server.shutdown_request(next(iter(server._connections)))
        assert server.verify_request(stack.enter_context(socket.socket()), None)
        server.server_close()
