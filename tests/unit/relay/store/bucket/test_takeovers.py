"""A store writes while another takes over, in virtual time, over a bucket that is late, silent and deaf, by seeds.

What the first has acknowledged is at the second, whatever became of the requests.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from support.bucket_sim import life, run

SEEDS = 25


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_is_at_the_store_that_took_over(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(random, "random", random.Random(seed).random)
    acked, there = run(life(tmp_path, seed))
    assert acked == sorted(set(acked)), "acknowledged in order, each once"
    assert acked == there[: len(acked)], "nothing is lost, and nothing stands between"
