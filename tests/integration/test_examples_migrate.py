"""Programs of other systems and the same programs for Iris, as docs/migrate shows them: they print the same."""

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
from support import commands, warm
from support.commands import Shell, dev_relay
from support.required import cannot
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "migrate"
PAIRS = sorted(path.stem.removesuffix("_before") for path in PROGRAMS.glob("*_before.py"))
RABBIT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The script that the command of this name runs, after changing to the user rabbitmq."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def found(name: str) -> str:
    """Return the path of a server; skip the test without it, unless this machine has to have it."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        cannot("PEERS", f"{name} is not installed")
    return path


@contextmanager
def running(*processes: tuple[list[str], dict[str, str], int]) -> Iterator[None]:
    """Run servers, each a command, its environment and the port at which it answers."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, environ, port in processes:
            process = subprocess.Popen(
                command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            started.append(process)
            wait_until(lambda at=port, it=process: answers(at) or it.poll() is not None)  # type: ignore[misc]
            assert process.poll() is None, command
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(PATIENCE_S)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def peer(name: str, directory: Path) -> Iterator[list[str]]:
    """Run the server of a peer, if it has one, and yield the argument that its program needs."""
    port = free_port()
    match name.split("_")[0]:
        case "nats":
            server = [found("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]  # fmt: skip
            with running((server, {}, port)):
                yield [f"nats://127.0.0.1:{port}"]
        case "redis":
            server = [found("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]  # fmt: skip
            with running((server, {}, port)):
                yield [f"redis://127.0.0.1:{port}"]
        case "rabbitmq":
            found("rabbitmq-server")
            with running(*rabbitmq(directory, port)):
                yield [f"amqp://127.0.0.1:{port}"]
        case _:
            yield []


def rabbitmq(directory: Path, port: int) -> list[tuple[list[str], dict[str, str], int]]:
    """Return how RabbitMQ and its port mapper are started."""
    mapper_port = free_port()
    mapper = {"ERL_EPMD_PORT": str(mapper_port), "ERL_EPMD_ADDRESS": "127.0.0.1"}
    (directory / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    (directory / "plugins").write_text("[].\n")
    environ = {
        "HOME": str(directory),
        "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.conf",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_MNESIA_BASE": str(directory),
        "RABBITMQ_NODENAME": "migrate@127.0.0.1",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_USE_LONGNAME": "true",
        "RUNNING_UNDER_SYSTEMD": "true",  # so signals reach the server itself
    }
    server = str(RABBIT) if RABBIT.exists() else "rabbitmq-server"
    return [(["epmd"], mapper, mapper_port), ([server], mapper | environ, port)]


def printed(shell: Shell, name: str, *arguments: str) -> str:
    command = [sys.executable, PROGRAMS / f"{name}.py", *arguments]
    done = warm.run(command, env=shell.environ, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, ""), (name, done)
    return done.stdout


@pytest.mark.parametrize("pair", PAIRS)
def test_both_programs_of_a_pair_print_the_same(pair: str) -> None:
    with commands.short_directory("iris-move-") as root:
        (root / "peer").mkdir()
        with dev_relay(root, "--data", str(root / "data")):
            shell = Shell(root)
            wait_until(lambda: shell.run("stream", "list").returncode == 0)
            after = printed(shell, f"{pair}_after")
        with peer(pair, root / "peer") as arguments:
            before = printed(shell, f"{pair}_before", *arguments)
    assert len(after.splitlines()) > 1
    assert after == before


@pytest.mark.parametrize("pair", PAIRS)
def test_the_page_shows_both_programs_whole(pair: str) -> None:
    page = (ROOT / "docs" / "migrate" / f"{pair.split('_')[0]}.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    programs = [(PROGRAMS / f"{pair}_{which}.py").read_text("utf-8") for which in ("before", "after")]  # fmt: skip
    at = blocks.index(programs[0])
    assert blocks[at + 1] == programs[1]
    assert all(len(text.splitlines()) < 60 for text in programs)
