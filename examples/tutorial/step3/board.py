"""Departures, step 3: the board of one airport shows each change."""

import asyncio
import sys

from departures import Flight

import iris


async def main(airport: str) -> None:
    async with (
        iris.connect() as client,
        client.subscribe(
            f"departures.{airport}", on_loss=lambda loss: print("missed", loss)
        ) as changes,
    ):
        await client.wait_for_subscribers(f"departures.{airport}", 1, timeout=5.0)
        print(f"the board of {airport} is on", flush=True)
        async for message in changes:
            flight = message.decode(Flight)
            print(f"{flight.number} is {flight.delay} minutes late", flush=True)


asyncio.run(main(sys.argv[1]))
