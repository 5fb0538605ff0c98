"""A producer and a store back to back: whatever happens to calls and answers in transit, each message is stored
once, in order.

One machine is `iris.core.producer`, the other `relay.store.producers` with a list as its log. Between them is a path
that loses, repeats, delays and refuses calls in virtual time, drawn from a seed or as a test demands.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

import iris
from iris.core.bundle import decode_keyed
from iris.core.outbound import Outbound
from iris.core.producer import PLAIN, WINDOW, Extras, Producer, Sent
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Opener
from iris.errors import (
    ConnectionLost,
    NoStream,
    Overloaded,
    RequestTimeout,
    StreamError,
    StreamUnavailable,
)
from iris.wire.codec import END, metadata_prefix
from iris.wire.kinds import NEVER_US, Kind
from iris.wire.streams import Append, Outcome
from relay.store.answers import outcome_to_wire
from relay.store.outcomes import Stored
from relay.store.producers import Producers
from relay.store.records import Stamp

OLD, NEW = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
LOG, PRODUCER = b"l" * 16, b"p" * 16
CALL_BYTES = 1 << 16
ANSWER_US = 300
MAX_CALLS = 10_000
"""Most calls of one test; a test that needs more would never end."""


class Waiter:
    """Holds the outcome of an append: the offset of its record, or an error."""

    def __init__(self) -> None:
        self.got: Any = None

    def done(self) -> bool:
        return self.got is not None

    def set_result(self, result: Any, /) -> None:
        assert self.got is None
        self.got = result

    set_exception = set_result


class Log:
    """The store: its table of producers, and the stored messages."""

    def __init__(self) -> None:
        self.producers = Producers(())
        self.stored: list[bytes] = []

    def append(self, key: ClusterKey, call: Append) -> list[Outcome]:
        outcomes = []
        for record in call.records:
            stamp = Stamp(call.producer, call.epoch, record.sequence)
            outcome: Any = self.producers.judge(stamp)
            if outcome is None:
                first = len(self.stored)
                self.stored += _opened(key, call.sender_id, record.end, record.body)
                outcome = Stored(first, len(self.stored))
                self.producers.take(stamp, first, len(self.stored) - first, 0)
            outcomes.append(outcome_to_wire(outcome))
        self.producers.commit()
        return outcomes


def _opened(key: ClusterKey, sender_id: bytes, end: bytes, body: bytes) -> list[bytes]:
    prefix = metadata_prefix(Kind.STREAM, "orders", key.key_id, sender_id)
    payloads = decode_keyed(Opener(key, sender_id).open(body, prefix + end)[1])[0]
    assert END.unpack(end)[2] == len(payloads)
    return payloads


class World:
    """A producer, a store, and the path between them. `way` gets each call, and can use `take`, `tell` and `lose`
    for it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now_us = 0
        self.log = Log()
        self.uuid, self.key = LOG, OLD
        self.held = {key.key_id: key for key in (OLD, NEW)}
        self.opened = 0
        """Number of records that were begun."""
        self.taken: set[Sent[Waiter]] = set()
        self.way: Callable[[Sent[Waiter]], None] = self.deliver
        self.calls: list[Sent[Waiter]] = []
        self.appends: list[tuple[bytes, Waiter, int]] = []
        """Added messages: (payload, waiter, index within the record)."""
        self._numbers = itertools.count()
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._out = Outbound(
            relay_id=bytes(16), session_id=bytes(8), challenge=bytes(32), entropy=self.rng.randbytes,
            on_full=lambda: None,
        )  # fmt: skip
        self.producer = Producer(
            "orders", PRODUCER, waiter=Waiter, on_open=self._note, find_key=self.held.get, rng=self.rng.random
        )  # fmt: skip

    def _note(self) -> None:
        self.opened += 1

    # -- what a test does ------------------------------------------------------------------------------------

    def add(self, *payloads: bytes, extras: Extras = PLAIN) -> list[Waiter]:
        """Append messages in one turn; return the waiter of each."""
        for payload in payloads:
            waiter, index = self.producer.add(payload, None, False, extras)
            self.appends.append((payload, waiter, index))
        self.producer.cut()
        return [waiter for _, waiter, _ in self.appends[-len(payloads) :]]

    def at(self, after_us: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_us + after_us, next(self._numbers), event))

    def run(self) -> None:
        """Run until no event is left, and all appends have ended."""
        self.run_until_waiting()
        assert self.producer.idle
        assert self.producer.bytes == 0

    def run_until_waiting(self) -> None:
        """Run until no event is left."""
        while True:
            due_us = self.producer.due_us if self.producer.busy else NEVER_US
            if due_us <= self.now_us:
                for sent in self.producer.due(
                    self.now_us, self.uuid, self.key, self._out, CALL_BYTES
                ):
                    self.calls.append(sent)
                    assert len(self.calls) < MAX_CALLS
                    self.way(sent)
            elif self._events and self._events[0][0] <= due_us:
                self.now_us, _, event = heapq.heappop(self._events)
                event()
            elif due_us < NEVER_US:
                self.now_us = due_us
            else:
                break

    # -- what the way does -----------------------------------------------------------------------------------

    def take(self, sent: Sent[Waiter]) -> list[Outcome]:
        """Let the store accept a call. A channel accepts each call once, and ignores a repeated one."""
        if sent in self.taken:
            return []
        self.taken.add(sent)
        return self.log.append(sent.key, sent.call)

    def tell(self, sent: Sent[Waiter], outcomes: list[Outcome]) -> None:
        self.producer.answered(sent, outcomes, self.now_us)

    def lose(self, sent: Sent[Waiter], error: Exception) -> bool:
        return self.producer.lost(sent, error, self.now_us)

    def deliver(self, sent: Sent[Waiter]) -> None:
        """Deliver a call to the store, and the answer to the producer."""
        self.at(ANSWER_US, lambda: self.tell(sent, self.take(sent)))

    def once(self, first: Callable[[Sent[Waiter]], None]) -> None:
        """Use `first` for the next call only."""

        def way(sent: Sent[Waiter]) -> None:
            self.way = self.deliver
            first(sent)

        self.way = way

    # -- what holds ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that each message has its reported outcome, and that messages are stored in order and at most once."""
        stored = self.log.stored
        assert len(set(stored)) == len(stored), "stored twice"
        order = {payload: number for number, (payload, *_) in enumerate(self.appends)}
        assert [order[payload] for payload in stored] == sorted(order[p] for p in stored)
        for payload, waiter, index in self.appends:
            if isinstance(waiter.got, int):
                assert stored[waiter.got + index] == payload
            else:
                assert isinstance(waiter.got, StreamError)
                assert waiter.got.may_have_run or payload not in stored, waiter.got


def away(cause: Exception | None = None) -> StreamError:
    """Return the error for a store that is temporarily away, from the store itself or (`cause`) from a relay."""
    error = NoStream("orders", "no store holds it") if cause else StreamUnavailable("orders", "it restarts")  # fmt: skip
    error.passing = True
    error.__cause__ = cause
    return error


def denial(said: str) -> Exception:
    """Return the error of a call that, according to a relay, has not run."""
    error: Any = getattr(iris, said)("orders", "so says the relay")
    error.may_have_run = False
    return away(error) if said == "NoMembers" else error


# -- by seeds ------------------------------------------------------------------------------------------------


class Chaos:
    """Draws the fate of each call until some time, after which all calls succeed."""

    def __init__(self, world: World, calm_us: int, *, refuses: bool) -> None:
        self.world = world
        self.calm_us = calm_us
        self.refuses = refuses

    def __call__(self, sent: Sent[Waiter]) -> None:
        world, rng = self.world, self.world.rng
        fate = rng.random() if world.now_us < self.calm_us else 1.0
        delay_us = rng.randrange(1, 20_000)
        if fate < 0.1:  # the call is lost
            world.at(delay_us, lambda: world.lose(sent, ConnectionLost("orders", "cut")))
        elif fate < 0.2:  # its answer is lost
            world.at(delay_us // 2, lambda: world.take(sent))
            world.at(delay_us, lambda: world.lose(sent, RequestTimeout("orders", "too late")))
        elif fate < 0.3:  # the call arrives after its sender has stopped waiting
            world.at(delay_us, lambda: world.lose(sent, Overloaded("orders", "so says a relay")))
            world.at(delay_us + rng.randrange(50_000), lambda: world.take(sent))
        elif fate < 0.4:  # it arrives twice
            world.at(delay_us, lambda: world.tell(sent, world.take(sent)))
            world.at(delay_us + rng.randrange(50_000), lambda: world.take(sent))
        elif fate < 0.5:
            world.at(delay_us, lambda: world.lose(sent, away()))
        elif fate < 0.55 and self.refuses:
            world.at(delay_us, lambda: world.lose(sent, StreamError("orders", "it is paused")))
        else:
            world.at(delay_us, lambda: world.tell(sent, world.take(sent)))


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_each_append_is_stored_once_and_in_order_over_loss_duplication_and_late_answers(
    seed: int, refuses: bool
) -> None:
    world = World(seed)
    world.way = Chaos(world, 1_000_000, refuses=refuses)
    number = itertools.count()
    for _ in range(120):
        count, size = world.rng.randrange(1, 20), world.rng.choice((1, 1, 1, 700))
        payloads = [b"%06d" % next(number) * size for _ in range(count)]
        world.at(world.rng.randrange(1_000_000), lambda payloads=payloads: world.add(*payloads))  # type: ignore[misc]
    world.run()
    world.check()
    assert len(world.appends) == next(number)
    results = [waiter.got for _, waiter, _ in world.appends]
    if not refuses:  # then no new epoch is needed, so no message is abandoned
        assert all(isinstance(got, int) for got in results)
    assert max(call.call.epoch for call in world.calls) == 0 or refuses


@pytest.mark.parametrize("seed", range(20))
def test_a_producer_that_its_store_forgot_goes_on_in_another_epoch(seed: int) -> None:
    world = World(seed)
    epochs = set()
    for turn in range(30):
        if world.rng.random() < 0.3:
            world.log.producers = Producers(())
        world.add(*(b"%d.%d" % (turn, n) for n in range(world.rng.randrange(1, 300))))
        world.run()
        epochs.add(world.calls[-1].call.epoch)
    world.check()
    assert len(world.log.stored) == len(world.appends)
    assert len(epochs) > 1


# -- as a test says ------------------------------------------------------------------------------------------


def test_what_was_lost_goes_out_again_in_order_before_anything_new() -> None:
    world = World()
    world.once(
        lambda sent: world.at(1000, lambda: world.lose(sent, ConnectionLost("orders", "cut")))
    )
    world.add(b"0", b"1")
    world.at(500, lambda: world.add(b"2"))  # before the loss of 0 and 1 is noticed
    world.at(1001, lambda: world.add(b"3"))
    world.run()
    assert world.log.stored == [b"0", b"1", b"2", b"3"]
    numbers = [[record.sequence for record in sent.call.records] for sent in world.calls]
    assert numbers == [[0], [1], [0, 1], [2]]  # 2 came out of order
    assert {sent.call.epoch for sent in world.calls} == {0}


def test_no_more_than_a_window_is_on_the_way() -> None:
    world = World()
    held: list[Sent[Waiter]] = []
    world.way = held.append
    for number in range(3 * WINDOW):
        world.add(b"%d" % number)
    world.run_until_waiting()
    assert sum(len(sent.records) for sent in held) == WINDOW
    world.way = world.deliver
    for sent in held:
        world.deliver(sent)
    world.run()
    world.check()
    assert len(world.log.stored) == 3 * WINDOW


def test_a_call_is_no_larger_than_the_relay_takes_unless_one_record_is() -> None:
    world = World()
    world.add(*(bytes([n]) * 20_000 for n in range(10)), b"x" * 2 * CALL_BYTES, b"y")
    world.run()
    world.check()
    sizes = [sum(len(record.body) for record in sent.call.records) for sent in world.calls]
    assert [size <= CALL_BYTES for size in sizes] == [*[True] * (len(sizes) - 2), False, True]
    assert len(sizes) < 12


def test_a_producer_waits_longer_each_time_until_something_is_stored() -> None:
    world = World()
    sent_us: list[int] = []

    def gone(sent: Sent[Waiter]) -> None:
        sent_us.append(world.now_us)
        if len(sent_us) == 10:
            world.way = world.deliver
        world.lose(sent, away())

    world.way = gone
    world.add(b"x")
    world.run()
    pauses = [after - before for before, after in itertools.pairwise(sent_us)]
    most = [min(20_000 << number, 1_000_000) for number in range(9)]
    assert all(top / 2 <= pause <= top for pause, top in zip(pauses, most, strict=True)), pauses
    assert world.log.stored == [b"x"]
    sent_us.clear()
    world.way = gone
    world.add(b"y")
    world.run()
    assert 10_000 <= sent_us[1] - sent_us[0] <= 20_000


@pytest.mark.parametrize("said", ["NoMembers", "Overloaded", "RelayError"])
def test_a_relay_that_denies_a_delivered_append_has_it_stored_once(said: str) -> None:
    """In a new epoch the store cannot recognize a repeated record, so a relay's "it has not run" does not suffice."""
    world = World()

    def refuse(sent: Sent[Waiter]) -> None:
        world.at(10, lambda: world.lose(sent, StreamError("orders", "refused by the store")))

    def lie(sent: Sent[Waiter]) -> None:
        world.take(sent)
        world.at(100, lambda: world.lose(sent, denial(said)))
        world.once(refuse)

    world.once(lie)
    world.at(0, lambda: world.add(b"pay 100"))
    world.at(10, lambda: world.add(b"refused"))
    world.run()
    (first, refused) = (waiter.got for _, waiter, _ in world.appends)
    assert isinstance(first, StreamUnavailable)
    assert first.may_have_run
    assert (str(refused), refused.may_have_run) == ("stream orders: refused by the store", False)
    world.add(b"after")
    world.run()
    world.check()
    assert world.log.stored == [b"pay 100", b"after"]


@pytest.mark.parametrize("stored_first", [False, True])
@pytest.mark.parametrize("retired", [False, True])
def test_a_lost_record_sealed_under_the_old_key_is_never_stored_under_the_new_one(
    retired: bool, stored_first: bool
) -> None:
    world = World()

    def lose(sent: Sent[Waiter]) -> None:
        if stored_first:
            world.take(sent)
        world.key = NEW
        if retired:
            del world.held[OLD.key_id]
        world.at(100, lambda: world.lose(sent, ConnectionLost("orders", "cut by the test")))

    world.once(lose)
    (lost,) = world.add(b"on the way")
    world.run()
    if retired:  # it may be stored or not, and its key is retired
        assert isinstance(lost.got, StreamUnavailable)
        assert lost.got.may_have_run
    else:
        assert lost.got == 0
    (after,) = world.add(b"after")
    world.run()
    world.check()
    assert after.got == (not retired or stored_first)
    assert world.log.stored == [b"on the way", b"after"][retired and not stored_first :]
    sealed = {record.body: sent.key for sent in world.calls for record in sent.records}
    assert list(sealed.values()) == [OLD, NEW]  # the lost one only under the old key


@pytest.mark.parametrize("retired", [False, True])
def test_a_refused_record_sealed_under_the_old_key_is_stored_and_readable_in_the_end(
    retired: bool,
) -> None:
    world = World()

    def busy(sent: Sent[Waiter]) -> None:
        world.key = NEW
        if retired:
            del world.held[OLD.key_id]
        world.at(100, lambda: world.lose(sent, away()))

    world.once(busy)
    (refused,) = world.add(b"refused")
    world.run()
    world.check()
    assert refused.got == 0
    assert world.log.stored == [b"refused"]  # so it was opened with the key under which it came
    assert [sent.key for sent in world.calls] == [OLD, NEW if retired else OLD]


def test_lost_records_under_different_keys_go_out_again_each_under_its_own() -> None:
    world = World()

    def lose(sent: Sent[Waiter]) -> None:
        world.key = NEW
        world.at(100, lambda: world.lose(sent, ConnectionLost("orders", "cut by the test")))
        if len(world.calls) == 2:
            world.way = world.deliver

    world.way = lose
    world.add(b"0")
    world.at(50, lambda: world.add(b"1"))
    world.run()
    world.check()
    assert [sent.key for sent in world.calls] == [OLD, NEW, OLD, NEW]
    assert world.log.stored == [b"0", b"1"]


def test_a_record_for_a_stream_that_was_made_again_under_another_key_is_sealed_again() -> None:
    world = World()

    def deleted(sent: Sent[Waiter]) -> None:
        world.uuid, world.key = b"m" * 16, NEW
        world.lose(sent, away())

    world.once(deleted)
    world.add(b"0")
    world.run()
    world.check()
    assert [sent.key for sent in world.calls] == [OLD, NEW]


def test_an_older_self_of_a_producer_stores_nothing_and_gets_an_error() -> None:
    world = World()
    world.add(b"0")
    world.run()
    world.log.producers.take(Stamp(PRODUCER, 5, 0), 1, 1, 0)
    world.log.producers.commit()
    world.log.stored.append(b"of the other")
    fenced = world.add(b"1", b"2")
    world.run()
    for waiter in fenced:
        assert (
            str(waiter.got) == "stream orders: another producer has taken over this producer's id"
        )
        assert not waiter.got.may_have_run
    assert world.log.stored == [b"0", b"of the other"]
    world.add(b"3")
    world.run()
    assert [sent.call.epoch for sent in world.calls] == [0, 0, 1]


def test_callers_that_wait_at_the_end_learn_what_may_be_stored() -> None:
    world = World()
    world.way = lambda sent: None
    (on_the_way,) = world.add(b"on the way")
    world.run_until_waiting()
    (queued,) = world.add(b"queued")
    opened, _ = world.producer.add(b"begun", None, False, PLAIN)
    world.producer.end("the client was closed")
    assert world.producer.idle
    for waiter, may_have_run in ((on_the_way, True), (queued, False), (opened, False)):
        assert isinstance(waiter.got, StreamUnavailable)
        assert waiter.got.may_have_run is may_have_run
        assert "the client was closed" in str(waiter.got)
    with pytest.raises(StreamUnavailable, match="the client was closed"):
        world.producer.add(b"late", None, False, PLAIN)


def test_where_there_is_nowhere_to_send_to_all_hear_why_and_what_comes_next_is_stored() -> None:
    world = World()
    world.way = lambda sent: None
    (on_the_way,) = world.add(b"on the way")
    world.run_until_waiting()
    (queued,) = world.add(b"queued")
    world.producer.failed(NoStream("orders", "no store holds it"))
    assert isinstance(queued.got, NoStream)
    assert isinstance(on_the_way.got, StreamUnavailable)
    assert on_the_way.got.may_have_run
    (sent,) = world.calls
    world.lose(sent, RequestTimeout("orders", "too late"))
    world.way = world.deliver
    (after,) = world.add(b"after")
    world.run()
    assert (after.got, world.log.stored) == (0, [b"after"])
    assert [sent.call.epoch for sent in world.calls] == [0, 1]


def test_messages_of_one_turn_share_a_record_unless_they_are_stored_otherwise() -> None:
    world = World()
    keyed = Extras(b"k", b"h" * 32)
    world.add(b"0", b"1")
    world.add(b"2", b"3", extras=keyed)
    world.add(b"4", extras=Extras(id_hash=b"i" * 32))
    world.producer.add(b"5", None, False, keyed)
    world.producer.add(b"6", None, False, Extras(b"k", b"h" * 32))
    world.producer.add(b"7", None, True, keyed)
    one = Extras(id_hash=b"i" * 32)
    world.producer.add(b"8", None, True, one)
    world.producer.add(b"9", None, True, one)
    world.producer.cut()
    world.run()
    (sent,) = world.calls
    assert [record.payloads for record in sent.records] == [
        [b"0", b"1"], [b"2", b"3"], [b"4"], [b"5", b"6"], [b"7"], [b"8"], [b"9"],
    ]  # fmt: skip
    assert world.opened == 7
    assert [record.key_hash for record in sent.call.records][1:4] == [b"h" * 32, b"", b"h" * 32]
