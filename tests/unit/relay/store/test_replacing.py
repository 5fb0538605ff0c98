"""A copy replaces its source only by orders of their keys; and what is carried to it is checked row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.founded import founded
from support.keeper import NOW_US, OWNER, SECOND, STRANGER, UUID, Keeper, order

from iris.crypto.keys import StoreKey
from iris.wire.codec import END
from iris.wire.consumers import Consume
from iris.wire.orders import ANY_REVISION, Definition, Origin, Replaced, SignedOrder
from iris.wire.stream_items import DEAD_KIND, DeadLetter, Record, dead_uuid
from iris.wire.streams import (
    Append,
    Carry,
    Change,
    Copied,
    Copy,
    Create,
    Describe,
    Described,
    Fetch,
    FetchState,
    Refused,
    StateRow,
    StateRows,
    Supersede,
    encode,
)
from relay.store import cursor, state
from relay.store.cursor import Counts, Settings, State

PLAIN = Definition("orders")
COPY = founded(OWNER, bytes(range(1, 17)))
OTHER_STORE = StoreKey(b"t" * 32)


def copied(**changes: Any) -> Definition:
    """The definition of a copy of `orders`."""
    origin = Origin(UUID, "orders")
    return structs.replace(Definition("copy", mirror=UUID.hex(), origins=(origin,)), **changes)


def replaced(revision: int, at: int = 0, **changes: Any) -> Definition:
    """The definition of that copy once it has replaced `orders`."""
    return copied(
        name="orders", mirror="", replaces=Replaced(UUID, revision, at, "copy"), **changes
    )


def shown(definition: Definition, **more: Any) -> SignedOrder:
    return order(more.pop("key", OWNER), definition, uuid=COPY, store=OTHER_STORE, revision=1, **more)  # fmt: skip


@pytest.fixture
def keeper(tmp_path: Path) -> Any:
    made = Keeper(tmp_path)
    assert isinstance(made.create(order(OWNER, PLAIN)), Described)
    yield made
    made.store.close()


@pytest.mark.parametrize("what", ["stranger", "forged", "still a copy", "of another log", "nothing"])  # fmt: skip
def test_only_an_order_of_a_key_of_the_stream_supersedes_it(keeper: Keeper, what: str) -> None:
    wrong = {
        "stranger": shown(replaced(1), key=STRANGER),
        "forged": structs.replace(
            shown(replaced(1)), signature=shown(replaced(1), signer=STRANGER).signature
        ),
        "still a copy": shown(copied(replaces=Replaced(UUID, 1, 0, "copy"))),
        "of another log": shown(
            structs.replace(
                replaced(1), origins=(Origin(COPY, "orders"),), replaces=Replaced(COPY, 1)
            )
        ),
        "nothing": shown(structs.replace(replaced(1), replaces=None)),
    }[what]
    said = keeper.ask(Supersede([wrong]))
    assert isinstance(said, Refused)
    assert said.code == "order"
    assert not keeper.store.streams[UUID].why_superseded
    assert isinstance(keeper.ask(Supersede([shown(replaced(1))])), Described)
    assert keeper.store.streams[UUID].why_superseded


def test_a_stream_that_was_changed_since_is_not_superseded(keeper: Keeper) -> None:
    assert isinstance(keeper.change(order(OWNER, structs.replace(PLAIN, max_messages=1), revision=1)), Described)  # fmt: skip
    said = keeper.ask(Supersede([shown(replaced(1))]))
    assert isinstance(said, Refused)
    assert said.code == "revision"
    assert isinstance(keeper.ask(Supersede([shown(replaced(2))])), Described)


def test_an_order_for_a_lost_stream_supersedes_it_after_any_time_and_for_good(
    keeper: Keeper,
) -> None:
    keeper.now_us = NOW_US + 10**14
    said = keeper.ask(Supersede([shown(replaced(ANY_REVISION, 7))]))
    assert isinstance(said, Described)
    assert said.superseded is not None
    assert (said.superseded.uuid, said.superseded.next) == (COPY, 7)
    again = keeper.ask(Supersede([shown(replaced(ANY_REVISION, 7))]), name=UUID.hex())
    assert isinstance(again, Described)
    # Another order comes too late.
    late = order(OWNER, replaced(ANY_REVISION, 9), uuid=founded(OWNER, bytes(16)), store=OTHER_STORE, revision=1)  # fmt: skip
    assert keeper.ask(Supersede([late]), name=UUID.hex()).code == "superseded"
    for _ in range(2):
        assert keeper.ask(Describe()).code in ("leaving", "no-stream")  # it has lost its name
        assert isinstance(keeper.ask(Describe(), name=UUID.hex()), Described)
        for call in (
            Append(bytes(16), []),
            Fetch(0, 1, 1000),
            Consume("work", bytes(16), 1, 1),
        ):
            assert keeper.ask(call, name=UUID.hex()).code == "superseded"
        keeper.restart()


def test_a_changed_order_on_the_disk_does_not_supersede(keeper: Keeper) -> None:
    keeper.ask(Supersede([shown(replaced(1))]))
    stream = keeper.store.streams[UUID]
    forged = [shown(replaced(1), key=STRANGER)]
    stored = structs.replace(stream.charter.definition_file, superseded=forged)
    assert stream.log is not None
    stream.log.define(encode(stored))
    keeper.restart()
    assert "its orders are not valid" in keeper.store.streams[UUID].failed


# -- the copy ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    """A store with the copy alone, which is to replace `orders`."""
    made = Keeper(tmp_path)
    first = order(OWNER, copied(), uuid=COPY)
    created = made.ask(_creation(first), name=made.store.address)
    assert isinstance(created, Described)
    said = made.ask(_change(copied(replaces=Replaced(UUID)), 1), name="copy")
    assert isinstance(said, Described)
    yield made
    made.store.close()


def _creation(first: SignedOrder) -> Any:
    return Create([first], bytes(range(1, 17)))


def _change(definition: Definition, revision: int, *keys: Any) -> Any:
    return Change([order(key, definition, uuid=COPY, revision=revision) for key in keys or (OWNER,)])  # fmt: skip


def state_of(position: int) -> bytes:
    return cursor.encode(State(Settings(), 0, position, (0, 0), [], [], Counts()))


def test_a_promotion_names_where_the_copy_ends_and_every_key_signs(copy: Keeper) -> None:
    said = copy.ask(_change(replaced(5, at=1), 2), name="copy")
    assert (said.code, "ends at offset 0, not 1" in said.detail) == ("revision", True)
    wrong = structs.replace(replaced(5), name="bills")
    assert copy.ask(_change(wrong, 2), name="copy").code == "invalid"
    stream = copy.store.streams[COPY]
    both = {**stream.charter.orders, SECOND.key_id: stream.charter.orders[OWNER.key_id]}
    stream.charter = structs.replace(stream.charter, orders=both)
    said = copy.ask(_change(replaced(5), 2), name="copy")
    assert (said.code, "only if all its keys sign" in said.detail) == ("order", True)
    stream.charter = structs.replace(stream.charter, orders={OWNER.key_id: both[OWNER.key_id]})
    assert isinstance(copy.ask(_change(replaced(5), 2), name="copy"), Described)
    assert copy.ask(Describe(), name="copy").code == "no-stream"
    assert isinstance(copy.ask(Describe(), name="orders"), Described)
    # It is fixed from then on.
    again = structs.replace(replaced(5), replaces=Replaced(UUID, 6, 0, "copy"))
    assert copy.ask(_change(again, 3), name="orders").code == "invalid"


def test_a_copy_that_is_to_replace_its_source_has_no_consumers_of_its_own(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper.ask(_creation(order(OWNER, copied(), uuid=COPY)), name=keeper.store.address)
    stream = keeper.store.streams[COPY]
    assert stream.log is not None
    stream.log.cursors.put("own", state_of(0))
    said = keeper.ask(_change(copied(replaces=Replaced(UUID)), 1), name="copy")
    assert (said.code, "has consumers" in said.detail) == ("invalid", True)
    assert stream.consumer_calls is not None
    assert stream.consumer_calls.delete("own")
    assert isinstance(keeper.ask(_change(copied(replaces=Replaced(UUID)), 1), name="copy"), Described)  # fmt: skip
    assert keeper.ask(Consume("own", bytes(16), 1, 1), name="copy").code == "consumer"
    keeper.store.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"cwork", b"damaged"),
        (b"cwork", state_of(1)),  # beyond the end
        (b"c", state_of(0)),
        (b"p" + bytes(15), bytes(20)),
        (b"p" + bytes(16), bytes(21)),
        (b"p" + bytes(16), bytes(20 + 12 * 65)),
        (b"h" + bytes(32), bytes(19)),
        (b"q" + bytes(40), b"x"),
        (b"wspark", bytes(44)),
        (b"vspark", bytes(44)),
        (b"t" + bytes(40), bytes(100)),
        (b"u\x05spark" + bytes(32), bytes(20)),
        (b"l", bytes(7)),
        (b"l", bytes(9)),
        (b"n", bytes(8)),  # the end of the log is not state
        (b"i", b"identity"),
        (b"s" + bytes(8), bytes(40)),
        (b"z", b""),
    ],
)
def test_a_row_that_is_malformed_or_not_of_the_state_is_refused(
    copy: Keeper, key: bytes, value: bytes
) -> None:
    said = _carried(copy, Carry(UUID, [StateRow(key, value)], first=True, last=True))
    assert isinstance(said, ValueError)
    assert copy.store.streams[COPY].log is not None


def _carried(keeper: Keeper, call: Carry) -> Any:
    try:
        return keeper.ask(call, name="copy")
    except ValueError as err:  # the store refuses the call then
        return err


def test_more_rows_than_a_stream_can_have_are_refused(copy: Keeper, monkeypatch: Any) -> None:
    monkeypatch.setitem(state.MOST, b"c", 2)
    rows = [StateRow(b"cw%d" % n, state_of(0)) for n in range(3)]
    assert isinstance(_carried(copy, Carry(UUID, rows[:2], first=True)), Copied)
    assert isinstance(_carried(copy, Carry(UUID, rows[1:2])), Copied)  # it counts once
    assert "more rows 'c'" in str(_carried(copy, Carry(UUID, rows[2:])))


def test_what_is_carried_replaces_what_was_carried_before_and_ends_with_a_restart(
    copy: Keeper,
) -> None:
    assert _carried(copy, Carry(UUID, [StateRow(b"cold", state_of(0))], True, True)).taken
    assert _carried(copy, Carry(UUID, [StateRow(b"cnew", state_of(0))], True)).taken
    copy.restart()
    assert not _carried(copy, Carry(UUID, [StateRow(b"cx", state_of(0))], last=True)).taken
    assert _carried(copy, Carry(UUID, [StateRow(b"cnew", state_of(0))], True, True)).taken
    stream = copy.store.streams[COPY]
    assert stream.log is not None
    assert stream.log.cursors.names() == ["new"]


@pytest.mark.parametrize("what", ["another log", "no copy", "not announced"])
def test_state_is_carried_to_the_copy_that_waits_for_it_alone(tmp_path: Path, what: str) -> None:
    keeper = Keeper(tmp_path)
    definition = PLAIN if what == "no copy" else copied()
    name = definition.name
    keeper.ask(_creation(order(OWNER, definition, uuid=COPY)), name=keeper.store.address)
    if what == "another log":
        keeper.ask(_change(copied(replaces=Replaced(UUID)), 1), name=name)
    uuid = COPY if what == "another log" else UUID
    assert keeper.ask(Carry(uuid, [], True, True), name=name).code == "invalid"
    keeper.store.close()


def test_letters_are_carried_once_and_refer_to_the_copy(copy: Keeper) -> None:
    letter = DeadLetter(UUID, 3, "work", 2, "broken")
    record = Record(0, DEAD_KIND, "orders", OWNER.key_id, UUID, _end(), encode(letter), NOW_US)
    assert _carried(copy, Carry(UUID, [], True, True)).taken
    for _ in range(2):  # a repeated call adds nothing, also if the store has started again
        assert _carried(copy, Carry(UUID, letters=[record], next=1)) == Copied(1, True)
        copy.restart()
    dead = copy.store.streams[dead_uuid(COPY)]
    assert dead.log is not None
    (found,) = dead.log.read(0, 1 << 20, now_us=NOW_US).items
    assert found.sender_id == COPY  # type: ignore[union-attr]  # it is a record
    assert encode(structs.replace(letter, uuid=COPY)) == found.body  # type: ignore[union-attr]
    other = structs.replace(record, offset=1, kind=1)
    assert "not a dead letter" in str(_carried(copy, Carry(UUID, letters=[other], start=1, next=2)))


def _end() -> bytes:
    return END.pack(NOW_US, 0, 1, 0)


def test_a_stream_tells_its_state_while_it_is_being_handed_over_alone(keeper: Keeper) -> None:
    assert keeper.ask(FetchState()).code == "invalid"
    keeper.change(order(OWNER, structs.replace(PLAIN, successor=COPY), revision=1))
    assert keeper.ask(FetchState()) == StateRows([])
    for call in (Append(bytes(16), []), Copy(UUID, 0, 0, []), Consume("work", bytes(16), 1, 1)):
        said = keeper.ask(call)
        assert said.code in ("leaving", "invalid")
    keeper.restart()
    assert keeper.ask(Append(bytes(16), [])).code == "leaving"
    keeper.change(order(OWNER, PLAIN, revision=2))
    assert keeper.ask(FetchState()).code == "invalid"
