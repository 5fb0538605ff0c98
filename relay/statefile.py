"""Small JSON files beside a relay's socket: what a relay writes for the relay that is started after it.

A file is replaced as a whole, so a reader sees the old text or the new one. It has mode 0600. Symbolic links are not
followed: somebody else may be able to create files in the socket's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

FILE_BYTES: Final = 512
"""At most this much of a file is read; a longer one is not valid JSON then."""


def read(path: Path) -> Any:
    """Return the value in a file. Raises OSError, and ValueError if it is not JSON."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        return json.loads(file.read(FILE_BYTES))


def replace(path: Path, value: dict[str, Any] | None) -> None:
    """Replace the value in a file, or remove the file if it is None. Raises OSError: the file is as before."""
    if value is None:
        path.unlink(missing_ok=True)
        return
    beside = path.with_name(path.name + "~")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(beside, flags, 0o600), "w") as file:
            file.write(json.dumps(value) + "\n")
        beside.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
