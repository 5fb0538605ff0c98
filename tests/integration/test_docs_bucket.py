"""The commands of docs/bucket.md for streams that are on a disk do what the page says."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest
from support import warm
from support.buckets import Group, whole
from support.commands import command
from support.stores import KEY, PATIENCE_S

from iris import keyfiles
from iris.crypto.keyring import Keyring

PAGE = Path(__file__).parents[2] / "docs" / "bucket.md"


def recipes() -> dict[str, list[str]]:
    """Return the commands of the section, by their verb."""
    _, _, rest = PAGE.read_text("utf-8").partition("## Streams that are on a disk\n")
    lines = rest.partition("\n## ")[0].splitlines()
    said = [shlex.split(line)[2:] for line in lines if line.startswith("$ iris stream ")]
    return {words[1]: words for words in said}


@pytest.mark.timeout(180)
async def test_a_copy_in_a_bucket_takes_the_place_of_a_stream_whose_disk_is_lost(
    tmp_path: Path,
) -> None:
    keyfiles.save_keyring(tmp_path / keyfiles.KEYRING_FILE, Keyring.single(KEY))
    with Group(tmp_path) as group:
        environ = {**group.rig.environ, "IRIS_CONFIG": str(tmp_path)}

        async def run(*words: str) -> str:
            done = await asyncio.to_thread(
                warm.run, command(*words), text=True, env=environ, timeout=PATIENCE_S
            )
            assert done.returncode == 0, done.stderr
            return str(done.stdout)

        for number in (1, 2):
            group.start(number)
        for number in (1, 2):
            await group.logged(number, "store.bucket_opened")
        async with group.rig.client() as client:
            old = await client.streams.create("orders")
            for number in range(10):
                await client.streams.append("orders", b"%d" % number)
            await run(*(word for word in recipes()["mirror"] if word != "--follow"))
            assert (await client.streams.describe("orders-copy")).durability == "bucket"
            await client.streams.append("orders", b"not in the copy")
            at = 1 if old.store == group.id_of(1) else 2
            group.kill(at)
            group.lose_disk(at)
            assert await run(*recipes()["promote"]) == "10\n"
        async with group.rig.client() as client:
            new = await client.streams.describe("orders", timeout=PATIENCE_S)
            assert (new.durability, new.replaces) == ("bucket", old.uuid)
            assert await client.streams.append("orders", b"after", timeout=PATIENCE_S) == 11
            assert await whole(client, "orders") == [*(b"%d" % n for n in range(10)), b"after"]


@pytest.mark.timeout(180)
async def test_a_stream_is_handed_over_to_a_bucket_and_back_to_a_disk(tmp_path: Path) -> None:
    keyfiles.save_keyring(tmp_path / keyfiles.KEYRING_FILE, Keyring.single(KEY))
    with Group(tmp_path) as group:
        environ = {**group.rig.environ, "IRIS_CONFIG": str(tmp_path)}
        group.start(1)
        await group.logged(1, "store.bucket_opened")
        back = ["stream", "handover", "orders", "orders-disk", "--durability", "disk"]
        assert " ".join(["iris", *back]) in " ".join(PAGE.read_text("utf-8").split())
        async with group.rig.client() as client:
            await client.streams.create("orders")
            await client.streams.append("orders", b"0")
            for words, durability in ((recipes()["handover"], "bucket"), (back, "disk")):
                done = await asyncio.to_thread(
                    warm.run, command(*words), text=True, env=environ, timeout=PATIENCE_S
                )
                assert done.returncode == 0, done.stderr
                info = await client.streams.describe("orders", uuid=done.stdout.strip())
                assert info.durability == durability
                await client.streams.append("orders", durability.encode(), timeout=PATIENCE_S)
            assert await whole(client, "orders") == [b"0", b"bucket", b"disk"]
