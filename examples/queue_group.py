"""Subscribers of one queue group share what is published; everybody else still gets all of it."""

import asyncio
from collections import Counter
from collections.abc import Callable

import iris
from iris.testing import LocalCluster

ORDERS = 30


async def main() -> None:
    shares: Counter[str] = Counter()
    done = asyncio.Event()

    def worker(name: str) -> Callable[[iris.Message], None]:
        def handle(message: iris.Message) -> None:
            shares[name] += 1
            if shares["anna"] + shares["bert"] == ORDERS and shares["audit"] == ORDERS:
                done.set()

        return handle

    # The members of a group are separate connections; LocalCluster gives several in one process.
    async with (
        LocalCluster() as cluster,
        cluster.client() as shop,
        cluster.client() as anna,
        cluster.client() as bert,
        cluster.client() as audit,
        anna.subscribe("orders.new", worker("anna"), group="billing"),
        bert.subscribe("orders.new", worker("bert"), group="billing"),
        audit.subscribe("orders.>", worker("audit")),
    ):
        for number in range(ORDERS):
            await shop.publish("orders.new", {"number": number})
            await shop.flush()  # a bundle goes to one member, so these are sent one by one
        await asyncio.wait_for(done.wait(), timeout=5)
    print(dict(sorted(shares.items())))


asyncio.run(main())
