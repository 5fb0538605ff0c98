"""The rule of streams in a bucket, as a model: histories hold, and each part of the rule is needed."""

from __future__ import annotations

import pytest
from support.bucket_model import RULES, World

HISTORIES = 300


def test_what_was_acknowledged_or_shown_stands_in_the_stream_once() -> None:
    acked = 0
    for seed in range(HISTORIES):
        world = World(seed)
        assert not (error := world.run()), f"seed {seed}: {error}"
        acked += len(world.acked)
    assert acked > 10 * HISTORIES, "the histories are too short to show anything"


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_broken_is_noticed(rule: str) -> None:
    for seed in range(10 * HISTORIES):
        if World(seed, rule).run():
            return
    raise AssertionError(f"{HISTORIES} histories hold without the rule {rule!r}")
