"""Two hosts (network namespaces) on one switch: N starts of a relay, alone and beside another one, and idle traffic.

Needs root. Times are measured from before the process is started to the event in the relay's log, so they include
the interpreter and imports. Only the network key is configured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness import BenchError
from hosts.kit import Network, Relay
from support.namespaces import Lan, Nic, why_not

from proofs.common import Proof

ALONE_S, LINKED_S = 1.0, 2.0
"""Limits of the medians: serving, and linked to the relay of the other host."""
MEASURED_STARTS = 20
"""With fewer starts the figures are shown, but not compared with the limits."""
SETTLE_S, IDLE_S = 5.0, 30.0
"""Time before idleness is measured, and length of the measurement. Shorter in proportion with fewer starts."""
IDLE_LIMIT = 1000.0
"""Most bytes a second that a relay without links may send."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Packets and bytes of an interface per second."""

    sent_bytes: float
    received_bytes: float
    packets: float

    def __str__(self) -> str:
        return f"{self.sent_bytes:,.0f} bytes/s sent, {self.received_bytes:,.0f} received, {self.packets:.1f} packets/s"


def idle(nic: Nic, part: float) -> Rate:
    """Return the traffic of an interface while nobody uses the relay, measured for `part` of the usual time."""
    time.sleep(part * SETTLE_S)
    seconds = part * IDLE_S
    before = nic.traffic()
    time.sleep(seconds)
    after = nic.traffic()
    packets = after.sent_packets + after.received_packets
    packets -= before.sent_packets + before.received_packets
    return Rate(
        (after.sent_bytes - before.sent_bytes) / seconds,
        (after.received_bytes - before.received_bytes) / seconds,
        packets / seconds,
    )


def started(relay: Relay, event: str) -> float:
    """Start a relay, measure the seconds until it logs `event`, and end it."""
    begin = len(relay.lines())
    before_s = time.time()
    relay.launch()
    relay.serves()
    while not (found := [line for line in relay.lines()[begin:] if line["event"] == event]):
        if time.time() - before_s > 30:
            raise BenchError(f"no {event} within 30 s: {relay.log.read_text()[-2000:]}")
        time.sleep(0.01)
    after_s = datetime.fromisoformat(found[0]["time"]).timestamp()
    relay.stop()
    return after_s - before_s


def show(seconds: list[float]) -> str:
    """Return times as text for the record."""
    return f"median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s"


def run(count: int, seed: int) -> Proof:
    """Run it with `count` starts of each kind."""
    if reason := why_not():
        raise BenchError(reason)
    part = min(1.0, count / MEASURED_STARTS)
    with tempfile.TemporaryDirectory(prefix="iris-bench-") as directory, Lan() as lan:
        network = Network(lan, Path(directory))
        here, there = lan.host("here"), lan.host("there")
        nic = here.plug()
        there.plug()
        relay = network.relay(here)
        alone = idle(nic, part)
        relay.stop()
        alone_s = [started(relay, "relay.started") for _ in range(count)]
        other = network.relay(there)
        linked_s: list[float] = []
        for _ in range(count):
            linked_s.append(started(relay, "link.up"))
            other.linked_to()
        relay.start()
        network.meshed()
        linked = idle(nic, part)
    proof = Proof()
    proof.figures = {
        "starts": f"{count} alone, {count} beside a running relay",
        "alone and serving": show(alone_s),
        "linked to the other host": show(linked_s),
        "idle, alone (discovery)": str(alone),
        "idle, with one link (discovery and heartbeats)": str(linked),
    }
    if count >= MEASURED_STARTS:
        limit = f"an idle relay alone sends under {IDLE_LIMIT:.0f} bytes/s"
        proof.promise(limit, alone.sent_bytes < IDLE_LIMIT)
        proof.promise(f"serving in under {ALONE_S:g} s", statistics.median(alone_s) < ALONE_S)
        proof.promise(f"linked in under {LINKED_S:g} s", statistics.median(linked_s) < LINKED_S)
    return proof
