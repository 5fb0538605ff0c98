"""A stream in four partitions: keys keep their order, two workers share the load, and partitions are added."""

import asyncio
import tempfile
from pathlib import Path

import iris
from iris.streams import partition_of
from iris.testing import LocalCluster

USERS = ("anna", "bert", "carl", "dora")
CLICKS = 3 * len(USERS)


async def work(client: iris.Client, done: dict[str, list[int]], finished: asyncio.Event) -> None:
    """Count the clicks of each user, which arrive in order, whichever worker gets them."""
    async with client.streams.consumer("clicks", "counter", shared=True, prefetch=1) as worker:
        async for message in worker:
            user = (message.key or b"").decode()
            done.setdefault(user, []).append(message.decode(int))
            worker.ack(message)
            if sum(map(len, done.values())) == CLICKS:
                finished.set()


async def main(directory: Path) -> None:
    async with LocalCluster(data=directory) as cluster, cluster.client() as client:
        await client.streams.create("clicks", partitions=4)
        for number in range(3):
            for user in USERS:
                await client.streams.append("clicks", number, key=user)

        done: dict[str, list[int]] = {}
        finished = asyncio.Event()
        workers = [asyncio.create_task(work(client, done, finished)) for _ in range(2)]
        await finished.wait()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for user in USERS:
            print(user, done[user])

        offset = await client.streams.append("clicks", 3, key="anna")
        async with client.streams.read("clicks", follow=False) as reader:
            messages = [message async for message in reader]
        of_anna = {message.partition for message in messages if message.key == b"anna"}
        print(len(messages), "clicks, anna's in one partition:", of_anna == {partition_of(offset)})
        info = await client.streams.change("clicks", partitions=6)
        print("now there are", info.partitions, "partitions")


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
