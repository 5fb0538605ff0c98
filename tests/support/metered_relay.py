"""`python -m relay` with a meter in it: how long each connection keeps the relay from all others.

    python tests/support/metered_relay.py ARGUMENTS OF THE RELAY

At SIGUSR1 it writes to `meter.json` in its runtime directory what it measured since the last SIGUSR1, as JSON.
Processor time of the relay's thread is measured, so that other processes on a busy machine do not count.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relay import __main__ as command
from relay import start
from relay.core.control import SessionControl
from relay.net.linkport import LinkPort
from relay.net.ports import Driver
from relay.net.sessions import SessionPort
from relay.net.turns import Turns
from relay.net.websession import WebConnection

CALLBACKS: dict[type, tuple[str, ...]] = {
    SessionPort: ("connection_made", "buffer_updated", "go_on", "connection_lost", "resume_writing"),
    LinkPort: ("buffer_updated", "go_on", "connection_lost", "resume_writing"),
    WebConnection: ("data_received", "go_on", "connection_lost", "resume_writing"),
    Driver: ("_expire",),
    Turns: ("_turn",),
}  # fmt: skip


class Meter:
    """The longest stretches since the last report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._measuring = False
        self._in_round = False
        """Whether the callback that is measured handles one waiting connection after the other."""
        self._in_turn = False
        self._turn_ns = 0
        """Processor time when the turn began."""
        self._shares: Counter[int] = Counter()
        """Connection -> its processor time in this turn."""
        self._collections_ns = 0
        """Processor time of all garbage collections so far."""
        self._reset()

    def _reset(self) -> None:
        self._stretches: dict[str, int] = {}
        self._work: dict[str, int] = {}
        """The same without the garbage collections in them."""
        self._frames: dict[str, int] = {}
        self._collection_max_ns = 0
        self._turn_max_ns = 0
        self._share_max_ns = 0
        self._wall_max_ns = 0
        self._turns = 0

    def install(self) -> None:
        """Measure from now on, in this process."""
        for cls, names in CALLBACKS.items():
            for name in names:
                setattr(cls, name, self._measured(cls, name, getattr(cls, name)))
        gc.callbacks.append(self._collected)
        SessionControl.frame = self._kind(SessionControl.frame)  # type: ignore[method-assign]  # that is its purpose

    def _measured(self, cls: type, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        text = f"{cls.__name__}.{name}"
        shared = cls in (Driver, Turns)
        thread_ns, meter = time.thread_time_ns, self

        @functools.wraps(call)
        def measured(connection: Any, *arguments: Any) -> Any:
            if not meter._in_turn:
                meter._begin_turn(thread_ns())
            if meter._measuring and not meter._in_round:
                return call(
                    connection, *arguments
                )  # within another callback of the same connection
            in_round, meter._in_round = meter._in_round, cls is Turns
            meter._measuring = True
            collections_ns = meter._collections_ns
            begun_ns = thread_ns()
            try:
                return call(connection, *arguments)
            finally:
                took_ns = thread_ns() - begun_ns
                work_ns = took_ns - (meter._collections_ns - collections_ns)
                meter._measuring, meter._in_round = in_round, in_round
                if not shared:
                    meter._shares[id(connection)] += took_ns
                if took_ns > meter._stretches.get(text, 0):
                    meter._stretches[text] = took_ns
                if work_ns > meter._work.get(text, 0):
                    meter._work[text] = work_ns

        return measured

    def _kind(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def frame(control: Any, session: Any, buf: memoryview, start: int, end: int) -> Any:
            collections_ns = self._collections_ns
            begun_ns = time.thread_time_ns()
            kind = buf[start + 4]
            try:
                return call(control, session, buf, start, end)
            finally:
                took_ns = time.thread_time_ns() - begun_ns
                took_ns -= self._collections_ns - collections_ns
                text = f"0x{kind:02x}"
                if took_ns > self._frames.get(text, 0):
                    self._frames[text] = took_ns

        return frame

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Measure a garbage collection, which also counts in the callback that it interrupts."""
        if phase == "start":
            self._collecting_ns = time.thread_time_ns()
        else:
            took_ns = time.thread_time_ns() - self._collecting_ns
            self._collections_ns += took_ns
            self._collection_max_ns = max(self._collection_max_ns, took_ns)

    def _begin_turn(self, now_ns: int) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_signal_handler(signal.SIGUSR1, self._report)
        self._in_turn = True
        self._turn_ns = now_ns
        self._wall_ns = time.monotonic_ns()
        self._loop.call_soon(self._end_turn)  # handled in the next turn, before anything else is

    def _end_turn(self) -> None:
        self._in_turn = False
        self._turns += 1
        self._turn_max_ns = max(self._turn_max_ns, time.thread_time_ns() - self._turn_ns)
        self._wall_max_ns = max(self._wall_max_ns, time.monotonic_ns() - self._wall_ns)
        if self._shares:
            self._share_max_ns = max(self._share_max_ns, *self._shares.values())
            self._shares.clear()

    def _report(self) -> None:
        self._reports += 1
        report = {
            "number": self._reports,
            "turns": self._turns,
            "turn_ms": self._turn_max_ns / 1e6,
            "turn_wall_ms": self._wall_max_ns / 1e6,
            "collection_ms": self._collection_max_ns / 1e6,
            "share_ms": self._share_max_ns / 1e6,
            "stretches_ms": _in_ms(self._stretches),
            "work_ms": _in_ms(self._work),
            "frames_ms": _in_ms(self._frames),
        }
        self._reset()
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(report))
        whole.replace(self._path)


def _in_ms(times_ns: dict[str, int]) -> dict[str, float]:
    return {name: ns / 1e6 for name, ns in times_ns.items()}


def main() -> None:
    """Run the relay; where its command would turn into another process, go on in this one."""

    def go_on(path: str, arguments: list[str], environ: dict[str, str]) -> None:
        Meter(Path(environ["XDG_RUNTIME_DIR"]) / "meter.json").install()
        sys.exit(start.main(environ))

    command.os.execve = go_on  # type: ignore[attr-defined]  # for this process only
    command.main()


if __name__ == "__main__":
    main()
