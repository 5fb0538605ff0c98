"""The byte layout of frames: encoding, decoding, and the metadata that seals authenticate. No other module knows it.

All integers are little-endian. Every frame starts with `u32 length | u8 kind | u8 flags`, where length counts the bytes
after the length field. A data frame continues:

    offset  field        hop fields: overwritten by relays, not authenticated
       6    u32 alias
      10    u64 hop id       identifies the call on this hop, for its answer; bit 63 is set in ids that a relay chose
      18    i64 deadline     µs of CLOCK_MONOTONIC, 0 = none
                         end fields: carried unchanged, authenticated
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
from iris.wire.frames import Control
from iris.wire.kinds import PROTOCOL_VERSION, Kind
from iris.wire.link_frames import CONTROLS
from iris.wire.texts import encode_cleaned

PREFIX: Final = struct.Struct("<IBB")
END: Final = struct.Struct("<qIIQ")
"""End fields: sent, timeout, count, first."""
HOP: Final = struct.Struct("<IBBIQq")
"""Prefix and hop fields: length, kind, flags, alias, hop id, deadline."""
CAST: Final = struct.Struct("<4xHI28xI")
"""Fields of a bundle that a relay reads: kind (with the flags, which are 0, in the upper byte), alias, count."""
ANSWER: Final = struct.Struct("<4xHIQ")
"""Fields of an answer that a relay reads: kind (with the flags in the upper byte), alias, hop id."""
CALL: Final = struct.Struct("<4xBBIQqq4xI8x")
"""Fields of a request, push or survey that a member reads: kind, flags, alias, hop id, deadline, sent, count."""
BUNDLE: Final = struct.Struct("<4xBxI16xq4xIQ")
"""Fields of a bundle that a receiver reads: kind, alias, sent, count, first."""
REWRITE: Final = struct.Struct("<IQ")
"""Fields that a relay overwrites at `ALIAS_AT`: alias, hop id."""
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
"""Value of the length field of a data frame, without its body."""
TUNNEL_LENGTH: Final = TUNNEL_BODY_AT - LENGTH_BYTES
"""Value of the length field of a frame with hop fields only, without its body."""

RELAY_HOP: Final = 1 << 63
"""Bit set in hop ids that a relay chose, so that both sides of a session can number their own."""

DEFAULT_MESSAGE_LIMIT: Final = 1 << 20
MIN_MESSAGE_LIMIT: Final = 64 << 10
"""Large enough for a bundle."""
MAX_MESSAGE_LIMIT: Final = 64 << 20
FRAME_OVERHEAD: Final = 4096
"""Frame limit minus message limit: header fields, SFrame header and tag, bundle columns of one message."""
MAX_CONTROL_BYTES: Final = 64 << 10
"""Largest control frame, whatever the message limit; except for the kinds in `_LONG`."""
MAX_REPORT_BYTES: Final = 16 << 20
"""Largest Membership, Roster, Done and Report, which are lists made by the relay."""
RECEIVE_BYTES: Final = 256 << 10
PORTION_BYTES: Final = 1 << 10
"""Bytes of frames after which a reader that shares its turn asks whether it may go on."""

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODERS: Final = {int(cls.FRAME): msgspec.msgpack.Decoder(cls) for cls in CONTROLS}
_LONG: Final = frozenset({Kind.MEMBERSHIP, Kind.ROSTER, Kind.DONE, Kind.REPORT})


def encode_control(body: Control) -> bytes:
    """Return the control frame of `body`, ready to send."""
    kind = body.FRAME
    try:
        data = _ENCODE(body)
    except UnicodeEncodeError:  # such as a path in the text of an error
        data = encode_cleaned(body)
    limit = MAX_REPORT_BYTES if kind in _LONG else MAX_CONTROL_BYTES
    if len(data) > limit:
        raise LocalProtocolError(
            f"a {kind.name} frame of {len(data)} bytes is over the limit of {limit}"
        )
    return PREFIX.pack(PREFIX_BYTES - LENGTH_BYTES + len(data), kind, 0) + data


def check_control(body: Control) -> None:
    """Raise LocalProtocolError if the receiver of this control frame would refuse it as malformed."""
    try:
        _DECODERS[body.FRAME].decode(_ENCODE(body))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as err:
        raise LocalProtocolError(
            f"a {body.FRAME.name} frame would break the protocol, so it was not sent: {err}"
        ) from err


def decode_control(buf: memoryview, start: int, end: int) -> Control:
    """Return the typed body of the control frame at `buf[start:end]`.

    Raises:
        PeerProtocolError: the kind is unknown, the frame is too long, or the body is not MessagePack for its struct.
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
    """Return the constant part of the metadata that a seal authenticates. The frame's bytes 26 to 50 are
    appended to it.

    u8 version | u8 kind | u16 name length | name | key id | sender id | sent | timeout | count | first
    """
    encoded = name.encode()
    return struct.pack("<BBH", PROTOCOL_VERSION, kind, len(encoded)) + encoded + key_id + sender_id


def answer_suffix(sender_id: bytes, counter: int) -> bytes:
    """Return the end of the metadata of a reply, fault or answer: the request's sender id and u64 counter."""
    return sender_id + counter.to_bytes(8, "little")


OnFrame = Callable[[memoryview, int, int], object]
"""Handler of a frame at `buf[start:end]`."""


class ReceiveBuffer:
    """The one receive buffer of an event loop, used by whichever connection reads next.

    Frames are passed on as views of it, valid only during the call, so idle connections need no buffer of their own.
    """

    __slots__ = ("view",)

    def __init__(self, size: int = RECEIVE_BYTES) -> None:
        self.view = memoryview(bytearray(size))


class FrameReader:
    """Splits received bytes into frames by their length field. It looks at nothing else.

    `on_frame(buf, start, end)` gets a writable view, which it may change but must not keep: the buffer is
    reused when the call returns. A frame has 2 to `limit` bytes after its length field; otherwise `received`
    raises PeerProtocolError.

    With `may_go_on`, a reader stops where that returns False, and keeps the bytes behind as `waiting` until `go_on`.
    It is passed the number of bytes at hand, after each `PORTION_BYTES` of frames and after each frame for which
    `on_frame` returns True, because it cost more than its length tells.
    """

    __slots__ = (
        "_filled",
        "_rest",
        "_shared",
        "big",
        "limit",
        "may_go_on",
        "on_frame",
        "tail",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, on_frame: OnFrame, shared: ReceiveBuffer, limit: int,
        may_go_on: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.on_frame = on_frame
        """It may replace itself during a call; the next frame then goes to the new one."""
        self.limit = limit
        self.waiting = False
        """Whether it has stopped. Nothing may be received meanwhile."""
        self.may_go_on = may_go_on
        self._shared = shared.view
        self.tail = b""
        """The beginning of an unfinished frame."""
        self.big: memoryview | None = None
        """Memory for an unfinished frame that is too large for the shared buffer."""
        self._filled = 0
        self._rest: memoryview | None = None
        """What waits, in memory of its own; None: nothing."""

    @property
    def held_bytes(self) -> int:
        """Bytes held of a frame whose end was not received. Frames that wait do not count."""
        return self._filled if self.big is not None else len(self.tail)

    def get_buffer(self) -> memoryview:
        """Return the view for the next bytes. Nothing else may use the shared buffer until `received` is called."""
        if self.big is not None:
            return self.big[self._filled :]
        tail = self.tail
        if tail:
            self._shared[: len(tail)] = tail
            return self._shared[len(tail) :]
        return self._shared

    def received(self, nbytes: int) -> None:
        """Pass on whole frames, after `nbytes` were written to the view from `get_buffer`."""
        if self.big is not None:
            self._continue_big(self.big, nbytes)
            return
        buf = self._shared
        end = len(self.tail) + nbytes
        self.tail = b""
        pos = 0
        ask_at = PORTION_BYTES
        unpack = LENGTH.unpack_from
        while end - pos >= 4:
            (length,) = unpack(buf, pos)
            stop = pos + 4 + length
            if length < 2 or length > self.limit:
                raise self._bad_length(length)
            if stop > end:
                if 4 + length > len(buf) - 4096:  # too large for the shared buffer
                    self._begin_big(buf[pos:end], 4 + length)
                    return
                break
            if self.on_frame(buf, pos, stop) or (stop >= ask_at and stop < end):
                ask_at = stop + PORTION_BYTES
                if self._stops(buf, stop, end):
                    return
            pos = stop
        if pos < end:
            self.tail = bytes(buf[pos:end])

    # What is rare has methods of its own: a longer loop would be slower.

    def _bad_length(self, length: int) -> PeerProtocolError:
        return PeerProtocolError(
            f"a frame declares {length} bytes; 2 to {self.limit} are allowed here"
        )

    def _begin_big(self, part: memoryview, size: int) -> None:
        """Allocate memory for a frame of which `part` was received."""
        self.big = memoryview(bytearray(size))
        self._filled = len(part)
        self.big[: self._filled] = part

    def _continue_big(self, big: memoryview, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(big):
            self.big = None
            self.on_frame(big, 0, len(big))
            self._stops(big, len(big), len(big))

    def _stops(self, buf: memoryview, pos: int, end: int) -> bool:
        """Return whether to stop now; what is in `buf` from `pos` on waits then."""
        if self.may_go_on is None or self.may_go_on(end):
            return False
        self.waiting = True
        self._rest = memoryview(bytearray(buf[pos:end])) if pos < end else None
        return True

    @property
    def rest_bytes(self) -> int:
        """Bytes of frames that wait."""
        return 0 if self._rest is None else len(self._rest)

    def go_on(self) -> None:
        """Pass on frames that waited, until `may_go_on` returns False again."""
        self.waiting = False
        rest, self._rest = self._rest, None
        if rest is None:
            return
        shared, self._shared = self._shared, rest
        try:
            self.received(len(rest))
        finally:
            self._shared = shared

    def end(self) -> None:
        """Pass on nothing any more, and hold nothing: neither bytes nor those that it called. Idempotent."""
        self.on_frame, self.may_go_on = ignored, None
        self.tail, self.big, self._rest, self._filled = b"", None, None, 0
        self.waiting = False


def ignored(buf: memoryview, start: int, end: int) -> None:
    """Ignore a frame: the connection has not begun, or ends."""
