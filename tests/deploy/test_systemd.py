"""The units of systemd start what they say, may do little else, and their files land where programs look."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import grp
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S, eventually
from support.web import ask, http

import iris
from iris import keyfiles, paths
from iris.web.tokens import hash_token
from relay.settings import load_config

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
INSTALLED = "/opt/iris/bin"
BIN = Path(sys.executable).parent
TOKEN = "a-token-of-the-tests-that-is-long-enough"
EXPOSURE_LIMIT = 20
"""In tenths, as systemd counts: from 0 (no exposure) to 100."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed (package systemd)"
)
needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (package strace)"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a user")
each_daemon = pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if "@" not in unit.stem], ids=lambda unit: unit.stem
)
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="iris-") as made:
        yield Path(made)


class Unit(configparser.RawConfigParser):
    """A unit file: the last value of each setting."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.read_string(path.read_text())

    def optionxform(self, optionstr: str) -> str:
        return optionstr

    def command(self, root: Path) -> list[str]:
        """Return what the unit starts: this environment's `iris`, with a free port and its directories below `root`."""
        return shlex.split(re.sub(r":808\d\b", ":0", below(root, self["Service"]["ExecStart"])))

    def environment(self, root: Path) -> dict[str, str]:
        pairs = shlex.split(below(root, self["Service"].get("Environment", "")))
        return dict(pair.partition("=")[::2] for pair in pairs)


def below(root: Path, text: str) -> str:
    text = text.replace(INSTALLED, str(BIN))
    return re.sub(r"(?<![\w/])/(?=(?:etc|run|var/lib)/iris\b)", f"{str(root).rstrip('/')}/", text)


def test_there_is_a_unit_for_each_daemon() -> None:
    assert [unit.stem for unit in UNITS] == [
        "iris-bridge-http",
        "iris-dashboard",
        "iris-mirror@",
        "iris-relay",
        "iris-store",
    ]


@needs_systemd
@each_unit
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    for each in UNITS:  # together, because one names the other
        (tmp_path / each.name).write_text(each.read_text().replace(INSTALLED, str(BIN)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "iris" in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
@each_unit
def test_the_exposure_of_a_unit_is_under_two(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_LIMIT}", str(unit)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert done.returncode == 0, found[0]
    assert float(found[1]) < EXPOSURE_LIMIT / 10


@pytest.fixture
def root(short: Path) -> Path:
    """A directory that stands for the root of a host, with the files that the units need."""
    for name in ("etc", "run", "var/lib"):
        (short / name / "iris").mkdir(parents=True, mode=0o755)
    keyfiles.create_keys(short / "etc/iris")
    (short / "etc/iris/relay.toml").write_text("port = 0\nmdns = false\n")
    for user, tokens, verb in (("iris-http", "http-tokens.toml", "request"), ("iris-dashboard", "tokens.toml", "view")):  # fmt: skip
        keyfiles.create_keys(short / "etc" / user)
        (short / "etc" / user / tokens).touch(mode=0o600)
        (short / "etc" / user / tokens).write_text(f'[[token]]\nname = "one"\nsha256 = "{hash_token(TOKEN)}"\n[token.allow]\n{verb} = [">"]\n')  # fmt: skip
    return short


@contextlib.contextmanager
def started(unit: Path, root: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Start what a unit starts, and stop it as systemd does; yield it and the socket where it reports its state."""
    settings = Unit(unit)
    seconds = {"30": 30, "3min": 180, None: 0}[settings["Service"].get("WatchdogSec")]
    address = root / f"notify-{unit.stem}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(PATIENCE_S)
        command = settings.command(root)
        with (root / f"log-{unit.stem}").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd="/", umask=int(settings["Service"]["UMask"], 8),
                env={**settings.environment(root), "PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(address)}
                | ({"WATCHDOG_USEC": str(seconds * 1_000_000)} if seconds else {}),
            )  # fmt: skip
        try:
            assert manager.recv(100) == b"READY=1", (root / f"log-{unit.stem}").read_text()
            yield process, manager
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


@each_daemon
def test_what_a_unit_starts_is_ready_and_pings_within_the_units_watchdog(
    unit: Path, root: Path
) -> None:
    relay = SYSTEMD / "iris-relay.service"
    with contextlib.ExitStack() as stack:
        if unit.stem == "iris-bridge-http":  # it connects before it is ready
            stack.enter_context(started(relay, root))
        _, manager = stack.enter_context(started(unit, root))
        if "WatchdogSec" in Unit(unit)["Service"]:
            assert manager.recv(100) == b"WATCHDOG=1"


async def test_the_unit_of_a_mirror_copies_what_its_file_names(root: Path) -> None:
    unit, relay = Unit(SYSTEMD / "iris-mirror@.service"), SYSTEMD / "iris-relay.service"
    keys, socket_path = root / "etc/iris/keyring.toml", root / "run/iris/relay.sock"
    (root / "etc/iris/relay.toml").write_text(f'port = 0\nmdns = false\ndata = "{root}/var/lib/iris"\n')  # fmt: skip
    (root / "etc/iris-mirror").mkdir()
    shutil.copy(keys, root / "etc/iris-mirror")
    file = {"SOURCE": "orders", "COPY": "copy", "OPTIONS": "--max-messages 100 --verbose"}
    command = unit["Service"]["ExecStart"]
    for name, value in file.items():  # as systemd does, which splits what has no braces
        command = command.replace(f"${{{name}}}", shlex.quote(value)).replace(f"${name}", value)
    unit["Service"]["ExecStart"] = command
    with started(relay, root):
        keyring = keyfiles.load_keys({"IRIS_CONFIG": str(root / "etc/iris")})
        async with iris.connect(socket_path, keyring=keyring) as client:

            async def made() -> bool:
                try:
                    await client.streams.create("orders")
                except iris.StreamError:
                    return False
                return True

            async with asyncio.timeout(PATIENCE_S):
                while not await made():  # noqa: ASYNC110 - its store is starting
                    await asyncio.sleep(0.05)
            await client.streams.append("orders", b"one")
            with (root / "log-mirror").open("wb") as log:
                process = await asyncio.to_thread(
                    subprocess.Popen, unit.command(root), stdout=log, stderr=log, cwd="/",
                    env={**unit.environment(root), "PATH": os.environ["PATH"]},
                )  # fmt: skip
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while b"copied 1, end 1, lag 0" not in (root / "log-mirror").read_bytes():
                        assert process.poll() is None, (root / "log-mirror").read_text()
                        await asyncio.sleep(0.02)
                info = await client.streams.describe("copy")
                assert (info.source, info.max_messages) == ("orders", 100)
                process.terminate()
                assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
            finally:
                process.kill()
                process.wait()


def test_a_stop_waits_longer_than_a_drain() -> None:
    relay = Unit(SYSTEMD / "iris-relay.service")["Service"]
    config = load_config({}, {}, None)
    store_s = 5.0
    assert int(relay["TimeoutStopSec"]) > config.drain_timeout_s + store_s


def test_the_socket_is_where_programs_look_for_a_relay_of_the_host() -> None:
    relay = Unit(SYSTEMD / "iris-relay.service")
    named = Path(relay.environment(Path("/"))["IRIS_RELAY"])
    # Tests look elsewhere for a relay of the system: see `support.alone`.
    assert paths.SYSTEM_DIRECTORY / named.name in paths.candidate_sockets({}, 1000)
    assert named == Path("/run/iris") / named.name
    assert relay["Service"]["User"] == load_config({}, {}, None).trusted_user
    assert named.parent == Path("/run") / relay["Service"]["RuntimeDirectory"]


@needs_systemd
@needs_root
def test_the_user_the_settings_and_the_directories_are_made(tmp_path: Path) -> None:
    """On a file system of its own, with the names that Debian's packages use."""
    (tmp_path / "run").mkdir()
    (tmp_path / "etc").mkdir()
    for tool, kind in (("systemd-sysusers", "sysusers"), ("systemd-tmpfiles", "tmpfiles")):
        folder = tmp_path / "usr" / "lib" / f"{kind}.d"
        folder.mkdir(parents=True)
        shutil.copy(SYSTEMD / f"iris.{kind}.conf", folder / "iris.conf")
        # One file only: others could name what lies outside.
        create = ["--create"] if kind == "tmpfiles" else []
        subprocess.run([tool, f"--root={tmp_path}", *create, "iris.conf"], check=True, timeout=PATIENCE_S)  # fmt: skip
    user = next(line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("iris:"))  # fmt: skip
    uid, gid = map(int, user.split(":")[2:4])
    assert user.endswith("/usr/sbin/nologin")
    etc, run = (tmp_path / "etc/iris").stat(), (tmp_path / "run/iris").stat()
    assert (etc.st_uid, etc.st_gid, etc.st_mode & 0o777) == (0, gid, 0o750)
    assert (run.st_uid, run.st_gid, run.st_mode & 0o777) == (uid, gid, 0o755)
    settings = tmp_path / "etc/iris/relay.toml"
    assert settings.stat().st_mode & 0o777 == 0o640
    assert load_config({}, {}, settings).socket_group == "iris"


# -- the sandbox -------------------------------------------------------------------------------------------------


def allowed_calls(unit: Path) -> set[str]:
    """Return the system calls that a unit's SystemCallFilter= allows, by systemd's own lists."""
    rows = re.findall(r"^SystemCallFilter=(~?)(.*)$", unit.read_text(), re.MULTILINE)
    allowed: set[str] = set()
    for inverted, names in rows:
        found = {call for name in names.split() for call in calls_of(name)}
        allowed = allowed - found if inverted else allowed | found
    return allowed


def calls_of(name: str) -> set[str]:
    if not name.startswith("@"):
        return {name}
    done = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", name], check=True, capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
    rows = [row.strip() for row in done.stdout.splitlines()[1:]]
    return {call for row in rows if row and row[0] != "#" for call in calls_of(row)}


def traced(unit: Unit, root: Path) -> subprocess.Popen[bytes]:
    """Start what a unit starts, and note its system calls in `root / "calls"`."""
    with (root / "log").open("wb") as log:
        return subprocess.Popen(
            ["strace", "-f", "-qq", "-o", str(root / "calls"), *unit.command(root)],
            env={**unit.environment(root), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=log, stderr=log, cwd="/",
        )  # fmt: skip


def children(tracing: subprocess.Popen[bytes]) -> list[int]:
    """Return the process that strace started, if it still runs."""
    return [int(pid) for pid in Path(f"/proc/{tracing.pid}/task/{tracing.pid}/children").read_text().split()]  # fmt: skip


def end(tracing: subprocess.Popen[bytes]) -> None:
    """Kill strace and what it traces, which would outlive it."""
    if tracing.poll() is None:
        for pid in children(tracing):
            os.kill(pid, signal.SIGKILL)
        tracing.kill()
        tracing.wait()


def hello(name: str) -> str:
    return f"hello, {name}"


@needs_systemd
@needs_strace
async def test_a_relay_with_a_store_does_only_what_its_unit_allows(short: Path) -> None:
    """Seen by strace, while programs call each other and streams are written and read."""
    unit = SYSTEMD / "iris-relay.service"
    settings = Unit(unit)
    for name in ("etc", "run", "var/lib"):
        (short / name / "iris").mkdir(parents=True, mode=0o755)
    keyring, _ = keyfiles.create_keys(short / "etc" / "iris")
    group = grp.getgrgid(os.getgid()).gr_name
    (short / "etc/iris/relay.toml").write_text(f'port = 0\nsocket_group = "{group}"\ndata = "{short}/var/lib/iris"\nmetrics = "127.0.0.1:0"\n')  # fmt: skip
    tracing = traced(settings, short)
    try:
        await eventually(lambda: "store.attached" in (short / "log").read_text())
        (started,) = (line for line in (short / "log").read_text().splitlines() if '"relay.started"' in line)  # fmt: skip
        relay = int(json.loads(started)["pid"])
        service = iris.Service("greeter")
        service.on_request(hello)
        async with iris.connect(short / "run/iris/relay.sock", keyring=keyring) as client, client.serve(service):  # fmt: skip
            assert await client.request("greeter", "world", timeout=PATIENCE_S, type=str) == "hello, world"  # fmt: skip
            await client.streams.create("orders", topic="orders.>")
            await client.streams.append("orders", {"id": 7})
            async for message in client.streams.read("orders", start="first"):
                assert message.value == {"id": 7}
                break
        os.kill(relay, signal.SIGHUP)
        await eventually(lambda: "relay.settings_read" in (short / "log").read_text())
        os.kill(relay, signal.SIGTERM)
        assert await asyncio.to_thread(tracing.wait, PATIENCE_S) == 0
    finally:
        end(tracing)
    trace = check_allowed(unit, short, "/run/iris", "/var/lib/iris")
    assert re.search(r" (fsync|fdatasync)\(", trace), "the trace has the store's calls, too"


@needs_systemd
@needs_strace
@pytest.mark.parametrize("name", ["iris-bridge-http", "iris-dashboard"])
async def test_the_bridge_and_the_dashboard_do_only_what_their_units_allow(
    root: Path, name: str
) -> None:
    """Seen by strace, while they are used, told to read their settings again, and stopped."""
    unit = SYSTEMD / f"{name}.service"
    keyring = root / "etc/iris/keyring.toml"
    for user in ("iris-http", "iris-dashboard"):
        shutil.copy(keyring, root / "etc" / user)
    service = iris.Service("greeter")
    service.on_request(hello)
    with started(SYSTEMD / "iris-relay.service", root):
        async with iris.connect(root / "run/iris/relay.sock", keyring=keyfiles.load_keyring(keyring)) as client, client.serve(service):  # fmt: skip
            tracing, log = traced(Unit(unit), root), root / "log"
            try:
                await eventually(lambda: re.search(r'(http://|"address":"|"address": ")127.0.0.1:\d+', log.read_text()))  # fmt: skip
                (address, *_) = re.findall(r"127.0.0.1:\d+", log.read_text())
                if name == "iris-dashboard":
                    async with http(address) as page:
                        page.send("GET", "/events", {"authorization": f"Bearer {TOKEN}"})
                        assert (await page.start()).status == 200
                        async for part in page.chunks():
                            if b"event: network" in part:
                                break
                else:
                    answer = await ask(address, "POST", "/clusters/greeter/request", body=b"world", token=TOKEN)  # fmt: skip
                    assert (answer.status, answer.body) == (200, b"hello, world")
                    os.kill(children(tracing)[0], signal.SIGHUP)
                    await eventually(lambda: "bridge.keys_reloaded" in log.read_text())
                os.kill(children(tracing)[0], signal.SIGTERM)
                assert await asyncio.to_thread(tracing.wait, PATIENCE_S) == 0
            finally:
                end(tracing)
    check_allowed(unit, root)


def check_allowed(unit: Path, root: Path, *writable: str) -> str:
    """Check that a trace has only what a unit allows, and writes to these directories alone; return it."""
    trace = (root / "calls").read_text(errors="replace")
    made = set(re.findall(r"^\d+ +([a-z0-9_]+)\(", trace, re.MULTILINE))
    assert made
    assert made - allowed_calls(unit) == set()
    assert not re.search(r"PROT_WRITE\|PROT_EXEC", trace), "MemoryDenyWriteExecute= forbids it"
    families = set(re.findall(r"socket\((AF_[A-Z0-9]+)", trace))
    assert families <= set(Unit(unit)["Service"]["RestrictAddressFamilies"].split())
    written = re.findall(r'openat\(AT_FDCWD, "(/[^"]+)", O_(?:WRONLY|RDWR)', trace)
    places = (*(f"{root}{each}" for each in writable), "/dev/null", "/proc/self/")
    assert {path for path in written if not path.startswith(places)} == set()
    return trace
