"""Copies of streams in a bucket whose stores are gone, and stores that make the streams again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from iris.crypto.keys import ClusterKey, GroupKey, StoreKey
from iris.streams.signed_orders import Founding, orders_to_create
from iris.wire.orders import MOVE, Definition, Order, SignedOrder, decode_order
from iris.wire.streams import LostStream, encode
from relay.store.authority import DefinitionFile
from relay.store.bucket.copies import Copies
from relay.store.bucket.copying import Copying
from relay.store.bucket.forcing import Forcing, Wish
from relay.store.bucket.objects import Objects
from relay.store.bucket.sealing import Forced
from relay.store.bucket.seen import RolledBack
from relay.store.errors import Refuse
from relay.store.log import Log
from support.founded import SALTS

T = TypeVar("T")
GROUP = GroupKey(b"g" * 32)
KEY = ClusterKey(b"k" * 32)
OTHER_KEY = ClusterKey(b"o" * 32)
LOST_NUMBER = 9
LOST_STORE = StoreKey(bytes([LOST_NUMBER]) * 32)
ORDERS = Definition("orders", topic="orders.>", max_messages=1000)


def now_us() -> int:
    return time.time_ns() // 1000


def stored_for(
    uuid: bytes, store: bytes, definition: Definition = ORDERS, *keys: ClusterKey
) -> bytes:
    """Return the definition file of a stream of a store."""
    orders = orders_to_create(definition, Founded(uuid, keys or (KEY,)), store)
    roots = [decode_order(one.order).key_id for one in orders]
    return msgspec.msgpack.encode(
        DefinitionFile(orders, b"", roots, [], SALTS.get(uuid, bytes(16)))
    )


class Founded(Founding):
    """A stream with the uuid that a test has chosen."""

    def __init__(self, uuid: bytes, keys: Sequence[ClusterKey]) -> None:
        self.keys, self.salt, self.uuid = keys, SALTS.get(uuid, bytes(16)), uuid  # type: ignore[misc]  # final elsewhere


def new_log(
    path: Path, uuid: bytes, definition: Definition = ORDERS, store: StoreKey = LOST_STORE
) -> Log:
    stored = stored_for(uuid, store.public_key, definition)
    return Log.create(str(path), uuid=uuid, definition=stored, created_us=1)


async def copy_to(
    objects: Objects, directory: Path, *logs: Log, store: StoreKey = LOST_STORE, checkpoint_bytes: int = 1 << 30,
    until: Callable[[], bool] = lambda: True,
) -> None:  # fmt: skip
    """Copy logs of a store to a bucket, and return when all of them are there, and something else holds, too."""
    copies = Copies(lambda: time.monotonic_ns() // 1000)
    copying = Copying(
        copies, objects, GROUP, store.public_key, "db-1", directory, now_us=copies.now_us, wall_us=now_us,
        checkpoint_bytes=checkpoint_bytes,
    )  # fmt: skip
    for log in logs:
        copies.of(log.uuid).opened(log)
    running = asyncio.create_task(copying.run())
    async with asyncio.timeout(20):
        while copies.writer is None or copies.lag().behind or copies.lag().bytes or not until():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    await copying.drain(5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Maker:
    """A store that makes streams again."""

    def __init__(
        self, objects: Objects, directory: Path, number: int = 1, *, group: GroupKey = GROUP
    ) -> None:
        self.key = StoreKey(bytes([number]) * 32)
        self.streams = directory / f"data{number}" / "streams"
        self.streams.mkdir(parents=True, exist_ok=True)
        self.wait_s: Callable[[bytes], float | None] = lambda store: 0.0
        self.rolled_back: RolledBack | None = None
        self.refuses: Refuse | None = None
        self.served: list[bytes] = []
        self.displaced: dict[bytes, Forced] = {}
        self.forcing = Forcing(
            objects, group, self.key.public_key, f"db-{number + 1}", self.streams.parent, self.streams, self,
            wait_s=lambda store: self.wait_s(store), wall_us=now_us, verify=self._verify,
        )  # fmt: skip

    async def _verify(self) -> None:
        if self.rolled_back is not None:
            raise self.rolled_back

    # The owner

    def check_forced(self, definition: Definition, key_ids: Collection[bytes], uuid: bytes) -> None:
        if self.refuses is not None:
            raise self.refuses

    def has(self, uuid: bytes) -> bool:
        return uuid in self.served

    def bring(self, uuid: bytes, then: Callable[[str], None]) -> None:
        self.served.append(uuid)
        then("")

    def displace(self, entry: Forced) -> None:
        self.displaced[entry.lost] = entry

    def flush(self) -> None:
        pass

    # Orders

    async def find(self, name: str = "orders", key: ClusterKey = KEY) -> list[LostStream]:
        """Return what the store finds. Raises Refuse."""
        done: asyncio.Future[list[LostStream] | Refuse] = asyncio.get_running_loop().create_future()
        self.forcing.find(name, {key.key_id}, done.set_result)
        return raised(await done)

    def wish(
        self, lost: LostStream, made: bytes, *, key: ClusterKey = KEY, target: bytes = b"",
        change: Callable[[Definition], Definition] = lambda definition: definition,
    ) -> Wish:  # fmt: skip
        """Return an order that `key` has signed."""
        order = decode_order(lost.orders[0].order)
        target = target or self.key.public_key
        definition = change(order.definition.made_again(lost.uuid))
        said = encode(
            Order(
                MOVE,
                lost.uuid,
                key.key_id,
                target,
                now_us(),
                order.definition,
                revision=order.revision + 1,
            )
        )
        moving = SignedOrder(said, key.public_key, key.sign_order(said))
        return Wish(
            lost.uuid,
            made,
            [moving],
            orders_to_create(definition, Founded(made, [key]), target),
            SALTS[made],
        )

    async def force(self, wish: Wish) -> bytes:
        """Carry an order out; return the uuid of the new log. Raises Refuse."""
        done: asyncio.Future[bytes | Refuse] = asyncio.get_running_loop().create_future()
        self.forcing.force(wish, done.set_result)
        return raised(await done)

    def open(self, uuid: bytes) -> Log:
        """Open a log that was made here."""
        return Log.open(str(self.streams / uuid.hex()))


def raised(result: T | Refuse) -> T:
    """Return a result that is not a refusal."""
    if isinstance(result, Refuse):
        raise result
    return result
