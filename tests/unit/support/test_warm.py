"""A warm process is as one that was executed, in everything that a program can see of its start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import warm

PROGRAM = """
import asyncio, json, os, random, signal, sys, threading
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, open("/proc/self/cmdline", errors="surrogateescape").read().rstrip("\\0").split("\\0")],
    "environ": [dict(os.environ), sorted(filter(None, open("/proc/self/environ", errors="surrogateescape").read().split("\\0")))],
    "place": [os.getcwd(), sys.path, os.getppid(), os.getpgid(0), os.getsid(0), os.umask(0o22), os.nice(0), __name__, __file__],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.newlines, s.isatty(), s.name, s.mode] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(set(os.listdir("/proc/self/fd")) - {str(os.open("/", os.O_RDONLY))}),
    "signals": [str(signal.getsignal(n)) for n in signal.valid_signals()] + [str(signal.pthread_sigmask(signal.SIG_BLOCK, []))],
    "flags": [str(sys.flags), sys.warnoptions, sys.executable, threading.active_count(), asyncio.get_event_loop_policy()._local._loop is None],
    "fresh": [os.getpid(), os.urandom(8).hex(), random.random()],
    "said": sys.stdin.read(),
}))
sys.exit(7)
"""


def told(start: Any, directory: Path, program: Path) -> dict[str, Any]:
    environ = {"PATH": os.environ["PATH"], "A": "ä b\udc80", "IRIS_X": "1"}
    command = [sys.executable, str(program), "one", "two words"]
    with start(command, env=environ, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        out, err = process.communicate(b"hello")
    assert (process.returncode, err) == (7, b"")
    return {**json.loads(out), "pid": process.pid}


@pytest.mark.skipif(not warm.switched_on(), reason="processes are executed in this run")
def test_it_sees_what_an_executed_one_sees_and_is_a_child_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    executed, first, second = (
        told(start, tmp_path, program) for start in (subprocess.Popen, warm.Popen, warm.Popen)
    )
    for one in (first, second):
        assert one["fresh"][0] == one["pid"]
    fresh = [{one["fresh"][number] for one in (executed, first, second)} for number in range(3)]
    assert [len(values) for values in fresh] == [3, 3, 3]
    for one in (executed, first, second):
        del one["fresh"], one["pid"]
    assert first == second == executed


def test_it_ends_by_a_signal_as_any_child(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print(1, flush=True); import time; time.sleep(1000)")
    with warm.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_it_may_become_another_command(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "if len(sys.argv) > 1: print(os.getpid(), sys.argv[1:], os.environ['B'], 'HOME' in os.environ, flush=True); sys.exit(3)\n"
        "os.execve(sys.executable, [sys.executable, __file__, 'again'], {'B': '2'})\n"
    )
    with warm.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as process:
        said = process.communicate()[0].decode()
    assert said == f"{process.pid} ['again'] 2 False\n"
    assert process.returncode == 3
