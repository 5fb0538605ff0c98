"""Retention knows entries by the outlines of their segments: it reads none of them, unless it has to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iris.wire.codec import END
from relay.store import segments
from relay.store.chain import Chain
from relay.store.log import Log
from relay.store.records import Entry
from relay.store.segments import Limits

MANY = 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "orders")


@pytest.fixture
def log(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 4)
    with Log.create(path, uuid=b"\x07" * 16, definition=b"", created_us=5) as log:
        yield log


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where entries were read from."""
    walked: list[int] = []
    walk = Chain.walk

    def noted(self: Chain, start: int, end: int | None = None) -> Any:
        walked.append(start)
        return walk(self, start, end)

    monkeypatch.setattr(Chain, "walk", noted)
    return walked


def fill(log: Log, first: int, count: int, **more: Any) -> None:
    """Append records of 1, 2 and 3 messages in turn, as several batches."""
    for number in range(first, first + count):
        end = END.pack(1_000, 2_000, 1 + number % 3, 77)
        body = b"%d" % number * (1 + number % 5)
        entry = Entry(0x48, "orders", b"k" * 16, b"s" * 16, end, body, **more)
        log.append([entry] * (1 + number % 2), now_us=number)


def kept(log: Log) -> list[tuple[int, int]]:
    return [(item.first, item.next) for item in log.read(log.oldest, MANY, now_us=0).items]


@pytest.mark.parametrize(
    "limits", [Limits(max_messages=31), Limits(max_bytes=2500), Limits(max_age_us=11)]
)
def test_retention_reads_no_entry_and_drops_what_it_would_have_dropped(
    path: str, log: Log, limits: Limits, walked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(log, 0, 30)
    log.enforce(limits, now_us=30)
    fill(log, 30, 3)
    log.enforce(limits, now_us=33)
    assert log.oldest > 0
    assert not walked
    by_outline = kept(log)
    log.close()
    monkeypatch.setattr("relay.store.chain.unpack_outline", lambda segment, row: None)
    with Log.open(path) as again:
        again.enforce(limits, now_us=33)
        assert kept(again) == by_outline
        assert again.messages == sum(after - first for first, after in by_outline)


def test_a_log_that_is_opened_again_goes_on_by_outlines(
    path: str, log: Log, walked: list[int]
) -> None:
    fill(log, 0, 30)
    log.enforce(Limits(max_messages=31), now_us=30)
    before = kept(log), log.messages, log.size_bytes
    log.close()
    walked.clear()
    with Log.open(path) as again:
        assert (kept(again), again.messages, again.size_bytes) == before
        walked.clear()
        again.enforce(Limits(max_messages=17), now_us=31)
        assert again.messages <= 17
        assert not walked


def test_a_damaged_outline_is_not_believed(log: Log, walked: list[int]) -> None:
    fill(log, 0, 30)
    database = log._database
    for row, value in list(database.rows(b"x")):
        batch = database.batch()
        batch.put(b"x" + row, value[:-1] + bytes([value[-1] ^ 1]))
        database.write(batch, log.next, sync=True)
    log.enforce(Limits(max_messages=31), now_us=30)
    assert walked
    assert log.messages <= 31


def test_entries_with_rows_of_their_own_are_read_so_that_those_go_with_them(
    log: Log, walked: list[int]
) -> None:
    fill(log, 0, 12, key_hash=b"h" * 32)
    assert not list(log._database.rows(b"x"))
    log.enforce(Limits(max_messages=7), now_us=30)
    assert walked


def test_a_segment_that_was_compacted_is_read(log: Log, walked: list[int]) -> None:
    fill(log, 0, 2, expires_us=5)
    fill(log, 2, 12)
    assert list(log._database.rows(b"x"))
    before = len(list(log._database.rows(b"x")))
    while not log.compact(now_us=20):
        pass
    assert len(list(log._database.rows(b"x"))) == before - 1
    walked.clear()
    log.enforce(Limits(max_messages=log.messages - 1), now_us=20)
    assert walked == [0]


def test_outlines_go_with_their_segments(log: Log) -> None:
    fill(log, 0, 30)
    assert list(log._database.rows(b"x"))
    log.enforce(Limits(max_messages=1), now_us=30)
    assert len(list(log._database.rows(b"x"))) <= 1
    assert len(list(log._database.rows(b"s"))) <= 1


def test_a_log_that_is_shorter_than_a_segment_remembers_no_more_than_it_holds(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Log.create(path, uuid=b"\x07" * 16, definition=b"", created_us=5) as log:
        for first in range(0, 400, 10):
            fill(log, first, 10)
            log.enforce(Limits(max_messages=20), now_us=first)
        chain = log._chain
        assert chain.segments == type(chain.segments)()
        assert len(chain.open_slots or ()) + len(chain.head or ()) <= 3 * chain.open.entries
