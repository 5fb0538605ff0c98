"""One worker is active, and another one stands by: it goes on when the first one closes, from where that one was."""

import asyncio
import tempfile
from pathlib import Path

import iris
from iris.testing import LocalCluster


async def replica(client: iris.Client, name: str, most: int) -> None:
    """Book payments in order, as long as no other replica does; stop after `most` of them."""
    work = client.streams.consumer(
        "payments", "ledger", on_active=lambda active: print(name, "is active:", active)
    )
    booked = 0
    async with work:
        async for message in work:
            print(name, "books", message.decode(str))
            message.ack()
            booked += 1
            if booked == most:
                return


async def main(directory: Path) -> None:
    async with LocalCluster(data=directory) as cluster, cluster.client() as client:
        await client.streams.create("payments")
        async with cluster.client() as one, cluster.client() as two:
            first = asyncio.create_task(replica(one, "first", 2))
            while not await client.streams.consumers("payments"):
                await asyncio.sleep(0.01)
            second = asyncio.create_task(replica(two, "second", 2))
            while not (await client.streams.consumers("payments"))[0].standing:
                await asyncio.sleep(0.01)
            await client.streams.append_many("payments", ["rent", "tea", "wages", "soap"])
            await first  # it closes its worker, with two messages that it has not begun with
            await second
        (ledger,) = await client.streams.consumers("payments")
        print("left:", ledger.lag)


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
