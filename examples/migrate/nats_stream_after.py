"""Iris: messages on disk, and a consumer that acknowledges them."""

import asyncio

import iris


async def main() -> None:
    async with iris.connect() as client:
        await client.streams.create("jobs")
        for number in range(3):
            await client.streams.append("jobs", b"job %d" % number)

        async with client.streams.consumer(
            "jobs", "workers", shared=True, ack_timeout=30, max_deliver=5
        ) as work:
            async for message in work:
                print("done:", message.payload.decode())
                work.ack(message)
                if message.offset == 2:
                    work.stop()


asyncio.run(main())
