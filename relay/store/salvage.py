"""Salvage: rebuilds a damaged log from what can be read of it, with the same uuid and offsets, and
a higher epoch.

Nothing is guessed. An entry is copied byte for byte, or replaced by a hole with its own reason. The
files of the damaged log stay beside the new one until somebody deletes them. In the directory of
streams, for the log UUID:

    UUID.look       a copy in which the damaged log is read; removed at the end
    UUID.salvaged   the new log; complete only after it was written, synced, closed and read again
    UUID.damaged-N  the damaged log. UUID is renamed to this first, then UUID.salvaged to UUID

So UUID.salvaged beside UUID is left from an attempt that ended early, and is removed. Without UUID
it is the complete new log, and `finish` renames it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from iris.errors import ConfigError, IrisError
from iris.keyfiles import sync_directory
from iris.wire.orders import DEAD, decode_order, in_force
from iris.wire.stream_items import dead_uuid
from relay.store import cursor
from relay.store.authority import DefinitionFile
from relay.store.chain import DUE, Chain, Draft
from relay.store.damaged_log import DamagedLog
from relay.store.database import check_room_to_open
from relay.store.ended import Ended
from relay.store.errors import LogBusy, LogDamaged, LogError
from relay.store.files import read_small
from relay.store.identity import Identity, make
from relay.store.log import Log
from relay.store.records import KEY, MAX_OFFSET, Hole, Reason, Record, check_row
from relay.store.segments import Segment

log = logging.getLogger(__name__)

ORDERS: Final = ".orders"
"""A file beside the log with a copy of its orders, for when the log cannot be opened."""
_NEW, _LOOK, _OLD = ".salvaged", ".look", ".damaged-"
_UUID: Final = re.compile("[0-9a-f]{32}")
_LAST: Final = struct.Struct("<QQQqQ")
_PRODUCER: Final = struct.Struct("<IQq")
_OFFSETS: Final = struct.Struct("<QI")
_WRITE_BYTES: Final = 8 << 20
_decode_definition_file: Final = msgspec.msgpack.Decoder(DefinitionFile).decode


class Report(Struct):
    """The result for one stream."""

    stream: str
    """Its name; "" if it is not known."""
    uuid: str
    state: str = "undamaged"
    """"undamaged", "salvaged" or "failed"."""
    error: str = ""
    """What was damaged; for "failed", why nothing was changed."""
    records: int = 0
    """Records that were kept. Earlier gaps and holes are kept too, but not counted."""
    messages: int = 0
    """Messages in these records."""
    oldest: int = 0
    end: int = 0
    end_from: str = ""
    """The source from which `end` is known."""
    epoch: int = 0
    lost: list[tuple[int, int]] = []
    """(first, next) of offsets that could not be read."""
    also: list[str] = []
    """What else was lost, or may be outdated."""
    kept_at: str = ""
    """Path of the damaged files."""

    @property
    def lost_offsets(self) -> int:
        return sum(end - first for first, end in self.lost)


def salvage(
    directory: Path, wanted: str = "", report_done: Callable[[Report], object] = lambda _: None
) -> list[Report]:
    """Salvage the damaged streams in a directory of streams.

    With `wanted`, only the stream of this name or uuid and its dead letters. The caller holds the
    lock of the data directory. `report_done` is called with the report of each stream when it is
    done.

    Raises:
        ConfigError: there is no such stream.
        OSError: the directory cannot be read.
    """
    finish(directory)
    ended = Ended(directory)
    ended.load()
    uuids = {path.name for path in directory.iterdir() if _UUID.fullmatch(path.name)}
    uuids -= {gone.hex() for uuid in ended.uuids for gone in (uuid, dead_uuid(uuid))}
    names = _names(directory, uuids)
    if wanted:
        chosen = {uuid for uuid in uuids if wanted in (uuid, names[uuid])}
        chosen |= {dead_uuid(bytes.fromhex(uuid)).hex() for uuid in chosen} & uuids
        if not chosen:
            raise ConfigError(
                f"data: {directory.parent} has no stream {wanted!r}; give its name or uuid. "
                "If its name cannot be read any more, give its uuid, which is the name of its directory"
            )
        uuids = chosen
    reports = []
    for uuid in sorted(uuids, key=lambda uuid: (names[uuid], uuid)):
        report = _salvage_one(directory / uuid, names[uuid])
        reports.append(report)
        report_done(report)
    return reports


def finish(directory: Path) -> None:
    """Rename salvaged logs whose salvage was interrupted just before the rename. Raises OSError."""
    for made in directory.glob(f"*{_NEW}"):
        uuid = made.name.removesuffix(_NEW)
        if _UUID.fullmatch(uuid) and not (directory / uuid).exists():
            os.rename(made, directory / uuid)
            sync_directory(str(directory))
            log.warning("store.salvage_finished", extra={"fields": {"path": str(directory / uuid)}})


def _salvage_one(path: Path, name: str) -> Report:
    report = Report(name, path.name)
    made, look = Path(f"{path}{_NEW}"), Path(f"{path}{_LOOK}")
    try:
        for rest in (made, look):
            if rest.exists():
                shutil.rmtree(rest)
        damage = _find_damage(path)
        if damage is None:
            return report
        report.error = damage
        with DamagedLog(str(path), str(look)) as damaged:
            _rebuild(damaged, path, made, report)
        if (wrong := _find_damage(made)) is not None:
            raise LogDamaged(str(made), f"the salvaged log is damaged too: {wrong}")
        report.kept_at = str(_swap(path, made))
        report.state = "salvaged"
    except (LogError, IrisError, OSError) as err:
        report.state, report.error = "failed", str(err)
        for rest in (made, look):
            shutil.rmtree(rest, ignore_errors=True)
    return report


def _find_damage(path: Path) -> str | None:
    """Read a whole log and return what is wrong with it; None if nothing is.

    Raises:
        LogError: this cannot be determined, because the log is open elsewhere or the disk is full.
        OSError: the files may not be read.
    """
    for file in path.iterdir():
        if file.is_file():
            file.open("rb").close()  # a file without read permission is not damage
    check_room_to_open(str(path))
    try:
        with Log.open(str(path)) as opened:
            opened.verify()
            if opened.uuid.hex() != path.name.removesuffix(_NEW):
                raise ConfigError(
                    f"{path}: the log in this directory has another uuid, {opened.uuid.hex()}"
                )
    except LogBusy:
        raise
    except LogDamaged as err:
        check_room_to_open(str(path))  # RocksDB reports a full disk as damage
        return err.what if err.offset is None else f"{err.what} (at offset {err.offset})"
    return None


def _swap(path: Path, made: Path) -> Path:
    """Replace the damaged log by the new one, and return the new path of the damaged log."""
    number = 1
    while (old := Path(f"{path}{_OLD}{number}")).exists():
        number += 1
    sync_directory(str(made))
    os.rename(path, old)
    sync_directory(str(path.parent))
    os.rename(made, path)
    sync_directory(str(path.parent))
    return old


def _names(directory: Path, uuids: Iterable[str]) -> dict[str, str]:
    """Return uuid -> name of streams, from the orders beside the logs.

    Dead letters have their stream's name with its suffix.
    """
    names = {}
    parents = {}
    for uuid in uuids:
        names[uuid] = ""
        try:
            stored = _decode_definition_file(read_small(f"{directory / uuid}{ORDERS}"))
            parents[uuid] = stored.parent.hex()
            order = in_force(decode_order(signed.order) for signed in stored.orders)
            names[uuid] = order.definition.name if order is not None else ""
        except (OSError, msgspec.DecodeError, IrisError):
            continue
    for uuid, parent in parents.items():
        if parent and names.get(parent):
            names[uuid] = names[parent] + DEAD
    return names


# -- the new log ---------------------------------------------------------------------------------------------


def _rebuild(damaged: DamagedLog, path: Path, made: Path, report: Report) -> None:
    """Write everything readable of the damaged log to a new log. Raises LogError, OSError."""
    identity = _identity(damaged, path, report)
    now_us = time.time_ns() // 1000
    rows = dict(_other_rows(damaged, report, now_us))
    end, report.end_from = _known_end(damaged, rows)
    first = next((item.first for _, _, item in damaged.entries()), None)
    if first is None and not end:
        raise LogDamaged(str(path), "no entry and no end offset can be read; delete the stream")
    oldest = _offset(damaged.get(b"o"))
    if oldest is None:
        oldest = end if first is None else first
        report.also.append(
            f"the oldest offset: the log now begins with the first that can be read, {oldest}"
        )
    database = make(str(made), identity, oldest)
    try:
        chain = Chain(database)
        _copy_entries(damaged, chain, end, report)
        lost = report.lost
        for due in _due_in(
            damaged, lost
        ):  # so that consumers that are past these offsets get a report
            rows[b"d" + due] = b""
        batch, size = database.batch(), 0
        for key, value in rows.items():
            batch.put(key, value)
            size += len(value)
            if size >= _WRITE_BYTES:
                chain.write(batch, sync=True)
                batch, size = database.batch(), 0
        chain.write(batch, sync=True)
        report.oldest, report.end, report.epoch = oldest, chain.next, identity.epoch
        if chain.next > end:
            report.end_from = "its last entry"
    finally:
        database.close()


def _copy_entries(damaged: DamagedLog, chain: Chain, end: int, report: Report) -> None:
    """Copy the entries unchanged; what is missing between them becomes a hole."""
    oldest = chain.oldest
    draft, size = chain.draft(), 0
    for key, value, item in damaged.entries():
        if item.first < oldest or item.next > MAX_OFFSET:
            continue
        _fill(draft, item.first, report)
        draft.add_stored(key, value, item)
        size += len(value)
        if isinstance(item, Record):
            report.records += 1
            report.messages += item.count
        if size >= _WRITE_BYTES:
            chain.finish(draft)
            draft, size = chain.draft(), 0
    _fill(draft, end, report)
    chain.finish(draft)


def _fill(draft: Draft, until: int, report: Report) -> None:
    if draft.next < until:
        report.lost.append((draft.next, until))
        draft.add_item(Hole(draft.next, until, Reason.DAMAGED), 0)


def _identity(damaged: DamagedLog, path: Path, report: Report) -> Identity:
    """Return the identity of the new log: the same as before, with a higher epoch."""
    uuid = bytes.fromhex(path.name)
    row = damaged.get(b"i")
    try:
        found = Identity.unpack(row or b"")
        if found.uuid == uuid:
            return Identity(uuid, found.epoch + 1, found.created_us, found.definition)
        raise ConfigError(f"{path}: the log in this directory has another uuid, {found.uuid.hex()}")
    except ValueError as err:
        try:
            definition = read_small(f"{path}{ORDERS}")
            _decode_definition_file(definition)
        except (OSError, msgspec.DecodeError) as none:
            raise LogDamaged(
                str(path), f"{err}, and the orders beside it cannot be read: {none}"
            ) from none
        report.also.append(
            f"its time of creation and its epoch; its orders come from {path.name}{ORDERS}"
        )
        # Epochs count up from 0, so the time in seconds is higher than any earlier epoch.
        return Identity(uuid, int(time.time()), 0, definition)


def _known_end(damaged: DamagedLog, rows: dict[bytes, bytes]) -> tuple[int, str]:
    """Return the highest end offset that anything but the entries proves, and a name for that source."""
    found: list[tuple[int, str]] = [(0, "nothing")]
    if damaged.mark is not None and damaged.mark.next_offset <= MAX_OFFSET:
        found.append((damaged.mark.next_offset, "its mark"))
    found.append((_offset(damaged.get(b"n")) or 0, "its row of the next offset"))
    for key, summary in damaged.rows(b"s"):
        try:
            found.append((Segment.unpack(KEY.unpack(key)[0], summary).next, "a segment's summary"))
        except struct.error:
            continue
    for key, value in rows.items():
        if key[:1] == b"c":
            try:
                state = cursor.decode("", value)
            except IrisError:
                continue
            found.append((state.position, "a consumer's position"))
        elif key[:1] == b"w":
            found.append((_LAST.unpack(value[4:])[2], "a writer's last batch"))
        elif key[:1] == b"p" and len(value) >= _PRODUCER.size + _OFFSETS.size:
            first, count = _OFFSETS.unpack(value[-_OFFSETS.size :])
            found.append((first + count, "a producer's last record"))
    # Of equal offsets, `max` returns the first, which has the more reliable source.
    return max((one for one in found if one[0] <= MAX_OFFSET), key=lambda one: one[0])


def _due_in(damaged: DamagedLog, lost: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the keys of rows `d` of deferred records that were lost."""
    for row, _ in damaged.rows(b"d"):
        if len(row) == DUE.size:
            offset = DUE.unpack(row)[1]
            if any(first <= offset < end for first, end in lost):
                yield row


# -- the other rows ------------------------------------------------------------------------------------------


def _other_rows(damaged: DamagedLog, report: Report, now_us: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows to copy besides the entries: consumers, producers, writers and staged records."""
    listed = damaged.get(b"l")
    # Records that are due by now are not deferred anyway, so this covers everything that was listed
    # to consumers.
    yield b"l", max(int.from_bytes(listed or b"", "big"), now_us).to_bytes(8, "big")
    consumers = list(damaged.rows(b"c"))
    for name, value in consumers:
        try:
            cursor.decode("", value)
        except IrisError:
            shown = name.decode(errors="replace")
            report.also.append(
                f"the position of consumer {shown!r}: delete the consumer and create it again at the right offset"
            )
        yield b"c" + name, value
    producers = [(row, value) for row, value in damaged.rows(b"p") if len(value) >= _PRODUCER.size]
    writers = [
        (row, value) for row, value in damaged.rows(b"w") if _intact(b"w" + row, value, _LAST)
    ]
    for row, value in writers:
        yield b"w" + row, value
    for row, value in damaged.rows(b"v"):
        if _intact(b"v" + row, value):
            yield b"v" + row, value
        else:
            shown = row.decode(errors="replace")
            report.also.append(
                f"which attempts writer {shown!r} was committing in several partitions: compare them before it goes on"
            )
    sizes = {row: value for row, value in damaged.rows(b"u") if _intact(b"u" + row, value)}
    staged = 0
    for row, value in damaged.rows(b"t"):
        size = sizes.pop(row, None)
        if size is None or not _intact(b"t" + row, value):
            staged += 1
            continue
        yield b"t" + row, value
        yield b"u" + row, size
    if staged + len(sizes):
        report.also.append(
            f"{staged + len(sizes)} staged records: stage and commit their batch again"
        )
    if damaged.current:
        for row, value in producers:
            yield b"p" + row, value
        return
    report.also.append(
        "perhaps the latest state of consumers (they receive messages again), of writers (a batch that is committed again may be stored "
        "twice) and of staged records; some may be missing altogether"
    )
    report.also.append(
        f"the last appends of {len(producers)} producers: running producers continue, and report appends that were not answered"
    )


def _intact(key: bytes, value: bytes, layout: struct.Struct | None = None) -> bool:
    try:
        check_row(key, value)
    except (ValueError, struct.error):
        return False
    return layout is None or len(value) == 4 + layout.size


def _offset(row: bytes | None) -> int | None:
    """Return the offset in a row; None if there is none, or it is not valid."""
    if row is None or len(row) != KEY.size:
        return None
    offset: int = KEY.unpack(row)[0]
    return offset if offset <= MAX_OFFSET else None
