"""Real stores over a bucket without faults, in virtual time, for a test that says what happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from iris.wire import stream_items, streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import END, MOVE, Definition
from iris.wire.streams import Answer, NewRecord
from support.bucket_lives.admins import signed
from support.bucket_lives.clients import END_FIELDS
from support.bucket_lives.life import Life, Log, logged, seeded
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import GROUP, Process
from support.founded import creation, founded
from support.keeper import OWNER


class Scene(Life):
    """What a test plays with. Stores see each other, but for those in `hidden`."""

    def __init__(self, directory: Path, *, disk_limit: int = 0) -> None:
        super().__init__(0, directory)
        self.bucket.faults, self.bucket.latency_s = 0.0, 0.01
        self.plan.disk_limit = disk_limit
        self.streams.clear()

    def play(self, script: Callable[[Scene], Awaitable[None]]) -> None:
        """Run a test's script. Raises what it raises; AssertionError if a store had an internal error."""
        with seeded(self), logged(Log(self)):
            self.run(script(self))
        assert not self.broken, self.broken

    async def opened(self, number: int) -> Process:
        """Start a store; return it when it has a journal."""
        process = self.start(number)
        await self.until(lambda: process.shelf.writer is not None)
        return process

    async def stream(self, process: Process, count: int = 0) -> StreamPlan:
        """Create a stream in the bucket, with `count` messages."""
        number = len(self.streams) + 1
        plan = StreamPlan(
            f"s{number}", founded(OWNER, number.to_bytes(16, "big")), Definition(f"s{number}"), 0
        )
        order = signed(self, plan, "keep", GROUP, revision=0)
        answer = await self.ask_process(process, process.address, NO_KEY, creation(order))
        assert isinstance(answer, streams.Described), answer
        self.streams.append(plan)
        for number in range(count):
            await self.append(plan, number)
        return plan

    async def append(self, plan: StreamPlan, number: int) -> None:
        """Append a message of 100 bytes to a stream."""
        call = streams.Append(bytes(16), [NewRecord(0, END_FIELDS, number.to_bytes(100, "big"))])
        answer = await self.ask(plan.address, call)
        assert isinstance(answer, streams.Appended), answer

    async def delete(self, process: Process, plan: StreamPlan) -> Answer | None:
        """Send the order to delete a stream to a store; return the answer, if one comes."""
        call = streams.Delete([signed(self, plan, END, GROUP)])
        return await self.ask_process(process, plan.address, OWNER.key_id, call)

    async def move(self, plan: StreamPlan, old: Process, new: Process) -> None:
        """Move a stream."""
        moving = await self.release(plan, old, new)
        assert isinstance(moving, streams.Moving), moving
        call = streams.Take(moving.ticket)
        while (answer := await self.ask_process(new, new.address, NO_KEY, call)) is None:
            pass
        assert isinstance(answer, streams.Settled), answer

    async def release(self, plan: StreamPlan, old: Process, new: Process) -> Answer | None:
        """Order a store to release a stream for another one; return the answer, if one comes."""
        call = streams.Move([signed(self, plan, MOVE, new.store.key)])
        return await self.ask_process(old, plan.address, OWNER.key_id, call)

    async def numbers(self, plan: StreamPlan) -> list[int]:
        """Return the numbers of the messages that a reader gets."""
        found: list[int] = []
        at = 0
        while True:
            answer = await self.ask(plan.address, streams.Fetch(at, 1 << 19))
            assert isinstance(answer, streams.Fetched), answer
            found += [int.from_bytes(one.body, "big") for one in answer.items if isinstance(one, stream_items.Record)]  # fmt: skip
            at = answer.next
            if at == answer.high_water:
                return found
