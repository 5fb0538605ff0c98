"""A handler that ends with its caller: work that only the caller wants stops when nobody waits any more."""

import asyncio

import iris

reports = iris.Service("reports", limits=iris.Limits(concurrency=1))
begun = asyncio.Event()


@reports.on_request(on_cancel="cancel")
async def compute(month: str) -> str:
    print("begin", month)
    begun.set()
    try:
        await asyncio.sleep(3600 if month == "May" else 0)  # a long computation
    except asyncio.CancelledError:
        print("nobody waits for", month)
        raise  # after cleaning up
    return f"report of {month}"


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(reports):
        may = asyncio.create_task(client.request("reports", "May", timeout=60.0))
        await begun.wait()
        queued = asyncio.create_task(client.request("reports", "June", timeout=60.0))
        july = asyncio.create_task(client.request("reports", "July", timeout=60.0))
        await asyncio.sleep(0.05)
        queued.cancel()  # it has not begun, and never will
        may.cancel()
        print((await july).decode())
        print("given up before they began:", client.counters["caller left"])


asyncio.run(main())
