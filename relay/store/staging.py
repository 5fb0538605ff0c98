"""Staging: entries that are written to a log in advance, and appended to it by a commit, all or none.

The rows are in `staged_rows`. Queued rows are written with the next entries that the log appends, or by the next
call here that changes rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from iris.wire.streams import Planned, PlannedPart
from relay.store.chain import Chain
from relay.store.cursors import Cursors
from relay.store.errors import LogWriteFailed
from relay.store.records import MAX_OFFSET, Entry, check_entry
from relay.store.staged_rows import Committed, Last, StagedRows


class Staging:
    """What is staged in one log, by writer, batch and attempt."""

    def __init__(self, chain: Chain, cursors: Cursors) -> None:
        """Raises LogDamaged, struct.error or ValueError if a row is damaged."""
        self._chain = chain
        self._cursors = cursors
        self.rows = StagedRows(chain.database)

    def stage(
        self, writer: str, batch: int, attempt: bytes, entries: Sequence[tuple[int, Entry]], now_us: int
    ) -> int:  # fmt: skip
        """Queue (sequence, entry) pairs of an attempt at a batch. The log's next `append`, even an empty one,
        writes them to disk.

        Returns their bytes: 0 if all are staged already, or if the batch is not later than the
        writer's last one.

        Raises:
            ValueError: an entry is malformed.
            StagingRefused: a limit is reached.
        """
        for _, entry in entries:
            check_entry(entry)
        return self.rows.stage(writer, batch, attempt, entries, now_us)

    def commit(
        self, writer: str, batch: int, attempts: Sequence[tuple[bytes, int]], now_us: int
    ) -> Committed:
        """Append the records of these (attempt, record count) pairs, in order, and drop what else is staged
        up to this batch.

        This is one write: either all records are there, with the writer's batch number, or nothing
        has changed. A repeated commit changes nothing.

        Raises:
            StagingRefused: a record is not staged, or a limit is reached.
            LogDamaged: a staged entry is not what was written.
            LogWriteFailed: the batch may turn out to be committed after a reopen.
        """
        done = self.rows.replay(writer, batch)
        if done is not None:
            return done
        database = self._chain.database
        if database.failed is not None:  # staged rows may be deleted already
            raise LogWriteFailed(database.path, database.failed)
        self._write_queued()
        self.rows.check(writer, batch, attempts, now_us)
        draft = self._chain.draft(self._cursors.listed_us)
        first = draft.next
        for entry, count in self.rows.read(writer, batch, attempts):
            if draft.next + count > MAX_OFFSET:
                raise ValueError(f"end: the offsets of a log end at {MAX_OFFSET}")
            draft.add_entry(entry, draft.next, count, now_us)
        last = Last(batch, first, draft.next, now_us, self.rows.commits(writer) + 1)
        self.rows.put_commit(draft.batch, writer, last)
        draft.rows = True
        self._chain.finish(draft)
        self.rows.committed(writer, last)
        return Committed(first, last.next, False)

    def plan(self, writer: str, batch: int, parts: list[PlannedPart], now_us: int) -> Planned:
        """Store what a batch commits in all partitions, with a sync, and return it; or return the writer's plan that is
        in force.

        Raises StagingRefused or LogWriteFailed.
        """
        self._write_queued()
        rows = self._chain.database.batch()
        made = self.rows.plan(rows, writer, batch, parts, now_us)
        if made.parts and self.rows.plans.get(writer) is None:
            self._chain.write(rows, sync=True)
            self.rows.plans.written(writer, made, now_us)
        return made

    def discard(self, writer: str, batch: int, attempts: Sequence[bytes]) -> int:
        """Delete the staged records of these attempts (empty: of all attempts at the batch), with a sync;
        return how many.

        Raises LogWriteFailed.
        """
        self._write_queued()
        rows = self._chain.database.batch()
        planned = not attempts and self.rows.plans.up_to(writer, batch) is not None
        dropped = self.rows.discard(rows, writer, batch, attempts)
        if dropped or planned:
            self._chain.write(rows, sync=True)
        return dropped

    def tend(self, now_us: int) -> int:
        """Delete expired attempts and free their disk space; return how many records were deleted.

        Raises LogWriteFailed.
        """
        dropped = 0
        if old := self.rows.expired(now_us):
            self._write_queued()
            rows = self._chain.database.batch()
            dropped = sum(self.rows.drop(rows, *place) for place in old)
            self._chain.write(rows, sync=False)
        self.rows.free()
        return dropped

    def _write_queued(self) -> None:
        """Write the queued rows, with a sync. Raises LogWriteFailed."""
        draft = self._chain.draft()
        draft.rows = self.rows.put(draft.batch)
        self._chain.finish(draft)
        self.rows.written()
