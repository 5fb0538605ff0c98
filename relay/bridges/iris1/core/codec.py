"""Encode the frames that a relay of the first Iris sends."""

from __future__ import annotations

from relay.bridges.iris1.core.frames import CHUNK_LIMIT, RELAY_MAGIC, VERSION


def varint(value: int) -> bytes:
    """Return an unsigned number in LEB128: seven bits a byte, least significant first."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def binary(data: bytes) -> bytes:
    """Return bytes with their length in front."""
    return varint(len(data)) + data


def init() -> bytes:
    """Return INIT, which accepts the client's handshake."""
    return b"\x00" + binary(RELAY_MAGIC) + binary(VERSION)


def deny(reason: str) -> bytes:
    """Return DENY, which refuses the client's handshake."""
    return b"\x01" + binary(RELAY_MAGIC) + binary(_text(reason))


def close(reason: str) -> bytes:
    """Return CLOSE, which ends the connection. An empty reason means a graceful end."""
    return b"\x02" + binary(_text(reason))


def broadcast(message: bytes) -> bytes:
    """Return a broadcast for a member."""
    return b"\x03" + binary(message)


def request(id: int, payload: bytes, timeout_ms: int) -> bytes:
    """Return a request for a member; `id` is chosen by the bridge."""
    return b"\x04" + varint(id) + binary(payload) + varint(timeout_ms)


def reply(id: int, payload: bytes, *, success: bool) -> bytes:
    """Return the reply to a request of the client, or its fault."""
    return b"\x05" + varint(id) + (b"\x00\x01" if success else b"\x00\x00") + binary(payload)


def no_reply(id: int) -> bytes:
    """Return the answer that a request of the client timed out."""
    return b"\x05" + varint(id) + b"\x01"


def publish(topic: bytes, event: bytes) -> bytes:
    """Return an event for a subscriber."""
    return b"\x08" + binary(topic) + binary(event)


def tun_init(build: int) -> bytes:
    """Return the offer of a tunnel to the client; `build` is an id chosen by the bridge."""
    return b"\x09" + varint(build) + varint(CHUNK_LIMIT)


def tun_confirm(id: int) -> bytes:
    """Return the confirmation that the client's tunnel is open."""
    return b"\x0a" + varint(id) + b"\x00" + varint(CHUNK_LIMIT)


def tun_refuse(id: int) -> bytes:
    """Return the answer that nobody accepted the client's tunnel in time."""
    return b"\x0a" + varint(id) + b"\x01"


def tun_allow(id: int, size: int) -> bytes:
    """Return a grant: the client may send `size` more bytes on the tunnel."""
    return b"\x0b" + varint(id) + varint(size)


def tun_transfer(id: int, size: int, chunk: bytes | memoryview) -> bytes:
    """Return a chunk. `size` is the size of the whole message in its first chunk, and 0 in all others."""
    return b"".join((b"\x0c", varint(id), varint(size), varint(len(chunk)), chunk))


def tun_close(id: int, reason: str = "") -> bytes:
    """Return the end of a tunnel. An empty reason means a graceful end."""
    return b"\x0d" + varint(id) + binary(_text(reason))


def _text(reason: str) -> bytes:
    return reason.encode(errors="backslashreplace")
