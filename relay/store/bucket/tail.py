"""How much of a stream in a bucket may be shown: what is known to be there (sans-IO).

A write that appends changes nothing below the end that it found. So readers below the known end need not wait for
writes that came since, except for those that changed or removed records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from relay.store.batches import DELETE_RECORD, PUT_RECORD, Op
from relay.store.bucket.writer import Writer

OLDEST_ROW: Final = b"o"


class Mark:
    """Where the stream stands when an object is known to be in the bucket."""

    __slots__ = ("_tail", "end", "number", "oldest")

    def __init__(self, tail: Tail, number: int) -> None:
        self._tail = tail
        self.number = number
        self.end = -1
        self.oldest = -1

    def release(self) -> None:
        self._tail.passed(self)

    def withdraw(self, reason: str) -> None:
        """The stream is served no more."""


class Tail:
    """The offsets of one stream that readers may be shown."""

    def __init__(self, writer: Writer) -> None:
        self.end = 0
        """Everything below is known to be in the bucket."""
        self.oldest = 0
        """The first offset that is stored, as far as that is known to be in the bucket."""
        self.changed = 0
        """Number of the object with the last write that changed or removed records."""
        self.on_grown: Callable[[], None] = lambda: None
        """Called when `end` has grown."""
        self._writer = writer
        self._marks: deque[Mark] = deque()
        self._written = 0

    def begin(self, end: int, oldest: int, last: int) -> None:
        """The log was opened; its last write is in object `last`."""
        self._written = max(self._written, end)
        mark = self._mark(last) if last > self._writer.known else Mark(self, last)
        mark.end, mark.oldest = end, oldest
        if last <= self._writer.known:
            self.passed(mark)

    def wrote(self, number: int, ops: Sequence[Op], end: int) -> None:
        """A write is in object `number`; after it the stream ends at the offset `end`."""
        mark = self._mark(number)
        if end > self._written:
            self._written = mark.end = end
            return
        for op in ops:
            if op.what in (PUT_RECORD, DELETE_RECORD):
                self.changed = number
            elif op.key == OLDEST_ROW and op.value:
                mark.oldest = int.from_bytes(op.value, "big")

    def number_of(self, end: int) -> int:
        """Return the number of the object with which everything below the offset `end` is in the bucket; 0 if it is."""
        if end <= self.end:
            return 0
        return next((mark.number for mark in self._marks if mark.end >= end), self._writer.number)

    def passed(self, mark: Mark) -> None:
        """The object of a mark is known to be there."""
        if self._marks and self._marks[0] is mark:
            self._marks.popleft()
        self.oldest = max(self.oldest, mark.oldest)
        if mark.end > self.end:
            self.end = mark.end
            self.on_grown()

    def _mark(self, number: int) -> Mark:
        """Return the mark of an object that is not known to be there yet."""
        if not self._marks or self._marks[-1].number != number:
            self._marks.append(Mark(self, number))
            self._writer.hold(number, self._marks[-1])
        return self._marks[-1]
