"""A log is what a plain list of what was appended says it is, whatever the order of calls."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from iris.wire.codec import END
from relay.store.log import Log
from relay.store.outcomes import Stored
from relay.store.records import Entry, Hole, NewGap, Reason, Record
from relay.store.segments import Limits
from relay.store.staged_rows import Committed


@dataclass
class Kept:
    first: int
    next: int
    body: bytes | None
    """None: a gap."""
    stored_us: int
    key: int | None = None
    expires_us: int = 0
    reason: Reason | None = None
    """Set once it is a hole."""


Drawn = tuple[int, bytes, int | None, int]
"""Messages, body, key, time to live."""
records: st.SearchStrategy[list[Drawn]] = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.binary(min_size=1, max_size=40),
        st.none() | st.integers(0, 2),
        st.sampled_from([0, 0, 3, 9]),
    ),
    max_size=7,
)


def make(drawn: Drawn, now_us: int) -> Entry:
    count, body, key, ttl = drawn
    key_hash = None if key is None else bytes([key]) * 32
    expires_us = now_us + ttl if ttl else 0
    end = END.pack(0, 0, count, 0)
    return Entry(1, "x", bytes(16), bytes(16), end, body, key_hash=key_hash, expires_us=expires_us)


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch("relay.store.segments.SEGMENT_ENTRIES", 4),
            mock.patch("relay.store.retention.FREE_BYTES", 1500),
            mock.patch("relay.store.compaction.COMPACT_BYTES", 600),
        ]
        for patch in self.patches:
            patch.start()
        self.folder = tempfile.mkdtemp()
        self.path = f"{self.folder}/log"
        self.log = Log.create(self.path, uuid=bytes(16), definition=b"", created_us=0)
        self.kept: list[Kept] = []
        self.oldest = self.next = 0
        self.batch = 0
        # No age reaches back beyond 1970.
        self.now_us = 10

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)
        for patch in self.patches:
            patch.stop()

    @rule(records=records)
    def append(self, records: list[Drawn]) -> None:
        first = self.next
        entries = self.expect(records)
        at = [first, *(kept.next for kept in self.kept[len(self.kept) - len(records) :])]
        expected = [Stored(*bounds) for bounds in pairwise(at)]
        assert self.log.append(entries, self.now_us) == expected

    @rule(parts=st.lists(records, max_size=3), loser=records, again=st.booleans())
    def commit(self, parts: list[list[Drawn]], loser: list[Drawn], again: bool) -> None:
        self.batch += 1
        for number, part in enumerate([*parts, loser]):
            entries = list(enumerate(make(drawn, self.now_us) for drawn in part))
            self.log.staging.stage(
                "etl", self.batch, bytes([number]) * 16, entries[::-1], self.now_us
            )
        if again:
            self.reopen_staged()
        first = self.next
        for part in parts:
            self.expect(part)
        named = [(bytes([number]) * 16, len(part)) for number, part in enumerate(parts)]
        for replayed in (False, True):
            done = self.log.staging.commit("etl", self.batch, named, self.now_us)
            assert done == Committed(first, self.next, replayed)
        assert self.log.staging.rows.bytes == 0

    def reopen_staged(self) -> None:
        self.log.append([], self.now_us)
        self.reopen()

    def expect(self, records: list[Drawn]) -> list[Entry]:
        """NewGap that these come to stand at the end."""
        entries = []
        for count, body, key, ttl in records:
            entry = make((count, body, key, ttl), self.now_us)
            entries.append(entry)
            kept = Kept(self.next, self.next + count, body, self.now_us, key, entry.expires_us)
            self.kept.append(kept)
            self.next += count
        return entries

    @rule()
    def gap(self) -> None:
        stored = Stored(self.next, self.next + 1)
        assert self.log.append([NewGap(3, "slow")], self.now_us) == [stored]
        self.kept.append(Kept(self.next, self.next + 1, None, self.now_us))
        self.next += 1

    @rule(by=st.integers(1, 4))
    def time_passes(self, by: int) -> None:
        self.now_us += by

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = Log.open(self.path)

    @rule(most=st.integers(0, 12))
    def keep_messages(self, most: int) -> None:
        self.log.enforce(Limits(max_messages=most), self.now_us)
        messages = self.messages()
        while messages > most:
            gone = self.kept.pop(0)
            messages -= self.live(gone)
            self.oldest = gone.next
        # A full segment is removed whole, with the holes at its end.
        while self.kept and self.kept[0].reason is not None and self.oldest < self.log.oldest:
            self.oldest = self.kept.pop(0).next

    @rule(age=st.integers(0, 8))
    def keep_young(self, age: int) -> None:
        self.log.enforce(Limits(max_age_us=age), self.now_us)
        while self.kept and (
            self.kept[0].reason is not None or self.kept[0].stored_us < self.now_us - age
        ):
            self.oldest = self.kept.pop(0).next

    @rule(size=st.integers(0, 2000))
    def keep_bytes(self, size: int) -> None:
        before = self.log.oldest, self.log.size_bytes
        self.log.enforce(Limits(max_bytes=size), self.now_us)
        assert self.log.size_bytes <= size
        if before[1] <= size:
            assert self.log.oldest == before[0]
        self.oldest = self.log.oldest
        while self.kept and self.kept[0].next <= self.oldest:
            self.kept.pop(0)

    @rule()
    def compact(self) -> None:
        while not self.log.compact(self.now_us):
            pass
        last = {kept.key: kept.first for kept in self.kept if kept.reason is None}
        for kept in self.kept:
            if kept.reason is not None or kept.body is None:
                continue
            if kept.key is not None and last[kept.key] > kept.first:
                kept.reason = Reason.COMPACTED
            elif 0 < kept.expires_us <= self.now_us:
                kept.reason = Reason.EXPIRED

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        found = [kept for kept in self.kept if kept.reason is None and kept.body is not None]
        if found:
            some = data.draw(st.lists(st.sampled_from(found), max_size=4), label="removed")
            self.log.remove({kept.first for kept in some})
            for kept in some:
                kept.reason = Reason.COMPACTED

    @rule(data=st.data(), max_bytes=st.sampled_from([1, 200, 1 << 20]))
    def read(self, data: st.DataObject, max_bytes: int) -> None:
        start = data.draw(st.integers(0, self.next), label="start")
        seen: list[tuple[object, int, int]] = []
        at = start
        while at < self.next:
            chunk = self.log.read(at, max_bytes, now_us=self.now_us)
            assert chunk.next > at
            assert (chunk.oldest, chunk.high_water) == (self.oldest, self.next)
            for item in chunk.items:
                match item:
                    case Record():
                        seen.append((item.body, item.first, item.next))
                    case Hole():
                        # Where a hole begins below the start is not promised, nor how chunks cut it.
                        merge(seen, item.reason, max(start, item.first), item.next)
                    case _:
                        seen.append((None, item.first, item.next))
            at = chunk.next
        expected: list[tuple[object, int, int]] = []
        if start < self.oldest:
            merge(expected, Reason.RETENTION, start, self.oldest)
        for kept in self.kept:
            if kept.next <= start:
                continue
            reason = kept.reason
            if reason is None and 0 < kept.expires_us <= self.now_us:
                reason = Reason.EXPIRED
            if reason is None:
                expected.append((kept.body, kept.first, kept.next))
            else:
                merge(expected, reason, max(start, kept.first), kept.next)
        assert seen == expected

    @invariant()
    def sums_are_right(self) -> None:
        assert (self.log.oldest, self.log.next) == (self.oldest, self.next)
        assert self.log.messages == self.messages()

    def messages(self) -> int:
        return sum(self.live(kept) for kept in self.kept)

    @staticmethod
    def live(kept: Kept) -> int:
        return 0 if kept.reason is not None else kept.next - kept.first


def merge(into: list[tuple[object, int, int]], reason: Reason, first: int, end: int) -> None:
    if into and into[-1][0] is reason and into[-1][2] == first:
        into[-1] = (reason, into[-1][1], end)
    else:
        into.append((reason, first, end))


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
