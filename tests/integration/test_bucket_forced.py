"""A stream on a disk whose store is gone is made again of its copy in the bucket, once, and says what is missing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.buckets import Group, followed, numbered
from support.stores import PATIENCE_S

from iris.errors import ConfigError, NoStream, StreamError
from relay.store.bucket.forcing import CAUSE

pytestmark = pytest.mark.timeout(120)
FAST = ("--failover-s", "1")


async def both(group: Group) -> None:
    """Start two stores that see each other."""
    for number in (1, 2):
        group.start(number, None, *FAST)
    for number in (1, 2):
        await group.logged(number, "store.copies_opened")
        await group.logged(number, "store.peer_seen")


async def test_a_lost_stream_goes_on_at_another_store_and_its_old_store_serves_it_no_more(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            lost = await client.streams.create("orders", dedup_window=3600, max_messages=1000)
            at = 1 if lost.store == group.id_of(1) else 2
            other = 3 - at
            before = numbered("before-", 20)
            for message in before:
                await client.streams.append("orders", message, key="k", message_id=message)
            async with client.streams.consumer("orders", "billing", max_deliver=1) as worker:
                worker.nack(await anext(worker), reason="broken")
                for _ in range(9):
                    worker.ack(await anext(worker))
            async with asyncio.timeout(PATIENCE_S):
                while not await client.streams.dead_letters("orders"):  # noqa: ASYNC110 - it is written in a moment
                    await asyncio.sleep(0.02)
            await followed(client, "orders.dead")
            await followed(client, "orders")
            # What is appended while the bucket is away is not in the copy.
            with pytest.raises(StreamError, match=r"has it and can be reached"):
                await client.streams.move("orders", to=group.id_of(other), force=True)
            away = tmp_path / "away"
            group.bucket.rename(away)
            group.bucket.touch()
            reader = client.streams.read("orders", "last", patience=1.0)
            assert bytes((await anext(reader)).payload) == before[-1]
            tail = await client.streams.append("orders", b"tail", message_id=b"tail")
            assert bytes((await anext(reader)).payload) == b"tail"
            saved = tmp_path / "saved"
            group.kill(at)
            shutil.copytree(group.data(at), saved)
            group.lose_disk(at)
            group.bucket.unlink()
            away.rename(group.bucket)
            # Its producer knows that the one before, which is lost, was stored.
            flying = asyncio.create_task(
                client.streams.append("orders", b"flying", timeout=PATIENCE_S)
            )

            found = await client.streams.move("orders", to=group.id_of(other), force=True)
            assert (found.store, found.end >= 21) == (group.id_of(other), True)
            assert found.uuid != lost.uuid
            assert (found.durability, found.max_messages, found.topic) == ("disk", 1000, "")
            with pytest.raises(StreamError):
                await anext(reader)  # its last look may have been before
            with pytest.raises(StreamError, match=f"is log {found.uuid} now"):
                await anext(reader)
            await reader.close()
            again = await client.streams.move("orders", to=group.id_of(other), force=True)
            assert again.uuid == found.uuid

            assert await flying == 21
            # A repeat of what the copy has is not stored, and one of what is lost is.
            assert await client.streams.append("orders", before[3], message_id=before[3]) == 3
            assert await client.streams.append("orders", b"tail", message_id=b"tail") == 22 > tail
            async with client.streams.read("orders", "first", follow=False) as reader:
                assert [bytes(one.payload) async for one in reader] == [*before, b"flying", b"tail"]
                assert [(gap.first, gap.count, gap.cause) for gap in reader.gaps] == [(20, None, CAUSE)]  # fmt: skip
            async with client.streams.consumer("orders", "billing", max_deliver=1) as worker:
                message = await anext(worker)
                assert bytes(message.payload) == before[10]
                worker.ack(message)
            (letter,) = await client.streams.dead_letters("orders")
            assert bytes(letter.payload) == before[0]

            # The old store comes back, with all that it had.
            saved.rename(group.data(at))
            group.start(at, None, *FAST)
            await group.logged(at, "store.attached", 2)
            await group.logged(at, "store.stream_displaced")
            assert (await client.streams.describe("orders")).uuid == found.uuid
            old = await client.streams.describe("orders", uuid=lost.uuid)
            assert f"has log {found.uuid} in its place" in old.failed
            async with client.streams.read("orders", uuid=lost.uuid, follow=False) as reader:
                assert [bytes(one.payload) async for one in reader] == [*before, b"tail"]
            with pytest.raises(StreamError, match="in its place"):
                await client.streams.change("orders", max_messages=7, uuid=lost.uuid, timeout=0.5)
            async with client.streams.read("orders", uuid=lost.uuid, patience=0.5) as reader:
                with pytest.raises(StreamError, match="in its place"):
                    await anext(reader)
            group.kill(at)
            group.start(at, None, *FAST)
            await group.logged(at, "store.attached", 3)
            assert (await client.streams.describe("orders")).uuid == found.uuid
            await client.streams.delete("orders", uuid=lost.uuid)
            assert not list((group.data(at) / "streams").glob(f"{lost.uuid}.forced"))
            assert (await client.streams.describe("orders")).uuid == found.uuid


async def test_what_cannot_be_moved_by_force_is_refused(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "safe")
            other = group.id_of(3 - await group.holder(client, "safe"))
            with pytest.raises(
                NoStream, match="has no copy, because another store takes it over automatically"
            ):
                await client.streams.move("safe", to=other, force=True)
            with pytest.raises(NoStream, match="has no copy of it"):
                await client.streams.move("unknown", to=other, force=True)
            with pytest.raises(
                ConfigError, match="no store of a bucket is called 'nowhere'; name one of"
            ):
                await client.streams.move("safe", to="nowhere", force=True)
            with pytest.raises(StreamError, match="move 'safe'"):
                await client.streams.move("safe.dead", to=other, force=True)
