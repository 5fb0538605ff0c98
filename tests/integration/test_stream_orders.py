"""Only holders of a stream's key may change and end it, and they do not undo each other's changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from integration.test_stream_links import created
from msgspec import structs
from support.gateways import World, joined
from support.waiting import eventually

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import NoMembers, NoStream, StreamError
from iris.streams import signed_orders
from iris.testing import LocalCluster
from iris.wire.orders import END, KEEP, SignedOrder, decode_order
from iris.wire.streams import Change, Delete, Refused, encode

pytestmark = pytest.mark.timeout(60)

OWNER, STRANGER = ClusterKey(b"o" * 32), ClusterKey(b"z" * 32)


class Claimed:
    """Claims a key that it does not have."""

    key_id = OWNER.key_id


def foreign(first: SignedOrder, action: str = KEEP, **changes: Any) -> SignedOrder:
    """Return an order under a key that the stream does not have, otherwise like one that was seen on the way."""
    seen = decode_order(first.order)
    smaller = structs.replace(seen.definition, max_messages=1)
    said = encode(
        structs.replace(seen, action=action, key_id=STRANGER.key_id, definition=smaller, **changes)
    )
    return SignedOrder(said, STRANGER.public_key, STRANGER.sign_order(said))


async def test_a_site_without_a_key_can_neither_take_over_nor_end_a_stream(
    world: World,
    tmp_path: Path,
) -> None:
    eu = await world.start("eu", world.peer("us"), data=tmp_path / "data")
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    async with (
        iris.connect(str(eu.config.socket_path), keyring=iris.Keyring.single(OWNER)) as owner,
        iris.connect(str(us.config.socket_path), keyring=iris.Keyring.single(STRANGER)) as other,
    ):
        made = await created(owner, "orders")
        await owner.streams.append_many("orders", [b"%d" % n for n in range(50)])
        known = await owner.streams._stores.describe("orders", "", timeout=5.0)
        (first,) = known.described.orders
        await other.status()
        session = other._attachment.session
        for theirs in us.router.sessions.values():
            theirs.proven.add(OWNER.key_id)  # as its own relay could claim
        session.out._proven.add(OWNER.key_id)

        async def attack(call: Change | Delete, *, channel: bool) -> Any:
            address, body = f"eu:{made.uuid}", encode(call)
            while True:
                waiter = asyncio.get_running_loop().create_future()
                if channel:  # the owner's channel: an order must still prove its right
                    session.store_calls.send(address, OWNER, body, timeout_ms=5000, waiter=waiter)
                else:
                    session.store_calls.plain(
                        address, cast(Any, Claimed), body, timeout_ms=5000, waiter=waiter, shown=""
                    )
                other._runtime.touch()
                try:
                    return await waiter
                except (NoMembers, NoStream):  # its gateway has not announced it yet
                    await asyncio.sleep(0.01)

        for channel in (False, True):
            for issued_us in (known.order.issued_us + 1, 1 << 62):
                for more in ({}, {"revision": 1}, {"revision": 1 << 62}):
                    at = {"issued_us": issued_us, **more}
                    said = await attack(Change([foreign(first, **at)]), channel=channel)
                    assert isinstance(said, Refused), said
                    assert not channel or said.code == "order", said
                    said = await attack(Delete([foreign(first, END, **at)]), channel=channel)
                    assert isinstance(said, Refused), said
                    assert not channel or said.code == "order", said
        there = await owner.streams.describe("orders")
        assert (there.uuid, there.messages, there.max_messages) == (made.uuid, 50, 0)
        assert there.key_ids == [OWNER.key_id.hex()]
        changed = await owner.streams.change("orders", max_messages=100)
        assert changed.max_messages == 100


# -- holders of a key --------------------------------------------------------------------------------------------


def before_each(
    client: iris.Client, kind: type, work: Callable[[], Awaitable[object]], times: int
) -> None:
    """Run `work` before each of a client's first calls of a kind, after the client has read what it changes."""
    stores = client.streams._stores
    ask = stores.ask
    left = times

    async def slow(address: str, key: Any, call: Any, *rest: Any, **options: Any) -> Any:
        nonlocal left
        if isinstance(call, kind) and left:
            left -= 1
            await work()
        return await ask(address, key, call, *rest, **options)

    stores.ask = slow  # type: ignore[method-assign]  # for this client alone


async def test_two_changes_at_once_are_both_made(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", max_messages=100)
    before_each(other, Change, lambda: client.streams.change("orders", max_messages=5), 1)
    changed = await other.streams.change("orders", max_bytes=1 << 20)
    assert (changed.max_messages, changed.max_bytes) == (5, 1 << 20)
    assert await client.streams.describe("orders") == changed


async def test_a_change_that_loses_to_others_every_time_raises_an_error(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", max_messages=100)
    before_each(other, Change, lambda: client.streams.change("orders", max_messages=5), 100)
    with pytest.raises(StreamError, match="others changed it during each of 8 attempts; try again"):
        await other.streams.pause("orders")
    assert not (await client.streams.describe("orders")).paused


async def test_a_stream_that_was_changed_meanwhile_is_deleted_all_the_same(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    before_each(other, Delete, lambda: client.streams.pause("orders"), 1)
    await other.streams.delete("orders")
    with pytest.raises(NoStream):
        await client.streams.describe("orders")


async def test_two_clients_that_promote_a_copy_at_once_both_succeed(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", topic="orders")
    async with client.streams.mirror("orders", "copy", follow=False) as mirror:
        await mirror.run()
    before_each(other, Change, lambda: client.streams.promote("copy", record=False), 1)
    promoted = await other.streams.promote("copy")
    assert (promoted.mirror, promoted.topic) == ("", "")  # as who came first wanted it


async def test_a_client_whose_clock_is_wrong_learns_the_difference(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    for ahead_s, said in ((3600, r"3,\d+ s after"), (-3600, r"3,\d+ s before")):
        wrong = SimpleNamespace(time_ns=lambda ahead_s=ahead_s: time.time_ns() + ahead_s * 10**9)
        with monkeypatch.context() as patched:
            patched.setattr(signed_orders, "time", wrong)
            for call in (client.streams.create("wages"), client.streams.delete("orders")):
                with pytest.raises(StreamError, match=f"{said} the time of the store's clock"):
                    await call
    assert [info.name for info in await client.streams.list()] == ["orders"]


async def test_a_client_believes_the_order_of_the_highest_revision(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    known = await client.streams._stores.describe("orders", "", timeout=5.0)
    (key,) = client.keyring.for_cluster("orders")

    def signed(revision: int, issued_us: int) -> SignedOrder:
        definition = structs.replace(known.order.definition, max_messages=revision)
        order = structs.replace(
            known.order, revision=revision, issued_us=issued_us, definition=definition
        )
        return SignedOrder(encode(order), key.public_key, key.sign_order(encode(order)))

    for orders in ([signed(1, 1 << 62), signed(2, 1)], [signed(2, 1), signed(1, 1 << 62)]):
        said = structs.replace(known.described, orders=orders)
        found = client.streams._stores.verified("orders", said)
        assert (found.order.definition.max_messages, found.revision) == (2, 2)


async def test_a_rotated_key_changes_and_ends_streams_by_itself_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        first = Keyring.single(OWNER)
        async with cluster.client(keyring=first) as client:
            await client.streams.create("orders", topic="orders")
            await client.streams.append("orders", b"under the old")
            async with client.streams.consumer("orders", "work", max_deliver=1) as work:
                work.nack(await anext(work))
                await work.flush()
                async with client.streams.read("orders.dead", patience=5.0) as reader:
                    assert (await anext(reader)).dead
        both = first.add("default", STRANGER).promote("default")
        async with cluster.client(keyring=both) as client:
            (changed,) = await client.streams.share_keys()
            keys = {OWNER.key_id.hex(), STRANGER.key_id.hex()}
            assert (changed.name, set(changed.key_ids)) == ("orders", keys)
            assert set((await client.streams.describe("orders.dead")).key_ids) == keys
        await cluster.stop_store()
        await cluster.start_store()
        async with cluster.client(keyring=both.retire("default")) as client:
            assert (await client.streams.change("orders", max_messages=7)).max_messages == 7
            await cluster.stop_store()
            await cluster.start_store()
            assert (await client.streams.describe("orders", timeout=20.0)).max_messages == 7
            await client.streams.delete("orders")
            assert await client.streams.list() == []


async def test_holders_of_different_keys_of_a_stream_change_it_in_turn(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        both = Keyring.single(OWNER).add("default", STRANGER)
        async with cluster.client(keyring=both) as client:
            await client.streams.create("orders")
        for number, key in enumerate((OWNER, STRANGER, STRANGER, OWNER), 1):
            async with cluster.client(keyring=Keyring.single(key)) as client:
                changed = await client.streams.change("orders", max_messages=number)
                assert changed.max_messages == number


async def test_a_client_with_a_key_that_is_new_to_the_stream_deletes_it_with_the_other_key(
    tmp_path: Path,
) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        first = Keyring.single(OWNER)
        async with cluster.client(keyring=first) as client:
            await client.streams.create("orders")
        async with cluster.client(keyring=first.add("default", STRANGER)) as client:
            await client.streams.delete("orders")
            assert await client.streams.list() == []


async def test_dead_letters_are_not_deleted_and_their_stream_is_not_by_mistake(
    setting: Any,
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"bad")
    async with client.streams.consumer("orders", "work", max_deliver=1) as work:
        work.nack(await anext(work), reason="no such customer")
        await work.flush()
        async with client.streams.read("orders.dead", patience=5.0) as reader:
            assert (await anext(reader)).dead
    for call in (
        other.streams.delete("orders.dead"),
        other.streams.change("orders.dead", max_messages=1),
    ):
        with pytest.raises(StreamError, match="change or delete 'orders'"):
            await call
    assert (await other.streams.describe("orders")).max_messages == 0
