"""A program under faults, in one process: its member is lost, comes back, answers late; then the relay restarts."""

import asyncio

import iris
from iris.testing import LocalCluster

service = iris.Service("counter")


@service.on_request
async def count(words: str) -> int:
    return len(words.split())


async def ask(client: iris.Client, when: str, *, timeout: float = 10.0) -> None:
    try:
        reply = await client.request("counter", "one two three", timeout=timeout, idempotent=True)
    except iris.RequestError as error:
        print(f"{when}: {type(error).__name__}, may have run: {error.may_have_run}")
    else:
        print(f"{when}: {reply}")


async def main() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.serve(service) as member,
    ):
        await ask(client, "at first")

        cluster.lose(member)  # as if its process had been killed
        await ask(client, "without a member")

        cluster.restore(member)
        await client.wait_for_members("counter", 1, timeout=10.0)
        await ask(client, "when it is back")

        with cluster.hold(member):  # nothing reaches it in time
            await ask(client, "when it is slow", timeout=0.1)

        await cluster.restart_relay()
        await ask(client, "after a restart of the relay")


asyncio.run(main())
