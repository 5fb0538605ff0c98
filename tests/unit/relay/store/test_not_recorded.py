"""What a stream did not record is noted in it, also where the store itself could not, or was not let."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.keeper import DEFINITION, OWNER, SECOND, UUID, Keeper, order
from support.keeper import Session as Accepting

from iris.wire import frames
from iris.wire.codec import END
from iris.wire.kinds import Kind
from iris.wire.orders import Definition
from iris.wire.streams import STORED, Append, Appended, Described, NewRecord, Outcome, Refused
from relay.store.errors import LogDamaged
from relay.store.log import Log
from relay.store.records import Gap
from relay.store.session import Bundle, Flow
from relay.store.stream import Stream


class Picky(Accepting):
    """A relay that has no room for subscriptions and memberships of clusters while `full`."""

    full = False

    def ask(self, build: Callable[[int], Any], waiter: Any) -> None:
        self._judge(isinstance(build(0), frames.Subscribe), waiter)

    def join(self, name: str, key_ids: Any, kinds: Any, tag: str, waiter: Any) -> None:
        self._judge(name == "all", waiter)

    def _judge(self, recording: bool, waiter: Any) -> None:
        self.error = "there is no room" if self.full and recording else ""
        self._accept(waiter)


def gaps(keeper: Keeper) -> list[tuple[int | None, str]]:
    """How many are missing, and why, in order."""
    keeper.store.commit()
    log = keeper.store.streams[UUID].log
    assert log is not None
    found = log.read(0, 1 << 20, now_us=keeper.now_us).items
    return [(item.count, item.cause) for item in found if isinstance(item, Gap)]


@pytest.fixture(params=["topic", "cluster"])
def definition(request: pytest.FixtureRequest) -> Definition:
    if request.param == "topic":
        return DEFINITION
    return structs.replace(DEFINITION, topic="", cluster="all")


@pytest.fixture
def keeper(tmp_path: Path, definition: Definition) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path)
    keeper.session = Picky()
    keeper.store.attached(keeper.session, first=True)  # type: ignore[arg-type]  # a stand-in
    assert isinstance(keeper.create(order(definition=definition)), Described)
    keeper.store.registered()
    yield keeper
    keeper.store.close()


def test_a_log_that_opens_late_says_that_nobody_counted_what_came_before(keeper: Keeper) -> None:
    keeper.store.close()
    with Log.open(str(keeper.directory / "streams" / UUID.hex())):
        keeper.start()
        keeper.store.registered()
        assert keeper.store.streams[UUID].log is None
    keeper.store.tend()
    assert keeper.store.streams[UUID].log is not None
    assert gaps(keeper) == [(None, "its log could not be opened")]
    keeper.store.tend()
    assert len(gaps(keeper)) == 1


def test_a_relay_that_refuses_what_a_stream_records_leaves_a_gap(
    keeper: Keeper, definition: Definition
) -> None:
    session = keeper.session
    assert isinstance(session, Picky)
    assert gaps(keeper) == []
    session.full = True
    more = order(SECOND, definition, revision=1)
    by = structs.replace(
        more, by=OWNER.public_key, countersignature=OWNER.countersign_order(more.order)
    )
    assert isinstance(keeper.change(order(definition=definition, revision=1), by), Refused)
    cause = "the relay refused what it records"
    assert gaps(keeper)[-1:] == [(None, cause)]
    keeper.store.detached(bytes(16), complete=True)
    keeper.store.attached(keeper.session, first=False)  # type: ignore[arg-type]  # a stand-in
    keeper.store.registered()
    assert gaps(keeper)[-1:] == [(None, cause)], "it stands there already"


def test_a_log_that_is_shut_when_the_relay_comes_back_says_so_when_it_opens(
    keeper: Keeper,
) -> None:
    stream = keeper.store.streams[UUID]
    keeper.store.detached(bytes(16), complete=True)
    assert stream.log is not None
    stream.log.close()
    stream.log = stream.recorder.log = stream.consumer_calls = stream.stage_calls = None
    keeper.store.attached(keeper.session, first=False)  # type: ignore[arg-type]  # a stand-in
    keeper.store.registered()
    keeper.store.tend()
    assert stream.log is not None
    assert gaps(keeper) == [(None, "its log could not be opened")]


class Caller:
    """A call that hears one answer."""

    key_id = b"k" * 16

    def __init__(self) -> None:
        self.said: list[object] = []

    def answer(self, answer: object) -> None:
        self.said.append(answer)

    def refuse(self, code: str, detail: str, *, sure: bool = True) -> None:
        self.said.append(code)


@pytest.mark.parametrize("fault", [LogDamaged("log", "a block is damaged"), struct.error("short")])
def test_ids_that_cannot_be_read_cost_the_appends_that_have_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    path = str(tmp_path / "log")
    with Log.create(path, uuid=UUID, definition=b"", created_us=1) as log:
        stream = Stream(path, UUID, log)
        stream.define(structs.replace(DEFINITION, dedup_window_us=1_000_000))
        named, plain, both = Caller(), Caller(), Caller()

        def unreadable(key: bytes) -> bytes | None:
            raise fault

        monkeypatch.setattr(log.ids._database, "get", unreadable)
        end = END.pack(1, 0, 1, 0)
        one, with_id = NewRecord(0, end, b"x"), NewRecord(0, end, b"x", id_hash=b"h" * 32)
        append = [
            Append(b"s" * 16, [with_id]),
            Append(b"s" * 16, [one]),
            Append(b"s" * 16, [one, with_id]),
        ]
        stream.append(named, append[0])  # type: ignore[arg-type]  # a stand-in, as the others
        session: Any = None  # nobody hears of publications
        flow = Flow(frames.Declare(0, Kind.PUBLISH, "orders", b"k" * 16, b"s" * 16))
        stream.recorder.record(Bundle(session, flow, 0, end, b"sealed"), 5)
        stream.append(plain, append[1])  # type: ignore[arg-type]
        stream.append(both, append[2])  # type: ignore[arg-type]
        stream.commit(5)
        assert log.next == 2, "what was published, and what was appended without an id"
        assert (named.said, both.said) == (["disk"], ["disk"])
        assert plain.said == [Appended([Outcome(STORED, 1)])]
        assert stream.complete
