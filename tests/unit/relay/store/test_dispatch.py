"""What a consumer hands out, to whom and when: keys in order, within bounds, and what is missing is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.consumers import (
    ANN,
    BOB,
    MANY,
    SECOND,
    TIMEOUT,
    all_of,
    consumer,
    deliveries_of,
    entry,
    firsts,
    holes,
)

from relay.store import dispatch
from relay.store.consumer import Consumer
from relay.store.cursors import MAX_CURSOR_BYTES
from relay.store.dispatch import ENVELOPE_BYTES, Delivery
from relay.store.log import Log
from relay.store.records import Gap, Hole, NewGap, Reason
from relay.store.segments import Limits


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.create(str(tmp_path / "log"), uuid=bytes(16), definition=b"", created_us=0) as log:
        yield log


def test_records_are_handed_out_whole_and_settled_by_message(log: Log) -> None:
    log.append([entry(count=3), entry(b"longer"), entry(count=2)], 1)
    one = consumer(log)
    taken = all_of(one)
    assert deliveries_of(taken) == [(0, 0b111, 1), (3, 1, 1), (4, 0b11, 1)]
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
    assert deliveries_of(all_of(consumer(log, 2))) == [(0, 0b1100, 1)]


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
    one = consumer(log, shared=True)
    handed: dict[bytes, int] = {}
    for turn in range(99):
        worker = (ANN, BOB, b"cid")[turn % 3]
        taken = one.take(worker, MANY, 10, 1)
        assert (taken.messages, taken.more) == (10, True)
        assert deliveries_of(taken) == [(0, (1 << 10) - 1 << 10 * turn, 1)]
        handed[worker] = handed.get(worker, 0) + taken.messages
    assert handed == {ANN: 330, BOB: 330, b"cid": 330}
    assert deliveries_of(one.take(ANN, MANY, 12, 1)) == [
        (0, (1 << 10) - 1 << 990, 1),
        (1000, 0b11, 1),
    ]
    assert deliveries_of(one.take(ANN, MANY, 12, 1)) == [(1000, 0b100, 1)]
    assert one.ack(ANN, 0, 1003, 1) == 1003
    assert one.info().lag == 0


def test_what_failed_of_a_cut_record_comes_before_what_is_left_of_it(log: Log) -> None:
    log.append([entry(count=9)], 1)
    one = consumer(log, shared=True)
    assert deliveries_of(one.take(ANN, MANY, 3, 1)) == [(0, 0b111, 1)]
    with pytest.raises(ValueError, match="never dispatched"):
        one.ack(ANN, 0, 9, 1)
    one.nack(ANN, 1, 3, 0, "", 1)
    taken = [deliveries_of(one.take(BOB, MANY, 4, 1)) for _ in range(3)]
    assert sum(bits for take in taken for _, bits, _ in take) == 0b111111110
    assert {(bits, n) for take in taken for _, bits, n in take if n > 1} == {(0b110, 2)}
    assert all(sum(bits.bit_count() for _, bits, _ in take) <= 4 for take in taken)


@pytest.mark.parametrize("saved", [False, True])
def test_a_cut_record_of_a_key_goes_to_one_worker_at_a_time_and_in_order(
    log: Log, saved: bool
) -> None:
    log.append([entry(key=1, count=5), entry(key=1), entry()], 1)
    one = consumer(log, shared=True)
    order = []
    assert deliveries_of(one.take(ANN, MANY, 2, 1)) == [(0, 0b11, 1)]
    assert deliveries_of(one.take(BOB, MANY, 2, 1)) == [(6, 1, 1)], "the key is taken"
    one.nack(ANN, 1, 2, 0, "", 1)
    assert deliveries_of(one.take(BOB, MANY, 2, 1)) == []
    one.ack(ANN, 0, 1, 1)
    if saved:
        one.ack(BOB, 6, 7, 1)
        one.save()
        one = Consumer.load(log, "c")
    for _ in range(5):
        for first, bits, _ in deliveries_of(one.take(BOB, MANY, 1, 1)):
            offset = first + bits.bit_length() - 1
            order.append(offset)
            one.ack(BOB, offset, offset + 1, 1)
    assert order == [1, 2, 3, 4, 5]


def test_records_of_a_key_go_out_one_after_the_other_and_a_failed_one_first(log: Log) -> None:
    log.append([entry(key=1), entry(key=2), entry(key=1), entry(), entry(key=1)], 1)
    one = consumer(log, shared=True)
    assert firsts(all_of(one)) == [0, 1, 3]
    assert all_of(one, 1, BOB).items == []
    one.nack(ANN, 0, 1, SECOND, "", 1)
    assert all_of(one, 1, BOB).items == []
    assert deliveries_of(all_of(one, 1 + SECOND, BOB)) == [(0, 1, 2)]
    one.ack(BOB, 0, 1, 1 + SECOND)
    assert deliveries_of(all_of(one, 1 + SECOND)) == [(2, 1, 1)]
    one.ack(ANN, 2, 3, 1 + SECOND)
    assert deliveries_of(all_of(one, 1 + SECOND, BOB)) == [(4, 1, 1)]


def test_a_keyed_record_comes_again_when_all_that_failed_of_it_is_due(log: Log) -> None:
    log.append([entry(count=3, key=1)], 1)
    one = consumer(log, shared=True)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "", 1)
    one.nack(ANN, 1, 2, 0, "", 1)
    assert all_of(one, 1 + SECOND, BOB).items == []  # the third is still held
    one.ack(ANN, 2, 3, 1 + SECOND)
    assert deliveries_of(all_of(one, 1 + SECOND, BOB)) == [(0, 0b011, 2)]


def test_one_worker_alone_gets_the_records_of_a_key_together(log: Log) -> None:
    log.append([entry(key=1)] * 3, 1)
    assert firsts(all_of(consumer(log))) == [0, 1, 2]


def test_reading_stops_when_too_many_records_wait_behind_a_key(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_BLOCKED", 2)
    log.append([entry(key=1)] * 5 + [entry()], 1)
    one = consumer(log, shared=True)
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
    one = consumer(log, shared=True, max_pending=4)
    assert firsts(all_of(one)) == [0]  # alone a record always goes
    one.ack(ANN, 0, 8, 1)
    assert all_of(one).items == []
    one.nack(ANN, 8, 10, 0, "", 1)
    assert deliveries_of(all_of(one, 1, BOB)) == [(0, 0b11 << 8, 2)]
    one.ack(BOB, 8, 9, 1)
    assert firsts(all_of(one)) == [10]
    assert one.info().pending == 4


def test_a_new_record_behind_its_key_does_not_hold_up_redeliveries_at_max_pending(log: Log) -> None:
    log.append([entry(key=1), entry(key=1, count=2), entry(), entry()], 1)
    one = consumer(log, shared=True, max_pending=3)
    assert firsts(all_of(one)) == [0, 3, 4]
    one.ack(ANN, 0, 1, 1)
    one.nack(ANN, 3, 5, 0, "", 1)
    assert firsts(all_of(one)) == [3, 4]
    one.ack(ANN, 3, 4, 1)
    assert firsts(all_of(one)) == [1]


def test_a_worker_gets_no_more_than_it_may_hold(log: Log) -> None:
    log.append([entry()] * 5, 1)
    one = consumer(log, shared=True, max_pending_per_worker=2)
    assert firsts(all_of(one)) == [0, 1]
    assert firsts(all_of(one)) == []
    assert firsts(all_of(one, 1, BOB)) == [2, 3]
    assert one.info().workers == 2


def test_gaps_are_reported_once_and_settle_themselves(log: Log) -> None:
    log.append([entry()], 1)
    log.append([NewGap(7, "slow")], 1)
    log.append([entry()], 1)
    one = consumer(log)
    taken = all_of(one)
    assert [type(item) for item in taken.items] == [Delivery, Gap, Delivery]
    one.ack(ANN, 0, 3, 1)
    assert (one.info().floor, holes(all_of(one))) == (3, [])


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
    one.worker_left(ANN, 1)
    while not log.compact(1):
        pass
    assert deliveries_of(all_of(one, 9)) == [(5, 1, 2)]
    assert (one.counts.skipped, one.info().floor) == (4, 5)


def test_what_retention_removed_is_reported_once_and_counted(log: Log) -> None:
    log.append([entry()] * 6, 1)
    one = consumer(log)
    one.take(ANN, MANY, 3, 1)
    one.nack(ANN, 1, 2, SECOND, "", 1)
    one.ack(ANN, 0, 1, 1)
    log.enforce(Limits(max_messages=1), 1)
    taken = all_of(one)
    assert holes(taken) == [Hole(1, 2, Reason.RETENTION), Hole(3, 5, Reason.RETENTION)]
    assert firsts(taken) == [5]
    assert one.info().floor == 2  # held: an ack is still welcome
    assert one.counts.missed == 3
    taken = all_of(one, 1 + TIMEOUT)
    assert holes(taken) == [Hole(2, 3, Reason.RETENTION)]
    assert (one.counts.missed, one.info().floor) == (4, 5)
    assert holes(all_of(one, 1 + TIMEOUT)) == []


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
    assert deliveries_of(all_of(one, 60)) == [(3, 0b11, 2), (5, 1, 1)]


def test_a_deferred_record_ahead_of_the_reader_is_settled_once(log: Log) -> None:
    log.append([entry(count=2), entry(due_us=20, count=2), entry()], 10)
    one = consumer(log)
    assert firsts(one.take(ANN, 1, 2, 30)) == [2]
    assert one.ack(ANN, 2, 4, 30) == 2
    assert one.ack(ANN, 2, 4, 30) == 0
    with pytest.raises(ValueError, match="never dispatched"):
        one.ack(ANN, 2, 5, 30)
    assert firsts(all_of(one, 30)) == [0, 4]


def test_a_deferred_record_that_waits_for_a_worker_is_not_a_reason_to_wake_up_again(
    log: Log,
) -> None:
    log.append([entry(due_us=20), entry(due_us=40)], 10)
    one = consumer(log)
    one.expire(25)
    assert one.deadline_us == 40


def test_a_record_that_claims_too_many_messages_is_reported_as_a_gap(log: Log) -> None:
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
