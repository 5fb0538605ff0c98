"""A command that is started in a directory of others executes nothing of it but what it was asked to serve."""

from __future__ import annotations

import ast
import colorsys
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import end
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
IRIS = Path(sys.executable).with_name("iris")
NAMES = {"iris", "relay"} | set(sys.stdlib_module_names) | set(packages_distributions())
"""Every name under which a module can be imported here."""
TRAP = "import posix\nposix.open({mark!r} + __name__, posix.O_CREAT | posix.O_WRONLY)\n"
APP = """
import colorsys
import helpers
import iris

service = iris.Service("pool")


@service.on_request
def answer(text: str) -> str:
    import late

    return f"{helpers.WORD} {late.WORD}"
"""


class Place:
    """A directory full of modules that leave a mark when they are executed, and what commands need."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here = root / "here"
        self.marks = root / "marks"
        for directory in (self.here, self.marks):
            directory.mkdir()
        text = TRAP.format(mark=f"{self.marks}/")
        for name in NAMES:
            if name.isidentifier():
                (self.here / f"{name}.py").write_text(text)
        for name in ("iris", "relay", "json"):  # packages come before modules
            (self.here / name).mkdir()
            (self.here / name / "__init__.py").write_text(text)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTHON"))}
        self.environ = kept | {
            "XDG_RUNTIME_DIR": str(root),
            "XDG_CONFIG_HOME": str(root / "config"),
        }
        self.socket = root / "iris" / "relay.sock"

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [IRIS, *arguments], cwd=cwd or self.here, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @contextlib.contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command meanwhile; it must end with 0."""
        process = self.start(*arguments)
        try:
            yield process
            process.terminate()
            end(process)
        finally:
            process.kill()
            process.communicate()

    def run(self, *arguments: str) -> bytes:
        return end(self.start(*arguments))[0]

    def tries(self, *arguments: str) -> int:
        """Run a command, and return its exit code."""
        process = self.start(*arguments)
        process.communicate(timeout=PATIENCE_S)
        return process.returncode

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", "--json"))
        return found

    @property
    def executed(self) -> list[str]:
        """Names of the modules of the directory that were executed."""
        return sorted(os.listdir(self.marks))


@pytest.fixture
def place() -> Iterator[Place]:
    with commands.short_directory("iris-hostile-") as root:
        yield Place(root)
        wait_until(lambda: not commands.processes_under(root))


def test_a_relay_its_store_and_its_metrics_execute_nothing_of_their_directory(place: Place) -> None:
    with place.running("relay", "--dev", "--data", "data", "--metrics", "127.0.0.1:0") as relay:
        wait_until(lambda: place.socket.exists() or relay.poll() is not None)
        assert place.executed == []
        wait_until(lambda: place.tries("stream", "create", "kept") == 0)
        with urllib.request.urlopen(f"http://{place.status()['metrics']['address']}/metrics", timeout=PATIENCE_S) as page:  # fmt: skip
            assert b"iris_" in page.read()
    assert place.executed == []


def test_workers_of_iris_run_get_from_their_directory_only_what_is_nowhere_else(
    place: Place,
) -> None:
    (place.here / "app.py").write_text(APP)
    for name in ("helpers", "late"):
        (place.here / f"{name}.py").write_text(f"WORD = {name!r}\n")
    with place.running("relay", "--dev") as relay:
        wait_until(lambda: place.socket.exists() or relay.poll() is not None)
        for count in ("1", "2"):
            with place.running("run", "app", "--workers", count):
                wait_until(lambda: place.tries("request", "pool", "x") == 0)
                assert place.run("request", "pool", "x") == b"helpers late\n"
    assert place.executed == []


VERBS = (
    "--version", "init shop", "context list", "key new --config-dir keys", "federation key eu.toml", "relay --check --dev", "relay --settings",
    "status", "members pool", "check --timeout 5", "stream list", "top --once", "publish news x", "bench serve --help", "demo --help",
    "dashboard --help", "bridge http --help", "bridge iris1 --help", "bridge sp --help",
)  # fmt: skip


def test_short_commands_execute_nothing_of_their_directory(place: Place) -> None:
    with place.running("relay", "--dev") as relay:
        wait_until(lambda: place.socket.exists() or relay.poll() is not None)
        for verb in VERBS:
            place.tries(*verb.split())
            assert place.executed == [], verb


def test_the_demo_executes_nothing_of_its_directory(place: Place) -> None:
    place.run("demo", "--quick")
    assert place.executed == []


def test_a_module_of_the_directory_that_another_one_hides_is_refused(place: Place) -> None:
    mine = place.root / "mine"
    mine.mkdir()
    (mine / "colorsys.py").write_text("MINE = 1\n")
    _, said = end(place.start("run", "colorsys", cwd=mine), 2)
    assert f"{mine}/colorsys.py is hidden by {colorsys.__file__}".encode() in said
    place.environ["PYTHONPATH"] = "."  # as the error says: the user's own choice is searched first
    _, said = end(place.start("run", "colorsys", cwd=mine), 2)
    assert b"colorsys defines no iris.Service" in said


STARTS = (
    "iris",
    "relay",
    "pyspark_iris",
    "pytest_iris",
    "deploy",
    "docs",
    "examples",
    "requirements",
)


def _starts_of_modules(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the line of each `-m` in a command of this file, and whether it is safe."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        words = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
        if "-m" in words:
            yield node.lineno, "-P" in words[: words.index("-m")]


def test_no_interpreter_is_started_with_its_directory_in_the_path() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": safe
        for place in STARTS
        for path in sorted((ROOT / place).rglob("*.py"))
        for line, safe in _starts_of_modules(path)
    }
    assert len(found) > 5
    assert [where for where, safe in found.items() if not safe] == []
