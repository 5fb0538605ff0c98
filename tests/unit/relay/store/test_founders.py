"""A uuid belongs to the key that founded its stream: nobody else creates a log with it, at any store, and an order that
creates a log is carried out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.founded import SALTS, countersigned, creation, founded
from support.keeper import DEFINITION, OWNER, SECOND, STRANGER, UUID, Keeper, order

from iris.crypto.keys import ClusterKey, StoreKey
from iris.wire.orders import END, Definition, SignedOrder, log_uuid
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Create, Described, Refused, Settled

LETTERS = dead_uuid(UUID)
PART = Definition("orders/1", parent=UUID, partition=1)
PART_UUID = founded(OWNER, b"1" * 16)


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Keeper]:
    """Another store than the one that has the stream of the owner."""
    keeper = Keeper(tmp_path)
    yield keeper
    keeper.store.close()


def created(keeper: Keeper, orders: Sequence[SignedOrder], salt: bytes) -> Any:
    return keeper.ask(Create(list(orders), salt), name=keeper.store.address)


def theirs(definition: Definition = DEFINITION, uuid: bytes = UUID) -> SignedOrder:
    return order(STRANGER, definition, uuid=uuid)


OWN = countersigned(STRANGER, theirs())
ATTACKS: dict[str, tuple[list[SignedOrder], bytes]] = {
    "the uuid under another key": ([theirs()], SALTS[UUID]),
    "with a salt of his own": ([theirs()], bytes(16)),
    "without a name in the way": ([theirs(Definition("others"))], SALTS[UUID]),
    "the uuid of its dead letters": ([theirs(uuid=LETTERS)], SALTS[UUID]),
    "the uuid of a partition": ([theirs(PART, PART_UUID)], SALTS[PART_UUID]),
    "a recorded order after his own": ([theirs(), order()], SALTS[UUID]),
    "his own after a recorded order": ([order(), theirs()], SALTS[UUID]),
    "his own, countersigned by himself": ([order(), OWN], SALTS[UUID]),
    "a recorded order, countersigned by him": (
        [theirs(), countersigned(STRANGER, order())], SALTS[UUID],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ATTACKS)
def test_who_knows_the_uuid_of_a_stream_creates_no_log_of_it_and_gets_into_none(
    another: Keeper, what: str
) -> None:
    for _ in range(2):
        answer = created(another, *ATTACKS[what])
        assert isinstance(answer, Refused), answer
        assert answer.code == "order"
        assert not another.store.streams
        assert not list((another.directory / "streams").iterdir())
        another.restart()
    # The owner of the uuid can use it, also afterwards.
    assert isinstance(another.create(order()), Described)
    assert set(another.store.streams[UUID].orders) == {OWNER.key_id}


def test_a_uuid_says_which_key_founded_it_and_nothing_else() -> None:
    uuids = {
        log_uuid(key.key_id, salt) for key in (OWNER, SECOND) for salt in (bytes(16), b"1" * 16)
    }
    assert len(uuids) == 4
    assert log_uuid(OWNER.key_id, SALTS[UUID]) == UUID


def test_the_founder_brings_its_other_keys_in_and_each_of_them_counts(another: Keeper) -> None:
    second = countersigned(OWNER, order(SECOND))
    assert isinstance(another.create(order(), second), Described)
    charter = another.store.streams[UUID].charter
    assert (charter.founder, set(charter.admitted)) == (OWNER.key_id, {SECOND.key_id})
    another.restart()
    assert set(another.store.streams[UUID].orders) == {OWNER.key_id, SECOND.key_id}
    end = order(SECOND, action=END, revision=1)
    assert isinstance(another.delete(end, key=SECOND), Settled)


def test_a_create_is_void_once_its_log_was_deleted_also_after_a_restart_and_at_another_store(
    another: Keeper, tmp_path: Path
) -> None:
    recorded = creation(order())
    assert isinstance(another.ask(recorded, name=another.store.address), Described)
    assert isinstance(another.delete(order(action=END, revision=1)), Settled)
    for _ in range(2):
        answer = another.ask(recorded, name=another.store.address)
        assert isinstance(answer, Refused)
        assert not another.store.streams
        another.restart()
    elsewhere = Keeper(tmp_path / "elsewhere", key=StoreKey(b"e" * 32))
    answer = elsewhere.ask(recorded, name=elsewhere.store.address)
    assert isinstance(answer, Refused)
    assert "another store" in answer.detail
    elsewhere.store.close()


def test_recorded_orders_do_nothing_a_second_time(another: Keeper) -> None:
    """Orders of each kind, in calls of somebody who has a channel, before and after a restart."""
    small = Definition("orders", "orders.>", max_messages=7)
    keys: list[tuple[ClusterKey, Any]] = [
        (OWNER, [order(definition=small, revision=1)]),
        (OWNER, [order(revision=2), countersigned(OWNER, order(SECOND, revision=2))]),
        (SECOND, [order(SECOND, small, revision=3)]),
    ]
    assert isinstance(another.create(order()), Described)
    for key, orders in keys:
        assert isinstance(another.change(*orders, key=key), Described)
    for _ in range(2):
        for key, orders in keys[:-1]:
            answer = another.change(*orders, key=key)
            assert isinstance(answer, Refused)
            assert answer.code == "revision"
        for revision in (1, 2, 3):
            answer = another.delete(order(action=END, revision=revision))
            assert isinstance(answer, Refused)
            assert answer.code == "revision"
        stream = another.store.streams[UUID]
        assert (stream.definition, len(stream.orders)) == (small, 2)
        another.restart()
