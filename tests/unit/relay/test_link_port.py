"""A link's port, between the router and a connection: what goes first, what is refused, and what is counted when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iris.crypto.keys import NetworkKey
from iris.wire import frames
from iris.wire.codec import END, HOP, KIND_AT, encode_control
from iris.wire.frames import Kind
from relay.config import RelayConfig
from relay.core.ports import Held
from relay.daemon import make_router
from relay.linkport import BULK_TURN_BYTES, LinkPort
from relay.links import LinkHub
from relay.ports import Driver

MIB = 1 << 20


class Connection(asyncio.Transport):
    """Takes what is written, in turns of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = self.aborted = False

    def write(self, chunks: Any, size: int = 0) -> None:
        data = b"".join(chunks)
        if data:
            self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Rig:
    """A port that is up, on a connection that takes everything unless it is paused."""

    def __init__(self, port_queue_bytes: int = 8 * MIB) -> None:
        config = RelayConfig(
            socket_path=Path("/nowhere"), network_keys=(NetworkKey(bytes(32)),), port_queue_bytes=port_queue_bytes
        )  # fmt: skip
        self.router = make_router(config)
        self.driver = Driver(self.router)
        self.hub = LinkHub(self.driver, config)
        self.port = LinkPort(self.hub, "peer:1", self.hub._context)
        self.connection = Connection()
        self.port._transport = self.connection
        self.port._writer = self.connection  # type: ignore[assignment]  # takes chunks, too
        self.port._longest_bytes = 2 * MIB

    def forward(self, data: bytes) -> bool:
        buf = memoryview(bytearray(data))
        return self.port.forward(buf, 0, len(buf), 1)

    @property
    def kinds(self) -> list[int]:
        """The kinds of the frames written, in order."""
        data, kinds = b"".join(self.connection.writes), []
        while data:
            kinds.append(data[KIND_AT])
            data = data[4 + int.from_bytes(data[:4], "little") :]
        return kinds


def frame(alias: int, size: int, kind: int = Kind.REQUEST) -> bytes:
    return HOP.pack(46 + size, kind, 0, alias, 7, 0) + END.pack(1, 2, 1, 3) + bytes(size)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the port writes in turns of the loop
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_short_frame_waits_for_one_turn_of_a_long_one_and_not_for_the_rest(
    rig: Rig,
) -> None:
    for alias in range(4):
        assert rig.forward(frame(alias, MIB))
    rig.driver.settle()
    assert sum(map(len, rig.connection.writes)) < BULK_TURN_BYTES + 1000
    assert rig.forward(frame(9, 256, Kind.REPLY))
    rig.driver.settle()
    assert rig.kinds[-1] == Kind.REPLY
    assert rig.port.held_messages == 4
    await until(lambda: not rig.port.held_messages)
    assert max(map(len, rig.connection.writes)) < BULK_TURN_BYTES + 1000
    assert rig.kinds.count(Kind.REQUEST) == 4 * MIB // 65_536


async def test_while_the_connection_is_full_all_counts_and_what_is_too_much_is_refused(
    rig: Rig,
) -> None:
    rig.port.pause_writing()
    taken = 0
    while rig.forward(frame(taken % 3, MIB)):
        taken += 1
    assert taken == 7
    assert rig.port.unwritten_bytes > 7 * MIB
    assert not rig.port.has_room(MIB)
    assert rig.forward(frame(9, 256))  # still fits
    held = Held()
    record = memoryview(bytearray(HOP.pack(122, Kind.TUNNEL_DATA, 0, 0, 7, 0) + bytes(100)))
    assert rig.port.forward_tunnel(record, 0, len(record), held)  # within a share of its own
    assert held.bytes == len(record)
    rig.driver.settle()
    assert rig.connection.writes == []
    assert rig.port.held_messages == 9
    rig.port.resume_writing()
    rig.driver.settle()
    assert rig.kinds[:2] == [Kind.REQUEST, Kind.TUNNEL_DATA]  # the short ones first
    await until(lambda: not rig.port.held_messages)
    assert len([kind for kind in rig.kinds if kind == Kind.REQUEST]) == 1 + 7 * MIB // 65_536


async def test_a_message_larger_than_the_other_relay_takes_is_refused(rig: Rig) -> None:
    assert not rig.port.has_room(2 * MIB + 1)
    assert not rig.forward(frame(1, 2 * MIB))
    assert rig.forward(frame(1, MIB))


async def test_a_port_that_finishes_writes_everything_first_the_goodbye_last(rig: Rig) -> None:
    assert rig.forward(frame(1, MIB))
    rig.port.control(encode_control(frames.Bye()))
    rig.port.finish()
    rig.driver.settle()
    assert not rig.connection.closed
    await until(lambda: rig.connection.closed)
    assert rig.kinds == [Kind.REQUEST] * 16 + [Kind.BYE]
    rig.port.connection_lost(None)
    assert rig.router.accounts.dropped == {}


async def test_what_a_lost_link_held_is_dropped_and_counted_as_whole_messages(rig: Rig) -> None:
    rig.router.accounts.in_ += 3
    for alias in range(3):
        assert rig.forward(frame(alias, MIB))
    rig.router.accounts.out += 3
    rig.driver.settle()  # a piece or two of the first
    rig.port.connection_lost(None)
    assert rig.router.accounts.dropped == {"link lost": 3}
    assert rig.router.accounts.out == 0
    assert rig.port.held_messages == 0
    assert rig.router.accounts.balance() == 0
