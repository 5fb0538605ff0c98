"""How many members a relay has, kept beside its socket: after a restart it knows whose return to wait for.

    <socket>.sessions   {"boot": "…", "sessions": 3, "members": 2}, mode 0600; replaced as a whole, removed when nobody serves anything

A relay that starts reads it. Until as many members have joined, or `RETURN_S` is over, a call that nobody serves waits (within its
deadline) instead of being refused, and the file stays as it is: a relay that is killed again at once still knows. A drain leaves what was
there when it began. What another boot of the host has written counts for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from relay.core.router import Router

log = logging.getLogger(__name__)

RETURN_S: Final = 3.0
"""Nobody is waited for any longer."""
WRITE_S: Final = 0.05
"""Changes within this time are written together."""
FILE_BYTES: Final = 1024
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class MemberCount:
    """Keeps the count of one relay's members from `start` to `freeze`."""

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
        """Read what the relay before this one left, and wait for as many. The lock of the socket is held."""
        self._started_s = time.monotonic()
        sessions, members = self._written = self._read()
        self._router.interest.on_members = self._changed
        if members:
            self._wait(members)
            fields = {"members": members, "sessions": sessions, "within_s": RETURN_S}
            log.info("relay.waits", extra={"fields": fields})

    def sessions_admitted(self) -> None:
        """Sessions are read from now on: before that no member could come back."""
        if self._returning is not None:
            self._returning.cancel()
            self._wait(self._written[1])

    def freeze(self) -> None:
        """Keep what is there now: whoever goes from here on goes because the relay does. Idempotent."""
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
        """A member came or went."""
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
        """Return sessions and members of the relay before; zeros if that is not known."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                said = json.loads(file.read(FILE_BYTES + 1)[:FILE_BYTES])
            sessions, members = said["sessions"], said["members"]
        except (OSError, ValueError, TypeError, KeyError):
            return 0, 0
        sound = all(type(count) is int and 0 <= count < 1 << 32 for count in (sessions, members))
        return (sessions, members) if sound and said.get("boot") == self._boot else (0, 0)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # before a drain it is not due yet, and would count who has left by then
            self._timer = None
        count = (len(self._router.sessions), self._router.interest.joined)
        if count == self._written:
            return
        beside = self._path.with_name(self._path.name + "~")
        try:
            if count[1]:
                text = json.dumps({"boot": self._boot, "sessions": count[0], "members": count[1]})
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                with open(os.open(beside, flags, 0o600), "w") as file:
                    file.write(text + "\n")
                beside.rename(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as err:
            with contextlib.suppress(OSError):
                beside.unlink()
            if not self._faulty:
                self._faulty = True
                fields = {"path": str(self._path), "error": str(err)}
                log.warning("attendance.not_kept", extra={"fields": fields})
            return
        self._written = count


def _boot() -> str:
    """Return what names this boot of the host; an empty text where that is not known."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
