"""Writes the number of a relay's members to a file, so that its successor knows how many to wait for.

    <socket>.sessions   {"boot": "…", "sessions": 3, "members": 2}, mode 0600; replaced as a whole, removed at 0 members

A relay reads the file when it starts. Until as many members have joined, or `RETURN_S` is over, a call that finds no
member waits (within its deadline) instead of being refused. The file is not changed in that time, so that a relay that
is killed again at once still has it. A drain leaves the numbers from when it began. A file that another boot of the
host wrote is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relay import statefile

if TYPE_CHECKING:
    from relay.core.router import Router

log = logging.getLogger(__name__)

RETURN_S: Final = 3.0
"""How long a relay waits for members to return."""
WRITE_S: Final = 0.05
"""Changes within this time are written at once."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class MemberCount:
    """Keeps the file of one relay up to date from `start` to `freeze`."""

    def __init__(self, socket_path: Path, router: Router) -> None:
        self._path = socket_path.with_name(socket_path.name + ".sessions")
        self._router = router
        self._boot = _boot()
        self._written = (0, 0)
        self._timer: asyncio.TimerHandle | None = None
        self._returning: asyncio.TimerHandle | None = None
        self._started_s = 0.0
        self._faulty = False
        self._frozen = False

    def start(self) -> None:
        """Read the previous relay's file, and wait for as many members. Call it while the socket's lock is held."""
        self._started_s = time.monotonic()
        sessions, members = self._written = self._read()
        self._router.interest.on_members = self._changed
        if members:
            self._wait(members)
            fields = {"members": members, "sessions": sessions, "within_s": RETURN_S}
            log.info("relay.waits", extra={"fields": fields})

    def sessions_admitted(self) -> None:
        """Start the wait again: sessions are read from now on, and no member could return before."""
        if self._returning is not None:
            self._returning.cancel()
            self._wait(self._written[1])

    def freeze(self) -> None:
        """Write the present numbers for the last time: members that leave later do so because the relay stops.

        Idempotent.
        """
        if self._frozen:
            return
        if self._returning is None:
            self._write()
        self._frozen = True
        for timer in (self._timer, self._returning):
            if timer is not None:
                timer.cancel()
        self._timer = self._returning = None

    def _wait(self, members: int) -> None:
        until_us = time.monotonic_ns() // 1000 + int(RETURN_S * 1e6)
        self._router.wait_for_return(members, until_us)
        loop = asyncio.get_running_loop()
        self._returning = loop.call_later(RETURN_S, self._missed, members)

    def _changed(self) -> None:
        """Note that a member joined or left."""
        if self._frozen:
            return
        if self._returning is not None:
            if self._router.interest.joined < self._written[1]:
                return
            self._returned("relay.returned", self._written[1])
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_S, self._write)

    def _missed(self, members: int) -> None:
        self._returned("relay.missed", members)
        self._write()

    def _returned(self, event: str, members: int) -> None:
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        self._router.wait_for_return(0, 0)
        after_s = round(time.monotonic() - self._started_s, 3)
        here = self._router.interest.joined
        fields = {"members": members, "here": here, "after_s": after_s}
        log.info(event, extra={"fields": fields})

    def _read(self) -> tuple[int, int]:
        """Return the previous relay's sessions and members; zeros if they are unknown."""
        try:
            found = statefile.read(self._path)
            sessions, members = found["sessions"], found["members"]
        except (OSError, ValueError, TypeError, KeyError):
            return 0, 0
        sound = all(type(count) is int and 0 <= count < 1 << 32 for count in (sessions, members))
        return (sessions, members) if sound and found.get("boot") == self._boot else (0, 0)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # a write that is due during a drain would count members that have left by then
            self._timer = None
        count = (len(self._router.sessions), self._router.interest.joined)
        if count == self._written:
            return
        numbers = {"boot": self._boot, "sessions": count[0], "members": count[1]}
        try:
            statefile.replace(self._path, numbers if count[1] else None)
        except OSError as err:
            if not self._faulty:
                self._faulty = True
                fields = {"path": str(self._path), "error": str(err)}
                log.warning("attendance.not_kept", extra={"fields": fields})
            return
        self._written = count


def _boot() -> str:
    """Return the id of this boot of the host; an empty text if it is unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
