"""A store whose key or directory cannot be used says so to whoever asks for a stream: nothing is replaced, nothing
is started in a loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from support.commands import Shell
from support.links import start
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.config import ClientConfig
from iris.errors import NoStream, StreamUnavailable
from relay.store import directory

pytestmark = pytest.mark.timeout(60)


def missing(data: Path) -> str:
    (data / "store.key").unlink()
    return "store.key is missing, and the streams in "


def cut_short(data: Path) -> str:
    os.truncate(data / "store.key", 20)
    return "store.key: .*must be written as 48 characters.*restore the file from a backup"


def flipped(data: Path) -> str:
    text = bytearray((data / "store.key").read_bytes())
    text[10] ^= 1
    (data / "store.key").write_bytes(text)
    return "store.key: a store key is damaged.*restore the file from a backup"


def open_to_others(data: Path) -> str:
    data.chmod(0o777)
    return "other users may write to "


@pytest.mark.parametrize("hurt", [missing, cut_short, flipped, open_to_others])
async def test_a_key_or_directory_that_cannot_be_used_is_reported_and_the_store_goes_on_when_it_is_mended(
    hurt: object, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with Daemon(tmp_path, "--data", str(data)) as daemon:
        async with client(daemon.socket) as one:
            await one.streams.create("orders", timeout=PATIENCE_S)
            await one.streams.append("orders", b"one", timeout=PATIENCE_S)
        await asyncio.to_thread(daemon.stop)
        key = (data / "store.key").read_bytes()
        said = hurt(data)  # type: ignore[operator]  # one of those above
        left = (data / "store.key").read_bytes() if (data / "store.key").exists() else None
        await asyncio.to_thread(daemon.start)
        await eventually(lambda: daemon.said("store.cannot_serve"))
        async with client(daemon.socket) as one:
            with pytest.raises(
                NoStream,
                match=f"no store holds it.*cannot serve: .*{said}",
            ):
                await one.streams.describe("orders", timeout=PATIENCE_S)
            with pytest.raises(NoStream, match=said):
                await one.streams.append("orders", b"two", timeout=PATIENCE_S)
            with pytest.raises(StreamUnavailable, match=said):
                await one.streams.create("other", timeout=PATIENCE_S)
            status = (await one.status(timeout=PATIENCE_S))["store"]
            assert status["starts"] == 1
            shown = await asyncio.to_thread(Shell(tmp_path).process, "status")
            assert f"store {data} cannot serve: " in shown.decode().replace("\n", " ")
            assert left == ((data / "store.key").read_bytes() if left is not None else None)
            assert left is not None or not (data / "store.key").exists()

            data.chmod(0o700)
            (data / "store.key").write_bytes(key)
            (data / "store.key").chmod(0o600)

            async def back() -> bool:
                try:
                    return (await one.streams.describe("orders", timeout=PATIENCE_S)).end == 1
                except NoStream:
                    return False

            async with asyncio.timeout(PATIENCE_S):
                while not await back():  # noqa: ASYNC110 - it is the store's to say
                    await asyncio.sleep(0.1)
            status = (await one.status(timeout=PATIENCE_S))["store"]
            assert (status["starts"], status["cannot_serve"]) == (1, "")
            said_so = [line for line in daemon.lines() if line["event"] == "store.cannot_serve"]
            assert len(said_so) == 1


async def test_it_is_reported_to_members_of_other_relays_and_a_store_that_waits_for_another_is_waited_for(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.mkdir(0o700)
    lock = os.open(data / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    keeper = await start(tmp_path / "one", data=data)
    other = await start(tmp_path / "two", keeper)
    config = ClientConfig(relay=other.config.socket_path, drain_timeout_s=0.1, connect_timeout_s=2)
    try:
        async with iris.connect(keyring=iris.Keyring.single(KEY), config=config) as one:
            mesh = other.router.mesh
            await eventually(
                lambda: "another store uses" in mesh.failed_stores() and mesh.starting_stores()
            )
            with pytest.raises(StreamUnavailable, match=r"still starting: .*another store uses"):
                await one.streams.describe("orders", timeout=0.5)
            (data / "streams" / ("0" * 32)).mkdir(parents=True)
            os.close(lock)
            await eventually(lambda: "store.key is missing" in mesh.failed_stores())
            assert not mesh.starting_stores()
            with pytest.raises(NoStream, match=r"cannot serve: .*store\.key is missing"):
                await one.streams.describe("orders", timeout=PATIENCE_S)
            shutil.rmtree(data / "streams")
            created = asyncio.create_task(one.streams.create("orders", timeout=PATIENCE_S))
            with pytest.raises(StreamUnavailable):
                await created
            await eventually(lambda: not mesh.failed_stores())
            made = await one.streams.create("orders", timeout=PATIENCE_S)
            assert made.end == 0
    finally:
        await other.stop(drain_s=0)
        await keeper.stop(drain_s=0)


def test_the_key_that_is_missing_is_made_only_where_no_stream_is(tmp_path: Path) -> None:
    key = tmp_path / "store.key"
    (tmp_path / "streams").mkdir()
    made = directory.load_key(key, os.urandom)
    assert directory.load_key(key, os.urandom).public_key == made.public_key
    key.unlink()
    (tmp_path / "streams" / ("0" * 32 + ".damaged-1")).mkdir()
    with pytest.raises(iris.ConfigError, match="is missing"):
        directory.load_key(key, os.urandom)
    assert not key.exists()
