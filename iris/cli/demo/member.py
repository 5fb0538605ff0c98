"""A member of the cluster `delays`: what the demo's member processes serve with `iris run iris.cli.demo.member`."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

import iris
from iris.cli.demo.data import Tally

CLUSTER: Final = "delays"
READ_ROWS: Final = 40
"""Rows that the slow reader of tunnels takes before it pauses."""
READ_PAUSE_S: Final = 0.01


class Question(msgspec.Struct):
    """How late do flights of this carrier leave from there?"""

    origin: str
    carrier: str


class Delay(msgspec.Struct):
    """What a member has heard so far."""

    flights: int
    minutes: int


class Count(msgspec.Struct):
    """A member's account. `missed` counts publications that it was told it had lost."""

    pid: int
    rows: int
    checksum: int
    missed: int
    answered: int
    tunnel_rows: int


service = iris.Service(CLUSTER)
_heard: Final = Tally()
_count: Final = Count(os.getpid(), 0, 0, 0, 0, 0)


@service.on_publish("flights.>")
def hear(flight: bytes) -> None:
    """Remember the delay of one flight."""
    _heard.add_delay(flight)


@service.on_gap
def miss(loss: iris.Lost) -> None:
    """Admit what was lost."""
    _count.missed += loss.count or 1


@service.on_request
def delay(question: Question) -> Delay:
    """Answer from what was heard."""
    _count.answered += 1
    flights, minutes = _heard.departures.get((question.origin, question.carrier), (0, 0))
    return Delay(flights, minutes)


@service.on_survey
def count(_: bytes) -> Count:
    """Give the account so far."""
    _count.rows, _count.checksum = _heard.rows, _heard.checksum
    return _count


@service.on_tunnel
async def read_slowly(tunnel: iris.Tunnel) -> None:
    """Say who reads, read rows at a slow pace, and say at the end what they came to."""
    _count.tunnel_rows = 0
    await tunnel.send(msgspec.json.encode(_count))
    tally = Tally()
    async for row in tunnel:
        tally.add(row)
        _count.tunnel_rows = tally.rows
        if tally.rows % READ_ROWS == 0:
            await asyncio.sleep(READ_PAUSE_S)
    await tunnel.send(msgspec.json.encode((tally.rows, tally.checksum)))
