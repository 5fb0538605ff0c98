"""Iris: requests to a cluster, and a subscription."""

import asyncio

import iris

service = iris.Service("greeter")


@service.on_request
async def greet(name: bytes) -> bytes:
    return b"hello, " + name


async def main() -> None:
    async with (
        iris.connect() as client,
        client.serve(service),
        client.subscribe("orders.>") as orders,
    ):
        await client.wait_for_subscribers("orders.new", 1, timeout=5.0)

        reply = await client.request("greeter", b"world", timeout=5.0)
        print(reply.decode())

        await client.publish("orders.new", b"1 espresso")
        order = await anext(aiter(orders))
        print(order.name, order.payload.decode())

        try:
            await client.request("nobody", b"hello", timeout=5.0)
        except iris.NoMembers:
            print("nobody is there")


asyncio.run(main())
