"""The code of `make proof AREA=federation`, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.sim import World

TESTS = Path(__file__).parents[1]
SMALL = """
import json
from proofs.common import Proof
from proofs.federation import sim

if __name__ == "__main__":
    proof = Proof()
    sim(2, 20_241, proof, sites=4, relays=3)
    print(json.dumps([proof.figures, proof.broken]))
"""
SEEDS = (1, 2, 3)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_promise_holds_in_many_sites_whose_gateways_fail(seed: int) -> None:
    world = World(seed, sites=8, relays=4)
    world.run(60)
    ledger = world.net.ledger
    assert ledger.over_wan > 500
    assert ledger.audited > 100
    assert ledger.outcomes["request reply"] > 100
    assert world.did["crash"] + world.did["freeze"] + world.did["isolate"] > 0


def test_the_proof_of_a_federation_says_what_it_did(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{SMALL}")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100
    )
    figures, broken = json.loads(run.stdout)
    assert not broken
    assert figures["federation"] == "4 sites of 3 relays, 12 links, 12 WAN connections"
    assert "seeds 20241 to 20242" in figures["lives"]
