"""The size of a log's database on disk."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

WAIT_S = 30.0


def table_bytes(path: str) -> int:
    """Return the total size of the table files."""
    size = 0
    for file in Path(path).glob("*.sst"):
        with contextlib.suppress(FileNotFoundError):  # it was just deleted
            size += file.stat().st_size
    return size


def shrunk_to(path: str, most: int) -> bool:
    """Return whether they get as small as `most` bytes: RocksDB deletes files in the background, after a compaction
    has returned.
    """
    end_s = time.monotonic() + WAIT_S
    while table_bytes(path) > most:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
