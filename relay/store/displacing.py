"""Marks of displaced logs: another log has taken the place of one, and this store only keeps it.

The mark is a file beside the log, so that the store does not serve the log even if the bucket does not answer at its
next start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from iris.crypto.keys import public_id
from relay.store.bucket.sealing import Forced
from relay.store.files import read_small, write_beside

SUFFIX: Final = ".forced"


class _Mark(Struct):
    made: str
    store: str
    label: str

    def __str__(self) -> str:
        return (
            f"the stream was moved by force while this store was gone: the store {self.store[:8]} on {self.label} has log "
            f"{self.made} in its place. This log is kept and can be read by its uuid; delete it when you no longer need it"
        )


def write(path: str, entry: Forced) -> str:
    """Mark the log at `path`; return why it is not served. Raises LogWriteFailed."""
    mark = _Mark(entry.made.hex(), public_id(entry.store).hex(), entry.label)
    write_beside(path + SUFFIX, msgspec.json.encode(mark))
    return str(mark)


def read(path: str) -> str:
    """Return why the log at `path` is not served; empty if it is."""
    try:
        return str(msgspec.json.decode(read_small(path + SUFFIX), type=_Mark))
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.DecodeError) as err:
        return f"the stream was moved by force while this store was gone, and the file {path}{SUFFIX}, which says where, cannot be read: {err}"


def remove(path: str) -> None:
    """Remove the mark of the log at `path`, if it has one. Raises OSError."""
    Path(path + SUFFIX).unlink(missing_ok=True)
