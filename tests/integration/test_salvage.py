"""A damaged stream is salvaged and served again: real relay, store, clients and command."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.commands import command
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.errors import StreamDamaged

pytestmark = pytest.mark.timeout(60)

RECORDS = 300


def salvage(data: Path, *words: str) -> subprocess.CompletedProcess[Any]:
    salvaging = command("store", "salvage", str(data), *words)
    return warm.run(salvaging, text=True, timeout=PATIENCE_S)


def damage(path: Path, pattern: str) -> None:
    """Flip a bit in the middle of the largest file of this kind."""
    file = max(path.glob(pattern), key=lambda file: file.stat().st_size)
    with file.open("r+b") as opened:
        at = file.stat().st_size // 2
        byte = os.pread(opened.fileno(), 1, at)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1]), at)


async def read(one: iris.Client, gaps: list[iris.StreamGap]) -> dict[int, bytes]:
    reader = one.streams.read("orders", follow=False, on_gap=gaps.append)
    return {message.offset: message.payload async for message in reader}


@pytest.mark.parametrize("pattern", ["*.sst", "*.log"], ids=["table", "journal"])
async def test_after_salvage_readers_get_all_but_the_damage_and_one_gap(
    pattern: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    rng = random.Random(3)
    payloads = [rng.randbytes(2000) for _ in range(RECORDS)]
    with Daemon(tmp_path, "--data", str(data)) as daemon:
        async with client(daemon.socket) as producer:  # it lives through all of it
            made = await producer.streams.create("orders", timeout=PATIENCE_S)
            for payload in payloads:
                await producer.streams.append("orders", payload, timeout=PATIENCE_S)
            busy = await asyncio.to_thread(salvage, data)
            assert busy.returncode == 2
            assert "another store uses" in busy.stderr
            assert "stop it first" in busy.stderr
            if pattern == "*.sst":  # a store that is told to stop makes tables of its journal
                await asyncio.to_thread(daemon.stop)
            else:
                store = (await producer.status(timeout=PATIENCE_S))["store"]["pid"]
                os.kill(store, signal.SIGSTOP)
                await asyncio.to_thread(daemon.stop, signal.SIGKILL)
                os.kill(store, signal.SIGKILL)
                await eventually(lambda: not Path(f"/proc/{store}/fd").exists())
            damage(data / "streams" / made.uuid, pattern)

            await asyncio.to_thread(daemon.start)
            with pytest.raises(StreamDamaged, match="iris store salvage"):
                async with client(daemon.socket) as one:
                    await read(one, [])
            await asyncio.to_thread(daemon.stop)
            done = await asyncio.to_thread(salvage, data, "orders", "--json")
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert (report["state"], report["uuid"], report["end"]) == (
                "salvaged",
                made.uuid,
                RECORDS,
            )
            ((first, after),) = report["lost"]
            again = await asyncio.to_thread(salvage, data)
            assert again.stdout == f"orders {made.uuid}: undamaged, left alone\n"

            await asyncio.to_thread(daemon.start)
            async with client(daemon.socket) as one:
                gaps: list[iris.StreamGap] = []
                found = await read(one, gaps)
                assert [(gap.first, gap.end, gap.cause) for gap in gaps] == [
                    (first, after, "damaged")
                ]
                kept = {n: payloads[n] for n in range(RECORDS) if not first <= n < after}
                assert found == kept
                info = await one.streams.describe("orders")
                assert (info.uuid, info.epoch, info.failed) == (made.uuid, made.epoch + 1, "")
                lost: list[iris.StreamGap] = []
                async with one.streams.consumer("orders", "w", on_gap=lost.append) as consumer:
                    taken = []
                    async for message in consumer:
                        consumer.ack(message)
                        taken.append(message.offset)
                        if len(taken) == len(kept):
                            break
                assert taken == sorted(kept)
                assert [(gap.first, gap.end) for gap in lost] == [(first, after)]
            assert await producer.streams.append("orders", b"more", timeout=PATIENCE_S) == RECORDS
