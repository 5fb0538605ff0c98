"""A session's share of a turn, with a socket and a clock of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from iris.wire import frames
from iris.wire.codec import encode_control
from relay.config import dev
from relay.core.router import Router
from relay.net.ports import Driver
from relay.net.sessions import SessionHub, SessionPort
from relay.net.turns import CONTROL_NS

PINGS = 40


class Socket(asyncio.Transport):
    """What is written can be looked at; nothing ends by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reading = True
        self.ended = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.written += map(bytes, list_of_data)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    abort = close


class Rig:
    """One session; each frame takes half of its share of a turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.ns)
        self.router = Router(bytes(16), entropy=bytes, message_limit=1 << 20)
        self.hub = SessionHub(Driver(self.router), dev(Path("/run/relay.sock")))
        self.port, self.socket = self.hub.port(), Socket()
        self.port.connection_made(self.socket)
        take = self.router._session_table[int(frames.Ping.FRAME)]

        def slowly(session: Any, buf: memoryview, start: int, end: int) -> object:
            self.ns += CONTROL_NS // 2
            return take(session, buf, start, end)

        self.router._session_table[int(frames.Ping.FRAME)] = slowly
        self.come(encode_control(frames.Hello(1, 8, "rig", 7)))

    def come(self, data: bytes, port: SessionPort | None = None) -> None:
        port = port or self.port
        room = port.get_buffer(-1)
        room[: len(data)] = data
        port.buffer_updated(len(data))

    @property
    def pongs(self) -> int:
        return b"".join(self.socket.written).count(b"\x18\0\x81")


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    made = Rig(monkeypatch)
    yield made
    made.hub.driver.close()
    assert not made.hub.ports
    assert not made.router.sessions


def pings(count: int) -> bytes:
    return b"".join(encode_control(frames.Ping(number)) for number in range(count))


async def end(rig: Rig) -> None:
    rig.port.abort("the test is over")
    rig.port.connection_lost(None)
    for _ in range(PINGS):
        await asyncio.sleep(0)


async def test_a_burst_takes_several_turns_and_all_of_it_is_handled(rig: Rig) -> None:
    rig.come(pings(PINGS))
    assert rig.pongs == 2
    assert not rig.socket.reading
    for turn in range(2, PINGS // 2 + 1):
        await asyncio.sleep(0)
        assert rig.pongs == 2 * turn
    await asyncio.sleep(0)
    assert rig.socket.reading
    assert not rig.port.waits
    await end(rig)


async def test_what_was_received_before_the_connection_was_lost_is_handled(rig: Rig) -> None:
    rig.come(pings(PINGS) + encode_control(frames.Status(77)))
    rig.port.connection_lost(ConnectionResetError())
    assert rig.router.sessions  # until all of it is handled
    seen = rig.ns
    for _ in range(PINGS):
        await asyncio.sleep(0)
    assert rig.ns - seen == (PINGS - 2) * (CONTROL_NS // 2)


async def test_what_was_not_written_to_a_lost_connection_is_freed_in_parts(rig: Rig) -> None:
    rig.port.pause_writing()
    for _ in range(10_000):
        rig.port.control(b"\x07\0\0\0\x18\0\x81")
    rig.port.connection_lost(ConnectionResetError())
    steps = 0
    while len(rig.router.endings):
        rig.router.endings.expire(rig.router.now_us)
        steps += 1
    assert steps >= 8


async def test_questions_that_wait_when_the_connection_is_lost_are_not_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 KiB of them can wait, and each may take milliseconds: the session of a process that ended would stay."""
    asked: list[str] = []
    for name in ("status_in_parts", "numbers"):
        monkeypatch.setattr(rig.router, name, lambda *_, name=name: asked.append(name))
    questions = (frames.Status(1), frames.Topic(2, "news", bytes(16)), frames.Members(3, "db", [bytes(16)]))  # fmt: skip
    rig.come(pings(PINGS) + b"".join(map(encode_control, 10 * questions)))
    rig.port.connection_lost(ConnectionResetError())
    for _ in range(PINGS):
        await asyncio.sleep(0)
    assert not asked
    assert not rig.router.sessions


async def test_a_session_that_is_cut_while_frames_wait_ends_at_once(rig: Rig) -> None:
    rig.come(pings(PINGS))
    await end(rig)
    assert rig.pongs == 2


async def test_a_broken_rule_behind_frames_that_waited_ends_the_session(rig: Rig) -> None:
    rig.come(pings(PINGS) + encode_control(frames.Wait(9, 1)))
    for _ in range(PINGS):
        await asyncio.sleep(0)
    assert rig.pongs == PINGS
    assert b"alias 9 was not declared" in b"".join(rig.socket.written)
    assert rig.socket.ended
    assert rig.socket.reading  # or the reason might be lost with what was not read
    rig.port.connection_lost(None)


async def test_another_session_is_handled_between_two_turns(rig: Rig) -> None:
    other, socket = rig.hub.port(), Socket()
    other.connection_made(socket)
    rig.come(pings(PINGS))
    await asyncio.sleep(0)
    rig.come(encode_control(frames.Hello(1, 8, "other", 8)), other)
    assert socket.written  # WELCOME
    assert rig.port.waits
    other.abort("the test is over")
    other.connection_lost(None)
    await end(rig)


async def test_the_rest_of_a_frame_is_not_overdue_while_frames_wait(rig: Rig) -> None:
    rig.come(pings(PINGS) + b"\x40\0\0\0")
    rig.port.check_deadline(time.monotonic() + 3600)
    assert not rig.socket.ended
    await end(rig)


async def test_a_stopping_relay_waits_for_what_waits(rig: Rig) -> None:
    rig.come(pings(PINGS))
    assert not rig.hub.idle
    await end(rig)
    assert rig.hub.idle
