"""Decode the frames that a client of the first Iris sends.

A frame is one byte of operation and its fields. It does not carry its own length, so it is read field
by field, and decoded fields are held until the rest arrives. Only bytes that have arrived are held,
whatever length a binary field announces. A payload over the message limit is skipped, so that the
sender can be answered in the usual way.
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
"""Operation -> (frame type, fields). Fields: n a name, p a payload, c a chunk, v a varint, b a bool."""


class Decoder:
    """Incremental decoder: `feed` bytes, then call `next_frame` until it returns None."""

    __slots__ = (
        "_buffer", "_fields", "_init_received", "_layout", "_length", "_make", "_partial", "_position", "_skipped", "message_limit",
    )  # fmt: skip

    def __init__(self, message_limit: int) -> None:
        self.message_limit = message_limit
        """Longest payload that is held, in bytes. A longer one is skipped and becomes `Oversized`."""
        self._buffer = b""
        self._position = 0
        self._make: Callable[..., Frame] | None = None
        self._layout = ""
        self._fields: list[Any] = []
        self._length = -1
        """Announced length of the binary field that is being read; -1 if there is none."""
        self._partial = bytearray()
        """Bytes of that field that have arrived."""
        self._skipped = 0
        """Bytes of that field that were skipped because it is over the limit."""
        self._init_received = False

    @property
    def held_bytes(self) -> int:
        """Bytes received that are not part of a complete field yet."""
        return len(self._buffer) - self._position + len(self._partial)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._make is not None or self.held_bytes > 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        rest = self._buffer[self._position :]
        self._buffer = rest + data if rest else data
        self._position = 0

    def next_frame(self) -> Frame | None:
        """Return the next complete frame or None. After a Violation the decoder must not be used again."""
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
                if end <= len(self._buffer):  # all of it has arrived, which is the usual case
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
    """Raise Violation if a binary field announces a length that is never accepted."""
    if kind == "n" and length > MAX_NAME:
        raise Violation(f"a name of {length} bytes is over the limit of {MAX_NAME}")
    if kind == "c" and length > CHUNK_LIMIT:
        raise Violation(f"a chunk of {length} bytes is over the limit of {CHUNK_LIMIT}")
    if length > MAX_SKIPPED:
        raise Violation(f"a message of {length} bytes is over the limit of {MAX_SKIPPED}")
