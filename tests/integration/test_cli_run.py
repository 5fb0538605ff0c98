"""`iris run` for service managers and developers: it waits for its relay, and keeps several processes running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S, wait_until

import iris.blocking
from iris import keyfiles

pytestmark = pytest.mark.timeout(90)

SOURCE = """
import os
import iris
service = iris.Service("pool")
def await_end():
    # As a process pool does, it outlives the process that forked it.
    import time
    while not os.path.exists("go"):
        time.sleep(0.01)
    os._exit(0)
@service.on_request
async def answer(text: str) -> str:
    if text == "die":
        os._exit(9)
    if text == "fork":
        if os.fork():
            os._exit(9)
        await_end()
    if text.startswith("/"):
        import asyncio
        while not os.path.exists(text):
            await asyncio.sleep(0.01)
    return f"{VERSION} {os.getpid()}"
other = iris.Service("other")
@other.on_request
def more(text: str) -> str:
    return text
"""

STUCK = """
import threading
from pathlib import Path
import iris
service = iris.Service("stuck")
threading._register_atexit(Path("waiting").touch)
@service.on_request(threads=1)
def answer(text: str) -> str:
    Path("began").touch()
    threading.Event().wait()
    return text
"""
NEST = """
import asyncio
import os
import iris
a, b = iris.Service("nest-a"), iris.Service("nest-b")
@a.on_request
async def ask(path: str, client: iris.Client) -> str:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    return await client.request("nest-b", b"", timeout=5.0, type=str)
@b.on_request
def answer(payload: bytes) -> str:
    return "b answers"
"""
EARLY = """
import asyncio
import contextlib
import iris
async def work(client):
    async with client.streams.consumer("tomorrow", "invoices", patience=0.1) as work:
        async for message in work:
            work.ack(message)
@contextlib.asynccontextmanager
async def lifespan(client):
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(client)) for _ in range(2)]
        yield
        for worker in workers:
            worker.cancel()
service = iris.Service("early", lifespan=lifespan)
@service.on_request
def alive(payload: bytes) -> str:
    return "yes"
"""
WORKER = """
import asyncio
import contextlib
import os
import iris
async def work():
    while not os.path.exists("die"):
        await asyncio.sleep(0.01)
    raise OSError("disk on fire")
@contextlib.asynccontextmanager
async def lifespan(client):
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(work())
        yield
        worker.cancel()
service = iris.Service("worker", lifespan=lifespan)
@service.on_request
def alive(payload: bytes) -> str:
    return "yes"
"""

FORKS = """
import asyncio
import os
import time
import iris
service = iris.Service("forks")
@service.on_request
async def answer(text: str) -> int:
    if text == "fork":
        parent, child = os.getpid(), os.fork()
        if not child:
            while os.getppid() == parent:
                time.sleep(0.01)
            os._exit(0)
        return child
    _, status = await asyncio.to_thread(os.waitpid, int(text), 0)
    return os.waitstatus_to_exitcode(status)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a module of two services."""
    with commands.short_directory("iris-run-") as root:
        (root / "app.py").write_text("VERSION = 1\n" + SOURCE)
        yield root


@pytest.fixture
def relay(home: Path) -> Iterator[Path]:
    """A relay with throw-away keys; gives its socket."""
    with dev_relay(home) as path:
        yield path


@pytest.fixture
def shell(home: Path) -> Iterator[Shell]:
    """A shell in the directory of the module."""
    shell = Shell(home)
    yield shell
    shell.finish()
    assert commands.processes_under(home) == []


@pytest.fixture
def observer(home: Path, relay: Path) -> Iterator[iris.blocking.Client]:
    """A client that sees what the relay sees."""
    keyring = keyfiles.load_keyring(home / "iris" / "dev" / "keyring.toml")
    with iris.blocking.connect(relay, keyring=keyring) as client:
        yield client


class Manager:
    """The socket on which a service manager is notified."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.fspath(path))
        self._socket.settimeout(PATIENCE_S)

    def next(self) -> str:
        """Return the first line of the next notification."""
        return self._socket.recv(1024).decode().splitlines()[0]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(home: Path) -> Iterator[Manager]:
    """A service manager that `shell.environ` may name."""
    manager = Manager(home / "notify")
    yield manager
    manager.close()


def events(log: bytes) -> list[str]:
    return [json.loads(line)["event"] for line in log.splitlines() if line.startswith(b"{")]


def pids(observer: iris.blocking.Client) -> set[int]:
    """Return the processes that serve the cluster pool, as the relay sees them."""
    sessions = observer.status()["sessions"]
    return {s["pid"] for s in sessions if s["label"].startswith("iris run") and s["members"]}


def test_run_waits_for_the_relay_and_serves_when_there_is_one(
    home: Path, shell: Shell, manager: Manager
) -> None:
    shell.environ["NOTIFY_SOCKET"] = str(home / "notify")
    process = shell.start("run", "app")
    assert process.stderr is not None
    waiting = json.loads(process.stderr.readline())
    assert waiting["event"] == "run.waiting_for_relay"
    assert "no relay is running" in waiting["error"]
    del shell.environ["NOTIFY_SOCKET"]
    with dev_relay(home):
        assert manager.next() == "READY=1"
        assert shell("request", "pool", "x") == b"1 %d\n" % process.pid
        process.terminate()
        assert manager.next() == "STOPPING=1"
        assert events(end(process)[1]) == ["run.serving", "run.stopping"]


def test_run_without_waiting_leaves_when_there_is_no_relay(home: Path, shell: Shell) -> None:
    assert b"no relay is running" in shell.process("run", "app", "--no-wait", code=2)


def test_a_signal_ends_the_wait_for_a_relay(shell: Shell) -> None:
    process = shell.start("run", "app")
    assert process.stderr is not None
    process.stderr.readline()
    process.terminate()
    end(process)


def test_one_process_serves_several_services(
    shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    process = shell.start("run", "app:service", "app:other")
    observer.wait_for_members("pool", 1, timeout=PATIENCE_S)
    observer.wait_for_members("other", 1, timeout=PATIENCE_S)
    assert shell("request", "other", "hi") == b"hi\n"
    process.terminate()
    end(process)


def test_services_leave_in_their_order_so_a_running_handler_can_call_those_after_it(
    home: Path, shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    (home / "nest.py").write_text(NEST)
    process = shell.start("run", "nest:a", "nest:b")
    observer.wait_for_members("nest-a", 1, timeout=PATIENCE_S)
    request = shell.start("request", "nest-a", str(home / "go"), "--timeout", "30")
    wait_until(lambda: any(s["running"] for s in observer.status()["sessions"]))
    process.terminate()
    wait_until(lambda: not observer.members("nest-a"))
    assert len(observer.members("nest-b")) == 1
    (home / "go").touch()
    assert end(request)[0] == b"b answers\n"
    end(process)


def test_a_task_of_the_lifespan_that_dies_ends_the_process_with_1(
    home: Path, shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    (home / "worker.py").write_text(WORKER)
    process = shell.start("run", "worker:service", "app:other")
    observer.wait_for_members("worker", 1, timeout=PATIENCE_S)
    (home / "die").touch()
    assert b"OSError: disk on fire" in end(process, 1)[1]


def test_a_worker_that_finds_no_stream_ends_the_program_with_one_line(
    home: Path, shell: Shell, relay: Path
) -> None:
    (home / "early.py").write_text(EARLY)
    _, err = end(shell.start("run", "early", "--log-format", "text"), 3)
    said = [line for line in err.splitlines() if b" INFO " not in line]
    assert len(said) == 1, err
    assert said[0].startswith(b"iris: stream tomorrow: ")


def test_workers_serve_together_and_a_crashed_one_is_started_again(
    home: Path, shell: Shell, observer: iris.blocking.Client, manager: Manager
) -> None:
    shell.environ["NOTIFY_SOCKET"] = str(home / "notify")
    process = shell.start("run", "app", "--workers", "2")
    del shell.environ["NOTIFY_SOCKET"]
    assert manager.next() == "READY=1"
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    before = pids(observer)
    assert len(before) == 2
    assert process.pid not in before
    shell("request", "pool", "die", code=6)
    wait_until(lambda: len(pids(observer)) == 2 and pids(observer) != before)
    assert len(pids(observer) & before) == 1
    process.terminate()
    wait_until(lambda: not pids(observer))
    said = end(process)[1]
    ended = [json.loads(line) for line in said.splitlines() if b"run.worker_ended" in line]
    assert [line["exit"] for line in ended] == [9]
    assert events(said).count("run.stopping") == 2


def test_a_worker_is_started_again_while_a_process_that_it_forked_goes_on(
    home: Path, shell: Shell, observer: iris.blocking.Client
) -> None:
    process = shell.start("run", "app", "--workers", "2")
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    before = pids(observer)
    request = shell.start("request", "pool", "fork", "--timeout", "30")
    assert process.stderr is not None
    said = b""
    while b"run.worker_ended" not in said:
        said = process.stderr.readline()
    assert json.loads(said)["exit"] == 9
    (home / "go").touch()
    end(request, 6)
    wait_until(lambda: len(pids(observer)) == 2 and len(pids(observer) & before) == 1)
    process.terminate()
    end(process)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_to_a_process_that_a_service_forked_is_for_that_process_alone(
    home: Path, shell: Shell, observer: iris.blocking.Client, workers: str
) -> None:
    (home / "forks.py").write_text(FORKS)
    process = shell.start("run", "forks", "--workers", workers)
    members = observer.wait_for_members("forks", int(workers), timeout=PATIENCE_S)
    for number in (signal.SIGTERM, signal.SIGHUP):
        member = members[0].member
        child = observer.request("forks", "fork", timeout=PATIENCE_S, type=int, member=member)
        os.kill(child, number)
        ended = observer.request("forks", str(child), timeout=PATIENCE_S, type=int, member=member)
        assert ended == -number
    assert [one.member for one in observer.members("forks")] == [one.member for one in members]
    process.terminate()
    end(process)


def test_workers_finish_what_they_accepted_and_a_second_signal_ends_them_at_once(
    home: Path, shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    process = shell.start("run", "app", "--workers", "2")
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    request = shell.start("request", "pool", str(home / "go"), "--timeout", "30")
    wait_until(lambda: any(s["running"] for s in observer.status()["sessions"]))
    process.send_signal(signal.SIGINT)
    wait_until(lambda: not observer.members("pool"))
    (home / "go").touch()
    assert end(request)[0].startswith(b"1 ")
    end(process)

    stuck = shell.start("run", "app", "--workers", "2")
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    request = shell.start("request", "pool", str(home / "never"), "--timeout", "30")
    wait_until(lambda: any(s["running"] for s in observer.status()["sessions"]))
    stuck.terminate()
    wait_until(lambda: not observer.members("pool"))
    stuck.terminate()
    end(stuck, 130)
    end(request, 6)


def test_a_second_signal_ends_a_service_whose_thread_never_ends(
    home: Path, shell: Shell, observer: iris.blocking.Client
) -> None:
    (home / "stuck.py").write_text(STUCK)
    process = shell.start("run", "stuck")
    observer.wait_for_members("stuck", 1, timeout=PATIENCE_S)
    request = shell.start("request", "stuck", "x", "--timeout", "30")
    wait_until((home / "began").exists)
    process.terminate()
    wait_until(lambda: not pids(observer))
    wait_until((home / "waiting").exists)  # the event loop is closed
    process.terminate()
    end(process, 130)
    end(request, 1)


def test_workers_end_when_their_supervisor_is_killed(
    shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    process = shell.start("run", "app", "--workers", "2")
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    process.kill()
    wait_until(lambda: not pids(observer))
    process.communicate()


def test_a_hangup_lets_every_worker_read_the_keys_again(
    home: Path, shell: Shell, observer: iris.blocking.Client, manager: Manager
) -> None:
    shell.environ["NOTIFY_SOCKET"] = str(home / "notify")
    process = shell.start("run", "app", "--workers", "2")
    del shell.environ["NOTIFY_SOCKET"]
    assert manager.next() == "READY=1"
    shell.environ["IRIS_CONFIG"] = str(home / "iris" / "dev")  # else those keys are not edited
    shell("key", "add", "pool")
    del shell.environ["IRIS_CONFIG"]
    process.send_signal(signal.SIGHUP)
    assert manager.next() == "RELOADING=1"
    assert manager.next() == "READY=1"
    wait_until(lambda: [len(member.key_ids) for member in observer.members("pool")] == [2, 2])
    process.terminate()
    assert events(end(process)[1]).count("run.keys_reloaded") == 2


def test_a_mistake_in_the_services_ends_all_workers_with_one_line(
    home: Path, shell: Shell, relay: Path
) -> None:
    said = shell.process("run", "app:nothing", "--workers", "3", code=2)
    assert said.count(b"app has no iris.Service called 'nothing'") == 1


def test_reload_serves_the_changed_file_and_waits_out_a_syntax_error(
    home: Path, shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    process = shell.start("run", "app", "--reload")
    observer.wait_for_members("pool", 1, timeout=PATIENCE_S)
    assert shell("request", "pool", "x").startswith(b"1 ")
    written_ns = (home / "app.py").stat().st_mtime_ns
    (home / "app.py").write_text("VERSION = = 2\n" + SOURCE)
    assert process.stderr is not None
    shown = b""
    while b"run.waiting_for_change" not in shown:
        shown += process.stderr.readline()
    assert b"SyntaxError: invalid syntax" in shown
    (home / "app.py").write_text("VERSION = 3\n" + SOURCE)
    # As if all of it had taken less than a second: compiled code would look current then.
    os.utime(home / "app.py", ns=(written_ns, written_ns))
    observer.wait_for_members("pool", 1, timeout=PATIENCE_S)
    assert shell("request", "pool", "x").startswith(b"3 ")
    process.terminate()
    end(process)


def test_ctrl_c_in_a_terminal_drains_the_workers(
    home: Path, shell: Shell, observer: iris.blocking.Client, relay: Path
) -> None:
    """A terminal sends SIGINT to the whole process group; the workers are in sessions of their own."""
    process = subprocess.Popen(
        commands.command("run", "app", "--workers", "2"), env=shell.environ, cwd=home, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
    )  # fmt: skip
    shell.started.append(process)
    observer.wait_for_members("pool", 2, timeout=PATIENCE_S)
    os.killpg(process.pid, signal.SIGINT)
    assert events(end(process)[1]).count("run.stopping") == 2
