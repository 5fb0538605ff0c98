"""A store that is killed between a write and its answer: whoever appends the message again, it is stored once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.stores import PATIENCE_S, Rig

from iris.errors import StreamUnavailable

pytestmark = pytest.mark.timeout(60)

DIE_AFTER_THE_WRITE = """
import os, runpy, signal, sys
from relay.store.log import Log

written = Log.append

def append(self, entries, now_us):
    outcomes = written(self, entries, now_us)
    if any(entry.body for entry in entries):
        os.kill(os.getpid(), signal.SIGKILL)
    return outcomes

Log.append = append
sys.argv[0] = "relay.store"
runpy.run_module("relay.store", run_name="__main__")
"""


async def killed_after_a_write(rig: Rig, message_id: str) -> None:
    """Append a message at a store that is killed when it is on disk; the program that did so is gone."""
    rig.end_store(signal.SIGTERM)
    rig.mark_said()
    command = [sys.executable, "-c", DIE_AFTER_THE_WRITE, "--data", str(rig.data), "--relay", str(rig.socket)]  # fmt: skip
    with (rig.directory / "store.log").open("ab") as log:
        rig._store = subprocess.Popen(command, env=rig.environ, stdout=log, stderr=log)  # noqa: ASYNC220 - as Rig does
    assert await rig.attached()
    async with rig.client(drain_timeout_s=0.1) as party:
        with pytest.raises(StreamUnavailable) as failed:
            await party.streams.append("orders", b"7", message_id=message_id, timeout=3.0)
    assert failed.value.may_have_run
    assert await rig.store_ended(PATIENCE_S) == -signal.SIGKILL
    await rig.serve()


async def test_another_process_appends_it_again_under_its_id(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_relay()
        await rig.serve()
        async with rig.client() as party:
            await party.streams.create("orders", dedup_window=60.0, timeout=PATIENCE_S)
        await killed_after_a_write(rig, "order-7")
        async with rig.client() as party:
            offset = await party.streams.append(
                "orders", b"7", message_id="order-7", timeout=PATIENCE_S
            )
            async with party.streams.read("orders", follow=False) as reader:
                assert (offset, [message.payload async for message in reader]) == (0, [b"7"])
