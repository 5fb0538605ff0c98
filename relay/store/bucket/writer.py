"""A journal that grows: collects what its streams wrote, numbers and seals it, and lets out what
rests on it once it is in the bucket (sans-IO).

    write of a stream ──► open object ── its time or MAX_BYTES ──► closed ──► flying ──► known to be there
    answer, credit ─────► held until the last write of its stream is known to be there

An object's time comes `GATHER_US` after its first write, or `FLUSH_US` after the object before it closed for the
same reason, whichever is later. So a write that is alone waits hardly at all. An object also leaves with `EARLY_BYTES`
if fewer than `window` fly; else it grows. So a store makes at most one PUT in `FLUSH_US` and one more for each
`EARLY_BYTES`, and larger ones if the bucket is slow.

Several objects fly at once. They are known in the order of their numbers, each when all before it
are. So what leaves the store never rests on something that may still be lost: neither an
acknowledgement nor what a reader is shown. (This is the external synchrony of Nightingale et al.,
"Rethink the Sync", OSDI 2006.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from iris.wire.kinds import NEVER_US
from relay.store.bucket.sealing import WINDOW, Entry, Numbered, Sealer, hash_of, journal_key

FLUSH_US: Final = 100_000
"""Longest wait of a write for others that go into the same object, unless `bucket_pause_ms` says otherwise."""
DIRECTORY_FLUSH_US: Final = 5_000
"""The same for a bucket that is a directory, whose objects cost nothing."""
GATHER_US: Final = 2_000
"""Shortest wait: writes that arrive together go into one object."""
EARLY_BYTES: Final = 1 << 20
"""Size at which an object is closed if it can leave at once."""
MAX_BYTES: Final = 4 << 20
"""Size at which an object is closed. A single write may be larger."""
BACKLOG_BYTES: Final = 64 << 20
"""Bytes that may wait for the bucket. Beyond them its streams accept nothing new."""


class Output(Protocol):
    """Something that waits to leave the store."""

    def release(self) -> None: ...
    def withdraw(self, reason: str) -> None:
        """The journal ended before: what this says may not be so."""


class Flying:
    """An object on its way to the bucket."""

    __slots__ = ("key", "number", "sealed")

    def __init__(self, number: int, key: str, sealed: bytes) -> None:
        self.number = number
        self.key = key
        self.sealed = sealed


class Writer:
    """One journal of this store."""

    def __init__(
        self, journal: str, sealer: Sealer, before: bytes, *, flush_us: int = FLUSH_US, max_bytes: int = MAX_BYTES,
        window: int = WINDOW, backlog_bytes: int = BACKLOG_BYTES, gather_us: int = GATHER_US, early_bytes: int = EARLY_BYTES,
    ) -> None:  # fmt: skip
        """`before` is the hash of the journal's registration."""
        self.journal = journal
        self.number = 1
        """The number of the object that is open for writes."""
        self.known = 0
        """Every object up to this number is known to be in the bucket."""
        self.ended = ""
        """Why the journal has ended; empty while it goes on."""
        self.written = 0
        """Bytes of all entries so far."""
        self.backlog = 0
        """Bytes that wait for the bucket, sealed or not."""
        self.failing = ""
        """Why the bucket took nothing when it was last asked; empty if it answered."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `next_us` has changed, an object may take off, or the journal has ended."""
        self._sealer = sealer
        self._before = before
        self._flush_us = flush_us
        self._gather_us = gather_us
        self._early_bytes = early_bytes
        self._max_bytes = max_bytes
        self._window = window
        self.backlog_limit = backlog_bytes
        self._open: list[Entry] = []
        self._open_bytes = 0
        self._open_us = NEVER_US
        self._flushed_us = -flush_us
        """When an object was closed last because its time had come."""
        self._closed: deque[tuple[int, list[Entry]]] = deque()
        self._flying: dict[int, Flying] = {}
        self._there: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._held: dict[int, list[Output]] = {}
        self._watched = 0
        self._before_watched: bytes | None = None
        """Hash of the object before the one that `watch` returned last; None until that has taken off."""

    @property
    def full(self) -> bool:
        """Whether so much waits for the bucket that nothing new is accepted."""
        return self.backlog >= self.backlog_limit

    @property
    def idle(self) -> bool:
        """Whether everything is known to be in the bucket."""
        return not self._open and self.known == self.number - 1

    def add(self, entry: Entry, size: int, now_us: int) -> int:
        """Add an entry of about `size` bytes; return the number of the object that will hold it."""
        number = self.number
        opened = not self._open
        if opened:
            self._open_us = now_us
        self._open.append(entry)
        self._open_bytes += size
        self.backlog += size
        self.written += size
        if self._open_bytes >= self._max_bytes or self._early:
            self.close_object()
        elif opened:
            self.on_change()
        return number

    def close_object(self) -> None:
        """Close the open object, if anything is in it: it leaves as soon as fewer fly."""
        if self._open:
            self._closed.append((self.number, self._open))
            self._sizes[self.number] = self._open_bytes
            self._open, self._open_bytes, self._open_us = [], 0, NEVER_US
            self.number += 1
            self.on_change()

    @property
    def _early(self) -> bool:
        """Whether the open object can leave at once, and is worth a PUT."""
        return self._open_bytes >= self._early_bytes and self.number <= self.known + self._window

    @property
    def next_us(self) -> int:
        """When the open object is due."""
        if not self._open:
            return NEVER_US
        return max(self._open_us + self._gather_us, self._flushed_us + self._flush_us)

    def take_off(self, now_us: int) -> list[Flying]:
        """Return the objects that are to be created now. Each is repeated unchanged until `landed`, or until `end`."""
        if self.ended:
            return []
        if self._early:
            self.close_object()
        elif now_us >= self.next_us:
            self.close_object()
            self._flushed_us = now_us
        leaving = []
        while self._closed and self._closed[0][0] <= self.known + self._window:
            number, entries = self._closed.popleft()
            key = journal_key(self.journal, number)
            if number == self._watched:
                self._before_watched = self._before
            sealed = self._sealer.seal(key, Numbered(self._before, entries))
            self._before = hash_of(sealed)
            flying = self._flying[number] = Flying(number, key, sealed)
            leaving.append(flying)
        return leaving

    @property
    def flying(self) -> list[Flying]:
        """The objects that were to be created, and are not known to be there."""
        return list(self._flying.values())

    def landed(self, flying: Flying) -> None:
        """Note that this object is in the bucket."""
        if self.ended:
            return
        del self._flying[flying.number]
        self._there.add(flying.number)
        before = self.known
        while self.known + 1 in self._there:
            self.known += 1
            self._there.remove(self.known)
            self.backlog -= self._sizes.pop(self.known)
        if self.known > before:
            self.on_change()
            for number in range(before + 1, self.known + 1):
                for output in self._held.pop(number, ()):
                    output.release()

    def watch(self) -> int:
        """Close the open object; return the number of the next."""
        self.close_object()
        self._watched, self._before_watched = self.number, None
        return self.number

    @property
    def before_watched(self) -> bytes:
        """Hash of the object before the one that `watch` returned last, once all before that are known to be there."""
        return self._before if self._before_watched is None else self._before_watched

    def hold(self, number: int, output: Output) -> None:
        """Release `output` when the object `number` is known to be in the bucket."""
        if self.ended:
            output.withdraw(self.ended)
        elif number <= self.known:
            output.release()
        else:
            self._held.setdefault(number, []).append(output)

    def end(self, reason: str) -> None:
        """End the journal: nothing that waits for it will leave. Idempotent."""
        if self.ended:
            return
        self.ended = reason
        held, self._held = self._held, {}
        self._flying.clear()
        self._closed.clear()
        self.on_change()
        for number in sorted(held):
            for output in held[number]:
                output.withdraw(reason)
