"""A consumer against a plain table of messages."""

from __future__ import annotations

import shutil
import tempfile
from unittest import mock

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.consumers import (
    ANN,
    BOB,
    MANY,
    entry,
)

from relay.store.consumer import Consumer, Redrive
from relay.store.cursor import Settings
from relay.store.dispatch import Delivery
from relay.store.log import Log


class Machine(RuleBasedStateMachine):
    """A group against a plain table of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch("relay.store.dispatch.MAX_BLOCKED", 3),
            mock.patch("relay.store.consumer.MAX_BLOCKED", 3),
        ]
        for patch in self.patches:
            patch.start()
        self.folder = tempfile.mkdtemp()
        self.log = Log.create(f"{self.folder}/log", uuid=bytes(16), definition=b"", created_us=0)
        self.settings = Settings(
            shared=True,
            max_deliver=3,
            max_pending=12,
            max_pending_per_worker=8,
            ack_timeout_us=1000,
        )
        self.consumer = Consumer(self.log, "c", self.settings, 0, 1)
        self.now_us = 1
        self.records: dict[int, tuple[int, int | None, int]] = {}
        self.settled: set[int] = set()
        self.buried: set[int] = set()
        self.held: dict[int, tuple[bytes, int]] = {}
        self.revived: set[int] = set()
        """Offsets that were redriven. They follow those of their key that waited before, whatever the offsets."""
        self.timeout_us = 1000
        self.saved: tuple[int, list[set[int]]] | None = None
        self.handed: set[int] = set()
        self.highest: dict[int, int] = {}

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.log.close()
            shutil.rmtree(self.folder)
            for patch in self.patches:
                patch.stop()

    def drain(self) -> None:
        for _ in range(200):
            self.take(BOB, 100)
            for offset in list(self.held):
                self.ack_one(offset)
            self.consumer.forget_dead(self.bury())
            self.now_us += 3000
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
        self.consumer.answer_lost(worker, self.now_us, counted=counted)
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
                    self.held[offset] = (worker, self.now_us + self.timeout_us)
                    self.handed.add(offset)
            assert item.wanted < 1 << count
            if key is not None:
                self.check_order(first, key, due_us)

    def check_order(self, first: int, key: int, due_us: int) -> None:
        letters = {letter.offset for letter in self.consumer.dead_letters()}
        done = self.settled | self.buried | letters | self.revived
        if any(first + i in self.revived for i in range(self.records[first][0])):
            return
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
                self.held[offset] = (worker, self.now_us + self.timeout_us)

    def _redrive(self, offset: int) -> Redrive:
        letter = self.consumer.letter(offset, self.now_us)
        return self.consumer.redrive(offset, letter, self.now_us)

    @precondition(lambda self: self.buried)
    @rule(data=st.data())
    def redrive(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.buried)))
        if self._redrive(offset) is Redrive.WAITING:
            self.buried.remove(offset)
            self.handed.discard(offset)
            self.revived.add(offset)
            assert self._redrive(offset) is Redrive.WAITING

    @rule(timeout_us=st.sampled_from([1000, 1500, 2500]), most=st.integers(1, 4))
    def change(self, timeout_us: int, most: int) -> None:
        before = self.consumer.settings
        self.lapse()
        self.consumer.expire(self.now_us)
        self.consumer.change(
            ack_timeout_us=timeout_us, max_deliver=most, paused=None, now_us=self.now_us
        )
        if self.consumer.settings != before:
            self.timeout_us = timeout_us
            for offset, (worker, _) in self.held.items():
                self.held[offset] = (worker, self.now_us + timeout_us)

    @rule(worker=st.sampled_from([ANN, BOB]))
    def worker_left(self, worker: bytes) -> None:
        self.consumer.worker_left(worker, self.now_us)
        self.held = {offset: held for offset, held in self.held.items() if held[0] != worker}

    @rule()
    def confirm(self) -> None:
        self.consumer.forget_dead(self.bury())

    @rule()
    def save(self) -> None:
        self.consumer.save()
        sets = [self.settled, self.buried, self.handed, self.revived]
        self.saved = (self.timeout_us, [set(each) for each in sets])

    @precondition(lambda self: self.saved)
    @rule()
    def crash(self) -> None:
        assert self.saved is not None
        self.consumer = Consumer.load(self.log, "c")
        # At least once: what was settled since the save comes again.
        self.timeout_us, sets = self.saved
        self.settled, self.buried, self.handed, self.revived = (set(each) for each in sets)
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
