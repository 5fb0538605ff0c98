"""docs/http.md is true: its commands run, in their order, and print what the page says; `iris bridge http` as a
process."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.http_kit import a_host, running
from support.commands import Shell
from support.docs import fits, printed, sessions
from support.waiting import PATIENCE_S, wait_until

import iris
from iris.web.tokens import Tokens
from relay.bridges.http.config import VERBS, HttpConfig
from relay.bridges.http.replies import problem_of

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "http.md").read_text("utf-8")


@pytest.fixture
def shell() -> Iterator[Shell]:
    with a_host() as made:
        yield made


def test_the_commands_of_the_page_print_what_it_says(shell: Shell) -> None:
    environ = shell.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(shell.root),
    }
    commands = sessions(PAGE)
    assert len(commands) == PAGE.count("\n    $ ") > 8

    def run(address: str, commands: list[tuple[str, str]]) -> None:
        for command, output in commands:
            said = printed(command.replace("127.0.0.1:8081", address), environ, shell.root)
            assert fits(said, output), (command, said)

    run("", commands[:2])  # the tokens
    token = (shell.root / "token").read_text().strip()
    with running(shell) as (address, _):
        run(address, commands[2:])
    assert token not in (shell.root / "bridge.log").read_text()


def test_a_token_is_made_added_and_withdrawn(shell: Shell) -> None:
    path = shell.root / "config" / "iris" / "http-tokens.toml"
    first = shell("bridge", "http-token", "one", "--allow", "push=a").decode().strip()
    second = (
        shell(
            "bridge",
            "http-token",
            "two",
            "--allow",
            "push=a",
            "--allow",
            "push=b.*",
            "--allow",
            "publish=>",
        )
        .decode()
        .strip()
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert first not in path.read_text()
    tokens = Tokens.load(path, VERBS)
    assert [caller and caller.name for caller in map(tokens.find, (first, second))] == [
        "one",
        "two",
    ]
    before = path.read_text()
    for wrong in (["one", "--allow", "push=a"], ["x y", "--allow", "push=a"], ["c", "--allow", "push"], ["c", "--allow", "pull=a"],
                  ["c", "--allow", "push=a b"]):  # fmt: skip
        assert b"iris: " in shell("bridge", "http-token", *wrong, code=2)
    assert path.read_text() == before
    with running(shell) as (address, process):

        def status(token: str) -> int:
            connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
            connection.request(
                "POST", "/clusters/a/push", b"x", {"Authorization": f"Bearer {token}"}
            )
            answer = connection.getresponse()
            answer.read()
            connection.close()
            return answer.status

        assert (status(first), status(second), status("wrong")) == (503, 503, 401)
        path.write_text(before[before.index("[[token]]", 5) :])
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: status(first) == 401)
        assert status(second) == 503


def test_mistakes_are_said_in_one_line(shell: Shell) -> None:
    assert b"http-tokens.toml; make a token with `iris bridge http-token" in shell(
        "bridge", "http", code=2
    )
    shell("bridge", "http-token", "one", "--allow", "push=a")
    assert b"is not a loopback address" in shell("bridge", "http", "--listen", "0.0.0.0:0", code=2)
    assert b"is not ADDRESS:PORT" in shell("bridge", "http", "--listen", "8081", code=2)
    assert b"give both or neither" in shell("bridge", "http", "--tls-cert", "a.pem", code=2)
    with running(shell) as (address, _):
        out = shell.process("bridge", "http", "--listen", address, code=2)
        assert b"Address already in use" in out
        assert b"choose another port" in out


def test_the_page_names_every_limit_problem_and_verb() -> None:
    config = HttpConfig()
    shown = {
        "12,000": config.max_readers, "16,384": config.max_connections, "1,024": config.max_calls, "128 MiB": config.calls_bytes >> 20,
        "256 KiB": config.reader_bytes >> 10, "8 MiB": config.filter_bytes >> 20,
    }  # fmt: skip
    for text, value in shown.items():
        assert int(re.sub(r"\D", "", text)) == value
        assert text in PAGE
    for verb in VERBS:
        assert f"`{verb}`" in PAGE
    errors: list[Any] = [
        iris.NoMembers("a", "b"), iris.Overloaded("a", "b"), iris.RequestTimeout("a", "b"), iris.ConnectionLost("a", "b"),
        iris.ConnectionLost("a", "b", may_have_run=False), iris.RelayError("a", "b"), iris.NoStream("a", "b"), iris.StreamError("a", "b"),
        iris.OffsetConflict("a", "b", 3), iris.AmbiguousStream("a", "b"), iris.StreamUnavailable("a", "b"), iris.StreamDamaged("a", "b"),
        iris.StreamUnavailable("a", "b", may_have_run=True), iris.MessageTooLarge("a"), iris.KeyringError("a"), iris.InvalidName("a"),
        iris.RelayUnavailable("a"), iris.Closed("a"), iris.EncodeError("a"),
    ]  # fmt: skip
    for error in errors:
        problem = problem_of(error)
        assert re.search(rf"^\| [^|]*{problem.status}[^|]* \| [^|]*`{problem.kind}`", PAGE, re.M), (
            problem.document
        )
        assert problem.more["may_have_run"] == bool(getattr(error, "may_have_run", False))
