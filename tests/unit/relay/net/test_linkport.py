"""A link's port, between the router and a connection: what goes first, what is refused, and what is counted when it
ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from iris.crypto.keys import NetworkKey
from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import ALIAS, ALIAS_AT, END, HOP, KIND_AT, PORTION_BYTES, encode_control
from iris.wire.kinds import Kind
from relay.config import RelayConfig
from relay.core.ports import Held
from relay.daemon import make_router
from relay.net.dialling import LINKED
from relay.net.linkport import LinkPort, Refused
from relay.net.links import LinkHub
from relay.net.longframes import BULK_TURN_BYTES
from relay.net.ports import Driver
from relay.net.turns import SHARE_NS

MIB = 1 << 20


class Connection(asyncio.Transport):
    """Takes what is written, in turns of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = self.aborted = False
        self.reading = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def write(self, chunks: Any, size: int = 0) -> None:
        data = b"".join(chunks)
        if data:
            self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

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
        self.port.turn.begin(self.port, self.connection)
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


async def test_a_fault_while_one_port_is_written_costs_that_port_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = LinkPort(rig.hub, "peer:2", rig.hub._context)
    broken.made = True
    broken._transport = rig.connection

    def fail(chunks: list[bytes]) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(broken, "_write", fail)
    for _ in range(2):
        broken.control(encode_control(frames.Beat(1)))
        rig.port.control(encode_control(frames.Beat(2)))
        rig.driver.settle()
    assert rig.kinds == [Kind.BEAT] * 2
    assert rig.connection.aborted
    assert broken.reason == "internal error"
    assert [record.message for record in caplog.records if record.exc_info] == ["port.fault"]


async def test_a_fault_when_something_is_due_does_not_stop_the_clock(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def fail() -> None:
        called.append(rig.router.now_us)
        if len(called) < 3:
            raise RuntimeError("a bug")
        rig.driver.close()
        rig.router.mesh.deadline_us = 1 << 62

    monkeypatch.setattr(rig.router, "expire", fail)
    monkeypatch.setattr("relay.net.ports.FAULT_PAUSE_US", 20_000)
    rig.router.mesh.deadline_us = 1
    rig.driver.settle()
    await until(lambda: len(called) == 3)
    assert called[1] - called[0] >= 20_000
    assert [record.message for record in caplog.records if record.exc_info] == ["router.fault"] * 2


async def test_a_link_is_alive_when_any_part_of_a_frame_comes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = link_frames.LinkHello(1, 0, b"\x42" * 16, 5, 5, MIB)
    rig.port.link = link = rig.router.link_up(rig.port, hello)
    assert link.pulse is not None
    link.pulse.last_us = 0

    class Clear:
        """No TLS: what comes is a part of something."""

        def received(self, data: memoryview) -> None:
            assert len(data) == 100

        def read_into(self, buffer: memoryview) -> int:
            return 0

    rig.port._handshaking = False
    monkeypatch.setattr(rig.port, "_secured", Clear(), raising=False)
    rig.port.buffer_updated(100)
    assert link.pulse.last_us == rig.router.now_us > 0
    rig.driver.close()


async def test_a_connection_that_is_given_up_before_it_is_made_is_closed_when_it_is(
    rig: Rig,
) -> None:
    port = LinkPort(rig.hub, "peer:2", rig.hub._context)
    port.refuse(Refused(LINKED))
    rig.driver.settle()
    assert port.ended
    assert (await port.outcome).what == LINKED
    port.connection_made(rig.connection)
    assert rig.connection.aborted
    assert port not in rig.hub.ports


FRAME_NS = SHARE_NS // 10
"""How long each frame takes, by the clock of the test."""


class Clear:
    """In the place of TLS: what comes is what is read."""

    def __init__(self) -> None:
        self.data = b""

    def received(self, data: memoryview) -> None:
        self.data += data

    def read_into(self, buffer: memoryview) -> int:
        got, self.data = self.data[: len(buffer)], self.data[len(buffer) :]
        buffer[: len(got)] = got
        return len(got)


class Receiver:
    """A port of a link that is up, and the frames that reached the router, by their alias or base."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.port = port = rig.port
        self.numbers: list[int] = []
        self.then: dict[int, Callable[[], None]] = {}
        """What happens once a frame was heard."""
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        port.link = rig.router.link_up(port, link_frames.LinkHello(1, 0, b"\x42" * 16, 5, 5, MIB))
        port.made = True
        port._handshaking = False
        monkeypatch.setattr(rig.router, "_link_table", [self._take] * 256)
        port._entry = rig.router.entry(port.link)
        port._reader.on_frame, port._reader.may_go_on = port._frame, port._may_go_on
        port._reader.limit = MIB
        monkeypatch.setattr(port, "_secured", Clear(), raising=False)

    def _take(self, link: object, buf: memoryview, start: int, end: int) -> bool:
        number: int = ALIAS.unpack_from(buf, start + ALIAS_AT)[0]
        self.numbers.append(number)
        self.now_ns += FRAME_NS
        self.then.pop(number, int)()
        return buf[start + KIND_AT] == Kind.GAP

    def come(self, *numbers: int, kind: int = Kind.GAP) -> None:
        """Frames come at once."""
        self.bytes_come(b"".join(frame(number, 54, kind) for number in numbers))

    def bytes_come(self, data: bytes) -> None:
        assert len(data) < len(self.rig.driver.buffer.view)
        self.rig.driver.buffer.view[: len(data)] = data
        self.port.buffer_updated(len(data))


@pytest.fixture
async def receiver(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    yield Receiver(rig, monkeypatch)
    rig.driver.close()


async def test_a_burst_takes_several_turns_and_keeps_its_order(receiver: Receiver) -> None:
    receiver.come(*range(100))
    assert receiver.numbers == list(range(10))
    assert not receiver.rig.connection.reading  # so that no more than this can wait
    await until(lambda: len(receiver.numbers) > 10)
    assert receiver.numbers == list(range(20))
    await until(lambda: receiver.rig.connection.reading)
    assert receiver.numbers == list(range(100))
    receiver.come(*range(100, 102))
    assert receiver.numbers == list(range(102))


async def test_messages_are_looked_at_by_their_bytes(receiver: Receiver) -> None:
    receiver.come(*range(100), kind=Kind.REQUEST)
    first = len(receiver.numbers)
    size = len(frame(0, 54, Kind.REQUEST))
    assert (first - 1) * size < PORTION_BYTES <= first * size
    await until(lambda: receiver.rig.connection.reading)
    assert receiver.numbers == list(range(100))


async def test_a_share_with_nothing_behind_it_makes_nobody_wait(receiver: Receiver) -> None:
    receiver.come(*range(9))
    assert receiver.rig.connection.reading
    receiver.come(*range(9))
    assert receiver.rig.connection.reading
    assert receiver.numbers == [*range(9), *range(9)]


async def test_a_message_behind_a_share_keeps_its_place(receiver: Receiver) -> None:
    data = [frame(number, 54, Kind.GAP) for number in range(30)]
    data[20:20] = [frame(number, 54, Kind.PUBLISH) for number in (100, 101)]
    receiver.bytes_come(b"".join(data))
    await until(lambda: receiver.rig.connection.reading)
    assert receiver.numbers == [*range(20), 100, 101, *range(20, 30)]


async def test_while_a_burst_waits_another_connection_is_served(receiver: Receiver) -> None:
    receiver.come(*range(30))
    asyncio.get_running_loop().call_soon(receiver.numbers.append, -1)
    await until(lambda: receiver.rig.connection.reading)
    assert 0 < receiver.numbers.index(-1) < 30
    receiver.numbers.remove(-1)
    assert receiver.numbers == list(range(30))


async def test_what_comes_although_reading_pauses_is_handled_after_what_waits(
    receiver: Receiver,
) -> None:
    receiver.come(*range(30))
    first = list(receiver.numbers)
    receiver.come(*range(30, 60))
    assert receiver.numbers == first
    await until(lambda: receiver.rig.connection.reading)
    assert receiver.numbers == list(range(60))


@pytest.mark.parametrize("at", [0, 20], ids=["in the first turn", "in a later one"])
async def test_frames_that_wait_when_a_connection_ends_are_not_handled(
    receiver: Receiver, at: int
) -> None:
    receiver.then[at] = lambda: receiver.port.abort("cut")
    receiver.come(*range(30))
    await until(lambda: receiver.port.ended)
    for _ in range(8):
        await asyncio.sleep(0)
    assert receiver.numbers == list(range(at + 1))
    receiver.port.connection_lost(None)


async def test_frames_that_wait_when_the_other_side_cuts_a_connection_are_not_handled(
    receiver: Receiver,
) -> None:
    receiver.come(*range(30))
    first = list(receiver.numbers)
    receiver.port.connection_lost(ConnectionResetError())
    for _ in range(8):
        await asyncio.sleep(0)
    assert receiver.numbers == first != list(range(30))


async def test_a_broken_rule_among_frames_that_waited_ends_the_link_and_is_reported(
    receiver: Receiver,
) -> None:
    def broken() -> None:
        raise PeerProtocolError("a rule")

    receiver.then[20] = broken
    receiver.come(*range(30))
    await until(lambda: receiver.rig.connection.closed)
    assert receiver.numbers == list(range(21))
    assert receiver.rig.hub.protocol_errors == 1
    assert receiver.rig.kinds[-1] == Kind.ERROR
    assert receiver.rig.connection.reading  # or the ERROR may be lost with what was not read


async def test_a_relay_that_stops_while_frames_wait_closes_the_connection(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.come(*range(30))
    first = list(receiver.numbers)
    assert receiver.port.waits
    receiver.port.leave("stopping")
    receiver.rig.driver.settle()
    for _ in range(8):
        await asyncio.sleep(0)
    assert receiver.rig.kinds[-1] == Kind.BYE
    assert receiver.rig.connection.closed
    assert receiver.rig.connection.reading
    assert receiver.numbers == first


async def test_what_waits_for_a_link_counts_in_the_relays_budget_until_it_is_written_or_lost(
    rig: Rig,
) -> None:
    budget, port = rig.driver.budget, rig.port
    port.pause_writing()
    for alias in range(4):
        assert rig.forward(frame(alias, MIB))
        assert rig.forward(frame(10 + alias, 1000))
    rig.driver.settle()
    assert 4 * MIB < budget.bytes == port.unwritten_bytes
    assert list(budget.waiting) == [port]
    port.resume_writing()
    await until(lambda: not port.held_messages)
    assert budget.bytes == 0
    assert not budget.waiting
    port.pause_writing()
    assert rig.forward(frame(1, MIB))
    assert rig.forward(frame(2, 1000))
    rig.driver.settle()
    assert budget.bytes > MIB
    port.connection_lost(None)
    assert budget.bytes == 0
    assert not budget.waiting


async def test_a_long_frame_is_refused_when_the_relays_budget_is_full(rig: Rig) -> None:
    rig.driver.budget.limit_bytes = 2 * MIB
    rig.port.pause_writing()
    taken = 0
    while rig.forward(frame(taken, MIB)):
        taken += 1
    assert taken == 1
    assert rig.driver.budget.full
    assert rig.driver.budget.bytes <= 2 * MIB
