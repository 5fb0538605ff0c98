"""The comparison with other systems, as far as Iris and the floors go: every load on real processes, briefly."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))  # its modules import each other as scripts do

import compare  # noqa: E402
import harness  # noqa: E402
import lineup  # noqa: E402
import loads  # noqa: E402

pytestmark = pytest.mark.timeout(90)


def plan(*names: str, cells: tuple[str, ...]) -> compare.Plan:
    systems = [system for system in lineup.SYSTEMS if system.name in names]
    chosen = [cell for cell in lineup.CELLS if cell.id in cells]
    assert len(systems) == len(names)
    assert len(chosen) == len(cells)
    return compare.Plan(systems, chosen, rounds=1, burst_s=0.3, load_s=0.3)


def test_every_load_of_iris_runs_and_is_checked() -> None:
    cells = ("w1-128b", "w3-1", "w3-64", "w4-1kib-3000", "w5")
    runs = compare.run_all(plan("iris", cells=cells))
    assert [(run["cell"], run["status"], run["reason"]) for run in runs] == [
        (cell, "ok", "") for cell in cells
    ]
    figures = {run["cell"]: run["figures"] for run in runs}
    assert all(each["wrong"] == 0 for each in figures.values())
    published = figures["w1-128b"]
    assert published["received"] + published["lost"] == published["sent"] > 0
    assert figures["w5"]["messages"] > 0
    asked = figures["w4-1kib-3000"]
    assert asked["answered"] + asked["unanswered"] + asked["errors"] == asked["requests"] == 900
    for run in runs:
        names = [process["name"] for process in run["processes"]]
        assert names[0] == "relay 0"
        assert len(names) >= 3
        assert all(process["peak_bytes"] > 1 << 20 for process in run["processes"])


def test_latencies_are_kept_whole_with_those_that_were_never_answered() -> None:
    (run,) = compare.run_all(plan("iris", cells=("w4-256b-3000",)))
    from hdrh.histogram import HdrHistogram

    figures = run["figures"]
    corrected = HdrHistogram.decode(run["latency"]["corrected"])
    uncorrected = HdrHistogram.decode(run["latency"]["uncorrected"])
    assert corrected.get_total_count() == figures["answered"] + figures["unanswered"]
    assert uncorrected.get_total_count() == figures["answered"]
    # From when it was due is never less than from when it was sent.
    assert corrected.get_value_at_percentile(50) >= uncorrected.get_value_at_percentile(50)


def test_two_relays_and_the_twin_are_columns_of_their_own() -> None:
    runs = compare.run_all(plan("iris-2", "twin", cells=("w3-1", "w4-256b-3000")))
    outcomes = {(run["peer"], run["cell"]): (run["status"], run["reason"]) for run in runs}
    assert outcomes == {
        ("iris-2", "w3-1"): ("ok", ""),
        ("twin", "w3-1"): ("ok", ""),
        ("twin", "w4-256b-3000"): ("not run", "there is no twin of an open loop"),
    }
    (two,) = [run for run in runs if run["peer"] == "iris-2"]
    assert [process["name"] for process in two["processes"][:2]] == ["relay 0", "relay 1"]


def test_a_system_that_does_not_start_is_reported_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peers.iris_ import Iris

    def servers(self: Iris) -> list[loads.Server]:
        command = [sys.executable, "-c", "raise SystemExit('no disk')"]
        return [loads.Server("relay 0", command, ("127.0.0.1", self.setup["nowhere"]))]

    monkeypatch.setattr(Iris, "prepare", lambda self: self.choose_port("nowhere"))
    monkeypatch.setattr(Iris, "servers", servers)
    runs = compare.run_all(plan("iris", cells=("w3-1", "w5")))
    assert [run["status"] for run in runs] == ["failed", "failed"]
    assert all("no disk" in run["reason"] for run in runs)


def test_what_the_system_started_is_counted_and_ends_with_it(tmp_path: Path) -> None:
    with harness.Roles(60) as roles:
        script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
        role = roles.run("server", ["sh", "-c", script])
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert role.process.poll() is None
        below = int((tmp_path / "pid").read_text())
        assert set(harness.descendants(role.process.pid)) == {role.process.pid, below}
        served = loads.Served("server", role)
        served.begin()
        assert served.used()["peak_bytes"] > 0
        loads.end([served])
        until_s = time.monotonic() + 10
        while Path(
            f"/proc/{below}"
        ).exists():  # killed, and not its parent's any more: init reaps it
            assert time.monotonic() < until_s or "Z" in Path(f"/proc/{below}/stat").read_text()
            time.sleep(0.01)


def test_what_is_far_beyond_a_system_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dataclasses.replace(plan("iris", cells=("w4-256b-3000", "w4-1kib-3000")), rounds=2)

    def run_cell(stage: loads.Stage, cell: lineup.Cell, plan: compare.Plan) -> dict[str, Any]:
        unanswered = 6 if cell.size == 256 else 5
        return {"requests": 100, "unanswered": unanswered, "processes": []}

    monkeypatch.setattr(compare, "run_cell", run_cell)
    runs = compare.run_all(chosen)
    assert [(run["round"], run["cell"], run["status"]) for run in runs] == [
        (1, "w4-256b-3000", "ok"),
        (1, "w4-1kib-3000", "ok"),
        (2, "w4-256b-3000", "not run"),
        (2, "w4-1kib-3000", "ok"),
    ]
    assert runs[2]["reason"] == "saturated in round 1: 6% unanswered; not repeated"


def test_unknown_names_are_refused_with_those_there_are() -> None:
    command = [sys.executable, str(BENCH / "compare.py"), "--only", "iris,kafka"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "unknown: kafka; choose from iris, " in done.stderr


def test_results_are_json_that_can_be_read_again() -> None:
    chosen = plan("iris", cells=("w3-1",))
    runs = compare.run_all(chosen)
    made = compare.document(chosen, harness.facts(), {"rounds": 1}, runs, 1.0)
    assert json.loads(json.dumps(made)) == made
