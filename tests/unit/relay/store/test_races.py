"""Orders that come while others are carried out, before the relay has answered, and while the store starts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.founded import creation, founded
from support.keeper import (
    DEFINITION,
    NOW_US,
    OWNER,
    SECOND,
    SMALL,
    UUID,
    Asked,
    Keeper,
    order,
)

from iris.crypto.keys import ClusterKey
from iris.wire import frames
from iris.wire.orders import END, Definition, SignedOrder
from iris.wire.streams import Change, Delete, Described, Refused, Settled
from relay.store.errors import Refuse

THIRD = ClusterKey(b"c" * 32)


class Slow(Keeper):
    """Its relay answers what it is asked when `acknowledge` is called."""

    waiting: list[Any]
    number = 1000

    def start(self) -> None:
        super().start()
        self.waiting = []
        self.there: set[int] = set()
        self.session.grant = lambda key, signed, waiter: self.waiting.append((waiter, False))  # type: ignore[method-assign]
        self.session.join = lambda *given: self.waiting.append((given[-1], True))  # type: ignore[method-assign]
        self.session.ask = self.ask_relay  # type: ignore[method-assign]

    def ask_relay(self, build: Any, waiter: Any) -> None:
        if isinstance(asked := build(1), frames.Leave):
            self.there.remove(asked.member)
        self.waiting.append((waiter, False))

    def acknowledge(self, error: str = "") -> None:
        waiting, self.waiting[:] = self.waiting[:], []
        for waiter, joins in waiting:
            self.number += 1
            if joins and not error:
                self.there.add(self.number)
            waiter.set_result(frames.Ack(0, error, self.number))

    def put(self, call: Any, *, name: str = "orders", key: ClusterKey = OWNER) -> Asked:
        """Make a call; its answer may come later."""
        asked = Asked(name, key, call)
        try:
            self.store.calls.handlers[type(call)](asked, call)  # type: ignore[arg-type]
        except Refuse as err:
            asked.refuse(err.code, str(err))
        return asked

    def settle(self) -> None:
        while self.waiting:
            self.acknowledge()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    keeper = Slow(tmp_path)
    keeper.store.now_us = NOW_US
    made = keeper.put(creation(order()), name=keeper.store.address)
    keeper.settle()
    assert isinstance(made.said, Described)
    yield keeper
    keeper.store.close()


def countersigned(
    by: ClusterKey, key: ClusterKey, definition: Definition = DEFINITION, **more: Any
) -> SignedOrder:
    one = order(key, definition, **more)
    return structs.replace(one, by=by.public_key, countersignature=by.countersign_order(one.order))


def test_a_delete_that_comes_while_a_change_is_under_way_ends_the_stream(slow: Slow) -> None:
    both = [order(definition=SMALL, revision=1), countersigned(OWNER, SECOND, SMALL, revision=1)]
    change = slow.put(Change(both))
    assert change.said is None
    delete = slow.put(Delete([order(definition=SMALL, action=END, revision=2)]))
    assert isinstance(delete.said, Settled)
    slow.settle()
    assert isinstance(change.said, Described | Refused)
    assert not slow.there, "it is a member for nothing at its relay"
    assert not slow.store.registration.members
    assert not slow.store.streams
    assert not slow.store.catalogue.by_address
    slow.restart()
    assert not slow.store.streams


@pytest.mark.parametrize(
    "kept", [Definition("orders", "orders.>"), Definition("orders", cluster="work")]
)
def test_a_stream_that_is_deleted_or_paused_before_its_relay_answers_leaves_no_member(
    tmp_path: Path, kept: Definition
) -> None:
    slow = Slow(tmp_path)
    slow.store.now_us = NOW_US
    slow.put(creation(order(definition=kept)), name=slow.store.address)
    slow.put(Change([order(definition=structs.replace(kept, paused=True), revision=1)]))
    slow.settle()
    assert len(slow.there) == 2, "by name and by uuid"
    assert not slow.store.registration.members, "a paused stream takes no share"
    slow.put(Change([order(definition=kept, revision=2)]))
    slow.put(Delete([order(definition=kept, action=END, revision=3)]))
    slow.settle()
    assert not slow.there
    assert not slow.store.registration.members
    slow.store.close()


def test_of_two_orders_of_one_revision_that_come_together_the_second_is_refused(slow: Slow) -> None:
    first = slow.put(
        Change(
            [order(definition=SMALL, revision=1), countersigned(OWNER, SECOND, SMALL, revision=1)]
        )
    )
    second = slow.put(
        Change([order(definition=structs.replace(DEFINITION, paused=True), revision=1)])
    )
    third = slow.put(Delete([order(action=END, revision=1)]))
    slow.settle()
    assert isinstance(first.said, Described)
    for late in (second, third):
        assert isinstance(late.said, Refused)
        assert late.said.code == "revision"
    slow.restart()
    slow.settle()
    assert slow.store.streams[UUID].definition == SMALL


def test_changes_one_after_the_other_are_in_force_in_their_order_when_the_relay_is_slow(
    slow: Slow,
) -> None:
    keys = [countersigned(OWNER, SECOND, revision=1), order(revision=1)]
    changes = [slow.put(Change(keys))]
    for revision in range(2, 6):
        paused = structs.replace(DEFINITION, paused=bool(revision % 2))
        changes.append(slow.put(Change([order(definition=paused, revision=revision)])))
    slow.settle()
    assert all(isinstance(change.said, Described) for change in changes)
    stream = slow.store.streams[UUID]
    assert stream.definition.paused
    assert set(stream.orders) == {OWNER.key_id, SECOND.key_id}
    assert slow.store.catalogue.by_address["orders", SECOND.key_id] is stream


def test_a_create_that_the_relay_refuses_while_it_is_deleted_leaves_nothing(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.store.now_us = NOW_US
    create = slow.put(creation(order()), name=slow.store.address)
    delete = slow.put(Delete([order(action=END, revision=1)]))
    assert isinstance(delete.said, Settled)
    while slow.waiting:
        slow.acknowledge("not that one")
    assert isinstance(create.said, Refused)
    again = slow.put(creation(order()), name=slow.store.address)
    assert isinstance(again.said, Refused)
    assert "deleted" in again.said.detail
    assert not slow.store.streams
    slow.store.close()


def test_a_relay_that_goes_away_while_a_stream_is_made_costs_no_stream(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    slow.store.now_us = NOW_US
    create = slow.put(creation(order()), name=slow.store.address)
    slow.waiting.clear()
    slow.store.detached()
    slow.restart()
    slow.settle()
    assert UUID in slow.store.streams or isinstance(create.said, Refused)
    again = slow.put(creation(order()), name=slow.store.address)
    slow.settle()
    assert isinstance(again.said, Described)
    slow.store.close()


def test_a_key_under_which_another_stream_has_the_name_hides_neither(slow: Slow) -> None:
    """Two streams of one name, under a key each; the first gets the key of the second too, and is then deleted."""
    theirs = founded(SECOND, bytes(16))
    made = slow.put(creation(order(SECOND, uuid=theirs)), name=slow.store.address)
    slow.settle()
    assert isinstance(made.said, Described)
    change = slow.put(Change([order(revision=1), countersigned(OWNER, SECOND, revision=1)]))
    slow.settle()
    assert isinstance(change.said, Described)
    for uuid in (UUID, theirs):
        assert slow.store.catalogue.by_address[uuid.hex(), SECOND.key_id].uuid == uuid
    slow.put(Delete([order(action=END, revision=2)]), name=UUID.hex())
    slow.settle()
    assert slow.store.catalogue.by_address["orders", SECOND.key_id].uuid == theirs
