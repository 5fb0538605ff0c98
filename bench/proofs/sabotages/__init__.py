"""Sabotages: one expression of a check each, by the function that it stands in, and the tests that have to notice.

`find` is there once in the function; `put` takes its place and takes the check away, or turns it round. One that nobody could
notice, because something else refuses the same, does not belong here.
"""

from __future__ import annotations

from proofs.sabotages import channels, connections, crypto, orders, routing, sites, streams
from proofs.sabotages.sabotage import Sabotage

__all__ = ["SABOTAGES", "Sabotage"]

SABOTAGES: tuple[Sabotage, ...] = (
    *crypto.SABOTAGES,
    *connections.SABOTAGES,
    *routing.SABOTAGES,
    *sites.SABOTAGES,
    *streams.SABOTAGES,
    *channels.SABOTAGES,
    *orders.SABOTAGES,
)
