"""The budget for all queues of a relay: which queue gives way, and what is dropped from it."""

from __future__ import annotations

from typing import Any

import pytest

from iris.wire.codec import CALL, CAST, FIRST, KIND_AT, decode_control, encode_control
from iris.wire.frames import Declare, Gap
from iris.wire.kinds import HopClass, Kind
from relay.core.budget import LOOK, Budget, Entry, cut
from relay.core.connection import Delivery
from relay.core.ports import Held

LIMIT_BYTES = 64_000
NEAR_BYTES = LIMIT_BYTES >> 6


class Line:
    """A queue of one budget; `casts` of its bytes are publications."""

    def __init__(self, budget: Budget, size: int, casts: int | None = None) -> None:
        self.budget = budget
        self.waiting_bytes = size
        self.casts = size if casts is None else casts
        self.dropped = 0
        budget.bytes += size
        budget.waiting[self] = None

    def shed(self, wanted_bytes: int) -> int:
        freed = min(wanted_bytes, self.casts)
        self.casts -= freed
        self.waiting_bytes -= freed
        self.dropped += freed
        self.budget.released(freed)
        return freed

    def takes(self, size: int, *, own: bool = False) -> bool:
        """As a port does."""
        budget = self.budget
        if budget.bytes + size > budget.limit_bytes and not budget.make_room(self, size, own=own):
            return False
        self.waiting_bytes += size
        self.casts += size
        budget.bytes += size
        return True


@pytest.fixture
def budget() -> Budget:
    return Budget(LIMIT_BYTES)


def test_the_longest_queue_gives_way_and_no_other(budget: Budget) -> None:
    longest, middle, short = Line(budget, 40_000), Line(budget, 20_000), Line(budget, 4_000)
    assert short.takes(500)
    assert longest.dropped == NEAR_BYTES
    assert not middle.dropped
    assert budget.bytes <= LIMIT_BYTES
    assert not budget.full


def test_the_longest_queue_itself_is_refused(budget: Budget) -> None:
    longest, other = Line(budget, 40_000), Line(budget, 24_000)
    assert not longest.takes(500)
    assert not longest.dropped
    assert not other.dropped
    assert budget.full == 1


def test_many_that_read_nothing_end_up_with_equal_shares(budget: Budget) -> None:
    lines = [Line(budget, 0) for _ in range(8)]
    for turn in range(4000):
        lines[turn * turn % 8 if turn < 500 else turn % 8].takes(500)
        assert budget.bytes <= LIMIT_BYTES
    lengths = [line.waiting_bytes for line in lines]
    assert sum(lengths) == budget.bytes
    assert max(lengths) - min(lengths) <= 2 * NEAR_BYTES
    assert budget.bytes > LIMIT_BYTES - 2 * NEAR_BYTES


def test_queues_without_publications_are_passed_over(budget: Budget) -> None:
    calls, casts, short = Line(budget, 40_000, casts=0), Line(budget, 20_000), Line(budget, 4_000)
    assert short.takes(500)
    assert casts.dropped
    casts.casts = 0
    assert not short.takes(LIMIT_BYTES)
    assert calls.waiting_bytes == 40_000


def test_once_there_is_room_again_a_queue_that_had_none_to_give_is_asked_again(
    budget: Budget,
) -> None:
    calls, short = Line(budget, 60_000, casts=0), Line(budget, 4_000)
    assert not short.takes(500)
    calls.waiting_bytes -= 10_000
    budget.released(10_000)
    assert calls.takes(9_900)
    assert short.takes(500)
    assert calls.dropped


def test_a_tunnels_record_takes_the_place_of_publications_in_its_own_queue(budget: Budget) -> None:
    line, other = Line(budget, 60_000), Line(budget, 4_000)
    assert line.takes(500, own=True)
    assert line.dropped
    line.casts = other.casts = 0
    line.budget.bytes = LIMIT_BYTES
    assert not line.takes(500, own=True)


# -- what is dropped -----------------------------------------------------------------------------------------


def delivery(name: str, *groups: str) -> Delivery:
    return (int(Kind.PUBLISH), name, bytes(16), bytes(16), not groups, groups, 0, int(HopClass.LOCAL), "")  # fmt: skip


PLAIN, OTHER, GROUP = delivery("a"), delivery("b"), delivery("a", "g")
ALIASES = {1: PLAIN, 2: OTHER, 3: GROUP}


def cast(alias: int, first: int, count: int = 1, size: int = 1000) -> bytes:
    frame = bytearray(50 + 4 * count + size)
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")
    frame[KIND_AT] = Kind.PUBLISH
    frame[6:10] = alias.to_bytes(4, "little")
    frame[38:42] = count.to_bytes(4, "little")
    frame[42:50] = FIRST.pack(first)
    assert CAST.unpack_from(frame) == (Kind.PUBLISH, alias, count)
    return bytes(frame)


def call(size: int = 100) -> bytes:
    frame = bytearray(size)
    frame[:4] = (size - 4).to_bytes(4, "little")
    frame[KIND_AT] = Kind.REQUEST
    assert CALL.unpack_from(frame)[0] == Kind.REQUEST
    return bytes(frame)


def gaps(entries: list[Entry]) -> list[tuple[str, bool, int, int]]:
    found = []
    for data, count, _ in entries:
        if data[KIND_AT] == Kind.GAP:
            gap: Any = decode_control(memoryview(data), 0, len(data))
            assert isinstance(gap, Gap)
            assert gap.cause == "slow receiver"
            assert count == 0
            found.append((gap.name, gap.plain, gap.first, gap.count))
    return found


def dropped(queue: list[Entry], wanted: int) -> tuple[list[Entry], dict[Delivery, int]]:
    """Return the queue after the cut, and who lost how many; check what is said of both."""
    kept, lost, read, freed = cut(reversed(queue), wanted, ALIASES.get)
    after = [*queue[: len(queue) - read], *kept]
    assert freed == sum(len(e[0]) for e in queue) - sum(len(e[0]) for e in after)
    gone = sum(count for _, count in lost)
    assert gone == sum(e[1] for e in queue) - sum(e[1] for e in after)
    return after, dict(lost)


def test_the_newest_go_and_one_gap_says_so_in_their_place() -> None:
    queue: list[Entry] = [(cast(1, 10 * n, 10), 10, None) for n in range(10)]
    after, lost = dropped(queue, 3000)
    assert after[:-1] == queue[:7]
    assert gaps(after) == [("a", True, 70, 30)]
    assert lost == {PLAIN: 30}


def test_of_a_run_of_frames_calls_control_and_tunnels_stay_in_their_order() -> None:
    declare = encode_control(Declare(9, int(Kind.PUBLISH), "z", bytes(16), bytes(16), True, [], 0))
    held = Held()
    queue: list[Entry] = [
        (cast(1, 0), 1, None),
        (call(100) + cast(1, 1) + call(110) + cast(2, 7), 4, None),
        (declare, 0, None),
        (b"a tunnel's record", 1, held),
        (cast(1, 2) + call(120), 2, None),
    ]
    after, lost = dropped(queue, 3000)
    data = [entry for entry in after if entry[0][KIND_AT] != Kind.GAP]
    assert data == [
        (cast(1, 0), 1, None),
        (call(100) + call(110), 2, None),
        (declare, 0, None),
        (b"a tunnel's record", 1, held),
        (call(120), 1, None),
    ]
    assert sorted(gaps(after)) == [("a", True, 1, 2), ("b", True, 7, 1)]
    assert after[2][0][KIND_AT] == Kind.GAP  # where the oldest of them was
    assert lost == {PLAIN: 2, OTHER: 1}


def test_what_was_dropped_apart_is_reported_apart_and_for_a_group_as_one_sum() -> None:
    queue: list[Entry] = [
        (cast(1, 0), 1, None),
        (cast(3, 1), 1, None),
        (cast(1, 5), 1, None),
        (cast(3, 8), 1, None),
    ]
    after, lost = dropped(queue, 4000)
    assert gaps(after) == [("a", True, 0, 1), ("a", True, 5, 1), ("a", False, 1, 2)]
    assert lost == {PLAIN: 2, GROUP: 2}


def test_what_an_alias_stood_for_before_it_was_declared_again_is_not_guessed() -> None:
    declare = encode_control(Declare(1, int(Kind.PUBLISH), "a", bytes(16), bytes(16), True, [], 0))
    queue: list[Entry] = [(cast(1, 0), 1, None), (declare, 0, None), (cast(1, 1), 1, None)]
    after, lost = dropped(queue, 10_000)
    assert lost == {PLAIN: 1}
    assert after[0] == queue[0]
    assert gaps(after) == [("a", True, 1, 1)]


def test_where_gaps_would_be_longer_than_what_they_tell_of_nothing_is_freed() -> None:
    queue: list[Entry] = [(cast(alias, 0, size=4), 1, None) for alias in (1, 2, 3)]
    _, _, _, freed = cut(reversed(queue), 10_000, ALIASES.get)
    assert freed <= 0


def test_only_so_much_of_a_queue_is_looked_through() -> None:
    queue: list[Entry] = [(cast(1, 0), 1, None), *((call(1000), 1, None) for _ in range(100))]
    _, lost, read, _ = cut(reversed(queue), 1000, ALIASES.get)
    assert read == LOOK
    assert not lost
