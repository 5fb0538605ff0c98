"""Programs of Iris work for a user whom passwd does not know, with no HOME or one that cannot be written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)

IRIS = str(Path(sys.executable).with_name("iris"))
UID = 54321
APP = "import iris\nservice = iris.Service('greeter')\n@service.on_request\ndef greet(text: str) -> str:\n    return f'hello, {text}'\n"
LIBRARY = """
import iris.blocking
with iris.blocking.connect() as client:
    assert client.request("greeter", "x", timeout=20.0) == b"hello, x"
"""


def become() -> None:
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)


class Place:
    """A directory of the user without an entry, and nothing else that is this user's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(root), "IRIS_RELAY": str(root / "iris" / "relay.sock"), "TMPDIR": str(root / "missing")}  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, code: int = 0, **environ: str) -> tuple[str, str]:
        """Run a command to its end; return what it wrote to stdout and to stderr. No error is a traceback."""
        done = subprocess.run(
            command, cwd=self.root, env=self.environ | environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_S, preexec_fn=become,
        )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (command, done)
        return done.stdout, done.stderr

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command, which ends with the test."""
        with (self.root / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=become
            )  # fmt: skip
        self.started.append(process)
        return process

    def finish(self) -> None:
        for process in reversed(self.started):
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, (process.args, (self.root / "log").read_text())
        assert "Traceback" not in (self.root / "log").read_text()


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without an entry in passwd")
    with commands.short_directory("iris-nobody-") as root:
        (root / "app.py").write_text(APP)
        (root / "log").touch()
        os.chown(root, UID, UID)
        place = Place(root)
        able = subprocess.run([sys.executable, "-c", ""], preexec_fn=become, capture_output=True)
        if able.returncode:
            pytest.skip(f"other users cannot read {sys.executable}")
        try:
            yield place
            place.finish()
        finally:
            for process in place.started:
                process.kill()
                process.wait()
        wait_until(lambda: not commands.processes_under(root))


def test_everything_works_with_throw_away_keys(place: Place) -> None:
    place.start(IRIS, "relay", "--dev", "--data", "data", "--metrics", "127.0.0.1:0")
    wait_until((place.root / "iris" / "relay.sock").exists)
    place.start(IRIS, "run", "app")
    place.start(IRIS, "dashboard", "--listen", "127.0.0.1:0")
    wait_until(lambda: '"run.serving"' in (place.root / "log").read_text())
    assert place.run(IRIS, "request", "greeter", "x") == ("hello, x\n", "")
    place.run(sys.executable, "-c", LIBRARY)
    wait_until(lambda: '"store.attached"' in (place.root / "log").read_text())
    place.run(IRIS, "stream", "create", "orders")
    assert place.run(IRIS, "stream", "append", "orders", "x")[0] == "0\n"
    for command in ("status", "check", "members greeter", "context list", "key list"):
        place.run(IRIS, *command.split())
    assert json.loads(place.run(IRIS, "status", "--json")[0])["store"]["starts"] == 1


@pytest.mark.parametrize("home", [None, "/", "/proc", "/nonexistent"])
def test_where_keys_cannot_be_an_error_says_what_to_set(place: Place, home: str | None) -> None:
    environ = {} if home is None else {"HOME": home}
    for command in ("key new", "context add here --relay /r"):
        _, err = place.run(IRIS, *command.split(), code=2, **environ)
        assert err.endswith("; name a directory of yours with IRIS_CONFIG\n"), err
    for command in ("relay --no-mdns", "relay --check", "status", "request greeter x", "key list", "check"):  # fmt: skip
        place.run(IRIS, *command.split(), code=2, **environ)
    place.run(IRIS, "key", "new", IRIS_CONFIG=str(place.root / "keys"), **environ)
    assert "are valid" in place.run(IRIS, "relay", "--check", IRIS_CONFIG=str(place.root / "keys"), **environ)[0]  # fmt: skip
