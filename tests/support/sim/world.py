"""A large federation: many sites in full mesh, sessions with subscriptions, and gateways that are killed, frozen and
cut.

The cost of a life grows with the square of the sites: every change of a site is advertised to the gateways of all
others, and by them to their relays. So a large federation has little traffic, and is checked at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from support.sim.members import SimMember, SimSession
from support.sim.network import SimNetwork, SimRelay, Violation

CLUSTERS: Final = ("db", "web", "mail", "logs")
TOPICS: Final = ("a.b", "a.c", "x.y")
FILTERS: Final = ("a.*", "a.b", "x.y", "*.y")
GROUPS: Final = ("", "", "workers")
STEP_S: Final = 0.1
REACH_S: Final = 0.5
"""Time within which any message arrives anywhere in a federation without faults."""
WORLD_SETTLE_S: Final = 5.0
"""Silence is noticed within 3 s, and then all relays connect again within moments."""
TROUBLED: Final = 5
PROBES: Final = 5
"""Number of relays that send messages of all kinds in the final check."""


class World:
    """A federation of `sites` sites with `relays` relays each, two of them gateways."""

    def __init__(self, seed: int, *, sites: int = 50, relays: int = 20) -> None:
        self.rng = random.Random(f"world {seed}")
        hosts = {f"s{number:02}": relays for number in range(sites)}
        self.net = SimNetwork(seed, sites=hosts, pairs=True, warm_s=0)
        self.troubled = self.rng.sample(list(hosts), min(TROUBLED, sites))
        """Sites with faults, from which half of the traffic comes."""
        self.did: Counter[str] = Counter()
        self.stopped: list[tuple[int, int]] = []
        for site in self.net.hosts:
            for _ in range(2):
                self.attach(site)
        self.net.run(2.0)
        self.net.check_converged()

    def attach(self, site: str = "") -> None:
        """Attach a session that serves a cluster and subscribes."""
        rng, net = self.rng, self.net
        host = rng.choice(net.hosts[site or rng.choice(list(net.hosts))])
        if not net.relays[host].alive:
            return
        session = net.relays[host].session(f"s{net.ledger.new_tag()}")
        session.serve(rng.choice(CLUSTERS), concurrency=rng.choice((1, 8)))
        session.subscribe(rng.choice(FILTERS), group=rng.choice(GROUPS))

    def depart(self) -> None:
        """End a session, with or without a goodbye."""
        session = self.some_session()
        self.rng.choice((session.bye, session.die))()

    def some_session(self) -> SimSession:
        there = [session for session in self.net.sessions if not session.leaving]
        near = [session for session in there if session.relay.site in self.troubled]
        return self.rng.choice(near if near and self.rng.random() < 0.5 else there)

    def some_gateway(self) -> SimRelay:
        gateways = [host for site in self.troubled for host in self.net.gateways[site]]
        return self.net.relays[self.rng.choice(gateways)]

    # -- faults ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Cut a WAN connection, or a link of a gateway."""
        gateway = self.some_gateway()
        self.net.cut(gateway.host, self.rng.choice(self.net.wired(gateway.host)))

    def stop(self) -> None:
        """Stop a WAN connection without closing it."""
        gateway = self.some_gateway()
        far = [p for p in self.net.wired(gateway.host) if self.net.site_of(p) != gateway.site]
        self._stop((gateway.host, self.rng.choice(far)))

    def _stop(self, pair: tuple[int, int]) -> None:
        self.net.stop(*pair)
        self.stopped.append(pair)

    def isolate(self) -> None:
        """Stop all WAN connections of a site without closing them."""
        gateway = self.some_gateway()
        for host in self.net.gateways[gateway.site]:
            for other in self.net.wired(host):
                if self.net.site_of(other) != gateway.site:
                    self._stop((host, other))

    def heal(self) -> None:
        for pair in self.stopped:
            self.net.heal(*pair)
        self.stopped.clear()

    def crash(self) -> None:
        self.some_gateway().crash(silent=self.rng.random() < 0.5)

    def come_back(self) -> None:
        for relay in list(self.net.relays):
            if not relay.alive:
                self.net.come_back(relay.host)

    def freeze(self) -> None:
        gateway = self.some_gateway()
        if gateway.alive:
            gateway.freeze()

    def thaw(self) -> None:
        for relay in self.net.relays:
            relay.thaw()

    def retire(self) -> None:
        gateway = self.some_gateway()
        if not gateway.frozen:
            gateway.retire(500_000)

    # -- a life ------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Run `steps` steps of `STEP_S`, then rest and check everything. Raises Violation when a promise is broken."""
        try:
            self._run(steps)
        except Violation:
            raise
        except Exception as err:  # any error must show the seed
            raise self.net.violation(f"{type(err).__name__}: {err}") from err

    def _run(self, steps: int) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (3, self.attach), (2, self.depart), (3, self.cut), (2, self.stop), (1, self.isolate), (2, self.heal),
            (2, self.crash), (2, self.come_back), (2, self.freeze), (2, self.thaw), (1, self.retire),
        ]  # fmt: skip
        weights = [weight for weight, _ in actions]
        for _ in range(steps):
            if self.rng.random() < 0.5:
                _, action = self.rng.choices(actions, weights)[0]
                action()
                self.did[action.__name__] += 1
            self.traffic()
            self.net.run(STEP_S)
        self.heal()
        self.net.calm(WORLD_SETTLE_S)
        self.net.check_converged()
        self.net.check_idle()
        self.net.ledger.audit()
        self.probe()
        self.net.check_idle()

    def traffic(self) -> None:
        rng = self.rng
        for _ in range(4):
            self.some_session().publish(rng.choice(TOPICS), rng.randint(1, 4))
            self.some_session().request(rng.choice(CLUSTERS), timeout_ms=3_000)
        self.some_session().broadcast(rng.choice(CLUSTERS))
        self.some_session().push(rng.choice(CLUSTERS))
        if rng.random() < 0.2:
            self.some_session().survey(rng.choice(CLUSTERS), timeout_ms=4_000)
        tunnel = self.some_session().open_tunnel(rng.choice(CLUSTERS))
        self.net.clock.after(700_000, tunnel.send, 5)
        self.net.clock.after(1_500_000, tunnel.close)

    def probe(self) -> None:
        """Check that messages of all kinds, from relays of several sites at once, arrive everywhere."""
        net, rng = self.net, self.rng
        callers = [
            net.relays[host].session("probe") for host in rng.sample(range(len(net.relays)), PROBES)
        ]
        net.run(0.2)
        there = net.sessions
        members = [member for session in there for member in session.members.values()]
        tags = [(topic, caller.publish(topic)) for caller in callers for topic in TOPICS]
        casts = [(name, caller.broadcast(name)) for caller in callers for name in CLUSTERS]
        surveys = [caller.survey(name) for caller in callers for name in CLUSTERS]
        net.run(2 * REACH_S)
        calls = [caller.request(name, timeout_ms=2_000) for caller in callers for name in CLUSTERS]
        net.run(2 * REACH_S)
        for topic, tag in tags:
            for session in there:
                got, wants = session.casts.count(tag), session.wants(topic, session.keys[0])
                most = max(wants, session.wants_in_group(topic, session.keys[0]))
                if not wants <= got <= most:
                    net.violate(f"at peace, {session} got publication {tag} {got} times, not {wants}")  # fmt: skip
            groups = {
                group for session in there for pattern, group, _ in session.subscriptions
                if group and session.matches(pattern, topic)
            }  # fmt: skip
            if net.ledger.groups_reached(tag) != groups:
                net.violate(f"at peace, publication {tag} reached {net.ledger.groups_reached(tag)}")
        for name, tag in casts:
            for member in members:
                if (tag in member.casts) is not (member.name == name):
                    net.violate(f"at peace, {member.member_id} missed broadcast {tag}, or got it")
        for survey in surveys:
            asked = {member.member_id for member in members if member.name == survey.name}
            if set(survey.answers) != asked or survey.lost:
                net.violate(f"at peace, {survey} had {len(survey.answers)} of {len(asked)} answers, lost {survey.lost}")  # fmt: skip
        for call in calls:
            self._check_call(call.by, call.session, [m for m in members if m.name == call.name])
        for caller in callers:
            caller.bye()
        net.run(0.1)

    def _check_call(self, by: str, caller: SimSession, members: list[SimMember]) -> None:
        home = {m.member_id for m in members if m.session.relay.site == caller.relay.site}
        if by not in (home or {member.member_id for member in members} or {""}):
            self.net.violate(f"at peace, a request of {caller} was answered by {by or 'nobody'}")

    def counted(self) -> Counter[str]:
        """Return the counts of events."""
        ledger, clock = self.net.ledger, self.net.clock
        figures = Counter(ledger.outcomes)
        figures.update({f"did {name}": number for name, number in self.did.items()})
        figures.update(
            {
                "events": clock.events,
                "virtual ms": self.net.now_us // 1000,
                "copies": ledger.cast_copies,
                "audited": ledger.audited,
                "reported": ledger.reported_lost,
                "late": ledger.late,
                "over links": ledger.loops_checked,
                "over the WAN": ledger.over_wan,
                "casts over the WAN": sum(ledger.wan_casts.values()),
                "connections": sum(wire.wan for wire in self.net.wires.values()),
                "links": sum(not wire.wan for wire in self.net.wires.values()),
            }
        )
        return figures
