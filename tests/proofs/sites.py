"""Three sites of two gateways and one more relay each, on separate hosts: N cuts of the WAN, N dead gateways,
20,000 N messages.

Needs root. The code is in `proofs/scenarios/sites.py`, which `make test` runs at small counts. Delay: 20 ms each way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import BenchError
from hosts.sites import Federation
from support.namespaces import Lan, why_not

from proofs.common import Proof
from proofs.scenarios import sites

ONE_WAY_S = 0.02
MESSAGES = 20_000
"""Messages over the ring, for each of the count."""


def run(count: int, seed: int) -> Proof:
    """Run it with `count` rounds of each fault."""
    if reason := why_not():
        raise BenchError(f"no hosts: {reason}")
    proof = Proof()
    parts: dict[str, Callable[[Federation], dict[str, Any]]] = {
        "ring of three": lambda f: sites.ring(f, count * MESSAGES),
        "WAN cut and healed": lambda f: sites.cuts(f, count, seed),
        "gateways": lambda f: sites.gateway_kills(f, count, seed),
        "site lost": sites.site_lost,
        "failover": lambda f: sites.failover(f, max(1, count // 10)),
    }
    for name, part in parts.items():
        with tempfile.TemporaryDirectory(prefix="iris-proof-") as directory, Lan() as lan:
            try:
                with Federation(lan, Path(directory), plain=1, delay_s=ONE_WAY_S) as federation:
                    federation.joined()
                    found = part(federation)
            except AssertionError as err:
                proof.promise(f"{name}: {err}", False)
            else:
                proof.figures |= {f"{name}: {what}": str(value) for what, value in found.items()}
    return proof
