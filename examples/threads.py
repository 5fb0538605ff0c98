"""A handler that blocks, such as one that calls a library without asyncio, runs in threads of its own."""

import asyncio
import threading

import iris

service = iris.Service("reports")
together = threading.Barrier(4)


@service.on_request(threads=4)
def render(number: int) -> str:
    together.wait()  # stands for a slow library; it returns when four threads wait
    return f"report {number}"


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        asked = [client.request("reports", n, timeout=5.0, type=str) for n in range(4)]
        print(await asyncio.gather(*asked))
        print(together.parties, "at once")


asyncio.run(main())
