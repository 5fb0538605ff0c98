"""A mirror continues after the end of any process, relay or store, whatever its source did meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.mirrors import (
    come_to,
    copy_all,
    same,
    second_store,
    whole,
)
from integration.stores import stored
from msgspec import structs
from support.stores import Rig
from support.waiting import PATIENCE_S
from support.waiting import until as turns_until

import iris
from iris.errors import NoStream, StreamError, StreamUnavailable
from iris.streams import mirroring
from iris.wire.stream_items import Hole
from iris.wire.streams import Copied, Copy


async def test_a_mirror_follows_its_source_and_reports_its_lag(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        for number in range(100):
            await client.streams.append("log", b"%d" % number)
        await come_to(client, "copy", 100)
        await turns_until(lambda: mirror.end == 100)
        assert (mirror.copied, mirror.lag, mirror.source_end) == (100, 0, 100)
        with pytest.raises(StreamError, match="already running"):
            await mirror.run()
        info = await client.streams.describe("copy")
        assert (info.lag, info.source, info.heard_us > 0) == (0, "log", True)
        await mirror.close()
        await asyncio.wait_for(running, PATIENCE_S)
    with pytest.raises(iris.Closed):
        await mirror.run()
    await same(client, "log", "copy")
    assert (await client.streams.describe("log")).lag is None


async def test_a_reader_and_workers_of_a_copy_get_what_is_copied_at_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        reader = client.streams.read("copy")
        work = client.streams.consumer("copy", "work")
        for number in range(5):
            waiting = [asyncio.create_task(anext(held)) for held in (reader, work)]
            await asyncio.sleep(0)
            assert await client.streams.append("log", b"%d" % number) == number
            got = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
            assert [(m.offset, m.payload) for m in got] == [(number, b"%d" % number)] * 2
        for held in (reader, work):
            await held.close()
    await running


async def test_two_mirrors_that_begin_while_the_source_grows_agree(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    mirrors = [copy_all(one, "log", "copy") for one in (client, other, client, other)]
    await asyncio.gather(client.streams.append_many("log", [bytes(500)] * 2000), *mirrors)
    await copy_all(other, "log", "copy")
    await same(client, "log", "copy")


async def test_the_lag_is_what_the_copy_lacks(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 10_000)
    await client.streams.create("log")
    await client.streams.append_many("log", [bytes(5000)] * 40)
    async with other.streams.mirror("log", "copy") as mirror:
        assert (mirror.lag, mirror.source_end, mirror.end) == (40, 40, 0)
        running = asyncio.create_task(mirror.run())
        lags = []
        async with asyncio.timeout(PATIENCE_S):
            while mirror.lag:
                await asyncio.sleep(0)
                lags.append((await client.streams.describe("copy")).lag)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    known = [lag for lag in lags if lag is not None]
    assert known == sorted(known, reverse=True)
    assert (await client.streams.describe("copy")).lag == 0


async def test_a_cancelled_mirror_goes_on_where_it_was(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 4000)
    await client.streams.create("log")
    await client.streams.append_many("log", [b"%d" % n + bytes(500) for n in range(3000)])
    reached = 0
    for turns in range(1, 400):
        running = asyncio.create_task(copy_all(other, "log", "copy"))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if turns % 40 == 0:
            info = await client.streams.describe("copy")
            assert info.end >= reached
            reached = info.end
    assert reached > 0
    await copy_all(other, "log", "copy")
    await same(client, "log", "copy")


async def test_two_mirrors_at_once_write_nothing_twice(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 20_000)
    await client.streams.create("log")
    mirrors: list[Any] = []

    async def run(one: iris.Client) -> None:
        async with one.streams.mirror("log", "copy") as mirror:
            mirrors.append(mirror)
            with contextlib.suppress(asyncio.CancelledError):
                await mirror.run()

    running = [asyncio.create_task(run(one)) for one in (client, other, client)]
    for part in range(20):
        messages = [b"%d" % n + bytes(300) for n in range(100 * part, 100 * part + 100)]
        await client.streams.append_many("log", messages)
    await turns_until(lambda: [mirror.end for mirror in mirrors] == [2000] * 3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running)
    assert sum(mirror.copied for mirror in mirrors) == 2000
    await same(other, "log", "copy")
    assert len(await client.streams.list()) == 2


async def test_a_mirror_goes_on_over_restarts_of_either_store(tmp_path: Path) -> None:
    async with stored(tmp_path / "one") as (cluster, client, other):
        source = await client.streams.create("log")
        await client.streams.append("log", b"0")
        stores = contextlib.AsyncExitStack()
        second = await stores.enter_async_context(second_store(cluster, tmp_path / "two"))
        real = other.streams._stores.find_store

        async def at_the_second(name: str, *, timeout: float, **more: Any) -> Any:
            found = await real(name, timeout=timeout, **more)
            return structs.replace(found, key=second.store.key.public_key)

        other.streams._stores.find_store = at_the_second
        async with other.streams.mirror("log", "copy") as mirror:
            running = asyncio.create_task(mirror.run())
            at = 1
            for part in range(6):
                if part % 2:
                    await cluster.stop_store()
                    await cluster.start_store()
                else:
                    await stores.aclose()
                    await stores.enter_async_context(second_store(cluster, tmp_path / "two"))
                offsets = await client.streams.append_many("log", [b"%d" % n for n in range(20)])
                assert offsets == list(range(at, at + 20))
                at += 20
            await come_to(client, "copy", at)
            assert not running.done()
            info = await client.streams.describe("copy")
            assert info.store != source.store
        await asyncio.wait_for(running, PATIENCE_S)
        await same(client, "log", "copy")
        await stores.aclose()


async def test_a_mirror_goes_on_over_a_restart_of_the_relay(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        for number in range(10):
            await client.streams.append("log", b"%d" % number)
        await cluster.stop_relay()
        cluster.store.up.clear()
        await cluster.start_relay()
        for number in range(10, 20):
            await client.streams.append("log", b"%d" % number, timeout=20.0)
        await come_to(client, "copy", 20)
    await asyncio.wait_for(running, PATIENCE_S)
    await same(client, "log", "copy")


async def test_a_mirror_says_what_it_waits_for_and_gives_up_when_it_has_no_more_patience(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async with stored(tmp_path / "one") as (cluster, client, other):
        await client.streams.create("log")
        async with other.streams.mirror("log", "copy", patience=0.5) as mirror:
            # Only while there is no store: one that is busy may take longer.
            with monkeypatch.context() as hasty:
                hasty.setattr(mirroring, "ATTEMPT_S", 0.2)
                running = asyncio.create_task(mirror.run())
                await come_to(client, "copy", 0)
                await cluster.stop_store()
                with pytest.raises((StreamUnavailable, NoStream)):
                    await asyncio.wait_for(running, PATIENCE_S)
            assert mirror.waiting
            await cluster.start_store()
            await client.streams.append("log", b"x")
            running = asyncio.create_task(mirror.run())
            await come_to(client, "copy", 1)


async def test_a_source_that_was_created_again_is_never_mixed_in(setting: Any) -> None:
    _, client, other = setting
    old = await client.streams.create("log")
    await client.streams.append("log", b"old")
    mirror = other.streams.mirror("log", "copy")
    async with mirror:
        running = asyncio.create_task(mirror.run())
        await come_to(client, "copy", 1)
        await client.streams.delete("log")
        with contextlib.suppress(StreamError):
            await client.streams.create("log")
        await client.streams.append_many("log", [b"new", b"newer"])
        new = await client.streams.describe("log")
        with pytest.raises(StreamError) as refused:
            await asyncio.wait_for(running, PATIENCE_S)
        assert isinstance(refused.value, NoStream) or new.uuid in str(refused.value)
    with pytest.raises(StreamError, match=f"{old.uuid}.*{new.uuid}"):
        await copy_all(client, "log", "copy")
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"old"]


async def test_a_source_that_lost_its_end_is_reported(setting: Any) -> None:
    _, client, _ = setting
    made = await client.streams.create("log")
    await copy_all(client, "log", "copy")
    call = Copy(bytes.fromhex(made.uuid), 0, 5, [Hole(0, 5, 1)])
    await client.streams._stores.ask_stream("copy", "", call, Copied, timeout=5.0)
    with pytest.raises(StreamError, match=r"offset 0.*at 5"):
        await copy_all(client, "log", "copy")


async def test_a_mirror_whose_copy_is_deleted_says_so_and_makes_no_other(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await client.streams.append("log", b"x")
        await come_to(client, "copy", 1)
        await client.streams.delete("copy")
        await client.streams.append("log", b"y")
        await turns_until(lambda: mirror.waiting or running.done())
        assert not running.done()
        assert "copy" in mirror.waiting
        assert [info.name for info in await client.streams.list()] == ["log"]
    await asyncio.gather(running, return_exceptions=True)


MIRROR = """
import asyncio, sys, iris

async def main():
    key = iris.ClusterKey(bytes(range(32)))
    async with iris.connect(sys.argv[1], keyring=iris.Keyring.single(key)) as client:
        async with client.streams.mirror("log", "copy") as mirror:
            print("copying", flush=True)
            await mirror.run()

asyncio.run(main())
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="iris-mirror-") as name, Rig(Path(name)) as rig:
        yield rig


@pytest.mark.timeout(120)
async def test_killed_mirrors_and_stores_leave_a_copy_that_goes_on(rig: Rig) -> None:
    rig.start_relay()
    await rig.serve()
    mirrors: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", MIRROR, str(rig.socket)], env=rig.environ, stdout=subprocess.PIPE
        )
        mirrors.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"copying\n"
        return process

    try:
        async with rig.client() as client:
            await client.streams.create("log")
            total = 0
            process = start()
            for turn in range(6):
                messages = [b"%d" % n + bytes(2000) for n in range(total, total + 1000)]
                appending = asyncio.create_task(
                    client.streams.append_many("log", messages, timeout=60.0)
                )
                await asyncio.sleep(0.02 * (turn + 1))
                if turn % 2:
                    rig.end_store(signal.SIGKILL)
                    await rig.serve()
                else:
                    process.kill()
                    process.wait()
                    process = await asyncio.to_thread(start)
                await appending
                total += 1000
            await come_to(client, "copy", total)
            found, gaps = await whole(client, "copy")
            assert ([m.offset for m in found], gaps) == (list(range(total)), [])
            assert all(m.payload.startswith(b"%d\0" % m.offset) for m in found)
            await same(client, "log", "copy")
    finally:
        for process in mirrors:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
