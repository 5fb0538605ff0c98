"""Publish to dotted topics; subscribe with filters. '*' stands for one part, a final '>' for the rest."""

import asyncio

import iris


async def main() -> None:
    async with iris.connect(embedded=True) as client:
        everything: list[str] = []
        async with (
            # A callback is called for each message, at once.
            client.subscribe("flights.>", lambda message: everything.append(message.name)),
            # Without one, iterate. Entering it returns when the relay knows of it: nothing after that is missed.
            client.subscribe("flights.*.B6") as jetblue,
        ):
            for topic in ("flights.JFK.B6", "flights.LGA.UA", "flights.EWR.B6", "trains.NYP.acela"):
                await client.publish(topic, f"news of {topic}")
            seen = 0
            async for message in jetblue:
                print("B6 only:", message.name, message.payload.decode())
                seen += 1
                if seen == 2:
                    break
        print("all flights:", everything)


asyncio.run(main())
