"""Iris: a subscription to a filter."""

import asyncio

import iris


async def main() -> None:
    async with iris.connect() as client, client.subscribe("orders.*") as orders:
        await client.wait_for_subscribers("orders.new", 1, timeout=5.0)

        receivers = await client.publish("orders.new", b"1 espresso", count=True)
        print("receivers:", receivers)
        async for message in orders:
            print(message.name, message.payload.decode())
            break


asyncio.run(main())
