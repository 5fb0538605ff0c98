"""Departures, step 4: workers that tell passengers of each change, and acknowledge it after that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from departures import Change

import iris
from iris.streams import Consumer

sent: list[str] = []


async def write(change: Change) -> None:
    """Stand for an e-mail, which may fail."""
    if change.delay > 24 * 60:
        raise ValueError("nobody waits that long")
    sent.append(f"{change.number} + {change.delay}")


async def work(changes: Consumer) -> None:
    async for message in changes:
        try:
            await write(message.decode(Change))
        except ValueError as error:
            changes.nack(message, reason=str(error))
        else:
            changes.ack(message)


@asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[None]:
    await client.streams.create("changes", max_age=7 * 86400)
    async with (
        client.streams.consumer("changes", "notices", shared=True, max_deliver=3) as changes,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(work(changes))
        yield
        changes.stop()


service = iris.Service("notices", lifespan=lifespan)


@service.on_request
def latest(count: int) -> list[str]:
    return sent[-count:]
