"""The bytes of what a relay of the first Iris sends."""

from __future__ import annotations

from relay.bridges.iris1.core.frames import CHUNK_LIMIT, RELAY_MAGIC, VERSION


def varint(value: int) -> bytes:
    """Return an unsigned number, seven bits a byte, the least significant first."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def binary(data: bytes) -> bytes:
    """Return bytes behind their length."""
    return varint(len(data)) + data


def init() -> bytes:
    """Return the handshake's good end."""
    return b"\x00" + binary(RELAY_MAGIC) + binary(VERSION)


def deny(reason: str) -> bytes:
    """Return the handshake's bad end."""
    return b"\x01" + binary(RELAY_MAGIC) + binary(_text(reason))


def close(reason: str) -> bytes:
    """Return the end of a connection: gracefully if there is no reason."""
    return b"\x02" + binary(_text(reason))


def broadcast(message: bytes) -> bytes:
    """Return a broadcast for a member."""
    return b"\x03" + binary(message)


def request(id: int, payload: bytes, timeout_ms: int) -> bytes:
    """Return a request for a member, under an id of ours."""
    return b"\x04" + varint(id) + binary(payload) + varint(timeout_ms)


def reply(id: int, payload: bytes, *, success: bool) -> bytes:
    """Return the reply, or the fault, for a request of the client's."""
    return b"\x05" + varint(id) + (b"\x00\x01" if success else b"\x00\x00") + binary(payload)


def no_reply(id: int) -> bytes:
    """Return that there was none in time."""
    return b"\x05" + varint(id) + b"\x01"


def publish(topic: bytes, event: bytes) -> bytes:
    """Return an event for a subscriber."""
    return b"\x08" + binary(topic) + binary(event)


def tun_init(build: int) -> bytes:
    """Return that somebody opens a tunnel, under a build id of ours."""
    return b"\x09" + varint(build) + varint(CHUNK_LIMIT)


def tun_confirm(id: int) -> bytes:
    """Return that the client's tunnel is open."""
    return b"\x0a" + varint(id) + b"\x00" + varint(CHUNK_LIMIT)


def tun_refuse(id: int) -> bytes:
    """Return that nobody accepted the client's tunnel in time."""
    return b"\x0a" + varint(id) + b"\x01"


def tun_allow(id: int, size: int) -> bytes:
    """Return that the client may send so many bytes more."""
    return b"\x0b" + varint(id) + varint(size)


def tun_transfer(id: int, size: int, chunk: bytes | memoryview) -> bytes:
    """Return a chunk; `size` is that of the message with the first of its chunks, else 0."""
    return b"".join((b"\x0c", varint(id), varint(size), varint(len(chunk)), chunk))


def tun_close(id: int, reason: str = "") -> bytes:
    """Return that a tunnel has ended: gracefully if there is no reason."""
    return b"\x0d" + varint(id) + binary(_text(reason))


def _text(reason: str) -> bytes:
    return reason.encode(errors="backslashreplace")
