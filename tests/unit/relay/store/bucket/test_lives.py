"""Lives of stores that share a bucket, by their seeds: `make proof AREA=bucket` lives thousands of them."""

from __future__ import annotations

from collections import Counter

import pytest
from support.bucket_lives import live
from support.bucket_lives.history import Acked, Chunk, History, Interval, Place, Seen, judge

SEEDS = (*range(1, 17), 21, 22, 49)
"""The last ones because they notice sabotages that others do not."""
NEEDED = ("acknowledged", "checkpoints", "fences", "kills", "disks lost", "pauses", "reopened after a kill")  # fmt: skip

_counts: Counter[str] = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_life_breaks_no_promise(seed: int) -> None:
    outcome = live(seed)
    assert not outcome.broken, f"replay in tests/: python -m support.bucket_lives {seed} -v"
    _counts.update(outcome.counts)


def test_two_lives_of_one_seed_are_the_same() -> None:
    first, second = live(3), live(3)
    assert first == second
    assert all(first.counts[what] for what in ("acknowledged", "read", "delivered"))


# -- the checker ---------------------------------------------------------------------------------------------


def history() -> History:
    """Return a history that breaks nothing: two messages, acknowledged one after the other, and read."""
    made = History()
    for number, body in enumerate((b"a", b"b")):
        made.sent[body] = "s", "p", number
        when = Interval(made.tick(), made.tick())
        made.acked.append(Acked("s", "p", number, body, number, when))
        made.seen.append(Seen("s", "workers", number, body, when))
    made.chunks.append(Chunk("s", 0, 2, 2, (0, 1)))
    made.places.append(Place("s", "workers", 1, Interval(made.tick(), made.tick())))
    made.places.append(Place("s", "workers", 2, Interval(made.tick(), made.tick())))
    made.final_places["s", "workers"] = 2
    made.ends["s"] = [(0, b"a"), (1, b"b")]
    return made


def test_the_checker_accepts_a_history_that_breaks_nothing() -> None:
    assert judge(history()) == []


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ([(0, b"a")], "is lost"),
        ([(0, b"b"), (1, b"a")], "is at"),
        ([(0, b"a"), (1, b"b"), (2, b"b")], "2 times"),
        ([(0, b"a"), (1, b"b"), (2, b"c")], "never sent"),
        ([(0, b"a"), (2, b"b")], "offsets"),
    ],
)
def test_the_checker_notices_what_became_of_messages(
    end: list[tuple[int, bytes]], says: str
) -> None:
    made = history()
    made.ends["s"] = end
    assert any(says in broken for broken in judge(made))


def test_the_checker_notices_offsets_against_the_order_of_acknowledgements() -> None:
    made = history()
    made.sent[b"b"] = "s", "q", 0
    made.ends["s"] = [(0, b"b"), (1, b"a")]
    first, second = made.acked
    made.acked = [
        Acked("s", "p", 0, b"a", 1, first.when), Acked("s", "q", 0, b"b", 0, second.when)
    ]  # fmt: skip
    made.seen.clear()
    assert any("began after one behind it" in broken for broken in judge(made))


def test_the_checker_notices_what_readers_and_workers_must_not_see() -> None:
    made = history()
    made.seen.append(Seen("s", "", 1, b"a", Interval(90, 91)))
    made.chunks += [Chunk("s", 0, 2, 2, (1,)), Chunk("s", 0, 0, 3, ())]
    made.places.append(Place("s", "workers", 1, Interval(90, 91)))
    made.final_places["s", "other"] = 1
    broken = judge(made)
    for says in ("a reader saw b'a'", "a reader got (1,)", "saw the end 3", "went back", "never got [0]"):  # fmt: skip
        assert any(says in one for one in broken), says


def test_the_lives_had_everything_in_them() -> None:
    """Last, after the lives of this file."""
    if _counts["starts"] < len(SEEDS):
        pytest.skip("not all lives were lived in this process")
    assert not [what for what in NEEDED if not _counts[what]], _counts
