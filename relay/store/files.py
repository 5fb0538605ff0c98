"""Small files of a store, which are replaced as a whole."""

from __future__ import annotations

import os

from iris.keyfiles import sync_directory
from relay.store.errors import LogWriteFailed


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
