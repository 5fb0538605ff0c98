"""Redis: a subscription to a pattern."""

import asyncio
import sys

import redis.asyncio


async def main(server: str) -> None:
    client = redis.asyncio.from_url(server)
    async with client.pubsub() as orders:
        await orders.psubscribe("orders.*")
        await anext(orders.listen())  # the subscription is in place

        receivers = await client.publish("orders.new", b"1 espresso")
        print("receivers:", receivers)
        async for message in orders.listen():
            print(message["channel"].decode(), message["data"].decode())
            break
    await client.aclose()


asyncio.run(main(sys.argv[1]))
