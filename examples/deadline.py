"""Deadlines: what a handler calls ends when its own caller stops waiting."""

import asyncio

import iris


def services(finished: asyncio.Event) -> tuple[iris.Service, iris.Service]:
    shop, stock = iris.Service("shop"), iris.Service("stock")

    @stock.on_request
    async def count(request: iris.Request) -> int:
        print("stock has less than 2 s:", request.remaining() < 2)
        if request.decode(str) == "slow":
            await asyncio.sleep(request.remaining() + 0.1)  # too late for anybody
        return 7

    @shop.on_request
    async def order(item: str, client: iris.Client) -> str:
        try:
            left = await client.request("stock", item, timeout=30.0, type=int)  # 30 s at most
        except iris.RequestTimeout as err:
            print("shop:", "was cut to what was left of the request" in str(err))
            finished.set()
            return "nobody waits for this"
        return f"{left} left"

    return shop, stock


async def main() -> None:
    finished = asyncio.Event()
    shop, stock = services(finished)
    async with (
        iris.connect(embedded=True) as client,
        client.serve(stock),
        client.serve(shop),
    ):
        print((await client.request("shop", "fast", timeout=2.0)).decode())
        try:
            await client.request("shop", "slow", timeout=0.2)
        except iris.RequestTimeout as err:
            print(err)
        await finished.wait()


asyncio.run(main())
