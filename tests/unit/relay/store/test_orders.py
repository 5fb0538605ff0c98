"""Who may keep, change and end a stream: a store accepts only valid orders, and others have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.founded import SALTS, founded
from support.keeper import (
    DEFINITION,
    NOW_US,
    OWNER,
    SECOND,
    SMALL,
    STRANGER,
    UUID,
    Asked,
    Keeper,
    order,
)

from iris.crypto.keys import ClusterKey, StoreKey
from iris.wire.orders import END, ORDER_FRESH_US, Definition, Origin, SignedOrder, decode_order
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Change, Describe, Described, Refused, Settled
from relay.store.authority import DefinitionFile
from relay.store.errors import Refuse
from relay.store.log import Log

OTHER_UUID = founded(OWNER, bytes(range(16, 32)))
STRANGERS_UUID = founded(STRANGER, bytes(16))
SALT = SALTS[UUID]
FAR_US = 1 << 62
LATER_US = NOW_US + 10 * ORDER_FRESH_US


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """A store with one stream, under the key of its owner."""
    keeper = Keeper(tmp_path)
    assert isinstance(keeper.create(order()), Described)
    yield keeper
    keeper.store.close()


def countersigned(
    by: ClusterKey = OWNER, key: ClusterKey = SECOND, definition: Definition = DEFINITION, **more: Any
) -> SignedOrder:  # fmt: skip
    one = order(key, definition, **{"revision": 1, **more})
    return structs.replace(one, by=by.public_key, countersignature=by.countersign_order(one.order))


def refused(answer: Any, code: str, text: str) -> None:
    assert isinstance(answer, Refused), answer
    assert (answer.code, text in answer.detail) == (code, True), answer


def key_ids(keeper: Keeper) -> set[bytes]:
    return set(keeper.store.streams[UUID].orders)


# -- any call ----------------------------------------------------------------------------------------------------

STRANGE = {
    "a forged signature": (structs.replace(order(), signature=bytes(64)), "signature"),
    "another's name": (order(signer=STRANGER), "another key"),
    "another store": (order(store=StoreKey(b"x" * 32)), "another store"),
    "another log": (order(uuid=OTHER_UUID), "another key, log"),
    "another purpose": (order(action=END), "action"),
    "a name outside the grammar": (order(definition=Definition("a b")), "name"),
    "no order": (structs.replace(order(), order=b"\xc1"), "signature"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_stream_is_created_by_true_orders_for_this_store_alone(tmp_path: Path, what: str) -> None:
    keeper = Keeper(tmp_path)
    bad, text = STRANGE[what]
    assert isinstance(keeper.create(bad), Refused) or what == "another log"
    keeper.store.close()
    keeper = Keeper(tmp_path / "other")
    refused(keeper.create(order(SECOND), bad), "order", text)
    assert not keeper.store.streams
    keeper.store.close()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"store": StoreKey(b"x" * 32)}, "another store"),
        ({"uuid": OTHER_UUID}, "another key, log or action"),
        ({"action": END}, "another key, log or action"),
        ({"signer": STRANGER}, "another key, log or action"),
    ],
)
def test_a_stream_is_changed_by_orders_for_this_store_and_log_alone(
    keeper: Keeper, more: dict[str, Any], text: str
) -> None:
    refused(keeper.change(order(definition=SMALL, revision=1, **more)), "order", text)
    assert keeper.max_messages == 1000


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"store": StoreKey(b"x" * 32)}, "another store"),
        ({"uuid": OTHER_UUID}, "another key, log or action"),
        ({"action": "keep"}, "another key, log or action"),
        ({"signer": STRANGER}, "another key, log or action"),
    ],
)
def test_a_stream_is_ended_by_orders_for_this_store_and_log_alone(
    keeper: Keeper, more: dict[str, Any], text: str
) -> None:
    refused(keeper.delete(order(revision=1, **{"action": END, **more})), "order", text)
    assert UUID in keeper.store.streams


def test_a_forged_signature_changes_and_ends_nothing(keeper: Keeper) -> None:
    for call, action in ((keeper.change, "keep"), (keeper.delete, END)):
        forged = structs.replace(
            order(definition=SMALL, revision=1, action=action), signature=bytes(64)
        )
        refused(call(forged), "order", "signature")
    assert keeper.max_messages == 1000


# -- create ------------------------------------------------------------------------------------------------------


def test_a_stream_with_two_keys_is_created_under_orders_of_both(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    assert isinstance(keeper.create(order(), countersigned(revision=0)), Described)
    assert key_ids(keeper) == {OWNER.key_id, SECOND.key_id}
    keeper.restart()
    assert key_ids(keeper) == {OWNER.key_id, SECOND.key_id}
    keeper.store.close()


def test_the_orders_of_one_create_define_one_stream(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    refused(keeper.create(order(), order(SECOND, SMALL)), "order", "the same stream")
    keeper.store.close()


def test_a_repeated_create_gets_the_first_answer_even_later(keeper: Keeper) -> None:
    keeper.now_us = LATER_US
    answer = keeper.create(order())
    assert (answer.uuid, len(keeper.store.streams)) == (UUID, 1)


@pytest.mark.parametrize("revision", [1, FAR_US])
def test_nobody_creates_a_stream_at_a_revision(tmp_path: Path, revision: int) -> None:
    keeper = Keeper(tmp_path)
    refused(keeper.create(order(revision=revision)), "order", "revision 0")
    assert not keeper.store.streams
    keeper.store.close()


@pytest.mark.parametrize(
    ("issued_us", "text"),
    [
        (FAR_US, "after"),
        (NOW_US + ORDER_FRESH_US + 1_000_000, "601 s after the time of the store's clock"),
        (NOW_US - ORDER_FRESH_US - 1_000_000, "601 s before the time of the store's clock"),
    ],
)
def test_late_and_early_orders_are_refused_with_the_difference_of_the_clocks(
    keeper: Keeper, issued_us: int, text: str
) -> None:
    refused(keeper.create(order(STRANGER, uuid=STRANGERS_UUID, issued_us=issued_us)), "order", text)
    refused(keeper.change(order(definition=SMALL, revision=1, issued_us=issued_us)), "order", text)
    refused(keeper.delete(order(action=END, revision=1, issued_us=issued_us)), "order", text)
    assert (list(keeper.store.streams), keeper.max_messages) == ([UUID], 1000)


def test_after_a_clock_was_set_back_orders_of_now_are_taken_and_those_of_before_are_not(
    keeper: Keeper,
) -> None:
    hour_us = 3_600_000_000
    keeper.store.update_time(NOW_US, 5_000_000)
    keeper.store.update_time(NOW_US - hour_us, 5_000_050)

    def change(one: SignedOrder) -> Any:  # `ask` would set all of its clocks
        asked = Asked("orders", OWNER, Change([one]))
        try:
            keeper.store.calls._on_change(asked, asked.call)  # type: ignore[arg-type]  # a stand-in
        except Refuse as err:
            asked.refuse(err.code, str(err))
        return asked.said

    for wrong_us in (NOW_US, NOW_US - hour_us + ORDER_FRESH_US + 1, FAR_US):
        late = order(definition=SMALL, revision=1, issued_us=wrong_us)
        refused(change(late), "order", "clocks of both hosts")
    now = order(definition=SMALL, revision=1, issued_us=NOW_US - hour_us)
    assert isinstance(change(now), Described)


def test_clocks_may_be_ten_minutes_apart(keeper: Keeper) -> None:
    for revision, issued_us in ((1, NOW_US - ORDER_FRESH_US), (2, NOW_US + ORDER_FRESH_US)):
        answer = keeper.change(order(revision=revision, issued_us=issued_us))
        assert isinstance(answer, Described)


def test_nobody_creates_a_stream_in_the_place_of_another(keeper: Keeper) -> None:
    stream = keeper.store.streams[UUID]
    beside = Path(f"{stream.path}.orders")
    there = beside.read_bytes()
    others = Definition("others")
    for key in (OWNER, STRANGER):
        refused(keeper.create(order(key, others)), "order", "another stream")
    refused(keeper.create(order(STRANGER, uuid=dead_uuid(UUID))), "order", "was not made of key")
    assert keeper.store.streams == {UUID: stream}
    assert beside.read_bytes() == there


# -- change ------------------------------------------------------------------------------------------------------


def test_a_key_of_the_stream_changes_it_by_one_revision_at_a_time(keeper: Keeper) -> None:
    for revision in (1, 2, 3):
        wanted = structs.replace(DEFINITION, max_messages=revision)
        answer = keeper.change(order(definition=wanted, revision=revision))
        assert answer.definition == wanted
    keeper.restart()
    assert keeper.max_messages == 3
    assert [decode_order(one.order).revision for one in keeper.session.shown] == [3]


def test_a_change_under_a_foreign_key_is_refused_whenever_it_was_issued(keeper: Keeper) -> None:
    for issued_us in (NOW_US + 1, FAR_US):
        one = order(STRANGER, SMALL, issued_us=issued_us, revision=1)
        refused(keeper.change(one), "order", "must countersign")
        refused(
            keeper.change(order(definition=SMALL, revision=1), one), "order", "must countersign"
        )
    assert (keeper.max_messages, key_ids(keeper)) == (1000, {OWNER.key_id})


@pytest.mark.parametrize("revision", [0, 2, 3, FAR_US, (1 << 63) - 1])
def test_no_revision_is_skipped(keeper: Keeper, revision: int) -> None:
    refused(
        keeper.change(order(definition=SMALL, revision=revision)),
        "revision",
        "the next revision is 1",
    )
    refused(
        keeper.delete(order(action=END, revision=revision)), "revision", "the next revision is 1"
    )
    assert keeper.max_messages == 1000


def test_of_two_changes_at_once_the_second_is_refused(keeper: Keeper) -> None:
    assert isinstance(keeper.change(countersigned()), Described)
    assert isinstance(keeper.change(order(definition=SMALL, revision=2)), Described)
    late = order(SECOND, structs.replace(DEFINITION, max_messages=7), revision=2)
    refused(keeper.change(late, key=SECOND), "revision", "the next revision is 3")
    assert keeper.max_messages == 1


def test_the_higher_revision_is_in_force_however_it_was_issued(keeper: Keeper) -> None:
    keeper.change(countersigned(issued_us=NOW_US + ORDER_FRESH_US))
    keeper.change(order(definition=SMALL, revision=2, issued_us=NOW_US - ORDER_FRESH_US))
    assert keeper.max_messages == 1
    keeper.restart()
    assert keeper.max_messages == 1


def test_a_repeated_change_gets_the_first_answer_even_later(keeper: Keeper) -> None:
    change = order(definition=SMALL, revision=1)
    assert isinstance(keeper.change(change), Described)
    keeper.now_us = LATER_US
    keeper.restart()
    assert keeper.change(change).definition == SMALL
    refused(keeper.change(order(revision=2)), "order", "before the time")


def test_the_orders_of_one_change_define_one_stream(keeper: Keeper) -> None:
    keeper.change(countersigned())
    refused(
        keeper.change(order(revision=2), order(SECOND, SMALL, revision=2)),
        "order",
        "the same stream",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"topic": ">"},
        {"topic": "", "cluster": "billing"},
        {"origins": (Origin(OTHER_UUID, "wages"),)},
        {"topic": "", "mirror": OTHER_UUID.hex(), "origins": (Origin(OTHER_UUID, "wages"),)},
    ],
)
def test_what_a_stream_records_does_not_change(keeper: Keeper, changes: dict[str, Any]) -> None:
    wanted = structs.replace(DEFINITION, **changes)
    refused(keeper.change(order(definition=wanted, revision=1)), "invalid", "cannot be changed")
    assert keeper.store.streams[UUID].definition == DEFINITION


def test_a_promoted_copy_records_what_its_source_did_and_nothing_else(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    origin = Origin(OTHER_UUID, "wages", "wages.>")
    copy = Definition("orders", mirror=OTHER_UUID.hex(), origins=(origin,))
    assert isinstance(keeper.create(order(definition=copy)), Described)
    for topic in (">", "orders.>"):
        wanted = structs.replace(copy, mirror="", topic=topic)
        refused(keeper.change(order(definition=wanted, revision=1)), "invalid", "cannot be changed")
    promoted = structs.replace(copy, mirror="", topic="wages.>")
    refused(keeper.change(order(STRANGER, promoted, revision=1)), "order", "must countersign")
    assert keeper.change(order(definition=promoted, revision=1)).definition == promoted
    refused(keeper.change(order(definition=copy, revision=2)), "invalid", "cannot be changed")
    keeper.store.close()


# -- keys --------------------------------------------------------------------------------------------------------


def test_a_new_key_needs_the_countersignature_of_a_key_of_the_stream(keeper: Keeper) -> None:
    answer = keeper.change(order(revision=1), countersigned())
    assert isinstance(answer, Described)
    assert key_ids(keeper) == {OWNER.key_id, SECOND.key_id}
    assert isinstance(keeper.change(order(SECOND, SMALL, revision=2), key=SECOND), Described)
    third = countersigned(SECOND, STRANGER, SMALL, revision=3)
    assert isinstance(keeper.change(third, key=SECOND), Described)
    for _ in range(2):
        keeper.restart()
        assert key_ids(keeper) == {OWNER.key_id, SECOND.key_id, STRANGER.key_id}
    assert isinstance(keeper.delete(order(STRANGER, SMALL, action=END, revision=4)), Settled)


def bad_countersignatures() -> dict[str, SignedOrder]:
    one = order(STRANGER, revision=1)
    other = order(STRANGER, SMALL, revision=1)
    return {
        "none": one,
        "empty": structs.replace(one, by=OWNER.public_key),
        "its own": countersigned(STRANGER, STRANGER),
        "a new key's": countersigned(SECOND, STRANGER),
        "over another order": structs.replace(
            one,
            by=OWNER.public_key,
            countersignature=OWNER.countersign_order(other.order),
        ),
        "another's in its name": structs.replace(
            one,
            by=OWNER.public_key,
            countersignature=SECOND.countersign_order(one.order),
        ),
        "a signature": structs.replace(
            one, by=OWNER.public_key, countersignature=OWNER.sign_order(one.order)
        ),
    }


@pytest.mark.parametrize("what", bad_countersignatures())
def test_no_other_countersignature_admits_a_key(keeper: Keeper, what: str) -> None:
    bad = bad_countersignatures()[what]
    for orders in ([bad], [bad, order(revision=1)], [countersigned(), bad], [bad, countersigned()]):
        refused(keeper.change(*orders), "order", "")
    assert key_ids(keeper) == {OWNER.key_id}
    refused(
        keeper.delete(order(STRANGER, action=END, revision=1)), "order", "not a key of the stream"
    )


def test_the_relay_is_shown_the_order_of_a_new_key(keeper: Keeper) -> None:
    keeper.change(countersigned())
    shown = [decode_order(one.order).key_id for one in keeper.session.shown]
    assert shown == [OWNER.key_id, SECOND.key_id]


def test_who_asks_for_a_stream_that_another_store_took_over_is_told_to_try_again(
    keeper: Keeper,
) -> None:
    keeper.store.catalogue.hand_over(keeper.store.streams[UUID], "another store has it")
    for name in ("orders", UUID.hex()):
        refused(keeper.ask(Describe(), name=name), "leaving", "another store serves")
    refused(keeper.ask(Describe(), name="other"), "no-stream", "other")
    refused(keeper.ask(Describe(), key=STRANGER), "no-stream", "orders")


# -- delete ------------------------------------------------------------------------------------------------------


def test_a_key_of_the_stream_ends_it_and_a_repeated_end_gets_the_first_answer(
    keeper: Keeper,
) -> None:
    end = order(action=END, revision=1)
    assert isinstance(keeper.delete(end), Settled)
    assert not keeper.store.streams
    keeper.now_us = LATER_US
    assert isinstance(keeper.delete(end), Settled)
    refused(keeper.delete(order(action=END, revision=1, uuid=OTHER_UUID)), "no-stream", "orders")
    forged = structs.replace(end, signature=bytes(64))
    refused(keeper.delete(forged), "order", "signature")
    refused(keeper.create(order(issued_us=LATER_US)), "order", "deleted")
    assert isinstance(keeper.create(order(uuid=OTHER_UUID, issued_us=LATER_US)), Described)
    assert isinstance(keeper.delete(end), Settled)
    assert list(keeper.store.streams) == [OTHER_UUID]


def test_nobody_ends_a_stream_under_a_key_that_it_does_not_have(keeper: Keeper) -> None:
    strange = order(STRANGER, action=END, revision=1)
    for orders in ([strange], [strange, order(action=END, revision=1)]):
        refused(keeper.delete(*orders), "order", "not a key of the stream")
    refused(
        keeper.delete(countersigned(key=STRANGER, action=END)), "order", "not a key of the stream"
    )  # nobody means that
    assert UUID in keeper.store.streams


def test_a_recorded_end_does_not_end_the_stream_after_a_change(keeper: Keeper) -> None:
    end = order(action=END, revision=1)
    keeper.change(order(definition=SMALL, revision=1))
    refused(keeper.delete(end), "revision", "the next revision is 2")
    assert UUID in keeper.store.streams


def test_a_recorded_end_does_not_end_the_stream_later(keeper: Keeper) -> None:
    end = order(action=END, revision=1)
    keeper.now_us = NOW_US + ORDER_FRESH_US + 1
    refused(keeper.delete(end), "order", "before the time")
    assert UUID in keeper.store.streams


def test_dead_letters_are_changed_and_ended_with_their_stream_alone(keeper: Keeper) -> None:
    keeper.store.catalogue._write_dead_letters(keeper.store.streams[UUID], "work", [])
    uuid = dead_uuid(UUID)
    for one in (UUID, uuid):
        end = order(action=END, revision=1, uuid=one)
        refused(keeper.delete(end, name="orders.dead"), "invalid", "dead letters")
        change = order(definition=SMALL, revision=1, uuid=one)
        refused(keeper.ask(Change([change]), name="orders.dead"), "invalid", "dead letters")
    assert uuid in keeper.store.streams
    keeper.change(countersigned())
    assert key_ids(keeper) == set(keeper.store.streams[uuid].orders)
    keeper.restart()
    assert uuid in keeper.store.streams
    assert isinstance(keeper.delete(order(action=END, revision=2)), Settled)
    assert not keeper.store.streams


# -- on disk -----------------------------------------------------------------------------------------------------

encode = msgspec.msgpack.encode


def written(directory: Path, definition: bytes, beside: bytes | None = None) -> Keeper:
    """Return a store on a directory with one log, which has these orders."""
    (directory / "streams").mkdir()
    path = directory / "streams" / UUID.hex()
    Path(f"{path}.orders").write_bytes(definition if beside is None else beside)
    Log.create(str(path), uuid=UUID, definition=definition, created_us=1).close()
    return Keeper(directory)


def test_the_orders_in_force_of_a_damaged_log_name_its_owner(keeper: Keeper) -> None:
    keeper.change(countersigned(definition=SMALL))
    keeper.store.close()
    for file in Path(keeper.store.streams[UUID].path).glob("*"):
        file.write_bytes(b"damaged")
    keeper.start()
    assert (keeper.max_messages, len(key_ids(keeper))) == (1, 2)
    refused(keeper.delete(order(action=END, revision=1)), "revision", "the next revision is 2")
    assert isinstance(keeper.delete(order(action=END, revision=2)), Settled)


def planted() -> dict[str, DefinitionFile]:
    """Return files that somebody might write to disk to make the stream accept a key."""
    forged = structs.replace(order(), signature=bytes(64))

    def file(
        *orders: SignedOrder, admitted: Sequence[SignedOrder] = (), **more: Any
    ) -> DefinitionFile:
        kept = DefinitionFile(list(orders), b"", OWNER.key_id, list(admitted), SALT)
        return structs.replace(kept, **more)

    return {
        "an order beside": file(order(), order(STRANGER, SMALL, revision=1)),
        "an order alone": file(order(STRANGER, SMALL, revision=1)),
        "of revision 0": file(order(), order(STRANGER, SMALL)),
        "not countersigned": file(
            order(), order(STRANGER), admitted=[order(STRANGER, revision=1)]
        ),
        "countersigned by itself": file(
            order(), order(STRANGER), admitted=[countersigned(STRANGER, STRANGER)]
        ),
        "countersigned in a circle": file(
            order(), order(STRANGER), admitted=[countersigned(SECOND, STRANGER), countersigned(STRANGER, SECOND)],
        ),
        "a forged countersignature": file(
            order(), order(STRANGER),
            admitted=[structs.replace(order(STRANGER, revision=1), by=OWNER.public_key, countersignature=bytes(64))],
        ),
        "a forged signature": file(forged),
        "for another store": file(order(store=StoreKey(b"x" * 32))),
        "for another log": file(order(uuid=OTHER_UUID)),
        "an end": file(order(action=END)),
        "a forged admission": file(
            order(), order(STRANGER), admitted=[structs.replace(countersigned(OWNER, STRANGER), signature=bytes(64))],
        ),
        "founded by another key": file(order(STRANGER), founder=STRANGER.key_id),
        "founded by nobody": file(order(STRANGER), founder=b"", salt=b""),
        "of another salt": file(order(), salt=bytes(16)),
    }  # fmt: skip


@pytest.mark.parametrize("what", planted())
def test_a_stream_whose_orders_do_not_hold_is_not_served(tmp_path: Path, what: str) -> None:
    keeper = written(tmp_path, encode(planted()[what]))
    stream = keeper.store.streams[UUID]
    assert "its orders are not valid" in stream.failed
    assert (stream.orders, keeper.session.shown) == ({}, [])
    refused(keeper.delete(order(STRANGER, action=END, revision=1), key=STRANGER), "no-stream", "")
    keeper.store.close()


@pytest.mark.parametrize("what", planted())
def test_a_damaged_log_is_not_taken_over_by_the_orders_beside_it(tmp_path: Path, what: str) -> None:
    keeper = written(
        tmp_path,
        encode(DefinitionFile([order()], b"", OWNER.key_id, [], SALT)),
        encode(planted()[what]),
    )
    keeper.store.close()
    for file in (tmp_path / "streams" / UUID.hex()).glob("*"):
        file.write_bytes(b"damaged")
    keeper.start()
    stream = keeper.store.streams[UUID]
    assert "its orders cannot be read either: " in stream.failed
    assert stream.orders == {}
    keeper.store.close()


def test_a_log_that_opens_again_uses_its_own_definition(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(keeper.store.streams[UUID].path)
    before = Path(f"{path}.orders").read_bytes()
    keeper.change(order(definition=SMALL, revision=1), countersigned(definition=SMALL))
    Path(f"{path}.orders").write_bytes(before)  # the power failed between the two
    keeper.store.close()
    moved = path.with_name("away")
    path.rename(moved)
    path.mkdir()
    keeper.start()
    assert keeper.max_messages == 1000
    path.rmdir()
    moved.rename(path)
    keeper.store.tend()
    assert keeper.max_messages == 1
    refused(keeper.change(order(revision=1)), "revision", "the next revision is 2")
    assert isinstance(keeper.change(order(revision=2)), Described)
    assert isinstance(keeper.change(order(SECOND, revision=3), key=SECOND), Described)
