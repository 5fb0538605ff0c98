"""A log that is a copy of a partition shows what is below its limit, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.keeper import NOW_US, Keeper
from unit.relay.store.test_replacing import COPY, UUID, _creation, _end, copied, order

from iris.wire.stream_items import Record
from iris.wire.streams import Copied, Copy, Fetch, Fetched
from relay.store.log import Log


class Session:
    message_limit = 1 << 20


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: Any) -> Iterator[Keeper]:
    """A store with a copy that has three messages."""
    monkeypatch.setattr("support.keeper.Asked.session", Session(), raising=False)
    monkeypatch.setattr("support.keeper.Asked.rests_on", None, raising=False)
    made = Keeper(tmp_path)
    made.ask(_creation(order(definition=copied(), uuid=COPY)), name=made.store.address)
    records = [
        Record(n, 1, "orders", bytes(16), bytes(16), _end(), b"%d" % n, NOW_US) for n in range(3)
    ]
    assert made.ask(Copy(UUID, 0, 3, records, 3), name="copy") == Copied(3, True)
    yield made
    made.store.close()


def shown(keeper: Keeper, start: int = 0) -> list[bytes]:
    found = keeper.ask(Fetch(start, 1 << 20), name="copy")
    assert isinstance(found, Fetched)
    return [item.body for item in found.items if isinstance(item, Record)]


def log_of(keeper: Keeper) -> Log:
    log = keeper.store.streams[COPY].log
    assert log is not None
    return log


def test_readers_are_shown_what_is_below_the_limit_also_after_a_restart(keeper: Keeper) -> None:
    assert shown(keeper) == [b"0", b"1", b"2"]
    keeper.ask(Copy(UUID, 3, 3, [], 3, 2, [2, 7]), name="copy")
    for _ in range(2):
        assert (shown(keeper), shown(keeper, 2)) == ([b"0", b"1"], [])
        log = log_of(keeper)
        assert (log.shown, log.next, log.limit, log.cut) == (2, 3, 2, [2, 7])
        stream = keeper.store.streams[COPY]
        assert (stream.described(bytes(32), "", b"").next, stream.described(bytes(32), "", b"").cut) == (2, [2, 7])  # fmt: skip
        keeper.restart()
    keeper.ask(Copy(UUID, 3, 3, [], 3, 3), name="copy")
    assert shown(keeper) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("limit", [1, 4])
def test_a_limit_does_not_go_back_nor_beyond_the_end(keeper: Keeper, limit: int) -> None:
    log = log_of(keeper)
    log.limit_to(2)
    with pytest.raises(ValueError, match=f"shown: {limit} is not between 2 and 3"):
        log.limit_to(limit)
    assert log.limit == 2


def test_what_was_not_shown_is_trimmed_and_what_was_is_not(keeper: Keeper) -> None:
    log = log_of(keeper)
    log.trim()
    assert shown(keeper) == [b"0", b"1", b"2"]
    log.limit_to(1)
    log.trim()
    log.limit_to(None)
    assert (shown(keeper), log.next) == ([b"0"], 3)
