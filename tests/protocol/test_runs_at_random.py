"""Random runs, drawn from a seed: truncated, refused in part, answered late, twice, separately or never, while members
and links are lost.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from protocol.kit import Host, LinkEnd, Network, Result, Service

from iris.core.interfaces import Delivery
from iris.wire.codec import COUNT, FLAGS_AT, KIND_AT
from iris.wire.kinds import Kind, Refusal
from iris.wire.runs import answer_run
from relay.core.limits import Limits

STEPS = 120
RELAYS = 3


class Moody(Service):
    """Refuses calls at random, and holds the others until a test makes it answer."""

    def __init__(self, number: int, rng: random.Random, ran: Counter[bytes]) -> None:
        super().__init__(number, None)
        self.rng = rng
        self.ran = ran
        self.mood = 0.0
        self.kept: list[Delivery] = []

    def admit(self, kind: int, size: int) -> Refusal | None:
        if self.rng.random() < self.mood:
            return self.rng.choice((Refusal.FULL, Refusal.FULL, Refusal.LEAVING))
        return None

    def dispatch(self, delivery: Delivery) -> None:
        self.ran[delivery.message.payload] += 1
        self.kept.append(delivery)


class Life:
    """A network with its callers and members, and counts of their actions."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        limits = Limits(pending=rng.choice((6, 24, 1000)))
        self.net = Network(relays=RELAYS, limits=limits, relay_seed=seed)
        self.ends: list[tuple[LinkEnd, LinkEnd]] = []
        self.pairs = [(a, b) for a in range(RELAYS) for b in range(a)]
        self.ends = [self.net.link(*pair) for pair in self.pairs]
        self.ran: Counter[bytes] = Counter()
        self.members: list[tuple[Host, Moody]] = []
        self.callers = [self.host(f"c{n}") for n in range(4)]
        self.calls: list[tuple[bytes, Result]] = []
        self.pushes = 0
        for _ in range(3):
            self.come()

    def host(self, label: str) -> Host:
        return self.net.host(label, relay=self.rng.randrange(RELAYS))

    def come(self) -> None:
        host = self.host("m")
        service = host.serve(
            "db",
            concurrency=self.rng.choice((1, 16, 64, 1000)),
            limit_bytes=self.rng.choice((1, 1 << 20, 1 << 20)),
        )
        moody = Moody(service.number, self.rng, self.ran)
        moody.member = service.member
        host.services[service.member] = moody
        self.members.append((host, moody))

    def ask(self) -> None:
        caller = self.rng.choice(self.callers)
        for _ in range(self.rng.choice((1, 3, 20, 40))):
            payload = b"%d" % len(self.calls)
            size = self.rng.choice((0, 0, 0, 3000))
            result = caller.request(
                "db", payload + b"." * size, timeout_ms=self.rng.choice((1000, 1000, 50_000))
            )
            self.calls.append((payload + b"." * size, result))

    def push(self) -> None:
        caller = self.rng.choice(self.callers)
        for _ in range(self.rng.choice((1, 5, 30))):
            caller.push("db", b"push %d" % self.pushes)
            self.pushes += 1

    def answer(self) -> None:
        if not self.members:
            return
        _, service = self.rng.choice(self.members)
        if self.rng.random() < 0.5:
            self.rng.shuffle(service.kept)
        count = self.rng.randint(0, len(service.kept))
        now, service.kept = service.kept[:count], service.kept[count:]
        for delivery in now:
            if delivery.flow.kind == Kind.PUSH:
                delivery.finish(started=self.rng.random() < 0.9)
            elif self.rng.random() < 0.1:
                delivery.fault("no", may_have_run=True)
            else:
                delivery.reply(b"re " + delivery.message.payload, None, False)

    def lie(self) -> None:
        """Let a member answer a call that it did not get, or answer one twice."""
        if not self.members:
            return
        host, _ = self.rng.choice(self.members)
        alias = host.session.out.flow(Kind.REPLY, "db", host.key).alias
        if alias is not None and alias.number >= 0 and not host.peer.closed:
            hops = [(1 << 63) + self.rng.randrange(300) for _ in range(self.rng.randint(2, 6))]
            host.say(
                answer_run(
                    alias.number, bytes(12) + COUNT.pack(1) + bytes(8), hops, [b"?"] * len(hops)
                )
            )

    def mood(self) -> None:
        if self.members:
            self.rng.choice(self.members)[1].mood = self.rng.choice((0.0, 0.3, 1.0))

    def lose(self) -> None:
        if len(self.members) > 1:
            host, _ = self.members.pop(self.rng.randrange(len(self.members)))
            host.lose()

    def relink(self) -> None:
        number = self.rng.randrange(len(self.ends))
        self.net.cut(self.ends[number])
        self.ends[number] = self.net.link(*self.pairs[number])

    def tight(self) -> None:
        host = self.rng.choice([*self.callers, *(host for host, _ in self.members)])
        host.port.room = self.rng.choice((None, 0, 3, 30))

    def step(self) -> None:
        actions = (
            [self.ask] * 6
            + [self.answer] * 6
            + [self.push] * 2
            + [self.mood] * 2
            + [self.tight] * 2
        )
        actions += [self.lose, self.come, self.relink, self.lie]
        self.rng.choice(actions)()
        if self.rng.random() < 0.7:
            self.net.run()
        if self.rng.random() < 0.1:
            self.net.pass_time(self.rng.choice((0.2, 2.0)))

    def rest(self) -> None:
        """Let all hosts read and answer everything, and let time pass."""
        for host in self.net.hosts:
            host.port.room = None
            if not host.peer.closed:
                host.router.writable(host.peer)
        for _ in range(40):
            self.net.run()
            for _, service in self.members:
                service.mood = 0.0
                for delivery in service.kept:
                    if delivery.flow.kind == Kind.PUSH:
                        delivery.finish()
                    else:
                        delivery.reply(b"re " + delivery.message.payload, None, False)
                service.kept = []
        self.net.pass_time(60)


def play(seed: int) -> Counter[Kind]:
    """Run one life, check every promise, and return how many runs of each kind the hosts received."""
    life = Life(seed)
    seen: Counter[Kind] = Counter()

    def count(host: Host, frame: bytes) -> list[bytes]:
        if frame[KIND_AT] in (Kind.CALLS, Kind.ANSWERS) and not frame[FLAGS_AT]:
            seen[Kind(frame[KIND_AT])] += 1
        return [frame]

    life.net.tamper = count
    for _ in range(STEPS):
        life.step()
    life.rest()
    for payload, result in life.calls:
        assert result.done(), f"request {payload[:20]!r} of seed {seed} has no end"
        if result.error is None:
            assert result.message.payload == b"re " + payload
    assert max(life.ran.values()) == 1
    life.net.check()
    for router in life.net.routers:
        for neighbor in router.neighbors.values():
            for share in neighbor.shares.values():
                assert (share.held, share.whole.held) == (0, 0)
        loads = router.interest.loads("db", life.callers[0].key.key_id, Kind.REQUEST)
        assert [(load.messages, load.bytes) for load in loads] == [(0, 0)] * len(loads)
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_every_call_of_a_run_ends_once_and_runs_once_at_most(seed: int) -> None:
    play(seed)


def test_these_lives_have_runs_of_calls_and_of_answers() -> None:
    seen = sum((play(seed) for seed in range(30, 36)), Counter[Kind]())
    assert seen[Kind.CALLS] > 20
    assert seen[Kind.ANSWERS] > 5
