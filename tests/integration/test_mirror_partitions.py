"""A mirror copies a stream with several partitions as one: a batch over them is in the copy whole or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from integration.mirrors import copy_all
from integration.test_handover_partitions import all_of
from support.waiting import PATIENCE_S

import iris
from iris.errors import StreamError
from iris.streams.mirroring import Mirror
from iris.streams.stores import Stores
from iris.wire.streams import Commit
from relay.store.calls import LOST


async def staged(client: iris.Client, batch: int, count: int = 12) -> Any:
    """Stage a batch that is in all partitions."""
    async with client.streams.stage("clicks", writer="job", batch=batch) as staging:
        for number in range(count):
            await staging.append(b"%d-%d" % (batch, number), key=f"key-{number}")
        return await staging.finish()


async def commit(client: iris.Client, batch: int) -> None:
    attempt = await staged(client, batch)
    await client.streams.commit("clicks", writer="job", batch=batch, attempts=[attempt])


def batches(found: dict[tuple[int, int], bytes]) -> dict[bytes, int]:
    """Return how many messages of each batch were found."""
    counts: dict[bytes, int] = {}
    for payload in found.values():
        counts[payload.partition(b"-")[0]] = counts.get(payload.partition(b"-")[0], 0) + 1
    return counts


async def test_a_mirror_copies_all_partitions_at_their_offsets(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=3)
    for number in range(30):
        await client.streams.append("clicks", b"%d" % number, key=f"key-{number}")
    assert await copy_all(client, "clicks", "copy") == 30
    found = await all_of(other, "copy")
    assert found == await all_of(other, "clicks")
    assert len({partition for partition, _ in found}) == 3
    await client.streams.append("clicks", b"more", key="key-1")
    assert await copy_all(client, "clicks", "copy") == 1
    assert await all_of(other, "copy") == await all_of(other, "clicks")
    async with client.streams.mirror("clicks", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await client.streams.append("clicks", b"followed", key="key-2")
        async with asyncio.timeout(PATIENCE_S):
            while await all_of(other, "copy") != await all_of(other, "clicks"):  # noqa: ASYNC110 - a mirror runs
                await asyncio.sleep(0.02)
        await mirror.close()
        await running
    await client.streams.change("clicks", partitions=4)
    with pytest.raises(StreamError, match="it has 4 partitions, and its copy copy has 3"):
        await copy_all(client, "clicks", "copy")


async def test_half_a_batch_is_not_in_the_copy(pair: Any, monkeypatch: Any) -> None:
    """The commit ends in between, and the mirror waits until it is completed."""
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=3)
    await commit(client, 1)
    await copy_all(client, "clicks", "copy")
    attempt = await staged(client, 2)
    ask_stream = Stores.ask_stream

    async def ask(self: Stores, name: str, uuid: str, call: Any, *args: Any, **more: Any) -> Any:
        if isinstance(call, Commit) and name == "clicks/2":
            raise StreamError(name, "killed here")
        return await ask_stream(self, name, uuid, call, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Stores, "ask_stream", ask)
        with pytest.raises(StreamError, match="killed here"):
            await client.streams.commit("clicks", writer="job", batch=2, attempts=[attempt])
    assert 0 < batches(await all_of(other, "clicks"))[b"2"] < 12
    async with client.streams.mirror("clicks", "copy", follow=False) as mirror:
        running = asyncio.create_task(mirror.run())
        async with asyncio.timeout(PATIENCE_S):
            while "committing batches" not in mirror.waiting:  # noqa: ASYNC110 - a mirror runs
                await asyncio.sleep(0.005)
        assert batches(await all_of(other, "copy")) == {b"1": 12}
        await client.streams.commit("clicks", writer="job", batch=2, attempts=[attempt])
        await asyncio.wait_for(running, PATIENCE_S)
    assert batches(await all_of(other, "copy")) == {b"1": 12, b"2": 12}


@pytest.mark.timeout(120)
async def test_what_was_copied_of_a_batch_by_half_is_not_in_the_copy_that_replaces_its_source(
    pair: Any, monkeypatch: Any
) -> None:
    """The mirror ends when it has copied one partition; then the source is lost."""
    monkeypatch.setattr("iris.streams.handover.LOST_S", 0.3)
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=3)
    await commit(client, 1)
    await copy_all(client, "clicks", "copy")
    await commit(client, 2)
    copy = Mirror._copy

    async def one(self: Mirror) -> None:
        if not self.source.endswith("/1"):
            raise StreamError(self.source, "killed here")
        await copy(self)

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_copy", one)
        with pytest.raises(StreamError, match="killed here"):
            await copy_all(client, "clicks", "copy")
    assert batches(await all_of(other, "copy")) == {b"1": 12}
    with pytest.raises(StreamError, match="has it and answers"):
        await client.streams.promote("copy", place="clicks", force=True)
    await client.streams.delete("clicks")
    new = await other.streams.promote("copy", place="clicks", force=True)
    assert new.name == "clicks"
    async with other.streams.read("clicks", follow=False) as reader:
        payloads = {(one.partition, one.offset): bytes(one.payload) async for one in reader}
        causes = [gap.cause for gap in reader.gaps if gap.cause != "compacted"]
    assert batches(payloads) == {b"1": 12}
    assert causes == [LOST] * 3
    for number in range(12):
        await other.streams.append("clicks", b"3-%d" % number, key=f"key-{number}")
    assert (await other.streams.promote("copy", place="clicks", force=True)).uuid == new.uuid


async def test_a_cut_that_was_decided_is_shown_by_the_next_mirror(
    pair: Any, monkeypatch: Any
) -> None:
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=3)
    await commit(client, 1)
    await copy_all(client, "clicks", "copy")
    await commit(client, 2)

    with monkeypatch.context() as patched:
        calls = 0
        shown = asyncio.Event()
        show = Mirror._show_cut

        async def second(self: Mirror, cut: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                await shown.wait()  # or the error would cancel the first one
                raise StreamError(self.source, "killed here")
            await show(self, cut)
            shown.set()

        patched.setattr(Mirror, "_show_cut", second)
        with pytest.raises(StreamError, match="killed here"):
            await copy_all(client, "clicks", "copy")
    assert 12 < sum(batches(await all_of(other, "copy")).values()) < 24
    assert await copy_all(client, "clicks", "copy") == 0
    assert batches(await all_of(other, "copy")) == {b"1": 12, b"2": 12}


async def test_a_copy_that_a_mirror_has_made_takes_the_place_of_its_stream(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=2)
    await commit(client, 1)
    await copy_all(client, "clicks", "copy")
    await commit(client, 2)
    before = await all_of(other, "clicks")
    new = await client.streams.handover("clicks", "copy", durability="disk")
    assert (await other.streams.describe("clicks")).uuid == new.uuid
    assert await all_of(other, "clicks") == before
    await commit(other, 3)
    assert batches(await all_of(other, "clicks")) == {b"1": 12, b"2": 12, b"3": 12}


async def test_a_batch_that_is_committed_while_the_mirror_looks_is_not_cut(
    pair: Any, monkeypatch: Any
) -> None:
    """It begins after the mirror has looked at partition 1, and ends before the mirror has looked at all."""
    _, client, other, _ = pair
    await client.streams.create("clicks", partitions=3)
    await commit(client, 1)
    described, done = Mirror._described, False

    async def look(self: Mirror) -> Any:
        nonlocal done
        found = await described(self)
        if self.source == "clicks/1" and not done:
            done = True
            await commit(other, 2)
        return found

    monkeypatch.setattr(Mirror, "_described", look)
    assert await copy_all(client, "clicks", "copy") == 24
    assert batches(await all_of(other, "copy")) == {b"1": 12, b"2": 12}
