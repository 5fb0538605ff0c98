"""Processes of Iris without the start of an interpreter: forks of one that has imported its modules already.

    process = warm.Popen([sys.executable, "-m", "relay", "--dev"], env=…, stderr=log)

`Popen` is subprocess.Popen. In a run of pytest it asks a server for each command that runs a module of Iris or a
script. The server has imported modules and done nothing else, so no loop, thread or key is shared. What it forks is a
child of the caller with the command's own arguments, directory, environment and streams, also in /proc. It differs from
an executed process in the seed of str.__hash__ and in modules and arguments of verbs that are there early. So tests of
a start itself (imports, memory, descriptors) use subprocess, as `make proof` does. IRIS_TEST_EXEC=1 switches all of
this off.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from asyncio import unix_events
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from iris import paths

MODULES = ("iris.cli", "relay", "relay.start", "relay.store")
"""What `-m` runs. Neither these nor their `__main__` are in IMPORTED: they are run as if for the first time."""
IMPORTED = (
    "asyncio.subprocess", "cryptography.hazmat.backends.openssl", "importlib.metadata", "iris.cli.bench", "iris.cli.contexts",
    "iris.cli.demo", "iris.cli.key", "iris.cli.run", "iris.cli.status", "iris.cli.stream", "iris.cli.top", "iris.dashboard.app",
    "iris.keyfiles", "iris.service", "relay.daemon", "relay.settings", "relay.store.daemon", "relay.store.process", "rocksdict",
    "typer._adapters", "typer.rich_utils", "uvicorn", "uvloop", "zeroconf",
)  # fmt: skip
SHAPE = ("GLIBC_", "LANG", "LC_", "MALLOC_", "OPENSSL_", "PYTHON", "TZ")
"""Variables that are read when an interpreter starts: processes in which they differ have different servers."""
MOST_SERVERS = 2
ON_A_HOST = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec"]
"""How `support.namespaces` starts a command on a host; the name of its namespace follows."""
ROOM = 8192
"""Bytes for the arguments, and for the environment, of a process in /proc."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 4096, 16384, 1 << 19, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _module(command: Sequence[str]) -> str:
    """Return the module of `python [-P] -m MODULE …`; "" for any other command."""
    rest = command[2:] if command[1:2] == ["-P"] else command[1:]
    return rest[1] if command[0] == sys.executable and rest[:1] == ["-m"] else ""


def _known(command: Sequence[str]) -> bool:
    """Return whether a command is `python [-P] -m MODULE …` or `python SCRIPT.py …`."""
    if module := _module(command):
        return module in MODULES
    return len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py")


# -- what the tests have ---------------------------------------------------------------------------------------------


class Server:
    """The process that forks. Its channel carries a request with three descriptors, and a process id back."""

    def __init__(self, shape: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), str(paths.SYSTEM_DIRECTORY), "." * ROOM],
                env={"PATH": os.environ["PATH"], **shape, "ROOM": "." * ROOM}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Return the id of a new child of this process."""
        # Only meanwhile: init takes whatever else loses its parent.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
            answer = self._channel.recv(64)
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError(f"the server of warm processes ended: {self._process.wait()}")
        return int(answer)

    def end(self) -> None:
        self._channel.close()
        self._process.wait()


_servers: dict[tuple[tuple[str, str], ...], Server] = {}
_switched_on = False
_lock = threading.Lock()


def switch_on() -> None:
    """Let `Popen` fork from now on, until `switch_off`; also for asyncio, so that a relay in this process has its store
    so."""
    global _switched_on
    _switched_on = sys.platform == "linux" and "IRIS_TEST_EXEC" not in os.environ
    if _switched_on:
        unix_events.subprocess = _Subprocess()  # type: ignore[assignment]  # it needs no more of the module


def switched_on() -> bool:
    return _switched_on


def switch_off() -> None:
    """End the servers. Processes that they forked go on."""
    global _switched_on
    _switched_on = False
    unix_events.subprocess = subprocess
    while _servers:
        _servers.popitem()[1].end()


def _server(environ: Mapping[str, str]) -> Server | None:
    """Return the server for a process with this environment; None if it needs an interpreter of its own."""
    if not _switched_on or "LD_PRELOAD" in environ:
        return None
    shape = tuple(
        sorted((name, value) for name, value in environ.items() if name.startswith(SHAPE))
    )
    if shape not in _servers and len(_servers) < MOST_SERVERS:
        _servers[shape] = Server(dict(shape))
    return _servers.get(shape)


class Popen(subprocess.Popen[Any]):
    """As subprocess.Popen."""

    def __init__(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        given = {name for name, value in options.items() if value not in (None, False, 0, ())}
        self._can_fork = given <= {"env", "cwd", "stdin", "stdout", "stderr", "text"}
        super().__init__([os.fspath(word) for word in command], **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *pipes = rest[:15]
        namespace = ""
        command = args
        if args[:6] == ON_A_HOST:
            namespace, command = args[6], args[7:]
        environ = dict(os.environ if env is None else env)
        with _lock:
            server = _server(environ) if self._can_fork and _known(command) else None
            if server is None:
                super()._execute_child(args, *rest)  # type: ignore[misc]  # the standard library's own
                return
            request = {
                "command": command,
                "directory": os.path.abspath(cwd or "."),
                "environ": environ,
                "namespace": namespace,
            }
            given = (pipes[0], pipes[3], pipes[5])
            streams = [number if given == -1 else given for number, given in enumerate(given)]
            self.pid = server.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Subprocess:
    """The module subprocess, with this `Popen`."""

    Popen = Popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: bytes | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run with captured output."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            out, err = process.communicate(input, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# -- the server, and what it forks -----------------------------------------------------------------------------------


class _Exec(BaseException):
    """A forked process wants to become another command of Iris."""


def serve(channel: socket.socket, caller: int, system: str) -> int:
    """Fork a process for each request until the channel ends. Returns an exit code, in the server and in each fork.

    `system` stands for /run/iris.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    paths.SYSTEM_DIRECTORY = Path(system)
    cli = importlib.import_module("iris.cli")
    for verb in ("key", "run", "status", "stream"):
        cli.load(verb)
    gc.collect()
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(channel, 1 << 18, 3)
        if not data:
            return 0
        born, go = os.pipe(), os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(born[1], str(child).encode())
                os._exit(0)
            os.close(go[1])
            os.read(go[0], 1)  # until the caller is the parent
            channel.detach()
            code: object = None
            try:
                _become(json.loads(data), streams, caller)
            except SystemExit as asked:
                code = asked.code
            _end(code)
        os.waitpid(between, 0)
        channel.send(os.read(born[0], 64))
        for descriptor in (*born, *go, *streams):
            os.close(descriptor)


def _become(request: dict[str, Any], streams: Sequence[int], caller: int) -> None:
    """Turn this process into the one that was asked for, and run it to its end."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if namespace := request["namespace"]:
        _move_to(namespace)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != caller:
            os._exit(1)
    os.chdir(request["directory"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "w" if number else "r"
        line = 1 if number == 2 or os.isatty(number) else -1
        stream = open(number, mode, line, old.encoding, old.errors, "\n", closefd=False)  # noqa: SIM115 - until this process ends
        stream.buffer.raw.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.execve = _turn_into  # type: ignore[assignment]
    command, environ = request["command"], request["environ"]
    coerced = {
        name: value for name, value in os.environ.items() if name == "LC_CTYPE"
    }  # by the interpreter: PEP 538
    path = sys.path[1:]
    while True:
        _show(command, environ)
        os.environ.clear()
        os.environ.update(coerced | environ)
        sys.orig_argv = command
        sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
        try:
            if module := _module(command):
                safe = command[1] == "-P"
                sys.argv, sys.path[:] = command[2 + safe :], path if safe else [os.getcwd(), *path]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                sys.argv = command[1:]
                sys.path[:] = [os.path.dirname(os.path.realpath(command[1])), *path]
                runpy.run_path(command[1], run_name="__main__")
            return
        except _Exec as turn:
            command, environ = turn.args


def _end(code: object) -> NoReturn:
    """End this process as the interpreter does, which would take all modules apart as well: that takes longer than a
    short command."""
    if code is not None and not isinstance(code, int):
        sys.exit(code)  # type: ignore[arg-type]  # it is printed
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    gc.collect()  # what is left open or was never awaited complains
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter finds the same, and says so
    os._exit((code or 0) & 0xFF)


_execve = os.execve


def _turn_into(path: str, command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """os.execve in a fork."""
    if _known(command):
        raise _Exec(command, dict(environ))
    _execve(path, command, environ)


def _show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let /proc say this command and this environment."""
    with open("/proc/self/stat", "rb") as file:
        numbers = [int(number) for number in file.read().rpartition(b")")[2].split()[1:]]
    arguments, arguments_end, variables, variables_end = numbers[44:48]
    texts = [f"{name}={value}" for name, value in environ.items()]
    places = ((command, arguments, arguments_end), (texts, variables, variables_end))
    for words, start, end in places:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, min(len(text), end - start - 1))


def _move_to(namespace: str) -> None:
    """Do what `ip netns exec` does: the network, /sys, and files of /etc."""

    def checked(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")

    with open(f"/run/netns/{namespace}") as file:
        checked(_libc.setns(file.fileno(), CLONE_NEWNET))
    checked(_libc.unshare(CLONE_NEWNS))
    checked(_libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
    _libc.umount2(b"/sys", MNT_DETACH)
    checked(_libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    etc = Path("/etc/netns") / namespace
    for path in etc.iterdir() if etc.is_dir() else ():
        checked(_libc.mount(bytes(path), bytes(Path("/etc") / path.name), b"none", MS_BIND, None))


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]))
