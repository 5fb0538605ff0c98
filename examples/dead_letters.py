"""Messages that fail become dead letters; after the repair they are delivered again. A consumer is paused meanwhile."""

import asyncio
import tempfile
from pathlib import Path

import iris
from iris.testing import LocalCluster

KNOWN = {"anna", "bert"}


async def invoice(client: iris.Client, count: int) -> None:
    """Handle `count` orders; unknown customers fail."""
    async with client.streams.consumer("orders", "invoices", max_deliver=2) as work:
        for _ in range(count):
            message = await anext(work)
            customer = message.decode(str)
            if customer in KNOWN:
                print("invoice for", customer)
                work.ack(message)
            else:
                work.nack(message, reason=f"no customer {customer}")
        await work.flush()


async def main(directory: Path) -> None:
    async with LocalCluster(data=directory) as cluster, cluster.client() as client:
        await client.streams.create("orders")
        for customer in ("anna", "carl", "bert"):
            await client.streams.append("orders", customer)
        await invoice(client, 4)  # carl's order fails twice

        for letter in await client.streams.dead_letters("orders", "invoices"):
            if letter.dead is not None:
                print(f"dead: {letter.decode(str)}, {letter.dead.reason}")

        await client.streams.pause_consumer("orders", "invoices")
        KNOWN.add("carl")  # repaired
        print(await client.streams.redrive("orders", "invoices"))
        await client.streams.change_consumer("orders", "invoices", max_deliver=5)
        found = await client.streams.resume_consumer("orders", "invoices")
        print("to do:", found.lag, "redriven:", found.redriven)
        await invoice(client, 1)
        print("left:", len(await client.streams.dead_letters("orders")))


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
