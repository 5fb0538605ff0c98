"""A request goes to one member, whichever is free. The handler's answer, or its error, comes back.

`timeout` bounds the whole of it. `embedded=True` keeps the example in one process; with a relay running
(`iris relay --dev`), leave it out and put members and callers wherever you like.
"""

import asyncio

import iris

service = iris.Service("weather")
TEMPERATURES = {"Oslo": 4, "Cairo": 31}


@service.on_request
async def temperature(city: str) -> str:
    await asyncio.sleep(0.01)  # a coroutine may wait; `limits.concurrency` of them run at a time
    return f"{TEMPERATURES[city]} °C"


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        for city in ("Oslo", "Cairo"):
            print(city, await client.request("weather", city, timeout=1.0, type=str))
        replies = await asyncio.gather(
            *(client.request("weather", "Oslo", timeout=1.0, type=str) for _ in range(100))
        )
        print(len(replies), "requests at once:", set(replies))


asyncio.run(main())
