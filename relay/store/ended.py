"""Marks of deleted logs: an empty file for each, so that nobody can recreate such a log, empty, by
replaying its first order. An order that creates a log of a disk is valid once.

A log of a bucket needs none: the bucket has an object for each that was created. A mark is needed
while the first order is fresh. Marks are kept longer, up to a limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from iris.wire.orders import ORDER_FRESH_US
from relay.store.errors import LogWriteFailed, Refuse
from relay.store.files import write_beside

MAX_ENDED: Final = 16_384
NEEDED_US: Final = 2 * ORDER_FRESH_US
"""Orders are fresh for half of this time; the rest is a margin for clocks that are set."""
SUFFIX: Final = ".ended"


class Ended:
    """The marks in one directory. Call `load` first."""

    def __init__(self, directory: Path, most: int = MAX_ENDED) -> None:
        self._directory = directory
        self._most = most
        self._marks: dict[bytes, int] = {}
        """uuid -> time of the mark, µs since 1970; the oldest first."""

    @property
    def uuids(self) -> list[bytes]:
        """Uuids of the logs, oldest mark first."""
        return list(self._marks)

    def __contains__(self, uuid: bytes) -> bool:
        return uuid in self._marks

    def load(self) -> None:
        """Read the marks. Raises OSError."""
        found = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            if len(path.stem) == 32 and not set(path.stem) - set("0123456789abcdef"):
                found.append((path.stat().st_mtime_ns // 1000, bytes.fromhex(path.stem)))
        self._marks = {uuid: ended_us for ended_us, uuid in sorted(found)}

    def add(self, uuid: bytes, now_us: int) -> None:
        """Write the mark of a log to disk. Raises as `make_room`."""
        self.make_room(now_us)
        write_beside(str(self._path(uuid)), b"")
        self._marks[uuid] = now_us

    def make_room(self, now_us: int) -> None:
        """Remove the oldest marks for one more, if they are no longer needed.

        Raises:
            Refuse: the limit is reached and all marks are still needed.
            LogWriteFailed: a disk write failed.
        """
        while len(self._marks) >= self._most:
            oldest, ended_us = next(iter(self._marks.items()))
            if now_us - ended_us < NEEDED_US:
                raise Refuse(
                    "full",
                    f"{self._most} streams were deleted within {NEEDED_US // 60_000_000} minutes, which is the limit; repeat this later",
                )
            try:
                self._path(oldest).unlink(missing_ok=True)
            except OSError as err:
                raise LogWriteFailed(str(self._path(oldest)), str(err)) from err
            del self._marks[oldest]

    def _path(self, uuid: bytes) -> Path:
        return self._directory / (uuid.hex() + SUFFIX)
