"""The service of the demo's member processes: cluster `delays`, started with `iris run iris.cli.demo.member`."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

import iris
from iris.cli.demo.data import Tally

CLUSTER: Final = "delays"
READ_ROWS: Final = 40
"""Rows that the slow reader of a tunnel reads before each pause."""
READ_PAUSE_S: Final = 0.01


class Question(msgspec.Struct):
    """Ask for the delays of one carrier's flights from one airport."""

    origin: str
    carrier: str


class Delay(msgspec.Struct):
    """Flights with a known delay that a member has received, and the sum of their delays in minutes."""

    flights: int
    minutes: int


class Count(msgspec.Struct):
    """Counts of a member. `missed` is the number of publications that were reported to it as lost."""

    pid: int
    rows: int
    checksum: int
    missed: int
    answered: int
    tunnel_rows: int


service = iris.Service(CLUSTER)
_received: Final = Tally()
_count: Final = Count(os.getpid(), 0, 0, 0, 0, 0)


@service.on_publish("flights.>")
def on_flight(flight: bytes) -> None:
    """Add the delay of one flight."""
    _received.add_delay(flight)


@service.on_loss
def on_loss(loss: iris.Loss) -> None:
    """Count lost publications."""
    _count.missed += loss.count or 1


@service.on_request
def delay(question: Question) -> Delay:
    """Answer from the flights received so far."""
    _count.answered += 1
    flights, minutes = _received.departures.get((question.origin, question.carrier), (0, 0))
    return Delay(flights, minutes)


@service.on_survey
def count(_: bytes) -> Count:
    """Return the counts so far."""
    _count.rows, _count.checksum = _received.rows, _received.checksum
    return _count


@service.on_tunnel
async def read_slowly(tunnel: iris.Tunnel) -> None:
    """Send this member's counts, read rows slowly, and send the totals at the end."""
    _count.tunnel_rows = 0
    await tunnel.send(msgspec.json.encode(_count))
    tally = Tally()
    async for row in tunnel:
        tally.add(row)
        _count.tunnel_rows = tally.rows
        if tally.rows % READ_ROWS == 0:
            await asyncio.sleep(READ_PAUSE_S)
    await tunnel.send(msgspec.json.encode((tally.rows, tally.checksum)))
