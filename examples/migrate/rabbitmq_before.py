"""RabbitMQ: a topic exchange, and a durable queue of jobs with acknowledgements."""

import asyncio
import sys

import aio_pika


async def main(server: str) -> None:
    async with await aio_pika.connect(server) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=10)

        exchange = await channel.declare_exchange("orders", "topic")
        news = await channel.declare_queue(exclusive=True)
        await news.bind(exchange, "orders.#")
        await exchange.publish(aio_pika.Message(b"1 espresso"), "orders.new")
        async with news.iterator(no_ack=True) as orders:
            async for message in orders:
                print(message.routing_key, message.body.decode())
                break

        jobs = await channel.declare_queue("jobs", durable=True)
        for number in range(3):
            job = aio_pika.Message(
                b"job %d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            await channel.default_exchange.publish(job, "jobs")
        async with jobs.iterator() as work:
            async for message in work:
                async with message.process(requeue=True):
                    print("done:", message.body.decode())
                if message.body == b"job 2":
                    break


asyncio.run(main(sys.argv[1]))
