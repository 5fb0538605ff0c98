"""Marks of deleted logs: they outlive the store, and are bounded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from relay.store.ended import NEEDED_US, SUFFIX, Ended
from relay.store.errors import Refuse


def uuid(number: int) -> bytes:
    return number.to_bytes(16)


def test_marks_outlive_the_store_and_other_files_are_not_marks(tmp_path: Path) -> None:
    for name in ("notes.ended", f"{'0' * 31}g.ended", uuid(3).hex()):
        (tmp_path / name).write_bytes(b"")
    Ended(tmp_path).add(uuid(1), 1)
    again = Ended(tmp_path)
    again.load()
    assert again.uuids == [uuid(1)]
    assert uuid(1) in again
    assert uuid(3) not in again


def test_only_marks_that_are_no_longer_needed_make_room(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000
    ended = Ended(tmp_path, most=3)
    for number in range(3):
        ended.add(uuid(number), now_us + number)
    with pytest.raises(Refuse, match="3 streams were deleted within 20 minutes") as refused:
        ended.add(uuid(3), now_us + NEEDED_US - 1)
    assert refused.value.code == "full"
    assert uuid(3) not in ended
    ended.add(uuid(3), now_us + NEEDED_US)
    assert ended.uuids == [uuid(1), uuid(2), uuid(3)]
    assert {path.name for path in tmp_path.iterdir()} == {one.hex() + SUFFIX for one in ended.uuids}
