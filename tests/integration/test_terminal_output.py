"""What others wrote cannot control a terminal: commands show control characters escaped there, and change nothing in
a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import commands, warm
from support.commands import Shell, dev_relay
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)

EVIL = "\x1b]0;pwned\x07\x9b2J\u202ecaf\u00e9\ttab\nline\x08\r\x7f"
"""Sets the title, clears the screen, and turns the direction of writing around."""
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
"""A terminal puts a carriage return before each line feed."""
HOSTILE = f"""
import asyncio
import iris

EVIL = {EVIL!r}
service = iris.Service("evil", description=EVIL)


@service.on_request
async def answer(text: str, client: iris.Client) -> str:
    "Says \\x1b]0;pwned."
    if text == "fail":
        raise ValueError(EVIL)
    if text == "publish":
        await client.publish("news", EVIL, headers={{"h": EVIL}})
    return EVIL


@service.on_survey
def vote(text: str) -> str:
    if text == "fail":
        raise ValueError(EVIL)
    return EVIL


@service.on_tunnel
async def talk(tunnel: iris.Tunnel) -> None:
    async for message in tunnel:
        await tunnel.send(EVIL.encode())


async def main() -> None:
    async with iris.connect(config=iris.ClientConfig(label="x" + EVIL)) as client, client.serve(service):
        print("ready", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
"""


@pytest.fixture
def shell() -> Iterator[Shell]:
    """A shell on a host with a member that sends control characters."""
    with commands.short_directory("iris-evil-") as root, dev_relay(root, "--data", str(root / "data")):  # fmt: skip
        (root / "hostile.py").write_text(HOSTILE)
        shell = Shell(root)
        member = warm.Popen([sys.executable, str(root / "hostile.py")], env=shell.environ, cwd=root, stdout=subprocess.PIPE)  # fmt: skip
        try:
            assert member.stdout is not None
            assert member.stdout.readline() == b"ready\n"
            yield shell
        finally:
            member.kill()
            member.communicate()
            shell.finish()


def shown(
    shell: Shell, *arguments: str, stdin: bytes = b"", meanwhile: tuple[str, ...] = ()
) -> str:
    """Return what a person sees on a terminal; `meanwhile` is run until the command ends."""
    ours, theirs = pty.openpty()
    try:
        process = warm.Popen(
            commands.command(*arguments), env={**shell.environ, "TERM": "dumb"}, cwd=shell.root, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        if meanwhile:
            wait_until(lambda: bool(shell.process(*meanwhile)) and process.poll() is not None)
        seen = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # how a terminal says that nobody writes any more
                break
            if not data:
                break
            seen += data
        process.wait(PATIENCE_S)
    finally:
        os.close(ours)
    return seen.decode()


SEEN = (
    ("request", "evil", "x"), ("request", "evil", "x", "--raw"), ("request", "evil", "x", "--json"), ("request", "evil", "fail"),
    ("--verbose", "request", "evil", "fail"), ("request", "evil", "fail", "--json"), ("survey", "evil", "x"), ("survey", "evil", "x", "--json"),
    ("survey", "evil", "fail"), ("describe", "evil"), ("describe", "evil", "--json"), ("members", "evil"), ("members", "evil", "--json"),
    ("status",), ("status", "--json"), ("top", "--once"), ("top", "--once", "--json"),
)  # fmt: skip


def test_a_command_on_a_terminal_shows_control_characters_escaped(shell: Shell) -> None:
    for arguments in SEEN:
        seen = shown(shell, *arguments)
        assert "pwned" in seen, (arguments, seen)
        assert CONTROLS.findall(seen) == [], (arguments, seen)
    for more in ((), ("--raw",), ("--json",)):
        seen = shown(shell, "tunnel", "evil", *more, stdin=b"hi\n")
        assert "pwned" in seen, (more, seen)
        assert CONTROLS.findall(seen) == [], (more, seen)
    seen = shown(shell, "request", "evil", "x")
    assert seen == "\\u001b]0;pwned\\u0007\\u009b2J\\u202ecaf\u00e9\ttab\r\nline\\u0008\\u000d\\u007f\r\n"  # fmt: skip


def test_publications_and_records_on_a_terminal_are_shown_escaped(shell: Shell) -> None:
    wait_until(lambda: shell.run("stream", "create", "kept", "--topic", "news").returncode == 0)
    publish = ("request", "evil", "publish", "--raw")
    for more in ((), ("--json",)):
        seen = shown(shell, "subscribe", "news", "--count", "1", *more, meanwhile=publish)
        assert "pwned" in seen
        assert CONTROLS.findall(seen) == [], (more, seen)
    for arguments in (("stream", "read", "kept"), ("stream", "read", "kept", "--json"), ("stream", "export", "kept")):  # fmt: skip
        seen = shown(shell, *arguments)
        assert "pwned" in seen, (arguments, seen)
        assert CONTROLS.findall(seen) == [], (arguments, seen)


def test_a_pipe_gets_the_bytes_that_were_sent(shell: Shell) -> None:
    sent = EVIL.encode()
    assert shell.process("request", "evil", "x") == sent + b"\n"
    assert shell.process("request", "evil", "x", "--raw") == sent
    assert shell.process("survey", "evil", "x") == sent + b"\n"
    assert shell.process("tunnel", "evil", stdin=b"hi\n") == sent + b"\n"
    assert shell.process("tunnel", "evil", "--raw", stdin=b"hi") == sent


def test_an_error_in_a_pipe_is_one_line_without_control_characters(shell: Shell) -> None:
    for arguments, code in ((("request", "evil", "fail"), 1), (("survey", "evil", "fail"), 1)):
        said = shell.process(*arguments, code=code).decode()
        assert "pwned" in said
        assert len(said.splitlines()) == 1
        assert CONTROLS.findall(said) == []
