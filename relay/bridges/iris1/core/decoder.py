"""What a client of the first Iris sends, as frames.

A frame is one byte of operation and its fields; nothing says how long it is, so it is read field by field, and what was
read is kept until the rest comes. Of a binary only what has arrived is held, whatever length it announces; one over the
message limit is read past, so that its sender can be told by the frame's own answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from relay.bridges.iris1.core.frames import (
    CHUNK_LIMIT,
    MAX_NAME,
    MAX_SKIPPED,
    Broadcast,
    Close,
    Frame,
    Init,
    Op,
    Oversized,
    Publish,
    Reply,
    Request,
    Subscribe,
    TunAllow,
    TunClose,
    TunConfirm,
    TunInit,
    TunTransfer,
    Unsubscribe,
    Violation,
)  # fmt: skip

_LAYOUTS: Final[dict[int, tuple[Callable[..., Frame], str]]] = {
    Op.INIT: (Init, "nnn"),
    Op.CLOSE: (Close, ""),
    Op.BROADCAST: (Broadcast, "np"),
    Op.REQUEST: (Request, "vnpv"),
    Op.REPLY: (Reply, "vbp"),
    Op.SUBSCRIBE: (Subscribe, "n"),
    Op.UNSUBSCRIBE: (Unsubscribe, "n"),
    Op.PUBLISH: (Publish, "np"),
    Op.TUN_INIT: (TunInit, "vnv"),
    Op.TUN_CONFIRM: (TunConfirm, "vv"),
    Op.TUN_ALLOW: (TunAllow, "vv"),
    Op.TUN_TRANSFER: (TunTransfer, "vvc"),
    Op.TUN_CLOSE: (TunClose, "v"),
}
"""What a client may send. Fields: n a name, p a payload, c a chunk, v a varint, b a bool."""


class Decoder:
    """What a client sends, as frames: `feed` bytes, then call `next_frame` until it returns None."""

    __slots__ = (
        "_buffer", "_fields", "_init_received", "_layout", "_length", "_make", "_partial", "_position", "_skipped", "message_limit",
    )  # fmt: skip

    def __init__(self, message_limit: int) -> None:
        self.message_limit = message_limit
        """Bytes of a payload that is kept."""
        self._buffer = b""
        self._position = 0
        self._make: Callable[..., Frame] | None = None
        self._layout = ""
        self._fields: list[Any] = []
        self._length = -1
        """Of the binary begun, if one is."""
        self._partial = bytearray()
        """What has come of it."""
        self._skipped = 0
        """How much of it was read past, if it is too long to be kept."""
        self._init_received = False

    @property
    def held_bytes(self) -> int:
        """What has arrived and is no whole field yet, or was not asked for."""
        return len(self._buffer) - self._position + len(self._partial)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame was begun and not completed."""
        return self._make is not None or self.held_bytes > 0

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        rest = self._buffer[self._position :]
        self._buffer = rest + data if rest else data
        self._position = 0

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, None if there is none; raises Violation, after which nothing more is to be read."""
        if self._make is None:
            if self._position == len(self._buffer):
                return None
            op = self._buffer[self._position]
            layout = _LAYOUTS.get(op)
            if layout is None or self._init_received == (op == Op.INIT):
                raise Violation(f"operation 0x{op:02x} is unknown or not allowed now", silent=True)
            self._init_received = True
            self._position += 1
            self._make, self._layout = layout
        fields = self._fields
        for kind in self._layout[len(fields) :]:
            value = self._varint() if kind == "v" else self._binary(kind)
            if value is None:
                return None
            fields.append(value)
        frame = self._make(*fields)
        self._make = None
        self._fields = []
        return frame

    def _binary(self, kind: str) -> bytes | bool | Oversized | None:
        if kind == "b":
            return self._bool()
        length = self._length
        if length < 0:
            announced = self._varint()
            if announced is None:
                return None
            length = announced
            _check_length(kind, length)
            if kind != "p" or length <= self.message_limit:
                end = self._position + length
                if end <= len(self._buffer):  # all of it is there: as it is nearly always
                    data = self._buffer[self._position : end]
                    self._position = end
                    return data
            self._length = length
        if kind == "p" and length > self.message_limit:
            return self._skip()
        partial = self._partial
        end = self._position + length - len(partial)
        partial += self._buffer[self._position : end]
        self._position = min(end, len(self._buffer))
        if len(partial) < length:
            return None
        self._partial = bytearray()
        self._length = -1
        return bytes(partial)

    def _skip(self) -> Oversized | None:
        step = min(len(self._buffer) - self._position, self._length - self._skipped)
        self._position += step
        self._skipped += step
        if self._skipped < self._length:
            return None
        size, self._length, self._skipped = self._length, -1, 0
        return Oversized(size, self.message_limit)

    def _bool(self) -> bool | None:
        if self._position == len(self._buffer):
            return None
        value = self._buffer[self._position]
        if value > 1:
            raise Violation(f"0x{value:02x} is not a bool, which is 0x00 or 0x01")
        self._position += 1
        return value == 1

    def _varint(self) -> int | None:
        buffer, start = self._buffer, self._position
        value = shift = 0
        for byte in buffer[start : start + 10]:
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                self._position = start + shift // 7 + 1
                return value
            shift += 7
        else:
            if shift < 70:
                return None
        raise Violation("a varint is longer than 64 bits")


def _check_length(kind: str, length: int) -> None:
    """Raise Violation for a binary that nobody waits for the end of."""
    if kind == "n" and length > MAX_NAME:
        raise Violation(f"a name of {length} bytes is over the limit of {MAX_NAME}")
    if kind == "c" and length > CHUNK_LIMIT:
        raise Violation(f"a chunk of {length} bytes is over the limit of {CHUNK_LIMIT}")
    if length > MAX_SKIPPED:
        raise Violation(f"a message of {length} bytes is over the limit of {MAX_SKIPPED}")
