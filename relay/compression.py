"""Runs of whole frames as one COMPRESSED frame, between gateways that both want it. Sans-IO.

    u32 length | u8 COMPRESSED | u8 0 | zstd frame (RFC 8878) that says how long it is expanded: whole frames, none of them COMPRESSED

What is sealed looks random and does not shrink. Heads of frames do, where several small messages travel together, and what gateways
tell each other does; all else is sent as it is. Each run stands for itself: nothing that was sent before says anything of what
comes after, and one sender's traffic is compressed with another's only within one write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from iris.core.compression import WORTH_BYTES, codecs
from iris.errors import PeerProtocolError
from iris.wire.codec import ALIAS, KIND_AT, PREFIX, PREFIX_BYTES
from iris.wire.frames import FIRST_DATA_KIND, Kind

MAX_RUN_BYTES: Final = 512 << 10
"""Of a run, expanded: what one COMPRESSED frame makes its receiver allocate."""
MAX_RATIO: Final = 32
"""How many times longer a run may be than what it came as, so that no peer makes us work much for little. Interest comes to ten, and to more where a thousand names are alike: that goes as it is."""
FRAME_BYTES: Final = 16
"""Of a COMPRESSED frame, for each frame in it, at least: most of what a frame costs is not by its length. What is sealed stays above it."""
LONG_BYTES: Final = 4 << 10
"""A frame of more has little but its body, and that is sealed."""


def compressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Return what a connection is given to write, each chunk one or more whole frames, with COMPRESSED frames where that saves something."""
    run: list[bytes] = []
    run_bytes = 0
    for chunk in chunks:
        as_it_is = len(chunk) > MAX_RUN_BYTES or (
            _is_data(chunk) and _first_bytes(chunk) > LONG_BYTES
        )
        if as_it_is or run_bytes + len(chunk) > MAX_RUN_BYTES:
            yield _shortest(run)
            run, run_bytes = [], 0
        if as_it_is:
            yield chunk
        else:
            run.append(chunk)
            run_bytes += len(chunk)
    yield _shortest(run)


def _first_bytes(chunk: bytes) -> int:
    return 4 + int(ALIAS.unpack_from(chunk)[0])


def _is_data(chunk: bytes) -> bool:
    return chunk[KIND_AT] >= FIRST_DATA_KIND


def _shortest(run: list[bytes]) -> bytes:
    plain = b"".join(run)
    if len(plain) < WORTH_BYTES or (_is_data(plain) and _first_bytes(plain) == len(plain)):
        return plain
    frame = codecs().compress(plain)
    size = PREFIX_BYTES + len(frame)
    if not size < len(plain) <= MAX_RATIO * size:
        return plain
    if sum(1 for _ in frames_in(memoryview(plain))) * FRAME_BYTES > size:
        return plain
    return PREFIX.pack(size - 4, Kind.COMPRESSED, 0) + frame


def expanded(buf: memoryview, start: int, end: int) -> memoryview:
    """Return the run in the COMPRESSED frame at `buf[start:end]`, in memory of its own that may be written to.

    Raises:
        PeerProtocolError: it is no zstd frame, does not say how long it is, is longer than it says or than a run may be, and no more
            than that is allocated.
    """
    frame = buf[start + PREFIX_BYTES : end]
    zstd = codecs()
    try:
        size = zstd.content_size(frame)
        if not 0 < size <= min(MAX_RUN_BYTES, MAX_RATIO * (end - start)):
            raise PeerProtocolError(f"{end - start} bytes that are compressed from {size}")
        return memoryview(bytearray(zstd.decompress(frame, size, allow_extra_data=False)))
    except zstd.error as err:
        raise PeerProtocolError(f"a COMPRESSED frame: {err}") from err


def frames_in(run: memoryview, most: int = MAX_RUN_BYTES) -> Iterator[tuple[int, int]]:
    """Yield where each frame of a run begins and ends. Raises PeerProtocolError: it is not whole frames, or one is COMPRESSED, or more than `most`."""
    start = 0
    while start < len(run):
        if not most:
            raise PeerProtocolError("more frames in a run than its length allows")
        most -= 1
        left = len(run) - start
        size = 4 + int(ALIAS.unpack_from(run, start)[0]) if left >= PREFIX_BYTES else 0
        if not PREFIX_BYTES <= size <= left:
            raise PeerProtocolError(f"{left} bytes at the end of a run that are no frame")
        if run[start + KIND_AT] == Kind.COMPRESSED:
            raise PeerProtocolError("a COMPRESSED frame in another")
        yield start, start + size
        start += size
