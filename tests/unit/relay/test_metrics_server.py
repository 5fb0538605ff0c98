"""The connections of the page of metrics, which several threads change."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from relay.metrics.server import MAX_CONNECTIONS, Server


class _Ending:
    """A connection whose thread removes it from the table at the moment at which it is looked at."""

    began_s = 0.0

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
