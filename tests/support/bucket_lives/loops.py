"""Event loops in virtual time: one for each process, so that a process can be stopped, killed and continued."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable
from typing import Any, Final

MAX_TURNS: Final = 3_000_000
"""Turns of all loops in one life. More means that something turns without end."""


class Stuck(Exception):
    """No process has anything left to do, or they turn without end."""


class Time:
    """The time that all processes share."""

    def __init__(self) -> None:
        self.now_s = 0.0

    @property
    def now_us(self) -> int:
        return int(self.now_s * 1e6)


class _NoFiles:
    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        """There is nothing to close."""


class Loop(asyncio.BaseEventLoop):
    """The loop of one process. It has no files, and never waits: `Loops` sets the time."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.set_debug(False)
        self.frozen = False
        """The process is stopped: its timers and what it receives wait."""
        self._time = time
        self._selector = _NoFiles()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._time.now_s

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call it at once: a thread would not be done when virtual time goes on."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as err:  # the caller awaits it
            done.set_exception(err)
        return done

    def _write_to_self(self) -> None:
        """Nobody waits in `select`."""

    @property
    def next_s(self) -> float | None:
        """When the loop has something to do; None if it has nothing to do by itself."""
        if self._ready:  # type: ignore[attr-defined]  # of asyncio's own base class
            return self._time.now_s
        timers = self._scheduled  # type: ignore[attr-defined]  # the same
        return timers[0].when() if timers else None

    def turn(self) -> None:
        """Run what is due. Another loop may be running: it kills this process."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]  # the same
        finally:
            events._set_running_loop(outer)

    def end(self) -> None:
        """Cancel all tasks, and run until they have ended. What they ask of others must fail at once."""
        self.frozen = False
        for _ in range(1000):
            tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.turn()
        else:
            raise Stuck(f"a killed process still has {tasks}")
        self.turn()
        self.close()


class Loops:
    """All processes of a life."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.all: list[Loop] = []
        self.turns = 0

    def add(self) -> Loop:
        loop = Loop(self.time)
        self.all.append(loop)
        return loop

    def remove(self, loop: Loop) -> None:
        """A process was killed."""
        self.all.remove(loop)

    def run(self, done: Callable[[], bool]) -> None:
        """Run every loop at its times until `done`. Raises Stuck."""
        time = self.time
        while not done():
            first: Loop | None = None
            first_s = 0.0
            for loop in self.all:
                if not loop.frozen:
                    next_s = loop.next_s
                    if next_s is not None and (first is None or next_s < first_s):
                        first, first_s = loop, next_s
            self.turns += 1
            if first is None or self.turns > MAX_TURNS:
                raise Stuck(f"after {self.turns} turns at {time.now_s:.1f} s")
            time.now_s = max(time.now_s, first_s)
            first.turn()
