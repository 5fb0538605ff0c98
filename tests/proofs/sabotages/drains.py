"""Drains: what handlers may still call, and who stays for it."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

DRAINING = ("tests/protocol/test_draining.py",)
HANDLERS = ("tests/integration/test_calls_of_handlers.py",)

SABOTAGES = (
    Sabotage(
        "drain-leaves-at-once",
        "relay/core/draining.py",
        "Draining.expire",
        "self._leaving and self._running()",
        "False",
        DRAINING,
        "members leave a stopping relay while handlers run that call them",
    ),
    Sabotage(
        "drain-waits-for-stores",
        "relay/core/parts.py",
        "Parts._handlers_run",
        "session.in_flight and not session.stores",
        "session.in_flight",
        DRAINING,
        "a worker that waits at a store keeps all members until the grace is over",
    ),
    Sabotage(
        "drain-ends-before-handlers",
        "iris/leaving.py",
        "Leaving._calls_may_follow",
        "handlers_run_at(pump.session.relay_id)",
        "False",
        HANDLERS,
        "what a handler calls waits for the next relay, which waits for the handler",
    ),
    Sabotage(
        "drain-for-everybody",
        "iris/leaving.py",
        "Leaving.calling",
        "IN_HANDLER.get()",
        "True",
        HANDLERS,
        "a program that calls all the time keeps its relay from stopping",
    ),
)
