"""Scenarios for three sites of two gateways and one more relay each: load while WAN connections, gateways or a whole
site fail.

Every function takes a count, small in tests and large in proofs, and returns figures. A failed promise raises
AssertionError.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hosts.kit import Program, Relay, wait_until
from hosts.sites import Federation

AT_ONCE = 50
PAUSE_S = 0.02
"""Pause between two bursts of a flow under faults, which makes 2,500 messages a second."""
SETTLE_S = 0.5


class Load:
    """A flow of numbers from the plain relay of every site, and at each plain relay a subscriber and a worker
    that count them.
    """

    def __init__(
        self, federation: Federation, topic: str, *, limit: int = 0, pause_s: float = PAUSE_S
    ) -> None:
        """`limit`: messages of each flow. Without it the flows continue until `stop`."""
        self.federation = federation
        self.topic = topic
        self.sent: dict[str, int] = {}
        number = len(federation.sites["eu"].hosts)
        self.publishers = {
            s: federation.program(s, number, f"{s}-{topic}-out") for s in federation.sites
        }
        self.subscribers = {
            s: federation.program(s, number, f"{s}-{topic}-in") for s in federation.sites
        }
        self.workers = [
            federation.program(s, number, f"{s}-{topic}-worker{n}")
            for s in federation.sites
            for n in (1, 2)
        ]
        for subscriber in self.subscribers.values():
            subscriber.do("tally", pattern=f"{topic}.>")
        for worker in self.workers:
            worker.do("tally", pattern=f"{topic}.*", group="workers")
        for publisher in self.publishers.values():
            self._reaches(publisher)
        self._flows = {
            s: p.begin("flow", topic=f"{topic}.{s}", at_once=AT_ONCE, pause=pause_s, limit=limit)
            for s, p in self.publishers.items()
        }
        # A subscriber can only report losses of senders from which it has received a message.
        for site, subscriber in self.subscribers.items():
            wait_until(lambda s=subscriber: self._begun(s), f"{site} hears every flow")  # type: ignore[misc]  # bound at once

    def _begun(self, subscriber: Program) -> bool:
        tallies = subscriber.do("tallies")
        return all(tallies.get(f"{self.topic}.{s}", {}).get("count") for s in self.publishers)

    def _reaches(self, publisher: Program) -> None:
        """Publish probes under a separate name until every subscriber has received one."""
        probe = f"{self.topic}.{publisher.name}"

        def known() -> bool:
            publisher.do("publish", topic=probe, first=-1, count=1)
            time.sleep(0.1)
            return all(probe in s.do("tallies") for s in self.subscribers.values())

        wait_until(known, f"{publisher.name} reaches all")

    def stop(self) -> None:
        """End the flows, and wait until the last messages have arrived everywhere."""
        for site, publisher in self.publishers.items():
            publisher.do("stop_flow", topic=f"{self.topic}.{site}")
        self.ended()

    def ended(self) -> None:
        """Wait for the end of the flows, and until the last messages have arrived everywhere."""
        for site, flow in self._flows.items():
            self.sent[site] = _long(flow)
        for site in self.sent:
            last = self.sent[site]
            # A loss at the very end is noticed with the next message only.
            self.publishers[site].do("publish", topic=f"{self.topic}.{site}", first=last, count=1)
            self.sent[site] += 1
        for site, subscriber in self.subscribers.items():
            wait_until(lambda s=subscriber: self._all_in(s), f"the last numbers are at {site}")  # type: ignore[misc]  # bound at once

    def _all_in(self, subscriber: Program) -> bool:
        tallies = subscriber.do("tallies")
        return all(tallies[f"{self.topic}.{s}"]["last"] == n - 1 for s, n in self.sent.items())

    def check(self, *, lossless: bool) -> dict[str, Any]:
        """Check that nothing came twice or out of order, that every loss was reported, and that one member of a group
        received each message.
        """
        lost = 0
        for site, subscriber in self.subscribers.items():
            tallies = subscriber.do("tallies")
            for source, sent in self.sent.items():
                tally = tallies[f"{self.topic}.{source}"]
                where = f"of {source} at {site}: {tally}, {sent} sent"
                assert tally["inversions"] == 0, where
                assert tally["count"] + tally["missing"] == sent, where
                assert not lossless or sent == tally["count"], where
                lost += sent - tally["count"]
        worked = inversions = 0
        for worker in self.workers:
            for name, tally in worker.do("tallies").items():
                if name.removeprefix(f"{self.topic}.") in self.sent:
                    worked += tally["count"]
                    inversions += tally["inversions"]
        total = sum(self.sent.values())
        assert inversions == 0, f"{inversions} inversions at workers"
        assert worked <= total, f"{worked} of {total} at workers: some came twice"
        assert not lossless or worked == total, f"{worked} of {total} at workers"
        return {
            "messages": f"{total:,} published, {3 * total - lost:,} at subscribers, {worked:,} at one worker of a group",
            "reported as lost": f"{lost:,}",
            "inversions and duplicates": 0,
        }

    def close(self) -> None:
        """End the programs."""
        for program in (*self.publishers.values(), *self.subscribers.values(), *self.workers):
            program.leave()


def _long(command: Any) -> Any:
    """Return a command's result, however long it takes. The caller's deadline is the limit."""
    while not command.done:
        time.sleep(0.2)
    return command.result()


@contextmanager
def loaded(federation: Federation, topic: str, **options: Any) -> Iterator[Load]:
    """Put a federation under load. The block must end the load."""
    load = Load(federation, topic, **options)
    try:
        yield load
    finally:
        load.close()


def ring(federation: Federation, messages: int) -> dict[str, Any]:
    """Send `messages` around the ring of three: one copy for each subscriber and for each group."""
    began_s = time.monotonic()
    with loaded(federation, "ring", limit=messages // 3, pause_s=0.01) as load:
        load.ended()
        return load.check(lossless=True) | {"took": f"{time.monotonic() - began_s:.0f} s"}


def cuts(federation: Federation, rounds: int, seed: int) -> dict[str, Any]:
    """Reset WAN connections, or stall them for up to five seconds."""
    chance = random.Random(seed)
    done: dict[str, int] = {}
    began_s = time.monotonic()
    with loaded(federation, "cuts") as load:
        for _ in range(rounds):
            pair = chance.sample(sorted(federation.sites), 2)
            how = chance.choice(("reset", "one reset", "stalled briefly", "stalled until dead"))
            done[how] = done.get(how, 0) + 1
            if how == "reset":
                federation.cut(*pair)
            elif how == "one reset":
                chance.choice(federation.between(*pair)).cut()
            else:
                federation.stall(*pair)
                time.sleep(
                    chance.uniform(0.2, 1.5) if how == "stalled briefly" else chance.uniform(4, 5)
                )
                federation.flow(*pair)
            federation.joined()
            time.sleep(chance.uniform(0.0, SETTLE_S))
        load.stop()
        found = load.check(lossless=False)
    federation.settled()
    return {"rounds": _listed(done), **found, "took": f"{time.monotonic() - began_s:.0f} s"}


def gateway_kills(federation: Federation, rounds: int, seed: int) -> dict[str, Any]:
    """Kill gateways, or freeze them until their traffic has moved to the other gateway."""
    chance = random.Random(seed)
    done: dict[str, int] = {}
    began_s = time.monotonic()
    with loaded(federation, "kills") as load:
        for number in range(rounds):
            site = chance.choice(sorted(federation.sites))
            victim = chance.choice(
                federation.sites[site].relays[: len(federation.sites[site].hosts)]
            )
            how = "frozen" if number % 3 == 2 else "killed"
            done[how] = done.get(how, 0) + 1
            if how == "killed":
                victim.kill()
                time.sleep(chance.uniform(0.0, 1.0))
                victim.start()
            else:
                victim.freeze()
                time.sleep(chance.uniform(3.5, 5.0))
                victim.thaw()
            federation.joined()
            time.sleep(chance.uniform(0.0, SETTLE_S))
        load.stop()
        found = load.check(lossless=False)
    federation.settled()
    return {"gateways": _listed(done), **found, "took": f"{time.monotonic() - began_s:.0f} s"}


def site_lost(federation: Federation) -> dict[str, Any]:
    """Disconnect a whole site and connect it again: the others continue, and notice both."""
    number = len(federation.sites["eu"].hosts)
    member, caller = (
        federation.program("us", number, "lost-member"),
        federation.program("eu", number, "lost-caller"),
    )
    member.do("serve", cluster="lost")
    wait_until(lambda: _answers(caller, "lost") == "lost-member", "us answers eu")
    with loaded(federation, "site") as load:
        federation.sites["us"].cut()
        cut_s = time.monotonic()
        wait_until(
            lambda: (
                "us" not in {s["site"] for s in federation.sites["eu"].relays[0].status()["sites"]}
            ),
            "eu misses us",
        )
        missed_s = time.monotonic() - cut_s
        wait_until(lambda: _answers(caller, "lost") == "NoMembers", "nobody is there")
        federation.sites["us"].heal()
        healed_s = time.monotonic()
        wait_until(lambda: _answers(caller, "lost") == "lost-member", "us answers again")
        back_s = time.monotonic() - healed_s
        federation.joined()
        load.stop()
        found = load.check(lossless=False)
    for program in (member, caller):
        program.leave()
    federation.settled()
    return {"missed after": f"{missed_s:.1f} s", "answers again after": f"{back_s:.1f} s", **found}


def failover(federation: Federation, rounds: int) -> dict[str, Any]:
    """Kill the last local member, kill its relay, freeze its relay: another site answers. When it returns, it answers
    again.
    """
    site = federation.sites["eu"]
    number = len(site.hosts)
    away = federation.program("us", number, "away")
    away.do("serve", cluster="work")
    caller = federation.program("eu", number, "failover-caller")
    home_relay = site.relays[1]
    longest: dict[str, float] = {}

    def lose_member(member: Program, relay: Relay) -> None:
        member.kill()

    def kill_relay(member: Program, relay: Relay) -> None:
        relay.kill()

    def freeze_relay(member: Program, relay: Relay) -> None:
        relay.freeze()

    ways: dict[str, Callable[[Program, Relay], None]] = {
        "member killed": lose_member, "its relay killed": kill_relay, "its relay frozen": freeze_relay,
    }  # fmt: skip
    for turn in range(rounds):
        for how, lose in ways.items():
            member = home_relay.program(f"home{turn}")
            member.do("serve", cluster="work")
            wait_until(lambda m=member: _answers(caller, "work") == m.name, "home answers")  # type: ignore[misc]  # bound at once
            lose(member, home_relay)
            lost_s = time.monotonic()
            wait_until(lambda: _answers(caller, "work") == "away", "us answers")
            longest[how] = max(longest.get(how, 0.0), time.monotonic() - lost_s)
            if how == "its relay frozen":
                home_relay.thaw()
                wait_until(
                    lambda m=member: _answers(caller, "work") == m.name, "home answers again"
                )  # type: ignore[misc]  # bound at once
            elif how == "its relay killed":
                home_relay.start()
            if how != "member killed":
                member.kill()
            federation.joined()
    for program in (away, caller):
        program.leave()
    return {
        f"another site answers, {how}": f"after at most {s:.2f} s" for how, s in longest.items()
    }


def _answers(caller: Program, cluster: str) -> str:
    """Return the member that answers a request, or the error."""
    command = caller.begin("requests", cluster=cluster, count=1, in_flight=1, timeout=0.5)
    (who,) = command.result()
    return str(who)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
