"""Sabotages: each replaces one expression of a check, and names the tests that must notice.

`find` occurs once in the function. `put` replaces it, which removes or inverts the check. Do not add a sabotage
that no test can notice because another check refuses the same.
"""

from __future__ import annotations

from proofs.sabotages import (
    aimed,
    bounded,
    browsers,
    bucket,
    channels,
    connections,
    crypto,
    drains,
    groups,
    handlers,
    kept,
    orders,
    processes,
    routing,
    sites,
    streams,
    troubles,
    turns,
    values,
    waiting,
    web,
)
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
    *waiting.SABOTAGES,
    *bounded.SABOTAGES,
    *drains.SABOTAGES,
    *handlers.SABOTAGES,
    *groups.SABOTAGES,
    *bucket.SABOTAGES,
    *web.SABOTAGES,
    *turns.SABOTAGES,
    *aimed.SABOTAGES,
    *browsers.SABOTAGES,
    *processes.SABOTAGES,
    *kept.SABOTAGES,
    *values.SABOTAGES,
    *troubles.SABOTAGES,
)
