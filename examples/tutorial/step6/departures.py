"""Departures, step 6: figures for Prometheus."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import iris
import iris.metrics


@dataclass
class Flight:
    number: str
    origin: str
    scheduled: str
    delay: int = 0  # minutes


@dataclass
class Change:
    number: str
    delay: int


@dataclass
class Airports:
    """What the handlers share."""

    client: iris.Client
    flights: dict[str, Flight] = field(default_factory=dict)

    def find(self, number: str) -> Flight:
        if number not in self.flights:
            raise iris.Refusal("unknown_flight", number=number)
        return self.flights[number]


@asynccontextmanager
async def lifespan(client: iris.Client) -> AsyncIterator[Airports]:
    today = ("B6 17", "JFK", "08:15"), ("UA 12", "EWR", "09:00"), ("DL 8", "LGA", "09:30")
    async with iris.metrics.serve(client, int(os.environ.get("METRICS_PORT", "9100"))):
        yield Airports(client, {row[0]: Flight(*row) for row in today})


times = iris.metrics.handler_times()
service = iris.Service("departures", version="6", lifespan=lifespan, middleware=[times])


@service.on_request("status")
async def status(number: str, airports: Airports) -> Flight:
    return airports.find(number)


@service.on_request("change")
async def change(change: Change, airports: Airports) -> Flight:
    flight = airports.find(change.number)
    await airports.client.streams.append("changes", change, key=change.number)
    flight.delay = change.delay
    await airports.client.publish(f"departures.{flight.origin}", flight)
    return flight
