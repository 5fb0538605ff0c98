"""A stream with several partitions is handed over as one: each log to its copy, and partition 0 last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.waiting import PATIENCE_S

import iris
from iris.errors import StreamError, StreamSuperseded
from iris.streams import partition_of
from iris.streams.stores import Stores


async def all_of(client: iris.Client, name: str) -> dict[tuple[int, int], bytes]:
    """Return every message of a stream by its partition and offset."""
    async with client.streams.read(name, follow=False) as reader:
        found = {(one.partition, one.offset): bytes(one.payload) async for one in reader}
        assert list(reader.gaps) == []
    return found


async def test_a_stream_with_partitions_is_handed_over_while_it_is_used(pair: Any) -> None:
    _, client, other, _ = pair
    old = await client.streams.create("clicks", partitions=3)
    stop = asyncio.Event()
    stored: dict[bytes, tuple[int, int]] = {}
    seen: set[bytes] = set()

    async def produce(name: str) -> None:
        number = 0
        while not stop.is_set():
            payload, key = f"{name}-{number}".encode(), f"key-{number % 7}"
            at = await other.streams.append("clicks", payload, key=key, timeout=PATIENCE_S)
            stored[payload] = (partition_of(at), int(at))
            number += 1

    async def consume() -> None:
        while not stop.is_set() or stored.keys() - seen:
            try:
                async with client.streams.consumer("clicks", "work", shared=True) as worker:
                    async for message in worker:
                        seen.add(bytes(message.payload))
                        worker.ack(message)
                        if stop.is_set() and not stored.keys() - seen:
                            return
            except StreamSuperseded:
                continue

    tasks = [asyncio.create_task(produce(name)) for name in "ab"]
    consuming = asyncio.create_task(consume())
    async with asyncio.timeout(PATIENCE_S):
        while len(stored) < 40:  # noqa: ASYNC110 - producers run
            await asyncio.sleep(0.001)
    new = await client.streams.handover("clicks", "copy", durability="disk")
    assert (new.name, new.partitions, new.replaces) == ("clicks", 3, old.uuid)
    count = len(stored)
    async with asyncio.timeout(PATIENCE_S):
        while len(stored) < count + 40:  # noqa: ASYNC110 - producers run
            await asyncio.sleep(0.001)
    stop.set()
    await asyncio.gather(*tasks)
    last = await other.streams.append("clicks", b"last", key="key-1")
    stored[b"last"] = (partition_of(last), int(last))
    await asyncio.wait_for(consuming, PATIENCE_S)
    found = await all_of(client, "clicks")
    assert found == {at: payload for payload, at in stored.items()}
    infos = await client.streams.partitions("clicks")
    assert [(info.name, info.mirror, info.failed) for info in infos] == [
        ("clicks", "", ""), ("clicks/1", "", ""), ("clicks/2", "", ""),
    ]  # fmt: skip
    assert (await client.streams.handover("clicks", "copy", durability="disk")).uuid == new.uuid
    await client.streams.delete("clicks", uuid=old.uuid)
    assert {info.uuid for info in await client.streams.list()} == {info.uuid for info in infos}


async def test_a_message_of_a_key_goes_to_the_same_partition_after_a_handover(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=4)
    keys = [f"key-{n}" for n in range(20)]
    before = [partition_of(await client.streams.append("clicks", b"x", key=key)) for key in keys]
    await client.streams.handover("clicks", "copy", durability="disk")
    for one in (client, other):
        after = [partition_of(await one.streams.append("clicks", b"y", key=key)) for key in keys]
        assert after == before
    assert len(set(before)) > 1


@pytest.mark.timeout(180)
async def test_a_handover_of_partitions_that_ends_at_any_call_is_made_again(
    pair: Any, monkeypatch: Any
) -> None:
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=2)
    for number in range(10):
        await client.streams.append("clicks", b"%d" % number, key=f"key-{number}")
    before = await all_of(client, "clicks")
    async with client.streams.stage("clicks", writer="job", batch=1) as staging:
        await staging.append(b"staged", key="key-1")
        attempt = await staging.finish()
    ask_stream = Stores.ask_stream
    calls, last = 0, 0

    class Killed(Exception):
        """The handover ends here."""

    async def ask(self: Stores, *args: Any, **more: Any) -> Any:
        nonlocal calls
        answer = await ask_stream(self, *args, **more)
        calls += 1
        if calls >= last:
            raise Killed
        return answer

    while True:
        with monkeypatch.context() as patched:
            patched.setattr(Stores, "ask_stream", ask)
            calls, last = 0, last + 3
            try:
                new = await client.streams.handover("clicks", "copy", durability="disk")
                break
            except Killed:
                continue
    assert last > 20
    assert (await other.streams.describe("clicks")).uuid == new.uuid
    assert await all_of(other, "clicks") == before
    await other.streams.commit("clicks", writer="job", batch=1, attempts=[attempt])
    assert sorted((await all_of(other, "clicks")).values()) == sorted([*before.values(), b"staged"])
    assert len(await other.streams.list()) == 4  # no log is left but the old ones and the new ones


async def test_a_copy_with_partitions_is_not_promoted_by_halves(
    pair: Any, monkeypatch: Any
) -> None:
    _, client, _, _ = pair
    await client.streams.create("clicks", partitions=2)

    async def fails(self: Any) -> None:
        raise StreamError("clicks", "killed here")

    with monkeypatch.context() as patched:
        patched.setattr("iris.streams.handover._Handover.carry", fails)
        with pytest.raises(StreamError, match="killed here"):
            await client.streams.handover("clicks", "copy", durability="disk")
    with pytest.raises(StreamError, match="it is a copy with several partitions"):
        await client.streams.promote("copy")
    with pytest.raises(StreamError, match="it is a copy with several partitions"):
        await client.streams.promote("copy/1")
    with pytest.raises(StreamError, match="being handed over"):
        await client.streams.change("clicks", partitions=3, timeout=1.0)
    await client.streams.resume("clicks")
    await client.streams.change("clicks", partitions=3)
    with pytest.raises(StreamError, match="it has 3 partitions, and copy has 2"):
        await client.streams.handover("clicks", "copy", durability="disk")
    await client.streams.delete("copy")
    new = await client.streams.handover("clicks", "copy", durability="disk")
    assert new.partitions == 3
