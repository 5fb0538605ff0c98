"""The page of a relay shows the streams of its store, their consumers, and whether the bucket is there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.pages import Scraped, scrape
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, wait_until

import iris
from iris.crypto.keys import GroupKey

KEY = iris.ClusterKey(bytes(32))


async def page_when(where: str, name: str, value: float, **labels: str) -> Scraped:
    """Return the first page on which a metric has this value."""

    def found() -> Scraped | None:
        page = scrape(where)
        return page if name in page.samples and page.sum(name, **labels) == value else None

    return await asyncio.to_thread(wait_until, found)


async def test_streams_and_consumers_are_on_the_page_also_after_the_store_was_killed(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data"), "--metrics", "127.0.0.1:0") as daemon:
        async with client(daemon.socket, key=KEY) as program:
            status = await program.status()
            where = status["metrics"]["address"]
            await program.streams.create("orders", timeout=PATIENCE_S)
            for number in range(5):
                await program.streams.append("orders", str(number))
            async with program.streams.consumer("orders", "bills", max_deliver=1) as work:
                work.ack(await anext(work))
                work.nack(await anext(work), reason="no")
                await work.flush()
            page = await page_when(
                where, "iris_store_stream_dead_letters_total", 1, stream="orders"
            )
            assert page.sum("iris_store_streams") == 1
            assert page.sum("iris_store_stream_messages", stream="orders") == 5
            assert page.sum("iris_store_stream_end_offset", stream="orders") == 5
            assert page.sum("iris_store_stream_appended_messages_total", stream="orders") == 5
            assert page.sum("iris_store_stream_bytes", stream="orders") > 0
            assert page.sum("iris_store_stream_dead_letters_kept", stream="orders") == 1
            assert page.sum("iris_store_stream_failed") == 0
            await page_when(where, "iris_store_consumer_lag_messages", 3, stream="orders", consumer="bills")  # fmt: skip
            assert "iris_store_bucket_up" not in page.samples
            assert "orders" not in str(await program.status()), "every program may read the status"

            os.kill((await program.status())["store"]["pid"], 9)
            await page_when(where, "iris_store_starts_total", 2)
            page = await page_when(where, "iris_store_stream_end_offset", 5, stream="orders")
            assert page.sum("iris_store_stream_dead_letters_total", stream="orders") >= 1
            lag = page.sum("iris_store_consumer_lag_messages", consumer="bills")
            assert 3 <= lag <= 5, "what was settled last may be delivered again"


@pytest.mark.timeout(120)
async def test_a_bucket_that_is_away_and_what_waits_for_it_are_on_the_page(tmp_path: Path) -> None:
    data, bucket = tmp_path / "data", tmp_path / "bucket"
    data.mkdir(0o700)
    bucket.mkdir()
    (data / "group.key").touch(0o600)
    (data / "group.key").write_text(GroupKey(bytes(32)).reveal())
    flags = ("--data", str(data), "--bucket", f"file://{bucket}", "--metrics", "127.0.0.1:0")
    with Daemon(tmp_path, *flags) as daemon:
        async with client(daemon.socket, key=KEY) as program:
            where = (await program.status())["metrics"]["address"]
            await page_when(where, "iris_store_bucket_up", 1)
            await program.streams.create("kept", durability="bucket", timeout=PATIENCE_S)
            bucket.rename(tmp_path / "elsewhere")
            bucket.touch()
            waiting = asyncio.create_task(
                program.streams.append("kept", b"x" * 1000, timeout=PATIENCE_S)
            )
            page = await page_when(where, "iris_store_bucket_up", 0)
            backlog = page.sum("iris_store_bucket_backlog_bytes")
            assert 1000 <= backlog < page.sum("iris_store_bucket_backlog_limit_bytes")
            assert not waiting.done()
            bucket.unlink()
            (tmp_path / "elsewhere").rename(bucket)
            await waiting
            page = await page_when(where, "iris_store_bucket_up", 1)
            await page_when(where, "iris_store_bucket_backlog_bytes", 0)
