"""What programs report to have lost is added up for operators, and no program can grow the relay's memory with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from protocol.kit import Host, Network

from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import TroubleEntry
from iris.wire.kinds import MAX_TROUBLE_NAMES, TROUBLES
from relay.core.troubles import MAX_PROGRAMS, MAX_REPORTED, MAX_ROWS, MAX_SUM, OTHER


@pytest.fixture
def net() -> Network:
    return Network()


def report(host: Host, *entries: TroubleEntry) -> None:
    host.say(encode_control(frames.Trouble([*entries])))
    host.net.run()


def shown(net: Network) -> dict[str, Any]:
    found: Any = net.router.status()["troubles"]
    return found  # type: ignore[no-any-return]  # a document


def test_what_a_program_reports_is_added_up_and_stays_when_it_has_ended(net: Network) -> None:
    host = net.host("ticker")
    report(host, TroubleEntry("queue full", 5, {"t.a": 3}), TroubleEntry("handler failed", 1))
    net.pass_time(2)
    report(host, TroubleEntry("queue full", 10, {"t.a": 2, "t.b": 8}))
    host.lose()
    net.pass_time(1)
    found = shown(net)
    assert found["totals"] == {"queue full": 15, "handler failed": 1}
    assert found["programs"] == {"ticker": {"queue full": 15, "handler failed": 1}}
    latest, before = found["latest"]
    assert (latest["label"], latest["cause"], latest["count"]) == ("ticker", "queue full", 15)
    assert latest["names"] == {"t.a": 5, "t.b": 8}
    assert (latest["since_s"], latest["last_s"]) == (3.0, 1.0)
    assert (before["cause"], before["count"], before["last_s"]) == ("handler failed", 1, 3.0)


@pytest.mark.parametrize(
    "entries",
    [
        [["queue full", 1, {"a": 1, "b": 1}]],
        [["queue full", 0]],
        [["queue full", -1]],
        [["queue full", 1 << 32]],
        [["queue full", 1, {"a": 0}]],
        [["queue full", 1, {"": 1}]],
        [["queue full", 1, {"x" * 65: 1}]],
        [["queue full", 99, {str(n): 1 for n in range(MAX_TROUBLE_NAMES + 1)}]],
        [["something else", 1]],
        [["missing", 1]] * (len(TROUBLES) + 1),
        [],
    ],
)
def test_a_report_that_breaks_a_rule_ends_the_session_and_counts_nothing(
    net: Network, entries: list[Any]
) -> None:
    host = net.host("liar")
    # As `encode_control` does, without its check.
    body = msgspec.msgpack.encode({"entries": entries})
    host.say((2 + len(body)).to_bytes(4, "little") + bytes([frames.Trouble.FRAME, 0]) + body)
    net.run()
    assert host.ended_because
    assert shown(net) == {"totals": {}, "programs": {}, "latest": []}


def test_names_in_a_row_are_bounded_and_those_with_the_most_stay(net: Network) -> None:
    host = net.host("ticker")
    report(host, TroubleEntry("missing", 50, {"large": 50}))
    for number in range(100):
        report(host, TroubleEntry("missing", 1, {f"small.{number}": 1}))
    (row,) = shown(net)["latest"]
    assert row["count"] == 150
    assert len(row["names"]) == MAX_TROUBLE_NAMES
    assert row["names"]["large"] == 50


def test_a_user_with_many_sessions_pushes_out_no_row_of_another(net: Network) -> None:
    victim = net.host("victim", user="uid 1")
    report(victim, TroubleEntry("queue full", 7, {"t": 7}))
    for _ in range(MAX_ROWS + 10):
        flood = net.host("flood", user="uid 2")
        report(flood, TroubleEntry("queue full", 1))
        flood.lose()
    rows = net.router.troubles._rows
    assert len(rows) == MAX_ROWS
    assert [row.label for row in rows.values()].count("victim") == 1
    found = shown(net)
    assert found["totals"] == {"queue full": 7 + MAX_ROWS + 10}
    assert len(found["latest"]) == MAX_REPORTED
    assert {row["label"] for row in found["latest"]} == {"flood"}


def test_programs_with_sums_of_their_own_are_bounded_and_the_others_are_summed(
    net: Network,
) -> None:
    for number in range(MAX_PROGRAMS + 5):
        host = net.host(f"program {number}")
        report(host, TroubleEntry("missing", 2))
        host.lose()
    programs = shown(net)["programs"]
    assert len(programs) == MAX_PROGRAMS + 1
    assert programs[OTHER] == {"missing": 10}


def test_sums_stop_at_what_every_reader_of_json_can_hold(net: Network) -> None:
    host = net.host("liar")
    net.router.troubles.totals["missing"] = MAX_SUM - 1
    report(host, TroubleEntry("missing", 0xFFFFFFFF))
    assert shown(net)["totals"] == {"missing": MAX_SUM}


def test_names_that_control_a_terminal_are_shown_without_that(net: Network) -> None:
    report(net.host("evil"), TroubleEntry("missing", 1, {"\x1b[31mred": 1}))
    (row,) = shown(net)["latest"]
    assert row["names"] == {"?[31mred": 1}


def test_who_may_not_see_names_sees_sums_by_cause_alone(net: Network) -> None:
    report(net.host("ticker"), TroubleEntry("missing", 3, {"secret.topic": 3}))
    assert net.router.numbers("not yours")["troubles"] == {"totals": {"missing": 3}}
