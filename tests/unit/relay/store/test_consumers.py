"""What a consumer promises: every message is settled or a dead letter, and a crash loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec
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
)

from relay.store.consumer import MAX_DELAY_US, Consumer, Redrive
from relay.store.cursor import CursorDamaged, Dead, Settings, State, decode, encode
from relay.store.log import Log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.create(str(tmp_path / "log"), uuid=bytes(16), definition=b"", created_us=0) as log:
        yield log


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


def test_what_was_never_handed_out_cannot_be_acked(log: Log) -> None:
    log.append([entry(count=2, key=1), entry(count=2, key=1), entry()], 1)
    one = consumer(log, shared=True)
    one.take(ANN, 1, 2, 1)
    for call in (one.ack, one.touch):
        with pytest.raises(ValueError, match="never dispatched"):
            call(ANN, 0, 3, 1)
    with pytest.raises(ValueError, match="never dispatched"):
        one.nack(ANN, 4, 5, 0, "", 1)
    with pytest.raises(ValueError, match="never dispatched"):
        one.ack_through(ANN, 4, 1)
    all_of(one)
    with pytest.raises(ValueError, match="never dispatched"):
        one.ack(ANN, 2, 3, 1)  # read, but behind its key
    with pytest.raises(ValueError, match="is not a range"):
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
    one = consumer(log, shared=True)
    one.take(ANN, MANY, 2, 1)
    one.take(BOB, MANY, 2, 1)
    assert one.ack_through(BOB, 3, 1) == 2
    assert (one.info().floor, one.info().pending) == (0, 2)


def test_what_is_not_acked_in_time_is_delivered_again_and_counted(log: Log) -> None:
    log.append([entry(count=4)], 1)
    one = consumer(log, shared=True)
    all_of(one, 1)
    one.ack(ANN, 1, 2, 1)
    assert one.deadline_us == 1 + TIMEOUT
    assert all_of(one, TIMEOUT).items == []
    assert deliveries_of(all_of(one, 1 + TIMEOUT, BOB)) == [(0, 0b1101, 2)]
    assert one.counts.redelivered == 3
    assert one.ack(ANN, 0, 4, 1 + TIMEOUT) == 3  # though BOB has them now
    assert one.info().pending == 0


def test_a_touch_restarts_the_ack_timeout_for_these_messages_only(log: Log) -> None:
    log.append([entry(count=2)], 1)
    one = consumer(log)
    all_of(one, 1)
    assert one.touch(BOB, 0, 2, 10) == 0
    assert one.touch(ANN, 1, 2, 10) == 1
    assert one.deadline_us == 1 + TIMEOUT
    assert deliveries_of(all_of(one, 9 + TIMEOUT)) == [(0, 0b01, 2)]
    one.ack(ANN, 0, 1, 9 + TIMEOUT)
    assert one.deadline_us == 10 + TIMEOUT
    assert deliveries_of(all_of(one, 10 + TIMEOUT)) == [(0, 0b10, 2)]


def test_a_nack_delivers_again_after_its_delay(log: Log) -> None:
    log.append([entry(count=3), entry()], 1)
    one = consumer(log, shared=True)
    all_of(one)
    assert one.nack(BOB, 0, 4, 0, "not mine", 1) == 0
    assert one.nack(ANN, 0, 1, 5 * SECOND, "later", 1) == 1
    assert one.nack(ANN, 2, 4, 0, "now", 1) == 2
    assert one.info().redelivering == 3
    assert one.deadline_us == 1 + 5 * SECOND
    assert deliveries_of(all_of(one)) == [(0, 0b100, 2), (3, 1, 2)]
    assert deliveries_of(all_of(one, 1 + 5 * SECOND)) == [(0, 0b001, 2)]
    with pytest.raises(ValueError, match="delay_us"):
        one.nack(ANN, 0, 1, MAX_DELAY_US + 1, "", 1)


def test_messages_of_a_record_with_different_counts_are_told_apart(log: Log) -> None:
    log.append([entry(count=3)], 1)
    one = consumer(log)
    all_of(one)
    one.nack(ANN, 1, 2, 0, "", 1)
    all_of(one)
    one.worker_left(ANN, 1)
    assert deliveries_of(all_of(one)) == [(0, 0b101, 2), (0, 0b010, 3)]


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


def test_the_messages_of_a_worker_that_was_lost_are_due_at_once(log: Log) -> None:
    log.append([entry()] * 3, 1)
    one = consumer(log, shared=True, max_deliver=2)
    one.take(ANN, MANY, 2, 1)
    one.confirm(ANN)
    one.worker_left(ANN, 1)
    assert deliveries_of(all_of(one, 1, BOB)) == [(0, 1, 2), (1, 1, 2), (2, 1, 1)]
    one.worker_left(BOB, 1)
    assert [letter.offset for letter in one.dead_letters()] == [0, 1]


def test_only_what_a_worker_confirmed_counts_as_delivered(log: Log) -> None:
    log.append([entry(count=2), entry()], 1)
    one = consumer(log, shared=True, max_deliver=2, ack_timeout_us=SECOND)
    for turn in range(5):
        assert deliveries_of(one.take(b"worker %d" % turn, MANY, MANY, 1 + turn * SECOND)) == [
            (0, 0b11, 1), (2, 1, 1),
        ]  # fmt: skip
    one.confirm_range(
        b"worker 4", 0, 1, 4 * SECOND
    )  # it says so of one message, and has its record
    one.expire(6 * SECOND)
    assert deliveries_of(one.take(ANN, MANY, MANY, 6 * SECOND)) == [(0, 0b11, 2), (2, 1, 1)]
    one.confirm(ANN)
    one.expire(8 * SECOND)
    assert [(d.offset, d.deliveries) for d in one.dead_letters()] == [(0, 2), (1, 2)]
    assert deliveries_of(one.take(ANN, MANY, MANY, 8 * SECOND)) == [(2, 1, 2)]
    with pytest.raises(ValueError, match="never dispatched"):
        one.confirm_range(ANN, 0, 4, 8 * SECOND)


def test_what_nobody_ever_confirms_is_a_dead_letter_after_ten_workers(log: Log) -> None:
    log.append([entry()], 1)
    one = consumer(log, shared=True, max_deliver=2, ack_timeout_us=SECOND)
    for turn in range(10):
        assert not one.dead_letters()
        assert deliveries_of(one.take(ANN, MANY, MANY, 1 + turn * SECOND)) == [(0, 1, 1)]
    one.expire(1 + 10 * SECOND)
    (dead,) = one.dead_letters()
    assert (dead.deliveries, dead.reason) == (
        0, "dispatched 10 times, but no worker confirmed it",
    )  # fmt: skip


@pytest.mark.parametrize("max_deliver", [0, 12])
def test_without_dead_letters_or_with_a_higher_limit_ten_workers_are_not_enough(
    log: Log, max_deliver: int
) -> None:
    log.append([entry()], 1)
    one = consumer(log, shared=True, max_deliver=max_deliver, ack_timeout_us=SECOND)
    for turn in range(11):
        assert deliveries_of(one.take(ANN, MANY, MANY, 1 + turn * SECOND)) == [(0, 1, 1)]


def test_a_delivery_known_not_to_have_arrived_is_not_counted_and_confirmations_stay(
    log: Log,
) -> None:
    log.append([entry()] * 2, 1)
    one = consumer(log, shared=True, max_deliver=2)
    one.take(ANN, MANY, 1, 1)
    one.confirm(ANN)
    for _ in range(30):
        assert firsts(one.take(ANN, MANY, 1, 1)) == [1]
        one.answer_lost(ANN, 1, counted=False)
    assert not one.dead_letters()
    assert one.info().pending == 1, "the first is still with its worker"
    for _ in range(10):
        assert deliveries_of(one.take(ANN, MANY, 1, 1)) == [(1, 1, 1)]
        one.answer_lost(ANN, 1)
    assert [dead.offset for dead in one.dead_letters()] == [1]


def test_a_worker_may_ack_what_it_never_confirmed_also_after_a_restart(log: Log) -> None:
    log.append([entry()] * 2, 1)
    one = consumer(log, shared=True, ack_timeout_us=SECOND)
    one.take(ANN, MANY, MANY, 1)
    one.expire(2 * SECOND)
    one.save()
    again = Consumer.load(log, "c")
    assert again.ack(ANN, 0, 1, 2 * SECOND) == 1
    assert deliveries_of(again.take(BOB, MANY, MANY, 2 * SECOND)) == [(1, 1, 1)]


def test_a_dead_letter_does_not_hold_up_its_key(log: Log) -> None:
    log.append([entry(key=1)] * 2, 1)
    one = consumer(log, shared=True, max_deliver=1)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "no", 1)
    assert firsts(all_of(one)) == [1]


def test_the_delay_of_a_message_that_was_acked_meanwhile_ends_without_effect(log: Log) -> None:
    log.append([entry(count=2, key=1)], 1)
    one = consumer(log, shared=True, max_deliver=2)
    all_of(one)
    one.nack(ANN, 0, 1, SECOND, "", 1)
    one.ack(ANN, 0, 1, 1)
    one.nack(ANN, 1, 2, 0, "", 1)
    assert deliveries_of(all_of(one)) == [(0, 0b10, 2)]
    one.nack(ANN, 1, 2, 0, "no", 1)
    assert all_of(one, 1 + SECOND).items == []
    assert one.dead_letters() == [Dead(1, 2, "no")]
    assert one.deadline_us is None


def test_an_ack_through_spares_deferred_records_below_it(log: Log) -> None:
    log.append([entry(due_us=20), entry(), entry()], 10)
    one = consumer(log)
    all_of(one, 10)
    all_of(one, 20)
    assert one.ack_through(ANN, 2, 20) == 2
    assert one.ack_through(ANN, 0, 20) == 1


def test_a_loaded_consumer_delivers_again_what_was_handed_out(log: Log) -> None:
    log.append([entry(count=4), entry(), entry(key=1), entry(key=1), entry()], 1)
    one = consumer(log, shared=True)
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
    assert deliveries_of(all_of(one)) == [(0, 0b1001, 2), (4, 1, 2), (5, 1, 2), (7, 1, 1)]
    assert deliveries_of(all_of(one, 1 + SECOND)) == [(0, 0b0100, 2)]
    one.ack(ANN, 5, 6, 1)
    assert firsts(all_of(one)) == [6]


def test_a_worker_may_ack_what_it_was_handed_before_a_crash(log: Log) -> None:
    log.append([entry(count=4)], 1)
    one = consumer(log)
    all_of(one)
    one.save(sync=True)
    one = Consumer.load(log, "c")
    assert one.ack(ANN, 0, 3, 1) == 3
    assert deliveries_of(all_of(one)) == [(0, 0b1000, 2)]


def test_an_ephemeral_consumer_is_never_written(log: Log) -> None:
    one = consumer(log, durable=False)
    one.save()
    assert not one.dirty
    assert log.cursors.names() == []
    with pytest.raises(KeyError):
        Consumer.load(log, "c")


def test_a_damaged_cursor_is_reported(log: Log) -> None:
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


# -- redriving, pausing, changing --------------------------------------------------------------------------------


def buried(log: Log, count: int, **fields: object) -> Consumer:
    """A group whose first `count` records became dead letters after one delivery."""
    one = consumer(log, shared=True, max_deliver=1, **fields)
    all_of(one)
    for first in range(count):
        one.nack(ANN, first, first + 1, 0, "no", 1)
    one.forget_dead(len(one.dead_letters()))
    return one


def redriven(one: Consumer, offset: int, now_us: int) -> Redrive:
    return one.redrive(offset, one.letter(offset, now_us), now_us)


def test_a_redriven_message_is_new_again_also_after_a_crash(log: Log) -> None:
    log.append([entry(), entry()], 1)
    one = buried(log, 2)
    assert one.info().lag == 0
    assert redriven(one, 1, 1) is redriven(one, 1, 1) is Redrive.WAITING
    assert (one.info().lag, one.info().counts.redriven, one.info().floor) == (1, 1, 1)
    one.save()
    two = Consumer.load(log, "c")
    for each in (one, two):
        assert deliveries_of(all_of(each)) == [(1, 1, 1)]
        assert each.ack(ANN, 1, 2, 1) == 1
        assert each.info().lag == 0
        assert each.info().counts.redriven == 1


def test_one_message_of_a_record_is_redriven_alone(log: Log) -> None:
    log.append([entry(count=3)], 1)
    one = consumer(log, shared=True, max_deliver=1)
    all_of(one)
    one.nack(ANN, 1, 2, 0, "no", 1)
    one.forget_dead(1)
    assert redriven(one, 1, 1) is Redrive.WAITING  # the others are still held
    one.ack(ANN, 0, 1, 1)
    assert deliveries_of(all_of(one)) == [(0, 0b010, 1)]
    assert one.ack(ANN, 1, 3, 1) == 2
    assert one.info().lag == 0


def test_a_redriven_message_waits_behind_those_of_its_key(log: Log) -> None:
    log.append([entry(key=1), entry(key=1), entry(key=1)], 1)
    one = buried(log, 1)
    assert firsts(all_of(one)) == [1]
    assert redriven(one, 0, 1) is Redrive.WAITING
    assert firsts(all_of(one)) == []
    one.ack(ANN, 1, 2, 1)
    got = firsts(all_of(one))
    assert len(got) == 1
    one.ack(ANN, got[0], got[0] + 1, 1)
    assert sorted(got + firsts(all_of(one))) == [0, 2]


def test_what_the_log_no_longer_has_cannot_be_redriven(log: Log) -> None:
    log.append([entry(expires_us=5), entry()], 1)
    one = buried(log, 2)
    assert redriven(one, 0, 6) is Redrive.GONE
    assert redriven(one, 2, 6) is Redrive.GONE
    assert one.info().counts.redriven == 0


def test_a_message_that_was_not_read_yet_is_delivered_once_when_it_is_redriven(log: Log) -> None:
    log.append([entry(), entry(due_us=10)], 1)
    one = consumer(log)
    assert redriven(one, 0, 1) is redriven(one, 1, 1) is Redrive.WAITING
    assert firsts(all_of(one)) == [0]
    assert firsts(all_of(one, 11)) == [1]
    assert firsts(all_of(one, 11)) == []


def test_a_deferred_message_that_was_dead_is_redriven(log: Log) -> None:
    log.append([entry(due_us=10)], 1)
    one = consumer(log, max_deliver=1)
    assert firsts(all_of(one, 11)) == [0]
    one.nack(ANN, 0, 1, 0, "no", 11)
    one.forget_dead(1)
    assert redriven(one, 0, 12) is Redrive.WAITING
    assert firsts(all_of(one, 12)) == [0]


def test_settings_pause_and_former_settings_outlive_a_crash(log: Log) -> None:
    log.append([entry(), entry()], 1)
    one = consumer(log, max_deliver=3)
    assert firsts(all_of(one)) == [0, 1]
    one.ack(ANN, 0, 1, 1)
    old = one.settings
    one.change(ack_timeout_us=5 * SECOND, max_deliver=None, paused=True, now_us=1)
    one.save()
    two = Consumer.load(log, "c")
    assert (two.settings.ack_timeout_us, two.settings.max_deliver) == (5 * SECOND, 3)
    assert (two.paused, two.former, two.position) == (True, [old], 2)
    two.change(ack_timeout_us=TIMEOUT, max_deliver=None, paused=False, now_us=1)
    assert (two.paused, two.settings) == (False, old)
    assert old not in two.former
    with pytest.raises(ValueError, match="max_deliver"):
        two.change(ack_timeout_us=None, max_deliver=-1, paused=None, now_us=1)


def test_a_new_ack_timeout_starts_for_what_is_held_and_a_lower_limit_holds_at_the_next_failure(
    log: Log,
) -> None:
    log.append([entry()], 1)
    one = consumer(log, max_deliver=9)
    all_of(one)
    one.change(ack_timeout_us=SECOND, max_deliver=1, paused=None, now_us=2)
    one.expire(SECOND)
    assert one.info().pending == 1
    one.expire(SECOND + 2)
    assert [letter.offset for letter in one.dead_letters()] == [0]


def test_a_cursor_of_an_older_store_is_read(log: Log) -> None:
    log.append([entry()], 1)
    one = consumer(log)
    one.save()
    state = decode("c", log.cursors.get("c") or b"")
    fields = [getattr(state, name) for name in State.__struct_fields__]
    older = msgspec.to_builtins(fields[:-2], builtin_types=(bytes,))
    older[6] = older[6][:4]  # without `redriven`
    rest = bytes([1]) + msgspec.msgpack.encode(older)
    log.cursors.put("c", crc32(rest).to_bytes(4, "little") + rest)
    two = Consumer.load(log, "c")
    assert (two.paused, two.former, two.counts.redriven) == (False, [], 0)
    assert firsts(all_of(two)) == [0]
