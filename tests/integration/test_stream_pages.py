"""`streams.fetch` and `find`: what a program reads that keeps count of offsets itself, as Spark's source does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored

from iris.core.bundle import decode_keyed
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import NoStream, StreamError, StreamUnavailable
from iris.streams import StreamGap, StreamPage, StreamRecord
from iris.testing import LocalCluster
from iris.wire.kinds import Kind


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Any]:
    async with stored(tmp_path) as made:
        yield made


def payloads(page: StreamPage) -> list[bytes]:
    """Return the messages of a page's records, which have to say how many there are."""
    found: list[bytes] = []
    for item in page:
        assert isinstance(item, StreamRecord)
        taken = decode_keyed(item.plain)[0]
        assert len(taken) == item.count == item.end - item.offset
        found += taken
    return found


async def test_pages_hold_every_record_and_each_begins_where_the_last_one_ended(
    setting: Any,
) -> None:
    _, client, other = setting
    made = await client.streams.create("log", topic="t")
    appended = [b"%d" % n * 1000 for n in range(300)]
    await client.streams.append_many("log", appended)
    await client.publish("t", b"published")
    await client.flush()
    page = await other.streams.fetch("log", 0, max_bytes=100_000)
    found = payloads(page)
    pages = 1
    while page.end < 301:
        page = await other.streams.fetch("log", page.end, max_bytes=100_000, wait=1.0)
        found += payloads(page)
        pages += 1
    assert found == [*appended, b"published"]
    assert pages > 3
    assert (page.uuid, page.oldest, page.high_water) == (made.uuid, 0, 301)
    last = list(page)[-1]
    assert isinstance(last, StreamRecord)
    assert (last.kind, last.name, last.offset, last.dead) == (Kind.PUBLISH, "t", 300, False)


async def test_a_record_that_holds_the_offset_comes_whole(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    await client.streams.append_many("log", [b"a", b"b", b"c"])
    page = await other.streams.fetch("log", 1)
    (record,) = page
    assert (record.offset, record.count, page.end) == (0, 3, 3)
    assert payloads(page) == [b"a", b"b", b"c"]


async def test_at_the_end_a_fetch_waits_for_what_comes(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    page = await other.streams.fetch("log", 0, wait=0.05)
    assert (list(page), page.end, page.high_water) == ([], 0, 0)
    waiting = asyncio.create_task(other.streams.fetch("log", 0, wait=20.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.streams.append("log", b"x")
    assert payloads(await waiting) == [b"x"]


async def test_what_is_missing_or_cannot_be_opened_is_a_gap_of_the_page(tmp_path: Path) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    both = Keyring.single(new).add("default", old)
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client(keyring=both.promote("default")) as writer,
        cluster.client(keyring=both) as reader,
    ):
        await writer.streams.create("log")
        await writer.streams.append("log", b"under the old")
        await writer.streams.append("log", b"short", ttl=0.02)
        await asyncio.sleep(0.05)
        await writer.reload_keys(both)
        await writer.streams.append("log", b"under the new")
        assert len(await reader.streams.fetch("log", 0)) == 3
        await reader.reload_keys(Keyring.single(new))
        unopened, expired, record = await reader.streams.fetch("log", 0)
        assert isinstance(unopened, StreamGap)
        assert (unopened.first, unopened.end, unopened.count, unopened.unreadable) == (0, 1, 1, True)  # fmt: skip
        assert isinstance(expired, StreamGap)
        assert (expired.cause, expired.count, expired.unreadable) == ("expired", 0, False)
        assert isinstance(record, StreamRecord)
        assert decode_keyed(record.plain)[0] == [b"under the new"]


async def test_a_dead_letter_is_a_record_that_says_so(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    await client.streams.append("log", b"x")
    async with client.streams.consumer("log", "work", max_deliver=1) as work:
        work.nack(await anext(work))
        await work.flush()
    page = await client.streams.fetch("log.dead", 0, wait=5.0)
    (record,) = page
    assert isinstance(record, StreamRecord)
    assert record.dead


async def test_a_fetch_goes_on_when_the_store_is_back_and_raises_when_it_is_not(
    setting: Any,
) -> None:
    cluster, client, _ = setting
    await client.streams.create("log")
    await client.streams.append("log", b"x")
    await cluster.stop_store()
    with pytest.raises((StreamUnavailable, NoStream)):
        await client.streams.fetch("log", 0, timeout=0.2)
    fetching = asyncio.create_task(client.streams.fetch("log", 0))
    await asyncio.sleep(0.05)
    await cluster.start_store()
    assert payloads(await fetching) == [b"x"]
    with pytest.raises(NoStream):
        await client.streams.fetch("nothing", 0)


async def test_find_returns_the_offset_of_a_location_or_a_time(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    await client.streams.append_many("log", [b"x"] * 10)
    between = datetime.now(UTC)
    await asyncio.sleep(0.01)
    await client.streams.append("log", b"y")
    later = datetime.now(UTC) + timedelta(hours=1)
    for at, offset in (("first", 0), ("last", 10), ("new", 11), (7, 7), (between, 10), (later, 11)):
        assert await other.streams.find("log", at) == offset, at
    with pytest.raises(StreamError, match="beyond the end"):
        await other.streams.find("log", 12)
