"""Compression of bundles before they are sealed. Sealed bytes look random, so they cannot be compressed afterwards.

    u32 count | u32 flags, with COMPRESSED | u32 size | zstd frame (RFC 8878)

The zstd frame expands to `size` bytes: everything that follows the flags in an uncompressed bundle.

The length of a sealed bundle shows how well it compressed. Do not compress messages that hold a secret beside text that
an attacker can choose (Kelsey, "Compression and Information Leakage of Plaintext", 2002).
"""

from __future__ import annotations

import struct
from typing import Final

from iris.errors import DecodeError
from iris.wire.codec import FRAME_OVERHEAD, MAX_MESSAGE_LIMIT

COMPRESSED: Final = 8
"""Bundle flag: the bundle is compressed."""
WORTH_BYTES: Final = 256
"""Smaller bundles are not compressed, because the time is not worth it."""
MAX_EXPANDED_BYTES: Final = MAX_MESSAGE_LIMIT + FRAME_OVERHEAD
LEVEL: Final = 3
"""zstd's default level: 300 MB/s and more."""


class Compressor:
    """Compressor for the bundles of one session. Expensive to create; two threads must not use it at the same time."""

    __slots__ = ("_compress",)

    def __init__(self) -> None:
        # The library takes megabytes of memory, and most processes do not need it.
        from zstandard import ZstdCompressor

        self._compress = ZstdCompressor(level=LEVEL).compress

    def compressed(self, plain: bytes) -> bytes:
        """Return the compressed bundle, or `plain` itself if that saves less than an eighth."""
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
    """Return a bundle as it was before `compressed`. A bundle that is not compressed is returned as it is.

    Raises:
        DecodeError: the compressed data is damaged, or expands to more than it declares or than `MAX_EXPANDED_BYTES`.
            No more than that is ever allocated.
    """
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return plain
    count, flags, size = _HEAD.unpack_from(plain)
    frame = memoryview(plain)[_HEAD.size :]
    import zstandard

    try:
        # The library allocates what the zstd frame itself declares, so check that.
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
    """Return the memory that an opened bundle of `size` bytes on the wire takes once expanded.

    Queues are bounded by this.
    """
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return size
    return max(size, int(_HEAD.unpack_from(plain)[2]))
