"""Helpers for tests of simulated networks."""

from __future__ import annotations

from typing import Any

from support.sim import SimCall, SimNetwork, SimSession

REACH_S = 0.4
"""Time within which any message arrives anywhere."""


def federation(seed: int = 1, **shape: Any) -> SimNetwork:
    """Return three sites of three relays, the first two of each its gateways."""
    shape.setdefault("sites", {"ams": 3, "ber": 3, "cph": 3})
    net = SimNetwork(seed, **shape)
    net.run(2.0)
    net.check_converged()
    return net


def settle(net: SimNetwork) -> None:
    """Let all messages arrive, and check that the network has converged."""
    net.run(REACH_S)
    net.check_converged()


def rest(net: SimNetwork) -> None:
    """End all faults, and check that all replicas are true and no state is left over."""
    net.calm()
    net.check_converged()
    net.check_idle()
    if not net.policies:
        net.ledger.audit()


def wans(net: SimNetwork, one: str, other: str) -> list[tuple[int, int]]:
    """Return the WAN wires between two sites."""
    return [
        (a, b) for (a, b), wire in net.wires.items() if wire.wan and {net.site_of(a), net.site_of(b)} == {one, other}
    ]  # fmt: skip


def through(net: SimNetwork, host: int) -> list[tuple[int, int]]:
    """Return the WAN wires of a gateway."""
    return [pair for pair, wire in net.wires.items() if wire.wan and host in pair]


def got(session: SimSession, tag: int) -> int:
    return session.casts.count(tag)


def notified_ms(call: SimCall, since_us: int) -> float:
    return (call.done_us - since_us) / 1000
