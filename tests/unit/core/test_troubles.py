"""What a client counts for its next report stays small, whatever is lost and however often."""

from __future__ import annotations

import pytest

from iris.core.troubles import ADVICE, MAX_COUNT, Unreported, described
from iris.wire.codec import check_control
from iris.wire.frames import MAX_TROUBLE_NAME, TroubleEntry
from iris.wire.kinds import MAX_TROUBLE_NAMES, TROUBLES


def taken(unreported: Unreported) -> list[TroubleEntry]:
    report = unreported.take()
    check_control(report)
    return report.entries


def test_a_report_has_what_happened_since_the_last_one_by_cause_and_name() -> None:
    unreported = Unreported()
    unreported.add("queue full", "t.a", 5)
    unreported.add("queue full", "t.b", 1)
    unreported.add("queue full", "t.a", 2)
    unreported.add("handler failed", "", 3)
    assert taken(unreported) == [
        TroubleEntry("queue full", 8, {"t.a": 7, "t.b": 1}),
        TroubleEntry("handler failed", 3),
    ]
    assert not unreported
    unreported.add("missing", "t.a", 1)
    assert taken(unreported) == [TroubleEntry("missing", 1, {"t.a": 1})]


def test_a_report_names_those_with_the_most_and_counts_all() -> None:
    unreported = Unreported()
    for number in range(1000):
        unreported.add("missing", f"small.{number}", 1)
    unreported.add("missing", "large", 50)
    (entry,) = taken(unreported)
    assert entry.count == 1050
    assert len(entry.names) == MAX_TROUBLE_NAMES
    assert entry.names["large"] == 50


def test_many_that_lost_little_push_out_none_that_lost_more() -> None:
    unreported = Unreported()
    lost_more = {f"more.{number}": 5 for number in range(MAX_TROUBLE_NAMES)}
    for name, count in lost_more.items():
        unreported.add("missing", name, count)
    for number in range(1000):
        unreported.add("missing", f"little.{number}", 1)
    (entry,) = taken(unreported)
    assert entry.names == lost_more


@pytest.mark.parametrize("cause", TROUBLES)
def test_the_largest_report_of_the_longest_names_can_be_sent(cause: str) -> None:
    unreported = Unreported()
    for each in TROUBLES:
        for number in range(3 * MAX_TROUBLE_NAMES):
            unreported.add(each, f"{number}." + "\N{SNOWMAN}" * 250, MAX_COUNT)
    found = {entry.cause: entry for entry in taken(unreported)}
    entry = found[cause]  # type: ignore[index]  # a text of the list of causes
    assert entry.count == MAX_COUNT
    assert sum(entry.names.values()) <= entry.count
    assert {len(name) for name in entry.names} == {MAX_TROUBLE_NAME}
    assert all(name.endswith("…") for name in entry.names)


def test_nothing_lost_is_no_report() -> None:
    unreported = Unreported()
    unreported.add("missing", "t", 0)
    assert not unreported


@pytest.mark.parametrize("cause", TROUBLES)
def test_every_cause_has_a_phrase_for_people_with_its_number_and_its_names(cause: str) -> None:
    text = described(cause, 12_345, {"t.a": 12_000, "t.b": 5})
    assert "12,345" in text
    assert "t.a, t.b and others" in text
    assert not text.startswith(cause)
    assert cause == "uncounted" or cause in ADVICE
    assert "others" not in described(cause, 5, {"t.b": 5})
    assert described(cause, 5, {})


def test_one_message_is_not_messages() -> None:
    assert described("queue full", 1, {"t": 1}) == "lost 1 message of t: its own queue was full"
    assert described("of a newer version", 2, {}) == "of a newer version: 2"
