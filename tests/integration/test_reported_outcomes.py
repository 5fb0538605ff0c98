"""What an error or a gap says is the whole truth, in its place."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from integration.kit import cut, named
from support.waiting import until

import iris
from iris.attachment import Life
from iris.errors import NoMembers, StreamUnavailable
from iris.streams.records import StreamGap
from iris.testing import LocalCluster
from relay.store.errors import LogWriteFailed

pytestmark = pytest.mark.timeout(60)


async def test_a_request_that_is_asked_again_after_its_session_was_lost_may_have_run() -> None:
    begun = asyncio.Event()
    service = iris.Service("db")

    @service.on_request
    async def run(payload: bytes) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return payload

    async with LocalCluster() as cluster, named(cluster, "caller") as caller:
        async with named(cluster, "member", drain_timeout_s=0.05) as member:
            async with member.serve(service):
                asking = asyncio.create_task(
                    caller.request("db", b"", timeout=20.0, idempotent=True)
                )
                await begun.wait()
                await cut(cluster, "member")
                await cut(cluster, "caller")
                member._attachment.state = Life.CLOSED  # type: ignore[union-attr]  # it does not come back
        with pytest.raises((NoMembers, iris.ConnectionLost)) as caught:
            await asking
        assert caught.value.may_have_run


async def test_a_gap_is_reported_after_the_messages_in_front_of_it(setting: Any) -> None:
    _, client, other = setting
    found: list[object] = []
    await client.streams.create("orders", topic="orders.>")
    for part in range(2):
        for number in range(3):
            await client.streams.append("orders", b"%d" % (3 * part + number))
        await client.streams.pause("orders")
        await client.publish("orders.new", b"lost")
        await client.flush()
        await client.streams.resume("orders")
    await client.streams.append("orders", b"6")
    async with other.streams.read("orders", follow=False, on_gap=found.append) as reader:
        async for message in reader:
            found.append(message.payload)
    gaps = [n for n, each in enumerate(found) if isinstance(each, StreamGap)]
    assert [each for each in found if isinstance(each, bytes)] == [b"%d" % n for n in range(7)]
    assert gaps == [3, 7]


async def test_a_gap_that_a_reader_has_not_reported_yet_is_reported_when_it_goes_on(
    setting: Any,
) -> None:
    _, client, other = setting
    gaps: list[StreamGap] = []
    await client.streams.create("orders", topic="orders.>")
    await client.streams.append("orders", b"0")
    await client.streams.pause("orders")
    await client.publish("orders.new", b"lost")
    await client.flush()
    await client.streams.resume("orders")
    await client.streams.append("orders", b"1")
    async with other.streams.read("orders", follow=False, on_gap=gaps.append) as reader:
        assert [message.payload for message in await reader.batch()] == [b"0"]
        assert not gaps
        at = reader.offset
        assert [message.payload for message in await reader.batch()] == [b"1"]
        (gap,) = gaps
        assert (gap.first, gap.cause) == (at, "it was paused")


async def test_what_was_not_tried_on_a_disk_that_failed_before_is_not_stored(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, _ = setting
    await client.streams.create("log")
    await client.streams.append("log", b"0")
    (stream,) = cluster.store.store.streams.values()
    database = stream.log._database

    def full(*_: object, **__: object) -> None:
        database.failed = "No space left on device"
        raise LogWriteFailed("log", "No space left on device")

    monkeypatch.setattr(database, "write", full)
    stream.reopen_us = 1 << 62
    with pytest.raises(StreamUnavailable, match="No space") as tried:
        await client.streams.append("log", b"1", timeout=2.0)
    assert tried.value.may_have_run
    with pytest.raises(StreamUnavailable, match="No space") as untried:
        await client.streams.append("log", b"2", timeout=2.0)
    assert not untried.value.may_have_run
    monkeypatch.undo()
    stream.reopen_us = 0
    cluster.store.store.tend()
    assert await client.streams.append("log", b"3", timeout=10.0) == 1


async def test_losses_can_be_read_by_threads() -> None:
    async with LocalCluster() as cluster, cluster.client() as publisher:
        async with cluster.client() as party, party.subscribe("t", limit_bytes=1) as messages:
            for _ in range(3):
                await publisher.publish("t", bytes(100))
                await publisher.flush()
            await until(lambda: messages.lost_messages == 2)
            assert [lost.count for lost in party.losses] == [1, 1]
