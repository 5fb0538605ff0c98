"""Salvage: what can be read of a damaged log becomes a log again, with the same uuid and offsets, and a higher epoch.

Nothing is guessed. An entry is kept byte by byte, or a hole with a reason of its own stands in its place. The files of the damaged log
are kept beside it, until somebody deletes them. In the directory of streams, for the log UUID:

    UUID.look       the copy that the damaged log is read in; removed at the end
    UUID.salvaged   the new log, not whole before it was written, synced, closed, and read again
    UUID.damaged-N  the damaged log. It gets this name, and then UUID.salvaged becomes UUID

So UUID.salvaged beside UUID is a rest of a try that ended early, and goes. Without UUID it is the log: `finish` gives it its name.
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
from iris.wire.streams import dead_uuid
from relay.store import cursor
from relay.store.authority import Kept
from relay.store.chain import DUE, Chain, Draft
from relay.store.damaged_log import DamagedLog
from relay.store.database import room_to_open
from relay.store.ended import Ended
from relay.store.errors import LogBusy, LogDamaged, LogError
from relay.store.identity import Identity, make
from relay.store.log import MAX_OFFSET, Log
from relay.store.records import KEY, Hole, Reason, Record, check_row
from relay.store.segments import Segment

log = logging.getLogger(__name__)

ORDERS: Final = ".orders"
"""A file beside the log: its orders once more, for when the log cannot be opened."""
_NEW, _LOOK, _OLD = ".salvaged", ".look", ".damaged-"
_UUID: Final = re.compile("[0-9a-f]{32}")
_LAST: Final = struct.Struct("<QQQqQ")
_PRODUCER: Final = struct.Struct("<IQq")
_OFFSETS: Final = struct.Struct("<QI")
_WRITE_BYTES: Final = 8 << 20
_decode_kept: Final = msgspec.msgpack.Decoder(Kept).decode


class Report(Struct):
    """What became of one stream."""

    stream: str
    """Its name, "" if nothing says."""
    uuid: str
    state: str = "undamaged"
    """"undamaged", "salvaged" or "failed"."""
    error: str = ""
    """What was found damaged; of "failed", why nothing was changed."""
    records: int = 0
    """Kept, as are gaps and holes that were there before."""
    messages: int = 0
    """In these records."""
    oldest: int = 0
    next: int = 0
    end_from: str = ""
    """What `next` is known from."""
    epoch: int = 0
    lost: list[tuple[int, int]] = []
    """(first, next) of offsets that could not be read."""
    also: list[str] = []
    """What else was lost, or may be behind."""
    kept_at: str = ""
    """Where the damaged files are."""

    @property
    def lost_offsets(self) -> int:
        return sum(end - first for first, end in self.lost)


def salvage(
    directory: Path, wanted: str = "", report_done: Callable[[Report], object] = lambda _: None
) -> list[Report]:
    """Salvage the streams of a data directory that are damaged, or those of this name or uuid and their dead letters.

    Whoever calls holds the directory's lock. `report_done` is called with the report of each stream.

    Raises:
        ConfigError: no such stream is there.
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
    """Give a salvaged log its name, if whoever made it was stopped before. Raises OSError."""
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
        damage = _damage(path)
        if damage is None:
            return report
        report.error = damage
        with DamagedLog(str(path), str(look)) as damaged:
            _rebuild(damaged, path, made, report)
        if (wrong := _damage(made)) is not None:
            raise LogDamaged(str(made), f"the salvaged log is damaged too: {wrong}")
        report.kept_at = str(_swap(path, made))
        report.state = "salvaged"
    except (LogError, IrisError, OSError) as err:
        report.state, report.error = "failed", str(err)
        for rest in (made, look):
            shutil.rmtree(rest, ignore_errors=True)
    return report


def _damage(path: Path) -> str | None:
    """Return what is wrong with a log after reading all of it; None if nothing is.

    Raises:
        LogError: that cannot be said: it is open elsewhere, or the disk is full.
        OSError: its files may not be read.
    """
    for file in path.iterdir():
        if file.is_file():
            file.open("rb").close()  # what may not be read is not damaged
    room_to_open(str(path))
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
        room_to_open(str(path))  # a full disk looks like damage to RocksDB
        return err.what if err.offset is None else f"{err.what} (at offset {err.offset})"
    return None


def _swap(path: Path, made: Path) -> Path:
    """Put what was made in the place of the damaged log, and return where that is now."""
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
    """Return the names of streams by uuid, from the orders beside the logs; that of dead letters ends as everywhere."""
    names = {}
    parents = {}
    for uuid in uuids:
        names[uuid] = ""
        try:
            kept = _decode_kept(Path(f"{directory / uuid}{ORDERS}").read_bytes())
            parents[uuid] = kept.parent.hex()
            order = in_force(decode_order(signed.order) for signed in kept.orders)
            names[uuid] = order.definition.name if order is not None else ""
        except (OSError, msgspec.DecodeError, IrisError):
            continue
    for uuid, parent in parents.items():
        if parent and names.get(parent):
            names[uuid] = names[parent] + DEAD
    return names


# -- the new log ---------------------------------------------------------------------------------------------


def _rebuild(damaged: DamagedLog, path: Path, made: Path, report: Report) -> None:
    """Write what can be read of the damaged to a log of its own. Raises LogError, OSError."""
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
        for due in _due_in(damaged, lost):  # so that consumers that passed them are told
            rows[b"d" + due] = b""
        batch, size = database.batch(), 0
        for key, value in rows.items():
            batch.put(key, value)
            size += len(value)
            if size >= _WRITE_BYTES:
                chain.write(batch, sync=True)
                batch, size = database.batch(), 0
        chain.write(batch, sync=True)
        report.oldest, report.next, report.epoch = oldest, chain.next, identity.epoch
        if chain.next > end:
            report.end_from = "its last entry"
    finally:
        database.close()


def _copy_entries(damaged: DamagedLog, chain: Chain, end: int, report: Report) -> None:
    """Write the entries as they are, side by side: what is missing between them is a hole."""
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
    """Return who the new log is: the same, of a later epoch."""
    uuid = bytes.fromhex(path.name)
    row = damaged.get(b"i")
    try:
        found = Identity.unpack(row or b"")
        if found.uuid == uuid:
            return Identity(uuid, found.epoch + 1, found.created_us, found.definition)
        raise ConfigError(f"{path}: the log in this directory has another uuid, {found.uuid.hex()}")
    except ValueError as err:
        try:
            definition = Path(f"{path}{ORDERS}").read_bytes()
            _decode_kept(definition)
        except (OSError, msgspec.DecodeError) as none:
            raise LogDamaged(
                str(path), f"{err}, and the orders beside it cannot be read: {none}"
            ) from none
        report.also.append(
            f"its time of creation and its epoch; its orders come from {path.name}{ORDERS}"
        )
        # Epochs are counted, so the time in seconds is above all that were.
        return Identity(uuid, int(time.time()), 0, definition)


def _known_end(damaged: DamagedLog, rows: dict[bytes, bytes]) -> tuple[int, str]:
    """Return the highest offset below which all were given out, as anything but the entries says, and what says it."""
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
    # Of equals the first, which is the better witness.
    return max((one for one in found if one[0] <= MAX_OFFSET), key=lambda one: one[0])


def _due_in(damaged: DamagedLog, lost: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the due times of deferred records that were lost."""
    for row, _ in damaged.rows(b"d"):
        if len(row) == DUE.size:
            offset = DUE.unpack(row)[1]
            if any(first <= offset < end for first, end in lost):
                yield row


# -- the rows besides ----------------------------------------------------------------------------------------


def _other_rows(damaged: DamagedLog, report: Report, now_us: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield what goes over besides the entries: consumers, producers, writers, and what is staged."""
    listed = damaged.get(b"l")
    # What is due by now is not deferred anyway, so this is late enough for whatever consumers were told.
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
        (row, value) for row, value in damaged.rows(b"w") if _whole(b"w" + row, value, _LAST)
    ]
    for row, value in writers:
        yield b"w" + row, value
    sizes = {row: value for row, value in damaged.rows(b"u") if _whole(b"u" + row, value)}
    staged = 0
    for row, value in damaged.rows(b"t"):
        size = sizes.pop(row, None)
        if size is None or not _whole(b"t" + row, value):
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


def _whole(key: bytes, value: bytes, layout: struct.Struct | None = None) -> bool:
    try:
        check_row(key, value)
    except (ValueError, struct.error):
        return False
    return layout is None or len(value) == 4 + layout.size


def _offset(row: bytes | None) -> int | None:
    """Return the offset in a row; None if there is none, or it cannot be one."""
    if row is None or len(row) != KEY.size:
        return None
    offset: int = KEY.unpack(row)[0]
    return offset if offset <= MAX_OFFSET else None
