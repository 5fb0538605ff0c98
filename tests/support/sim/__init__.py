"""A simulated network of relays in one process and in virtual time, drawn from a seed."""

from support.sim.chaos import Chaos, play
from support.sim.members import KEY, OTHER_KEY, SimCall, SimMember, SimSession, SimTunnel
from support.sim.network import SimNetwork, SimRelay, Violation
from support.sim.world import World

__all__ = [
    "KEY",
    "OTHER_KEY",
    "Chaos",
    "SimCall",
    "SimMember",
    "SimNetwork",
    "SimRelay",
    "SimSession",
    "SimTunnel",
    "Violation",
    "World",
    "play",
]
