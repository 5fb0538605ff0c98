"""The bench of durable streams, as far as Iris goes: every load on real processes, briefly. What is asserted are
counts, never speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = str(BENCH / "streams.py")
MESSAGES = 700

pytestmark = pytest.mark.timeout(240)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=230
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tiny run of all loads but the fastest wrote."""
    there = tmp_path_factory.mktemp("results")
    done = bench(
        "--only", "iris", "--cells", "append,single,replay,live-20k", "--rounds", "1", "--seconds", "0.1",
        "--messages", str(MESSAGES), "--output", str(there),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return there


@pytest.fixture(scope="module")
def runs(results: Path) -> dict[str, Any]:
    """Every load's run."""
    document = json.loads((results / "streams.json").read_text())
    assert document["facts"]["commit"]
    assert [system["name"] for system in document["systems"]] == ["iris"]
    assert "rocksdict" in document["systems"][0]["version"]
    found = {run["cell"]: run for run in document["runs"]}
    assert list(found) == [cell["id"] for cell in document["cells"]]
    assert {run["status"] for run in found.values()} == {"ok"}
    return found


def test_appends_are_all_stored_and_overwritten_three_times(runs: dict[str, Any]) -> None:
    figures = runs["append"]["figures"]
    assert figures["acknowledged"] == figures["sent"] == figures["written"] > 0
    assert 0 < figures["kept"] <= figures["asked_to_keep"]
    assert figures["overwritten_times"] >= 2.9
    assert figures["disk_ratio"] == pytest.approx(figures["mb_s"] / figures["disk_mb_s"])


def test_a_single_append_is_reported_beside_the_least_it_could_cost(runs: dict[str, Any]) -> None:
    run = runs["single"]
    assert run["figures"]["written"] == run["figures"]["sent"] > 0
    counts = {
        name: HdrHistogram.decode(text).get_total_count() for name, text in run["latency"].items()
    }
    assert counts.keys() == {"put", "round_trip", "append"}
    assert all(count > 0 for count in counts.values())


def test_a_log_is_read_whole_warm_and_cold(runs: dict[str, Any]) -> None:
    figures = runs["replay"]["figures"]
    assert figures["filled"] == MESSAGES
    for name in ("warm", "cold"):
        read = figures[name]
        assert (read["messages"], read["wrong"], read["short"]) == (MESSAGES, 0, False)
        assert read["highest"] == MESSAGES - 1
    assert figures["cold_cached_bytes"] >= 0


def test_what_is_published_is_received_and_recorded_or_counted(runs: dict[str, Any]) -> None:
    run = runs["live-20k"]
    for name in ("plain", "recorded"):
        figures = run["figures"][name]
        assert figures["received"] + figures["lost"] == figures["sent"] == 2000
        assert figures["wrong"] == 0
        samples = HdrHistogram.decode(run["latency"][name]).get_total_count()
        assert samples == figures["received"]
    log = run["figures"]["recorded"]["log"]
    assert log["recorded"] + log["not_recorded"] == run["figures"]["recorded"]["sent"]
    assert log["wrong"] == 0
    assert log["told"]["messages"] >= log["not_recorded"] or log["told"]["of_unknown_count"]


def test_every_process_is_accounted_for(runs: dict[str, Any]) -> None:
    assert [p["name"] for p in runs["append"]["processes"]] == ["relay 0", "store", "appender"]
    for run in runs.values():
        assert all(process["peak_bytes"] > 1 << 20 for process in run["processes"])
        assert all(process["cpu_s"] >= 0 for process in run["processes"])


def test_the_tables_show_every_load(results: Path, runs: dict[str, Any]) -> None:
    said = (results / "streams.md").read_text()
    assert said.count("| Iris | sealed; synced before it is acknowledged |") == len(runs)
    assert "failed" not in said.split("## Processes")[0]


def test_what_could_not_run_is_reported_with_its_reason(tmp_path: Path) -> None:
    # Nothing of NATS or Redis is found here, whatever is installed.
    (tmp_path / "nats.py").write_text("raise ImportError('nats is not here')")
    (tmp_path / "redis.py").write_text("raise ImportError('redis is not here')")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--only", "nats,redis", "--cells", "append", "--output", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    document = json.loads((tmp_path / "streams.json").read_text())
    assert [(run["system"], run["status"]) for run in document["runs"]] == [
        ("nats", "failed"), ("redis", "failed")
    ]  # fmt: skip
    said = (tmp_path / "streams.md").read_text()
    assert "append" in said
    assert "nats is not here" in said
    assert "redis is not here" in said


def test_unknown_names_are_refused_with_those_there_are() -> None:
    for option, name in (("--only", "kafka"), ("--cells", "w3")):
        done = bench(option, name)
        assert done.returncode == 1
        assert f"unknown: {name}; choose from" in done.stderr
