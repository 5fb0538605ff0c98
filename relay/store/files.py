"""Small files of a store, which are replaced as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from iris.keyfiles import sync_directory
from relay.store.errors import LogWriteFailed

MAX_SMALL_BYTES: Final = 16 << 20
"""Far more than any of these files has."""


def read_small(path: str | Path) -> bytes:
    """Return what is in a small file. Raises OSError, also if it is longer than `MAX_SMALL_BYTES` or not a file."""
    # O_NONBLOCK: a FIFO without a writer would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > MAX_SMALL_BYTES:
            raise OSError(
                f"it has {status.st_size} bytes, and such a file has at most {MAX_SMALL_BYTES}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_SMALL_BYTES)
    finally:
        os.close(descriptor)


def write_beside(path: str, data: bytes) -> None:
    """Write a small file atomically, through a temporary file beside it. Raises LogWriteFailed."""
    try:
        descriptor = os.open(
            path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
        sync_directory(os.path.dirname(path))
    except OSError as err:
        raise LogWriteFailed(path, str(err)) from err
