"""Streams and their keys: who lacks one finds nothing, and what was sealed under a retired key is never mixed with
the new.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.stores import whole

from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import NoStream
from iris.testing import LocalCluster


async def test_who_lacks_the_key_finds_no_stream_and_cannot_delete_it(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        stranger = Keyring.single(ClusterKey(bytes(32)))
        async with cluster.client() as client, cluster.client(keyring=stranger) as other:
            await client.streams.create("orders", topic="orders")
            with pytest.raises(NoStream):
                await other.streams.describe("orders")
            with pytest.raises(NoStream):
                await other.streams.delete("orders")
            assert await other.streams.list() == []
            assert len(await client.streams.list()) == 1


async def test_a_rotated_key_opens_the_past_while_the_keyring_has_it(tmp_path: Path) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    async with LocalCluster(data=tmp_path) as cluster:
        first = Keyring.single(old)
        async with cluster.client(keyring=first) as client:
            await client.streams.create("orders", topic="orders")
            await client.streams.append("orders", b"under the old")
        both = first.add("default", new).promote("default")
        async with cluster.client(keyring=both) as client:
            (changed,) = await client.streams.share_keys()
            assert await client.streams.share_keys() == []
            assert set(changed.key_ids) == {old.key_id.hex(), new.key_id.hex()}
            await client.streams.append("orders", b"under the new")
            await client.publish("orders", b"published under the new")
            await client.flush()
            await cluster.settle()
            assert len(await whole(client, "orders")) == 3
        async with cluster.client(keyring=both.retire("default")) as client:
            async with client.streams.read("orders", follow=False) as reader:
                payloads = [m.payload async for m in reader]
            assert payloads == [b"under the new", b"published under the new"]
            assert [gap.cause for gap in reader.gaps] == [
                f"unreadable: sealed under key {old.key_id.hex()[:8]}, which is not in this keyring"
            ]


async def test_a_reader_that_goes_on_opens_nothing_with_a_key_that_was_retired_meanwhile(
    tmp_path: Path,
) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    single = Keyring.single(old)
    both = single.add("default", new)
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client(keyring=both) as writer,
        cluster.client(keyring=single) as client,
    ):
        await writer.streams.create("orders")
        await writer.streams.append("orders", b"before")
        async with client.streams.read("orders") as reader:
            arriving = aiter(reader)
            assert (await anext(arriving)).payload == b"before"
            await client.reload_keys(both.promote("default").retire("default"))
            await writer.streams.append("orders", b"under the old")
            await writer.reload_keys(both.promote("default"))
            await writer.streams.append("orders", b"under the new")
            assert (await anext(arriving)).payload == b"under the new"
            assert [gap.cause for gap in reader.gaps] == [
                f"unreadable: sealed under key {old.key_id.hex()[:8]}, which is not in this keyring"
            ]
        proven = [s["keys"] for s in (await client.status())["sessions"]]
        assert [new.key_id.hex()[:8]] in proven


async def test_streams_of_one_topic_under_different_keys_all_record_it_after_a_restart(
    tmp_path: Path,
) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    names = [f"s{number}" for number in range(6)]
    async with LocalCluster(data=tmp_path) as cluster:
        both = Keyring.single(old).add("default", new)
        async with cluster.client(keyring=both) as client:
            await client.streams.create("both", topic="orders")
        async with cluster.client(keyring=Keyring.single(new)) as client:
            for name in names:
                await client.streams.create(name, topic="orders")
            await cluster.stop_store()
            await cluster.start_store()
            await client.publish("orders", b"x")
            await client.flush()
            await cluster.settle()
            for name in ("both", *names):
                assert [m.payload for m in await whole(client, name)] == [b"x"], name
