"""Departures, step 2: several kinds of request, with types and refusals."""

from dataclasses import dataclass

import iris


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


FLIGHTS = {
    flight.number: flight
    for flight in (
        Flight("B6 17", "JFK", "08:15"),
        Flight("UA 12", "EWR", "09:00"),
        Flight("DL 8", "LGA", "09:30"),
    )
}

service = iris.Service("departures", version="2")


def find(number: str) -> Flight:
    if number not in FLIGHTS:
        raise iris.Refusal("unknown_flight", number=number)
    return FLIGHTS[number]


@service.on_request("status")
def status(number: str) -> Flight:
    return find(number)


@service.on_request("change")
def change(change: Change) -> Flight:
    flight = find(change.number)
    if change.delay < 0:
        raise iris.Refusal("too_early", "a flight never leaves before its time")
    flight.delay = change.delay
    return flight
