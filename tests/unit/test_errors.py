"""The texts of errors: the caller's timeout, the cause, and what an earlier attempt may have done."""

from __future__ import annotations

import pytest

from iris.errors import (  # fmt: skip
    ConnectionLost,
    NoMembers,
    RequestTimeout,
    name_timeout,
    ran_before,
    with_deadline,
)


def test_the_callers_timeout_replaces_what_was_left_of_it() -> None:
    error = with_deadline(RequestTimeout("a", "no reply within 0.012 s"), "no reply", 0.012)
    error.may_have_run = False
    ran_before(error)
    name_timeout(error, 5.0, 4.87)
    assert error.detail == (
        "no reply within 5 s (the relay was away for 4.9 s of it); an earlier attempt may have run"
    )
    assert str(error) == f"a: {error.detail}"


@pytest.mark.parametrize(("away_s", "shown"), [(0.0, ""), (0.0001, ""), (0.034, " (the relay was away for 0.034 s of it)")])  # fmt: skip
def test_an_absence_is_named_only_if_there_was_one(away_s: float, shown: str) -> None:
    error = with_deadline(RequestTimeout("a", "no reply within 1 s"), "no reply", 1.0)
    name_timeout(error, 1.0, away_s)
    assert str(error) == f"a: no reply within 1 s{shown}"


def test_a_timeout_that_a_relay_reports_gets_the_number() -> None:
    error = RequestTimeout("a", "the deadline had passed when it reached the member")
    name_timeout(error, 5.0, 1.5)
    assert str(error) == (
        "a: the deadline had passed when it reached the member; the timeout was 5 s "
        "(the relay was away for 1.5 s of it)"
    )


def test_an_error_without_a_deadline_stays_as_it_is() -> None:
    for error in (NoMembers("a", "nobody"), ConnectionLost("a", "it left")):
        before = str(error)
        name_timeout(error, 5.0, 1.5)
        assert str(error) == before


def test_a_relay_that_was_never_there_needs_no_further_cause() -> None:
    lost = ConnectionLost("a", "no relay was connected within 0.05 s")
    name_timeout(with_deadline(lost, "no relay was connected", 0.05), 2.0, 2.0)
    assert str(lost) == "a: no relay was connected within 2 s"
