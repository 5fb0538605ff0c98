"""Objects of a bucket open with their group key, under their own key, unchanged; else they say why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.crypto.keys import GroupKey, StoreKey
from relay.store.batches import DELETE, DELETE_RANGE, PUT_RECORD, Op
from relay.store.bucket import sealing
from relay.store.bucket.sealing import (
    HEAD_BYTES,
    NO_HASH,
    Content,
    Ended,
    Fence,
    Intent,
    Numbered,
    ObjectDamaged,
    Registered,
    Rows,
    Sealer,
)

SECRET = bytes(range(32))
JOURNAL = "0f" * 16
CONTENTS: list[Content] = [
    Registered(JOURNAL, bytes(32), "host", 1),
    Numbered(NO_HASH, [Rows(bytes(16), [Op(PUT_RECORD, b"k", b"v"), Op(DELETE, b"k")])]),
    Numbered(NO_HASH, [Intent(JOURNAL), Ended(bytes(16)), Rows(bytes(16), [Op(DELETE_RANGE, b"a", b"b")])]),
    Fence(NO_HASH, JOURNAL, 7),
]  # fmt: skip


def sealer(secret: bytes = SECRET) -> Sealer:
    numbers = iter(range(1 << 20))
    return Sealer(GroupKey(secret), lambda size: next(numbers).to_bytes(size, "big"))


@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_sealed_opens_under_the_same_key_of_the_bucket_alone(content: Content) -> None:
    ours = sealer()
    sealed = ours.seal("journal/a/1", content)
    assert sealer().open("journal/a/1", sealed) == content
    with pytest.raises(ObjectDamaged, match="journal/a/2: it was not written with this group key"):
        ours.open("journal/a/2", sealed)


def test_another_group_reads_nothing() -> None:
    sealed = sealer().seal("k", CONTENTS[1])
    with pytest.raises(
        ObjectDamaged, match="use the group key of the stores that wrote the bucket"
    ):
        sealer(bytes(32)).open("k", sealed)


def test_a_newer_version_is_named_only_if_a_store_of_the_group_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = sealer().seal("k", CONTENTS[0])
    chunk = sealer().seal_chunk("k", 0, b"x")
    monkeypatch.setattr(sealing, "VERSION", 9)
    newer, newer_chunk = sealer().seal("k", CONTENTS[0]), sealer().seal_chunk("k", 0, b"x")
    monkeypatch.undo()
    said = "version 9; this store reads version 1, so upgrade it"
    with pytest.raises(ObjectDamaged, match=said):
        sealer().open("k", newer)
    with pytest.raises(ObjectDamaged, match=said):
        sealer().size("k", newer)
    with pytest.raises(ObjectDamaged, match=said):
        sealer().open_chunk("k", 0, newer_chunk)
    for call in (
        lambda: sealer().open("k", b"\x09" + ours[1:]),
        lambda: sealer().open("k", ours[:1] + newer[1:]),
        lambda: sealer().open("k", b""),
        lambda: sealer().open_chunk("k", 0, b"\x09" + chunk[1:]),
        lambda: sealer().open_chunk("k", 0, b""),
    ):
        with pytest.raises(
            ObjectDamaged, match="was not written with this group key, or was changed"
        ):
            call()


def test_an_object_that_is_longer_or_shorter_than_it_was_written_is_named() -> None:
    sealed = sealer().seal("k", CONTENTS[0])
    assert sealer().size("k", sealed[:HEAD_BYTES]) == len(sealed)
    with pytest.raises(
        ObjectDamaged, match=f"object k: it was written with {len(sealed)} bytes, and is longer"
    ):
        sealer().open("k", sealed + b"\0")
    with pytest.raises(ObjectDamaged, match="and is shorter; restore it"):
        sealer().open("k", sealed[:-1])


def test_no_size_is_believed_that_no_store_of_the_group_wrote() -> None:
    head = sealer().seal("k", CONTENTS[0])[:HEAD_BYTES]
    for at in range(8 * HEAD_BYTES):
        changed = bytearray(head)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(ObjectDamaged, match="or was changed"):
            sealer().size("k", bytes(changed))
    with pytest.raises(ObjectDamaged, match="or was changed"):
        sealer().size("j", head)


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(sealer().seal("k", data.draw(st.sampled_from(CONTENTS))))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ObjectDamaged):
        sealer().open("k", bytes(sealed))


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ObjectDamaged):
        sealer().open("k", data)


def test_names_and_records_cannot_be_read_in_the_bucket() -> None:
    sealed = sealer().seal("k", Numbered(NO_HASH, [Rows(bytes(16), [Op(1, b"orders", b"flight 4711")])]))  # fmt: skip
    assert b"orders" not in sealed
    assert b"4711" not in sealed


def test_a_group_key_is_not_the_store_key_of_the_same_bytes_by_type() -> None:
    assert GroupKey(SECRET) != StoreKey(SECRET)
    assert "object_key" not in repr(GroupKey(SECRET))
