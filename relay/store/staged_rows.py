"""The staged entries of a log, by writer, batch and attempt. Readers do not see them until a commit
appends them.

Rows outside the records, with key = u8 length of the writer's name | name | u64 batch | attempt | u64 sequence:

    t key       the entry, with the layout of a record
    u key       u32 crc | u32 bytes of the body | u32 bytes of row t | i64 staged: what is needed without reading row t
    w writer    u32 crc | u64 batch | u64 first | u64 next | i64 committed | u64 commits: its last batch

A commit is one write: it copies entries into the chain, writes the writer's row, and deletes
everything staged for this or an earlier batch. So it happens completely or not at all.
docs/decisions/0017 says why entries are copied. `plans` has the batches of several partitions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from msgspec import Struct

from iris.errors import IrisError
from iris.wire.streams import COMMIT_BYTES, Planned, PlannedPart
from relay.store.batches import Batch
from relay.store.database import Database
from relay.store.errors import LogDamaged
from relay.store.plans import MAX_PLANS, Plans
from relay.store.records import (
    ID_BYTES,
    KEY,
    Entry,
    check_row,
    decode_staged,
    encode_record,
    encode_row,
)

STAGED_BYTES: Final = 1 << 30
"""Limit per log of the rows' bytes plus `ROW_BYTES` for each record. A record beyond it is refused."""
ROW_BYTES: Final = 512
"""What a record counts in addition to row `t`: memory, row `u`, and the time to read row `u` when
the log is opened.
"""
MAX_AHEAD: Final = 65_536
"""Records of an attempt that may arrive before an earlier one. Memory is used for each of them."""
MAX_RECORDS: Final = 1 << 32
MAX_WRITERS: Final = 4096
MAX_WRITER_BYTES: Final = 255
FORGET_US: Final = 7 * 86_400_000_000
"""A writer that has committed nothing for this long may be forgotten for a new one."""
FORGET_ONCE_US: Final = 3_600_000_000
"""A writer with a single commit may be forgotten after this time, before all others: most are jobs
that never run again.
"""
EXPIRE_US: Final = 86_400_000_000
"""An attempt is dropped this long after its last record was staged."""
LOOK_US: Final = 60_000_000
FREE_BYTES: Final = 64 << 20
"""Disk space of dropped rows is freed in lumps of about this size."""
RANGE_RECORDS: Final = 1000
"""Up to this many records are deleted row by row, more of them by range.

Deleting by range has a cost: after each write, the next read sorts all ranges that were ever deleted.
"""
FREE_RANGES: Final = 256
"""After this many deleted ranges the disk space is freed however little it is, because only that
removes the ranges.
"""
EXPIRE_RECORDS: Final = 65_536
"""Expired records are dropped about this many at a time."""
_SIZES: Final = struct.Struct("<IIq")
_LAST: Final = struct.Struct("<QQQqQ")


class StagingRefused(IrisError):
    """A call was refused and changed nothing.

    `code` is one of `streams.REFUSALS`: "staged", "full" or "invalid".
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Committed(Struct, frozen=True):
    """Offsets of a committed batch; None if a later batch was committed.

    `replayed`: it had been committed before.
    """

    first: int | None
    next: int | None
    replayed: bool


class Last(Struct, frozen=True):
    """The last committed batch of a writer."""

    batch: int
    first: int
    next: int
    committed_us: int
    commits: int
    """Number of batches that the writer committed, including this one."""


class _Attempt:
    """The staged records of an attempt: all sequences below `next`, and those in `ahead`."""

    __slots__ = ("ahead", "bytes", "next", "size", "staged_us")

    def __init__(self) -> None:
        self.next = 0
        self.ahead: set[int] = set()
        self.bytes = 0
        """Bytes of bodies."""
        self.size = 0
        """Bytes that count against `STAGED_BYTES`."""
        self.staged_us = 0

    def has(self, sequence: int) -> bool:
        return sequence < self.next or sequence in self.ahead

    def add(self, sequence: int, body_bytes: int, row_bytes: int, staged_us: int) -> None:
        self.bytes += body_bytes
        self.size += row_bytes + ROW_BYTES
        self.staged_us = max(self.staged_us, staged_us)
        self.ahead.add(sequence)
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1

    @property
    def records(self) -> int:
        return self.next + len(self.ahead)

    def sequences(self) -> Iterator[int]:
        return chain(range(self.next), self.ahead)


_Batches = dict[int, dict[bytes, _Attempt]]


def check_staged(key: bytes, value: bytes) -> None:
    """Raise ValueError or struct.error unless this is a row `t`, `u` or `w`, with its prefix."""
    if key[:1] == b"w":
        check_row(key, value)
        _LAST.unpack(value[4:])
        size = len(key[1:].decode().encode())
    elif key[:1] == b"u":
        check_row(key, value)
        _SIZES.unpack(value[4:])
        size = len(_unpack_key(key[1:])[0].encode())
    else:
        decode_staged(key, value)
        size = len(_unpack_key(key[1:])[0].encode())
    if not 0 < size <= MAX_WRITER_BYTES:
        raise ValueError(f"a writer name has 1 to {MAX_WRITER_BYTES} bytes")


class StagedRows:
    """The staged entries and the writers of one log.

    Methods that change rows add to a write that the caller executes.
    """

    def __init__(self, database: Database) -> None:
        """Read rows `u` and `w`. Raises LogDamaged, struct.error or ValueError if one is damaged."""
        self._database = database
        self._waiting: list[tuple[bytes, bytes]] = []
        """Rows for the next write."""
        self._staged: dict[str, _Batches] = {}
        self._writers: dict[str, Last] = {}
        """Writer -> its last batch. The one that committed longest ago is first."""
        self.plans = Plans(database)
        self.bytes = 0
        """Bytes that count against `STAGED_BYTES`."""
        self._freed = 0
        """Deleted bytes that may still be on disk, all between `_freed_from` and `_freed_until`."""
        self._freed_from = self._freed_until = b""
        self._ranges = 0
        """Deleted ranges that may still be on disk, between the same two keys."""
        self._look_us = 0
        writers = []
        for row, value in database.rows(b"w"):
            check_row(b"w" + row, value)
            writers.append((row.decode(), Last(*_LAST.unpack(value[4:]))))
        self._writers.update(sorted(writers, key=lambda pair: pair[1].committed_us))
        for row, value in database.rows(b"u"):
            check_row(b"u" + row, value)
            body_bytes, row_bytes, staged_us = _SIZES.unpack(value[4:])
            writer, batch, attempt, sequence = _unpack_key(row)
            state = self._batch(writer, batch).setdefault(attempt, _Attempt())
            state.add(sequence, body_bytes, row_bytes, staged_us)
            self.bytes += row_bytes + ROW_BYTES

    # -- staging ---------------------------------------------------------------------------------------------

    def stage(
        self, writer: str, batch: int, attempt: bytes, entries: Sequence[tuple[int, Entry]], now_us: int
    ) -> int:  # fmt: skip
        """Queue checked (sequence, entry) pairs that are not staged yet for the next `put`, and return
        their bytes.

        Entries of a batch that is not later than the writer's last one are ignored.

        Raises:
            StagingRefused: "full" if a limit is reached, "invalid" for a name, id or sequence that
                is not valid.
        """
        if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES or len(attempt) != ID_BYTES:
            raise StagingRefused(
                "invalid",
                f"a writer name has 1 to {MAX_WRITER_BYTES} bytes, an attempt id {ID_BYTES}",
            )
        if self.replay(writer, batch) is not None:
            return 0
        known = self._staged.get(writer, {}).get(batch, {}).get(attempt)
        state = known or _Attempt()
        new = {number: entry for number, entry in entries if not state.has(number)}
        if not new:
            return 0
        if max(new) >= MAX_RECORDS:
            raise StagingRefused(
                "invalid", f"record {max(new)}: an attempt has at most {MAX_RECORDS} records"
            )
        if len(state.ahead) + len(new) > MAX_AHEAD:
            raise StagingRefused(
                "full",
                f"record {state.next} is missing, and {MAX_AHEAD} later ones already wait for it",
            )
        if state.bytes + sum(len(entry.body) for entry in new.values()) > COMMIT_BYTES:
            raise StagingRefused(
                "full", f"an attempt has at most {COMMIT_BYTES} bytes; split the batch"
            )
        start = _pack_batch(writer, batch) + attempt
        rows = []
        for number, entry in new.items():
            row_key = start + KEY.pack(number)
            key = b"t" + row_key
            row = encode_record(key, entry, now_us, deferred=False)
            sizes = _SIZES.pack(len(entry.body), len(key) + len(row), now_us)
            rows.append((number, row_key, row, sizes))
        size = sum(len(row_key) + 1 + len(row) for _, row_key, row, _ in rows)
        if self.bytes + self.plans.bytes + size + len(rows) * ROW_BYTES > STAGED_BYTES:
            raise StagingRefused(
                "full",
                f"a stream stages at most {STAGED_BYTES} bytes; commit or discard a batch first",
            )
        self._batch(writer, batch)[attempt] = state
        for number, row_key, row, sizes in rows:
            self._waiting.append((b"t" + row_key, row))
            self._waiting.append((b"u" + row_key, encode_row(b"u" + row_key, sizes)))
            state.add(number, len(new[number].body), len(row_key) + 1 + len(row), now_us)
        self.bytes += size + len(rows) * ROW_BYTES
        return size

    def put(self, batch: Batch) -> bool:
        """Add the queued rows to a write; return whether there are any.

        They stay queued until `written` is called.
        """
        for key, value in self._waiting:
            batch.put(key, value)
        return bool(self._waiting)

    def written(self) -> None:
        """Clear the queue: the rows that `put` added are on disk."""
        self._waiting.clear()

    # -- committing ------------------------------------------------------------------------------------------

    def replay(self, writer: str, batch: int) -> Committed | None:
        """Return the offsets of a batch that is not later than the writer's last one; None if it is later."""
        last = self._writers.get(writer)
        if last is None or batch > last.batch:
            return None
        if batch == last.batch:
            return Committed(last.first, last.next, True)
        return Committed(None, None, True)

    def check(
        self, writer: str, batch: int, attempts: Sequence[tuple[bytes, int]], now_us: int
    ) -> None:
        """Return if these (attempt, record count) pairs are staged completely and may be committed.

        Raises:
            StagingRefused: "staged" names what is missing; "full" if a limit is reached; "invalid"
                if an attempt is named twice.
        """
        if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
            raise StagingRefused(
                "invalid",
                f"a writer name has 1 to {MAX_WRITER_BYTES} bytes, an attempt id {ID_BYTES}",
            )
        if len({attempt for attempt, _ in attempts}) < len(attempts):
            raise StagingRefused("invalid", "the call names an attempt twice")
        self._check_plan(writer, batch, attempts)
        staged = self._staged.get(writer, {}).get(batch, {})
        size = 0
        for attempt, count in attempts:
            state = staged.get(attempt)
            which = f"batch {batch} of writer {writer!r}, attempt {attempt.hex()}"
            if state is None:
                if count:
                    raise StagingRefused("staged", f"{which}: it is not staged; stage it again")
                continue  # an attempt without records, as the call says
            if state.next < count:
                raise StagingRefused(
                    "staged", f"{which}: record {state.next} of {count} is missing; stage it again"
                )
            if state.records > count:
                raise StagingRefused(
                    "staged",
                    f"{which}: {state.records} records are staged, but the commit names {count}",
                )
            size += state.bytes
        if size > COMMIT_BYTES:
            raise StagingRefused(
                "full", f"the batch has {size} bytes; at most {COMMIT_BYTES} are allowed. Split it"
            )
        self._writer_to_forget(writer, now_us)

    def read(
        self, writer: str, batch: int, attempts: Sequence[tuple[bytes, int]]
    ) -> Iterator[tuple[Entry, int]]:
        """Yield the entries of checked attempts in order, each with its message count.

        Raises LogDamaged, which names the entry.
        """
        for attempt, count in attempts:
            start = b"t" + _pack_batch(writer, batch) + attempt
            sequence = 0
            try:
                # Do not step past the last record: hundreds of thousands of deleted rows may follow it.
                for _, (row, value) in zip(range(count), self._database.rows(start), strict=False):
                    if row != KEY.pack(sequence):
                        raise ValueError("it is missing")
                    yield decode_staged(start + row, value)
                    sequence += 1
                if sequence < count:
                    raise ValueError("it is missing")
            except (ValueError, LogDamaged) as err:
                what = f"staged record {sequence} of attempt {attempt.hex()}, batch {batch} of writer {writer!r}"
                raise LogDamaged(self._database.path, f"{what}: {err}") from err

    def _check_plan(self, writer: str, batch: int, attempts: Sequence[tuple[bytes, int]]) -> None:
        """Raise StagingRefused if a plan is in force, and these are not its attempts in this partition."""
        planned = self.plans.up_to(writer, batch)
        if planned is not None and (planned.batch, self.plans.own(planned)) != (batch, [*attempts]):
            raise StagingRefused(
                "staged",
                f"the commit of batch {planned.batch} of writer {writer!r} was interrupted; commit that batch again first",
            )

    def plan(
        self, rows: Batch, writer: str, batch: int, parts: list[PlannedPart], now_us: int
    ) -> Planned:
        """Return the plan in force. If that is a new one, it was added to a write: call `plans.written` after it.

        Raises:
            StagingRefused: "full" if a limit is reached, "invalid" for a name or list that is not valid.
        """
        if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
            raise StagingRefused("invalid", f"a writer name has 1 to {MAX_WRITER_BYTES} bytes")
        if len({part.partition for part in parts}) < len(parts):
            raise StagingRefused("invalid", "the plan names a partition twice")
        if (known := self.plans.get(writer)) is not None:
            return known
        if not parts or self.replay(writer, batch) is not None:
            return Planned(batch, [])
        made = Planned(batch, parts)
        if self.bytes + self.plans.bytes + self.plans.size(made) > STAGED_BYTES:
            raise StagingRefused(
                "full",
                f"a stream stages at most {STAGED_BYTES} bytes; commit or discard a batch first",
            )
        if self.plans.full(now_us):
            raise StagingRefused(
                "full",
                f"{MAX_PLANS} commits over several partitions were interrupted, which is the limit; complete some of them first",
            )
        self._writer_to_forget(writer, now_us)
        self.plans.put(rows, writer, made, now_us)
        return made

    def commits(self, writer: str) -> int:
        """Return how many batches a writer has committed since it was last forgotten."""
        last = self._writers.get(writer)
        return last.commits if last is not None else 0

    def put_commit(self, rows: Batch, writer: str, last: Last) -> None:
        """Add a commit to a write: store `last` as the writer's last batch, and delete all rows staged up
        to it.

        Call `committed` when the write is done.
        """
        if (forgotten := self._writer_to_forget(writer, last.committed_us)) is not None:
            rows.delete(b"w" + forgotten.encode())
        key = b"w" + writer.encode()
        packed = _LAST.pack(last.batch, last.first, last.next, last.committed_us, last.commits)
        rows.put(key, encode_row(key, packed))
        if self.plans.up_to(writer, last.batch) is not None:
            self.plans.delete(rows, writer)
        batches = self._staged.get(writer, {})
        every = [(batch, one) for batch in batches if batch <= last.batch for one in batches[batch]]
        start, end = _pack_batch(writer, 0), _pack_batch(writer, last.batch + 1)
        self._drop_rows(rows, writer, every, start, end)

    def committed(self, writer: str, last: Last) -> None:
        """Update the tables: what `put_commit` added is on disk."""
        if (forgotten := self._writer_to_forget(writer, last.committed_us)) is not None:
            del self._writers[forgotten]
        self._writers.pop(writer, None)
        self._writers[writer] = last
        if self.plans.up_to(writer, last.batch) is not None:
            self.plans.end(writer)
        batches = self._staged.get(writer, {})
        for batch in [batch for batch in batches if batch <= last.batch]:
            for attempt in list(batches[batch]):
                self._forget(writer, batch, attempt)

    # -- dropping --------------------------------------------------------------------------------------------

    def discard(self, rows: Batch, writer: str, batch: int, attempts: Sequence[bytes]) -> int:
        """Add the deletion of these attempts (empty: all of the batch) to a write; return how many records
        that is.

        Raises:
            StagingRefused: "invalid" for a writer name that is not valid.
        """
        if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
            raise StagingRefused(
                "invalid",
                f"a writer name has 1 to {MAX_WRITER_BYTES} bytes, an attempt id {ID_BYTES}",
            )
        planned = self.plans.get(writer)
        if not attempts and planned is not None and planned.batch == batch:
            self.plans.delete(rows, writer)
            self.plans.end(writer)
        staged = self._staged.get(writer, {}).get(batch, {})
        chosen = {attempt for attempt in attempts or list(staged) if attempt in staged}
        if len(chosen) < len(staged):
            return sum(self.drop(rows, writer, batch, attempt) for attempt in chosen)
        every = [(batch, attempt) for attempt in chosen]
        start, end = _pack_batch(writer, batch), _pack_batch(writer, batch + 1)
        self._drop_rows(rows, writer, every, start, end)
        return sum(self._forget(writer, batch, attempt) for attempt in chosen)

    def expired(self, now_us: int) -> list[tuple[str, int, bytes]]:
        """Return expired attempts as (writer, batch, attempt).

        Searches once a minute, or at every call while there are many.
        """
        if not self._staged or now_us < self._look_us:
            return []
        found: list[tuple[str, int, bytes]] = []
        records = 0
        for writer, batches in self._staged.items():
            for batch, staged in batches.items():
                for attempt, state in staged.items():
                    if state.staged_us + EXPIRE_US <= now_us:
                        found.append((writer, batch, attempt))
                        records += state.records
                        if records >= EXPIRE_RECORDS:
                            return found
        self._look_us = now_us + LOOK_US
        return found

    def drop(self, rows: Batch, writer: str, batch: int, attempt: bytes) -> int:
        """Add the deletion of a staged attempt to a write; return how many records that is."""
        start = _pack_batch(writer, batch) + attempt
        end = start + b"\xff" * (KEY.size + 1)
        self._drop_rows(rows, writer, [(batch, attempt)], start, end)
        return self._forget(writer, batch, attempt)

    def free(self) -> None:
        """Free the disk space of deleted rows, if there is enough of it. Raises LogWriteFailed."""
        if self._freed < FREE_BYTES and self._ranges < FREE_RANGES:
            return
        for prefix in (b"t", b"u"):
            self._database.compact_rows(prefix + self._freed_from, prefix + self._freed_until)
        self._freed = self._ranges = 0
        self._freed_from = self._freed_until = b""

    def _drop_rows(
        self, rows: Batch, writer: str, attempts: Sequence[tuple[int, bytes]], start: bytes, end: bytes
    ) -> None:  # fmt: skip
        """Add the deletion of the rows of these (batch, attempt) to a write.

        No other rows are between `start` and `end`.
        """
        if not attempts:
            return
        states = [(one, self._staged[writer][one[0]][one[1]]) for one in attempts]
        if sum(state.records for _, state in states) > RANGE_RECORDS:
            for prefix in (b"t", b"u"):
                rows.delete_range(prefix + start, prefix + end)
                self._ranges += 1
        else:
            for (batch, attempt), state in states:
                first = _pack_batch(writer, batch) + attempt
                for sequence in state.sequences():
                    for prefix in (b"t", b"u"):
                        rows.delete(prefix + first + KEY.pack(sequence))
        self._freed_from = min(self._freed_from or start, start)
        self._freed_until = max(self._freed_until, end)

    def _forget(self, writer: str, batch: int, attempt: bytes) -> int:
        batches = self._staged[writer]
        state = batches[batch].pop(attempt)
        if not batches[batch]:
            del batches[batch]
        if not batches:
            del self._staged[writer]
        self.bytes -= state.size
        self._freed += state.size
        return state.records

    def _batch(self, writer: str, batch: int) -> dict[bytes, _Attempt]:
        return self._staged.setdefault(writer, {}).setdefault(batch, {})

    def _writer_to_forget(self, writer: str, now_us: int) -> str | None:
        """Return the writer to forget for a new one; None if there is room.

        Raises StagingRefused if none may be forgotten.
        """
        if writer in self._writers or len(self._writers) < MAX_WRITERS:
            return None
        once = next((name for name, last in self._writers.items() if last.commits == 1), None)
        oldest = next(iter(self._writers))
        for name, after_us in ((once, FORGET_ONCE_US), (oldest, FORGET_US)):
            if name is not None and self._writers[name].committed_us + after_us < now_us:
                return name
        raise StagingRefused(
            "full",
            f"the stream remembers {MAX_WRITERS} writers, which is the limit, and all of them committed too recently to be forgotten; use the name of one of them, or try again in an hour",
        )


def _pack_batch(writer: str, batch: int) -> bytes:
    name = writer.encode()
    return bytes([len(name)]) + name + KEY.pack(batch)


def _unpack_key(row: bytes) -> tuple[str, int, bytes, int]:
    end = 1 + row[0]
    (batch,) = KEY.unpack_from(row, end)
    attempt = row[end + KEY.size : end + KEY.size + ID_BYTES]
    (sequence,) = KEY.unpack(row[end + KEY.size + ID_BYTES :])
    return row[1:end].decode(), batch, attempt, sequence
