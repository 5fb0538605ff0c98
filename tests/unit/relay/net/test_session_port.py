"""A session's port: what it queues for a process that does not read, and what it counts when that process is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from iris.wire.codec import encode_control
from iris.wire.frames import Report
from relay.config import RelayConfig
from relay.daemon import make_router
from relay.net.ports import CONTROL_LIMIT_BYTES, Driver
from relay.net.sessions import SessionHub, SessionPort

MIB = 1 << 20


class Connection(asyncio.Transport):
    """Accepts all writes and discards them."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = self.reading_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def writelines(self, chunks: Any) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
async def port() -> SessionPort:
    """A port whose process reads nothing."""
    config = RelayConfig(socket_path=Path("/nowhere"))
    hub = SessionHub(Driver(make_router(config)), config)
    port = hub.port()
    port.connection_made(Connection())
    port.pause_writing()
    return port


async def test_messages_queued_for_a_session_that_ends_are_counted_as_lost(
    port: SessionPort,
) -> None:
    accounts = port._router.accounts
    for count in (1, 4):
        accounts.in_ += count
        assert port.send(bytes(100), count)
        accounts.out += count
    port.connection_lost(None)
    assert accounts.dropped == {"session lost": 5}
    assert accounts.out == 0
    assert accounts.balance() == 0


async def test_a_session_that_reads_no_answers_is_paused_and_then_cut(
    port: SessionPort,
) -> None:
    """Frames caused by others are queued for it, too, so pausing its input does not bound the queue."""
    connection: Any = port._transport
    answer = encode_control(Report(1, "x" * MIB))
    for _ in range(CONTROL_LIMIT_BYTES // len(answer)):
        port.control(answer)
    assert connection.reading_paused
    assert not connection.aborted
    port.control(answer)
    assert connection.aborted
