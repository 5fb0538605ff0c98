"""Readers and workers of a stream in a bucket see what is known to be there at once, and nothing else, in virtual time.

The oracle is a copy: what a successor would have that repeats the objects which are known to be in the bucket.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.consumers import entry

from iris.core.conversation import UP
from iris.crypto.keys import GroupKey
from iris.wire.consumers import Consume, Delivered
from iris.wire.stream_items import Hole, Item
from iris.wire.streams import Call, Fetch, Fetched, decode_answer
from relay.store.answers import items_to_wire
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import NO_HASH, Numbered, Rows, Sealer
from relay.store.bucket.writer import Flying, Writer
from relay.store.database import Database
from relay.store.log import Log
from relay.store.records import Reason
from relay.store.segments import Limits
from relay.store.session import IncomingCall
from relay.store.stream import Stream

UUID = bytes(range(16))
SEALER = Sealer(GroupKey(bytes(32)), lambda size: bytes(size))
LIMIT = 1 << 20
WORKER = bytes(16)
NOW_US = 1_000_000


class Session:
    """The session of a store, which notes the answers."""

    message_limit = LIMIT
    state = UP

    def __init__(self) -> None:
        self.answers: dict[int, Any] = {}

    def answer(self, incoming: IncomingCall, body: bytes) -> None:
        assert incoming.hop not in self.answers, "answered twice"
        self.answers[incoming.hop] = decode_answer(body)


class Declared:
    name = "orders"
    key_id = bytes(16)


class Flow:
    declared = Declared()


class Case:
    """A stream in a bucket whose objects arrive when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.writer = Writer("f" * 32, SEALER, NO_HASH)
        self.session = Session()
        self.flying: list[Flying] = []
        self.known: list[Flying] = []
        self.calls = 0
        self.copies = 0
        self.directory = directory
        log = Log.create(str(directory / "log"), uuid=UUID, definition=b"", created_us=0)
        self.stream = Stream(str(directory / "log"), UUID, log)
        self.grown = False
        self.stream.replicate(Replica(UUID, self.writer, lambda: 0), self._grown)
        log.copy_all()
        self.land()

    def _grown(self, stream: Stream) -> None:
        self.grown = True

    @property
    def log(self) -> Log:
        assert self.stream.log is not None
        return self.stream.log

    def append(self, count: int = 1, key: int | None = None) -> None:
        self.log.append([entry(key=key) for _ in range(count)], NOW_US)
        self.stream.commit(NOW_US)

    def take_off(self) -> None:
        """Send what was written on its way."""
        self.writer.close_object()
        self.flying += self.writer.take_off(0)

    def land(self, *indexes: int) -> None:
        """Bring objects on their way to the bucket; default: all that was written."""
        self.take_off()
        for one in [self.flying[index] for index in indexes] if indexes else list(self.flying):
            self.flying.remove(one)
            self.known.append(one)
            self.writer.landed(one)
        if self.grown:
            self.grown = False
            self.stream.commit(NOW_US)  # as the store does in its next turn

    def call(self, call: Call) -> int:
        """Make a call; return its id."""
        self.calls += 1
        incoming = IncomingCall(self.session, Flow(), self.calls, 0, call)  # type: ignore[arg-type]  # doubles
        incoming.gate = self.stream.replica
        if isinstance(call, Fetch):
            self.stream.readers.fetch(incoming, call, NOW_US)
        else:
            assert isinstance(call, Consume)
            assert self.stream.consumer_calls is not None
            self.stream.consumer_calls.take(incoming, call, NOW_US)
        return self.calls

    def fetch(self, start: int, wait_ms: int = 60_000) -> int:
        return self.call(Fetch(start, LIMIT, wait_ms))

    def consume(self, **more: Any) -> int:
        return self.call(Consume("c", WORKER, LIMIT, 1000, 60_000, **more))

    def offsets(self, call: int) -> list[int] | None:
        """Return the offsets that a call was answered with; None if it waits."""
        answer = self.session.answers.get(call)
        if answer is None:
            return None
        if isinstance(answer, Delivered):
            return [one.item.offset for one in answer.items]
        assert isinstance(answer, Fetched)
        return [item.offset for item in answer.items]

    def copy(self, number: int) -> Log:
        """Return the log of a successor that finds the journal up to this object."""
        self.copies += 1
        path = self.directory / f"copy{self.copies}"
        database = Database.create(str(path))
        database.make_mark(UUID, 0)
        for one in sorted(self.known, key=lambda flying: flying.number):
            content = SEALER.open(one.key, one.sealed)
            assert isinstance(content, Numbered)
            for each in content.entries if one.number <= number else ():
                assert isinstance(each, Rows)
                batch = database.batch()
                batch.apply(each.ops)
                database.write(batch, 0, sync=False)
        return Log(database)


def by_offset(items: list[Item]) -> dict[int, Item | None]:
    """Return each message by its offset; None for a removed one."""
    found: dict[int, Item | None] = {}
    for item in items:
        if isinstance(item, Hole):
            found |= dict.fromkeys(range(item.offset, item.next))
        else:
            found[item.offset] = item
    return found


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    made.writer.end("the test is over")
    made.stream.close()


def test_a_reader_of_what_is_in_the_bucket_does_not_wait_for_what_was_appended_since(
    case: Case,
) -> None:
    case.append(3)
    case.land()
    case.append(2)
    call = case.fetch(1)
    assert case.offsets(call) == [1, 2]
    assert case.session.answers[call].high_water == 3, "more could still be lost"


def test_a_reader_at_the_end_is_answered_when_more_is_known_to_be_there(case: Case) -> None:
    case.append(3)
    case.land()
    call = case.fetch(3)
    case.append(2)
    case.take_off()
    assert case.offsets(call) is None
    case.append(1)
    case.land(0)
    assert case.offsets(call) == [3, 4]


def test_a_reader_that_does_not_wait_is_told_the_known_end(case: Case) -> None:
    case.append(3)
    case.land()
    case.append(1)
    call = case.fetch(3, wait_ms=0)
    assert case.offsets(call) == []
    assert case.session.answers[call].high_water == 3


def test_objects_that_arrive_out_of_order_are_shown_in_order(case: Case) -> None:
    call = case.fetch(0)
    for _ in range(3):
        case.append()
        case.take_off()
    case.land(2)
    case.land(1)
    assert case.offsets(call) is None
    case.land(0)
    assert case.offsets(call) == [0, 1, 2]


def test_a_reader_waits_for_the_removal_that_it_would_see(case: Case) -> None:
    case.append(3)
    case.land()
    case.log.remove({1})
    call = case.fetch(0)
    assert case.offsets(call) is None
    case.land()
    assert case.offsets(call) == [0, 1, 2]
    assert isinstance(case.session.answers[call].items[1], Hole)


def test_a_hole_that_reaches_beyond_the_known_end_is_shown_when_all_of_it_is_known(
    case: Case,
) -> None:
    case.append(2)
    case.land()
    case.append(2)
    case.take_off()
    case.log.remove({1, 2})
    call = case.fetch(0)
    case.land(0)
    assert case.offsets(call) is None
    case.land()
    answer = case.session.answers[call]
    assert answer.items[1:] == [Hole(1, 3, Reason.COMPACTED)]
    assert answer.next <= answer.high_water


def test_a_reader_below_the_oldest_message_waits_until_its_removal_is_known(case: Case) -> None:
    case.append(4)
    case.land()
    case.log.enforce(Limits(max_messages=2), NOW_US)
    gone, kept = case.fetch(0), case.fetch(2)
    assert case.offsets(gone) is None
    assert case.offsets(kept) == [2, 3]
    assert case.session.answers[kept].oldest == 0, "the removal could still be lost"
    case.land()
    assert case.session.answers[gone].oldest == 2


def test_a_worker_gets_what_is_in_the_bucket_at_once_and_nothing_else(case: Case) -> None:
    case.append(2)
    case.land()
    first = case.consume()
    assert case.offsets(first) is None, "the consumer itself could still be lost"
    case.land()
    assert case.offsets(first) == [0, 1]
    case.append(2)
    case.land()
    case.append(1)
    second = case.consume()
    assert case.offsets(second) == [2, 3]
    third = case.consume()
    case.take_off()
    assert case.offsets(third) is None
    case.land()
    assert case.offsets(third) == [4]


@pytest.mark.parametrize("seed", range(40))
def test_no_reader_is_shown_what_a_successor_may_not_have(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    case = Case(tmp_path)
    judged: set[int] = set()
    asked: dict[int, int] = {}
    for _ in range(60):
        what = rng.randrange(7)
        if what <= 1:
            case.append(rng.randrange(1, 4), key=rng.choice([None, 1, 2]))
        elif what == 2:
            case.log.compact(NOW_US)
        elif what == 3:
            case.log.enforce(Limits(max_messages=rng.randrange(1, 8)), NOW_US)
        elif what == 4:
            case.take_off()
            if case.flying:
                case.land(rng.randrange(len(case.flying)))
        else:
            start = rng.randrange(case.log.next + 1)
            asked[case.calls + 1] = start
            case.fetch(start)
        answers = case.session.answers
        new = sorted(answers.keys() - judged)
        judged.update(new)
        if not new:
            continue
        with case.copy(case.writer.known) as successor:
            for call in new:
                answer, start = answers[call], asked[call]
                assert answer.high_water <= successor.next, f"seed {seed}"
                assert answer.oldest <= successor.oldest, f"seed {seed}"
                chunk = successor.read(start, LIMIT, now_us=NOW_US)
                there = by_offset(items_to_wire(chunk, LIMIT, start)[0])
                for offset, item in by_offset(answer.items).items():
                    # What is shown may be removed since, but nothing that is removed may be there again.
                    allowed = (item, None) if item is not None else (None,)
                    assert offset < start or there[offset] in allowed, (
                        f"seed {seed}: offset {offset}"
                    )
    case.land()
    assert case.stream.replica is not None
    assert case.stream.replica.tail.end == case.log.next
    assert judged
    case.writer.end("the test is over")
    case.stream.close()
