"""One topic or handler can take several kinds of messages: tagged structs in a union say which one each message is."""

import asyncio

import msgspec

import iris


class Placed(msgspec.Struct, tag=True):
    number: int
    item: str


class Cancelled(msgspec.Struct, tag=True):
    number: int
    reason: str = "none given"


Event = Placed | Cancelled

service = iris.Service("orders")


@service.on_request
def record(event: Event) -> str:
    match event:
        case Placed(number, item):
            return f"order {number} of one {item}"
        case Cancelled(number, reason):
            return f"order {number} is cancelled: {reason}"


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        for event in (Placed(7, "lamp"), Cancelled(7, "too bright")):
            print(await client.request("orders", event, timeout=1.0, type=str))
        # In another language, the tag is the field "type".
        print(
            await client.request(
                "orders", {"type": "Cancelled", "number": 8}, timeout=1.0, type=str
            )
        )
        try:
            await client.request("orders", {"type": "Returned", "number": 8}, timeout=1.0)
        except iris.RemoteError as error:
            print("refused:", error.detail)


asyncio.run(main())
