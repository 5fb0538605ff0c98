"""Remove one of our checks at a time and run the tests named for it: each of the first N sabotages must make a test
fail.

`proofs.sabotages` lists them. Each is applied to a copy of the tree with its own environment, so that processes
started by the tests import the copy, too. If the source does not contain a sabotage's expression exactly
once, the run fails before it begins. First all tests must pass in an unchanged copy. A test that hangs counts as
failed. All processes that a test run started are killed with it.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from harness import BenchError

from proofs import ROOT
from proofs.common import Proof
from proofs.sabotages import SABOTAGES, Sabotage

PACKAGES = ("iris", "relay")
MOST = len(SABOTAGES)
"""The count for `N=all`."""
AT_ONCE = 2
HANGS_S = 180.0
"""A test run that takes longer counts as hung."""
LEFT_OUT = (".*", "__pycache__", "results", "build", "dist", "*.egg-info")
_SET_CHILD_SUBREAPER = 36
_PASSED = re.compile(r"(\d+) passed")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.M)


class Outcome(NamedTuple):
    """The result of a test run."""

    code: int | None
    """pytest's exit code; None if it hung."""
    by: str
    """The first test that failed."""
    passed: int
    seconds: float
    said: str

    @property
    def green(self) -> bool:
        return self.code == 0

    @property
    def noticed(self) -> bool:
        """Whether a test failed, hung or crashed the interpreter. An import error does not count."""
        return self.code is None or self.code == 1 or self.code < 0


# -- where a sabotage goes --------------------------------------------------------------------------------


def sabotaged(sabotage: Sabotage, source: str) -> str:
    """Return the module's source with the sabotage in it. Raises BenchError if its expression is not there exactly
    once.
    """
    start, end = _span(sabotage, source)
    # The formatter may break a line elsewhere.
    pattern = r"\s+".join(re.escape(word) for word in sabotage.find.split())
    found = list(re.finditer(pattern, source[start:end]))
    where = f"{sabotage.id}: {sabotage.path}, {sabotage.function}"
    if len(found) != 1:
        raise BenchError(f"{where}: {sabotage.find!r} is there {len(found)} times instead of once")
    begin, stop = (start + offset for offset in found[0].span())
    changed = source[:begin] + sabotage.put + source[stop:]
    before, after = source[start:end], changed[start : end + len(changed) - len(source)]
    try:
        same = _shape(after) == _shape(before)
    except SyntaxError as err:
        raise BenchError(f"{where}: the result is not valid Python: {err}") from err
    if same:
        raise BenchError(f"{where}: it changes nothing")
    return changed


def _shape(function: str) -> str:
    """Return the code of a function, whatever its layout. Raises SyntaxError."""
    return ast.dump(ast.parse(textwrap.dedent(function)))


_parsed = functools.cache(ast.parse)
"""Many sabotages are in one module."""


def _span(sabotage: Sabotage, source: str) -> tuple[int, int]:
    """Return the start and end of the function in the source."""
    nodes: list[ast.AST] = [_parsed(source)]
    for name in sabotage.function.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = [one for node in nodes for one in ast.iter_child_nodes(node)]
        nodes = [one for one in inside if isinstance(one, kinds) and one.name == name]
    if len(nodes) != 1 or isinstance(nodes[0], ast.ClassDef):
        raise BenchError(f"{sabotage.id}: {sabotage.path} has no function {sabotage.function}")
    (node,) = nodes
    lines = source.splitlines(keepends=True)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


def faults(sabotages: Sequence[Sabotage], root: Path = ROOT) -> list[str]:
    """Return the errors in a list of sabotages, compared with the tree at `root`."""
    ids = Counter(one.id for one in sabotages)
    found = [f"{one.id}: the id is used twice" for one in sabotages if ids[one.id] > 1]
    for sabotage in sabotages:
        try:
            sabotaged(sabotage, (root / sabotage.path).read_text())
        except (BenchError, OSError) as err:
            found.append(str(err))
        found += [
            f"{sabotage.id}: {one}" for test in sabotage.tests for one in _missing(test, root)
        ]
    return found


def _missing(test: str, root: Path) -> Iterator[str]:
    path, _, name = test.partition("::")
    if not (root / path).exists():
        yield f"there is no {path}"
    elif name and not re.search(rf"^(async )?def {name}\b", (root / path).read_text(), re.M):
        yield f"{path} has no test {name}"


# -- copies, and processes in them ------------------------------------------------------------------------


def copy_tree(directory: Path) -> Path:
    """Copy this tree to `directory`, with an environment whose interpreter always imports the copy."""
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    venv.EnvBuilder(symlinks=True).create(directory / ".venv")
    (packages,) = (directory / ".venv" / "lib").glob("python*/site-packages")
    # In this order, because the packages installed here include a path to this tree.
    (packages / "a.pth").write_text(f"{directory}\n")
    installed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "b.pth").write_text("".join(f"{path}\n" for path in installed))
    python = directory / ".venv" / "bin" / "python"
    script = python.with_name("iris")
    script.write_text(f"#!{python}\nimport sys\nfrom iris.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    program = (
        f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)})"
    )
    done = subprocess.run([python, "-c", program], cwd="/", env={}, capture_output=True, text=True, check=False)  # fmt: skip
    wanted = [str(directory / name / "__init__.py") for name in PACKAGES]
    if done.stdout.split() != wanted:
        raise BenchError(f"the copy imports something else: {done.stdout}{done.stderr}")
    return directory


def run_tests(tree: Path, tests: Sequence[str], hangs_s: float = HANGS_S) -> Outcome:
    """Run tests in a copy. All processes that they started have ended on return. Call `adopt` in this process first."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    scratch = tree.with_name(tree.name + "t")
    begin_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(
            [
                tree / ".venv/bin/python", "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider",
                f"--basetemp={scratch}", *tests,
            ],
            cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = running.wait(hangs_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_descendants(running)
            shutil.rmtree(scratch, ignore_errors=True)
        said.seek(0)
        text = said.read()
    failed, passed = _FAILED.search(text), _PASSED.search(text)
    return Outcome(
        code, failed[1] if failed else "", int(passed[1]) if passed else 0, time.monotonic() - begin_s, text[-3000:]
    )  # fmt: skip


def adopt() -> None:
    """Become the parent of every descendant process whose parent has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise BenchError(f"no subreaper: {os.strerror(ctypes.get_errno())}")


def end_descendants(running: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill all descendants of this process, each by its id; `running` is the direct child."""
    while found := _descendants():
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        running.wait()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        mine = children.get(ahead.pop(), [])
        found += mine
        ahead += mine
    return found


def _own_tree(directory: Path) -> Path:
    """Return this worker's copy of the tree, which is created at its first use."""
    tree = directory / f"w{os.getpid()}"
    if not tree.exists():
        adopt()
        copy_tree(tree)
    return tree


def _untouched(directory: Path, tests: Sequence[str]) -> Outcome:
    return run_tests(_own_tree(directory), tests)


def _broken(directory: Path, sabotage: Sabotage) -> Outcome:
    tree = _own_tree(directory)
    path = tree / sabotage.path
    before = path.read_text()
    try:
        _write(path, sabotaged(sabotage, before))
        return run_tests(tree, sabotage.tests)
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    # Python compares the time (in seconds) and size of a source with its compiled file, and both may be the same.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(text)


# -- the proof --------------------------------------------------------------------------------------------


def run(count: int, seed: int, sabotages: Sequence[Sabotage] = SABOTAGES) -> Proof:
    """Show that the tests notice each of the first `count` sabotages. The seed is not used."""
    proof = Proof()
    if wrong := faults(sabotages):
        raise BenchError("; ".join(wrong))
    chosen = sabotages[:count]
    sets = list(dict.fromkeys(one.tests for one in chosen))
    begin_s = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="iris-m-"))
    # The tests drop root's rights and continue inside it.
    directory.chmod(0o755)
    pool = ProcessPoolExecutor(min(AT_ONCE, len(chosen)))
    try:
        passed = 0
        for tests, outcome in _each(
            [(one, pool.submit(_untouched, directory, one)) for one in sets]
        ):
            _told(" ".join(tests), outcome)
            if not outcome.green:  # on a busy machine a test may fail once: run it again
                outcome = pool.submit(_untouched, directory, tests).result()
                _told(" ".join(tests), outcome)
            if not outcome.green:
                raise BenchError(
                    f"{' '.join(tests)} fails without a sabotage; mend it first: {outcome.said}"
                )
            passed += outcome.passed
        killed = 0
        figures = {}
        for one, outcome in _each([(one, pool.submit(_broken, directory, one)) for one in chosen]):
            _told(one.id, outcome)
            killed += outcome.noticed
            by = outcome.by.partition("::")[2] or ("it hung" if outcome.code is None else "")
            figures[f"{one.function}: {one.breaks}"] = by if outcome.noticed else "**nobody noticed**"  # fmt: skip
            if outcome.code is not None and outcome.code > 1:
                raise BenchError(f"{one.id}: the tests did not run: {outcome.said}")
            proof.promise(f"{one.id} is noticed", outcome.noticed)
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(directory, ignore_errors=True)
    proof.figures["sabotages"] = f"{len(chosen)}, {killed} noticed"
    proof.figures["tests"] = f"{len(sets)} sets; {passed} tests passed in the tree as it is"
    proof.figures["took"] = f"{time.monotonic() - begin_s:.0f} s"
    proof.figures.update(figures)
    return proof


def _each(work: list[tuple[Any, Future[Outcome]]]) -> Iterator[tuple[Any, Outcome]]:
    for what, future in work:
        yield what, future.result()


def _told(what: str, outcome: Outcome) -> None:
    end = "hung" if outcome.code is None else f"exit {outcome.code}"
    print(f"{outcome.seconds:6.1f} s  {end}  {what}  {outcome.by}", file=sys.stderr, flush=True)
