"""Orders that create, change and end streams, as holders of their keys sign them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey, public_id
from iris.streams.calls import Known
from iris.wire.orders import END, KEEP, ORDER_FRESH_US, Definition, Order, SignedOrder
from iris.wire.streams import encode


def orders_to_create(
    definition: Definition, keys: Iterable[ClusterKey], uuid: bytes, store: bytes
) -> list[SignedOrder]:
    """Return orders to keep a new stream, one for each of the keys; `store` is the store's public key."""
    now_us = time.time_ns() // 1000
    version = definition.order_version
    return [
        _signed(key, Order(KEEP, uuid, key.key_id, store, now_us, definition, version))
        for key in keys
    ]


def orders_to_change(
    definition: Definition, keys: Iterable[ClusterKey], of: Known, keyring: Keyring
) -> list[SignedOrder]:
    """Return orders of the next revision under all our keys of the stream, and under `keys`.

    Our key that signed the latest known order countersigns the orders of keys that are new to the stream.
    """
    has, issued_us = _ours(of, keyring), _time(of)
    wanted = {key.key_id: key for key in keys}
    return [
        _signed(key, _next(KEEP, key, of, definition, issued_us), None if key_id in has else has[of.order.key_id])
        for key_id, key in {**wanted, **has}.items()
    ]  # fmt: skip


def orders_to_end(of: Known, keyring: Keyring) -> list[SignedOrder]:
    """Return orders to end a stream, under all our keys of it."""
    definition, issued_us = of.order.definition, _time(of)
    return [
        _signed(key, _next(END, key, of, definition, issued_us)) for key in _ours(of, keyring).values()
    ]  # fmt: skip


def _ours(of: Known, keyring: Keyring) -> dict[bytes, ClusterKey]:
    ids = [public_id(signed.public_key) for signed in of.described.orders]
    return {key_id: key for key_id in ids if (key := keyring.by_id(key_id))}


def _time(of: Known) -> int:
    """Return the time for new orders of a stream: now, or just after the known order if that is not far ahead."""
    before_us, now_us = of.order.issued_us, time.time_ns() // 1000
    if before_us - now_us < ORDER_FRESH_US // 2:
        return max(now_us, before_us + 1)  # stores from before there were revisions compare it
    return now_us


def _next(action: str, key: ClusterKey, of: Known, definition: Definition, issued_us: int) -> Order:
    uuid, store = of.order.uuid, of.order.store
    return Order(
        action, uuid, key.key_id, store, issued_us, definition, definition.order_version, of.revision + 1
    )  # fmt: skip


def _signed(key: ClusterKey, order: Order, by: ClusterKey | None = None) -> SignedOrder:
    """Return an order signed by its key, and countersigned by `by` if given."""
    said = encode(order)
    signature = key.sign_order(said)
    if by is None:
        return SignedOrder(said, key.public_key, signature)
    return SignedOrder(said, key.public_key, signature, by.public_key, by.countersign_order(said))
