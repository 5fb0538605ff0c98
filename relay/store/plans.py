"""Plans: what the batches of writers commit in all partitions of a stream. Partition 0 keeps them.

    v writer    u32 crc | i64 planned | batch and parts, in MessagePack

A plan is written before any partition commits, and deleted by the commit in partition 0, which is the last. So a batch
whose commit was interrupted is completed as it began. docs/decisions/0047 says why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from iris.wire.streams import Planned
from relay.store.batches import Batch
from relay.store.database import Database
from relay.store.records import check_row, encode_row

MAX_PLANS: Final = 4096
FORGET_US: Final = 7 * 86_400_000_000
"""A plan that is older may be forgotten for a new one: nobody has completed it."""
PLAN_BYTES: Final = 512
"""What a plan counts in addition to its row, for memory and the time to read it when the log is opened."""
_TIME: Final = struct.Struct("<q")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Planned).decode


class _Plan(Struct, frozen=True):
    planned: Planned
    size: int
    planned_us: int


def check_plan(writer: bytes, value: bytes) -> None:
    """Raise ValueError or struct.error unless this is the row of a writer's plan."""
    writer.decode()
    check_row(b"v" + writer, value)
    try:
        _decode(memoryview(value)[4 + _TIME.size :])
    except msgspec.DecodeError as err:
        raise ValueError(str(err)) from err


class Plans:
    """The plans of one log, at most `MAX_PLANS`.

    Methods with `rows` add to a write that the caller executes.
    """

    def __init__(self, database: Database) -> None:
        """Read rows `v`. Raises struct.error or ValueError if one is damaged."""
        self.made = 0
        """Plans that were made since the log was opened."""
        self.bytes = 0
        """Bytes that count against the limit of staged bytes."""
        self._plans: dict[str, _Plan] = {}
        """Writer -> its plan. The oldest plan is first."""
        found = []
        for row, value in database.rows(b"v"):
            check_row(b"v" + row, value)
            (planned_us,) = _TIME.unpack_from(value, 4)
            try:
                planned = _decode(memoryview(value)[4 + _TIME.size :])
            except msgspec.DecodeError as err:
                raise ValueError(str(err)) from err
            found.append((planned_us, row.decode(), planned))
        for planned_us, writer, planned in sorted(found, key=lambda one: one[0]):
            self._add(writer, planned, planned_us)

    def get(self, writer: str) -> Planned | None:
        """Return a writer's plan."""
        plan = self._plans.get(writer)
        return plan.planned if plan is not None else None

    @property
    def count(self) -> int:
        """How many plans are in force."""
        return len(self._plans)

    def up_to(self, writer: str, batch: int) -> Planned | None:
        """Return a writer's plan if it is for this batch or an earlier one."""
        planned = self.get(writer)
        return planned if planned is not None and planned.batch <= batch else None

    def own(self, planned: Planned) -> Sequence[tuple[bytes, int]]:
        """Return the (attempt, record count) pairs that a plan has for partition 0."""
        return [
            (one.attempt, one.records)
            for part in planned.parts
            if part.partition == 0
            for one in part.attempts
        ]

    def size(self, planned: Planned) -> int:
        """Return the bytes that a plan counts."""
        return len(_encode(planned)) + PLAN_BYTES

    def full(self, now_us: int) -> bool:
        """Return whether there is no room, and no plan that may be forgotten."""
        return len(self._plans) >= MAX_PLANS and self._to_forget(now_us) is None

    def put(self, rows: Batch, writer: str, planned: Planned, now_us: int) -> None:
        """Add a plan to a write; there must be room. Call `written` when the write is done."""
        self.made += 1
        forgotten = self._to_forget(now_us)
        if forgotten is not None:
            self.delete(rows, forgotten)
        key = b"v" + writer.encode()
        rows.put(key, encode_row(key, _TIME.pack(now_us) + _encode(planned)))

    def written(self, writer: str, planned: Planned, now_us: int) -> None:
        """Update the table: what `put` added is on disk."""
        forgotten = self._to_forget(now_us)
        if forgotten is not None:
            self.end(forgotten)
        self._add(writer, planned, now_us)

    def delete(self, rows: Batch, writer: str) -> None:
        """Add the deletion of a plan to a write; then call `end` when it is done."""
        rows.delete(b"v" + writer.encode())

    def end(self, writer: str) -> None:
        """Update the table: the plan is deleted on disk."""
        self.bytes -= self._plans.pop(writer).size

    def _add(self, writer: str, planned: Planned, now_us: int) -> None:
        plan = self._plans[writer] = _Plan(planned, self.size(planned), now_us)
        self.bytes += plan.size

    def _to_forget(self, now_us: int) -> str | None:
        """Return the writer whose plan makes room for a new one, if that is necessary and possible."""
        if len(self._plans) < MAX_PLANS:
            return None
        writer = next(iter(self._plans))
        return writer if self._plans[writer].planned_us + FORGET_US < now_us else None
