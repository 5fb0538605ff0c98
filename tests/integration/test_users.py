"""Users of one relay: the kernel says who connects, and a quarter is kept for others. Needs root to change its user."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from adversity.kit import Wire
from support.relays import KEY
from support.waiting import PATIENCE_S, eventually

import iris
from iris.wire import frames
from relay.config import RelayConfig
from relay.daemon import Relay

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes users")

CROWD = """
import os, socket, sys
os.setgid(65534); os.setuid(int(sys.argv[1]))
open_ = []
for _ in range(int(sys.argv[3])):
    one = socket.socket(socket.AF_UNIX)
    one.connect(sys.argv[2])
    open_.append(one)
print("up", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def crowd(uid: int, relay: Path, count: int) -> AsyncIterator[None]:
    """Open connections as another user."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CROWD, str(uid), str(relay), str(count),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"up\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def test_one_user_leaves_a_quarter_of_the_sessions_to_others() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        config = RelayConfig(socket_path=Path(name) / "r.sock", socket_mode=0o666, max_sessions=16, mdns=False)  # fmt: skip
        relay = Relay(config)
        await relay.start()
        try:
            async with crowd(4242, config.socket_path, 20):
                await eventually(lambda: relay.hub.refused == 8)
                assert relay.hub.users.held == {"uid 4242": 12}
                async with (
                    Wire(config.socket_path) as wire,
                    iris.connect(config.socket_path, keyring=iris.Keyring.single(KEY)) as client,
                ):
                    await wire.greet()
                    status = await client.status(timeout=PATIENCE_S)
                    assert {each["user"] for each in status["sessions"]} == {"uid 4242", "uid 0"}
                    assert status["users"]["held"] == 14
                    # Its share is its own: a third user has what is left.
                    async with crowd(4243, config.socket_path, 4):
                        await eventually(lambda: relay.hub.refused == 10)
                        await wire.send(frames.Ping(1))
                        assert (await wire.expect(frames.Pong)).id == 1
            await eventually(lambda: not relay.hub.users.held)
            async with crowd(4242, config.socket_path, 12):
                await eventually(lambda: relay.hub.users.held == {"uid 4242": 12})
            assert relay.router.accounts.balance() == 0
        finally:
            await relay.stop(drain_s=0)
