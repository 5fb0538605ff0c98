"""Departures, step 2: act on the code of a refusal."""

import asyncio
import sys

from departures import Flight

import iris


async def main(number: str) -> None:
    async with iris.connect() as client:
        try:
            flight = await client.request(
                "departures", number, timeout=5.0, method="status", type=Flight
            )
            print(f"{flight.number} leaves {flight.origin} at {flight.scheduled} + {flight.delay}")
        except iris.RemoteError as error:
            if error.code != "unknown_flight":
                raise
            print(f"there is no flight {error.details['number']} today")


asyncio.run(main(sys.argv[1]))
