"""docs/start.md is true: its commands run, in their order, and print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, dev_relay, end
from support.docs import fits
from support.waiting import PATIENCE_S, wait_until

from iris.cli.init import SERVICE

pytestmark = pytest.mark.timeout(120)

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text("utf-8")
HANDLER, PROGRAM = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def sessions() -> list[tuple[str, str]]:
    """Return each command of the page with the output that the page shows; "…" stands for any text."""
    page = re.sub(r"^```python\n.*?^```$", "", PAGE, flags=re.S | re.M)
    text = "\n".join(re.findall(r"^    (.*)$", page, re.M))
    found = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return [(line, re.sub(r"^iris .*\n?", "", output, flags=re.M)) for line, _, output in found]


@pytest.fixture
def shell() -> Iterator[Shell]:
    """A shell on a host with a relay, in the directory of the project that is not there yet."""
    with commands.short_directory("iris-start-") as root, dev_relay(root):
        shell = Shell(
            root / "orders",
            XDG_RUNTIME_DIR=str(root), XDG_CONFIG_HOME=str(root / "config"), HOME=str(root),
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )  # fmt: skip
        yield shell
        shell.finish()


def run(shell: Shell, where: Path, command: str, output: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command], env=shell.environ, cwd=where, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert fits(done.stdout, output), (command, done.stdout)


def test_the_commands_of_the_page_print_what_it_says(shell: Shell) -> None:
    init, enter, check, request, call, call_again = sessions()
    run(shell, shell.root.parent, *init)
    assert enter == (f"cd {shell.root.name}", "")
    run(shell, shell.root, *check)
    service = shell.start("run", "orders", "--log-format", "text")
    wait_until(lambda: shell.run("members", "orders").returncode == 0)
    run(shell, shell.root, *request)
    (shell.root / "call.py").write_text(PROGRAM)
    run(shell, shell.root, *call)
    service.terminate()
    end(service)
    run(shell, shell.root, *call_again)


def test_the_page_shows_the_handler_that_init_writes() -> None:
    assert HANDLER in SERVICE
