"""A handler refuses with a code and details, and the caller's program acts on them."""

import asyncio

import msgspec

import iris

service = iris.Service("shop")
stock = {"lamp": 2}


class Order(msgspec.Struct):
    sku: str
    count: int


@service.on_request
def place(order: Order) -> int:
    if order.sku not in stock:
        raise iris.Refusal("unknown_sku", "see the catalogue", sku=order.sku)
    if order.count > stock[order.sku]:
        raise iris.Refusal("out_of_stock", sku=order.sku, left=stock[order.sku])
    stock[order.sku] -= order.count
    return stock[order.sku]


async def buy(client: iris.Client, sku: str, count: int) -> None:
    try:
        left = await client.request("shop", Order(sku, count), timeout=5.0, type=int)
        print(f"bought {count} {sku}, {left} left")
    except iris.RemoteError as error:
        if error.code == "out_of_stock":  # act on the code; never compare the text
            print(f"{count} is too many, so order {error.details['left']}")
            await buy(client, sku, error.details["left"])
        else:
            print(error)


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        await buy(client, "lamp", 3)
        await buy(client, "sofa", 1)


asyncio.run(main())
