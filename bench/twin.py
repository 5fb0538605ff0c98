"""The bare twins of Iris's own path (`floor/`) as a column of the comparison."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import harness
from harness import BENCH, Result, Roles
from roles import encoded

if TYPE_CHECKING:
    from lineup import Cell


def run(cell: Cell, seconds: float) -> Result:
    """Run the twin of a load once; raises KeyError for a load that has none."""
    return RUNS[cell.shows](cell, seconds)


def publish(cell: Cell, seconds: float) -> Result:
    """Run the publishing twin, which loses nothing: its relay stops reading from the publisher while a subscriber
    is behind."""
    options = {"subscribers": cell.subscribers, "topics": 1, "unbundled": False}
    sent, received, relay = _floor("publish", "subscriber", "publisher", cell, seconds, options)
    total = sum(r["received"] for r in received)
    rate = total / (max(r["end_ns"] for r in received) - sent["begin_ns"]) * 1e9
    return {
        "sent_rate": rate / cell.subscribers,
        "received_rate": rate,
        "lossless_rate": rate,
        "sent": sent["sent"],
        "received": total,
        "lost": sent["sent"] * cell.subscribers - total,
        "wrong": sum(r["wrong"] for r in received),
        "processes": [relay, _used("publisher", sent), *(_used("subscriber", r) for r in received)],
    }


def stream(cell: Cell, seconds: float) -> Result:
    sent, received, relay = _floor("tunnel", "receiver", "sender", cell, seconds, {})
    spent_ns = received[0]["end_ns"] - sent["begin_ns"]
    return {
        "rate_mb_s": received[0]["received"] * cell.size * 1e3 / spent_ns,
        "messages": received[0]["received"],
        "lost": sent["sent"] - received[0]["received"],
        "wrong": received[0]["wrong"],
        "processes": [relay, _used("sender", sent), _used("receiver", received[0])],
    }


def request(cell: Cell, seconds: float) -> Result:
    options = {"inflight": cell.inflight}
    asked, served, relay = _floor("request", "server", "client", cell, seconds, options)
    samples_ns = asked["samples_ns"]
    return {
        "rate": len(samples_ns) / asked["spent_s"],
        "requests": len(samples_ns),
        "wrong": asked["wrong"],
        "processes": [relay, _used("requester", asked), _used("replier", served[0])],
        "latency": {"uncorrected": encoded(samples_ns)},
    }


RUNS = {"publish": publish, "stream": stream, "closed": request, "rate": request}


def _floor(
    name: str, receiver: str, sender: str, cell: Cell, seconds: float, options: Result
) -> tuple[Result, list[Result], Result]:
    """Run the roles of one twin; return the results of sender and receivers, and the processor seconds of the relay."""
    script = str(BENCH / "floor" / f"{name}.py")
    with Roles(seconds + 60) as roles:
        common = {
            "path": str(roles.directory / "twin"),
            "sndbuf": harness.system_send_buffer(),
            "size": cell.size,
            "seconds": seconds,
        }
        given = json.dumps({**common, **options})
        relay = roles.start("relay", [script, "relay", given], ready=True)
        receivers = [
            roles.start(receiver, [script, receiver, given], ready=True)
            for _ in range(cell.subscribers)
        ]
        sent = roles.start(sender, [script, sender, given]).result()
        stop = name != "publish"
        received = [role.result(stop=stop) for role in receivers]
        return sent, received, _used("relay", relay.result(stop=True))


def _used(name: str, result: Result) -> Result:
    return {"name": name, "cpu_s": result["cpu_s"], "peak_bytes": result["peak_bytes"]}
