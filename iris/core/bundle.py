"""Bundles: several messages for one address, stored as columns. A bundle is the plain text of one seal.

    u32 count | u32 flags | payload column [| key column] [| headers column] [| method column]
    column = (count + 1) x i32 offsets, the first 0, then the bytes; the next column starts at a multiple of 8

Flag 1: there is a headers column; each entry is a MessagePack map of str to str, or empty.
Flag 2: the payloads are MessagePack.
Flag 4: there is a key column; an empty entry means that the message has no key.
Flag 8: the bundle is compressed (`iris.core.compression`).
Flag 16: there is a method column, in a call of a method only. Receivers that do not know methods refuse the flag, so
    they never run such a call with their only handler.

The offsets and bytes of a column form an Arrow binary array without conversion.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Final

import msgspec

from iris.core.compression import expanded
from iris.errors import DecodeError, EncodeError, InvalidName, MessageTooLarge
from iris.wire.names import check_method, plural

CUT_BYTES: Final = 65 << 10
"""Largest size of a bundle of several messages. 64 KiB of payloads fit if each has 512 bytes or more,
so powers of two fit."""
MESSAGE_BYTES: Final = 8
"""Bytes that each message adds to the size compared with `CUT_BYTES`; this bounds the number of messages, too."""
HEADERS: Final = 1
PACKED: Final = 2
KEYS: Final = 4
METHOD: Final = 16
MAX_HEADERS_BYTES: Final = 3072

_HEAD: Final = struct.Struct("<II")
_ONE: Final = struct.Struct("<IIii")
_I32: Final = struct.Struct("<i")
_PAIR: Final = struct.Struct("<ii")
_SWAP: Final = sys.byteorder != "little"
_encode_headers: Final = msgspec.msgpack.Encoder().encode
_decode_headers: Final = msgspec.msgpack.Decoder(dict[str, str]).decode

Headers = dict[str, str]


class BundleBuilder:
    """A bundle under construction, and the rule for when it is full.

    Messages that are objects and messages that are bytes never share a bundle. Payloads, keys and headers, plus
    `MESSAGE_BYTES` for each message, are at most `CUT_BYTES`, unless the bundle holds one message only.
    """

    __slots__ = ("headers", "packed", "payloads", "plain", "size")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.headers: list[Headers | None] | None = None
        self.packed = False
        self.plain = True
        """Whether the bundle has neither headers nor objects."""
        self.size = 0

    def fits(self, size: int, packed: bool) -> bool:
        """Return whether a message whose `message_bytes` is `size` may join this bundle."""
        return not self.payloads or (self.size + size <= CUT_BYTES and packed is self.packed)

    def append(self, payload: bytes, headers: Headers | None, packed: bool, size: int) -> None:
        """Add a message. The caller must have checked `fits`."""
        if not self.payloads:
            self.packed = packed
            self.plain = not packed
        if headers and self.headers is None:
            self.headers = [None] * len(self.payloads)
            self.plain = False
        self.payloads.append(payload)
        if self.headers is not None:
            self.headers.append(headers or None)
        self.size += size

    def cut(self) -> tuple[list[bytes], list[Headers | None] | None]:
        """Return the payloads and headers, and start the next bundle."""
        taken = self.payloads, self.headers
        self.payloads, self.headers, self.size = [], None, 0
        return taken


def message_bytes(payload: bytes, headers: Headers | None) -> int:
    """Return the size of a message as compared with `CUT_BYTES`, without its key."""
    return len(payload) + MESSAGE_BYTES + (headers_bytes(headers) if headers else 0)


class Column(msgspec.Struct, frozen=True, gc=False):
    """Position of a column in a bundle's plain text: its offsets from `offsets` to `base`, its bytes
    from `base` to `end`."""

    offsets: int
    base: int
    end: int


class Columns(msgspec.Struct, frozen=True, gc=False):
    """Positions of the columns of a bundle of `count` messages, and the bundle's `flags`."""

    count: int
    flags: int
    payloads: Column
    keys: Column | None
    headers: Column | None
    methods: Column | None = None


def encode_bundle(
    payloads: Sequence[bytes],
    headers: Sequence[Headers | None] | None,
    packed: bool,
    keys: Sequence[bytes] | None = None,
) -> bytes:
    """Return the plain text of a bundle; `headers` and `keys` have one entry per payload, or are None."""
    flags = (HEADERS if headers is not None else 0) | (PACKED if packed else 0)
    count = len(payloads)
    if count == 1 and headers is None and keys is None:
        return encode_single(payloads[0], None, packed)
    columns: list[Sequence[bytes]] = [payloads]
    if keys is not None:
        flags |= KEYS
        columns.append(keys)
    if headers is not None:
        columns.append([_encode_headers(h) if h else b"" for h in headers])
    return join_columns(count, flags, [(_offsets(column), column) for column in columns])


def encode_single(payload: bytes, headers: Headers | None, packed: bool, method: str = "") -> bytes:
    """Return the plain text of a bundle of one message, which is a call of `method` if that is not empty."""
    if method:
        return _encode_call(payload, headers, packed, method)
    if headers:
        return encode_bundle((payload,), (headers,), packed)
    return _ONE.pack(1, PACKED if packed else 0, 0, len(payload)) + payload


def _encode_call(payload: bytes, headers: Headers | None, packed: bool, method: str) -> bytes:
    flags = METHOD | (HEADERS if headers else 0) | (PACKED if packed else 0)
    columns = [payload, *([_encode_headers(headers)] if headers else []), method.encode()]
    return join_columns(1, flags, [(_offsets((column,)), (column,)) for column in columns])


def join_columns(
    count: int, flags: int, columns: Sequence[tuple[bytes, Sequence[bytes | memoryview]]]
) -> bytes:
    """Return the plain text of a bundle of these columns, each as its offsets (i32, little-endian) and
    parts of its bytes."""
    parts: list[bytes | memoryview] = [_HEAD.pack(count, flags)]
    size = _HEAD.size
    for offsets, values in columns:
        parts += [bytes(-size % 8), offsets, *values]
        size += -size % 8 + len(offsets) + sum(map(len, values))
    return b"".join(parts)


def headers_bytes(headers: Headers) -> int:
    """Return the encoded size of `headers` in bytes."""
    return len(_encode_headers(headers))


def check_headers(headers: Headers) -> Headers:
    """Return `headers`.

    Raises:
        EncodeError: they are not a dict of str to str, or a text has surrogates.
        MessageTooLarge: they take more than `MAX_HEADERS_BYTES`.
    """
    if not isinstance(headers, dict):
        raise EncodeError(f"headers must be a dict of str to str, not {type(headers).__name__}")
    for text in (*headers, *headers.values()):
        if type(text) is not str:
            raise EncodeError(f"header names and values must be str, not {type(text).__name__}")
    try:
        size = headers_bytes(headers)
    except UnicodeEncodeError as err:
        wrong = next(filter(_broken, headers.items()))
        raise EncodeError(
            f"the header {wrong[0]!r} has a surrogate, which UTF-8 cannot encode"
        ) from err
    if size > MAX_HEADERS_BYTES:
        raise MessageTooLarge(
            f"headers of {size} bytes are over the limit of {MAX_HEADERS_BYTES}; put what is large into the payload"
        )
    return headers


def _broken(header: tuple[str, str]) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in "".join(header))


def decode_bundle(plain: bytes) -> tuple[list[bytes], list[Headers | None] | None, bool]:
    """Return (payloads, headers or None, packed), without the keys.

    Raises:
        DecodeError: the columns are inconsistent, so the sender, who holds the key, has a bug.
    """
    size = len(plain)
    if size < 16:
        raise DecodeError(f"a bundle of {size} bytes is shorter than the minimum of 16")
    count, flags, zero, first = _ONE.unpack_from(plain)
    if count == 1 and not flags & ~PACKED:
        if zero or first != size - 16:
            raise DecodeError(f"offsets of a bundle do not match its size of {size} bytes")
        return [plain[16:]], None, flags & PACKED != 0
    payloads, _, headers, packed = decode_keyed(plain)
    return payloads, headers, packed


def decode_single(plain: bytes) -> tuple[bytes, Headers | None, bool, str]:
    """Return (payload, headers, packed, method) of a bundle of one message. The method is empty if it has none.

    Raises:
        DecodeError: as `decode_bundle`, or the bundle holds several messages, or the method is not a method name.
    """
    size = len(plain)
    if size >= 16:
        count, flags, zero, first = _ONE.unpack_from(plain)
        if count == 1 and not flags & ~PACKED and not zero and first == size - 16:
            return plain[16:], None, flags != 0, ""
    plain = expanded(plain)
    found = find_columns(plain, HEADERS | PACKED | KEYS | METHOD)
    if found.count != 1:
        raise DecodeError(f"a frame of this kind must carry 1 message, not {found.count}")
    headers = decode_headers(plain, found.headers)[0] if found.headers is not None else None
    (payload,) = _values(plain, found.payloads)
    method = _decode_method(plain, found.methods) if found.methods is not None else ""
    return payload, headers, found.flags & PACKED != 0, method


def split_single(plain: bytes) -> tuple[bytes, bytes] | None:
    """Return (payload, key or b"") of a bundle of one message without headers, the usual one of a message with a key.

    Returns None for any other bundle, also for one that is damaged: see `decode_keyed`.
    """
    size = len(plain)
    if size < 16:
        return None
    count, flags, zero, length = _ONE.unpack_from(plain)
    if count != 1 or flags & ~(PACKED | KEYS) or zero or length < 0:
        return None
    end = 16 + length
    if not flags & KEYS:
        return (plain[16:], b"") if end == size else None
    start = end + (-end % 8)
    if start + 8 > size:
        return None
    zero, length = _PAIR.unpack_from(plain, start)
    if zero or length != size - start - 8:
        return None
    return plain[16:end], plain[start + 8 :]


def decode_keyed(
    plain: bytes,
) -> tuple[list[bytes], list[bytes] | None, list[Headers | None] | None, bool]:
    """Return (payloads, keys or None, headers or None, packed). Raises DecodeError as `decode_bundle`."""
    plain = expanded(plain)
    found = find_columns(plain)
    keys = _values(plain, found.keys) if found.keys is not None else None
    headers = decode_headers(plain, found.headers) if found.headers is not None else None
    return _values(plain, found.payloads), keys, headers, found.flags & PACKED != 0


def find_columns(plain: bytes, known: int = HEADERS | PACKED | KEYS) -> Columns:
    """Return the positions of the columns of an expanded bundle, whose flags must all be `known`.

    The columns fill the bundle exactly. Only the first and last offset of each column are checked.

    Raises:
        DecodeError: the columns are inconsistent.
    """
    size = len(plain)
    if size < 16:
        raise DecodeError(f"a bundle of {size} bytes is shorter than the minimum of 16")
    count, flags = _HEAD.unpack_from(plain)
    if flags & ~known:
        raise DecodeError(
            f"bundle flags {flags:#x} are not known; the sender may run a later version of Iris"
        )
    payloads = _find(plain, 8, count)
    end = payloads.end
    keys = headers = methods = None
    if flags & KEYS:
        keys = _find(plain, end + (-end % 8), count)
        end = keys.end
    if flags & HEADERS:
        headers = _find(plain, end + (-end % 8), count)
        end = headers.end
    if flags & METHOD:
        methods = _find(plain, end + (-end % 8), count)
        end = methods.end
    if end != size:
        raise DecodeError(f"a bundle has {size - end} bytes after its last column")
    return Columns(count, flags, payloads, keys, headers, methods)


def decode_headers(plain: bytes, column: Column) -> list[Headers | None]:
    """Return the headers of each message. Raises DecodeError."""
    try:
        return [_decode_headers(h) if h else None for h in _values(plain, column)]
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise DecodeError(f"headers of a bundle cannot be decoded: {err}") from err


def _decode_method(plain: bytes, column: Column) -> str:
    try:
        return check_method(_values(plain, column)[0].decode())
    except (UnicodeDecodeError, InvalidName) as err:
        raise DecodeError(f"the method of a call cannot be decoded: {err}") from err


def _offsets(values: Sequence[bytes]) -> bytes:
    offsets = array("i", accumulate(map(len, values), initial=0))
    if _SWAP:
        offsets.byteswap()
    return offsets.tobytes()


def _find(plain: bytes, start: int, count: int) -> Column:
    base = start + 4 * (count + 1)
    if not count or base > len(plain):
        raise DecodeError(
            f"a bundle of {plural(len(plain), 'byte')} cannot hold {plural(count, 'message')}"
        )
    first, last = _I32.unpack_from(plain, start)[0], _I32.unpack_from(plain, base - 4)[0]
    if first or not 0 <= last <= len(plain) - base:
        raise DecodeError(f"offsets of a bundle do not match its size of {len(plain)} bytes")
    return Column(start, base, base + last)


def _values(plain: bytes, column: Column) -> list[bytes]:
    offsets = array("i", plain[column.offsets : column.base])
    if _SWAP:
        offsets.byteswap()
    ends = offsets.tolist()
    if ends != sorted(ends):
        raise DecodeError("offsets of a bundle are not in ascending order")
    ends = [column.base + end for end in ends]
    return list(map(plain.__getitem__, map(slice, ends, islice(ends, 1, None))))
