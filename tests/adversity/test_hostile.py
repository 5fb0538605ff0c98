"""A hostile relay and a hostile site among honest ones cannot affect sessions that do not communicate with them.

`support.hostile` has the adversaries, with real routers and sessions in memory. `make proof AREA=hostile N=100000`
takes more steps.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.hostile import DEEDS, Scene


class Hostilities(RuleBasedStateMachine):
    """Hypothesis chooses each step, and shortens a sequence that broke a promise."""

    scene: Scene

    @initialize(
        seed=st.integers(0, 1 << 32),
        kinds=st.sampled_from([("relay",), ("site",), ("relay", "site")]),
    )
    def begin(self, seed: int, kinds: tuple[str, ...]) -> None:
        """Create honest relays and sessions, and the adversaries."""
        self.scene = Scene(seed, kinds)

    @rule(
        who=st.integers(0, 2),
        deed=st.sampled_from(DEEDS),
        times=st.integers(1, 8),
        seed=st.integers(0, 1 << 32),
    )
    def deed(self, who: int, deed: str, times: int, seed: int) -> None:
        """Let one adversary repeat a step, with other random choices each time."""
        self.scene.rng.seed(seed)
        for _ in range(times):
            self.scene.step(who, deed)

    @rule()
    def honest_sessions_use_what_was_claimed(self) -> None:
        self.scene.draw()
        self.scene.settle()

    @rule()
    def probe(self) -> None:
        """Check that the other sessions still work."""
        self.scene.probe()

    @invariant()
    def nothing_honest_ended(self) -> None:
        if hasattr(self, "scene"):
            self.scene.check()

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            self.scene.rest()


TestHostilities = Hostilities.TestCase
TestHostilities.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)  # fmt: skip


@pytest.mark.parametrize("kinds", [("relay",), ("site",), ("relay", "site")], ids="+".join)
def test_whatever_they_send_the_others_go_on(kinds: tuple[str, ...]) -> None:
    scene = Scene(1, kinds)
    for _ in range(40):
        for _ in range(40):
            scene.step()
        scene.probe()
    scene.rest()
    assert scene.drawn["answered"] > 0
    assert scene.drawn["failed"] > 0, "the adversary drew no call to itself: this tests little"
    assert scene.drawn["misanswered"] > 0


def test_whatever_they_send_small_bounds_hold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("link.MAX_COPY", "peer_interest.MAX_COPY", "site_routes.MAX_WANTED", "federation.MAX_WANTED", "casts.MAX_GAPS_REPORTED"):  # fmt: skip
        monkeypatch.setattr(f"relay.core.{bound}", 8)
    scene = Scene(2, ("relay", "site"))
    for _ in range(20):
        for _ in range(40):
            scene.step()
            scene.check()
        scene.probe()
    scene.rest()
    assert scene.full >= {"members", "topics", "clusters"}, "it did not come to the bounds"
