"""A uuid belongs to the key that founded its stream, at every store of a bucket, as processes: whoever knows it does no
harm with another key, a rotation changes nothing of it, and a recorded create makes no second log.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.buckets import Group, numbered, whole
from support.stores import KEY, PATIENCE_S

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import StreamError
from iris.streams.signed_orders import Founding, orders_to_create
from iris.wire.orders import KEEP, Definition, Order, SignedOrder
from iris.wire.streams import Create, Described, FindStore, StoreInfo, encode

pytestmark = pytest.mark.timeout(180)

NEW = ClusterKey(b"n" * 32)
STRANGER = ClusterKey(b"z" * 32)


async def both(group: Group) -> None:
    """Start two stores that see each other."""
    for number in (1, 2):
        group.start(number)
    for number in (1, 2):
        await group.logged(number, "store.bucket_opened")
        await group.logged(number, "store.peer_seen")


async def created(client: iris.Client, group: Group, number: int, call: Create) -> Any:
    """Return what a store answers to a call that creates a stream."""
    return await client.streams._stores.ask(
        group.id_of(number), None, call, Described, timeout=PATIENCE_S, shown="orders", writes=True
    )


async def info_of(client: iris.Client, group: Group, number: int) -> StoreInfo:
    return await client.streams._stores.ask(
        group.id_of(number), None, FindStore(), StoreInfo, timeout=PATIENCE_S, shown="orders"
    )


async def restart(group: Group, number: int) -> None:
    assert await group.stop(number) == 0
    opened = group.log(number).count('"event": "store.bucket_opened"')
    group.start(number)
    await group.logged(number, "store.bucket_opened", opened + 1)


async def test_who_knows_a_uuid_creates_no_log_of_it_and_its_stream_goes_on(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await client.streams.create("local", durability="disk")
            for name in ("orders", "local"):
                await client.streams.append(name, b"before")
            config = iris.ClientConfig(relay=group.rig.socket)
            async with iris.connect(keyring=Keyring.single(STRANGER), config=config) as stranger:
                for name in ("orders", "local"):
                    uuid = (await client.streams.describe(name)).uuid
                    for number in (1, 2):
                        info = await info_of(stranger, group, number)
                        for store in (info.key, info.group):
                            for definition in (Definition(name), Definition("others")):
                                order = Order(
                                    KEEP, bytes.fromhex(uuid), STRANGER.key_id, store,
                                    time.time_ns() // 1000, definition,
                                )  # fmt: skip
                                said = encode(order)
                                signed = SignedOrder(
                                    said, STRANGER.public_key, STRANGER.sign_order(said)
                                )
                                with pytest.raises(StreamError):
                                    await created(
                                        stranger, group, number, Create([signed], bytes(16))
                                    )
                assert await stranger.streams.list() == []
            for number in (1, 2):
                await restart(group, number)
            for name in ("orders", "local"):
                await client.streams.append(name, b"after", timeout=PATIENCE_S)
                assert await whole(client, name) == [b"before", b"after"]


async def test_a_stream_whose_first_key_was_retired_moves_is_taken_over_and_restored(
    tmp_path: Path,
) -> None:
    old = Keyring.single(KEY)
    rotated = old.add("default", NEW).promote("default")
    config = iris.ClientConfig(relay=tmp_path / "iris" / "relay.sock")
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            uuid = (await client.streams.describe("orders")).uuid
        async with iris.connect(keyring=rotated, config=config) as client:
            await client.streams.share_keys()
        new = rotated.retire("default")
        async with iris.connect(keyring=new, config=config) as client:
            await client.streams.change("orders", max_messages=1000)
            for body in numbered("m", 3):
                await client.streams.append("orders", body, timeout=PATIENCE_S)
            first = await group.holder(client, "orders")
            second = 3 - first
            moved = await client.streams.move("orders", to=group.id_of(second), timeout=PATIENCE_S)
            assert moved.uuid == uuid
            assert await whole(client, "orders") == numbered("m", 3)
            group.kill(second)
            group.lose_disk(second)
            await client.streams.append("orders", b"m3", timeout=PATIENCE_S)
            assert await group.holder(client, "orders") == first
            assert (await client.streams.describe("orders")).uuid == uuid
            assert await group.stop(first) == 0
            group.lose_disk(first)
            key = tmp_path / "saved.key"
            key.touch(0o600)
            key.write_text(group.key.reveal())
            command = [
                sys.executable, "-m", "relay.store", "restore", str(group.data(3)), "--bucket", group.url,
                "--bucket-key", str(key),
            ]  # fmt: skip
            group.data(3).mkdir()
            done = await asyncio.to_thread(warm.run, command, text=True, env=group.rig.environ)
            assert done.returncode == 0, done.stderr
            group.start(3)
            await group.logged(3, "store.bucket_opened")
            assert await client.streams.append("orders", b"m4", timeout=PATIENCE_S) == 4
            info = await client.streams.describe("orders")
            assert (info.uuid, info.max_messages) == (uuid, 1000)
            assert await whole(client, "orders") == numbered("m", 5)


async def test_a_recorded_create_makes_no_second_log_after_its_stream_moved_away(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client, group.rig.client() as another:
            info = await info_of(client, group, 1)
            founding = Founding([KEY])
            recorded = Create(
                orders_to_create(Definition("orders"), founding, info.group), founding.salt
            )
            await created(client, group, 1, recorded)
            await client.streams.append("orders", b"before", timeout=PATIENCE_S)
            await client.streams.move("orders", to=group.id_of(2), timeout=PATIENCE_S)
            for _ in range(2):
                with pytest.raises(StreamError):
                    await created(another, group, 1, recorded)
                answer = await created(another, group, 2, recorded)
                assert answer.next == 1  # a retry, which the holder confirms
                (found,) = await another.streams.list(timeout=PATIENCE_S)
                assert (found.uuid, found.store) == (founding.uuid.hex(), group.id_of(2))
                await restart(group, 1)
            await another.streams.append("orders", b"after", timeout=PATIENCE_S)
            assert await whole(client, "orders") == [b"before", b"after"]
