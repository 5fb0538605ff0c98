"""One stream's log: sealed bundles by offset, and what goes with them, in one RocksDB.

Offsets number messages; a bundle of n messages takes n of them. `next` only grows, also when retention took everything, so
an offset names the same message for ever within a log's uuid. From `oldest` until `next` entries lie side by side:
records, gaps (messages that could not be taken) and holes (records that were taken out). `read` follows that
chain and never steps over a break, since RocksDB's iterator simply ends where a block is damaged.

Outside the records, by prefix: `i` identity, `o` oldest, `n` next, `s` segment summaries, `x` their outlines, `p` producers, `k` key
hash -> its last record, `d` due time and offset of deferred records, `c` cursors, `t` staged entries, `u` what is known of
each without reading it, `w` writers' last batches. Rows of `k` and `d` come and go in the batch of their record, so there are
never more of them than records.

The entries themselves are the `chain`, which `retention` and `compaction` shorten; the bytes of an entry are in `records`,
sums over many in `segments`, who appended what in `producers`, what is to be appended by a commit in `staged`, RocksDB in `database`.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from rocksdict import Rdict

from iris.keyfiles import sync_directory
from relay.store.chain import DUE, Chain, Draft
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
)
from relay.store.identity import Identity, make
from relay.store.ids import Ids
from relay.store.outcomes import Conflict, Outcome, Stored
from relay.store.producers import Producers
from relay.store.records import (
    ID_BYTES,
    Entry,
    Gap,
    Hole,
    Item,
    Note,
    Reason,
    Record,
    check_entry,
    check_row,
)
from relay.store.retention import Retention
from relay.store.segments import Limits
from relay.store.staged_rows import Committed, Last, StagedRows

MAX_OFFSET: Final = 1 << 63


class Chunk(Struct, frozen=True):
    """What a read found: `items` lie side by side in offset order, the last one ends at `next`."""

    items: list[Item]
    next: int
    """Where to read on."""
    oldest: int
    high_water: int


class Log:
    """The log of one stream. Open one with `open` or `create`; use it from one thread at a time.

    It has no clock: `now_us` is µs since 1970 by a clock that may be set, also back. After `LogWriteFailed` reads go on
    and every write is refused until the log is opened again.
    """

    uuid: bytes
    """16 bytes. A log that is created again has another."""
    epoch: int
    created_us: int
    definition: bytes
    """Opaque to the log."""

    def __init__(self, database: Database) -> None:
        """Use `open` or `create`. Raises LogDamaged or struct.error if the rows do not fit together."""
        self._database = database
        self._path = database.path
        self._load_identity()
        self._chain = Chain(database)
        self._retention = Retention(self._chain)
        self._compaction = Compaction(self._chain)
        self._producers = Producers(database.rows(b"p"))
        self.staged = StagedRows(database)
        self.cursors = Cursors(self._chain)
        self.steps = Steps()
        self.ids = Ids(database)
        """Its window and time are the owner's to set."""

    # Opening and closing

    @classmethod
    def create(
        cls, path: str, *, uuid: bytes, definition: bytes, created_us: int, epoch: int = 0
    ) -> Log:
        """Return a new, empty log at `path`, whose parent directory exists. It is there whole or not at all.

        Raises:
            LogExists: something is at `path`.
            LogWriteFailed: the disk refused; nothing is at `path`.
        """
        if len(uuid) != ID_BYTES:
            raise ValueError(f"uuid: {len(uuid)} bytes; a uuid has {ID_BYTES}")
        if os.path.lexists(path):
            raise LogExists(path, "the path exists")
        made = f"{path}.new"
        shutil.rmtree(made, ignore_errors=True)
        try:
            # Nothing of it may be open when the directory gets its name: RocksDB's lock on the file is gone for all of
            # this process as soon as any descriptor of it is closed.
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
        """Return the log at `path` with everything that was acknowledged.

        Reads the summaries and the unfinished segment; damage elsewhere shows when it is read.

        Raises:
            LogMissing: there is none.
            LogBusy: it is open elsewhere.
            LogDamaged: it does not hold what was written. It is not repaired.
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
        """Remove the log at `path`, damaged or not.

        Raises:
            LogMissing: there is none.
            LogBusy: it is open; it was not touched.
            OSError: files are left; call again.
        """
        if not os.path.isdir(path):
            raise LogMissing(path, "the directory does not exist")
        try:
            Rdict.destroy(path)
        except Exception as err:  # rocksdict raises nothing narrower
            if "/LOCK:" in str(err):
                raise LogBusy(path, "it is open in another process, or twice in this one") from err
        shutil.rmtree(path)

    def close(self) -> None:
        """Give the files back; idempotent. The log cannot be used any more."""
        self._database.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it is

    @property
    def oldest(self) -> int:
        """The first offset that is kept; equal to `next` when nothing is."""
        return self._chain.oldest

    @property
    def next(self) -> int:
        """The offset of the next message. Everything below it is on disk: it is the high-water mark too."""
        return self._chain.next

    @property
    def size_bytes(self) -> int:
        """Stored keys and values from `oldest` on."""
        return self._chain.size

    @property
    def messages(self) -> int:
        """Messages from `oldest` on; a gap counts one, a hole none."""
        return self._chain.messages

    @property
    def failed(self) -> str | None:
        """Why writes are refused, None while they are not."""
        return self._database.failed

    def define(self, definition: bytes) -> None:
        """Replace the definition; synced. Raises LogWriteFailed."""
        batch = self._database.batch()
        batch.put(b"i", Identity(self.uuid, self.epoch, self.created_us, definition).pack())
        self._chain.write(batch, sync=True)
        self.definition = definition

    # Appending

    def append(self, entries: Sequence[Entry | Note], now_us: int) -> list[Outcome]:
        """Write `entries`, and what was staged, in one batch with one sync; return the outcome of each entry, in order.
        A Note becomes a Gap of one offset.

        An entry that is refused does not hold up those after it, but a later one of the same producer is then out of
        order. A duplicate, of a producer or of a message's id, is known as one before `expect` is looked at. An entry whose due time has come is not
        deferred. The message count is the publisher's: nothing here can look under the seal.

        Raises:
            ValueError: an entry is malformed; nothing was written, and what was staged waits for the next call.
            LogWriteFailed: nothing was acknowledged. Producers that retry after a reopen learn what was stored.
        """
        counts = [1 if isinstance(entry, Note) else check_entry(entry) for entry in entries]
        draft = self._draft()
        draft.rows = self.staged.put(draft.batch)
        outcomes: list[Outcome] = []
        try:
            for entry, count in zip(entries, counts, strict=True):
                outcome = None
                if not isinstance(entry, Note):
                    outcome = self._judge(entry, draft.next, now_us)
                if outcome is None:
                    outcome = Stored(draft.next, draft.next + count)
                    if outcome.next > MAX_OFFSET:
                        raise ValueError(f"end: the offsets of a log end at {MAX_OFFSET}")
                    if isinstance(entry, Note):
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
        self.staged.written()
        return outcomes

    def copy(self, items: Sequence[Item], end: int, now_us: int) -> None:
        """Write what another log holds from `next` until `end`, as it stands there, in one batch with one sync.

        Offsets, times and holes are the other log's. What is due by now is not deferred: it stands where it is.

        Raises:
            ValueError: an item is malformed, or they do not lie side by side up to there; nothing was written.
            LogWriteFailed: nothing was acknowledged.
        """
        draft = self._draft()
        for item in items:
            draft.add_item(item, now_us)
        if draft.next != end or end >= MAX_OFFSET:
            raise ValueError(
                f"items: they end at offset {draft.next}; they must end at {end}, below {MAX_OFFSET}"
            )
        self._chain.finish(draft)

    # Staging

    def stage(
        self, writer: str, batch: int, attempt: bytes, entries: Sequence[tuple[int, Entry]], now_us: int
    ) -> int:  # fmt: skip
        """Take (sequence, entry) pairs of an attempt at a batch; the next `append` puts them on disk, if of nothing else.

        Return how many bytes that will be: 0 if all is staged, or the batch is not above the writer's last.

        Raises:
            ValueError: an entry is malformed.
            StagingRefused: a bound is reached.
        """
        for _, entry in entries:
            check_entry(entry)
        return self.staged.stage(writer, batch, attempt, entries, now_us)

    def commit(
        self, writer: str, batch: int, attempts: Sequence[tuple[bytes, int]], now_us: int
    ) -> Committed:
        """Append what (attempt, records) pairs staged, in order, and drop all else that was staged for this batch or an earlier one.

        One write: all of it is there, with the writer's number, or nothing has changed. Again it changes nothing.

        Raises:
            StagingRefused: something is not staged, or a bound is reached.
            LogDamaged: a staged entry is not what was written.
            LogWriteFailed: it may be found committed after a reopen.
        """
        done = self.staged.replay(writer, batch)
        if done is not None:
            return done
        if self._database.failed is not None:  # what is staged may be half gone
            raise LogWriteFailed(self._path, self._database.failed)
        self.append((), now_us)
        self.staged.check(writer, batch, attempts, now_us)
        draft = self._draft()
        first = draft.next
        for entry, count in self.staged.read(writer, batch, attempts):
            if draft.next + count > MAX_OFFSET:
                raise ValueError(f"end: the offsets of a log end at {MAX_OFFSET}")
            draft.add_entry(entry, draft.next, count, now_us)
        last = Last(batch, first, draft.next, now_us, self.staged.commits(writer) + 1)
        self.staged.put_commit(draft.batch, writer, last)
        draft.rows = True
        self._chain.finish(draft)
        self.staged.committed(writer, last)
        return Committed(first, last.next, False)

    def discard(self, writer: str, batch: int, attempts: Sequence[bytes], now_us: int) -> int:
        """Drop what these attempts staged, or all attempts at the batch; return how many records. Synced. Raises LogWriteFailed."""
        self.append((), now_us)
        rows = self._database.batch()
        dropped = self.staged.discard(rows, writer, batch, attempts)
        if dropped:
            self._chain.write(rows, sync=True)
        return dropped

    def tend_ids(self) -> None:
        """Forget ids of messages whose window has passed, some of them. Not synced. Raises LogWriteFailed."""
        if self.ids.count:
            rows = self._database.batch()
            if self.ids.expire(rows):
                self._chain.write(rows, sync=False)
            self.ids.commit()

    def tend_staged(self, now_us: int) -> int:
        """Drop attempts that are too old, give disk space back; return how many records went. Raises LogWriteFailed."""
        dropped = 0
        if old := self.staged.expired(now_us):
            self.append((), now_us)
            rows = self._database.batch()
            dropped = sum(self.staged.drop(rows, *place) for place in old)
            self._chain.write(rows, sync=False)
        self.staged.free()
        return dropped

    # Reading

    def read(self, start: int, max_bytes: int, *, now_us: int, deferred: bool = True) -> Chunk:
        """Return entries from the one that contains `start` on, until they have about `max_bytes`; at least one.

        What was removed or has expired is a hole and counts by its size on disk, so a call never reads much more than
        `max_bytes`. A record that a later one of its key supersedes is shown until `compact` has run.
        With `deferred=False` records that were appended for later are holes too, before and after they are
        due: `due` names them, and reading at their offset gets them.

        Raises:
            ValueError: `start` is not between 0 and `next`.
            LogDamaged: the entry there is not what was written. Those before it can be read.
        """
        if not 0 <= start <= self._chain.next:
            raise ValueError(f"start: {start} is not between 0 and {self._chain.next}")
        items: list[Item] = []
        at = max(start, self._chain.oldest)
        if start < at:
            items.append(Hole(start, at, Reason.RETENTION))
        used = 0
        try:
            for item, size in self._chain.walk(at):
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
                if used >= max_bytes:
                    break
        except LogDamaged:
            if not items:
                raise
        return Chunk(items, at, self._chain.oldest, self._chain.next)

    def find(self, time_us: int) -> int:
        """Return the offset of the first entry that was stored at `time_us` or later, else `next`.

        Raises LogDamaged.
        """
        for segment in self._chain.every:
            if segment.newest_us >= time_us and segment.entries:
                for item, _ in self._chain.walk(
                    max(segment.first, self._chain.oldest), segment.next
                ):
                    if not isinstance(item, Hole) and item.stored_us >= time_us:
                        return item.first
        return self._chain.next

    def due(
        self, now_us: int, *, after: tuple[int, int] = (0, 0), limit: int = 1024
    ) -> list[tuple[int, int]]:
        """Return (due time, offset) of up to `limit` deferred records that are due, in that order, later than `after`.

        Each is listed until its record is removed. None comes to stand before one that `cursors.listed` was told of, so the last pair is
        all that a consumer has to remember. Raises LogDamaged.
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
        """Read all of it, and return if it is what was written. Raises LogDamaged."""
        for _ in self._chain.walk(self._chain.oldest):
            pass
        for prefix in (b"c", b"d", b"k", b"p", b"s", b"t", b"u", b"w", b"x"):
            for row, value in self._database.rows(prefix):
                if prefix in (b"t", b"u", b"w"):
                    try:
                        check_row(prefix + row, value)
                    except (ValueError, struct.error) as err:
                        what = f"a row {prefix.decode()!r} is malformed: {err}"
                        raise LogDamaged(self._path, what) from err

    # Retention and compaction

    def enforce(self, limits: Limits, now_us: int) -> int:
        """Drop the oldest entries until `limits` hold, and return how many messages went.

        Cheap when there is nothing to do: the sums are in memory. Not synced: a power cut may bring entries back. Disk space
        comes back in lumps of 64 MiB. A whole entry goes or none of it.

        Raises:
            LogDamaged: the first segment cannot be read; what went before it is gone, as `oldest` says.
            LogWriteFailed: likewise; space may not have come back.
        """
        before = self._chain.messages
        self._retention.enforce(limits, now_us)
        return before - self._chain.messages

    def compact(self, now_us: int) -> bool:
        """Take out expired records, and all but the last of each key; return whether that is now done.

        Each call goes on where the last one stopped and reads about 64 MiB; when a pass has ended the next
        call starts another. Only segments that hold keys, or something that has expired, are read. Not synced.
        Holes keep the place of what went; neighbours of one reason become one. A tombstone is the last record of
        its key and stays, until it expires if it has an expiry.

        Raises:
            LogDamaged: a segment cannot be read; it is as it was.
            LogWriteFailed: the segment is as it was, or compacted.
        """
        return self._compaction.step(now_us)

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

    def _draft(self) -> Draft:
        draft = self._chain.draft()
        draft.listed_us = self.cursors.listed_us
        return draft

    def _judge(self, entry: Entry, at: int, now_us: int) -> Outcome | None:
        if entry.stamp is not None:
            outcome = self._producers.judge(entry.stamp)
            if outcome is not None:
                return outcome
        if entry.id_hash is not None and self.ids.window_us:
            found = self.ids.find(entry.id_hash)
            if found is not None and found.first is not None and found.next is not None:
                if entry.stamp is not None:  # it has its place: the producer goes on behind it
                    self._producers.take(entry.stamp, found.first, found.next - found.first, now_us)
                return found
        if entry.expect is not None and entry.expect != at:
            return Conflict(at)
        return None


def _shown(item: Item, now_us: int, deferred: bool) -> Item:
    """Return `item` as a reader sees it."""
    if isinstance(item, Record):
        if 0 < item.expires_us <= now_us:
            return Hole(item.first, item.next, Reason.EXPIRED)
        if item.deferred and not deferred:
            return Hole(item.first, item.next, Reason.DEFERRED)
    return item
