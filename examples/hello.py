"""The smallest cluster: one member, one request."""

import asyncio

import iris

service = iris.Service("greeter")


@service.on_request
def greet(name: str) -> str:
    return f"Hello, {name}!"


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        print(await client.request("greeter", "world", timeout=1.0, type=str))


asyncio.run(main())
