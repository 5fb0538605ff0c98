"""Annotations choose what a handler gets; `type=` what a caller gets. What does not fit is an error, not a surprise."""

import asyncio
from dataclasses import dataclass

import msgspec

import iris


class Query(msgspec.Struct):
    origin: str
    carrier: str = "B6"


@dataclass
class Row:
    flight: str
    delay_minutes: int


service = iris.Service("flights")


@service.on_request
def lookup(query: Query) -> list[Row]:
    return [Row(f"{query.carrier}{number}", 3 * number) for number in range(2)]


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        rows = await client.request("flights", Query("JFK"), timeout=1.0, type=list[Row])
        print(rows)
        # A dict of the same shape does as well; without `type` the answer comes as plain objects.
        print(await client.request("flights", {"origin": "LGA", "carrier": "UA"}, timeout=1.0))
        try:
            await client.request("flights", {"origin": 7}, timeout=1.0)
        except iris.RemoteError as error:
            print("refused:", error.detail)


asyncio.run(main())
