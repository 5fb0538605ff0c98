"""docs/command.md is true: its commands run, in their order, and print what the page says."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands, warm
from support.commands import Shell, dev_relay, end
from support.docs import fits, printed, sessions
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command.md").read_text("utf-8")


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """The environment of a shell on a host with a relay and the service of the README."""
    (program,) = (
        block
        for block in re.findall(
            r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.S | re.M
        )
        if "def greet" in block
    )
    with commands.short_directory("iris-page-") as root, dev_relay(root):
        (root / "greetings.py").write_text(program)
        shell = Shell(root)
        process = shell.start("run", "greetings")
        wait_until(lambda: shell.run("members", "greeter").returncode == 0)
        yield shell.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(root), "PWD": str(root),
        }  # fmt: skip
        process.terminate()
        end(process)
        shell.finish()


def test_the_commands_of_the_page_print_what_it_says(environ: dict[str, str]) -> None:
    assert len(sessions(PAGE)) == PAGE.count("\n    $ ")
    for command, output in sessions(PAGE):
        said = printed(command, environ, Path(environ["PWD"]))
        assert fits(said, output), (command, said)


def test_every_verb_and_flag_of_the_page_exists() -> None:
    for verb, flag in re.findall(r"`iris ([a-z]+)[^`]*?(--[a-z-]+)[^`]*`", PAGE):
        environ = {**os.environ, "COLUMNS": "200"}
        done = warm.run(commands.command(verb, "--help"), env=environ, text=True)
        assert done.returncode == 0, (verb, done.stderr)
        assert flag in done.stdout, (verb, flag)
