"""Departures, step 1: a service and a call."""

import iris

service = iris.Service("departures")
FLIGHTS = {"B6 17": "JFK 08:15", "UA 12": "EWR 09:00", "DL 8": "LGA 09:30"}


@service.on_request
def status(number: str) -> str:
    return FLIGHTS.get(number, "not today")
