"""The copies in the bucket of the `disk` streams of one store: what each has, and how far it is behind.

    not known ──► following ◄── closing ◄── catching up
        │             │                          ▲
        └────► behind ┴──────────────────────────┘

Nothing waits for a copy. While it follows, each write to the stream's database is an entry of the store's journal of
copies, and a row `r` of the database until it is in the bucket. If too much waits, the copy falls behind: nothing is
kept for it any more, and later the whole database is written to the journal once more. The earlier copy stays until
that is whole.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from iris.errors import Closed
from relay.store.batches import PLACE_ROW, REDO_ROWS, Batch, CopiedBatch
from relay.store.bucket.replica import ENDED_BYTES, REDO_END, Place, forget, pack_redo, redo
from relay.store.bucket.sealing import Begun, Ended, Rows, Whole
from relay.store.bucket.writer import Writer
from relay.store.errors import LogError
from relay.store.log import Log

WAITING_BYTES: Final = 16 << 20
"""Bytes that a stream may write before its store has opened the bucket. Beyond that the copy falls behind."""
LATER: Final = (1 << 64) - 1
"""Number in rows `r` of writes that are in no object yet."""


class State(enum.Enum):
    """The state of a copy."""

    UNKNOWN = "not known"
    """The store has not read the bucket since its start."""
    FOLLOWING = "following"
    BEHIND = "behind"
    CATCHING_UP = "catching up"
    CLOSING = "closing"
    """Everything was written to the journal, and some of it is on its way."""


class Lag(Struct, frozen=True):
    """How far copies are behind their streams."""

    bytes: int
    us: int
    """How long the oldest write that is missing has been waiting; 0 if none is missing."""
    behind: bool = False
    """Whether too much waited, so that a stream will be written to the bucket once more."""


class Copy:
    """Copies one stream's database. It is the database's `Copier`."""

    durable = False

    def __init__(self, uuid: bytes, copies: Copies) -> None:
        self.uuid = uuid
        self.state = State.UNKNOWN
        self.log: Log | None = None
        self._copies = copies
        self._writer: Writer | None = None
        self._place: Place | None = None
        self._redo: deque[tuple[int, bytes]] = deque()
        self._index = 0
        self._rows = False
        """Whether the database has a row `j` or rows `r`."""
        self._flying: deque[tuple[int, int, int]] = deque()
        """(number, bytes, time of the first) for each object that is not known to be in the bucket."""
        self._missed = 0
        """Bytes that were written and are in no object."""
        self._missed_us = 0
        """Since when; 0 if there are none."""

    def opened(self, log: Log) -> None:
        """Copy this log, which was opened for the first time or again."""
        first, self.log = self.log is None, log
        database = log.database
        self._redo.clear()
        self._rows = True
        try:
            self._place = Place.of(database)
            rows = [int.from_bytes(row[8:], "big") for row, _ in database.rows(REDO_ROWS)]
            self._index = max(rows, default=0) + 1
            if not first or self._place is None:
                # A new stream, or one from before there was a bucket, is behind, too. After a failed write the
                # database may have more than was given to us.
                self._fall_behind(max(1, log.size_bytes))
                forget(database)
                self._rows = False
        except LogError:  # whoever reads or writes the log next reports it
            self._fall_behind(max(1, log.size_bytes))
        log.copy_to(self)
        if self.state is State.UNKNOWN and self._copies.writer is not None:
            self.resume(self._copies.writer, self._copies.ends)

    def closed(self) -> None:
        """Stop copying: this store no longer serves the stream."""
        self.state, self.log = State.BEHIND, None

    def lag(self) -> Lag:
        """Return how far this copy is behind."""
        writer = self._writer
        while writer is not None and self._flying and self._flying[0][0] <= writer.known:
            self._flying.popleft()
        size = sum(each for _, each, _ in self._flying) + self._missed
        first_us = self._missed_us or (self._flying[0][2] if self._flying else 0)
        us = max(0, self._copies.now_us() - first_us) if first_us else 0
        return Lag(size, us, self.state not in (State.FOLLOWING, State.UNKNOWN))

    # The database's copier

    def writing(self, batch: CopiedBatch) -> None:
        writer = self._writer
        if self.state is State.UNKNOWN:
            if self._missed >= WAITING_BYTES:
                self._fall_behind(0)
        elif self.state is not State.BEHIND and (writer is None or writer.ended or writer.full):
            self._fall_behind(0)
        raw = batch.raw
        if self.state is State.BEHIND:
            if self._rows:
                raw.delete_range(REDO_ROWS, REDO_END)
                raw.delete(PLACE_ROW)
                self._rows = False
        elif self.state is not State.CATCHING_UP:
            while self._redo and writer is not None and self._redo[0][0] <= writer.known:
                raw.delete(self._redo.popleft()[1])
            number = LATER if self.state is State.UNKNOWN or writer is None else writer.number
            key, value = pack_redo(number, self._index, batch.ops)
            self._index += 1
            self._redo.append((number, key))
            raw.put(key, value)
            self._rows = True
            if self.state is State.FOLLOWING and writer is not None:
                raw.put(PLACE_ROW, Place(writer.journal, writer.number).pack())

    def wrote(self, batch: CopiedBatch, next_offset: int) -> None:
        now_us = self._copies.now_us()
        if self.state in (State.UNKNOWN, State.BEHIND) or self._writer is None:
            self._missed += batch.size
            self._missed_us = self._missed_us or now_us
            return
        number = self._writer.add(Rows(self.uuid, batch.ops), batch.size, now_us)
        if self._flying and self._flying[-1][0] == number:
            _, size, first_us = self._flying.pop()
            self._flying.append((number, size + batch.size, first_us))
        else:
            self.lag()  # forgets what has arrived
            self._flying.append((number, batch.size, now_us))

    # Catching up

    def resume(self, writer: Writer, ends: Mapping[str, int]) -> None:
        """Continue in this journal, which took those in `ends`: journal -> number of its last object."""
        place, log = self._place, self.log
        if self.state is not State.UNKNOWN or log is None or place is None:
            return
        try:
            if place.journal in ends:
                self._resume(writer, log, ends[place.journal])
            else:
                self._fall_behind(max(1, log.size_bytes))
                forget(log.database)
                self._rows = False
        except (LogError, Closed):  # whoever reads or writes the log next reports it
            self._fall_behind(max(1, log.size_bytes))

    def _resume(self, writer: Writer, log: Log, end: int) -> None:
        database = log.database
        unsent = redo(database, end)
        self.state, self._writer = State.FOLLOWING, writer
        self._redo.clear()
        self._missed = self._missed_us = 0
        if unsent:
            batch = CopiedBatch(database.records_handle)
            batch.raw.delete_range(REDO_ROWS, REDO_END)
            for ops in unsent:
                batch.apply(ops)
            database.write(batch, log.next, sync=False)
        else:
            own = Batch(database.records_handle)
            own.delete_range(REDO_ROWS, REDO_END)
            own.put(PLACE_ROW, Place(writer.journal, 0).pack())
            database.write(own, log.next, sync=False)

    def begin(self, writer: Writer) -> None:
        """Begin a new copy in this journal. The caller adds what the log has, and calls `whole`. Raises LogError."""
        if self._rows and self.log is not None:
            forget(self.log.database)  # rows of an earlier journal
            self._rows = False
        self.state, self._writer = State.CATCHING_UP, writer
        writer.add(Begun(self.uuid), ENDED_BYTES, self._copies.now_us())

    def whole(self) -> int:
        """Note that everything was added; return the number of the object after which the copy is whole."""
        assert self._writer is not None
        self.state = State.CLOSING
        return self._writer.add(Whole(self.uuid), ENDED_BYTES, self._copies.now_us())

    def follow(self) -> None:
        """Note that the copy is whole: it follows from now on. Raises LogWriteFailed."""
        assert self._writer is not None
        assert self.log is not None
        self.log.note_copied(Place(self._writer.journal, self._writer.number).pack())
        self.state, self._rows = State.FOLLOWING, True
        self._missed = self._missed_us = 0

    def stop(self) -> None:
        """The new copy did not become whole, so the earlier one stays. Idempotent."""
        if self.state in (State.CATCHING_UP, State.CLOSING):
            self._fall_behind(0)

    def lost(self, writer: Writer) -> None:
        """Note that this journal has ended."""
        if self._writer is writer:
            self._fall_behind(0)

    def _fall_behind(self, missed: int) -> None:
        """Keep nothing for the copy any more; `missed` bytes are missing besides what waits for the bucket."""
        before, self.state = self.state, State.BEHIND
        lag = self.lag()
        self._missed += missed + sum(each for _, each, _ in self._flying)
        self._missed_us = self._copies.now_us() - lag.us
        self._flying.clear()
        self._redo.clear()
        self._writer = None
        if before is State.FOLLOWING:
            self._copies.on_behind(self)


class Copies:
    """The copies of one store."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        """`now_us` is a clock that is never set."""
        self.now_us = now_us
        self.writer: Writer | None = None
        """The journal of copies; None until the bucket was read."""
        self.ends: Mapping[str, int] = {}
        """It and the journals that it took -> number of the last object when that was."""
        self.all: dict[bytes, Copy] = {}
        self.ended: dict[bytes, None] = {}
        """Streams that were deleted, or are no longer copied, until the journal says so."""
        self.on_behind: Callable[[Copy], None] = lambda copy: None

    def began(self, writer: Writer, ends: Mapping[str, int]) -> None:
        """Go on in this journal. `ends`: itself and those that it took -> number of the last object."""
        self.writer, self.ends = writer, ends
        for copy in self.all.values():
            copy.resume(writer, ends)

    def lost(self, writer: Writer) -> None:
        """Note that the journal has ended."""
        self.writer = None
        for copy in self.all.values():
            copy.lost(writer)

    def of(self, uuid: bytes) -> Copy:
        """Return the copy of a stream; a new one if it has none."""
        self.ended.pop(uuid, None)
        return self.all.setdefault(uuid, Copy(uuid, self))

    def end(self, uuid: bytes) -> None:
        """A stream was deleted, or is not to be copied any more."""
        copy = self.all.pop(uuid, None)
        if copy is not None:
            copy.closed()
        self.ended[uuid] = None
        self.note_ended()

    def note_ended(self) -> None:
        """Write to the journal which copies have ended, if there is a journal."""
        if self.writer is not None and not self.writer.ended:
            for uuid in self.ended:
                self.writer.add(Ended(uuid), ENDED_BYTES, self.now_us())
            self.ended.clear()

    @property
    def behind(self) -> int:
        """How many streams will be copied once more."""
        return sum(copy.lag().behind for copy in self.all.values())

    def lag(self) -> Lag:
        """Return how far all copies together are behind."""
        all_of = [copy.lag() for copy in self.all.values()]
        return Lag(
            sum(lag.bytes for lag in all_of),
            max((lag.us for lag in all_of), default=0),
            any(lag.behind for lag in all_of),
        )
