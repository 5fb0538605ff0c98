"""Random faults on four hosts under load: permanent promises always hold, and afterwards everything works again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hosts.kit import Network, Program, Relay

pytestmark = [pytest.mark.timeout(300), pytest.mark.net]
SEED = int(os.environ.get("IRIS_CHAOS_SEED", "20241"))
STEPS = int(os.environ.get("IRIS_CHAOS_STEPS", "8"))
REQUESTS = 60
PUBLICATIONS = 100
LONG_S = 60.0


class Chaos:
    """The present faults, and the functions that end them."""

    def __init__(self, relays: list[Relay], seed: int) -> None:
        self.relays = relays
        self.chance = random.Random(seed)
        self.mends: dict[Relay, Callable[[], object]] = {}
        self.done: list[str] = []

    def step(self) -> None:
        """Cause a fault on a host, or end one. At least two hosts are always without a fault."""
        relay = self.chance.choice(self.relays)
        if relay in self.mends:
            self.done.append(f"mend {relay.host.name}")
            self.mends.pop(relay)()
        elif len(self.mends) < len(self.relays) - 2:
            nic = relay.host.nics["eth0"]
            ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "cut": (nic.cut, nic.heal),
                "switch off": (nic.down, nic.up),
                "kill": (relay.kill, relay.start),
                "freeze": (relay.freeze, relay.thaw),
            }
            how = self.chance.choice(list(ways))
            hurt, self.mends[relay] = ways[how]
            self.done.append(f"{how} {relay.host.name}")
            hurt()

    def mend_all(self) -> None:
        while self.mends:
            self.mends.popitem()[1]()


def test_whatever_fails_requests_end_and_run_once_and_publications_keep_their_order(
    network: Network,
) -> None:
    relays = network.hosts("abcd")
    network.meshed()
    members = network.members(*relays)
    for member in members:
        member.do("subscribe", pattern="news.*")
    for member in members:
        member.reaches("news.ready", *members)
        for other in members:
            other.do("forget_probes")
    chaos = Chaos(relays, SEED)
    sent = {member.name: 0 for member in members}
    asked = 0
    ends: dict[str, int] = {}
    try:
        for _ in range(STEPS):
            chaos.step()
            commands = []
            for relay, member in zip(relays, members, strict=True):
                if relay in chaos.mends:
                    continue
                commands.append(
                    member.begin(
                        "requests", cluster="echo", count=REQUESTS, in_flight=8, timeout=LONG_S, first=asked
                    )
                )  # fmt: skip
                asked += REQUESTS
                member.do("publish", topic=f"news.{member.name}", first=sent[member.name], count=PUBLICATIONS)  # fmt: skip
                sent[member.name] += PUBLICATIONS
            for command in commands:
                for end, count in command.result().items():
                    ends[end] = ends.get(end, 0) + count
        chaos.mend_all()
        network.meshed()
        for member in members:
            member.sees_members(4)
        check(relays, members, asked, ends)
        for member in members:
            member.reaches("news.ready", *members)
    except BaseException as err:
        err.add_note(f"seed {SEED}: {', '.join(chaos.done)}; {ends}")
        raise


def check(relays: list[Relay], members: list[Program], asked: int, ends: dict[str, int]) -> None:
    """Check that nothing was lost without a report, run twice or received out of order; every account must balance."""
    assert sum(ends.values()) == asked
    assert set(ends) <= {"a", "b", "c", "d", "ConnectionLost"}
    ran = [number for member in members for number in member.do("received", what="request")]
    assert len(ran) == len(set(ran)), "a request ran twice"
    answered = asked - ends.get("ConnectionLost", 0)
    assert len(ran) >= answered
    for member in members:
        by_topic: dict[str, list[int]] = {}
        for text in member.do("received", what="named"):
            topic, _, number = text.partition(" ")
            by_topic.setdefault(topic, []).append(int(number))
        for topic, numbers in by_topic.items():
            assert numbers == sorted(set(numbers)), f"{member.name} heard {topic} out of order"
        assert f"news.{member.name}" in by_topic
    for relay in relays:
        relay.settled()
