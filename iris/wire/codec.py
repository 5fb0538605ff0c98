"""The only home of the byte layout: frames to bytes, bytes to frames, and what is authenticated.

All integers are little-endian. Every frame starts with `u32 length | u8 kind | u8 flags`, where length counts what
follows it. A data frame goes on:

    offset  field        hop fields: overwritten by relays, not authenticated
       6    u32 alias
      10    u64 hop id       who waits for the answer, on this hop; bit 63 is set in ids that a relay chose
      18    i64 deadline     µs of CLOCK_MONOTONIC, 0 = none
                         end fields: carried as they are, authenticated
      26    i64 sent         µs since 1970
      34    u32 timeout      ms, 0 = none
      38    u32 count        messages in the body
      42    u64 first        sequence of the first one for this sender and address
      50    body

TUNNEL_ACCEPT, TUNNEL_DATA and TUNNEL_END have hop fields only: their body starts at 26.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import msgspec

from iris.errors import LocalProtocolError, PeerProtocolError
from iris.wire.frames import CONTROLS, Control
from iris.wire.kinds import PROTOCOL_VERSION, Kind

PREFIX: Final = struct.Struct("<IBB")
END: Final = struct.Struct("<qIIQ")
"""sent, timeout, count, first."""
HOP: Final = struct.Struct("<IBBIQq")
"""length, kind, flags, alias, hop id, deadline."""
CAST: Final = struct.Struct("<4xHI28xI")
"""The part of a bundle that a relay reads: kind (flags in the upper byte, which are 0), alias, count."""
ANSWER: Final = struct.Struct("<4xHIQ")
"""The part of an answer that a relay reads: kind (flags likewise), alias, hop id."""
CALL: Final = struct.Struct("<4xBBIQqq4xI8x")
"""What a member reads of a request, push or survey: kind, flags, alias, hop id, deadline, sent, count."""
BUNDLE: Final = struct.Struct("<4xBxI16xq4xIQ")
"""What a receiver reads of a bundle: kind, alias, sent, count, first."""
REWRITE: Final = struct.Struct("<IQ")
"""alias, hop id; written at `ALIAS_AT`."""
LENGTH: Final = struct.Struct("<I")
ALIAS: Final = struct.Struct("<I")
DEADLINE: Final = struct.Struct("<q")
COUNT: Final = struct.Struct("<I")
FIRST: Final = struct.Struct("<Q")

KIND_AT: Final = 4
FLAGS_AT: Final = 5
ALIAS_AT: Final = 6
DEADLINE_AT: Final = 18
END_AT: Final = 26
COUNT_AT: Final = 38
FIRST_AT: Final = 42
BODY_AT: Final = 50
TUNNEL_BODY_AT: Final = 26
PREFIX_BYTES: Final = 6
LENGTH_BYTES: Final = 4
DATA_LENGTH: Final = BODY_AT - LENGTH_BYTES
"""What the length field of a data frame says, less its body."""
TUNNEL_LENGTH: Final = TUNNEL_BODY_AT - LENGTH_BYTES
"""The same of a frame with hop fields only."""

RELAY_HOP: Final = 1 << 63
"""Set in hop ids that a relay chose, so that both sides of a session number their own."""

DEFAULT_MESSAGE_LIMIT: Final = 1 << 20
MIN_MESSAGE_LIMIT: Final = 64 << 10
"""A bundle has to fit."""
MAX_MESSAGE_LIMIT: Final = 64 << 20
FRAME_OVERHEAD: Final = 4096
"""Frame limit = message limit + this: header fields, SFrame header and tag, bundle columns of one message."""
MAX_CONTROL_BYTES: Final = 64 << 10
"""A control frame is never longer, whatever the message limit."""
MAX_REPORT_BYTES: Final = 16 << 20
"""... but for the relay's own lists: Membership, Roster, Done and Report."""
RECEIVE_BYTES: Final = 256 << 10

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODERS: Final = {int(cls.FRAME): msgspec.msgpack.Decoder(cls) for cls in CONTROLS}
_LONG: Final = frozenset({Kind.MEMBERSHIP, Kind.ROSTER, Kind.DONE, Kind.REPORT})


def encode_control(body: Control) -> bytes:
    """Return the control frame of `body`, ready to send."""
    kind = body.FRAME
    data = _ENCODE(body)
    limit = MAX_REPORT_BYTES if kind in _LONG else MAX_CONTROL_BYTES
    if len(data) > limit:
        raise LocalProtocolError(
            f"a {kind.name} frame of {len(data)} bytes is over the limit of {limit}"
        )
    return PREFIX.pack(PREFIX_BYTES - LENGTH_BYTES + len(data), kind, 0) + data


def decode_control(buf: memoryview, start: int, end: int) -> Control:
    """Return the typed body of the control frame at `buf[start:end]`.

    Raises:
        PeerProtocolError: the kind is unknown, the body is no MessagePack or does not fit its struct.
    """
    kind = buf[start + KIND_AT]
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise PeerProtocolError(f"frame kind 0x{kind:02x} is not known")
    if end - start > MAX_CONTROL_BYTES + PREFIX_BYTES and kind not in _LONG:
        raise PeerProtocolError(
            f"a {Kind(kind).name} frame of {end - start} bytes is over the limit of {MAX_CONTROL_BYTES + PREFIX_BYTES}"
        )
    try:
        return decoder.decode(buf[start + PREFIX_BYTES : end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise PeerProtocolError(f"a {Kind(kind).name} frame cannot be decoded: {err}") from err


def tunnel_frame(kind: int, hop: int, body: bytes) -> bytes:
    """Return a frame with hop fields only."""
    return HOP.pack(TUNNEL_LENGTH + len(body), kind, 0, 0, hop, 0) + body


def metadata_prefix(kind: int, name: str, key_id: bytes, sender_id: bytes) -> bytes:
    """Return the constant part of the metadata that a seal authenticates; the frame's bytes 26 to 50 follow it.

    u8 version | u8 kind | u16 name length | name | key id | sender id | sent | timeout | count | first
    """
    encoded = name.encode()
    return struct.pack("<BBH", PROTOCOL_VERSION, kind, len(encoded)) + encoded + key_id + sender_id


def answer_suffix(sender_id: bytes, counter: int) -> bytes:
    """Return what the metadata of a reply, fault or answer ends with: the request's sender id and u64 counter."""
    return sender_id + counter.to_bytes(8, "little")


class ReceiveBuffer:
    """The one receive buffer of an event loop, lent to whichever connection reads next.

    Frames are handed on as views of it and are gone after the call, so a thousand idle connections cost none.
    """

    __slots__ = ("view",)

    def __init__(self, size: int = RECEIVE_BYTES) -> None:
        self.view = memoryview(bytearray(size))


class FrameReader:
    """Finds frames by length in what arrives; looks at nothing else.

    `on_frame(buf, start, end)` gets a writable view that it may change in place and must not keep: it is reused
    when the call returns. A frame is at most `limit` bytes after its length field; a longer one, or one shorter than 2,
    raises PeerProtocolError out of `received`.
    """

    __slots__ = ("_big", "_filled", "_shared", "_tail", "limit", "on_frame")

    def __init__(
        self, on_frame: Callable[[memoryview, int, int], None], shared: ReceiveBuffer, limit: int
    ) -> None:  # fmt: skip
        self.on_frame = on_frame
        """May be changed by a call of it: the next frame goes to the new one."""
        self.limit = limit
        self._shared = shared.view
        self._tail = b""
        self._big: memoryview | None = None
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return self._filled if self._big is not None else len(self._tail)

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go. Nothing else may use the shared buffer until `received`."""
        if self._big is not None:
            return self._big[self._filled :]
        tail = self._tail
        if tail:
            self._shared[: len(tail)] = tail
            return self._shared[len(tail) :]
        return self._shared

    def received(self, nbytes: int) -> None:
        """`nbytes` were written to the buffer from `get_buffer`: hand on every whole frame."""
        if self._big is not None:
            self._filled += nbytes
            if self._filled == len(self._big):
                whole, self._big = self._big, None
                self.on_frame(whole, 0, len(whole))
            return
        buf = self._shared
        end = len(self._tail) + nbytes
        self._tail = b""
        pos = 0
        unpack = LENGTH.unpack_from
        while end - pos >= 4:
            (length,) = unpack(buf, pos)
            stop = pos + 4 + length
            if length < 2 or length > self.limit:
                raise PeerProtocolError(
                    f"a frame declares {length} bytes; 2 to {self.limit} are allowed here"
                )
            if stop > end:
                if 4 + length > len(buf) - 4096:  # it would not fit: give it a buffer of its own
                    self._big = memoryview(bytearray(4 + length))
                    self._filled = end - pos
                    self._big[: self._filled] = buf[pos:end]
                    return
                break
            self.on_frame(buf, pos, stop)
            pos = stop
        if pos < end:
            self._tail = bytes(buf[pos:end])
