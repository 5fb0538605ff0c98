"""Uuids of streams of tests, and the calls that create the streams."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from iris.crypto.keys import ClusterKey
from iris.errors import DecodeError
from iris.wire.orders import SignedOrder, decode_order, log_uuid
from iris.wire.streams import Create

SALTS: Final[dict[bytes, bytes]] = {}
"""What the uuids of `founded` were made of."""


def founded(key: ClusterKey, salt: bytes) -> bytes:
    """Return the uuid of a stream that `key` founds."""
    uuid = log_uuid(key.key_id, salt)
    SALTS[uuid] = salt
    return uuid


def creation(*orders: SignedOrder) -> Create:
    """Return the call that creates the stream of these orders. For a uuid that nobody founded, the salt is wrong."""
    try:
        uuid = decode_order(orders[0].order).uuid
    except DecodeError:
        uuid = b""
    return Create(list(orders), SALTS.get(uuid, bytes(16)))


def countersigned(by: ClusterKey, one: SignedOrder) -> SignedOrder:
    """Return an order that `by` has countersigned."""
    return structs.replace(one, by=by.public_key, countersignature=by.countersign_order(one.order))
