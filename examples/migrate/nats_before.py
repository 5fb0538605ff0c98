"""NATS: requests to a queue group, and a subscription."""

import asyncio
import sys

import nats
from nats.aio.msg import Msg
from nats.errors import NoRespondersError


async def greet(message: Msg) -> None:
    await message.respond(b"hello, " + message.data)


async def main(server: str) -> None:
    client = await nats.connect(server)
    await client.subscribe("greeter", queue="greeters", cb=greet)
    orders = await client.subscribe("orders.>")
    await client.flush()

    reply = await client.request("greeter", b"world", timeout=5.0)
    print(reply.data.decode())

    await client.publish("orders.new", b"1 espresso")
    order = await orders.next_msg(timeout=5.0)
    print(order.subject, order.data.decode())

    try:
        await client.request("nobody", b"hello", timeout=5.0)
    except NoRespondersError:
        print("nobody is there")
    await client.drain()


asyncio.run(main(sys.argv[1]))
