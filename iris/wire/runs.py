"""Runs: one frame with several calls of one sender to one address, or several answers to one caller, made in one turn.

Each body is sealed as if it were sent alone, with a count of 1 and the run's other end fields. So a relay, which has no
key, can split a run or convert it to single frames. A run is a data frame (`iris.wire.codec`) whose count is the number
of its calls or answers:

    CALLS     hop id: of the first call, each next one has the next    body = count x u32 length | bodies
    ANSWERS   hop id: 0                       body = count x u64 hop id | count x u32 length | bodies

The alias of CALLS was declared for REQUEST or PUSH, that of ANSWERS for REPLY or, from a member, for ANSWER (to
several surveys).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire.codec import BODY_AT, COUNT, COUNT_AT, DATA_LENGTH, END_AT, HOP, KIND_AT
from iris.wire.kinds import Kind

MAX_RUN: Final = 256
"""Most calls or answers in a run."""
MAX_RUN_BYTES: Final = 64 << 10
"""Largest body of a run. A run is never cut into fragments."""
LENGTH_BYTES: Final = 4
HOP_BYTES: Final = 8


@lru_cache(maxsize=MAX_RUN)
def lengths(count: int) -> struct.Struct:
    """Return the Struct of `count` u32."""
    return struct.Struct(f"<{count}I")


@lru_cache(maxsize=MAX_RUN)
def hop_ids(count: int) -> struct.Struct:
    """Return the Struct of `count` u64."""
    return struct.Struct(f"<{count}Q")


def call_run(
    alias: int, flags: int, hop: int, deadline_us: int, end: bytes, bodies: Sequence[bytes]
) -> bytes:
    """Return the CALLS frame of several calls. `end` holds the end fields of each."""
    count = len(bodies)
    table = lengths(count).pack(*map(len, bodies))
    body = b"".join((table, *bodies))
    head = HOP.pack(DATA_LENGTH + len(body), Kind.CALLS, flags, alias, hop, deadline_us)
    return b"".join((head, counted(end, count), body))


def answer_run(
    alias: int, end: bytes, hops: Sequence[int], bodies: Sequence[bytes | memoryview]
) -> bytes:
    """Return the ANSWERS frame of several answers. `end` holds the end fields of each."""
    count = len(bodies)
    table = hop_ids(count).pack(*hops) + lengths(count).pack(*map(len, bodies))
    body = b"".join((table, *bodies))
    head = HOP.pack(DATA_LENGTH + len(body), Kind.ANSWERS, 0, alias, 0, 0)
    return b"".join((head, counted(end, count), body))


def counted(end: bytes, count: int) -> bytes:
    """Return the end fields `end` with another count."""
    at = COUNT_AT - END_AT
    return end[:at] + COUNT.pack(count) + end[at + 4 :]


def single_end(buf: memoryview, start: int) -> bytes:
    """Return the end fields with which each body of the run at `buf[start:]` was sealed."""
    return counted(bytes(buf[start + END_AT : start + BODY_AT]), 1)


def read_calls(buf: memoryview, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    """Return the position of the first body of a CALLS frame, and the length of each. Raises PeerProtocolError."""
    count, at = _counted(buf, start, end, LENGTH_BYTES)
    sizes = lengths(count).unpack_from(buf, start + BODY_AT)
    if at + sum(sizes) != end:
        raise PeerProtocolError(
            f"lengths in a run add up to {sum(sizes)} bytes, but its bodies take {end - at}"
        )
    if HOP.unpack_from(buf, start)[4] + count > 1 << 64:
        raise PeerProtocolError("the hop ids of a run go beyond 2^64 - 1")
    return at, sizes


def read_answers(
    buf: memoryview, start: int, end: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the position of the first body of an ANSWERS frame, the hop ids and the lengths.

    Raises PeerProtocolError.
    """
    count, at = _counted(buf, start, end, HOP_BYTES + LENGTH_BYTES)
    hops = hop_ids(count).unpack_from(buf, start + BODY_AT)
    sizes = lengths(count).unpack_from(buf, start + BODY_AT + HOP_BYTES * count)
    if at + sum(sizes) != end:
        raise PeerProtocolError(
            f"lengths in a run add up to {sum(sizes)} bytes, but its bodies take {end - at}"
        )
    return at, hops, sizes


def _counted(buf: memoryview, start: int, end: int, entry_bytes: int) -> tuple[int, int]:
    """Return the count of a run and the position of its first body, after a table of `entry_bytes` for each."""
    if end - start < BODY_AT:
        raise PeerProtocolError(
            f"a data frame of {end - start} bytes is shorter than its {BODY_AT} bytes of fixed fields"
        )
    (count,) = COUNT.unpack_from(buf, start + COUNT_AT)
    if not 0 < count <= MAX_RUN:
        raise PeerProtocolError(f"a run holds {count} calls or answers; 1 to {MAX_RUN} are allowed")
    at = start + BODY_AT + entry_bytes * count
    if end - start > BODY_AT + MAX_RUN_BYTES or at > end:
        raise PeerProtocolError(
            f"a {Kind(buf[start + KIND_AT]).name} frame of {end - start} bytes is over the limit of "
            f"{BODY_AT + MAX_RUN_BYTES}, or too short for the table of its {count} entries"
        )
    return count, at


def single_calls(buf: memoryview, start: int, end: int, kind: int) -> Iterator[bytearray]:
    """Yield each call of a CALLS frame as a single frame of `kind`, in order.

    Raises PeerProtocolError before the first.
    """
    at, sizes = read_calls(buf, start, end)
    _, _, flags, alias, hop, deadline_us = HOP.unpack_from(buf, start)
    end_fields = single_end(buf, start)
    for number, size in enumerate(sizes):
        head = HOP.pack(DATA_LENGTH + size, kind, flags, alias, hop + number, deadline_us)
        yield bytearray(b"".join((head, end_fields, buf[at : at + size])))
        at += size


def single_answers(buf: memoryview, start: int, end: int, kind: int) -> Iterator[bytearray]:
    """Yield each answer of an ANSWERS frame as a single frame of `kind`, in order.

    Raises PeerProtocolError before the first.
    """
    at, hops, sizes = read_answers(buf, start, end)
    _, _, flags, alias, _, _ = HOP.unpack_from(buf, start)
    end_fields = single_end(buf, start)
    for hop, size in zip(hops, sizes, strict=True):
        head = HOP.pack(DATA_LENGTH + size, kind, flags, alias, hop, 0)
        yield bytearray(b"".join((head, end_fields, buf[at : at + size])))
        at += size


def part_of_calls(buf: memoryview, start: int, end: int, first: int, count: int) -> bytearray:
    """Return a CALLS frame with `count` calls of the given one, from call number `first` on."""
    at, sizes = read_calls(buf, start, end)
    begin = at + sum(sizes[:first])
    body = sizes[first : first + count]
    _, _, flags, alias, hop, deadline_us = HOP.unpack_from(buf, start)
    size = LENGTH_BYTES * count + sum(body)
    return bytearray(
        b"".join(
            (
                HOP.pack(DATA_LENGTH + size, Kind.CALLS, flags, alias, hop + first, deadline_us),
                counted(bytes(buf[start + END_AT : start + BODY_AT]), count),
                lengths(count).pack(*body),
                buf[begin : begin + sum(body)],
            )
        )
    )
