"""Objects leave when they are due, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.bucket_sim import STREAM, Scripted, keeper, run

from relay.store.batches import PUT, Op
from relay.store.bucket.sealing import Rows
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import FLUSH_US, GATHER_US
from relay.store.process import BucketSettings

PUT_S = 0.001
"""What a request to the scripted bucket takes."""


class Noted:
    """An acknowledgement that notes when it leaves."""

    def __init__(self) -> None:
        self.at_s = asyncio.get_running_loop().create_future()

    def release(self) -> None:
        self.at_s.set_result(asyncio.get_running_loop().time())

    def withdraw(self, reason: str) -> None:
        self.at_s.set_exception(AssertionError(reason))


async def ready(shelf: Shelf) -> None:
    while shelf.writer is None or not shelf.writer.idle:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)


def append(shelf: Shelf) -> asyncio.Future[float]:
    """Write a row; return when it is known to be in the bucket."""
    writer = shelf.writer
    assert writer is not None
    now_us = int(asyncio.get_running_loop().time() * 1e6)
    noted = Noted()
    writer.hold(writer.add(Rows(STREAM, [Op(PUT, b"x", b"")]), 10, now_us), noted)
    return noted.at_s


def test_a_lone_append_waits_for_its_put_and_hardly_longer(tmp_path: Path) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        ours, shelf = keeper(Scripted(), tmp_path, 1)
        running = asyncio.create_task(ours.run())
        await ready(shelf)
        for _ in range(20):
            await asyncio.sleep(FLUSH_US / 1e6)
            began_s = loop.time()
            assert await append(shelf) - began_s < GATHER_US / 1e6 + PUT_S + 0.002
        running.cancel()
        await asyncio.wait([running])

    run(work())


@pytest.mark.parametrize("url", ["s3://iris", "file:///iris"])
@pytest.mark.parametrize("pause_ms", [None, 20])
def test_appends_one_after_the_other_make_one_put_for_each_pause(
    tmp_path: Path, url: str, pause_ms: int | None
) -> None:
    pause_us = BucketSettings(url, pause_ms=pause_ms).pause_us
    assert pause_us == 1000 * (pause_ms or (5 if url.startswith("file") else 100))

    async def work() -> None:
        loop = asyncio.get_running_loop()
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path, 1, pause_us=pause_us)
        running = asyncio.create_task(ours.run())
        await ready(shelf)
        began_s, before = loop.time(), len(objects.objects)
        for _ in range(50):
            await append(shelf)
        puts = len(objects.objects) - before
        assert puts == 50
        # The first one is early, and no other waits longer than the pause and a PUT.
        assert 49 * pause_us / 1e6 <= loop.time() - began_s < 50 * (pause_us / 1e6 + PUT_S + 0.002)
        running.cancel()
        await asyncio.wait([running])

    run(work())
