"""The demo: it ends by itself, agrees with the file, and leaves nothing behind, also when it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from support.commands import command, processes_under

from iris.cli.demo import data, verdict
from iris.cli.demo.figures import Figures, MemberFigures
from iris.errors import ConfigError
from iris.extras import install_line

pytestmark = pytest.mark.timeout(90)

JANUARY = 27_004
"""Rows of January, as the R package's documentation counts them."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which all temporary files and the programs' own paths are under tmp_path."""
    yield {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTHONASYNCIO"))} | {
        "TMPDIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    assert list(tmp_path.iterdir()) == []
    assert processes_under(tmp_path) == []


def test_the_demo_agrees_with_the_file_and_loses_nothing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        command("demo", "--quick"),
        env=environment, capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    summary = lines[lines.index("") + 1 :]
    assert all(line.startswith("ok  ") or line.startswith("      ") for line in summary), summary
    assert f"dashboard: {JANUARY:,} flights" in done.stdout
    assert sum(line.startswith("ok    member") for line in summary) == 3
    assert sum("was killed with" in line for line in summary) == 1
    assert " 0 timeouts;" in done.stdout
    assert summary[-1].endswith("lost 0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_its_processes_and_files_along(
    environment: dict[str, str], number: signal.Signals
) -> None:
    with subprocess.Popen(
        command("demo"),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        for line in demo.stdout:
            if "published" in line:  # under way, with a relay and three members
                break
        demo.send_signal(number)
        rest, errors = demo.communicate(timeout=30)
    assert demo.returncode == 130, rest + errors
    assert "Traceback" not in errors


def test_a_demo_whose_reader_has_enough_ends_quietly(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        command("demo", "--quick"),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        assert demo.stderr is not None
        while "published" not in demo.stdout.readline():
            pass
        demo.stdout.close()
        assert demo.stderr.read() == ""
    assert demo.returncode == 0


def test_without_the_data_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ConfigError, match=re.escape(install_line("demo"))):
        data.find_csv()


def test_both_ways_to_read_the_file_come_to_the_same() -> None:
    """The rows that are published (split by hand) against the direct pass (csv module, by column name)."""
    source = data.find_csv()
    tally = data.Tally()
    for row in data.rows(source, quick=True):
        tally.add_delay(row)
    truth = data.direct_pass(source, quick=True)
    assert tally == truth.all
    assert truth.all.rows == sum(part.rows for part in truth.by_carrier.values()) == JANUARY


def agreeing() -> tuple[Figures, data.Truth]:
    """Return figures of a run in which everything went well, and the truth that they agree with."""
    tally = data.Tally(10, 77, {("JFK", "B6"): (9, 90)})
    truth = data.Truth(tally, {"B6": data.Tally(4, 5)})
    figures = Figures(quick=True, finished=True, published=10, asked=6, answered=6, carrier="B6")
    figures.dashboard = data.Tally(10, 77)
    figures.members = {
        1: MemberFigures(1, rows=10, checksum=77),
        2: MemberFigures(2, rows=3, checksum=1, killed=True),
    }
    figures.read, figures.reported_after = (4, 5), [0.001]
    figures.averages = {("JFK", "B6"): (9, 90), ("LGA", "OO"): (0, 0)}
    return figures, truth


def test_figures_that_agree_are_a_success() -> None:
    lines, agrees = verdict.compare(*agreeing())
    assert agrees
    assert lines[-1] == "ok    sent 16 (10 flights + 6 requests), refused 0, received 16, lost 0"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finished", False), ("dashboard", data.Tally(9, 77)), ("dashboard", data.Tally(10, 78)), ("answered", 5),
        ("timed_out", 1), ("read", (4, 6)), ("reported_after", []), ("averages", {("JFK", "B6"): (9, 91)}),
        ("members", {1: MemberFigures(1, rows=9, checksum=77)}),
    ],
)  # fmt: skip
def test_any_figure_that_differs_is_a_failure(field: str, value: object) -> None:
    figures, truth = agreeing()
    setattr(figures, field, value)
    lines, agrees = verdict.compare(figures, truth)
    assert not agrees
    assert any(line.startswith("FAIL") for line in lines[:-1])
    assert lines[-1].startswith("FAIL")
