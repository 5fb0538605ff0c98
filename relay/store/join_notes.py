"""Notes beside the logs of streams that join the bucket, for the next start of their store.

UUID.join is written before it is decided whether the stream joins, and says later that it has. The log stays where it
is until the store starts again. Then it moves to the logs of the bucket; or, if the store ended before the decision was
known, the bucket is asked.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from iris.errors import ConfigError
from iris.keyfiles import sync_directory
from iris.wire.stream_items import dead_uuid
from relay.store.errors import LogWriteFailed
from relay.store.files import read_small, write_beside
from relay.store.salvage import ORDERS

SUFFIX: Final = ".join"
_NAME: Final = re.compile("[0-9a-f]{32}" + re.escape(SUFFIX))


class Note(Struct, frozen=True):
    """What a note says."""

    token: str
    """Names what decides whether the stream joins."""
    before: bytes
    """The stream's definition file as long as it is on the disk."""
    joined: bool = False
    """Whether it is known to have joined, and the log has everything that this changed."""


_decode: Final = msgspec.msgpack.Decoder(Note).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def write(log_path: str, note: Note) -> None:
    """Write the note of a log. Raises LogWriteFailed."""
    write_beside(log_path + SUFFIX, _encode(note))


def remove(log_path: str) -> None:
    """Remove the note of a log, if it has one. Raises LogWriteFailed."""
    path = Path(log_path + SUFFIX)
    try:
        if path.exists():
            path.unlink()
            sync_directory(str(path.parent))
    except OSError as err:
        raise LogWriteFailed(log_path, str(err)) from err


def find(directory: Path) -> dict[bytes, Note]:
    """Return the notes in a directory of streams: uuid -> note. Raises ConfigError, OSError."""
    found: dict[bytes, Note] = {}
    for path in sorted(directory.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            found[bytes.fromhex(path.stem)] = _decode(read_small(path))
        except (OSError, msgspec.DecodeError) as err:
            raise ConfigError(
                f"data: {path} is damaged: {err}; restore it from a backup. It says whether its stream is in the bucket"
            ) from err
    return found


def move_logs(uuid: bytes, directory: Path, bucket: Path) -> None:
    """Move the logs of a stream that has joined from `directory` to `bucket`, and remove its note. Raises OSError.

    What is in `bucket` already is newer: the stream was elsewhere in between. It may also have left.
    """
    for one in (uuid, dead_uuid(uuid)):
        old, new = directory / one.hex(), bucket / one.hex()
        orders = Path(f"{old}{ORDERS}")
        if new.exists() or not old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            orders.unlink(missing_ok=True)
            continue
        for path, to in ((orders, Path(f"{new}{ORDERS}")), (old, new)):
            if path.exists():
                os.rename(path, to)
    sync_directory(str(bucket))
    (directory / f"{uuid.hex()}{SUFFIX}").unlink(missing_ok=True)
    sync_directory(str(directory))
