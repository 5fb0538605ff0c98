"""Bundles compressed before they are sealed: afterwards only their heads would shrink, because what is sealed looks random.

    u32 count | u32 flags, with COMPRESSED | u32 size | zstd frame (RFC 8878) of the `size` bytes that would stand behind the flags

Whoever sees the length of what is sealed learns how well it compressed: where somebody else can choose part of a message that holds a
secret, leave compression off (Kelsey, "Compression and Information Leakage of Plaintext", 2002).
"""

from __future__ import annotations

import struct
from typing import Final

from iris.errors import DecodeError
from iris.wire.codec import FRAME_OVERHEAD, MAX_MESSAGE_LIMIT

COMPRESSED: Final = 8
"""Flag of a bundle."""
WORTH_BYTES: Final = 256
"""Of less than this nothing is worth the time."""
MAX_EXPANDED_BYTES: Final = MAX_MESSAGE_LIMIT + FRAME_OVERHEAD
LEVEL: Final = 3
"""zstd's own default: 300 MB/s and more."""


class Compressor:
    """Compresses the bundles of one session. Its context is dear to make and must not be used by two threads at once."""

    __slots__ = ("_compress",)

    def __init__(self) -> None:
        # The library takes megabytes, which most processes have no use for.
        from zstandard import ZstdCompressor

        self._compress = ZstdCompressor(level=LEVEL).compress

    def compressed(self, plain: bytes) -> bytes:
        """Return a bundle compressed, or as it is if that saves less than an eighth."""
        if len(plain) < WORTH_BYTES:
            return plain
        count, flags = struct.unpack_from("<II", plain)
        body = memoryview(plain)[_BODY_AT:]
        frame = self._compress(body)
        if _HEAD.size + len(frame) > len(plain) * 7 // 8:
            return plain
        return _HEAD.pack(count, flags | COMPRESSED, len(body)) + frame


_HEAD: Final = struct.Struct("<III")
_FLAGS_AT: Final = 4
_BODY_AT: Final = 8


def expanded(plain: bytes) -> bytes:
    """Return a bundle as it was before `compressed`; one that was not compressed is returned itself.

    Raises:
        DecodeError: what is compressed is damaged, or longer than it says or than any message may be. No more than that is allocated.
    """
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return plain
    count, flags, size = _HEAD.unpack_from(plain)
    frame = memoryview(plain)[_HEAD.size :]
    import zstandard

    try:
        # The frame's own word is what the library allocates by.
        if size > MAX_EXPANDED_BYTES or zstandard.frame_content_size(frame) != size:
            raise DecodeError(
                f"a compressed bundle declares {size} bytes, which is over the limit of {MAX_EXPANDED_BYTES} "
                "or differs from its zstd frame"
            )
        body = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as err:
        raise DecodeError(f"cannot decompress a bundle: {err}") from err
    return struct.pack("<II", count, flags & ~COMPRESSED) + body


def held_bytes(plain: bytes, size: int) -> int:
    """Return what an opened bundle of `size` bytes on the wire takes once it is expanded: what waits is bounded by that."""
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return size
    return max(size, int(_HEAD.unpack_from(plain)[2]))
