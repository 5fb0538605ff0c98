"""Every failure says what it is, and whether the request may have run: then a retry has to be harmless."""

import asyncio

import iris

service = iris.Service("bank", limits=iris.Limits(concurrency=1, queue_bytes=1))


@service.on_request
async def transfer(seconds: float) -> str:
    if seconds < 0:
        raise ValueError("time runs forward")
    await asyncio.sleep(seconds)
    return "done"


async def attempt(client: iris.Client, what: str, seconds: object, timeout: float = 5.0) -> None:
    try:
        print(f"{what:17}", await client.request("bank", seconds, timeout=timeout, type=str))
    except iris.RequestError as error:
        print(f"{what:17} {type(error).__name__}, may have run: {error.may_have_run}")


async def main() -> None:
    async with iris.connect(embedded=True) as client:
        await attempt(client, "nobody is there", 0)
        async with client.serve(service):
            await attempt(client, "fine", 0)
            await attempt(client, "the handler fails", -1)
            await attempt(client, "not a number", "ten")
            # The first fills this member's limits; for the others there is no room.
            await asyncio.gather(*(attempt(client, "three at once", 0.1) for _ in range(3)))
            await attempt(client, "too slow", 0.3, timeout=0.1)


asyncio.run(main())
