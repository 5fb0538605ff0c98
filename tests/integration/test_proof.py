"""The proofs, at small counts: the code of `make proof`, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import proof
import pytest
from proofs import mutations, order, siege
from proofs.common import Proof

import iris

PROOF = Path(__file__).resolve().parents[1] / "proof.py"
COUNTS = {
    "tunnels": 200,
    "connections": 40,
    "http": 40,
    "web": 1000,
    "order": 4000,
    "rotation": 100,
    "idle": 1,
    "mutations": 1,
    "hostile": 200,
    "restarts": 2,
    "drains": 1,
    "gateway-drains": 2,
    "direct": 2,
    "bucket-kills": 2,
}


def prove(area: str, count: int, record: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a proof that makes its files in `directory`."""
    # Bounded by the proof itself: it ends its processes, which a kill from here would not.
    return subprocess.run(
        [sys.executable, PROOF, area, str(count), "--seed", "7", "--record", record],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(directory)},
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize("area", COUNTS)
def test_each_promise_holds_at_a_small_count_and_leaves_nothing(area: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    record = tmp_path / "proof.md"
    done = prove(area, COUNTS[area], record, made)
    assert done.returncode == 0, done.stdout + done.stderr
    text = record.read_text()
    assert f"## {area} {COUNTS[area]:,}\n" in text
    assert "seed 7;" in text
    assert "\nHeld.\n" in text
    assert list(made.iterdir()) == []


def test_a_run_replaces_the_section_of_its_area_and_count_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "proof.md"
    for heading in ("idle 10", "tunnels 10,000", "idle 2", "tunnels 9", "idle 2"):
        before = path.read_text() if path.exists() else ""
        proof.record(path, f"## {heading}\n\nafter {len(before)} characters\n")
    text = path.read_text()
    headings = ["tunnels 9", "tunnels 10,000", "idle 2", "idle 10"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == headings
    assert text.count("characters") == 4
    assert f"## idle 2\n\nafter {len(before)} characters\n" in text


def test_a_broken_promise_is_written_down() -> None:
    outcome = Proof({"lost": "1"})
    outcome.promise("nothing is lost", False)
    outcome.promise("all is in order", True)
    text = proof.section("order", 9, 7, outcome)
    assert "**Did not hold:** nothing is lost.\n" in text
    assert "| lost | 1 |\n" in text


def test_the_audit_of_order_sees_what_is_wrong() -> None:
    drawn = order.draw(7, 0, 500)
    topic = drawn[0]
    name, count = order.TOPICS[topic], drawn.count(topic)
    assert count > 4

    def audit_of(*numbers: int, reported: int = 0) -> dict[str, int]:
        audit = order.Audit(name, 7, [500])
        for number in numbers:
            payload = order.NUMBER.pack(0, topic, number)
            audit.message(iris.Message(payload, name, None, False, b"s"))
        if reported:
            audit.gap(iris.Loss("publish", name, b"s", reported, "slow subscriber"))
        result: dict[str, int] = audit.result()
        return {key: result[key] for key in ("inversions", "duplicates", "unaccounted")}

    right = range(count)
    none = {"inversions": 0, "duplicates": 0, "unaccounted": 0}
    assert audit_of(*right) == none
    assert audit_of(*right[2:], reported=2) == none
    assert audit_of(*right[2:], reported=1) == {**none, "unaccounted": 1}
    assert audit_of(*right, reported=1) == {**none, "unaccounted": 1}
    assert audit_of(1, 0, *right[2:]) == {**none, "inversions": 1}
    assert audit_of(0, *right) == {**none, "duplicates": 1}


def test_an_unknown_area_is_a_usage_error(tmp_path: Path) -> None:
    done = prove("everything", 1, tmp_path / "proof.md", tmp_path)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


@pytest.mark.timeout(150)
def test_a_sabotage_that_no_test_notices_breaks_the_promise() -> None:
    tests = ("tests/unit/crypto/test_replay_window.py",)
    mutation = (
        "iris/crypto/sframe.py",
        "Sealer.poison",
        "self._encrypt = _refuse_poisoned",
        "pass",
    )
    unnoticed = mutations.Sabotage("elsewhere", *mutation, tests, "two processes use one counter")
    outcome = mutations.run(1, 7, [unnoticed])
    assert outcome.broken == ["elsewhere is noticed"]
    assert outcome.figures["sabotages"] == "1, 0 noticed"
    with pytest.raises(proof.BenchError, match="is there 0 times"):
        mutations.run(1, 7, [unnoticed._replace(find="self._encrypt = None")])


def attacked(**wrong: object) -> siege.Outcome:
    """Return the outcome of an attack that is within all limits, except for `wrong`."""
    quiet, beside = {"p50_us": 1000.0, "p99_us": 2000.0}, {"p50_us": 2000.0, "p99_us": 6000.0}
    meter = {"stretches_ms": {"Turns._turn": 9.0, "SessionPort.go_on": 5.0}, "share_ms": 10.0}
    fields = {"meter": meter, "callers": [[quiet, quiet, beside] * 3] * 2, **wrong}
    return siege.Outcome("pings", 8, **fields)  # type: ignore[arg-type]  # each test gives what the field holds


def test_an_attack_within_the_limits_breaks_no_promise() -> None:
    assert attacked().broken() == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"links_down": 1}, "1 links went down"),
        ({"failures": ["NoMembers()"]}, "honest requests failed: NoMembers()"),
        ({"unaccounted": 3}, "3 messages are not accounted for"),
        ({"left": 2}, "2 sessions of attackers have not ended"),
        ({"closed": Counter({"a rule": 1}), "counted": {"broken rules": 1}}, "closed"),
        (
            {"meter": {"stretches_ms": {"SessionPort.go_on": 5.1}, "share_ms": 5.1}},
            "SessionPort.go_on 5.1 ms",
        ),
        ({"meter": {"stretches_ms": {}, "share_ms": 10.1}}, "10.1 ms of a turn"),
        ({"callers": [[{"p99_us": 0.5}, {"p99_us": 1.0}, {"p99_us": 3.1}]] * 2}, "p99 3.1 x"),
    ],
)
def test_an_attack_that_breaks_a_promise_is_named(wrong: dict[str, object], named: str) -> None:
    assert attacked(**wrong).broken() == [named]


def test_an_attacker_that_breaks_a_rule_must_be_closed_and_counted() -> None:
    outcome = attacked()
    outcome.name = "proofs"
    assert outcome.broken() == ["no broken rule is counted"]
    outcome.closed["a session may prove at most 1024 keys"] = 2
    outcome.counted["broken rules"] = 1
    assert outcome.broken() == ["what was closed is not counted"]
