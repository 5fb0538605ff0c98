"""Turns the copy of a log into another log: with a uuid of its own, and a gap where the copy ends."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from iris.errors import DecodeError
from iris.wire.stream_items import DEAD_KIND, DeadLetter, decode_dead
from iris.wire.streams import encode
from relay.store.database import Database
from relay.store.errors import LogDamaged
from relay.store.identity import Identity
from relay.store.log import Log
from relay.store.records import KEY, Entry, Record, decode, encode_record

PART_BYTES: Final = 1 << 20


class Remade(NamedTuple):
    """A log that was made from a copy."""

    torn: int | None
    """The first offset from which on messages are missing; None if nothing is missing."""
    has_consumers: bool


def remake(path: Path, uuid: bytes, definition: bytes, cause: str, now_us: int) -> Remade:
    """Turn the database at `path`, the copy of a log, into a log with this uuid and definition file.

    The log ends with a gap of unknown count and this cause, unless `cause` is empty. A mirror needs no gap, because its
    source has what is missing.
    Raises LogError, OSError.
    """
    database = Database.open(str(path))
    try:
        _rename(database, uuid, definition)
    finally:
        database.close()
    with Log.open(str(path)) as log:
        torn = log.next if cause else None
        if cause:
            log.tear(cause, now_us)
        return Remade(torn, bool(log.cursors.names()))


def remake_dead(
    path: Path, uuid: bytes, definition: bytes, parent: bytes, torn: int | None, cause: str, now_us: int
) -> None:  # fmt: skip
    """Turn the database at `path`, a copy of dead letters, into the dead letters of the stream `parent`, which has no
    messages of the lost log from offset `torn` on. It ends with a gap, as in `remake`.

    Raises LogError, OSError.
    """
    database = Database.open(str(path))
    try:
        _readdress(database, parent, torn)
        _rename(database, uuid, definition)
    finally:
        database.close()
    with Log.open(str(path)) as log:
        if cause:
            log.tear(cause, now_us)


def make_dead(path: Path, uuid: bytes, definition: bytes, cause: str, now_us: int) -> None:
    """Make a log of dead letters at `path` with only such a gap, because no copy of the lost one was complete.

    Raises LogError, OSError.
    """
    with Log.create(str(path), uuid=uuid, definition=definition, created_us=now_us) as log:
        log.tear(cause, now_us)


def _rename(database: Database, uuid: bytes, definition: bytes) -> None:
    try:
        before = Identity.unpack(database.get(b"i") or b"")
        (end,) = KEY.unpack(database.get(b"n") or b"")
    except (ValueError, struct.error) as err:
        raise LogDamaged(database.path, str(err)) from err
    batch = database.batch()
    batch.put(b"i", Identity(uuid, before.epoch, before.created_us, definition).pack())
    database.write(batch, end, sync=True)
    database.rename(uuid, end)


def _readdress(database: Database, parent: bytes, torn: int | None) -> None:
    """Let dead letters refer to the log `parent`, except those of lost messages: it has others at these offsets."""
    start = b""
    while ops := database.copy_records(start, PART_BYTES):
        start = ops[-1].key + b"\0"
        batch = database.batch()
        for op in ops:
            try:
                item = decode(op.key, op.value)
                if isinstance(item, Record) and item.kind == DEAD_KIND:
                    letter = decode_dead(item.body)
                    if torn is None or letter.offset < torn:
                        batch.put_record(op.key, _letter(op.key, item, letter, parent))
            except (ValueError, DecodeError) as err:
                raise LogDamaged(database.path, f"a dead letter is malformed: {err}") from err
        database.write(batch, 0, sync=False)


def _letter(key: bytes, record: Record, letter: DeadLetter, parent: bytes) -> bytes:
    """Return the row of a dead letter that refers to the log `parent`. It is as long as before."""
    letter = structs.replace(letter, uuid=parent)
    entry = Entry(
        record.kind, record.name, record.key_id, parent, record.end, encode(letter), None, record.key_hash,
        record.tombstone, record.expires_us, record.due_us,
    )  # fmt: skip
    return encode_record(key, entry, record.stored_us, deferred=record.deferred)
