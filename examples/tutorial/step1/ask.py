"""Departures, step 1: ask for a flight, from any program on the host."""

import asyncio
import sys

import iris


async def main(number: str) -> None:
    async with iris.connect() as client:
        print(await client.request("departures", number, timeout=5.0, type=str))


asyncio.run(main(sys.argv[1]))
