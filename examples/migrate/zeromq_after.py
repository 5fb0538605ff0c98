"""Iris: a request, a push and a publication, to names instead of addresses."""

import asyncio

import iris

service = iris.Service("greeter")


@service.on_request
async def greet(name: bytes) -> bytes:
    return b"hello, " + name


@service.on_push
async def work(job: bytes) -> None:
    print("done:", job.decode())


async def main() -> None:
    async with iris.connect() as client:
        async with client.serve(service):
            print((await client.request("greeter", b"world", timeout=5.0)).decode())

            await client.push("greeter", b"a job")
        # the service has left, so it has finished its jobs

        async with client.subscribe("orders.>") as orders:
            await client.wait_for_subscribers("orders.new", 1, timeout=5.0)
            await client.publish("orders.new", b"1 espresso")
            async for message in orders:
                print(message.name, message.payload.decode())
                break


asyncio.run(main())
