"""Programs of Iris work where names of the host, of programs and of directories are bytes that are not UTF-8."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support import commands
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(180)

PYTHON = os.fsencode(sys.executable)
IRIS = os.path.join(os.path.dirname(PYTHON), b"iris")
CLONE_NEWUTS = 0x04000000
SERVED = """
import asyncio, iris
service = iris.Service("greeter")
@service.on_request
def greet(name: str) -> str:
    return f"hello, {name}"
async def main():
    async with iris.connect() as client, client.serve(service):
        print("serving", flush=True)
        await asyncio.Event().wait()
if __name__ == "__main__":
    asyncio.run(main())
"""
LABELLED = "import os, iris; print(os.fsencode(iris.ClientConfig().label))"


def on_the_host() -> None:
    """Let this new process be on a host called caf\\xe9, if we may."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0 and libc.unshare(CLONE_NEWUTS) == 0:
        libc.sethostname(b"caf\xe9", 4)


class Place:
    """A directory whose name is not UTF-8, with the runtime directory and the keys of a relay."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root) + b"/odd\xff"
        os.mkdir(self.root, 0o700)
        self.environ = {
            b"PATH": os.fsencode(os.environ["PATH"]), b"HOME": self.root, b"XDG_RUNTIME_DIR": self.root,
            b"IRIS_CONFIG": self.root + b"/keys\xfe", b"IRIS_RELAY": self.root + b"/iris/relay.sock", b"IRIS_ODD": b"\xfd", b"LANG": b"C.UTF-8",
        }  # fmt: skip

    def run(self, *arguments: bytes | str, code: int = 0, command: bytes = IRIS) -> tuple[bytes, bytes]:  # fmt: skip
        """Run `iris …` to its end; return what it wrote to stdout and to stderr. No error is a traceback."""
        done = subprocess.run(
            [command, *map(os.fsencode, arguments)], cwd=self.root, env=self.environ, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=PATIENCE_S, preexec_fn=on_the_host,
        )  # fmt: skip
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), (arguments, done.stdout, done.stderr)  # fmt: skip
        return done.stdout, done.stderr

    @contextlib.contextmanager
    def started(self, *command: bytes, said: bytes) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until it has written `said`, and end it after the block."""
        log = Path(os.fsdecode(self.root + b"/log-" + str(len(os.listdir(self.root))).encode()))
        with log.open("wb") as written:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environ, stdin=subprocess.DEVNULL, stdout=written, stderr=written,
                preexec_fn=on_the_host,
            )  # fmt: skip
        try:
            wait_until(lambda: said in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_bytes()
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            for line in log.read_bytes().splitlines():
                assert b"Traceback" not in line, log.read_bytes()
                if line.startswith(b"{"):
                    msgspec.json.decode(line)  # which refuses a lone surrogate


@pytest.fixture
def place() -> Iterator[Place]:
    with commands.short_directory("iris-odd-") as root:
        yield Place(root)
        wait_until(lambda: not commands.processes_under(root))


def test_every_command_works_on_a_host_whose_names_are_not_utf8(
    place: Place, tmp_path: Path
) -> None:
    data = os.fsencode(tmp_path / "data")
    relay = (IRIS, b"relay", b"--no-mdns", b"--port", b"0", b"--data", data)
    program = place.root + b"/gr\xfc.py"
    Path(os.fsdecode(program)).write_text(SERVED)
    place.run("key", "new")
    for keys in (("list",), ("show",), ("add", "billing"), ("access", b"acc\xff.pem")):
        place.run("key", *keys)
    place.run("federation", "key", b"site\xff.toml")
    assert b"are valid" in place.run("relay", "--check")[0]
    with (
        place.started(*relay, said=b'"store.attached"'),
        place.started(PYTHON, program, said=b"serving"),
        place.started(IRIS, b"run", os.fsencode("gr\udcfc"), b"--workers", b"2", said=b'"run.workers_ready"'),
    ):  # fmt: skip
        assert place.run("request", "greeter", "x") == (b"hello, x\n", b"")
        assert place.run("request", "greeter", b"\xff", code=1)[0] == b""
        place.run("request", b"gr\xff", "x", code=2)
        members = map(json.loads, place.run("members", "greeter", "--json")[0].splitlines())
        assert {member["label"] for member in members} == {"gr?.py", "iris run gr?"}
        described = place.run("describe", "greeter", "--json")[0]
        status = msgspec.json.decode(place.run("status", "--json")[0])
        assert status["socket"] == os.fsdecode(place.root).replace("\udcff", "?") + "/iris/relay.sock"  # fmt: skip
        if os.geteuid() == 0:
            assert b"caf?" in described
        for command in ("status", "describe greeter", "check", "check --json", "top --once", "ping greeter"):  # fmt: skip
            place.run(*command.split())
        place.run("stream", "create", "orders")
        place.run("stream", "append", "orders", "x")
        for command in ("list", "list --json", "info orders", "info orders --json"):
            shown = place.run("stream", *command.split())[0]
            assert os.geteuid() or "info" not in command or b"caf?" in shown
    place.run("status", code=2)


def test_a_program_shows_its_name_with_a_question_mark_for_what_is_not_utf8(place: Place) -> None:
    program = place.root + b"/gr\xfc.py"
    Path(os.fsdecode(program)).write_text(LABELLED)
    assert place.run(program, command=PYTHON) == (b"b'gr?.py'\n", b"")


@pytest.mark.parametrize(
    "command",
    [("relay", "--no-mdns", "--data"), ("store", "--data"), ("store", "salvage")],
    ids=str,
)
def test_a_data_directory_whose_name_is_not_utf8_is_refused_in_a_sentence(
    place: Place, command: tuple[str, ...]
) -> None:
    place.run("key", "new")
    _, err = place.run(*command, b"da\xfdta", code=2)
    assert err.endswith(b"its name is not UTF-8; name another directory, or a link to this one\n"), err  # fmt: skip
