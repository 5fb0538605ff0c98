"""The log of one stream: sealed bundles by offset, and their indexes, in one RocksDB database.

Offsets number messages; a bundle of n messages occupies n offsets. `next` only grows, even when
retention has removed everything, so within a log's uuid an offset always names the same message.
From `oldest` until `next` the entries are contiguous: records, gaps (messages that were lost before
they could be stored) and holes (records that were removed). `read` follows this chain and never
skips a missing entry, because RocksDB's iterator simply ends at a damaged block.

Rows outside the records, by prefix: `i` identity, `o` oldest, `n` next, `s` segment summaries, `x`
their outlines, `j` and `r` of a log in a bucket (`bucket.replica`), `g` and `y` of
records that were moved there (`moved`), `z` shown end, `p` producers, `k` key hash -> its last record, `d` due time
and offset of deferred records, `c` cursors, `t` staged entries, `u` the size and time of each, `w`
writers' last batches, `v` what they commit in several partitions.
Rows `k` and `d` are written and deleted in the same batch as their record, so there are never more
of them than records.

The entries are in `chain`, which `retention` and `compaction` shorten. The layout of an entry is in
`records`, sums over many entries in `segments`, the producers' sequences in `producers`, staged
entries in `staging`, and RocksDB in `database`.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence, Set
from typing import Final, Protocol

from msgspec import Struct
from rocksdict import Rdict

from iris.keyfiles import sync_directory
from relay.store.batches import OWN_ROWS, PLACE_ROW, Batch, Copier, Op
from relay.store.chain import DUE, Chain
from relay.store.clock import Steps
from relay.store.compaction import Compaction
from relay.store.cursors import Cursors
from relay.store.database import Database
from relay.store.errors import (
    LogBusy,
    LogDamaged,
    LogError,
    LogExists,
    LogMissing,
    LogWriteFailed,
    RecordsAway,
    RecordsUnreachable,
)
from relay.store.identity import Identity, make
from relay.store.ids import Ids
from relay.store.offloading import Offloading
from relay.store.outcomes import Conflict, Outcome, Stored
from relay.store.producers import Producers
from relay.store.records import (
    ID_BYTES,
    KEY,
    MAX_OFFSET,
    Entry,
    Gap,
    Hole,
    Item,
    NewGap,
    Reason,
    Record,
    check_entry,
    check_row,
)
from relay.store.retention import Retention
from relay.store.segments import Limits
from relay.store.staging import Staging

LIMIT_ROW: Final = b"z"
COPY_BYTES: Final = 1 << 20


class Chunk(Struct, frozen=True):
    """The result of a read: `items` are contiguous and in offset order, and the last one ends at `next`."""

    items: list[Item]
    next: int
    """Offset at which to continue reading."""
    oldest: int
    high_water: int


class Tail(Protocol):
    """Says how much of a log may be shown, where that is less than it has."""

    end: int
    oldest: int


class Log:
    """The log of one stream. Open it with `open` or `create`; use it from one thread at a time.

    It has no clock: `now_us` is µs since 1970 on a wall clock that may be set, even back. After
    `LogWriteFailed`, reads still work and every write is refused until the log is reopened.
    """

    uuid: bytes
    """16 bytes. A log that is created again has another uuid."""
    epoch: int
    created_us: int
    definition: bytes
    """The stream's definition, opaque to the log."""

    def __init__(self, database: Database) -> None:
        """Use `open` or `create` instead. Raises LogDamaged or struct.error if the rows are inconsistent."""
        self._database = database
        self._path = database.path
        self._load_identity()
        self._chain = Chain(database)
        self._retention = Retention(self._chain)
        self._compaction = Compaction(self._chain)
        self.offloading = Offloading(self._chain, self._retention)
        """Moves the oldest records to objects of a bucket."""
        self.steps = Steps()
        self._tail: Tail | None = None
        limits = [one for (one,) in KEY.iter_unpack(database.get(LIMIT_ROW) or b"")]
        self.limit: int | None = limits[0] if limits else None
        """For a copy of a partition: where the part ends that may be shown; None if all of it may."""
        self.cut = limits[1:]
        """For a copy of partition 0: the limits of all partitions, which others may not have yet."""
        self.load_state()

    def load_state(self) -> None:
        """Read what the log has besides its records: at the start, and after rows of `state` were written.

        Raises LogDamaged, struct.error or ValueError if a row is malformed.
        """
        self._producers = Producers(self._database.rows(b"p"))
        self.cursors = Cursors(self._chain)
        self.staging = Staging(self._chain, self.cursors)
        """Entries that are written in advance, and are committed a batch at a time."""
        self.ids = Ids(self._database)
        """The owner sets its `window_us` and `now_us`."""

    # Opening and closing

    @classmethod
    def create(
        cls, path: str, *, uuid: bytes, definition: bytes, created_us: int, epoch: int = 0
    ) -> Log:
        """Create an empty log at `path`, whose parent directory must exist, and return it. A crash leaves a
        whole log or none.

        Raises:
            LogExists: `path` exists.
            LogWriteFailed: a disk write failed; there is nothing at `path`.
        """
        if len(uuid) != ID_BYTES:
            raise ValueError(f"uuid: {len(uuid)} bytes; a uuid has {ID_BYTES}")
        if os.path.lexists(path):
            raise LogExists(path, "the path exists")
        made = f"{path}.new"
        shutil.rmtree(made, ignore_errors=True)
        try:
            # Close the database before the rename: RocksDB's file lock is lost for the whole process as soon as
            # any descriptor of the lock file is closed.
            make(made, Identity(uuid, epoch, created_us, definition)).close()
            os.rename(made, path)
            sync_directory(os.path.dirname(os.path.abspath(path)))
        except OSError as err:
            raise LogWriteFailed(path, str(err)) from err
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return cls.open(path)

    @classmethod
    def open(cls, path: str) -> Log:
        """Open the log at `path`, with everything that was acknowledged.

        Reads the summaries and the unfinished segment. Damage elsewhere is found when it is read.

        Raises:
            LogMissing: there is no log.
            LogBusy: another process or object has it open.
            LogDamaged: it does not contain what was written. It is not repaired.
        """
        database = Database.open(path)
        try:
            return cls(database)
        except LogError:
            database.close()
            raise
        except (struct.error, ValueError) as err:
            database.close()
            raise LogDamaged(path, f"a row is malformed: {err}") from err

    @staticmethod
    def destroy(path: str) -> None:
        """Delete the log at `path`, damaged or not.

        Raises:
            LogMissing: there is no log.
            LogBusy: it is open, and was not changed.
            OSError: some files could not be deleted; call again.
        """
        if not os.path.isdir(path):
            raise LogMissing(path, "the directory does not exist")
        try:
            Rdict.destroy(path)
        except Exception as err:  # rocksdict raises nothing narrower
            if "/LOCK:" in str(err):
                raise LogBusy(path, "it is open in another process, or twice in this one") from err
        shutil.rmtree(path)

    def copy_to(self, copier: Copier, tail: Tail) -> None:
        """Give every further write to `copier`, which makes it durable: the disk is no longer synced. `tail` says how
        much of it is durable.
        """
        self._database.copier = copier
        self._tail = tail

    def copied(self) -> Iterator[list[Op]]:
        """Yield everything that the log has as writes, in parts of about 1 MiB.

        Between two parts the log may be written. Repeating the parts, and in their places the writes between
        them, makes a copy. Raises LogDamaged.
        """
        after = b""
        while ops := self._database.copy_rows(after, OWN_ROWS, COPY_BYTES):
            after = ops[-1].key
            yield ops
        start = KEY.pack(self._chain.local)
        while ops := self._database.copy_records(start, COPY_BYTES):
            start = ops[-1].key + b"\0"
            yield ops

    def note_copied(self, row: bytes) -> None:
        """Note in row `j` up to where its copy has everything that was written. Raises LogWriteFailed."""
        batch = Batch(self._database.records_handle)
        batch.put(PLACE_ROW, row)
        self._database.write(batch, self.next, sync=False)

    def copy_all(self) -> None:
        """Give the copier what a new, empty log has. Raises LogError."""
        batch = self._database.batch()
        for key, value in list(self._database.rows(b"")):
            batch.put(key, value)
        self._chain.write(batch, sync=True)

    def close(self) -> None:
        """Close the files. Idempotent. The log cannot be used afterwards."""
        self._database.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it is

    @property
    def database(self) -> Database:
        """Where the log is stored, for what copies it."""
        return self._database

    @property
    def oldest(self) -> int:
        """The first offset that is still stored; equal to `next` if there is none."""
        return self._chain.oldest

    @property
    def next(self) -> int:
        """The offset of the next message. Everything below is on disk, so this is also the high-water mark."""
        return self._chain.next

    @property
    def shown(self) -> int:
        """Where the part of the log ends that readers may be shown: `next`, unless a copy makes it durable, or it has
        a `limit`.
        """
        end = self._chain.next if self._tail is None else self._tail.end
        return end if self.limit is None else min(end, self.limit)

    @property
    def size_bytes(self) -> int:
        """Bytes of stored keys and values from `oldest` on."""
        return self._chain.size

    @property
    def local_bytes(self) -> int:
        """The part of `size_bytes` that is in the database; the rest is in objects of a bucket."""
        return self._chain.local_bytes

    @property
    def messages(self) -> int:
        """Messages from `oldest` on; a gap counts as one, a hole as none."""
        return self._chain.messages

    @property
    def failed(self) -> str | None:
        """Why writes are refused; None while they are accepted."""
        return self._database.failed

    def define(self, definition: bytes) -> None:
        """Replace the definition, with a sync. Raises LogWriteFailed."""
        batch = self._database.batch()
        batch.put(b"i", Identity(self.uuid, self.epoch, self.created_us, definition).pack())
        self._chain.write(batch, sync=True)
        self.definition = definition

    # Appending

    def append(self, entries: Sequence[Entry | NewGap], now_us: int) -> list[Outcome]:
        """Write `entries` and the queued staged entries in one batch with one sync. Returns the outcome of
        each entry, in order.

        A NewGap becomes a Gap of one offset. A refused entry does not hold up the entries after it,
        but later ones of the same producer are then out of order. Duplicates, by producer sequence
        or message id, are recognized before `expect` is checked. An entry whose due time has passed
        is not deferred. The message count is the publisher's claim, because a log cannot open the
        seal.

        Raises:
            ValueError: an entry is malformed. Nothing was written; the queued staged entries wait
                for the next call.
            LogWriteFailed: nothing was acknowledged. Producers that retry after a reopen learn what
                was stored.
        """
        counts = [1 if isinstance(entry, NewGap) else check_entry(entry) for entry in entries]
        draft = self._chain.draft(self.cursors.listed_us)
        draft.rows = self.staging.rows.put(draft.batch)
        outcomes: list[Outcome] = []
        try:
            for entry, count in zip(entries, counts, strict=True):
                outcome = None
                if not isinstance(entry, NewGap):
                    outcome = self._judge(entry, draft.next, now_us)
                if outcome is None:
                    outcome = Stored(draft.next, draft.next + count)
                    if outcome.next > MAX_OFFSET:
                        raise ValueError(f"end: the offsets of a log end at {MAX_OFFSET}")
                    if isinstance(entry, NewGap):
                        gap = Gap(draft.next, entry.count, entry.cause, now_us)
                        draft.add_item(gap, now_us)
                        outcomes.append(outcome)
                        continue
                    draft.add_entry(entry, outcome.first, count, now_us)
                    if entry.stamp is not None:
                        self._producers.take(entry.stamp, outcome.first, count, now_us)
                    if entry.id_hash is not None and self.ids.window_us:
                        self.ids.take(draft.batch, entry.id_hash, outcome.first, count)
                outcomes.append(outcome)
            for producer, row in self._producers.changes():
                draft.rows = True
                if row is None:
                    draft.batch.delete(b"p" + producer)
                else:
                    draft.batch.put(b"p" + producer, row)
            self._chain.finish(draft)
        except BaseException:
            self._producers.forget()
            self.ids.forget()
            raise
        self._producers.commit()
        self.ids.commit()
        self.staging.rows.written()
        return outcomes

    def copy(self, items: Sequence[Item], end: int, now_us: int) -> None:
        """Write the items of another log from `next` until `end`, in one batch with one sync.

        Offsets, times and holes are those of the other log. A deferred record is deferred here, too, so that the
        consumers of the other log can go on here.

        Raises:
            ValueError: an item is malformed, or the items are not contiguous up to `end`; nothing was written.
            LogWriteFailed: nothing was acknowledged.
        """
        draft = self._chain.draft(self.cursors.listed_us)
        for item in items:
            draft.add_item(item, now_us)
        if draft.next != end or end >= MAX_OFFSET:
            raise ValueError(
                f"items: they end at offset {draft.next}; they must end at {end}, below {MAX_OFFSET}"
            )
        self._chain.finish(draft)

    def limit_to(self, limit: int | None, cut: Sequence[int] = ()) -> None:
        """Show the log up to this offset; None: all of it. With a sync. Raises ValueError, LogWriteFailed."""
        if (limit, list(cut)) == (self.limit, self.cut):
            return
        if limit is not None and not (self.limit or 0) <= limit <= self.next:
            raise ValueError(f"shown: {limit} is not between {self.limit or 0} and {self.next}")
        batch = self._database.batch()
        if limit is None:
            batch.delete(LIMIT_ROW)
        else:
            batch.put(LIMIT_ROW, b"".join(map(KEY.pack, (limit, *cut))))
        self._chain.write(batch, sync=True)
        self.limit, self.cut = limit, list(cut)

    def trim(self) -> None:
        """Replace the records that were never shown by holes, because a batch may be there by half.

        Raises LogDamaged, LogWriteFailed.
        """
        at = self.next if self.limit is None else self.limit
        while at < self.next:
            chunk = self.read(at, COPY_BYTES, now_us=0)
            self.remove({item.first for item in chunk.items if isinstance(item, Record)})
            at = chunk.next

    def tend_ids(self) -> None:
        """Delete some of the message ids whose window has passed. Not synced. Raises LogWriteFailed."""
        if self.ids.count:
            rows = self._database.batch()
            if self.ids.expire(rows):
                self._chain.write(rows, sync=False)
            self.ids.commit()

    # Reading

    def read(
        self, start: int, max_bytes: int, *, now_us: int, deferred: bool = True, end: int | None = None
    ) -> Chunk:  # fmt: skip
        """Return about `max_bytes` of entries, at least one, beginning with the entry that contains `start`.

        A removed or expired record is a hole and counts with its size on disk, so a call never
        reads much more than `max_bytes`. A record that a later one of its key supersedes is
        returned until `compact` has run. With `deferred=False`, deferred records are holes too,
        before and after they are due; `due` lists them, and a read at their offset returns them. Stops at
        `end` (default: `next`), after the entry that contains the offset before it.

        Raises:
            ValueError: `start` is not between 0 and `next`.
            LogDamaged: the entry at `start` is not what was written. Entries before it can be read.
            RecordsAway: it is in the bucket, and is being fetched.
            RecordsUnreachable: it is in the bucket, which does not answer.
        """
        if not 0 <= start <= self._chain.next:
            raise ValueError(f"start: {start} is not between 0 and {self._chain.next}")
        items: list[Item] = []
        at = max(start, self._chain.oldest)
        if start < at:
            items.append(Hole(start, at, Reason.RETENTION))
        used = 0
        try:
            for item, size in self._chain.walk(at) if end is None or at < end else ():
                shown = _shown(item, now_us, deferred)
                last = items[-1] if items else None
                if (
                    isinstance(shown, Hole)
                    and isinstance(last, Hole)
                    and shown.reason == last.reason
                ):
                    items[-1] = Hole(last.first, shown.next, last.reason)
                else:
                    items.append(shown)
                at = item.next
                used += size
                if used >= max_bytes or (end is not None and at >= end):
                    break
        except (LogDamaged, RecordsAway, RecordsUnreachable):
            if not items:
                raise
        return Chunk(items, at, self._chain.oldest, self._chain.next)

    def find(self, time_us: int) -> int:
        """Return the offset of the first entry that was stored at `time_us` or later; `next` if there is none.

        Raises LogDamaged, RecordsAway, RecordsUnreachable.
        """
        for segment in self._chain.every:
            if segment.newest_us >= time_us and segment.entries:
                start = max(segment.first, self._chain.oldest)
                if start < self._chain.moved.end:
                    start = self._chain.moved.start_at(segment.first, time_us)
                for item, _ in self._chain.walk(start, segment.next):
                    if not isinstance(item, Hole) and item.stored_us >= time_us:
                        return item.first
        return self._chain.next

    def due(
        self, now_us: int, *, after: tuple[int, int] = (0, 0), limit: int = 1024
    ) -> list[tuple[int, int]]:
        """Return sorted (due time, offset) pairs of up to `limit` deferred records that are due, beginning
        after `after`.

        A record is listed until it is removed. No new record sorts before a due time that was
        passed to `cursors.listed`, so the last pair is all that a consumer has to remember. Raises
        LogDamaged.
        """
        found: list[tuple[int, int]] = []
        for row, _ in self._database.rows(b"d", DUE.pack(*after)):
            due_us, offset = DUE.unpack(row)
            if due_us > now_us or len(found) >= limit:
                break
            if (due_us, offset) > after:
                found.append((due_us, offset))
        return found

    def verify(self) -> None:
        """Read what the database has, and return if it contains what was written. Raises LogDamaged."""
        for _ in self._chain.walk(self._chain.local):
            pass
        for prefix in (b"c", b"d", b"k", b"p", b"s", b"t", b"u", b"v", b"w", b"x"):
            for row, value in self._database.rows(prefix):
                if prefix in (b"t", b"u", b"v", b"w"):
                    try:
                        check_row(prefix + row, value)
                    except (ValueError, struct.error) as err:
                        what = f"a row {prefix.decode()!r} is malformed: {err}"
                        raise LogDamaged(self._path, what) from err

    # Retention and compaction

    def enforce(self, limits: Limits, now_us: int) -> int:
        """Remove the oldest entries until `limits` hold, and return how many messages were removed.

        Cheap if there is nothing to do, because the sums are in memory. Not synced: a power cut may
        restore entries. Disk space is freed in lumps of 64 MiB. Entries are removed whole.

        Raises:
            LogDamaged: the first segment cannot be read. Entries below `oldest` were removed before that.
            LogWriteFailed: the same; disk space may not have been freed.
        """
        before = self._chain.messages
        self._retention.enforce(limits, now_us)
        return before - self._chain.messages

    def compact(self, now_us: int) -> bool:
        """Remove expired records, and all but the last record of each key; return whether the pass is
        complete.

        Each call continues where the last one stopped and reads about 64 MiB. After a complete pass
        the next call starts another. Only segments with keys or expired records are read. Not
        synced. Removed records become holes; adjacent holes with the same reason become one. A
        tombstone is the last record of its key, so it stays until it expires, if it does.

        Raises:
            LogDamaged: a segment cannot be read; it was not changed.
            LogWriteFailed: the segment was either not changed or compacted.
        """
        return self._compaction.step(now_us)

    def remove(self, offsets: Set[int]) -> None:
        """Replace the records that begin at these offsets by holes. Not synced: a power cut may restore them.

        Reads the segments that hold them, at most 8 MiB each. Raises as `compact`.
        """
        self._compaction.remove(offsets)

    # Inside

    def _load_identity(self) -> None:
        try:
            found = Identity.unpack(self._database.get(b"i") or b"")
        except ValueError as err:
            raise LogDamaged(self._path, str(err)) from err
        self.uuid, self.epoch, self.created_us = found.uuid, found.epoch, found.created_us
        self.definition = found.definition
        if self.uuid != self._database.uuid:
            raise LogDamaged(
                self._path, f"its file MARK belongs to log {self._database.uuid.hex()}"
            )

    def _judge(self, entry: Entry, at: int, now_us: int) -> Outcome | None:
        if entry.stamp is not None:
            outcome = self._producers.judge(entry.stamp)
            if outcome is not None:
                return outcome
        if entry.id_hash is not None and self.ids.window_us:
            found = self.ids.find(entry.id_hash)
            if found is not None and found.first is not None and found.next is not None:
                if (
                    entry.stamp is not None
                ):  # the message is stored: the producer continues after it
                    self._producers.take(entry.stamp, found.first, found.next - found.first, now_us)
                return found
        if entry.expect is not None and entry.expect != at:
            return Conflict(at)
        return None


def _shown(item: Item, now_us: int, deferred: bool) -> Item:
    """Return `item` as a reader sees it.

    An expired record becomes a hole, and so does a deferred record if `deferred` is False.
    """
    if isinstance(item, Record):
        if 0 < item.expires_us <= now_us:
            return Hole(item.first, item.next, Reason.EXPIRED)
        if item.deferred and not deferred:
            return Hole(item.first, item.next, Reason.DEFERRED)
    return item
