"""One worker of a consumer that is not shared is active, and the others stand by in order of arrival."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.consumers import MANY, SECOND, entry

from iris.core.conversation import UP
from iris.wire.consumers import (
    Attend,
    Attended,
    Consume,
    ConsumerInfo,
    Delivered,
    HandOver,
    Range,
    Settle,
)
from relay.store.clock import Clock
from relay.store.consumer_calls import ConsumerCalls, ConsumerRefused
from relay.store.leases import Leases
from relay.store.line import FRESH_US, LEASE_US, MAX_LINE, MAX_OF_LEASE, RETURN_US, LineFull
from relay.store.log import Log

STORE = bytes(16)
ANN, BOB, CAT, DAN = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))
"""Workers, each of a client of its own whose lease has the same id."""


class Incoming:
    """A call that was received, and how it was answered."""

    hops = 0

    def __init__(self) -> None:
        Incoming.hops += 1
        self.hop = Incoming.hops
        self.session: Any = SimpleNamespace(state=UP, message_limit=MANY)
        self.rests_on: int | None = None
        self.said: Any = None

    def answer(self, answer: object) -> None:
        assert self.said is None, "a call is answered once"
        self.said = answer

    def refuse(self, code: str, detail: str) -> None:
        self.answer((code, detail))


class Place:
    """The consumer "c" of a log at a store, in virtual time."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.now_us = SECOND
        self.clock = Clock(self.now_us)
        self.leases = Leases(STORE, self.clock)
        self.start()

    def start(self) -> None:
        """Begin as a store that has just opened the log."""
        self.leases = Leases(STORE, self.clock)
        self.calls = ConsumerCalls(self.log, lambda name, dead: None, self.clock)

    def ask(
        self, worker: bytes, lease: bytes = b"", *, was_active: bool = False, shared: bool = False, most: int = 1
    ) -> Incoming:  # fmt: skip
        """Let a worker ask for messages; return its call."""
        incoming: Any = Incoming()
        call = Consume(
            "c", worker, MANY, most, 60_000, shared=shared, lease=lease or worker, label=worker[:1].decode(), was_active=was_active,
            ack_timeout_us=86_400_000_000,
        )  # fmt: skip
        held = None if shared else self.leases.renewed(lease or worker)
        self.calls.take(incoming, call, self.now_us, lease=held)
        return incoming

    def settle(self, worker: bytes, **fields: Any) -> Any:
        incoming: Any = Incoming()
        self.calls.settle(incoming, Settle("c", worker, **fields), self.now_us)
        return incoming.said

    def ack(self, worker: bytes, offset: int) -> Any:
        return self.settle(worker, done=[Range(offset, offset + 1)])

    def attend(self, lease: bytes) -> Incoming:
        """Renew a lease; return the call, which waits, after a client has heard of earlier changes."""
        for _ in range(2):
            incoming: Any = Incoming()
            self.leases.attend(incoming, Attend("c", lease, 1000))
            if incoming.said is None:
                break
        return incoming

    def pass_time(self, by_us: int) -> None:
        self.now_us += by_us
        self.clock.at(self.now_us)
        self.calls.tend(self.now_us)
        self.leases.tend()

    def told(self, lease: bytes) -> list[int]:
        """Return the places that the client of a lease is told when it asks."""
        incoming: Any = Incoming()
        self.leases.attend(incoming, Attend("c", lease))
        assert isinstance(incoming.said, Attended)
        return [placed.place for placed in incoming.said.places]

    @property
    def info(self) -> ConsumerInfo:
        ((info,), _) = self.calls.described("", workers=True)
        return info


def offsets(incoming: Incoming) -> list[int]:
    """Return the offsets of what a call was answered with."""
    assert isinstance(incoming.said, Delivered)
    return [handed.item.offset for handed in incoming.said.items]


def deliveries(incoming: Incoming) -> list[int]:
    assert isinstance(incoming.said, Delivered)
    return [handed.deliveries for handed in incoming.said.items]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Log.create(str(tmp_path / "log"), uuid=bytes(16), definition=b"", created_us=0) as log:
        log.append([entry()] * 6, 1)
        yield Place(log)


def test_workers_become_active_in_the_order_in_which_they_came(place: Place) -> None:
    assert offsets(place.ask(ANN)) == [0]
    waiting = {worker: place.ask(worker) for worker in (BOB, CAT, DAN)}
    assert [place.told(worker) for worker in (ANN, BOB, CAT, DAN)] == [[0], [1], [2], [3]]
    assert (place.info.active, place.info.standing_by, place.info.standing) == (["a"], ["b", "c", "d"], 3)  # fmt: skip
    for leaver, follower in ((ANN, BOB), (BOB, CAT), (CAT, DAN)):
        assert waiting[follower].said is None
        place.settle(leaver, gone=True)
        assert offsets(waiting[follower]) == [0]  # at once, and not later
        assert place.told(follower) == [0]
    place.settle(DAN, gone=True)
    assert (place.info.active, place.info.standing) == ([], 0)
    place.pass_time(1)
    assert len(place.leases) == 0


def test_what_a_worker_gives_back_when_it_closes_does_not_count_as_delivered(place: Place) -> None:
    taken = place.ask(ANN, most=2)
    assert (offsets(taken), deliveries(taken)) == ([0, 1], [1, 1])
    follower = place.ask(BOB, most=2)
    place.settle(ANN, gone=True, had=[Range(0, 2)], unseen=[Range(0, 2)])
    assert (offsets(follower), deliveries(follower)) == ([0, 1], [1, 1])


def test_a_worker_whose_lease_ends_is_replaced_and_what_it_settles_later_is_refused(
    place: Place,
) -> None:
    assert offsets(place.ask(ANN, most=2)) == [0, 1]
    place.settle(ANN, had=[Range(0, 2)])
    follower = place.ask(BOB)
    for _ in range(5):  # longer than a lease
        place.attend(BOB)
        place.pass_time(LEASE_US // 4)
    assert (offsets(follower), deliveries(follower)) == ([0], [2])
    assert place.info.active == ["b"]
    for late in (
        place.ack(ANN, 0),
        place.settle(ANN, through=1),
        place.settle(ANN, failed=[Range(0, 1)]),
        place.settle(ANN, held=[Range(0, 1)]),
        place.settle(ANN, had=[Range(0, 1)]),
    ):
        assert late[0] == "not-active"
        assert "another worker of consumer 'c' is active" in late[1]
    assert place.info.lag == 6  # nothing of it was settled
    assert place.settle(ANN, gone=True).count == 0
    assert place.ack(BOB, 0).count == 1
    last = place.ask(ANN)
    assert last.said is None
    assert place.told(ANN) == [1]


def test_a_renewed_lease_keeps_a_worker_active_however_long_its_work_takes(place: Place) -> None:
    place.ask(ANN)
    follower = place.ask(BOB)
    for _ in range(100):
        place.pass_time(LEASE_US // 2)
        place.attend(ANN)
        place.attend(BOB)
    assert follower.said is None or not offsets(follower)
    assert place.info.active == ["a"]


def test_a_worker_whose_lease_ended_stays_active_until_another_one_comes(place: Place) -> None:
    place.ask(ANN)
    place.settle(ANN, had=[Range(0, 1)])
    place.pass_time(10 * LEASE_US)
    assert place.info.active == ["a"]
    assert place.ack(ANN, 0).count == 1  # which renews the lease, as each of its calls does
    assert place.ask(BOB).said is None
    place.pass_time(LEASE_US - 1)
    place.attend(BOB)
    assert place.info.active == ["a"]
    place.pass_time(1)
    assert place.info.active == ["b"]


def test_leases_that_end_one_after_the_other_while_nobody_can_renew_replace_nobody(
    place: Place,
) -> None:
    """The relay or the store stands still: the others can be reached as little as the first."""
    place.ask(ANN)
    place.settle(ANN, had=[Range(0, 1)])
    place.pass_time(LEASE_US // 5)
    place.ask(BOB)
    for _ in range(20):
        place.pass_time(LEASE_US // 10)
        assert place.info.active == ["a"]
    assert place.ack(ANN, 0).count == 1


def test_a_store_that_leaves_its_relay_renews_leases_and_lets_nobody_wait(place: Place) -> None:
    place.ask(ANN)
    place.ask(BOB)
    place.pass_time(LEASE_US - 1)
    for worker in (ANN, BOB):
        incoming: Any = Incoming()
        place.leases.attend(incoming, Attend("c", worker, 1000), wait=False)
        assert isinstance(incoming.said, Attended)
    place.pass_time(LEASE_US - 1)
    place.attend(BOB)
    assert place.info.active == ["a"]


def test_what_a_lease_that_has_ended_leaves_goes_on_although_another_worker_finds_no_place(
    place: Place,
) -> None:
    place.ask(ANN, most=2)
    place.settle(ANN, had=[Range(0, 2)])
    first, *_ = [place.ask(b"%016d" % number, BOB) for number in range(MAX_OF_LEASE)]
    place.now_us += LEASE_US  # and `tend` has not run yet
    place.clock.at(place.now_us)
    with pytest.raises(LineFull):
        place.ask(CAT, BOB)
    assert offsets(first) == [0]


def test_a_client_whose_connection_was_lost_has_a_moment_to_come_back(place: Place) -> None:
    place.ask(ANN)
    place.ask(BOB)
    attending = place.attend(ANN)
    place.attend(BOB)
    place.leases.callers_left({attending.hop})
    place.pass_time(RETURN_US - 1)
    attending = place.attend(ANN)
    place.attend(BOB)
    place.pass_time(RETURN_US)
    assert place.info.active == ["a"]  # it came back in time
    attending = place.attend(ANN)
    place.leases.callers_left({attending.hop})
    place.attend(BOB)
    place.pass_time(RETURN_US)
    assert place.info.active == ["b"]


def test_a_client_is_told_of_its_places_when_they_change_and_after_the_wait(place: Place) -> None:
    place.ask(ANN)
    place.ask(BOB)
    assert place.told(ANN) == [0]
    waiting = place.attend(ANN)
    assert waiting.said is None
    place.pass_time(999_999)
    assert waiting.said is None
    newer = place.attend(ANN)
    assert waiting.said is not None  # one call of a lease waits
    place.pass_time(1_000_000)
    assert newer.said is not None
    standing = place.attend(BOB)
    place.settle(ANN, gone=True)
    place.pass_time(1)
    assert [placed.place for placed in standing.said.places] == [0]
    assert place.told(b"?" * 16) == []


def test_the_active_worker_hands_over_on_request_and_stands_by_as_the_last(place: Place) -> None:
    place.ask(ANN)
    with pytest.raises(ConsumerRefused, match="no worker of consumer 'c' stands by"):
        place.calls.hand_over(HandOver("c"), place.now_us)
    bob, cat = place.ask(BOB), place.ask(CAT)
    info = place.calls.hand_over(HandOver("c"), place.now_us)
    assert (info.active, info.standing_by) == (["b"], ["c", "a"])
    assert (offsets(bob), cat.said) == ([0], None)
    assert place.ack(ANN, 0)[0] == "not-active"
    assert place.told(ANN) == [2]


def test_a_full_line_refuses_one_more_worker_until_a_lease_in_it_ends(place: Place) -> None:
    for number in range(MAX_LINE):
        place.ask(b"%016d" % number)
    with pytest.raises(LineFull, match=f"^{MAX_LINE} workers are active or stand by, which is the limit"):  # fmt: skip
        place.ask(ANN)
    place.ask(b"%016d" % 5)  # one that is in the line may ask
    place.pass_time(LEASE_US)
    assert place.ask(ANN).said is not None
    assert place.info.active == ["a"]


def test_one_client_has_no_more_than_its_share_of_a_line(place: Place) -> None:
    for number in range(MAX_OF_LEASE):
        place.ask(b"%016d" % number, ANN)
    with pytest.raises(LineFull, match=f"{MAX_OF_LEASE} workers of this client"):
        place.ask(ANN, ANN)
    assert place.ask(BOB, BOB).said is None


def test_a_worker_id_belongs_to_the_client_that_brought_it(place: Place) -> None:
    place.ask(ANN, ANN)
    place.ask(BOB, BOB)
    with pytest.raises(ValueError, match="another client has this id"):
        place.ask(ANN, BOB)
    assert place.info.active == ["a"]


def test_after_a_restart_the_worker_that_was_active_is_again_if_it_comes_in_time(
    place: Place,
) -> None:
    place.ask(ANN)
    place.calls.close()
    place.start()
    early = place.ask(BOB)
    assert (early.said, place.info.active) == (None, [])
    assert place.told(BOB) == [1]
    assert place.ack(ANN, 0).count == 1  # nobody else is active
    assert offsets(place.ask(ANN, was_active=True)) == [1]
    assert (place.info.active, place.info.standing_by) == (["a"], ["b"])
    place.start()
    late = place.ask(CAT)
    place.pass_time(LEASE_US - 1)
    assert late.said is None
    place.attend(CAT)
    place.pass_time(1)
    assert (place.info.active, offsets(late)) == (["c"], [0])
    assert place.ask(ANN, was_active=True).said is None  # too late


def test_after_a_restart_a_worker_that_is_busy_keeps_its_place_while_it_settles(
    place: Place,
) -> None:
    place.ask(ANN, most=2)
    place.calls.close()
    place.start()
    follower = place.ask(BOB)
    for _ in range(12):
        place.pass_time(LEASE_US // 4)
        place.attend(BOB)
        assert place.settle(ANN, had=[Range(0, 2)]).count == 0
    assert (follower.said, place.info.active) == (None, [])
    assert place.ack(ANN, 0).count == 1
    place.ask(ANN, was_active=True)
    assert place.info.active == ["a"]


def test_workers_of_a_shared_consumer_have_no_line(place: Place) -> None:
    assert offsets(place.ask(ANN, shared=True, most=2)) == [0, 1]
    assert offsets(place.ask(BOB, shared=True, most=2)) == [2, 3]
    assert (place.info.active, place.info.standing, len(place.leases)) == ([], 0, 0)
    assert place.ack(BOB, 0).count == 1


class Machine(RuleBasedStateMachine):
    """A consumer against a list of its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.log = Log.create(f"{self.folder}/log", uuid=bytes(16), definition=b"", created_us=0)
        self.log.append([entry()] * 200, 1)
        self.place = Place(self.log)
        self.line: list[bytes] = []
        self.until: dict[bytes, int] = {}
        self.calls: dict[bytes, Incoming] = {}
        self.held: set[int] = set()
        """Offsets that the active worker holds."""
        self.settled: set[int] = set()
        self.former: bytes | None = None
        self.last = -1

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)

    def moved(self) -> None:
        """End leases, and note what the active worker has received."""
        now_us = self.place.now_us
        over = [worker for worker in self.line if self.until[worker] <= now_us]
        fresh_us = now_us + LEASE_US - FRESH_US
        if (
            over
            and over[0] == self.line[0]
            and not any(self.until[w] > fresh_us for w in self.line)
        ):
            over = over[1:]
        self.line = [worker for worker in self.line if worker not in over]
        active = self.line[0] if self.line else None
        if active != self.former:
            self.held.clear()
            self.former = active
        for worker, call in list(self.calls.items()):
            if call.said is None:
                assert worker in self.line
                continue
            del self.calls[worker]
            got = offsets(call)
            assert not got or worker == active, "only the active worker receives messages"
            assert not self.held & set(got)
            assert not self.settled & set(got)
            self.held |= set(got)

    @rule(worker=st.sampled_from([ANN, BOB, CAT, DAN]))
    def ask(self, worker: bytes) -> None:
        self.moved()
        before = self.calls.pop(worker, None)
        call = self.place.ask(worker)
        assert before is None or not offsets(before)
        self.until[worker] = self.place.now_us + LEASE_US
        if worker not in self.line:
            self.line.append(worker)
        self.calls[worker] = call
        self.moved()

    @rule(worker=st.sampled_from([ANN, BOB, CAT, DAN]))
    def attend(self, worker: bytes) -> None:
        self.place.attend(worker)
        if worker in self.line:
            self.until[worker] = self.place.now_us + LEASE_US

    @rule(by=st.sampled_from([1, LEASE_US // 3, LEASE_US - 1, LEASE_US]))
    def time_passes(self, by: int) -> None:
        self.place.pass_time(by)
        self.moved()

    @rule(worker=st.sampled_from([ANN, BOB, CAT, DAN]))
    def close(self, worker: bytes) -> None:
        self.place.settle(worker, gone=True) if self.line else None
        if worker in self.line:
            self.line.remove(worker)
        self.moved()

    @precondition(lambda self: len(self.line) > 1)
    @rule()
    def hand_over(self) -> None:
        self.place.calls.hand_over(HandOver("c"), self.place.now_us)
        self.line.append(self.line.pop(0))
        self.moved()

    @precondition(lambda self: self.held)
    @rule(worker=st.sampled_from([ANN, BOB, CAT, DAN]), data=st.data())
    def ack(self, worker: bytes, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        said = self.place.ack(worker, offset)
        if worker == self.line[0]:
            assert said.count == 1
            self.until[worker] = self.place.now_us + LEASE_US
            self.held.remove(offset)
            self.settled.add(offset)
            self.moved()
        else:
            assert said[0] == "not-active"

    @invariant()
    def the_line_is_as_the_model_says(self) -> None:
        if self.former is not None or self.line:
            labels = [worker[:1].decode() for worker in self.line]
            info = self.place.info
            assert info.active + info.standing_by == labels
            assert info.pending == len(self.held)


TestLine = Machine.TestCase
TestLine.settings = hypothesis_settings(max_examples=30, stateful_step_count=40, deadline=None)
