"""What a consumer promises: every message is settled or a dead letter, keys in order, and a crash loses nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from zlib import crc32

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from iris.wire.codec import END
from relay.store import handing
from relay.store.consumers import MAX_DELAY_US, Consumer
from relay.store.cursor import CursorDamaged, Dead, Settings, State, decode, encode
from relay.store.cursors import MAX_CURSOR_BYTES
from relay.store.handing import ENVELOPE_BYTES, Delivery, Taken
from relay.store.log import Log
from relay.store.records import Entry, Gap, Hole, Note, Reason
from relay.store.segments import Limits

MANY = 1 << 30
ANN, BOB = b"ann", b"bob"
SECOND = 1_000_000
TIMEOUT = 30 * SECOND


def entry(
    body: bytes = b"sealed",
    *,
    count: int = 1,
    key: int | None = None,
    expires_us: int = 0,
    due_us: int = 0,
) -> Entry:
    return Entry(
        1,
        "orders",
        bytes(16),
        bytes(16),
        END.pack(0, 0, count, 0),
        body,
        key_hash=None if key is None else bytes([key]) * 32,
        expires_us=expires_us,
        due_us=due_us,
    )


def places(taken: Taken) -> list[tuple[int, int, int]]:
    """The deliveries as (first offset of the record, bitmap, count of deliveries)."""
    return [
        (item.record.first, item.wanted, item.deliveries)
        for item in taken.items
        if isinstance(item, Delivery)
    ]


def firsts(taken: Taken) -> list[int]:
    return [place[0] for place in places(taken)]


def told(taken: Taken) -> list[object]:
    return [item for item in taken.items if not isinstance(item, Delivery)]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.create(str(tmp_path / "log"), uuid=bytes(16), definition=b"", created_us=0) as log:
        yield log


def consumer(log: Log, start: int = 0, **fields: object) -> Consumer:
    return Consumer(log, "c", Settings(**fields), start, 1)  # type: ignore[arg-type]


def all_of(consumer: Consumer, now_us: int = 1, worker: bytes = ANN) -> Taken:
    """Hand `worker` all that there is, and have it confirm that."""
    taken = consumer.take(worker, MANY, MANY, now_us)
    consumer.confirm(worker)
    return taken


@pytest.mark.parametrize(
    "fields",
    [
        {"ack_timeout_us": 0},
        {"max_deliver": -1},
        {"max_pending": 0},
        {"max_pending": 65_537},
        {"max_pending_per_worker": 0},
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Settings(**fields)  # type: ignore[arg-type]


def test_a_consumer_starts_within_the_log_and_has_a_name(log: Log) -> None:
    with pytest.raises(ValueError, match="start_offset"):
        Consumer(log, "c", Settings(), 1, 1)
    with pytest.raises(ValueError, match="name"):
        Consumer(log, "", Settings(), 0, 1)


def test_records_are_handed_out_whole_and_settled_by_message(log: Log) -> None:
    log.append([entry(count=3), entry(b"longer"), entry(count=2)], 1)
    one = consumer(log)
    taken = all_of(one)
    assert places(taken) == [(0, 0b111, 1), (3, 1, 1), (4, 0b11, 1)]
    assert (taken.messages, taken.bytes, taken.more) == (6, 18 + 3 * ENVELOPE_BYTES, False)
    assert one.ack(ANN, 1, 4, 1) == 3
    info = one.info()
    assert (info.floor, info.position, info.lag, info.pending) == (0, 6, 3, 3)
    assert one.ack(ANN, 0, 6, 1) == 3
    info = one.info()
    assert (info.floor, info.lag, info.pending, info.workers) == (6, 0, 0, 0)
    assert info.counts.late == 3
    assert all_of(one).items == []


def test_a_start_within_a_record_means_its_later_messages(log: Log) -> None:
    log.append([entry(count=4)], 1)
    assert places(all_of(consumer(log, 2))) == [(0, 0b1100, 1)]


def test_a_take_stays_within_its_limits_but_for_the_bytes_of_the_first_record(log: Log) -> None:
    log.append([entry(b"x" * 100, count=5)] * 4, 1)
    one = consumer(log)
    taken = one.take(ANN, 1, 5, 1)
    assert (firsts(taken), taken.more) == ([0], True)
    room = 2 * (100 + ENVELOPE_BYTES) + 50
    assert firsts(one.take(ANN, room, 1000, 1)) == [5, 10]
    assert firsts(one.take(ANN, room, 1000, 1)) == [15]
    with pytest.raises(ValueError, match="at least 1"):
        one.take(ANN, 0, 1, 1)


def test_a_record_is_cut_at_what_a_worker_asked_for_and_others_get_the_rest(log: Log) -> None:
    log.append([entry(count=1000), entry(count=3)], 1)
    one = consumer(log, group=True)
    handed: dict[bytes, int] = {}
    for turn in range(99):
        worker = (ANN, BOB, b"cid")[turn % 3]
        taken = one.take(worker, MANY, 10, 1)
        assert (taken.messages, taken.more) == (10, True)
        assert places(taken) == [(0, (1 << 10) - 1 << 10 * turn, 1)]
        handed[worker] = handed.get(worker, 0) + taken.messages
    assert handed == {ANN: 330, BOB: 330, b"cid": 330}
    assert places(one.take(ANN, MANY, 12, 1)) == [(0, (1 << 10) - 1 << 990, 1), (1000, 0b11, 1)]
    assert places(one.take(ANN, MANY, 12, 1)) == [(1000, 0b100, 1)]
    assert one.ack(ANN, 0, 1003, 1) == 1003
    assert one.info().lag == 0


def test_what_failed_of_a_cut_record_comes_before_what_is_left_of_it(log: Log) -> None:
    log.append([entry(count=9)], 1)
    one = consumer(log, group=True)
    assert places(one.take(ANN, MANY, 3, 1)) == [(0, 0b111, 1)]
    with pytest.raises(ValueError, match="not all of them were handed out"):
        one.ack(ANN, 0, 9, 1)
    one.nack(ANN, 1, 3, 0, "", 1)
    taken = [places(one.take(BOB, MANY, 4, 1)) for _ in range(3)]
    assert sum(bits for take in taken for _, bits, _ in take) == 0b111111110
    assert {(bits, n) for take in taken for _, bits, n in take if n > 1} == {(0b110, 2)}
    assert all(sum(bits.bit_count() for _, bits, _ in take) <= 4 for take in taken)


@pytest.mark.parametrize("saved", [False, True])
def test_a_cut_record_of_a_key_goes_to_one_worker_at_a_time_and_in_order(
    log: Log, saved: bool
) -> None:
    log.append([entry(key=1, count=5), entry(key=1), entry()], 1)
    one = consumer(log, group=True)
    order = []
    assert places(one.take(ANN, MANY, 2, 1)) == [(0, 0b11, 1)]
    assert places(one.take(BOB, MANY, 2, 1)) == [(6, 1, 1)], "the key is taken"
    one.nack(ANN, 1, 2, 0, "", 1)
    assert places(one.take(BOB, MANY, 2, 1)) == []
    one.ack(ANN, 0, 1, 1)
    if saved:
        one.ack(BOB, 6, 7, 1)
        one.save()
        one = Consumer.load(log, "c")
    for _ in range(5):
        for first, bits, _ in places(one.take(BOB, MANY, 1, 1)):
            offset = first + bits.bit_length() - 1
            order.append(offset)
            one.ack(BOB, offset, offset + 1, 1)
    assert order == [1, 2, 3, 4, 5]


def test_what_was_never_handed_out_cannot_be_acked(log: Log) -> None:
    log.append([entry(count=2, key=1), entry(count=2, key=1), entry()], 1)
    one = consumer(log, group=True)
    one.take(ANN, 1, 2, 1)
    for call in (one.ack, one.touch):
        with pytest.raises(ValueError, match="handed out"):
            call(ANN, 0, 3, 1)
    with pytest.raises(ValueError, match="handed out"):
        one.nack(ANN, 4, 5, 0, "", 1)
    with pytest.raises(ValueError, match="handed out"):
        one.ack_through(ANN, 4, 1)
    all_of(one)
    with pytest.raises(ValueError, match="handed out"):
        one.ack(ANN, 2, 3, 1)  # read, but behind its key
    with pytest.raises(ValueError, match="there is nothing"):
        one.ack(ANN, 1, 1, 1)
    assert one.info().pending == 3


def test_an_ack_through_settles_all_that_was_handed_out_before(log: Log) -> None:
    log.append([entry(count=3)] * 3, 1)
    one = consumer(log)
    all_of(one)
    assert one.ack_through(ANN, 4, 1) == 5
    assert one.info().floor == 5
    assert one.ack_through(ANN, 4, 1) == 0
    assert one.counts.late == 1


def test_an_ack_through_in_a_group_leaves_what_others_hold(log: Log) -> None:
    log.append([entry()] * 4, 1)
    one = consumer(log, group=True)
    one.take(ANN, MANY, 2, 1)
    one.take(BOB, MANY, 2, 1)
    assert one.ack_through(BOB, 3, 1) == 2
    assert (one.info().floor, one.info().pending) == (0, 2)


def test_what_is_not_acked_in_time_is_delivered_again_and_counted(log: Log) -> None:
    log.append([entry(count=4)], 1)
    one = consumer(log, group=True)
    all_of(one, 1)
    one.ack(ANN, 1, 2, 1)
    assert one.deadline_us == 1 + TIMEOUT
    assert all_of(one, TIMEOUT).items == []
    assert places(all_of(one, 1 + TIMEOUT, BOB)) == [(0, 0b1101, 2)]
    assert one.counts.redelivered == 3
    assert one.ack(ANN, 0, 4, 1 + TIMEOUT) == 3  # though BOB has them now
    assert one.info().pending == 0


def test_a_touch_starts_the_ack_timeout_anew_for_these_messages_only(log: Log) -> None:
    log.append([entry(count=2)], 1)
    one = consumer(log)
    all_of(one, 1)
    assert one.touch(BOB, 0, 2, 10) == 0
    assert one.touch(ANN, 1, 2, 10) == 1
    assert one.deadline_us == 1 + TIMEOUT
    assert places(all_of(one, 9 + TIMEOUT)) == [(0, 0b01, 2)]
    one.ack(ANN, 0, 1, 9 + TIMEOUT)
    assert one.deadline_us == 10 + TIMEOUT
    assert places(all_of(one, 10 + TIMEOUT)) == [(0, 0b10, 2)]


def test_a_nack_delivers_again_after_its_delay(log: Log) -> None:
    log.append([entry(count=3), entry()], 1)
    one = consumer(log, group=True)
    all_of(one)
    assert one.nack(BOB, 0, 4, 0, "not mine", 1) == 0
    assert one.nack(ANN, 0, 1, 5 * SECOND, "later", 1) == 1
    assert one.nack(ANN, 2, 4, 0, "now", 1) == 2
    assert one.info().redelivering == 3
    assert one.deadline_us == 1 + 5 * SECOND
    assert places(all_of(one)) == [(0, 0b100, 2), (3, 1, 2)]
    assert places(all_of(one, 1 + 5 * SECOND)) == [(0, 0b001, 2)]
    with pytest.raises(ValueError, match="delay_us"):
        one.nack(ANN, 0, 1, MAX_DELAY_US + 1, "", 1)


def test_messages_of_a_record_with_different_counts_are_told_apart(log: Log) -> None:
    log.append([entry(count=3)], 1)
    one = consumer(log)
    all_of(one)
    one.nack(ANN, 1, 2, 0, "", 1)
    all_of(one)
    one.worker_gone(ANN, 1)
    assert places(all_of(one)) == [(0, 0b101, 2), (0, 0b010, 3)]


def test_too_many_deliveries_make_a_dead_letter_that_stays_until_it_is_confirmed(log: Log) -> None:
    log.append([entry(count=2), entry()], 1)
    one = consumer(log, max_deliver=2)
    all_of(one)
    one.nack(ANN, 0, 3, 0, "first", 1)
    all_of(one)
    one.nack(ANN, 1, 2, 0, "bäd" * 500, 1)
    one.ack(ANN, 2, 3, 1)
    one.expire(1 + TIMEOUT)
    text = ("bäd" * 500).encode()[:1024].decode(errors="ignore")
    letters = [Dead(1, 2, text), Dead(0, 2, "not acknowledged in time")]
    assert one.dead_letters() == letters
    assert all_of(one, 1 + TIMEOUT).items == []
    one.save()
    one = Consumer.load(log, "c")
    assert one.dead_letters() == letters
    assert (one.info().dead, one.info().floor, one.info().lag) == (2, 0, 2)
    assert one.ack(ANN, 0, 1, 1 + TIMEOUT) == 0  # too late: it is dead
    one.forget_dead(1)
    assert one.dead_letters() == letters[1:]
    with pytest.raises(ValueError, match="n: 2"):
        one.forget_dead(2)
    one.forget_dead(1)
    assert (one.info().dead, one.info().floor, one.info().lag) == (0, 3, 0)


def test_dead_letters_over_the_bound_are_listed_when_others_are_confirmed(log: Log) -> None:
    log.append([entry(count=400)], 1)
    one = consumer(log, max_deliver=1)
    all_of(one)
    for offset in range(400):
        one.nack(ANN, offset, offset + 1, 0, f"{offset:1024}", 1)
    seen = []
    assert len(one.dead_letters()) < 200
    assert one.info().dead == 400
    while letters := one.dead_letters():
        seen += [letter.offset for letter in letters]
        one.save()
        one.forget_dead(len(letters))
    assert seen == list(range(400))
    assert one.info().lag == 0


def test_the_messages_of_a_worker_that_is_gone_are_due_at_once(log: Log) -> None:
    log.append([entry()] * 3, 1)
    one = consumer(log, group=True, max_deliver=2)
    one.take(ANN, MANY, 2, 1)
    one.confirm(ANN)
    one.worker_gone(ANN, 1)
    assert places(all_of(one, 1, BOB)) == [(0, 1, 2), (1, 1, 2), (2, 1, 1)]
    one.worker_gone(BOB, 1)
    assert [letter.offset for letter in one.dead_letters()] == [0, 1]


def test_only_what_a_worker_confirmed_counts_as_delivered(log: Log) -> None:
    log.append([entry(count=2), entry()], 1)
    one = consumer(log, group=True, max_deliver=2, ack_timeout_us=SECOND)
    for turn in range(5):
        assert places(one.take(b"worker %d" % turn, MANY, MANY, 1 + turn * SECOND)) == [
            (0, 0b11, 1), (2, 1, 1),
        ]  # fmt: skip
    one.had(b"worker 4", 0, 1, 4 * SECOND)  # it says so of one message, and has its record
    one.expire(6 * SECOND)
    assert places(one.take(ANN, MANY, MANY, 6 * SECOND)) == [(0, 0b11, 2), (2, 1, 1)]
    one.confirm(ANN)
    one.expire(8 * SECOND)
    assert [(d.offset, d.deliveries) for d in one.dead_letters()] == [(0, 2), (1, 2)]
    assert places(one.take(ANN, MANY, MANY, 8 * SECOND)) == [(2, 1, 2)]
    with pytest.raises(ValueError, match="handed out"):
        one.had(ANN, 0, 4, 8 * SECOND)


def test_what_nobody_ever_confirms_is_a_dead_letter_after_ten_workers(log: Log) -> None:
    log.append([entry()], 1)
    one = consumer(log, group=True, max_deliver=2, ack_timeout_us=SECOND)
    for turn in range(10):
        assert not one.dead_letters()
        assert places(one.take(ANN, MANY, MANY, 1 + turn * SECOND)) == [(0, 1, 1)]
    one.expire(1 + 10 * SECOND)
    (dead,) = one.dead_letters()
    assert (dead.deliveries, dead.reason) == (
        0, "handed out 10 times, and no worker confirmed that it had it",
    )  # fmt: skip


@pytest.mark.parametrize("max_deliver", [0, 12])
def test_without_dead_letters_or_with_a_higher_limit_ten_workers_are_not_enough(
    log: Log, max_deliver: int
) -> None:
    log.append([entry()], 1)
    one = consumer(log, group=True, max_deliver=max_deliver, ack_timeout_us=SECOND)
    for turn in range(11):
        assert places(one.take(ANN, MANY, MANY, 1 + turn * SECOND)) == [(0, 1, 1)]


def test_what_is_known_not_to_have_come_is_no_try_and_what_was_confirmed_stays(log: Log) -> None:
    log.append([entry()] * 2, 1)
    one = consumer(log, group=True, max_deliver=2)
    one.take(ANN, MANY, 1, 1)
    one.confirm(ANN)
    for _ in range(30):
        assert firsts(one.take(ANN, MANY, 1, 1)) == [1]
        one.again(ANN, 1, counted=False)
    assert not one.dead_letters()
    assert one.info().pending == 1, "the first is still with its worker"
    for _ in range(10):
        assert places(one.take(ANN, MANY, 1, 1)) == [(1, 1, 1)]
        one.again(ANN, 1)
    assert [dead.offset for dead in one.dead_letters()] == [1]


def test_a_worker_may_ack_what_it_never_confirmed_also_after_a_restart(log: Log) -> None:
    log.append([entry()] * 2, 1)
    one = consumer(log, group=True, ack_timeout_us=SECOND)
    one.take(ANN, MANY, MANY, 1)
    one.expire(2 * SECOND)
    one.save()
    again = Consumer.load(log, "c")
    assert again.ack(ANN, 0, 1, 2 * SECOND) == 1
    assert places(again.take(BOB, MANY, MANY, 2 * SECOND)) == [(1, 1, 1)]


def test_a_newer_worker_takes_over_and_the_older_is_fenced(log: Log) -> None:
    log.append([entry()] * 3, 1)
    one = consumer(log)
    one.take(ANN, MANY, 2, 1)
    one.confirm(ANN)
    assert places(all_of(one, 1, BOB)) == [(0, 1, 2), (1, 1, 2), (2, 1, 1)]
    assert all_of(one, 1, ANN) == Taken([], 0, 0, False, True)
    assert one.nack(ANN, 0, 3, 0, "", 1) == 0
    assert one.ack(ANN, 0, 1, 1) == 1
    one.worker_gone(ANN, 1)
    one.worker_gone(BOB, 1)
    assert firsts(all_of(one, 1, ANN)) == [1, 2]


def test_records_of_a_key_go_out_one_after_the_other_and_a_failed_one_first(log: Log) -> None:
    log.append([entry(key=1), entry(key=2), entry(key=1), entry(), entry(key=1)], 1)
    one = consumer(log, group=True)
    assert firsts(all_of(one)) == [0, 1, 3]
    assert all_of(one, 1, BOB).items == []
    one.nack(ANN, 0, 1, SECOND, "", 1)
    assert all_of(one, 1, BOB).items == []
    assert places(all_of(one, 1 + SECOND, BOB)) == [(0, 1, 2)]
    one.ack(BOB, 0, 1, 1 + SECOND)
    assert places(all_of(one, 1 + SECOND)) == [(2, 1, 1)]
    one.ack(ANN, 2, 3, 1 + SECOND)
    assert places(all_of(one, 1 + SECOND, BOB)) == [(4, 1, 1)]


def test_a_dead_letter_does_not_hold_up_its_key(log: Log) -> None:
    log.append([entry(key=1)] * 2, 1)
    one = consumer(log, group=True, max_deliver=1)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "no", 1)
    assert firsts(all_of(one)) == [1]


def test_the_delay_of_a_message_that_was_acked_meanwhile_ends_without_effect(log: Log) -> None:
    log.append([entry(count=2, key=1)], 1)
    one = consumer(log, group=True, max_deliver=2)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "", 1)
    one.ack(ANN, 0, 1, 1)
    one.nack(ANN, 1, 2, 0, "", 1)
    assert places(all_of(one)) == [(0, 0b10, 2)]
    one.nack(ANN, 1, 2, 0, "no", 1)
    assert all_of(one, 1 + SECOND).items == []
    assert one.dead_letters() == [Dead(1, 2, "no")]
    assert one.deadline_us is None


def test_a_keyed_record_comes_again_when_all_that_failed_of_it_is_due(log: Log) -> None:
    log.append([entry(count=3, key=1)], 1)
    one = consumer(log, group=True)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "", 1)
    one.nack(ANN, 1, 2, 0, "", 1)
    assert all_of(one, 1 + SECOND, BOB).items == []  # the third is still held
    one.ack(ANN, 2, 3, 1 + SECOND)
    assert places(all_of(one, 1 + SECOND, BOB)) == [(0, 0b011, 2)]


def test_one_worker_alone_gets_the_records_of_a_key_together(log: Log) -> None:
    log.append([entry(key=1)] * 3, 1)
    assert firsts(all_of(consumer(log))) == [0, 1, 2]


def test_reading_stops_when_too_many_records_wait_behind_a_key(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing, "MAX_BLOCKED", 2)
    log.append([entry(key=1)] * 5 + [entry()], 1)
    one = consumer(log, group=True)
    assert firsts(all_of(one)) == [0]
    assert one.info().position == 3
    one.ack(ANN, 0, 1, 1)
    assert firsts(all_of(one)) == [1]
    for offset in (1, 2, 3):
        one.ack(ANN, offset, offset + 1, 1)
        taken = firsts(all_of(one))
    assert taken == [4]
    assert one.info().position == 6


def test_new_messages_wait_at_max_pending_and_redeliveries_do_not(log: Log) -> None:
    log.append([entry(count=10), entry(count=3), entry()], 1)
    one = consumer(log, group=True, max_pending=4)
    assert firsts(all_of(one)) == [0]  # alone a record always goes
    one.ack(ANN, 0, 8, 1)
    assert all_of(one).items == []
    one.nack(ANN, 8, 10, 0, "", 1)
    assert places(all_of(one, 1, BOB)) == [(0, 0b11 << 8, 2)]
    one.ack(BOB, 8, 9, 1)
    assert firsts(all_of(one)) == [10]
    assert one.info().pending == 4


def test_a_new_record_behind_its_key_does_not_hold_up_redeliveries_at_max_pending(log: Log) -> None:
    log.append([entry(key=1), entry(key=1, count=2), entry(), entry()], 1)
    one = consumer(log, group=True, max_pending=3)
    assert firsts(all_of(one)) == [0, 3, 4]
    one.ack(ANN, 0, 1, 1)
    one.nack(ANN, 3, 5, 0, "", 1)
    assert firsts(all_of(one)) == [3, 4]
    one.ack(ANN, 3, 4, 1)
    assert firsts(all_of(one)) == [1]


def test_a_worker_gets_no_more_than_it_may_hold(log: Log) -> None:
    log.append([entry()] * 5, 1)
    one = consumer(log, group=True, max_pending_per_worker=2)
    assert firsts(all_of(one)) == [0, 1]
    assert firsts(all_of(one)) == []
    assert firsts(all_of(one, 1, BOB)) == [2, 3]
    assert one.info().workers == 2


def test_gaps_are_told_once_and_settle_themselves(log: Log) -> None:
    log.append([entry()], 1)
    log.append([Note(7, "slow")], 1)
    log.append([entry()], 1)
    one = consumer(log)
    taken = all_of(one)
    assert [type(item) for item in taken.items] == [Delivery, Gap, Delivery]
    one.ack(ANN, 0, 3, 1)
    assert (one.info().floor, told(all_of(one))) == (3, [])


def test_expired_and_compacted_records_settle_themselves(log: Log) -> None:
    log.append([entry(key=1, count=2), entry(expires_us=5, count=3), entry(key=1)], 1)
    while not log.compact(1):
        pass
    one = consumer(log)
    assert firsts(all_of(one, 9)) == [5]
    assert one.counts.skipped == 5


def test_what_expires_or_is_compacted_before_its_redelivery_settles_itself(log: Log) -> None:
    log.append([entry(key=1, count=2), entry(expires_us=5, count=3), entry(key=1)], 1)
    one = consumer(log)
    all_of(one)
    one.ack(ANN, 0, 1, 1)
    one.worker_gone(ANN, 1)
    while not log.compact(1):
        pass
    assert places(all_of(one, 9)) == [(5, 1, 2)]
    assert (one.counts.skipped, one.info().floor) == (4, 5)


def test_what_retention_removed_is_told_once_and_counted(log: Log) -> None:
    log.append([entry()] * 6, 1)
    one = consumer(log)
    one.take(ANN, MANY, 3, 1)
    one.nack(ANN, 1, 2, SECOND, "", 1)
    one.ack(ANN, 0, 1, 1)
    log.enforce(Limits(max_messages=1), 1)
    taken = all_of(one)
    assert told(taken) == [Hole(1, 2, Reason.RETENTION), Hole(3, 5, Reason.RETENTION)]
    assert firsts(taken) == [5]
    assert one.info().floor == 2  # held: an ack is still welcome
    assert one.counts.missed == 3
    taken = all_of(one, 1 + TIMEOUT)
    assert told(taken) == [Hole(2, 3, Reason.RETENTION)]
    assert (one.counts.missed, one.info().floor) == (4, 5)
    assert told(all_of(one, 1 + TIMEOUT)) == []


def test_deferred_records_come_when_they_are_due(log: Log) -> None:
    log.append([entry(due_us=50), entry(count=2), entry(due_us=20, count=2), entry(due_us=30)], 10)
    one = consumer(log, 1)
    assert one.deadline_us == 20
    assert firsts(all_of(one, 10)) == [1]
    one.ack(ANN, 1, 3, 10)
    assert one.info().floor == 6
    assert firsts(all_of(one, 20)) == [3]
    assert one.deadline_us == 30
    one.save()
    assert firsts(all_of(one, 60)) == [5]  # and not the one below its start
    assert one.ack(ANN, 3, 6, 60) == 3
    one = Consumer.load(log, "c")
    assert places(all_of(one, 60)) == [(3, 0b11, 2), (5, 1, 1)]


def test_a_deferred_record_ahead_of_the_reader_is_settled_once(log: Log) -> None:
    log.append([entry(count=2), entry(due_us=20, count=2), entry()], 10)
    one = consumer(log)
    assert firsts(one.take(ANN, 1, 2, 30)) == [2]
    assert one.ack(ANN, 2, 4, 30) == 2
    assert one.ack(ANN, 2, 4, 30) == 0
    with pytest.raises(ValueError, match="handed out"):
        one.ack(ANN, 2, 5, 30)
    assert firsts(all_of(one, 30)) == [0, 4]


def test_an_ack_through_spares_deferred_records_below_it(log: Log) -> None:
    log.append([entry(due_us=20), entry(), entry()], 10)
    one = consumer(log)
    all_of(one, 10)
    all_of(one, 20)
    assert one.ack_through(ANN, 2, 20) == 2
    assert one.ack_through(ANN, 0, 20) == 1


def test_a_deferred_record_that_waits_for_a_worker_is_no_reason_to_wake_up_again(log: Log) -> None:
    log.append([entry(due_us=20), entry(due_us=40)], 10)
    one = consumer(log)
    one.expire(25)
    assert one.deadline_us == 40


def test_a_loaded_consumer_delivers_again_what_was_handed_out(log: Log) -> None:
    log.append([entry(count=4), entry(), entry(key=1), entry(key=1), entry()], 1)
    one = consumer(log, group=True)
    one.take(ANN, MANY, 6, 1)
    one.confirm(ANN)
    one.ack(ANN, 1, 2, 1)
    one.nack(ANN, 2, 3, SECOND, "", 1)
    assert one.dirty
    one.save()
    assert not one.dirty
    before = one.info()
    one = Consumer.load(log, "c")
    assert not one.dirty
    info = one.info()
    assert (info.floor, info.position, info.lag) == (before.floor, before.position, before.lag)
    assert (info.pending, info.redelivering) == (0, 5)
    assert places(all_of(one)) == [(0, 0b1001, 2), (4, 1, 2), (5, 1, 2), (7, 1, 1)]
    assert places(all_of(one, 1 + SECOND)) == [(0, 0b0100, 2)]
    one.ack(ANN, 5, 6, 1)
    assert firsts(all_of(one)) == [6]


def test_a_worker_may_ack_what_it_was_handed_before_a_crash(log: Log) -> None:
    log.append([entry(count=4)], 1)
    one = consumer(log)
    all_of(one)
    one.save(sync=True)
    one = Consumer.load(log, "c")
    assert one.ack(ANN, 0, 3, 1) == 3
    assert places(all_of(one)) == [(0, 0b1000, 2)]


def test_an_ephemeral_consumer_is_never_written(log: Log) -> None:
    one = consumer(log, durable=False)
    one.save()
    assert not one.dirty
    assert log.cursors.names() == []
    with pytest.raises(KeyError):
        Consumer.load(log, "c")


def test_a_damaged_cursor_is_told(log: Log) -> None:
    log.append([entry()], 1)
    one = consumer(log)
    all_of(one)
    one.save()
    data = log.cursors.get("c") or b""
    state = decode("c", data)
    ahead = State(state.settings, 0, 9, state.due, [], [], state.counts)
    alone = State(state.settings, 0, 1, state.due, [], [Dead(0, 1, "")], state.counts)
    bad = [
        b"",
        data[:-1],
        data[:-1] + bytes([data[-1] ^ 1]),
        crc32(b"\x09").to_bytes(4, "little") + b"\x09",
        encode(ahead),
        encode(alone),
    ]
    for damaged in bad:
        log.cursors.put("c", damaged)
        with pytest.raises(CursorDamaged, match="cursor c"):
            Consumer.load(log, "c")


def test_a_record_that_claims_too_many_messages_is_told_as_a_gap(log: Log) -> None:
    log.append([entry(count=1 << 31), entry()], 1)
    one = consumer(log)
    taken = all_of(one)
    assert isinstance(taken.items[0], Gap)
    assert firsts(taken) == [1 << 31]
    assert one.counts.skipped == 1 << 31


def test_the_cursor_always_fits_and_reading_stops_before_it_would_not(log: Log) -> None:
    for _ in range(12):
        log.append([entry(count=50, key=None)] * 500, 1)
    one = consumer(log)
    first = all_of(one)
    while first.more:
        first = all_of(one)
    position = one.info().position
    assert position < log.next
    for offset in range(position):  # all parted as badly as can be
        if offset % 50 < 10:
            one.nack(ANN, offset, offset + 1, SECOND + offset, f"{offset}", 1)
    for offset in range(0, position, 50):
        one.ack(ANN, offset + 11, offset + 12, 1)
    one.save()
    assert len(log.cursors.get("c") or b"") <= MAX_CURSOR_BYTES
    again = Consumer.load(log, "c").info()
    assert again.lag == one.info().lag
    one.ack(ANN, 0, 500, 1)
    assert firsts(all_of(one))[:1] == [position]


class Machine(RuleBasedStateMachine):
    """A group against a plain table of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch("relay.store.handing.MAX_BLOCKED", 3)
        self.patch.start()
        self.folder = tempfile.mkdtemp()
        self.log = Log.create(f"{self.folder}/log", uuid=bytes(16), definition=b"", created_us=0)
        self.settings = Settings(
            group=True, max_deliver=3, max_pending=12, max_pending_per_worker=8, ack_timeout_us=1000
        )
        self.consumer = Consumer(self.log, "c", self.settings, 0, 1)
        self.now_us = 1
        self.records: dict[int, tuple[int, int | None, int]] = {}
        self.settled: set[int] = set()
        self.buried: set[int] = set()
        self.held: dict[int, tuple[bytes, int]] = {}
        self.saved: tuple[set[int], set[int], set[int]] | None = None
        self.handed: set[int] = set()
        self.highest: dict[int, int] = {}

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.log.close()
            shutil.rmtree(self.folder)
            self.patch.stop()

    def drain(self) -> None:
        for _ in range(200):
            self.take(BOB, 100)
            for offset in list(self.held):
                self.ack_one(offset)
            self.consumer.forget_dead(self.bury())
            self.now_us += 2000
        every = {at + i for at, (count, _, _) in self.records.items() for i in range(count)}
        assert self.settled | self.buried == every
        assert not self.settled & self.buried
        assert self.consumer.info().lag == 0
        assert self.consumer.info().floor == self.log.next

    def bury(self) -> int:
        letters = self.consumer.dead_letters()
        for letter in letters:
            assert letter.offset not in self.settled
            self.buried.add(letter.offset)
        return len(letters)

    def ack_one(self, offset: int) -> None:
        assert self.consumer.ack(BOB, offset, offset + 1, self.now_us) == 1
        del self.held[offset]
        self.settled.add(offset)

    def lapse(self) -> None:
        for offset, (_, until) in list(self.held.items()):
            if until <= self.now_us:
                del self.held[offset]

    @rule(
        records=st.lists(
            st.tuples(
                st.integers(1, 4), st.none() | st.integers(0, 1), st.sampled_from([0, 0, 0, 700])
            ),
            min_size=1,
            max_size=4,
        )
    )
    def append(self, records: list[tuple[int, int | None, int]]) -> None:
        for count, key, delay in records:
            due_us = self.now_us + delay if delay else 0
            self.records[self.log.next] = (count, key, due_us)
            self.log.append([entry(count=count, key=key, due_us=due_us)], self.now_us)

    @rule(by=st.sampled_from([1, 400, 1000]))
    def time_passes(self, by: int) -> None:
        self.now_us += by
        self.consumer.expire(self.now_us)
        self.lapse()

    @rule(worker=st.sampled_from([ANN, BOB]))
    def says_that_it_has_it(self, worker: bytes) -> None:
        self.consumer.confirm(worker)

    @rule(worker=st.sampled_from([ANN, BOB]), counted=st.booleans())
    def answer_is_lost(self, worker: bytes, counted: bool) -> None:
        before = self.consumer.info().pending
        self.consumer.again(worker, self.now_us, counted=counted)
        gone = {
            part.record.first + i
            for record in self.consumer._table.records.values()
            for part in record.parts
            if part.worker is None
            for i in range(record.count)
            if part.bits >> i & 1
        }
        self.held = {offset: held for offset, held in self.held.items() if offset not in gone}
        assert self.consumer.info().pending <= before

    @rule(worker=st.sampled_from([ANN, BOB]), most=st.sampled_from([1, 4, 100]))
    def take(self, worker: bytes, most: int) -> None:
        self.lapse()
        taken = self.consumer.take(worker, MANY, most, self.now_us)
        assert taken.messages <= most
        for item in taken.items:
            assert isinstance(item, Delivery)
            first = item.record.first
            count, key, due_us = self.records[first]
            assert due_us <= self.now_us
            for i in range(count):
                if item.wanted >> i & 1:
                    offset = first + i
                    assert offset not in self.settled | self.buried
                    assert offset not in self.held
                    self.held[offset] = (worker, self.now_us + 1000)
                    self.handed.add(offset)
            assert item.wanted < 1 << count
            if key is not None:
                self.check_order(first, key, due_us)

    def check_order(self, first: int, key: int, due_us: int) -> None:
        letters = {letter.offset for letter in self.consumer.dead_letters()}
        done = self.settled | self.buried | letters
        for other, (count, of, other_due) in self.records.items():
            if of != key or other == first:
                continue
            messages = range(other, other + count)
            assert not any(message in self.held for message in messages)
            if other < first and not other_due and not due_us:
                assert all(message in done for message in messages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.lapse()
        for offset in sorted(self.held):
            what = data.draw(st.sampled_from(["ack", "nack", "touch", "leave"]))
            worker, _ = self.held[offset]
            if what == "ack":
                self.ack_one(offset)
            elif what == "nack":
                delay = data.draw(st.sampled_from([0, 600]))
                assert self.consumer.nack(worker, offset, offset + 1, delay, "no", self.now_us) == 1
                del self.held[offset]
            elif what == "touch":
                assert self.consumer.touch(worker, offset, offset + 1, self.now_us) == 1
                self.held[offset] = (worker, self.now_us + 1000)

    @rule(worker=st.sampled_from([ANN, BOB]))
    def worker_gone(self, worker: bytes) -> None:
        self.consumer.worker_gone(worker, self.now_us)
        self.held = {offset: held for offset, held in self.held.items() if held[0] != worker}

    @rule()
    def confirm(self) -> None:
        self.consumer.forget_dead(self.bury())

    @rule()
    def save(self) -> None:
        self.consumer.save()
        self.saved = (set(self.settled), set(self.buried), set(self.handed))

    @precondition(lambda self: self.saved)
    @rule()
    def crash(self) -> None:
        assert self.saved is not None
        self.consumer = Consumer.load(self.log, "c")
        # At least once: what was settled since the save comes again.
        self.settled, self.buried, self.handed = (set(part) for part in self.saved)
        self.held.clear()

    @invariant()
    def counts_are_right(self) -> None:
        self.consumer.expire(self.now_us)
        self.lapse()
        info = self.consumer.info()
        assert info.pending == len(self.held)
        waiting = self.handed - self.settled - self.buried
        assert info.pending + info.redelivering + info.dead == len(waiting)
        assert len(waiting) <= 12
        assert len({held[0] for held in self.held.values()}) == info.workers


TestConsumer = Machine.TestCase
TestConsumer.settings = hypothesis_settings(max_examples=50, stateful_step_count=30, deadline=None)
