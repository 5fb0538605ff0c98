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
    ORDER_FRESH_US,
    Definition,
    Order,
    SignedOrder,
    decode_order,
    log_uuid,
)
from iris.wire.streams import NO_LOG, LostStream, encode


class Founding:
    """A new stream: its keys, of which the first founds it, and its uuid, which is made of that key."""

    def __init__(self, keys: Sequence[ClusterKey]) -> None:
        self.keys: Final = keys
        self.salt: Final = os.urandom(16)
        self.uuid: Final = log_uuid(keys[0].key_id, self.salt)


def orders_to_create(definition: Definition, founding: Founding, store: bytes) -> list[SignedOrder]:
    """Return the orders that create a stream, one for each key; `store` is the store's public key."""
    now_us, version, founder = time.time_ns() // 1000, definition.order_version, founding.keys[0]
    return [
        _signed(
            key,
            Order(KEEP, founding.uuid, key.key_id, store, now_us, definition, version),
            None if key is founder else founder,
        )
        for key in founding.keys
    ]


def orders_to_change(
    definition: Definition, keys: Iterable[ClusterKey], stream: VerifiedStream, keyring: Keyring, group: bytes = b""
) -> list[SignedOrder]:  # fmt: skip
    """Return orders of the next revision, under `keys` and under every key of the stream in the keyring.

    Orders under keys that are new to the stream are countersigned by the key that signed the latest known order.
    With `group`, the public key of the stores that share a bucket, the stream is to join that bucket.
    """
    has, issued_us = _our_keys(stream, keyring), _issue_time_us(stream)
    wanted = {key.key_id: key for key in keys}
    return [
        _signed(key, _next_order(KEEP, key, stream, definition, issued_us, group), None if key_id in has else has[stream.order.key_id])
        for key_id, key in {**wanted, **has}.items()
    ]  # fmt: skip


def orders_to_end(stream: VerifiedStream, keyring: Keyring) -> list[SignedOrder]:
    """Return orders that end a stream, under every key of the stream in the keyring."""
    definition, issued_us = stream.order.definition, _issue_time_us(stream)
    return [
        _signed(key, _next_order(END, key, stream, definition, issued_us)) for key in _our_keys(stream, keyring).values()
    ]  # fmt: skip


def orders_to_move(stream: VerifiedStream, keyring: Keyring, target: bytes) -> list[SignedOrder]:
    """Return orders that move a stream to the store with the public key `target`, under every key of the stream in
    the keyring.
    """
    definition, issued_us = stream.order.definition, _issue_time_us(stream)
    orders = [
        _next_order(MOVE, key, stream, definition, issued_us)
        for key in _our_keys(stream, keyring).values()
    ]
    return [
        _signed(key, structs.replace(order, store=target))
        for key, order in zip(_our_keys(stream, keyring).values(), orders, strict=True)
    ]


def orders_to_find_lost(name: str, keys: Iterable[ClusterKey], store: bytes) -> list[SignedOrder]:
    """Return orders that ask the store with the public key `store` for copies of streams of this name."""
    now_us, definition = time.time_ns() // 1000, Definition(name)
    return [
        _signed(key, Order(MOVE, NO_LOG, key.key_id, store, now_us, definition)) for key in keys
    ]


def orders_to_force(
    lost: LostStream, order: Order, keyring: Keyring, target: bytes
) -> list[SignedOrder]:
    """Return orders that move a lost stream, which `order` defines, to the store with the public key `target`."""
    now_us, definition = time.time_ns() // 1000, order.definition
    revision = max(decode_order(signed.order).revision for signed in lost.orders) + 1
    keys = {public_id(signed.public_key) for signed in lost.orders}
    return [
        _signed(
            key,
            Order(
                MOVE,
                lost.uuid,
                key_id,
                target,
                now_us,
                definition,
                definition.order_version,
                revision,
            ),
        )
        for key_id in sorted(keys)
        if (key := keyring.by_id(key_id)) is not None
    ]


def _our_keys(stream: VerifiedStream, keyring: Keyring) -> dict[bytes, ClusterKey]:
    ids = [public_id(signed.public_key) for signed in stream.described.orders]
    return {key_id: key for key_id in ids if (key := keyring.by_id(key_id))}


def _issue_time_us(stream: VerifiedStream) -> int:
    """Return the time for new orders of a stream: now, or just after the known order if that is not far ahead."""
    before_us, now_us = stream.order.issued_us, time.time_ns() // 1000
    if before_us - now_us < ORDER_FRESH_US // 2:
        return max(now_us, before_us + 1)  # stores that predate revisions compare the time
    return now_us


def _next_order(
    action: str, key: ClusterKey, stream: VerifiedStream, definition: Definition, issued_us: int, store: bytes = b""
) -> Order:  # fmt: skip
    uuid, store = stream.order.uuid, store or stream.order.store
    return Order(
        action, uuid, key.key_id, store, issued_us, definition, definition.order_version, stream.revision + 1
    )  # fmt: skip


def _signed(key: ClusterKey, order: Order, by: ClusterKey | None = None) -> SignedOrder:
    """Return an order signed by its key, and countersigned by `by` if given."""
    said = encode(order)
    signature = key.sign_order(said)
    if by is None:
        return SignedOrder(said, key.public_key, signature)
    return SignedOrder(said, key.public_key, signature, by.public_key, by.countersign_order(said))
