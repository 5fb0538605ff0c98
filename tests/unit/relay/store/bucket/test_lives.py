"""Lives of stores that share a bucket, by their seeds: `make proof AREA=bucket` lives thousands of them."""

from __future__ import annotations

from collections import Counter

import pytest
from support.bucket_lives import Outcome, live
from support.bucket_lives.history import (
    Acked,
    Chunk,
    End,
    History,
    Interval,
    Limits,
    Place,
    Seen,
    judge,
    judge_older,
)

SEEDS = (*range(1, 11), 32, 38)
"""32 and 38 because each notices a sabotage that the others do not."""
NEEDED = ("acknowledged", "checkpoints", "fences", "kills", "disks lost", "pauses", "reopened after a kill", "moves settled", "segment objects deleted", "deleted streams", "redriven", "older copies restored")  # fmt: skip

_counts: Counter[str] = Counter()
_lived: dict[int, Outcome] = {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_life_breaks_no_promise(seed: int) -> None:
    outcome = live(seed)
    assert not outcome.broken, f"replay in tests/: python -m support.bucket_lives {seed} -v"
    _counts.update(outcome.counts)
    _lived[seed] = outcome


def test_two_lives_of_one_seed_are_the_same() -> None:
    first, second = _lived.get(3) or live(3), live(3)
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
    made.done["s", "workers"] = {0, 1}
    made.ends["s"] = End(0, 2, [(0, b"a"), (1, b"b")])
    return made


def broken_by(made: History, *says: str) -> None:
    """See that the checker says each of these."""
    broken = judge(made)
    for text in says:
        assert any(text in one for one in broken), (text, broken)


def test_the_checker_accepts_a_history_that_breaks_nothing() -> None:
    assert judge(history()) == []


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ([(0, b"a")], "is lost"),
        ([(0, b"b"), (1, b"a")], "is at"),
        ([(0, b"b"), (1, b"a")], "p saw b'a' at 0, where b'b' is"),
        ([(0, b"a"), (1, b"b"), (2, b"b")], "2 times"),
        ([(0, b"a"), (1, b"b"), (2, b"c")], "never sent"),
        ([(0, b"a"), (2, b"b")], "offsets"),
    ],
)
def test_the_checker_notices_what_became_of_messages(
    end: list[tuple[int, bytes]], says: str
) -> None:
    made = history()
    made.ends["s"] = End(0, len(end), end)
    broken_by(made, says)


def test_the_checker_notices_offsets_against_the_order_of_acknowledgements() -> None:
    made = history()
    made.sent[b"b"] = "s", "q", 0
    made.ends["s"] = End(0, 2, [(0, b"b"), (1, b"a")])
    first, second = made.acked
    made.acked = [
        Acked("s", "p", 0, b"a", 1, first.when), Acked("s", "q", 0, b"b", 0, second.when)
    ]  # fmt: skip
    made.seen.clear()
    broken_by(made, "began after one behind it")


def test_the_checker_notices_what_readers_and_workers_must_not_see() -> None:
    made = history()
    made.seen.append(Seen("s", "", 1, b"a", Interval(90, 91)))
    made.chunks += [Chunk("s", 0, 2, 2, (1,)), Chunk("s", 0, 0, 3, ())]
    made.places.append(Place("s", "workers", 1, Interval(90, 91)))
    made.final_places["s", "other"] = 1
    broken_by(made, "a reader saw b'a'", "a reader got (1,)", "saw the end 3", "went back", "never got [0]")  # fmt: skip


def test_the_checker_notices_a_message_that_a_consumer_skipped() -> None:
    made = history()
    made.done["s", "workers"] = {0}
    broken_by(made, "nobody has finished [1]")
    made.letters["s", "workers"] = {1}
    assert judge(made) == []


@pytest.mark.parametrize(
    ("limits", "end", "says"),
    [
        (Limits(), End(1, 2, [(1, b"b")]), "it has no limit"),
        (Limits(messages=2), End(1, 2, [(1, b"b")]), "1 messages are left of at most 2"),
        (Limits(bytes=300), End(1, 2, [(1, b"b")], size_bytes=100), "100 bytes are left"),
        (Limits(age_s=9.0), End(1, 2, [(1, b"b")], at_s=5.0), "not older than 5.0 s"),
        (Limits(messages=1), End(1, 2, [(1, b"b")]), ""),
        (Limits(bytes=300), End(1, 2, [(1, b"b")], size_bytes=200), ""),
        (Limits(age_s=9.0), End(1, 2, [(1, b"b")], at_s=10.0), ""),
    ],
)
def test_the_checker_notices_what_retention_must_not_remove(
    limits: Limits, end: End, says: str
) -> None:
    made = history()
    made.limits["s"], made.ends["s"] = limits, end
    if says:
        broken_by(made, says)
    else:
        assert judge(made) == []
    made.chunks.append(Chunk("s", 0, 2, 2, (), ((0, 2),)))
    broken_by(made, "was told that 0 to 2 is removed")


def test_the_checker_notices_a_stream_that_comes_back_after_its_deletion() -> None:
    made = history()
    made.deleted["s"] = Interval(90, 91)
    broken_by(made, "it was deleted, and is there at the end")
    del made.ends["s"], made.final_places["s", "workers"]
    assert judge(made) == []
    made.acked.append(Acked("s", "p", 2, b"c", 2, Interval(92, 93)))
    broken_by(made, "was acknowledged after the stream was deleted")


def test_the_checker_notices_what_an_older_copy_of_the_bucket_must_have() -> None:
    made = history()
    end = End(0, 1, [(0, b"a")])
    assert judge_older(made, 2, {"s": end}) == []
    assert any("does not have b'b'" in one for one in judge_older(made, 4, {"s": end}))
    assert any("has b'x' at 0" in one for one in judge_older(made, 0, {"s": End(0, 1, [(0, b"x")])}))  # fmt: skip
    made.deleted["s"] = Interval(5, 6)
    assert any("was deleted before" in one for one in judge_older(made, 7, {"s": end}))


def test_the_lives_had_everything_in_them() -> None:
    """Last, after the lives of this file."""
    if _counts["starts"] < len(SEEDS):
        pytest.skip("not all lives were lived in this process")
    assert not [what for what in NEEDED if not _counts[what]], _counts
