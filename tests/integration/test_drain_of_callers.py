"""A relay with steady callers is stopped: they pause and move, it need not wait for its grace, and no call fails."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.links import start
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris

pytestmark = pytest.mark.timeout(60)

CALLERS = 8
GRACE_S = 20.0


def service() -> iris.Service:
    """Answers after some milliseconds, so that calls are in flight all the time."""
    made = iris.Service("echo", limits=iris.Limits(concurrency=64))

    @made.on_request
    async def echo(payload: bytes) -> bytes:
        await asyncio.sleep(0.005)
        return payload

    return made


class Callers:
    """Clients that call all the time, until `stop`."""

    def __init__(self) -> None:
        self.answered = [0] * CALLERS
        self.failures: list[str] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def _call(self, number: int, one: iris.Client) -> None:
        while not self._stop.is_set():
            try:
                reply = await one.request("echo", b"%d" % number, timeout=PATIENCE_S)
            except iris.IrisError as err:
                self.failures.append(f"{type(err).__name__}: {err}")
                await asyncio.sleep(0.01)
            else:
                assert reply == b"%d" % number
                self.answered[number] += 1

    def start(self, clients: list[iris.Client]) -> None:
        self._tasks = [asyncio.create_task(self._call(n, one)) for n, one in enumerate(clients)]

    async def more(self) -> None:
        """Return when every caller was answered some times again."""
        enough = [count + 5 for count in self.answered]
        await eventually(lambda: all(a >= b for a, b in zip(self.answered, enough, strict=True)))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def calling(make: Callable[[], iris.Client]) -> AsyncIterator[Callers]:
    """Run callers; no call of theirs may have failed."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(make()) for _ in range(CALLERS)]
        callers = Callers()
        callers.start(clients)
        try:
            yield callers
        finally:
            await callers.stop()
    assert not callers.failures, callers.failures[:3]


async def test_steady_callers_and_their_member_move_to_the_successor(tmp_path: Path) -> None:
    settings = {"IRIS_RELAY_DRAIN_TIMEOUT_S": str(GRACE_S)}
    with Daemon(tmp_path, settings=settings) as daemon:
        async with client(daemon.socket) as member, member.serve(service()):
            async with calling(lambda: client(daemon.socket)) as callers:
                for _ in range(3):
                    await callers.more()
                    began_s = time.monotonic()
                    assert await asyncio.to_thread(daemon.stop, signal.SIGTERM) == 0
                    assert time.monotonic() - began_s < GRACE_S / 2
                    await asyncio.to_thread(daemon.start)
                    await callers.more()
        assert not [line for line in daemon.lines() if line["event"] == "relay.cut"]


async def test_steady_callers_go_on_by_a_member_of_another_relay_while_theirs_is_restarted(
    tmp_path: Path,
) -> None:
    """Callers and one member move to the successor, another member stays at its own relay."""
    other = await start(tmp_path / "other")
    config = tmp_path / "one"
    one = await start(config, other, drain_timeout_s=GRACE_S)
    try:
        await eventually(lambda: one.router.links and other.router.links)
        path = one.config.socket_path
        async with client(path) as near, client(other.config.socket_path) as far:
            async with near.serve(service()), far.serve(service()):
                await far.wait_for_members("echo", 2, timeout=PATIENCE_S)
                await near.wait_for_members("echo", 2, timeout=PATIENCE_S)
                async with calling(lambda: client(path)) as callers:
                    for _ in range(3):
                        await callers.more()
                        async with asyncio.timeout(GRACE_S / 2):
                            await one.stop()
                        one = type(one)(one.config)
                        await one.start()
                        await callers.more()
    finally:
        await one.stop(drain_s=0)
        await other.stop(drain_s=0)
