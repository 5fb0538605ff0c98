"""Bundles compressed before they are sealed: afterwards only their heads would shrink, because what is sealed looks random.

    u32 count | u32 flags, with COMPRESSED | u32 size | zstd frame (RFC 8878) of the `size` bytes that would stand behind the flags

Whoever sees the length of what is sealed learns how well it compressed: where somebody else can choose part of a message that holds a
secret, leave compression off (Kelsey, "Compression and Information Leakage of Plaintext", 2002).
"""

from __future__ import annotations

import struct
import threading
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


class _Codecs:
    """Contexts are dear to make, and of one thread each; and the library takes megabytes that a relay has no use for."""

    def __init__(self) -> None:
        import zstandard

        self.error = zstandard.ZstdError
        self.content_size = zstandard.frame_content_size
        self.compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local: Final = threading.local()


def codecs() -> _Codecs:
    """Return this thread's; the first call takes a while, and some memory."""
    if not hasattr(_local, "codecs"):
        _local.codecs = _Codecs()
    codecs: _Codecs = _local.codecs
    return codecs


_HEAD: Final = struct.Struct("<III")
_FLAGS_AT: Final = 4
_BODY_AT: Final = 8


def compressed(plain: bytes) -> bytes:
    """Return a bundle compressed, or as it is if that saves less than an eighth."""
    if len(plain) < WORTH_BYTES:
        return plain
    count, flags = struct.unpack_from("<II", plain)
    body = memoryview(plain)[_BODY_AT:]
    frame = codecs().compress(body)
    if _HEAD.size + len(frame) > len(plain) * 7 // 8:
        return plain
    return _HEAD.pack(count, flags | COMPRESSED, len(body)) + frame


def expanded(plain: bytes) -> bytes:
    """Return a bundle as it was before `compressed`; one that was not compressed is returned itself.

    Raises:
        DecodeError: what is compressed is damaged, or longer than it says or than any message may be. No more than that is allocated.
    """
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return plain
    count, flags, size = _HEAD.unpack_from(plain)
    frame = memoryview(plain)[_HEAD.size :]
    zstd = codecs()
    try:
        # The frame's own word is what the library allocates by.
        if size > MAX_EXPANDED_BYTES or zstd.content_size(frame) != size:
            raise DecodeError(f"a compressed bundle of {size} bytes, or so it says")
        body = zstd.decompress(frame, max_output_size=size)
    except zstd.error as err:
        raise DecodeError(f"a compressed bundle: {err}") from err
    return struct.pack("<II", count, flags & ~COMPRESSED) + body


def held_bytes(plain: bytes, size: int) -> int:
    """Return what an opened bundle of `size` bytes on the wire takes once it is expanded: what waits is bounded by that."""
    if len(plain) < _HEAD.size or not plain[_FLAGS_AT] & COMPRESSED:
        return size
    return max(size, int(_HEAD.unpack_from(plain)[2]))
