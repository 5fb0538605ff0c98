"""Iris: a topic, and a stream of jobs with acknowledgements."""

import asyncio

import iris


async def main() -> None:
    async with iris.connect() as client:
        async with client.subscribe("orders.>") as orders:
            await client.wait_for_subscribers("orders.new", 1, timeout=5.0)
            await client.publish("orders.new", b"1 espresso")
            async for message in orders:
                print(message.name, message.payload.decode())
                break

        await client.streams.create("jobs", max_age=7 * 86400)
        for number in range(3):
            await client.streams.append("jobs", b"job %d" % number)
        async with client.streams.consumer(
            "jobs", "workers", shared=True, prefetch=10, max_deliver=5
        ) as work:
            async for job in work:
                print("done:", job.payload.decode())
                work.ack(job)
                if job.payload == b"job 2":
                    work.stop()


asyncio.run(main())
