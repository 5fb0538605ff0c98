"""Sabotages: which ones apply, which have lost their expression, and how a test run is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proofs import mutations

TESTS = Path(__file__).resolve().parents[2]
SOURCE = '''\
class Guard:
    def check(self, number):
        """Refuse what is too large."""
        if number > 3 and (
            number != 7
        ):
            raise ValueError(number)
        return number > 3


def check(number):
    return number > 3
'''
HANGS = """\
import subprocess, time

def test_waits():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("started", "w").write(str(started.pid))
    while True:
        time.sleep(1)
"""
RUNS = """\
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from proofs import mutations
mutations.adopt()
outcome = mutations.run_tests(Path(sys.argv[2]), ["test_it.py"], float(sys.argv[3]))
print(json.dumps([outcome.code, outcome.noticed, outcome.by]))
"""


@pytest.fixture
def sabotage() -> Callable[..., Any]:
    """Make a sabotage of SOURCE as guard.py."""

    def make(function: str, find: str, put: str, tests: tuple[str, ...] = ()) -> Any:
        return mutations.Sabotage("one", "guard.py", function, find, put, tests, "nothing")

    return make


def test_every_sabotage_applies_to_this_tree() -> None:
    assert mutations.faults(mutations.SABOTAGES) == []
    assert mutations.MOST >= 60


def test_a_sabotage_changes_its_own_function_wherever_the_lines_break(
    sabotage: Callable[..., Any],
) -> None:
    changed = mutations.sabotaged(sabotage("Guard.check", "if number > 3 and ( number != 7 ):", "if False:"), SOURCE)  # fmt: skip
    assert changed == SOURCE.replace("if number > 3 and (\n            number != 7\n        ):", "if False:")  # fmt: skip
    changed = mutations.sabotaged(sabotage("check", "number > 3", "True"), SOURCE)
    assert changed == SOURCE.removesuffix("number > 3\n") + "True\n"


@pytest.mark.parametrize(
    ("function", "find", "put", "expected"),
    [
        ("Guard.check", "number > 4", "False", "0 times"),
        ("Guard.check", "number > 3", "False", "2 times"),
        ("Guard.gone", "number > 3", "False", "no function"),
        ("Guard", "number != 7", "False", "no function"),
        ("check", "return number > 3", "return number >", "not valid Python"),
        ("Guard.check", "number != 7", "(number != 7)", "changes nothing"),
    ],
)
def test_a_sabotage_whose_expression_is_not_there_exactly_once_is_an_error(
    sabotage: Callable[..., Any], tmp_path: Path, function: str, find: str, put: str, expected: str
) -> None:  # fmt: skip
    (tmp_path / "guard.py").write_text(SOURCE)
    (fault,) = mutations.faults([sabotage(function, find, put)], tmp_path)
    assert fault.startswith("one: ")
    assert expected in fault


def test_a_missing_test_and_a_repeated_id_are_errors(
    sabotage: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "guard.py").write_text(SOURCE)
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    fits = sabotage("check", "number > 3", "True", ("test_it.py", "test_it.py::test_it"))
    gone = fits._replace(id="other", tests=("test_it.py::test_gone", "test_that.py"))
    assert mutations.faults([fits], tmp_path) == []
    assert mutations.faults([gone], tmp_path) == [
        "other: test_it.py has no test test_gone",
        "other: there is no test_that.py",
    ]
    assert mutations.faults([fits, fits], tmp_path) == ["one: the id is used twice"] * 2


@pytest.mark.parametrize(
    ("test", "code", "noticed", "by"),
    [
        ("def test_it(): pass", 0, False, ""),
        ("def test_it(): assert False", 1, True, "test_it.py::test_it"),
        ("import nothing_of_the_kind", 2, False, "test_it.py"),
        ("import os\ndef test_it(): os.abort()", -6, True, ""),
    ],
)
def test_failing_tests_count_as_noticed_and_import_errors_do_not(
    tmp_path: Path, test: str, code: int, noticed: bool, by: str
) -> None:
    assert run_tests(tmp_path, test, 60) == [code, noticed, by]


def test_a_hang_is_noticed_and_leaves_no_process(tmp_path: Path) -> None:
    assert run_tests(tmp_path, HANGS, 10) == [None, True, ""]
    started = int((tmp_path / "tree" / "started").read_text())
    assert not Path(f"/proc/{started}").exists()


def run_tests(directory: Path, test: str, hangs_s: float) -> list[Any]:
    """Run a test in its own tree and process, which ends everything that the test started."""
    tree = directory / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(sys.prefix)
    # Plugins that are slow to import and have nothing to do here are left out.
    (tree / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '-p no:schemathesis -p no:hypothesispytest -p no:pytest_iris'\n"
    )
    (tree / "test_it.py").write_text(test)
    command = [sys.executable, "-c", RUNS, str(TESTS), str(tree), str(hangs_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    outcome: list[Any] = json.loads(done.stdout)
    return outcome
