"""A stream records each message once and in order, and reports what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iris.wire import frames
from iris.wire.codec import END
from iris.wire.kinds import Kind
from relay.store.log import Log
from relay.store.records import Gap, Item, Record
from relay.store.session import Bundle, Flow
from relay.store.stream import Stream

UUID = bytes(16)
MANY = 1 << 20
FLOW = Flow(frames.Declare(0, Kind.PUBLISH, "orders", b"k" * 16, b"s" * 16))


def bundle(first: int, count: int = 1) -> Bundle:
    session: Any = None  # nobody hears of publications
    return Bundle(session, FLOW, 0, END.pack(1, 0, count, first), b"sealed %d" % first)


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    path = str(tmp_path / "log")
    return Stream(path, UUID, Log.create(path, uuid=UUID, definition=b"", created_us=1))


def recorded(stream: Stream) -> list[Any]:
    """Return the bodies, and the number and cause of each gap."""

    def shown(item: Item) -> Any:
        if isinstance(item, Record):
            return item.body
        assert isinstance(item, Gap)
        return item.count, item.cause

    assert stream.log is not None
    return [shown(item) for item in stream.log.read(0, MANY, now_us=9).items]


def test_a_publication_that_comes_again_or_late_is_recorded_once(stream: Stream) -> None:
    for first in (0, 1, 1, 0, 2):
        stream.recorder.record(bundle(first), 5)
    stream.commit(5)
    stream.recorder.record(bundle(2), 6)
    stream.commit(6)
    assert recorded(stream) == [b"sealed 0", b"sealed 1", b"sealed 2"]
    assert stream.recorder.lost == 0


def test_a_gap_between_publications_is_recorded_in_its_place(stream: Stream) -> None:
    stream.recorder.record(bundle(0, 2), 5)
    stream.recorder.record(bundle(5), 5)
    stream.recorder.gap(
        frames.Gap(Kind.PUBLISH, "orders", b"k" * 16, b"s" * 16, 6, 4, "slow receiver"), 5
    )
    stream.recorder.record(bundle(10), 5)
    stream.commit(5)
    gaps = (3, "missing on the way"), (4, "slow receiver")
    assert recorded(stream) == [b"sealed 0", gaps[0], b"sealed 5", gaps[1], b"sealed 10"]
    assert stream.recorder.lost == 7


def test_messages_that_a_full_disk_could_not_store_are_reported_when_it_has_room(
    stream: Stream,
) -> None:
    stream.recorder.record(bundle(0), 5)
    stream.commit(5)
    assert stream.log is not None
    stream.log._database.failed = "no space left"
    for first in (1, 3):
        stream.recorder.record(bundle(first, 2), 6)
        stream.commit(6)
    assert stream.recorder.lost == 4
    stream.reopen(7)
    stream.recorder.record(bundle(5), 8)
    stream.commit(8)
    assert recorded(stream) == [b"sealed 0", (4, "disk write failed"), b"sealed 5"]
