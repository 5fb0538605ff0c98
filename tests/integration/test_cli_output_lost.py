"""A command whose standard output cannot be written ends in order: a reader that has left is success, a full disk is
one line on standard error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import commands, warm
from support.commands import Shell, command, dev_relay
from support.waiting import PATIENCE_S

from iris import cli

pytestmark = pytest.mark.timeout(300)

FULL = b"iris: cannot write to standard output: No space left on device\n"
SERVICE = """
import asyncio
import iris

service = iris.Service("echo")


@service.on_request
@service.on_survey
def echo(text: str) -> str:
    return text


@service.on_tunnel
async def talk(tunnel: iris.Tunnel) -> None:
    async for message in tunnel:
        await tunnel.send(message)


async def main() -> None:
    async with iris.connect() as client, client.serve(service):
        await client.streams.create("log")
        for n in range(3):
            await client.streams.append("log", f"line {n}")
        print("ready", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
"""
PRINTING = {
    "request": "request echo hello",
    "survey": "survey echo hello",
    "tunnel": "tunnel echo",
    "members": "members echo",
    "describe": "describe echo",
    "ping": "ping echo",
    "status": "status",
    "top": "top --once",
    "check": "check",
    "relay": "relay --settings",
    "key show": "key show",
    "key list": "key list",
    "stream list": "stream list",
    "stream info": "stream info log",
    "stream read": "stream read log",
    "stream append": "stream append log more",
    "stream export": "stream export log",
    "federation key": "federation key {case}.toml",
    "federation list": "federation list",
    "init": "init {case}",
}
"""Command of the tree -> arguments with which it prints something on a host with a relay and a stream `log`."""


def _commands(found: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Return the path of each command of the tree."""
    yield path
    for name, inner in getattr(found, "commands", {}).items():
        yield from _commands(inner, (*path, name))


ALL = [path for verb in cli.VERBS for path in _commands(cli.load(verb), (verb,))]


def _without_output(shell: Shell, reader: str, *arguments: str) -> tuple[int, bytes]:
    """Run a command whose standard output is a full disk, or a pipe whose reader has left; return its exit code and
    standard error."""
    if reader == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        left, out = os.pipe()
        os.close(left)
    try:
        process = warm.Popen(
            command(*arguments), env=shell.environ, cwd=shell.root,
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(out)
    shell.started.append(process)
    _, err = process.communicate(b"a line\n", timeout=PATIENCE_S)
    return process.returncode, err


@pytest.fixture
def shell() -> Iterator[Shell]:
    with commands.short_directory("iris-lost-") as root:
        shell = Shell(root)
        yield shell
        shell.finish()


@pytest.fixture(scope="module")
def host() -> Iterator[Shell]:
    """A shell on a host with a relay, a member and a stream."""
    with commands.short_directory("iris-lost-") as root, dev_relay(root, "--data", str(root / "data")):  # fmt: skip
        Path(root / "member.py").write_text(SERVICE)
        shell = Shell(root)
        member = warm.Popen([sys.executable, str(root / "member.py")], env=shell.environ, cwd=root, stdout=subprocess.PIPE)  # fmt: skip
        try:
            assert member.stdout is not None
            assert member.stdout.readline() == b"ready\n"
            yield shell
        finally:
            member.kill()
            member.communicate()
            shell.finish()


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_the_help_of_every_command_ends_in_order_without_an_output(
    shell: Shell, path: tuple[str, ...]
) -> None:
    assert _without_output(shell, "full", *path, "--help") == (1, FULL)
    assert _without_output(shell, "closed", *path, "--help") == (0, b"")


@pytest.mark.parametrize("verb", PRINTING)
def test_a_verb_without_an_output_ends_in_order(host: Shell, verb: str) -> None:
    assert tuple(verb.split()) in ALL
    for reader, wanted in (("full", (1, FULL)), ("closed", (0, b""))):
        arguments = PRINTING[verb].format(case=reader).split()
        assert _without_output(host, reader, *arguments) == wanted, (reader, arguments)


def test_an_error_keeps_its_exit_code_when_standard_error_cannot_be_written(shell: Shell) -> None:
    with open("/dev/full", "wb") as full:
        for arguments, code in ((("bogus",), 2), (("status", "--relay", "nowhere"), 2)):
            process = warm.Popen(
                command(*arguments), env=shell.environ, cwd=shell.root,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full,
            )  # fmt: skip
            shell.started.append(process)
            assert commands.end(process, code)[0] == b""
