"""Streams in a bucket: what was acknowledged outlives stores and disks, and is there once."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from support import warm
from support.buckets import Group, append_all, numbered, whole
from support.waiting import eventually

import iris
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError
from relay.store.bucket.keeper import STATE_FILE
from relay.store.bucket.shelf import DIRECTORY
from relay.store.process import BucketSettings, StoreProcess

pytestmark = pytest.mark.timeout(120)


async def next_of(client: iris.Client, name: str) -> int:
    """Return the next offset of a stream that is about to be made, or to be served by another store."""
    return (await client.streams.describe(name, timeout=60)).end


async def test_a_killed_store_goes_on_with_what_it_had_acknowledged(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            sent: list[bytes] = []
            for turn in range(3):
                messages = numbered(f"{turn}-", 300)
                tasks = await append_all(client, "orders", messages)
                await tasks[0]
                group.kill(1)
                group.start(1)
                offsets = await asyncio.gather(*tasks)
                assert len(set(offsets)) == len(messages)
                sent += messages
            assert sorted(await whole(client, "orders")) == sorted(sent)
            assert await group.stop(1) == 0


async def test_the_other_store_serves_the_streams_of_one_that_is_gone_with_its_disk(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        group.start(2)
        async with group.rig.client() as client:
            await group.create(client, "orders", dedup_window=3600)
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            await client.streams.append("orders", b"once", message_id="a")
            messages = numbered("", 300)
            tasks = await append_all(client, "orders", messages)
            await tasks[0]
            first = await group.holder(client, "orders")
            group.kill(first)
            group.lose_disk(first)
            await asyncio.gather(*tasks)
            assert await group.holder(client, "orders") == 3 - first
            await client.streams.append("orders", b"twice", message_id="a")
            assert sorted(await whole(client, "orders")) == sorted([b"once", *messages])


async def test_who_never_used_a_stream_waits_while_another_store_takes_it_over(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        group.start(2)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            await client.streams.append("orders", b"before")
            first = await group.holder(client, "orders")
        group.kill(first)
        async with group.rig.client() as client:
            assert await client.streams.append("orders", b"after", timeout=60) == 1
            assert await group.holder(client, "orders") == 3 - first
            with pytest.raises(iris.NoStream):  # nobody is waited for any more
                await client.streams.describe("other", timeout=60)


async def test_a_holder_that_wakes_up_serves_nothing_of_what_it_lost(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        group.start(2)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            await client.streams.append("orders", b"before")
            first = await group.holder(client, "orders")
            tasks = await append_all(client, "orders", numbered("during-", 50))
            group.signal(first, signal.SIGSTOP)
            group.rig.end_relay(signal.SIGKILL)  # it would take 20 s to see that the store hangs
            group.rig.start_relay()
            await asyncio.gather(*tasks)
            assert await group.holder(client, "orders") == 3 - first
            seen = await whole(client, "orders")
            group.signal(first, signal.SIGCONT)
            await group.logged(first, "store.journal_lost")
            await client.streams.append("orders", b"after")
            assert await whole(client, "orders") == [*seen, b"after"]
            assert sorted(seen) == sorted([b"before", *numbered("during-", 50)])


PAUSE = ("--bucket-pause-ms", "100")


async def test_consumers_and_dead_letters_go_on_at_the_other_store(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *PAUSE)
        group.start(2, None, *PAUSE)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            for message in numbered("", 10):
                await client.streams.append("orders", message)
            async with client.streams.consumer(
                "orders", "billing", shared=True, max_deliver=1
            ) as worker:
                for turn in range(5):
                    message = await anext(worker)
                    if turn == 0:
                        worker.nack(message, reason="broken")
                    else:
                        worker.ack(message)
            first = await group.holder(client, "orders")
            assert await next_of(client, "orders.dead") == 1
            group.kill(first)
            group.lose_disk(first)
            async with client.streams.consumer(
                "orders", "billing", shared=True, max_deliver=1
            ) as worker:
                left = [await anext(worker) for _ in range(5)]
                assert [bytes(one.payload) for one in left] == numbered("", 10)[5:]
                worker.ack(*left)
            assert await next_of(client, "orders.dead") == 1


async def test_a_bucket_that_is_away_holds_up_only_its_streams(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await client.streams.create("local")
            away = tmp_path / "away"
            group.bucket.rename(away)
            group.bucket.write_text("not a directory")
            waiting = asyncio.create_task(client.streams.append("orders", b"m", timeout=60))
            await group.logged(1, "store.bucket_away")
            assert await client.streams.append("local", b"m") == 0
            assert not waiting.done()
            group.bucket.unlink()
            away.rename(group.bucket)
            assert await waiting == 0


async def test_a_store_with_another_group_key_serves_nothing_and_says_why(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            group.start(2, GroupKey(bytes(32)))
            await group.logged(2, "store.bucket_damaged")
            assert "it was not written with this group key" in group.log(2)
            assert await client.streams.append("orders", b"m") == 0


async def test_a_bucket_is_restored_to_an_empty_machine(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            for name in ("orders", "payments"):
                await group.create(client, name, max_messages=1000)
                await client.streams.append(name, name.encode(), key="k")
            await client.streams.delete("payments")
            assert await group.stop(1) == 0
            group.lose_disk(1)
            data = group.data(2)
            data.mkdir()
            key = tmp_path / "saved.key"
            key.touch(0o600)
            key.write_text(group.key.reveal())
            command = [
                sys.executable, "-m", "relay.store", "restore", str(data), "--bucket", group.url, "--bucket-key", str(key),
            ]  # fmt: skip
            environ = group.rig.environ
            done = await asyncio.to_thread(warm.run, command, text=True, env=environ)
            assert (done.returncode, done.stdout, done.stderr) == (
                0,
                f"{data}: 1 stream from {group.url}\n",
                "",
            )
            again = await asyncio.to_thread(warm.run, command, text=True, env=environ)
            assert again.returncode == 2
            assert "name an empty directory, or start that store" in again.stderr
            group.start(2)
            await group.logged(2, "store.bucket_opened")
            assert await whole(client, "orders") == [b"orders"]
            assert (await client.streams.describe("orders")).max_messages == 1000
            assert await client.streams.append("orders", b"next") == 1


async def test_a_restore_that_cannot_work_says_why_in_one_line(tmp_path: Path) -> None:
    key = tmp_path / "group.key"
    key.touch(0o600)
    key.write_text(GroupKey(bytes(32)).reveal())
    (tmp_path / "file").touch()
    cases = {
        (f"file://{tmp_path}/file", str(key)): "journals/000000000001: Not a directory",
        (f"file://{tmp_path}/empty", str(key)): "no store has written to it; check the URL",
        (f"file://{tmp_path}/empty", f"{key}.other"): "is missing; copy it from one of them or from a backup",
    }  # fmt: skip
    for (url, file), says in cases.items():
        command = [sys.executable, "-m", "relay.store", "restore", str(tmp_path / "data"), "--bucket", url, "--bucket-key", file]  # fmt: skip
        done = await asyncio.to_thread(warm.run, command, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert says in done.stderr


async def test_a_store_that_has_used_its_bucket_is_not_told_to_make_another_key(
    tmp_path: Path,
) -> None:
    async def connect(factory: object) -> object:
        raise AssertionError

    settings = BucketSettings(f"file://{tmp_path}/bucket", None)
    store = StoreProcess(tmp_path / "data", connect, bucket=settings)
    with pytest.raises(ConfigError, match=r"is missing; copy it .* `iris key store-group"):
        store.open()
    state = tmp_path / "data" / DIRECTORY / STATE_FILE
    state.parent.mkdir()
    state.touch()
    with pytest.raises(ConfigError, match=r"is missing; copy it .* --bucket-key") as missing:
        store.open()
    assert "store-group" not in str(missing.value)


async def test_an_object_that_was_swapped_is_noticed_at_the_next_start(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for message in numbered("", 3):
                await client.streams.append("orders", message)
            group.kill(1)
            objects = sorted((group.bucket / "journal").glob("*/*"))
            one, other = objects[-2:]
            one.write_bytes(other.read_bytes())
            group.start(1)
            await group.logged(1, "store.bucket_damaged")
            assert "or was changed" in group.log(1)


async def test_checkpoints_keep_the_bucket_small_and_a_takeover_reads_from_the_last_one(
    tmp_path: Path,
) -> None:
    small = ("--checkpoint-bytes", "100000")
    with Group(tmp_path) as group:
        group.start(1, None, *small)
        group.start(2, None, *small)
        async with group.rig.client() as client:
            await group.create(client, "orders", max_messages=20)
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            first = await group.holder(client, "orders")
            sent = numbered("x" * 2000, 400)
            for at in range(0, len(sent), 20):
                await asyncio.gather(*await append_all(client, "orders", sent[at : at + 20]))
            await group.logged(first, "store.checkpoint")
            journals = group.bucket / "journal"

            def is_small() -> bool:
                try:
                    return sum(path.stat().st_size for path in journals.rglob("*")) < 600_000
                except FileNotFoundError:  # it is being deleted
                    return False

            await eventually(is_small)  # what was appended since is covered by the next one
            group.kill(first)
            group.lose_disk(first)
            assert await group.holder(client, "orders") == 3 - first
            assert await whole(client, "orders") == sent[-20:]
            assert await client.streams.append("orders", b"next") == 400
            group.start(first, None, *small)
            await group.logged(first, "store.peer_seen", 2)
            group.kill(3 - first)
            assert await group.holder(client, "orders") == first
            assert await whole(client, "orders") == [b"next"]  # a bundle of 20 was removed whole
            assert await next_of(client, "orders") == 401
