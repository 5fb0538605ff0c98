"""What is inside a seal: several messages for one address, as columns.

    u32 count | u32 flags | payload column [| headers column]
    column = (count + 1) x i32 offsets, the first 0, then the bytes; the next column starts at a multiple of 8

Flag 1: a headers column follows (each entry a MessagePack map of str to str, or empty). Flag 2: the payloads are MessagePack.
The offsets and bytes of a column are an Arrow binary array as they stand.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Final

import msgspec

from iris.errors import DecodeError, LocalProtocolError

CUT_BYTES: Final = 64 << 10
"""A bundle is cut when its payloads would exceed this."""
MESSAGE_BYTES: Final = 8
"""What each message adds to the size that is held against the cut: it bounds the count, too."""
HEADERS: Final = 1
PACKED: Final = 2
MAX_HEADERS_BYTES: Final = 3072

_HEAD: Final = struct.Struct("<II")
_ONE: Final = struct.Struct("<IIii")
_SWAP: Final = sys.byteorder != "little"
_encode_headers: Final = msgspec.msgpack.Encoder().encode
_decode_headers: Final = msgspec.msgpack.Decoder(dict[str, str]).decode

Headers = dict[str, str]


def encode_bundle(
    payloads: Sequence[bytes], headers: Sequence[Headers | None] | None, packed: bool
) -> bytes:
    """Return the plain text of a bundle; `headers` has one entry per payload, or is None."""
    flags = (HEADERS if headers is not None else 0) | (PACKED if packed else 0)
    count = len(payloads)
    if count == 1 and headers is None:
        payload = payloads[0]
        return _ONE.pack(1, flags, 0, len(payload)) + payload
    parts = [_HEAD.pack(count, flags), _offsets(payloads), *payloads]
    if headers is not None:
        size = sum(map(len, parts))
        parts.append(bytes(-size % 8))
        encoded = [_encode_headers(h) if h else b"" for h in headers]
        parts += [_offsets(encoded), *encoded]
    return b"".join(parts)


def headers_bytes(headers: Headers) -> int:
    """Return what `headers` take in a bundle."""
    return len(_encode_headers(headers))


def check_headers(headers: Headers) -> Headers:
    """Return `headers`; raises LocalProtocolError unless they are str to str and small enough."""
    for text in (*headers, *headers.values()):
        if type(text) is not str:
            raise LocalProtocolError(f"header names and values are str, not {type(text).__name__}")
    if headers_bytes(headers) > MAX_HEADERS_BYTES:
        raise LocalProtocolError(f"headers are over {MAX_HEADERS_BYTES} bytes")
    return headers


def decode_bundle(plain: bytes) -> tuple[list[bytes], list[Headers | None] | None, bool]:
    """Return (payloads, headers or None, packed).

    Raises:
        DecodeError: the sender holds the key but wrote columns that do not add up.
    """
    size = len(plain)
    if size < 16:
        raise DecodeError(f"a bundle of {size} bytes")
    count, flags, zero, first = _ONE.unpack_from(plain)
    if count == 1 and not flags & ~PACKED:
        if zero or first != size - 16:
            raise DecodeError("bundle offsets do not fit its bytes")
        return [plain[16:]], None, flags & PACKED != 0
    if flags & ~(HEADERS | PACKED):
        raise DecodeError(f"unknown bundle flags {flags:#x}")
    payloads, end = _column(plain, 8, count)
    headers: list[Headers | None] | None = None
    if flags & HEADERS:
        encoded, end = _column(plain, end + (-end % 8), count)
        try:
            headers = [_decode_headers(h) if h else None for h in encoded]
        except (msgspec.DecodeError, UnicodeDecodeError) as err:
            raise DecodeError(f"bundle headers: {err}") from err
    if end != size:
        raise DecodeError(f"{size - end} bytes after the bundle's columns")
    return payloads, headers, flags & PACKED != 0


def _offsets(values: Sequence[bytes]) -> bytes:
    offsets = array("i", accumulate(map(len, values), initial=0))
    if _SWAP:
        offsets.byteswap()
    return offsets.tobytes()


def _column(plain: bytes, start: int, count: int) -> tuple[list[bytes], int]:
    """Return (entries, where the column ends)."""
    base = start + 4 * (count + 1)
    if not count or base > len(plain):
        raise DecodeError(f"a bundle of {count} messages in {len(plain)} bytes")
    offsets = array("i", plain[start:base])
    if _SWAP:
        offsets.byteswap()
    places = offsets.tolist()
    if places[0] != 0 or places != sorted(places) or base + places[-1] > len(plain):
        raise DecodeError("bundle offsets do not fit its bytes")
    places = [base + place for place in places]
    return list(map(plain.__getitem__, map(slice, places, islice(places, 1, None)))), places[-1]
