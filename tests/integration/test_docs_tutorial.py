"""The tutorial is true: its files are those of examples/tutorial, and its commands print what the pages say."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, dev_relay, end
from support.docs import fits, sessions
from support.links import Host
from support.waiting import PATIENCE_S, wait_until

from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("[1-9]*.md"))
STEPS = ROOT / "examples" / "tutorial"
LATER = ("iris request notices", "iris stream read")
"""Commands that show what happens a moment after the one before."""
FETCH = "python -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())'"
"""`curl -s`, which not every machine has that runs the tests."""


def events(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a page with its output, and with "runs" what keeps running beside them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    for block in re.findall(r"(?:^    .*\n)+", text, re.M):
        if block.startswith("    $ "):
            yield from sessions(block)
        else:
            yield from (
                (line, "runs") for line in re.findall(r"^    (iris run.*|python .*)$", block, re.M)
            )


def files(number: int, directory: Path) -> None:
    """Copy the files that the reader of a step has."""
    for step in range(1, number + 1):
        shutil.copytree(STEPS / f"step{step}", directory, dirs_exist_ok=True)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def shell(directory: Path, root: Path, **environ: str) -> Iterator[Shell]:
    directory.mkdir(exist_ok=True)
    made = Shell(
        directory,
        XDG_RUNTIME_DIR=str(root), XDG_CONFIG_HOME=str(root / "config"), HOME=str(root),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environ,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.finish()


def printed(shell: Shell, command: str) -> str:
    command = command.replace("curl -s", FETCH).replace("-m pytest", "-m pytest -p pytest_iris")
    command = command.replace(":9100", f":{shell.environ.get('METRICS_PORT', '9100')}")
    done = subprocess.run(
        ["bash", "-c", command], env=shell.environ, cwd=shell.root, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return (done.stdout + ("" if "pytest" in command else done.stderr)).strip()


@pytest.mark.parametrize("number", range(1, 7))
def test_the_commands_of_a_step_print_what_its_page_says(number: int) -> None:
    page = PAGES[number - 1]
    with (
        commands.short_directory("iris-tutor-") as root,
        dev_relay(root, "--data", str(root / "data")),
        shell(root / "app", root, METRICS_PORT=free_port()) as here,
    ):
        files(number, here.root)
        wait_until(lambda: here.run("stream", "list").returncode == 0)
        services, boards = [], []
        for command, output in events(page):
            words = command.split()
            if output == "runs" and words[0] == "iris":
                services.append(here.start(*words[1:]))
                wait_until(lambda name=words[2]: here.run("members", name).returncode == 0)  # type: ignore[misc]
            elif output == "runs":
                board = subprocess.Popen(
                    [sys.executable, *words[1:]], env=here.environ, cwd=here.root, stdout=subprocess.PIPE, text=True
                )  # fmt: skip
                assert board.stdout is not None
                boards.append((board, [board.stdout.readline()]))
            elif command.startswith(LATER):
                wait_until(lambda: fits(printed(here, command), output))  # noqa: B023 - called here
            else:
                said = printed(here, command)
                assert fits(said, output), (command, said)
        for board, lines in boards:
            assert board.stdout is not None
            lines.append(board.stdout.readline())
            board.kill()
            board.communicate()
            assert "".join(f"    {line}" for line in lines) in page.read_text("utf-8")
        for service in reversed(services):
            service.terminate()
            end(service)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_is_that_of_its_step(page: Path) -> None:
    texts = [path.read_text("utf-8") for path in (STEPS / f"step{page.stem[0]}").iterdir() if path.is_file()]  # fmt: skip
    blocks = re.findall(r"^```(?:python|ini)\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M)
    assert blocks
    for block in blocks:
        assert any(block in text for text in texts), block


def test_every_file_of_the_tutorial_is_on_its_page() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for path in (STEPS / f"step{page.stem[0]}").glob("*.*"):
            assert path.name in text, (page.name, path.name)
            lines = path.read_text("utf-8").splitlines()
            assert len(lines) < 70


def test_a_program_on_another_host_reaches_the_service(tmp_path: Path) -> None:
    """The second half of step 5, with two relays on one machine."""
    keyring = Keyring.single(ClusterKey(bytes(range(32)))).dump()
    page = (ROOT / "docs" / "tutorial" / "5-hosts-and-tests.md").read_text("utf-8")
    ((command, output),) = re.findall(r"^    second\$ (iris request .*)\n    (.*)$", page, re.M)
    first = Host(tmp_path / "one", "--port", "0")
    with first.daemon:
        second = Host(tmp_path / "two", "--port", "0", "--join", first.address)
        environs = []
        for host in (first, second):
            path = host.keys.with_name("keyring.toml")
            path.write_text(keyring)
            path.chmod(0o600)
            environs.append(
                {"IRIS_RELAY": str(host.daemon.socket), "IRIS_CONFIG": str(path.parent)}
            )
        with second.daemon, shell(tmp_path / "app", tmp_path, **environs[0]) as here:
            files(3, here.root)
            service = here.start("run", "departures")
            here.environ |= environs[1]
            wait_until(lambda: here.run("members", "departures").returncode == 0)
            assert printed(here, command) == output
            service.terminate()
            end(service)
