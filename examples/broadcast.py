"""A broadcast reaches every member of a cluster, each sender's in its order."""

import asyncio

import iris


def cache(name: str, received: list[str], done: asyncio.Event) -> iris.Service:
    service = iris.Service("caches")

    @service.on_broadcast
    def forget(key: str) -> None:
        received.append(f"{name} forgets {key}")
        if len(received) == 6:
            done.set()

    return service


async def main() -> None:
    received: list[str] = []
    done = asyncio.Event()
    async with (
        iris.connect(embedded=True) as client,
        client.serve(cache("first", received, done)),
        client.serve(cache("second", received, done)),
        client.serve(cache("third", received, done)),
    ):
        await client.broadcast("caches", "user:17")
        await client.broadcast("caches", "user:42")
        await asyncio.wait_for(done.wait(), timeout=5)
    print("\n".join(sorted(received)))


asyncio.run(main())
