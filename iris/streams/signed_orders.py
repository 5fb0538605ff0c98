"""Makes the signed orders that create, change and end streams."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import structs

from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey, public_id
from iris.streams.verified import VerifiedStream
from iris.wire.orders import (
    END,
    KEEP,
    MOVE,
    Definition,
    Order,
    SignedOrder,
    log_uuid,
)
from iris.wire.streams import encode


class Founding:
    """A new stream: its keys, of which the first founds it, and its uuid, which is made of that key."""

    def __init__(self, keys: Sequence[ClusterKey]) -> None:
        self.keys: Final = keys
        self.salt: Final = os.urandom(16)
        self.uuid: Final = log_uuid(keys[0].key_id, self.salt)


def orders_to_create(definition: Definition, founding: Founding, store: bytes) -> list[SignedOrder]:
    """Return the orders that create a stream, one for each key; `store` is the store's public key."""
    now_us, founder = time.time_ns() // 1000, founding.keys[0]
    return [
        _signed(
            key,
            Order(KEEP, founding.uuid, key.key_id, store, now_us, definition),
            None if key is founder else founder,
        )
        for key in founding.keys
    ]


def orders_to_change(
    definition: Definition, keys: Iterable[ClusterKey], stream: VerifiedStream, keyring: Keyring
) -> list[SignedOrder]:
    """Return orders of the next revision, under `keys` and under every key of the stream in the keyring.

    Orders under keys that are new to the stream are countersigned by the key that signed the latest known order.
    """
    has = _our_keys(stream, keyring)
    wanted = {key.key_id: key for key in keys}
    return [
        _signed(key, _next_order(KEEP, key, stream, definition), None if key_id in has else has[stream.order.key_id])
        for key_id, key in {**wanted, **has}.items()
    ]  # fmt: skip


def orders_to_end(stream: VerifiedStream, keyring: Keyring) -> list[SignedOrder]:
    """Return orders that end a stream, under every key of the stream in the keyring."""
    definition = stream.order.definition
    return [
        _signed(key, _next_order(END, key, stream, definition)) for key in _our_keys(stream, keyring).values()
    ]  # fmt: skip


def orders_to_move(stream: VerifiedStream, keyring: Keyring, target: bytes) -> list[SignedOrder]:
    """Return orders that move a stream to the store with the public key `target`, under every key of the stream in
    the keyring.
    """
    definition = stream.order.definition
    return [
        _signed(key, structs.replace(_next_order(MOVE, key, stream, definition), store=target))
        for key in _our_keys(stream, keyring).values()
    ]


def _our_keys(stream: VerifiedStream, keyring: Keyring) -> dict[bytes, ClusterKey]:
    ids = [public_id(signed.public_key) for signed in stream.described.orders]
    return {key_id: key for key_id in ids if (key := keyring.by_id(key_id))}


def _next_order(
    action: str, key: ClusterKey, stream: VerifiedStream, definition: Definition
) -> Order:
    uuid, store, now_us = stream.order.uuid, stream.order.store, time.time_ns() // 1000
    return Order(action, uuid, key.key_id, store, now_us, definition, stream.revision + 1)


def _signed(key: ClusterKey, order: Order, by: ClusterKey | None = None) -> SignedOrder:
    """Return an order signed by its key, and countersigned by `by` if given."""
    said = encode(order)
    signature = key.sign_order(said)
    if by is None:
        return SignedOrder(said, key.public_key, signature)
    return SignedOrder(said, key.public_key, signature, by.public_key, by.countersign_order(said))
