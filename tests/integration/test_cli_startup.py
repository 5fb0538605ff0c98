"""A call from a shell imports what its verb needs and nothing more: that is what it waits for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
import typer

import iris
from iris import cli, public
from iris.cli import options
from iris.cli.arguments import read_plainly

HEAVY = {
    "pydantic", "zeroconf", "rocksdict", "rich", "cryptography.x509", "iris.streams", "iris.public", "iris.testing", "relay",
    "importlib.metadata", "pandas", "tomlkit",
}  # fmt: skip
"""Modules that take long to import and that no short call needs."""

CALLS = {
    "--version": HEAVY - {"importlib.metadata"} | {"asyncio", "iris.client"},
    "--help": HEAVY - {"rich"} | {"asyncio", "iris.client"},
    "request greeter world": HEAVY,
    "push greeter world": HEAVY,
    "publish news world": HEAVY,
    "members greeter": HEAVY,
    "status": HEAVY,
    "survey greeter world": HEAVY,
    "subscribe news": HEAVY,
    "describe greeter": HEAVY,
    "ping greeter": HEAVY,
    "key show": HEAVY | {"iris.client"},
    "relay --data data --settings": {"pydantic", "rocksdict", "zeroconf", "rich"},
    "stream create orders --max-age 7d": {"pydantic", "rocksdict", "zeroconf", "relay"},
}

PROGRAM = """
import json, sys
from iris.cli import main
try:
    main()
except SystemExit:
    pass
sys.stderr.write("\\n" + json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("line", CALLS)
def test_a_short_call_imports_nothing_that_it_does_not_need(tmp_path: Path, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *line.split()], env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert CALLS[line] & loaded == set()


def test_the_list_of_verbs_shows_the_first_sentence_of_the_help_of_each() -> None:
    assert list(cli.SUMMARIES) == list(cli.VERBS)
    for verb in cli.VERBS:
        first = " ".join(cli.load(verb).help.split("\n\n")[0].split())
        assert cli.SUMMARIES[verb] == first


def test_the_scope_of_a_call_has_the_same_values_as_in_the_library() -> None:
    assert get_args(get_args(options.Scope)[0]) == get_args(iris.Scope)


def test_import_iris_shows_all_public_names_to_programs_and_completion() -> None:
    assert set(public.__all__) <= set(dir(iris))
    space: dict[str, object] = {}
    exec("from iris import *", space)
    assert set(public.__all__) <= space.keys()
    with pytest.raises(AttributeError, match="module 'iris' has no attribute 'Clinet'"):
        iris.Clinet  # type: ignore[attr-defined]  # noqa: B018 - the look-up is what is tested


def test_the_first_public_name_loads_all_of_them() -> None:
    program = "import sys, iris\nassert 'iris.client' not in sys.modules\niris.NoMembers\nassert 'iris.streams' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_imported_by_the_module_that_lists_them() -> None:
    tree = ast.parse(Path(public.__file__).read_text("utf-8"))
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(public.__all__)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("x", ("x", [], 1.5, None, "red", False)), ("x a b --number 2 --count 3 --color blue --flag", ("x", ["a", "b"], 2.0, 3, "blue", True)),
        ("x --number 1e-3", ("x", [], 0.001, None, "red", False)),
    ],
)  # fmt: skip
def test_arguments_are_read_as_their_types_say(line: str, read: tuple[object, ...]) -> None:
    assert run_sample(line) == (0, read)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x --count 1.5", "'1.5' is not a whole number"), ("x --count 0", "0 is too small; the minimum is 1"),
        ("x --count 10", "10 is too large; the maximum is 9"), ("x --number inf", "'inf' is not a number"),
        ("x --color green", "'green' is not accepted; use red or blue"), ("x --file /none", "'/none' does not exist"),
        ("x --file /", "'/' is a directory, not a file"), ("x --folder /dev/../proc/version", "'/dev/../proc/version' is a file, not a directory"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_with_what_is_accepted(line: str, said: str) -> None:
    code, refused = run_sample(line)
    assert code == 2
    assert str(refused) == said


def run_sample(line: str) -> tuple[int, object]:
    """Run a command with a parameter of each type; return its exit code and what it read, or why it was refused."""
    read: list[object] = []

    def sample(
        name: str,
        more: Annotated[list[str] | None, typer.Argument()] = None,
        number: Annotated[float, typer.Option(min=0.001)] = 1.5,
        count: Annotated[int | None, typer.Option(min=1, max=9)] = None,
        color: Annotated[Literal["red", "blue"], typer.Option()] = "red",
        flag: Annotated[bool, typer.Option("--flag")] = False,
        file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None,
        folder: Annotated[Path, typer.Option(file_okay=False)] = Path("/new"),
    ) -> None:
        read.append((name, list(more or ()), number, count, color, flag))

        assert (file, folder) == (None, Path("/new"))

    app = typer.Typer(add_completion=False)
    app.command()(sample)
    command = read_plainly(typer.main.get_command(app))
    try:
        command.main(line.split(), standalone_mode=False)
    except typer.BadParameter as error:
        return 2, error.message
    return 0, read[0]
