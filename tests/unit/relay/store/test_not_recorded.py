"""What a stream did not record is noted in it, also where the store itself could not, or was not let."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.keeper import DEFINITION, OWNER, SECOND, UUID, Keeper, order
from support.keeper import Session as Accepting

from iris.wire import frames
from iris.wire.streams import Definition, Described, Refused
from relay.store.log import Log
from relay.store.records import Gap


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
    told = "the relay refused what it records"
    assert gaps(keeper)[-1:] == [(None, told)]
    keeper.store.detached(bytes(16), complete=True)
    keeper.store.attached(keeper.session, first=False)  # type: ignore[arg-type]  # a stand-in
    keeper.store.registered()
    assert gaps(keeper)[-1:] == [(None, told)], "it stands there already"


def test_a_log_that_is_shut_when_the_relay_comes_back_says_so_when_it_opens(
    keeper: Keeper,
) -> None:
    stream = keeper.store.streams[UUID]
    keeper.store.detached(bytes(16), complete=True)
    assert stream.log is not None
    stream.log.close()
    stream.log = stream.consuming = stream.staging = None
    keeper.store.attached(keeper.session, first=False)  # type: ignore[arg-type]  # a stand-in
    keeper.store.registered()
    keeper.store.tend()
    assert stream.log is not None
    assert gaps(keeper) == [(None, "its log could not be opened")]
