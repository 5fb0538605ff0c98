"""The relay as an operator meets it: settings, keys, readiness, logs, permissions."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, wait_until

import iris
from iris import keyfiles, paths

pytestmark = pytest.mark.timeout(60)


def run(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a relay that is expected to end by itself."""
    return warm.run(
        [sys.executable, "-m", "relay", *arguments],
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), **environ},
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip


async def ask(path: Path) -> dict[str, Any]:
    """Return the status of the relay at this socket."""
    async with client(path) as asking:
        return await asking.status()


# -- readiness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_notified_when_it_serves_and_when_it_stops(
    abstract: bool, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"iris-test-{os.getpid()}"
        manager.bind("\0" + name if abstract else str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        address = "@" + name if abstract else str(tmp_path / "notify")
        with Daemon(tmp_path, settings={"NOTIFY_SOCKET": address}) as daemon:
            assert manager.recv(100) == b"READY=1"
            with socket.socket(socket.AF_UNIX) as session:
                session.connect(str(daemon.socket))
            assert daemon.stop() == 0
            assert manager.recv(100) == b"STOPPING=1"


# -- settings --------------------------------------------------------------------------------------------------


def logged(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    """Return the lines of this event in the relay's log."""
    lines = [line for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [found for found in map(json.loads, lines) if found["event"] == event]


def test_a_running_relay_takes_up_some_settings_and_names_those_that_need_a_restart(
    tmp_path: Path,
) -> None:
    file = tmp_path / "relay.toml"
    file.write_text("drain_timeout_s = 5\nmax_sessions = 10\n")
    with Daemon(tmp_path, settings={"IRIS_RELAY_CONFIG_FILE": str(file)}) as daemon:
        file.write_text('drain_timeout_s = 0.5\nmax_sessions = 11\nlog_level = "WARNING"\n')
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: bool(logged(daemon, "relay.settings_read")))
        (said,) = logged(daemon, "relay.settings_read")
        assert set(said["changed"]) == {"drain_timeout_s", "log_level"}
        assert (said["needs_restart"], said["level"]) == (["max_sessions"], "WARNING")
        file.write_text("drain_timeout_s = no")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: bool(logged(daemon, "relay.settings_unreadable")))
        assert str(file) in logged(daemon, "relay.settings_unreadable")[0]["error"]
        assert daemon.stop() == 0
        assert not logged(daemon, "relay.stopped")  # which is INFO


def test_the_log_of_a_relay_and_its_store_can_be_sentences(tmp_path: Path) -> None:
    log = tmp_path / "text.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "relay", "--dev", "--log-format", "text", "--data", str(tmp_path / "data")],
            env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}, stderr=stderr,
        )  # fmt: skip
        try:
            wait_until(lambda: "store.attached: " in log.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    lines = [line for line in log.read_text().splitlines() if not line.startswith("iris relay: ")]
    for line in lines:
        assert re.match(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ [a-z_]+\.[a-z_]+: [A-Z]", line
        )
    (started,) = (line for line in lines if "relay.started: " in line)
    assert f"(pid {process.pid}) started and accepts sessions at {tmp_path}/iris/relay.sock." in started  # fmt: skip
    assert any("store.attached: The store is attached" in line for line in lines)
    assert "account=" in lines[-1]


def test_a_running_relay_changes_to_sentences(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text("")
    with Daemon(tmp_path, settings={"IRIS_RELAY_CONFIG_FILE": str(file)}) as daemon:
        file.write_text('log_format = "text"\n')
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "Changed: log_format." in daemon.log.read_text())
        assert daemon.stop() == 0


@pytest.mark.parametrize("own", [False, True])
def test_a_development_relay_says_in_one_line_whose_keys_programs_use(
    own: bool, tmp_path: Path
) -> None:
    if own:
        keyfiles.create_keys(tmp_path / ".config" / "iris")
    # It ends after this line, because its socket cannot be made.
    (tmp_path / "iris").mkdir(mode=0o700)
    (tmp_path / "iris" / "relay.sock").mkdir()
    first, *rest = run(tmp_path, "--dev").stderr.splitlines()
    keys = f"their own keys in {tmp_path}/.config/iris/keyring.toml"
    assert first.endswith(keys if own else "which last until this host restarts")
    assert not any("keys in" in line for line in rest)


def test_settings_and_keys_can_be_checked_without_a_relay(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    missing = run(tmp_path, "--check", IRIS_CONFIG=keys)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"no network key at {keys}/network.toml" in missing.stderr
    keyfiles.create_keys(Path(keys))
    right = run(tmp_path, "--check", "--port", "7430", IRIS_CONFIG=keys)
    assert (right.returncode, right.stderr, right.stdout) == (
        0,
        "",
        "settings and keys are valid; addresses and ports were not checked\n",
    )
    for flags, said in (
        (("--group", "no such group"), "socket_group: this host has no group 'no such group'"),
        (("--data", "/proc/iris"), "data: cannot keep streams in /proc/iris: "),
    ):
        refused = run(tmp_path, "--check", *flags, IRIS_CONFIG=keys)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"iris relay: {said}")
    file = tmp_path / "relay.toml"
    file.write_text("max_sesions = 1")
    wrong = run(tmp_path, "--check", "--config", str(file), IRIS_CONFIG=keys)
    assert wrong.returncode == 2
    assert f"{file}: max_sesions is not a setting" in wrong.stderr
    assert not (tmp_path / "iris").exists()


# -- keys ------------------------------------------------------------------------------------------------------


def test_a_development_relay_makes_keys_that_clients_on_this_host_find(tmp_path: Path) -> None:
    program = """
import asyncio, iris
async def main():
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    async with iris.connect() as client, client.serve(service):
        print((await client.request("echo", b"found", timeout=10)).decode())
asyncio.run(main())
"""
    with Daemon(tmp_path) as daemon:
        assert "development keys in" in daemon.log.read_text()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=daemon.environ, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert (done.stdout, done.returncode) == ("found\n", 0), done.stderr
        directory = paths.dev_key_directory(daemon.environ, os.geteuid())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for name in (keyfiles.KEYRING_FILE, keyfiles.NETWORK_FILE):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_without_a_network_key_it_names_the_two_ways_to_get_one(tmp_path: Path) -> None:
    done = run(tmp_path, IRIS_CONFIG=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert f"no network key at {tmp_path}/nothing/network.toml" in done.stderr
    assert "iris key new" in done.stderr
    assert "iris relay --dev" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "iris").exists()


def test_with_a_network_key_it_needs_no_flag(tmp_path: Path) -> None:
    keyfiles.create_keys(tmp_path / "keys")
    settings = {"IRIS_CONFIG": str(tmp_path / "keys")}
    with Daemon(tmp_path, settings=settings, dev=False) as daemon:
        assert not (tmp_path / "iris" / "dev").exists()
        keyring = keyfiles.load_keyring(tmp_path / "keys" / keyfiles.KEYRING_FILE)

        async def use() -> None:
            async with iris.connect(daemon.socket, keyring=keyring) as one:
                await one.flush()

        asyncio.run(use())
        assert daemon.stop() == 0


def test_a_development_relay_says_when_programs_take_other_keys_than_its_own(
    tmp_path: Path,
) -> None:
    keyfiles.create_keys(tmp_path / "keys")
    with Daemon(tmp_path, settings={"IRIS_CONFIG": str(tmp_path / "keys")}) as daemon:
        own = tmp_path / "keys" / keyfiles.KEYRING_FILE
        assert str(own) in daemon.log.read_text()


def test_a_network_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keyfiles.create_keys(tmp_path / "keys")
    (tmp_path / "keys" / keyfiles.NETWORK_FILE).chmod(0o644)
    done = run(tmp_path, IRIS_CONFIG=str(tmp_path / "keys"))
    assert done.returncode == 2
    assert "chmod 600" in done.stderr


# -- settings --------------------------------------------------------------------------------------------------


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(
        f'socket_path = "{tmp_path}/from-file.sock"\nmax_sessions = 3\nlog_level = "DEBUG"\n'
        "message_limit_bytes = 65536\n"
    )
    chosen = tmp_path / "run" / "chosen.sock"
    chosen.parent.mkdir(0o700)
    settings = {"IRIS_RELAY_MAX_SESSIONS": "2", "IRIS_RELAY_CONFIG_FILE": str(file)}
    with Daemon(tmp_path, "--socket", str(chosen), settings=settings) as daemon:
        assert not (tmp_path / "from-file.sock").exists()
        assert not daemon.socket.exists()

        async def use() -> None:
            async with client(chosen) as one, client(chosen):
                with pytest.raises(iris.RelayUnavailable):
                    await client(chosen).open()  # the third of two
                with pytest.raises(iris.MessageTooLarge, match="65536"):
                    await one.request("a", bytes(65537), timeout=PATIENCE_S)
                assert (await one.status())["socket"] == str(chosen)

        asyncio.run(use())


@pytest.mark.parametrize(
    ("file", "environ", "said"),
    [
        ("max_session = 3\n", {}, "max_session"),
        ('max_sessions = "many"\n', {}, "max_sessions: 'many' is not a whole number"),
        ("max_sessions = \n", {}, "relay.toml"),
        ("", {"IRIS_RELAY_FRAME_TIMEOUT_S": "soon"}, "IRIS_RELAY_FRAME_TIMEOUT_S"),
        ("", {"IRIS_RELAY_FRAME_TIMEOUT_S": "nan"}, "IRIS_RELAY_FRAME_TIMEOUT_S: nan"),
        ("", {"IRIS_RELAY_NETWORK_KEYS": "x"}, "IRIS_RELAY_NETWORK_KEYS"),
        ("", {"IRIS_RELAY_SOCKET_GROUP": "no-such-group-here"}, "no-such-group-here"),
    ],
)
def test_a_setting_that_is_wrong_is_named(
    file: str, environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(file)
    done = run(tmp_path, "--dev", "--config", str(path), **environ)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# -- logs ------------------------------------------------------------------------------------------------------


def test_what_a_session_does_wrong_is_one_json_line_and_a_flood_of_it_is_not_many(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path) as daemon:
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as session:
                session.connect(str(daemon.socket))
                session.sendall(b"\0\0\0\0")
                session.settimeout(PATIENCE_S)
                while session.recv(4096):
                    pass
        wait_until(lambda: daemon.said("session.protocol_error"))
        warnings = [line for line in daemon.lines() if line["event"] == "session.protocol_error"]
        assert len(warnings) == 1
        assert warnings[0]["level"] == "WARNING"
        assert "0 bytes" in warnings[0]["error"]
        assert asyncio.run(ask(daemon.socket))["protocol_errors"] == 50


# -- permissions -----------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other groups")
def test_a_socket_group_may_connect(tmp_path: Path) -> None:
    group = next(found for found in grp.getgrall() if found.gr_gid not in (0, os.getegid()))
    with Daemon(
        tmp_path, "--group", group.gr_name, "--socket", str(tmp_path / "shared" / "relay.sock")
    ):
        found = (tmp_path / "shared" / "relay.sock").stat()
        assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (group.gr_gid, 0o660)
        directory = (tmp_path / "shared").stat()
        assert (directory.st_gid, stat.S_IMODE(directory.st_mode)) == (group.gr_gid, 0o750)


# -- idleness --------------------------------------------------------------------------------------------------


def test_an_idle_relay_costs_next_to_nothing(tmp_path: Path) -> None:
    """The figures are printed; what is asserted is only that it does not spin or grow without bound."""
    with Daemon(tmp_path) as daemon:

        async def attached() -> tuple[float, int]:
            async with client(daemon.socket) as one, one.subscribe("a.>"):
                pid = daemon.process.pid
                start = _cpu_s(pid)
                await asyncio.sleep(2)
                return _cpu_s(pid) - start, _resident_bytes(pid)

        began_s = time.monotonic()
        used_s, resident = asyncio.run(attached())
        share = used_s / (time.monotonic() - began_s)
        figures = {"cpu": f"{share:.2%}", "resident_mib": round(resident / (1 << 20), 1)}
        sys.stdout.write(f"idle relay: {json.dumps(figures)}\n")
        assert share < 0.5
        assert resident < 256 << 20


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
