"""One service, several kinds of request: each call names its method."""

import asyncio

import msgspec

import iris

service = iris.Service("orders")
placed: dict[int, str] = {}


class Order(msgspec.Struct):
    number: int
    sku: str


@service.on_request("place")
async def place(order: Order) -> str:
    placed[order.number] = order.sku
    return f"placed {order.sku}"


@service.on_request("cancel")
async def cancel(number: int) -> str:
    if number not in placed:
        raise iris.Refusal("unknown_order", number=number)
    return f"cancelled {placed.pop(number)}"


@service.on_push("note")
def note(text: str) -> None:
    print("noted:", text)


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        print(
            await client.request("orders", Order(7, "lamp"), timeout=5.0, method="place", type=str)
        )
        print(await client.request("orders", 7, timeout=5.0, method="cancel", type=str))
        for method, payload in (("cancel", 7), ("refund", 7)):
            try:
                await client.request("orders", payload, timeout=5.0, method=method)
            except iris.RemoteError as error:
                print(f"{method}: {error.code}, may have run: {error.may_have_run}")
        await client.push("orders", "all done", method="note")
        await client.flush()


asyncio.run(main())
