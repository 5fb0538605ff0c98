"""README.md is true: its programs run, its commands work, and its links lead somewhere."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.waiting import PATIENCE_S

from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
IRIS = Path(sys.executable).with_name("iris")


def block(word: str) -> str:
    """Return the one Python block that holds `word`."""
    (found,) = [block for block in BLOCKS if word in block]
    return found


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An empty home, in which the first program is saved."""
    (tmp_path / "greetings.py").write_text(block("def greet"))
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)}


def test_the_first_program_prints_what_the_page_says(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "greetings.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.stdout == "hello, world\n"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the test starts; they end with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in reversed(started):
        process.terminate()
        process.wait(PATIENCE_S)


def test_the_three_terminals_of_the_page_talk_to_each_other(
    tmp_path: Path, environ: dict[str, str], processes: list[subprocess.Popen[bytes]]
) -> None:
    lines = re.findall(r"^    iris (relay --dev|run greetings|request greeter world)\b", TEXT, re.M)
    assert len(lines) == 3
    *servers, request = ([str(IRIS), *line.split()] for line in lines)
    with (tmp_path / "log").open("wb") as log:
        for server in servers:
            processes.append(subprocess.Popen(server, cwd=tmp_path, env=environ, stderr=log))
            deadline = time.monotonic() + PATIENCE_S
            while True:  # it serves when a request gets further than before it started
                asked = subprocess.run(
                    request, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
                )  # fmt: skip
                if asked.returncode == (3 if server is servers[0] else 0):
                    break
                assert time.monotonic() < deadline, asked.stderr
    assert asked.stdout.strip() == "hello, world"


async def test_the_calls_of_the_page_for_service_authors_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    space: dict[str, Any] = {}
    exec(block("def remind"), space)
    billing = space["service"]
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client() as other,
        other.serve(billing),
        asyncio.timeout(PATIENCE_S),
    ):
        for word, printing in (
            ("client.survey", "1234\nno answer from []"),
            ("streams.create", "{'id': 7}"),
        ):
            space = {"connect": cluster.client}
            body = textwrap.indent(block(word).replace("iris.connect()", "connect()"), "    ")
            exec(f"async def program():\n{body}", space)
            following = asyncio.create_task(space["program"]())
            printed = ""
            while not (printing in printed and "espresso" in printed):
                await asyncio.sleep(0.01)
                assert not following.done(), following.exception()
                await other.publish("orders.new", b"2 espressos")
                printed += capsys.readouterr().out
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def commands() -> list[str]:
    """Return every `iris …` command of the page, without its comment and prompt."""
    shown = re.findall(r"^    (?:\w+\$ )?(iris [^#\n]+(?:#\S+)?)", TEXT, re.M)
    return [*map(str.strip, shown), *re.findall(r"`(iris [a-z][^`]+)`", TEXT)]


@pytest.mark.parametrize("command", sorted({" ".join(one.split()[:3]) for one in commands()}))
def test_every_command_of_the_page_has_the_flags_that_the_page_gives_it(command: str) -> None:
    verbs = [word for word in shlex.split(command)[1:] if re.fullmatch(r"[a-z][a-z0-9]*", word)]
    help_ = None
    while verbs:  # the last words may be arguments
        environ = {**os.environ, "COLUMNS": "200"}
        asked = warm.run([sys.executable, "-m", "iris.cli", *verbs, "--help"], env=environ, text=True)  # fmt: skip
        if asked.returncode == 0:
            help_ = asked.stdout
            break
        verbs.pop()
    assert help_ is not None, f"there is no such verb: {command}"
    for whole in commands():
        if whole.startswith(command):
            for flag in re.findall(r"(?<=\s)--[a-z-]+", whole):
                assert flag in help_, f"{whole}: no {flag}"


def test_every_link_of_the_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
