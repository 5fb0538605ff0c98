"""The last appends of each producer, so that a retry is stored once and older instances of a
producer are fenced.

A producer numbers its entries from 0 in every epoch. The log writes these rows in the same batch as
the entries, so both are on disk or neither is. The table is bounded: when it is full, the producer
that was idle longest is forgotten. If that producer returns, it gets `OutOfOrder(0)` and must start
a new epoch; it has to read the log to find out whether its unanswered appends were stored.
Forgetting a producer never stores anything twice.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from relay.store.outcomes import Duplicate, Fenced, OutOfOrder
from relay.store.records import ID_BYTES, Stamp

MAX_PRODUCERS: Final = 16_384
"""Producers per log. Each takes at most 900 bytes, so 15 MB in memory."""
RECENT: Final = 64
"""Last sequences whose offsets are remembered: unanswered appends whose offsets a retry can still return."""
_STATE: Final = struct.Struct("<IQq")
_OFFSETS: Final = struct.Struct("<QI")


class _State:
    __slots__ = ("epoch", "last", "recent", "used_us")

    def __init__(self, epoch: int, last: int, used_us: int, recent: bytes) -> None:
        self.epoch = epoch
        self.last = last
        self.used_us = used_us
        self.recent = recent
        """Packed (first offset, count) of the sequences up to `last`."""

    def offsets(self, sequence: int) -> Duplicate:
        at = len(self.recent) - _OFFSETS.size * (self.last - sequence + 1)
        if at < 0:
            return Duplicate(None, None)
        first, count = _OFFSETS.unpack_from(self.recent, at)
        return Duplicate(first, first + count)


def check_producer(producer: bytes, row: bytes) -> None:
    """Raise ValueError unless this is a row of `Producers.changes`."""
    recent = len(row) - _STATE.size
    if (
        len(producer) != ID_BYTES
        or recent % _OFFSETS.size
        or not 0 <= recent <= RECENT * _OFFSETS.size
    ):
        raise ValueError("a producer's row is malformed")


class Producers:
    """The producers of a log. `judge` and `take` include the current batch, which `commit` or `forget` ends."""

    def __init__(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the rows of `changes`. Raises struct.error if a row is malformed."""
        states = []
        for producer, row in rows:
            epoch, last, used_us = _STATE.unpack_from(row)
            states.append((producer, _State(epoch, last, used_us, row[_STATE.size :])))
        states.sort(key=lambda pair: pair[1].used_us)
        self._table = OrderedDict(states)
        self._batch: dict[bytes, _State] = {}

    def __len__(self) -> int:
        return len(self._table)

    def judge(self, stamp: Stamp) -> Duplicate | OutOfOrder | Fenced | None:
        """Return why the entry with `stamp` must not be stored; None if it is the next one."""
        state = self._batch.get(stamp.producer) or self._table.get(stamp.producer)
        if state is not None and stamp.epoch < state.epoch:
            return Fenced(state.epoch)
        if state is None or stamp.epoch > state.epoch:
            return None if stamp.sequence == 0 else OutOfOrder(0)
        if stamp.sequence <= state.last:
            return state.offsets(stamp.sequence)
        return None if stamp.sequence == state.last + 1 else OutOfOrder(state.last + 1)

    def take(self, stamp: Stamp, first: int, count: int, now_us: int) -> None:
        """Note that the entry with `stamp`, for which `judge` returned None, is stored at `first`."""
        state = self._batch.get(stamp.producer) or self._table.get(stamp.producer)
        goes_on = state is not None and state.epoch == stamp.epoch
        recent = state.recent if state is not None and goes_on else b""
        recent = (recent + _OFFSETS.pack(first, count))[-RECENT * _OFFSETS.size :]
        self._batch[stamp.producer] = _State(stamp.epoch, stamp.sequence, now_us, recent)

    def changes(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield (producer, row) for the write of this batch. The row is None for a producer to forget."""
        if not self._batch:
            return
        new = sum(producer not in self._table for producer in self._batch)
        over = len(self._table) + new - MAX_PRODUCERS
        idle = (producer for producer in self._table if producer not in self._batch)
        for producer in islice(idle, max(0, over)):
            yield producer, None
        for producer, state in self._batch.items():
            yield producer, _STATE.pack(state.epoch, state.last, state.used_us) + state.recent

    def commit(self) -> None:
        """End the batch, which is on disk."""
        if not self._batch:
            return
        for producer, state in self._batch.items():
            self._table[producer] = state
            self._table.move_to_end(producer)
        self._batch.clear()
        while len(self._table) > MAX_PRODUCERS:
            self._table.popitem(last=False)

    def forget(self) -> None:
        """Discard the batch, which was not written."""
        self._batch.clear()
