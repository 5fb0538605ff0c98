"""Who is in a cluster: now, as it changes, and wait until enough are there."""

import asyncio

import iris


def service() -> iris.Service:
    made = iris.Service("databases")

    @made.on_request
    def lookup(key: str) -> str:
        return key.upper()

    return made


async def watch(client: iris.Client) -> None:
    async for members in client.watch_members("databases"):
        print("there are", len(members))
        if len(members) == 2:
            break


async def main() -> None:
    async with iris.connect(embedded=True) as client:
        watching = asyncio.create_task(watch(client))
        async with client.serve(service()):
            members = await client.wait_for_members("databases", 1, timeout=1.0)
            async with client.serve(service()):
                members = await client.wait_for_members("databases", 2, timeout=1.0)
                print(members.serving("request"), "of", len(members), "take requests")
                await watching
        print("left:", len(await client.members("databases")))


asyncio.run(main())
