"""Frames as a peer of a later minor version sends them."""

from __future__ import annotations

import msgspec

from iris.wire.codec import encode_control
from iris.wire.frames import Control
from iris.wire.kinds import PROTOCOL_MINOR

LATER = PROTOCOL_MINOR + 1


def later(frame: Control) -> bytes:
    """Return a greeting with the next minor version, or another frame as it is, and a field that nobody knows yet."""
    data = encode_control(frame)
    fields = msgspec.msgpack.decode(data[6:])
    if "minor" in fields:
        fields["minor"] = LATER
    body = msgspec.msgpack.encode({"of a later minor": [1], **fields})
    return (2 + len(body)).to_bytes(4, "little") + data[4:6] + body
