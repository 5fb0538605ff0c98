"""Checks a bucket, and compares it with the databases of one store. Changes nothing.

Every object of every journal is read and opened. What is there must lead from one object to the next, and from each
journal to the one that took it. Then the streams are made again beside the databases, and compared with them.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Final

from msgspec import Struct

from iris.crypto.keys import public_id
from relay.store.batches import OWN_ROWS, Op
from relay.store.bucket.history import (
    AHEAD,
    Beginning,
    Reader,
    Registration,
    beginning_of,
    registrations,
)
from relay.store.bucket.loading import NO_OFFSET
from relay.store.bucket.objects import Objects, patient
from relay.store.bucket.replica import Place, redo
from relay.store.bucket.sealing import (
    WINDOW,
    Ended,
    Fence,
    Intent,
    Numbered,
    ObjectDamaged,
    Rows,
    Sealer,
    hash_of,
    journal_key,
    registration_key,
)
from relay.store.bucket.seen import RolledBack, Seen
from relay.store.database import Database
from relay.store.errors import LogError
from relay.store.moved import Moved, MovedRecords
from relay.store.records import KEY

PART_BYTES: Final = 1 << 20


class Journal(Struct):
    """One journal of the bucket."""

    journal: str
    store: str
    """Address of the store that wrote it."""
    label: str
    first: int
    """The first object that is read: 1, or where the last checkpoint begins."""
    last: int
    """The last object before the fence or the end; `first` - 1 if there is none."""
    bytes: int
    checkpoints: int
    taken_by: str
    """The journal that has its streams now; empty if it was not taken."""


class Compared(Struct):
    """The database of one stream on the disk."""

    uuid: str
    state: str
    """same, behind, ahead, not held, different or unreadable."""
    detail: str


class Report(Struct):
    """What a check found."""

    bucket: str
    journals: list[Journal]
    streams: int
    """Logs that the bucket holds; those of dead letters count, too."""
    databases: list[Compared]
    skipped: str
    """Why no database was compared; empty if they were."""
    damage: list[str]
    garbage: list[str]
    """Objects that nobody reads any more, and databases that the store will delete."""


class Check:
    """One check of a bucket. Call `bucket`, and `disk` if the store of a directory is stopped; then read `report`."""

    def __init__(self, objects: Objects, sealer: Sealer) -> None:
        self.report = Report(objects.url, [], 0, [], "", [], [])
        self._objects = patient(objects)
        self._sealer = sealer
        self._known: dict[str, Registration] = {}
        self._beginnings: dict[str, Beginning] = {}
        self._fences: dict[str, Fence] = {}
        self._ends: dict[str, int] = {}
        self._intents: dict[str, dict[int, set[str]]] = {}
        self._moved: list[Moved] = []
        """Segment objects of the databases that are as the bucket says."""
        self._last: dict[bytes, tuple[str, int]] = {}
        """Stream -> the journal that holds it, and the object there with its last write (0: it has none there)."""

    async def bucket(self) -> None:
        """Read every object. Raises BucketError."""
        try:
            found = await registrations(self._objects, self._sealer)
        except ObjectDamaged as err:
            self.report.damage.append(str(err))
            return
        for number in range(len(found) + 1, len(found) + 1 + AHEAD):
            if await self._objects.exists(registration_key(number)):
                missing = registration_key(len(found) + 1)
                self.report.damage.append(
                    f"object {missing}: it is missing, and {registration_key(number)} is there; "
                    "restore it from a backup"
                )
                break
        self._known = {one.registered.journal: one for one in found}
        for one in found:
            try:
                await self._read(one)
            except ObjectDamaged as err:
                self.report.damage.append(str(err))
        for victim, fence in self._fences.items():
            self._check_fence(victim, fence)
        for name in self._holding():
            with contextlib.suppress(ObjectDamaged):  # it was reported above
                await self._note_streams(name)
        self.report.streams = len(self._last)

    async def _note_streams(self, name: str) -> None:
        async for journal, number, entry in self._walk(name):
            if isinstance(entry, Rows):
                self._last[entry.uuid] = name, number if journal == name else 0
            else:
                self._last.pop(entry.uuid, None)

    async def seen(self, directory: Path) -> None:
        """Compare with what the store that has its logs in `directory` has seen. Raises BucketError, ConfigError."""
        try:
            await Seen(self._objects, self._sealer, directory).verify([])
        except RolledBack as err:
            self.report.damage.append(str(err))
        except ObjectDamaged:  # it was reported by `bucket`
            assert self.report.damage

    async def disk(self, directory: Path) -> None:
        """Compare the databases in `directory`, which nobody has open. Needs as much room there as they have.

        Raises BucketError, OSError.
        """
        paths = _databases(directory)
        if not paths or self.report.damage:
            if paths:
                self.report.skipped = "the streams on this disk were not compared, because the bucket is damaged"  # fmt: skip
            return
        with tempfile.TemporaryDirectory(prefix=".check-", dir=directory) as made:
            uuids = {bytes.fromhex(path.name) for path in paths}
            copies = await self._make_again(Path(made), uuids)
            try:
                for path in paths:
                    self._compare(path, copies.get(bytes.fromhex(path.name)))
            finally:
                for copy in copies.values():
                    copy.close()
        for moved in self._moved:
            await self._check_segment(moved)

    async def _check_segment(self, moved: Moved) -> None:
        """Check an object that has old records of a stream on this disk. Raises BucketError."""
        size = sum(chunk.size for chunk in moved.chunks)
        try:
            found = await self._objects.get_range(moved.key, 0, size + 1)
        except ObjectDamaged as err:
            self.report.damage.append(str(err))
            return
        if found is None:
            self.report.damage.append(
                f"object {moved.key}: it is missing; restore it from a backup"
            )
        elif hash_of(found) != moved.digest:
            self.report.damage.append(
                f"object {moved.key}: it is not what the store wrote; restore it from a backup"
            )

    # -- the bucket ------------------------------------------------------------------------------------------

    async def _read(self, one: Registration) -> None:
        """Read one journal. Raises BucketError, ObjectDamaged."""
        name = one.registered.journal
        beginning = self._beginnings[name] = await beginning_of(self._objects, self._sealer, one)
        intents = self._intents[name] = {}
        reader = Reader(self._objects, self._sealer, name, beginning)
        size = 0
        try:
            async for number, content in reader.rest():
                size += sum(_size(entry) for entry in content.entries)
                if taken := {e.victim for e in content.entries if isinstance(e, Intent)}:
                    intents[number] = taken
        finally:
            self._ends[name] = reader.number - 1
            if reader.fence is not None:
                self._fences[name] = reader.fence
            self.report.journals.append(
                Journal(
                    name, public_id(one.registered.store).hex(), one.registered.label, beginning.number, reader.number - 1,
                    size, beginning.checkpoints, reader.fence.by if reader.fence else "",
                )
            )  # fmt: skip
        await self._look_behind(name, reader.number + (reader.fence is not None), reader.fence is not None)  # fmt: skip
        for covered in beginning.covers:
            left = [
                number
                for number in range(covered.first, covered.end)
                if await self._objects.exists(journal_key(covered.journal, number))
            ]
            if left:
                self.report.garbage.append(
                    f"journal {covered.journal}: {len(left)} objects that a checkpoint of {name} covers; its store deletes them"
                )

    async def _look_behind(self, name: str, number: int, fenced: bool) -> None:
        """Look for objects behind the end of a journal."""
        there = [
            one
            for one in range(number, number + 2 * WINDOW)
            if await self._objects.exists(journal_key(name, one))
        ]
        if not there:
            return
        if there[-1] >= number + WINDOW and not (fenced or self._may_be_empty(name)):
            self.report.damage.append(
                f"object {journal_key(name, number)}: it is missing, and {journal_key(name, there[-1])} is there; "
                "restore it from a backup"
            )
        else:
            self.report.garbage.append(
                f"journal {name}: {len(there)} objects after its end, which were still being uploaded when it ended"
            )

    def _may_be_empty(self, name: str) -> bool:
        """Return whether a successor's checkpoint covers all of a journal. Its first object is deleted first."""
        return self._ends[name] < self._beginnings[name].number

    def _check_fence(self, victim: str, fence: Fence) -> None:
        successor = self._known.get(fence.by)
        says = f"journal {victim} was taken by {fence.by}"
        if successor is None:
            self.report.damage.append(
                f"{says}, and no such journal is registered; restore the objects below journals/ from a backup"
            )
        elif successor.number <= self._known[victim].number:
            self.report.damage.append(
                f"{says}, which is older than it; no store does that, so the bucket was changed by something else"
            )
        elif (
            fence.by in self._beginnings
            and self._beginnings[fence.by].number <= fence.intent <= self._ends[fence.by]
            and victim not in self._intents[fence.by].get(fence.intent, ())
        ):
            self.report.damage.append(
                f"{says}, but object {fence.intent} of that journal does not say so; restore it from a backup"
            )

    def _holding(self) -> list[str]:
        return [name for name in self._ends if name not in self._fences]

    async def _walk(self, name: str) -> AsyncIterator[tuple[str, int, Rows | Ended]]:
        """Yield (journal, number, entry) of what a journal holds, in order: what it took before what it wrote after.

        Raises BucketError, ObjectDamaged.
        """
        # Not by recursion: a store that restarts often has a long chain of journals.
        stack = [_Walked(name, self._objects_of(name))]
        while stack:
            one = stack[-1]
            if one.content is not None:
                content, one.content = one.content, None
                for entry in content.entries:
                    if isinstance(entry, Rows | Ended):
                        yield one.journal, one.number, entry
                continue
            item = await anext(one.rest, None)
            if item is None:
                stack.pop()
                continue
            one.number, one.content = item
            for victim in sorted(self._intents[one.journal].get(one.number, ())):
                fence = self._fences.get(victim)
                if (
                    victim in self._beginnings
                    and fence is not None
                    and (fence.by, fence.intent) == (one.journal, one.number)
                ):
                    stack.append(_Walked(victim, self._objects_of(victim)))

    def _objects_of(self, name: str) -> AsyncIterator[tuple[int, Numbered]]:
        return Reader(self._objects, self._sealer, name, self._beginnings[name]).rest()

    # -- the disk --------------------------------------------------------------------------------------------

    async def _make_again(self, directory: Path, uuids: set[bytes]) -> dict[bytes, Database]:
        """Return what the bucket has of these streams, as databases in `directory`."""
        copies: dict[bytes, Database] = {}
        for name in self._holding():
            async for _, _, entry in self._walk(name):
                if entry.uuid not in uuids:
                    continue
                if isinstance(entry, Ended):
                    if entry.uuid in copies:
                        copies.pop(entry.uuid).close()
                        shutil.rmtree(directory / entry.uuid.hex())
                    continue
                if entry.uuid not in copies:
                    path = directory / entry.uuid.hex()
                    copies[entry.uuid] = Database.create(str(path))
                    copies[entry.uuid].make_mark(entry.uuid, NO_OFFSET)
                batch = copies[entry.uuid].batch()
                batch.apply(entry.ops)
                copies[entry.uuid].write(batch, NO_OFFSET, sync=False)
        return copies

    def _compare(self, path: Path, copy: Database | None) -> None:
        try:
            database = Database.open(str(path))
        except LogError as err:
            self._note(path, "unreadable", f"{err}; the store restores it from the bucket at its next start")  # fmt: skip
            return
        try:
            state, detail = self._compared(database, copy, bytes.fromhex(path.name))
        except LogError as err:
            state, detail = "unreadable", str(err)
        finally:
            database.close()
        self._note(path, state, detail)

    def _compared(self, database: Database, copy: Database | None, uuid: bytes) -> tuple[str, str]:
        held, number = self._last.get(uuid, ("", 0))
        if copy is None or not held:
            return (
                "not held",
                "the bucket does not have it for this store; the store deletes it at its next start",
            )
        place = Place.of(database)
        if place is None or place.journal != held or place.number < number:
            return (
                "behind",
                "the store updates it, or restores it from the bucket, at its next start",
            )
        if unsent := redo(database, self._ends[held]):
            return "ahead", f"{len(unsent)} writes that the bucket does not have; the store adds them at its next start"  # fmt: skip
        for ours, theirs in zip_longest(_content(database), _content(copy)):
            if ours != theirs:
                key = (ours or theirs).key
                return "different", f"key {key.hex()} has another value than in the bucket; delete {database.path}, then the store restores it at its next start"  # fmt: skip
        self._moved += MovedRecords(database).every
        return "same", ""

    def _note(self, path: Path, state: str, detail: str) -> None:
        self.report.databases.append(Compared(path.name, state, detail))
        if state in ("different", "unreadable"):
            self.report.damage.append(f"database {path}: {detail}")
        elif state == "not held":
            self.report.garbage.append(f"database {path}: {detail}")


class _Walked:
    """A journal that is read, and the object that waits for what it took."""

    def __init__(self, journal: str, rest: AsyncIterator[tuple[int, Numbered]]) -> None:
        self.journal = journal
        self.rest = rest
        self.number = 0
        self.content: Numbered | None = None


def _databases(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.iterdir()) if path.is_dir() and len(path.name) == 32]


def _size(entry: object) -> int:
    return sum(len(op.key) + len(op.value) for op in entry.ops) if isinstance(entry, Rows) else 0


def _content(database: Database) -> Iterator[Op]:
    """Yield everything that the copy of a database has."""
    after = b""
    while rows := database.copy_rows(after, OWN_ROWS, PART_BYTES):
        yield from rows
        after = rows[-1].key
    # What is below is freed in lumps, or is in segment objects.
    (oldest,) = KEY.unpack(database.get(b"o") or bytes(KEY.size))
    start = KEY.pack(max(oldest, MovedRecords(database).end))
    while records := database.copy_records(start, PART_BYTES):
        yield from records
        start = records[-1].key + b"\0"
