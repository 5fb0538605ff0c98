"""JetStream: messages on disk, and a consumer that acknowledges them."""

import asyncio
import sys

import nats
from nats.js.api import ConsumerConfig


async def main(server: str) -> None:
    client = await nats.connect(server)
    stream = client.jetstream()
    await stream.add_stream(name="jobs", subjects=["jobs"])
    for number in range(3):
        await stream.publish("jobs", b"job %d" % number)

    config = ConsumerConfig(ack_wait=30, max_deliver=5)
    work = await stream.pull_subscribe("jobs", durable="workers", config=config)
    for message in await work.fetch(3, timeout=5.0):
        print("done:", message.data.decode())
        await message.ack()
    await client.drain()


asyncio.run(main(sys.argv[1]))
