"""`iris check` on one host reports on every store of the site, whichever host it is on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.buckets import Group
from support.stores import PATIENCE_S

pytestmark = pytest.mark.timeout(120)


async def judged(group: Group, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Run `iris check` until its result about the stores is as `wanted`; return that."""
    command = [
        sys.executable, "-m", "iris.cli", "check", "--json", "--skip", "clock", "--timeout", "2", "--relay", str(group.rig.socket),
    ]  # fmt: skip
    until_s = time.monotonic() + PATIENCE_S
    while True:
        done = await asyncio.to_thread(warm.run, command, text=True, env=group.rig.environ)
        found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
        (stores,) = [each for each in found if each["check"] == "stores"]
        if wanted(stores):
            assert done.returncode >= ("ok", "warning", "critical").index(stores["state"])
            return stores
        assert time.monotonic() < until_s, stores
        await asyncio.sleep(0.1)


async def test_a_bucket_that_is_away_is_reported_of_each_store_that_has_it(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        for number in (1, 2):
            group.start(number)
            await group.logged(number, "store.bucket_opened")
        well = await judged(group, lambda stores: stores["detail"].startswith("2 stores"))
        assert well["state"] == "ok"
        assert well["detail"] == "2 stores of the site answer, 2 with a bucket"
        away = tmp_path / "away"
        group.bucket.rename(away)
        group.bucket.write_text("not a directory")
        async with group.rig.client() as client:
            bad = await judged(
                group,
                lambda stores: (
                    stores["detail"].count("cannot write to its bucket: bucket file:") == 2
                ),
            )
            assert bad["state"] == "critical"
            for number in (1, 2):
                assert f"store {group.id_of(number)[:8]} on " in bad["detail"]
            found = await client.streams.stores()
            assert [each.has_bucket for each in found] == [True, True]
            assert all(each.away for each in found)
        group.bucket.unlink()
        away.rename(group.bucket)
        await judged(group, lambda stores: stores["state"] == "ok")


async def test_a_store_that_hangs_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        for number in (1, 2):
            group.start(number)
            await group.logged(number, "store.bucket_opened")
        await judged(group, lambda stores: stores["detail"].startswith("2 stores"))
        group.signal(2, signal.SIGSTOP)
        bad = await judged(group, lambda stores: stores["state"] == "critical")
        assert f"store {group.id_of(2)[:8]} did not answer: " in bad["detail"]
        assert group.id_of(1)[:8] not in bad["detail"]


async def test_a_store_that_lost_its_streams_to_another_one_is_reported(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.bucket_opened")
        async with group.rig.client() as client:
            await group.create(client, "orders")
        (new := tmp_path / "new").mkdir()
        (new / "group.key").touch(mode=0o600)
        (new / "group.key").write_text(group.key.reveal())
        command = [sys.executable, "-m", "relay.store", "restore", str(new), "--bucket", group.url]
        environ = {**os.environ, **group.rig.environ}
        done = await asyncio.to_thread(warm.run, command, env=environ)
        assert done.returncode == 0, done.stderr
        bad = await judged(group, lambda stores: stores["state"] == "warning")
        assert (
            "lost its streams in the bucket to another store less than a minute ago"
            in bad["detail"]
        )
