"""`iris check`: what each state of a relay is worth, and what the exit code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner
from unit.test_metric_pages import status

from iris.cli import check as verb
from iris.cli import clock
from iris.cli.check import judge, judge_programs, judge_stores, outdated
from iris.streams import StoreHealth

RUN = CliRunner()
LINK = {"label": "b", "peer": "ab" * 16}


def verdicts(report: dict[str, Any], **more: Any) -> dict[str, tuple[str, str]]:
    return {found.check: (found.state, found.detail) for found in judge(report, 0.001, **more)}


def test_a_relay_alone_is_well() -> None:
    found = verdicts(status(uptime_s=7200.0))
    assert found == {"relay": ("ok", "answered in 1 ms, up 2.0 h"), "links": ("ok", "0 links up, none missing")}  # fmt: skip


def test_a_relay_that_stops_is_critical() -> None:
    assert verdicts({**status(), "draining": True})["relay"] == ("critical", "it is stopping")


def test_a_known_relay_that_is_not_linked_is_a_warning_and_critical_if_no_other_is() -> None:
    dialling = {"unlinked": [{"source": "10.0.0.7:7430", "error": "Connection refused"}]}
    missing = {**status(), "dialling": dialling}
    assert verdicts(missing)["links"] == (
        "critical", "0 links up; not linked: 10.0.0.7:7430 (Connection refused)"
    )  # fmt: skip
    assert verdicts({**missing, "links": [LINK]})["links"][0] == "warning"
    ourselves = {"unlinked": [{"source": "join 10.0.0.6:7430", "error": "ourselves"}]}
    assert verdicts({**status(), "dialling": ourselves})["links"][0] == "ok"
    suspended = {**status(), "links": [LINK], "suspended": ["cd" * 16]}
    assert verdicts(suspended)["links"] == ("warning", "1 link up; not linked: cdcdcdcd… (lost a moment ago)")  # fmt: skip
    many = {"unlinked": [{"source": f"h{n}", "error": "x"} for n in range(8)]}
    assert verdicts({**status(), "dialling": many})["links"][1].endswith("; h4 (x) and 3 more")


def test_a_site_that_is_not_connected_is_named() -> None:
    gateways = {"peers": [{"site": "us"}, {"site": "ap"}]}
    both = {**status(), "gateways": gateways, "sites": [{"site": "us", "ways": [1]}]}
    assert verdicts(both)["sites"] == ("warning", "not connected: ap; `iris federation list` shows why")  # fmt: skip
    assert verdicts({**both, "sites": []})["sites"][0] == "critical"


@pytest.mark.parametrize(
    ("store", "space", "state"),
    [
        ({}, (10**12, 10**12), "ok"),
        ({}, None, "ok"),
        ({}, (1 << 30, 1 << 40), "warning"),
        ({}, (1 << 20, 1 << 40), "critical"),
        ({"pid": None}, (10**12, 10**12), "critical"),
        ({"cannot_serve": "disk write failed"}, (10**12, 10**12), "critical"),
    ],
)
def test_a_store_must_run_serve_and_have_space(
    store: dict[str, Any], space: tuple[int, int] | None, state: str
) -> None:
    there = {"data": "/d", "pid": 7, "starts": 1, "cannot_serve": "", **store}
    assert verdicts(status(store=there), free=lambda path: space)["store"][0] == state


A = StoreHealth("9925e90b" * 4, "db-1", has_bucket=True)
B = StoreHealth("1d5410ec" * 4, "db-2", has_bucket=True)


@pytest.mark.parametrize(
    ("changed", "state", "text"),
    [
        ({}, "ok", "2 stores of the site answer, 2 with a bucket"),
        ({"away": "no answer", "waiting_bytes": 1234}, "critical", "store 1d5410ec on db-2 cannot write to its bucket: no answer; 1,234 bytes wait for it"),
        ({"not_taken": "objects are missing"}, "critical", "store 1d5410ec on db-2 cannot take over from stores that are gone: objects are missing"),
        ({"taken": 1, "taken_s": 20.0}, "warning", "less than a minute ago"),
        ({"taken": 1, "taken_s": 3500.0}, "warning", "store 1d5410ec on db-2 lost its streams in the bucket to another store 58 min ago"),
        ({"taken": 1, "taken_s": 4000.0}, "ok", ""),
        ({"host": "", "error": "no answer within 5 s"}, "critical", "store 1d5410ec did not answer: no answer within 5 s"),
    ],
)  # fmt: skip
def test_every_store_of_the_site_is_judged_and_named_with_its_host(
    changed: dict[str, Any], state: str, text: str
) -> None:
    found, said = judge_stores([A, structs.replace(B, **changed)])
    assert (found, text in said) == (state, True), said
    assert "9925e90b" not in said


def test_a_store_that_is_critical_comes_before_one_that_is_degraded() -> None:
    away = structs.replace(B, away="no answer")
    late = structs.replace(A, taken=1, taken_s=20.0)
    state, said = judge_stores([late, away])
    assert state == "critical"
    assert said.index("1d5410ec") < said.index("9925e90b")


def test_a_report_of_numbers_alone_is_a_warning_that_says_where_to_run_the_command() -> None:
    limited = {**status(), "limited": "names are shown only to the relay's own user"}
    assert verdicts(limited)["links"] == ("warning", "not checked: names are shown only to the relay's own user")  # fmt: skip


def test_a_program_that_holds_only_a_key_that_is_to_be_retired_is_named() -> None:
    def sessions(*keys: str) -> dict[str, Any]:
        return {"sessions": [{"label": "old.py", "pid": 7, "keys": list(keys)}]}

    assert list(outdated(sessions("bb"), "db", "aa", {"bb"})) == ["old.py (pid 7, db under bb…)"]
    for fine in (("aa", "bb"), ("aa",), ("cc",), (), ("bb", "+9")):
        assert list(outdated(sessions(*fine), "db", "aa", {"bb"})) == [], fine


def row(cause: str, count: int, last_s: float, **more: Any) -> dict[str, Any]:
    return {"label": "ticker", "pid": 7, "cause": cause, "count": count, "names": {"t.a": count}, "last_s": last_s, **more}  # fmt: skip


def test_what_programs_have_reported_lately_is_a_warning_with_advice_and_the_most_first() -> None:
    def of(*rows: dict[str, Any]) -> tuple[str, str]:
        return judge_programs({"troubles": {"latest": [*rows]}})

    state, text = of(row("handler failed", 3, 299.0), row("queue full", 58_676, 1.0))
    assert state == "warning"
    lost, failed = text.split("; ticker")
    assert lost.startswith("ticker (pid 7) lost 58,676 messages of t.a: its own queue was full; ")
    assert "when_full" in lost
    assert failed.startswith(" (pid 7) 3 calls of t.a failed: a handler raised an exception; ")
    assert of()[0] == "ok"
    assert of(row("queue full", 9, 301.0))[0] == "ok"
    assert of(row("uncounted", 9, 1.0))[0] == "ok"
    assert of(*[row("missing", n, 1.0) for n in range(1, 9)])[1].endswith(" and 3 more")


def test_the_exit_code_is_the_worst_and_the_first_line_sums_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        verb.Result("relay", "ok", "up"),
        verb.Result("links", "warning", "x\x1b[31m"),
        verb.Result("store", "ok", "y"),
    ]

    async def results(relay: str | None, timeout: float) -> list[verb.Result]:
        return found

    monkeypatch.setattr(verb, "_results", results)
    from iris.cli import app

    done = RUN.invoke(app, ["check"])
    assert done.exit_code == 1
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[0].startswith("iris warning: links: x")
    assert RUN.invoke(app, ["check", "--skip", "links"]).exit_code == 0
    found.append(verb.Result("store", "critical", "z"))
    done = RUN.invoke(app, ["check", "--json"])
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["status"] == "critical"
    assert document["checks"][0] == {"check": "relay", "state": "ok", "detail": "up"}


def test_without_a_relay_it_is_critical_whatever_is_left_out(tmp_path: Path) -> None:
    from iris.cli import app

    everything = [word for name in verb.SKIPPABLE for word in ("--skip", name)]
    done = RUN.invoke(app, ["check", "--relay", str(tmp_path / "none.sock"), *everything])
    assert done.exit_code == 2
    assert done.stdout.startswith(f"iris critical: relay: no relay at {tmp_path}/none.sock")


@pytest.mark.parametrize("name", ["relay", "foo"])
def test_only_known_checks_can_be_left_out_and_the_relay_never(name: str) -> None:
    from iris.cli import app

    done = RUN.invoke(app, ["check", "--skip", name])
    assert done.exit_code == 2
    assert done.stderr == f"iris: --skip: {name!r} is not a check that can be left out; use links, sites, store, stores, programs, keys, clock\n"  # fmt: skip


@pytest.mark.parametrize(
    ("found", "links", "state"),
    [
        (clock.Clock(True, 0.0001, 0.01), [LINK], "ok"),
        (clock.Clock(True, 0.0001, 5.0), [LINK], "warning"),
        (clock.Clock(False, 0.0, 16.0), [LINK], "warning"),
        (clock.Clock(False, 0.0, 16.0), [], "ok"),
        (None, [LINK], "ok"),
    ],
)
def test_the_clock_matters_if_there_are_other_hosts(
    found: clock.Clock | None, links: list[Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "read", lambda: found)
    assert verb._clock({**status(), "links": links})[0] == state


def test_a_clock_that_differs_from_that_of_another_relay_is_told_by_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "read", lambda: clock.Clock(True, 0.0001, 0.01))
    kept = "kept by a time service to within 10 ms (now off by 0.1 ms)"

    def of(offset_us: int | None, error_us: int | None, **more: Any) -> tuple[str, str]:
        link = {**LINK, "clock_offset_us": offset_us, "clock_error_us": error_us}
        return verb._clock({**status(), "links": [link], **more})

    assert of(None, None) == ("ok", kept)
    assert of(-900_000, 400) == ("ok", kept)
    assert of(5_000_000, 4_500_000) == ("ok", kept)  # the round trip is too long to say
    assert of(-90_500_000, 400)[0] == "critical"
    assert of(2_500_000, 400) == ("warning", f"it differs from that of b, which is ahead by 2.5 s; {kept}")  # fmt: skip
    ways = [{"clock_offset_us": -3_000_000, "clock_error_us": 9}, {"relay": "cd"}]
    state, text = of(2_500_000, 400, sites=[{"site": "eu\x1b", "ways": ways}])
    assert state == "warning"
    assert "\x1b" not in text
    assert text.startswith("it differs from that of eu")
    assert "which is behind by 3.0 s; b, which is ahead by 2.5 s; kept" in text


def test_the_kernel_is_asked_for_its_clock_and_not_changed() -> None:
    found = clock.read()
    assert found is None or 0 <= found.max_error_s <= 60
