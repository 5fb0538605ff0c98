"""Finds handlers that hold up the event loop, and logs them by name.

A thread looks every `TICK_S` which Python functions the event loop's thread is in. If a handler is among them, it asks
the loop to report when it gets to run, and looks twice as often. If the loop has not reported after `LIMIT_S`, and the
same call of the handler has been there each time, this handler holds up the loop.

So a message costs nothing. The looks take about 1 ms of processor time a second. A call that holds the loop for
`LIMIT_S` + `TICK_S` is always found, and a shorter one by chance. What never lets another thread run (a long call of a
C function that keeps the GIL) is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final

from iris.logs import logger
from iris.parameters import code_of, name_of

log = logger("iris.service")

LIMIT_S: Final = 0.1
"""How long a handler may hold the loop."""
TICK_S: Final = 0.1
"""Seconds between two looks, while no handler is suspected."""
TOO_LONG_S: Final = 1.0
"""A handler that still holds the loop after this time (s) is logged before it ends."""
QUIET_S: Final = 60.0
"""Seconds between two log lines about one handler."""

Handlers = dict[CodeType, tuple[str, str]]
"""Code of a handler's function -> (cluster, name of the handler)."""


def handlers_of(cluster: str, functions: list[Callable[..., Any]]) -> Handlers:
    """Return what to look for; functions that are not written in Python cannot be seen."""
    codes = ((getattr(code_of(function), "__code__", None), function) for function in functions)
    return {code: (cluster, name_of(function)) for code, function in codes if code is not None}


class _Suspect:
    """A call of a handler that was running when the loop was asked to report."""

    __slots__ = ("cluster", "counted", "frame", "held_s", "logged", "name", "since_s")

    def __init__(self, frame: FrameType, cluster: str, name: str, now_s: float) -> None:
        self.frame: FrameType | None = frame
        """None when the loop has run since."""
        self.cluster = cluster
        self.name = name
        self.since_s = now_s
        self.held_s = 0.0
        self.logged = False
        self.counted = False

    def loop_runs(self) -> None:
        """Let go of the call's frame. Called in the loop, where the objects in it may end."""
        self.frame = None


class LoopWatch:
    """Watches one event loop, from a thread that runs while a service is served in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the loop that runs in the calling thread. No thread is started before `watching`."""
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._watched: list[Handlers] = []
        self._stop = threading.Lock()
        """Locked while the thread is to run. An Event would take three times as long for each wait."""
        self._logged_s: dict[tuple[str, str], float] = {}
        """(cluster, handler) -> monotonic time of its latest log line, for the handlers that are served."""
        self.held: dict[str, int] = {}
        """Cluster -> how often one of its handlers has held up the loop. Only the thread writes to it."""

    @property
    def idle(self) -> bool:
        """Whether nothing is watched."""
        return not self._watched

    @contextlib.contextmanager
    def watching(self, handlers: Handlers) -> Iterator[None]:
        """Watch these handlers, too, while the block runs."""
        if not self._watched:
            self._stop = threading.Lock()
            self._stop.acquire()
            threading.Thread(
                target=self._run, args=(self._stop,), name="iris-loop-watch", daemon=True
            ).start()
        self._watched = [*self._watched, handlers]  # not changed in place: the thread reads it
        try:
            yield
        finally:
            self._watched = [each for each in self._watched if each is not handlers]
            if not self._watched:
                self._stop.release()

    def _run(self, stop: threading.Lock) -> None:
        suspect: _Suspect | None = None
        while not stop.acquire(timeout=TICK_S if suspect is None else TICK_S / 2):
            try:
                suspect = self.look(suspect, time.monotonic())
            except RuntimeError:  # the loop is closed
                return

    def look(self, suspect: _Suspect | None, now_s: float) -> _Suspect | None:
        """Look at the loop's thread once. Return the call to follow until the next look.

        Raises RuntimeError if the loop is closed.
        """
        if suspect is not None:
            frame = suspect.frame
            if frame is not None and self._is_in(frame):
                suspect.held_s = now_s - suspect.since_s
                if suspect.held_s >= LIMIT_S and not suspect.counted:
                    suspect.counted = True
                    self.held[suspect.cluster] = self.held.get(suspect.cluster, 0) + 1
                if suspect.held_s >= TOO_LONG_S and not suspect.logged:
                    suspect.logged = True
                    self._log(suspect, now_s)
                return suspect
            if suspect.held_s >= LIMIT_S and not suspect.logged:
                self._log(suspect, now_s)
            if frame is not None:  # it has ended, but the loop has not run yet
                suspect.logged = True
                return suspect
        found = self._find(now_s)
        if found is not None:
            self._loop.call_soon_threadsafe(found.loop_runs)
        return found

    def _frames(self) -> Iterator[FrameType]:
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _is_in(self, call: FrameType) -> bool:
        return any(frame is call for frame in self._frames())

    def _find(self, now_s: float) -> _Suspect | None:
        watched = self._watched
        for frame in self._frames():
            for handlers in watched:
                found = handlers.get(frame.f_code)
                if found is not None:
                    return _Suspect(frame, *found, now_s)
        return None

    def _log(self, suspect: _Suspect, now_s: float) -> None:
        handler = (suspect.cluster, suspect.name)
        if now_s - self._logged_s.get(handler, -QUIET_S) < QUIET_S:
            return
        names = {found for handlers in self._watched for found in handlers.values()}
        self._logged_s = {k: at for k, at in self._logged_s.items() if k in names}
        self._logged_s[handler] = now_s
        fields = {
            "cluster": suspect.cluster,
            "handler": suspect.name,
            "ms": round(1000 * suspect.held_s),
        }
        log.warning("service.loop_held", extra={"fields": fields})


_watches: Final[dict[asyncio.AbstractEventLoop, LoopWatch]] = {}
"""The watch of each event loop in which a service is served."""


def times_held(loop: asyncio.AbstractEventLoop, cluster: str) -> int:
    """Return how often handlers of a cluster have held up a loop since services are served in it."""
    watch = _watches.get(loop)
    return watch.held.get(cluster, 0) if watch is not None else 0


@contextlib.contextmanager
def watching(cluster: str, functions: list[Callable[..., Any]]) -> Iterator[None]:
    """Watch the handlers of one service in the running loop while the block runs."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = LoopWatch(loop)
    try:
        with watch.watching(handlers_of(cluster, functions)):
            yield
    finally:
        if watch.idle:
            _watches.pop(loop, None)
