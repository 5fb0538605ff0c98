"""Whole lives of networks, each drawn from a seed. A failure shows its seed: `python -m support.sim SEED STEPS
[sites]` replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sim import Violation, play
from support.sim.chaos import Chaos

STEPS = 360
SEEDS = (8, 11, 23, 42, 60, 71, 101, 2013, 3064, 3071, 3114, 7430, 65_537)
SITES_SEEDS = (1, 5, 17, 41, 66, 101, 3005, 3008)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_promise_holds_through_a_life_of_faults(seed: int) -> None:
    chaos = play(seed, STEPS)
    ledger = chaos.net.ledger
    assert sum(chaos.did.values()) == STEPS
    assert chaos.rounds == STEPS // 120
    # The life was not empty: messages were sent, received and served, also over links.
    assert ledger.outcomes["request reply"] > 10
    assert ledger.audited > 5
    assert ledger.loops_checked > 50


@pytest.mark.parametrize("seed", SITES_SEEDS)
def test_every_promise_holds_through_a_life_of_a_federation(seed: int) -> None:
    chaos = play(seed, STEPS, sites=True)
    ledger = chaos.net.ledger
    assert chaos.rounds == STEPS // 120
    assert ledger.outcomes["request reply"] > 10
    assert ledger.audited > 5
    assert ledger.over_wan > 50


@pytest.mark.parametrize("shape", [[], ["sites"]])
def test_a_seed_replays_the_same_life_in_another_process_whatever_its_hash_seed(
    shape: list[str],
) -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "support.sim", "3", "120", *shape]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True, timeout=60
        )  # fmt: skip
        digests.add(run.stdout)
    assert len(digests) == 1
    assert "digest" in digests.pop()


def test_a_broken_promise_ends_the_run_and_names_the_seed_and_what_happened() -> None:
    chaos = Chaos(5, relays=2)
    net = chaos.net
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo")
    net.run(0.5)
    call = caller.request("echo")
    net.until(lambda: bool(call.outcome))
    with pytest.raises(
        Violation, match=r"(?s)seed 5, at .*has a link to.*ended as 'reply' and again as 'fault'"
    ):
        call.end("fault")
