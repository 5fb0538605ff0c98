"""Both tables of a receiver are bounded, and forget only what is refused as too old anyway."""

from __future__ import annotations

from iris.core.guard import FlowKey, Guard
from iris.wire.kinds import Kind

KEY = bytes(16)
FRESH_US = 600_000_000


def sender_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def flow(
    number: int = 1, *, kind: Kind = Kind.PUBLISH, name: str = "a", key: bytes = KEY, receiver: int = 0
) -> FlowKey:  # fmt: skip
    return kind, receiver, name, key, sender_id(number)


def test_a_sender_keeps_its_window_between_messages() -> None:
    guard = Guard(FRESH_US)
    first = guard.sender(KEY, sender_id(1), 0)
    assert first is not None
    first.window.mark(7)
    assert guard.sender(KEY, sender_id(1), 5) is first
    assert guard.sender(KEY, sender_id(2), 5) is not first
    assert guard.sender(b"k" * 16, sender_id(1), 5) is not first


def test_a_table_full_of_fresh_senders_refuses_new_ones_and_counts_them() -> None:
    guard = Guard(FRESH_US, max_senders=3, max_sequences=3)
    for number in range(3):
        assert guard.sender(KEY, sender_id(number), 0) is not None
        assert guard.sequence(flow(number), 0) is not None
    assert guard.sender(KEY, sender_id(9), 2 * FRESH_US) is None
    assert guard.sequence(flow(9), 2 * FRESH_US) is None
    assert guard.refused_senders == 2
    assert guard.sender(KEY, sender_id(1), 2 * FRESH_US) is not None, "those known go on"


def test_senders_idle_past_the_freshness_limit_make_room() -> None:
    guard = Guard(FRESH_US, max_senders=3)
    entries = [guard.sender(KEY, sender_id(number), 0) for number in range(3)]
    assert entries[2] is not None
    entries[2].used_us = 2 * FRESH_US
    assert guard.sender(KEY, sender_id(9), 2 * FRESH_US + 1) is not None
    assert guard.sender(KEY, sender_id(2), 2 * FRESH_US + 1) is entries[2]
    assert guard.refused_senders == 0


def test_a_sequence_belongs_to_a_sender_an_address_a_kind_and_a_receiver() -> None:
    guard = Guard(FRESH_US)
    base = guard.sequence(flow(), 0)
    assert guard.sequence(flow(), 9) is base
    for other in (
        flow(2), flow(kind=Kind.BROADCAST), flow(name="b"), flow(key=b"k" * 16), flow(receiver=1),
    ):  # fmt: skip
        assert guard.sequence(other, 0) is not base


def test_a_topic_followed_again_expects_no_sequence_but_repeats_nothing() -> None:
    guard = Guard(FRESH_US)
    flows = [flow(), flow(name="b"), flow(kind=Kind.BROADCAST)]
    for each in flows:
        entry = guard.sequence(each, 0)
        assert entry is not None
        entry.known, entry.next = True, 10
    guard.resume_topics(lambda topic: topic == "a")
    entries = [guard.sequence(each, 0) for each in flows]
    assert [entry and entry.known for entry in entries] == [False, True, True]
    assert all(entry and entry.next == 10 for entry in entries)
