"""Sessions that break rules, and a tunnel of another cluster that must not be affected.

async with vault(caller_path, member_path) as open_vault:
    assert "flags" in await say_more(caller_path)
    await open_vault.check()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from adversity.kit import OTHER_KEY, Wire, data_frame
from support.relays import KEY
from support.waiting import PATIENCE_S

import iris
from iris.crypto.keys import ClusterKey
from iris.wire import frames
from iris.wire.codec import HOP
from iris.wire.kinds import FLAG_MORE, Kind

STRANGE_KEY = ClusterKey(bytes(range(2, 34)))
"""A key that only the offender has."""
TARGET = "news"


class Vault:
    """A caller with a tunnel open in `vault`, which also calls `echo` under another key."""

    def __init__(self, caller: iris.Client, tunnel: iris.Tunnel) -> None:
        self.caller = caller
        self.tunnel = tunnel
        self.sent = 0

    async def check(self) -> None:
        """Check that the tunnel passes messages both ways."""
        self.sent += 1
        async with asyncio.timeout(PATIENCE_S):
            await self.tunnel.send(b"%d" % self.sent)
            assert await self.tunnel.recv() == b"%d" % self.sent

    async def _ask(self) -> None:
        while True:
            with contextlib.suppress(iris.NoMembers):  # its relay does not know the member yet
                await self.caller.request("echo", b"ping", timeout=PATIENCE_S)

    async def ask_a_liar(self) -> None:
        """Call `echo`, whose only member answers under a wrong key. Only that call may fail."""
        with pytest.raises(iris.ConnectionLost) as lost:
            await self._ask()
        assert lost.value.may_have_run
        await self.check()


@asynccontextmanager
async def vault(caller_path: Path, member_path: Path) -> AsyncIterator[Vault]:
    """Open a tunnel from a client of one relay to a member at another."""
    service = iris.Service("vault")

    @service.on_tunnel
    async def pass_back(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message)

    ring = iris.Keyring({"vault": (KEY,), "echo": (OTHER_KEY,)})
    async with (
        iris.connect(str(member_path), keyring=iris.Keyring.single(KEY)) as member,
        iris.connect(str(caller_path), keyring=ring) as caller,
        member.serve(service),
        await _opened(caller) as tunnel,
    ):
        both = Vault(caller, tunnel)
        await both.check()
        yield both
        await both.check()


async def _opened(caller: iris.Client) -> AbstractAsyncContextManager[iris.Tunnel]:
    """Open the tunnel as soon as the caller's relay knows the member."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with caller.tunnel("vault", timeout=PATIENCE_S):
                    pass
                return caller.tunnel("vault", timeout=PATIENCE_S)
            except iris.NoMembers:
                await asyncio.sleep(0.01)


async def say_more(path: Path, kind: int) -> str:
    """Send frames with the flag MORE to `TARGET`, as only relays may; return the relay's error."""
    async with Wire(path) as wire:
        await wire.prove()
        if kind == Kind.TUNNEL_DATA:
            await wire.send(wire.declare(0, Kind.TUNNEL_OPEN, TARGET))
            await wire.send(data_frame(Kind.TUNNEL_OPEN, bytes(48), hop=5))
            await wire.send(HOP.pack(23, kind, FLAG_MORE, 0, 5, 0) + b"x")
            return await wire.error()
        await wire.send(wire.declare(0, kind, TARGET))
        for number in range(2):
            frame = wire.sealed(kind, TARGET, hop=10 + number, flags=FLAG_MORE, first=number)
            await wire.send(frame)
        return await wire.error()


@asynccontextmanager
async def wanting(path: Path) -> AsyncIterator[Wire]:
    """Serve and subscribe to `TARGET`, so that messages for it are sent to this relay."""
    async with Wire(path) as wire:
        await wire.prove()
        await wire.join(TARGET, Kind.REQUEST)
        await wire.join(TARGET, Kind.TUNNEL_OPEN)
        await wire.send(frames.Subscribe(5, TARGET, [wire.key.key_id]))
        assert not (await wire.expect(frames.Ack)).error
        yield wire


@asynccontextmanager
async def liar(path: Path) -> AsyncIterator[asyncio.Task[str]]:
    """Act as the member of `echo` that answers one request under a wrong key; yield a task with the relay's error."""
    async with Wire(path) as wire:
        await wire.prove()
        await wire.send(wire.proof(STRANGE_KEY))
        await wire.join("echo", Kind.REQUEST)
        declared = frames.Declare(3, Kind.REPLY, "echo", STRANGE_KEY.key_id, wire.sender_id)

        async def answer() -> str:
            request = await wire.data(Kind.REQUEST)
            hop = HOP.unpack_from(request)[4]
            await wire.send(declared, data_frame(Kind.REPLY, bytes(40), alias=3, hop=hop))
            return await wire.error()

        answering = asyncio.create_task(answer())
        try:
            yield answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


@asynccontextmanager
async def silent(path: Path) -> AsyncIterator[Wire]:
    """Act as a member of `echo` that answers nothing."""
    async with Wire(path) as wire:
        await wire.prove()
        await wire.join("echo", Kind.REQUEST)
        yield wire
