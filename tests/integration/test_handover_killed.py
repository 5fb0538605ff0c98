"""A handover is made again after its end at any step, and the end of a store: no message is lost or stored twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.mirrors import whole
from support.buckets import Group
from support.stores import PATIENCE_S

import iris
from iris.errors import NoStream, StreamError, StreamSuperseded
from iris.streams.stores import Stores

FAST = ("--failover-s", "1")
HANDOVER = """
import asyncio, sys, iris

async def main():
    key = iris.ClusterKey(bytes(range(32)))
    async with iris.connect(sys.argv[1], keyring=iris.Keyring.single(key)) as client:
        info = await client.streams.handover("orders", "copy", patience=40.0)
        print(info.uuid, info.durability, flush=True)

asyncio.run(main())
"""


class Killed(Exception):
    """The handover ends here."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("done", [False, True], ids=["before-the-call", "after-the-call"])
async def test_a_handover_that_ends_at_any_call_is_made_again(
    setting: Any, monkeypatch: Any, done: bool
) -> None:
    """It ends before each call to a store, or after it. Each time it is made again from its beginning, up to the next
    call."""
    _, client, other = setting
    await client.streams.create("orders", dedup_window=3600)
    for number in range(5):
        await client.streams.append("orders", b"%d" % number, message_id=b"%d" % number)
    async with client.streams.consumer("orders", "work", max_deliver=1, prefetch=1) as worker:
        worker.nack(await anext(worker), reason="broken")
        await worker.flush()
        worker.ack(await anext(worker))
        await worker.flush()
    letters = await client.streams.dead_letters("orders")
    assert letters
    lags = [one.lag for one in await client.streams.consumers("orders")]
    ask_stream = Stores.ask_stream
    calls, last = 0, 0

    async def ask(self: Stores, name: str, uuid: str, call: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > last and not done:
            raise Killed
        answer = await ask_stream(self, name, uuid, call, *args, **more)
        if calls > last:
            raise Killed
        return answer

    while True:
        with monkeypatch.context() as patched:
            patched.setattr(Stores, "ask_stream", ask)
            calls, last = 0, last + 1
            try:
                new = await client.streams.handover("orders", "copy", durability="disk")
                break
            except Killed:
                continue
    assert last > 10
    # Whatever ended, only one stream has the name, and everything is there once.
    assert (await other.streams.describe("orders")).uuid == new.uuid
    found, gaps = await whole(other, "orders")
    assert ([one.payload for one in found], gaps) == ([b"%d" % n for n in range(5)], [])
    assert [one.lag for one in await client.streams.consumers("orders")] == lags
    assert [one.dead.offset for one in await client.streams.dead_letters("orders")] == [
        one.dead.offset for one in letters
    ]
    assert await other.streams.append("orders", b"2", message_id=b"2") == 2


async def _copy(client: iris.Client) -> bool:
    try:
        return bool((await client.streams.describe("copy")).mirror)
    except NoStream:
        return False


async def _stopped(client: iris.Client) -> bool:
    return bool((await client.streams.describe("orders")).successor)


@pytest.mark.timeout(180)
async def test_killed_handovers_and_stores_lose_nothing_and_store_nothing_twice(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        for number in (1, 2):
            group.start(number, None, *FAST)
            await group.logged(number, "store.attached")
        async with group.rig.client() as client, group.rig.client() as other:
            old = await client.streams.create("orders")
            at = 1 if old.store == group.id_of(1) else 2
            stop = asyncio.Event()
            stored: dict[bytes, int] = {}
            seen: set[bytes] = set()

            async def produce(name: str) -> None:
                number = 0
                while not stop.is_set():
                    payload = f"{name}-{number}".encode()
                    stored[payload] = await other.streams.append(
                        "orders", payload, timeout=2 * PATIENCE_S
                    )
                    number += 1

            async def consume() -> None:
                while True:
                    try:
                        async with client.streams.consumer(
                            "orders", "work", shared=True, patience=PATIENCE_S
                        ) as worker:
                            async for message in worker:
                                seen.add(bytes(message.payload))
                                worker.ack(message)
                                if message.payload == b"last":
                                    return
                    except StreamSuperseded:
                        continue

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    [sys.executable, "-c", HANDOVER, str(group.rig.socket)],
                    env=group.rig.environ,
                    stdout=subprocess.PIPE,
                )

            producing = [asyncio.create_task(produce(name)) for name in "ab"]
            consuming = asyncio.create_task(consume())
            process = start()
            try:
                for reached, victim in ((_copy, 3 - at), (_stopped, at)):
                    async with asyncio.timeout(PATIENCE_S):
                        while process.poll() is None and not await reached(client):  # noqa: ASYNC110 - a poll over processes
                            await asyncio.sleep(0.002)
                    process.kill()
                    await asyncio.to_thread(process.communicate)
                    group.kill(victim)
                    group.start(victim, None, *FAST)
                    process = start()
                out, _ = await asyncio.to_thread(process.communicate)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            uuid, durability = out.decode().split()
            assert durability == "bucket"
            count = len(stored)
            async with asyncio.timeout(PATIENCE_S):
                while len(stored) < count + 20:  # noqa: ASYNC110 - producers run
                    await asyncio.sleep(0.005)
            stop.set()
            await asyncio.gather(*producing)
            stored[b"last"] = await other.streams.append("orders", b"last")
            await asyncio.wait_for(consuming, PATIENCE_S)
            found, gaps = await whole(client, "orders")
            assert gaps == []
            assert sorted(bytes(one.payload) for one in found) == sorted(stored)
            assert all(found[offset].payload == payload for payload, offset in stored.items())
            # Messages without a key may be delivered after a later one.
            assert stored.keys() - seen == set()
            # The disk is lost, and the stream goes on.
            group.signal(at, signal.SIGKILL)
            assert (await client.streams.describe("orders", timeout=PATIENCE_S)).uuid == uuid
            with pytest.raises(StreamError):
                await client.streams.append("orders", b"x", uuid=old.uuid, timeout=1.0)


@pytest.mark.timeout(120)
async def test_partitions_that_were_handed_over_to_a_bucket_outlive_their_store(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        for number in (1, 2):
            group.start(number, None, *FAST)
            await group.logged(number, "store.attached")
        for number in (1, 2):  # a store that was never seen counts as gone only after a minute
            await group.logged(number, "store.peer_seen")
        async with group.rig.client() as client:
            await client.streams.create("clicks", partitions=2)
            for number in range(40):
                await client.streams.append("clicks", b"%d" % number, key=f"key-{number}")
            async with client.streams.consumer("clicks", "work", shared=True) as worker:
                for _ in range(10):
                    worker.ack(await anext(worker))
            before = await client.streams.consumers("clicks")
            new = await client.streams.handover("clicks", "copy")
            assert (new.durability, new.partitions) == ("bucket", 2)
            infos = await client.streams.partitions("clicks")
            assert [info.durability for info in infos] == ["bucket", "bucket"]
            assert await client.streams.consumers("clicks") == before
            group.kill(1 if infos[1].store == group.id_of(1) else 2)
            async with client.streams.read("clicks", follow=False, patience=PATIENCE_S) as reader:
                found = sorted([int(one.payload) async for one in reader])
            assert found == list(range(40))
            for number in range(40):
                await client.streams.append("clicks", b"x", key=f"key-{number}", timeout=PATIENCE_S)
