"""A random life of a network, drawn from a seed: members join, leave, stall and refuse, links flap, relays crash.

python -m support.sim SEED [STEPS]          # in tests/: replays a seed
python -m support.sim SEED [STEPS] sites    # as a federation of three sites
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from iris.core.credit import FIRST_WINDOW
from iris.wire.codec import KIND_AT, decode_control
from iris.wire.kinds import HERE, Cause, Kind, Refusal
from iris.wire.link_frames import Interest
from support.sim.members import ALL_KINDS, FOREVER_US, KEY, OTHER_KEY, SimMember, SimSession
from support.sim.network import SimNetwork, SimRelay, Violation
from support.sim.waiting import SimSink, left_out

SITES: Final = ("ams", "ber", "cph")
CLUSTERS: Final = ("db", "web", "mail")
TOPICS: Final = ("a.b", "a.c", "a.b.c", "x.y")
FILTERS: Final = ("a.*", "a.>", "a.b", "x.y", ">", "*.y")
GROUPS: Final = ("", "", "workers", "loggers")
ROUND_STEPS: Final = 120
"""Steps between two rests, in which all faults end and everything is checked."""
MAX_SESSIONS: Final = 4
BY_DESIGN: Final = {
    "AliasTable._free": "and their numbers",
    "Seen._last": "where members were, for some minutes",
    "Neighbor.routes": "what a link declared stands until it is declared anew",
    "Link.routes": "the same",
    "Wan.routes": "the same",
    "Link.demands": "kept while an address may be asked for again, and swept",
    "Accounts.dropped": "one counter for each cause",
    "Heartbeat.samples": "16 samples of the other clock",
    "Heartbeat.offsets": "the same, for the offset of its wall clock",
    "SlowReceivers._slow": "256 receivers, kept for operators after they left",
    "Slow.topics": "64 addresses of each",
    "OtherKeys._remembered": "64 topics, forgotten when the next status report finds that they are unused",
    "MissedCasts._disconnected": "1,024 relays and sites, which may come back for an hour",
    "MissedCasts._sent": "4,096 casts that were sent since one of these left",
    "MissedCasts._users": "whose they are",
}
"""Bounded tables, which need not be empty when all sessions have left."""
PASSED_ON: Final = {
    "AliasTable._by_key": "of what a gateway passed on: they go with the alias that a link or WAN connection declared",
    "AliasTable._by_number": "the same, the other way round",
    **dict.fromkeys(
        ("Link.shares", "Link.users", "Wan.shares", "Wan.users"),
        "of the links and WAN connections that something was passed on for: they go with these",
    ),
}
"""More of them in a federation."""


class Chaos:
    """Takes random steps in a network of 5 to 8 relays, or (`sites`) in three sites of 2 or 3 relays each."""

    def __init__(self, seed: int, *, relays: int = 0, sites: bool = False) -> None:
        self.rng = random.Random(f"chaos {seed}")
        self.waits_rng = random.Random(f"waits {seed}")
        """Random choices about publishers that wait; separate, so that the rest of a life does not depend on them."""
        self.calls_rng = random.Random(f"calls {seed}")
        """The same about calls to one member, and callers that leave."""
        shape: dict[str, Any] = {}
        if sites:
            shape["sites"] = {site: self.rng.randint(2, 3) for site in SITES}
            shape["pairs"] = self.rng.random() < 0.5
            shape["gateways"] = self.rng.choice((1, 2, 2))
        self.net = SimNetwork(
            seed, relays=relays or self.rng.randint(5, 8), port_bytes=self.rng.choice((8 << 10, 64 << 10, 1 << 20)),
            settle_us=self.rng.choice((0, 500_000)), **shape,
        )  # fmt: skip
        if sites:
            self.net.run(1.0)
        self.reach_s = 0.4 if sites else 0.1
        """Time within which any message arrives anywhere in a network without faults."""
        self.fresh = self.net.table_sizes()
        """Table sizes of relays with links and without sessions."""
        self.did: dict[str, int] = {}
        self.did_waiting: dict[str, int] = {}
        """Actions with publishers that wait, which happen besides the steps."""
        self.did_calls: dict[str, int] = {}
        """Calls to one member, and callers that left, besides the steps."""
        self._former: list[SimMember] = []
        """Members that were called alone, some of which have left meanwhile."""
        self.rounds = 0
        self.garbled = 0
        self.recoveries = 0
        """How often a subscription that was left out was served again."""
        self._left_out: dict[int, Any] = {}
        everyday: list[tuple[int, Callable[[], None]]] = [
            (9, self.attach), (7, self.serve), (7, self.subscribe), (3, self.leave), (3, self.unsubscribe), (2, self.watch),
            (30, self.request), (25, self.run_of_calls), (14, self.push), (8, self.survey), (22, self.publish), (12, self.broadcast),
            (5, self.open_tunnel), (10, self.use_tunnel), (2, self.close_tunnel), (5, self.change_mood), (2, self.flood),
        ]  # fmt: skip
        faults: list[tuple[int, Callable[[], None]]] = [
            (3, self.bye), (3, self.die), (3, self.stall), (4, self.wake),
            (5, self.cut), (2, self.garble), (3, self.stop), (5, self.heal), (3, self.crash), (2, self.retire), (5, self.come_back), (2, self.freeze), (4, self.thaw),
        ]  # fmt: skip
        self._waiting: list[tuple[int, Callable[[], None]]] = [
            (12, self.publish_waiting), (4, self.pause), (5, self.resume), (3, self.mute),
        ]  # fmt: skip
        self._calls: list[tuple[int, Callable[[], None]]] = [
            (6, self.request_member), (4, self.run_to_member), (2, self.push_to_member), (2, self.tunnel_to_member),
            (10, self.leave_calls), (3, self.ask_and_leave),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in everyday + faults]
        self._actions = [action for _, action in everyday + faults]

    # -- who ---------------------------------------------------------------------------------------------------

    def some_relay(self, *, alive: bool = True) -> SimRelay | None:
        relays = [relay for relay in self.net.relays if relay.alive is alive]
        return self.rng.choice(relays) if relays else None

    def some_session(self) -> SimSession | None:
        sessions = [session for session in self.net.sessions if not session.leaving]
        return self.rng.choice(sessions) if sessions else None

    def some_member(self) -> SimMember | None:
        members = [m for s in self.net.sessions if not s.leaving for m in s.members.values()]
        return self.rng.choice(members) if members else None

    def some_scope(self) -> str:
        """Return the sites of a call or cast: mostly all."""
        if not self.net.federated or self.rng.random() < 0.8:
            return ""
        return self.rng.choice((HERE, *SITES))

    def some_key(self) -> bytes:
        return self.rng.choice((KEY, KEY, OTHER_KEY))

    # -- everyday ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        relay = self.some_relay()
        if relay is not None and len(relay.sessions) < MAX_SESSIONS:
            self._attach(relay)

    def _attach(self, relay: SimRelay) -> None:
        singly = self.rng.random() < 0.3
        session = relay.session(f"s{self.net.ledger.new_tag()}", singly=singly)
        for _ in range(self.rng.randint(0, 2)):
            self._serve(session)
        for _ in range(self.rng.randint(0, 2)):
            self._subscribe(session)

    def serve(self) -> None:
        if (session := self.some_session()) is not None and len(session.members) < 4:
            self._serve(session)

    def _serve(self, session: SimSession) -> None:
        rng = self.rng
        kinds = ALL_KINDS if rng.random() < 0.7 else tuple(rng.sample(ALL_KINDS, rng.randint(1, 3)))
        member = session.serve(
            rng.choice(CLUSTERS), key=self.some_key(), kinds=kinds, concurrency=rng.choice((1, 4, 16)),
            limit_bytes=rng.choice((300, 4096, 1 << 20)),
            cancel=self.calls_rng.random() < 0.6,
        )  # fmt: skip
        self._mood(member)

    def _mood(self, member: SimMember) -> None:
        rng = self.rng
        member.service_us = rng.choice((0, 100, 1_000, 20_000, 300_000))
        if rng.random() < 0.1:
            member.service_us = FOREVER_US
        member.refuse = rng.choice(list(Refusal)) if rng.random() < 0.15 else None
        member.faults = rng.random() < 0.1

    def change_mood(self) -> None:
        if (member := self.some_member()) is not None and not member.leaving:
            member.finish_all()
            self._mood(member)

    def subscribe(self) -> None:
        if (session := self.some_session()) is not None and len(session.subscriptions) < 5:
            self._subscribe(session)

    def _subscribe(self, session: SimSession) -> None:
        pattern, group, key = self.rng.choice(FILTERS), self.rng.choice(GROUPS), self.some_key()
        if not any((pattern, group) == subscription[:2] for subscription in session.subscriptions):
            if self.waits_rng.random() < 0.5:
                pace_us = self.waits_rng.choice((0, 200, 5_000, 50_000))
                session.subscribe_waiting(pattern, group=group, key=key, pace_us=pace_us)
            else:
                session.subscribe(pattern, group=group, key=key)

    def leave(self) -> None:
        member = self.some_member()
        if member is not None and not member.leaving:
            member.session.leave(member)

    def unsubscribe(self) -> None:
        session = self.some_session()
        if session is not None and session.subscriptions:
            session.unsubscribe(*self.rng.choice(list(session.subscriptions)))

    def watch(self) -> None:
        if (session := self.some_session()) is not None and len(session.watches) < 2:
            session.watch(self.rng.choice(CLUSTERS), key=self.some_key())

    def request(self) -> None:
        if (session := self.some_session()) is not None:
            for _ in range(self.rng.choice((1, 1, 5))):
                timeout_ms = self.rng.choice((20, 500, 2_000, 6_000))
                size = self.rng.choice((64, 64, 2_000))
                session.request(
                    self.rng.choice(CLUSTERS), key=self.some_key(), timeout_ms=timeout_ms, size=size,
                    site=self.some_scope(),
                )  # fmt: skip

    def run_of_calls(self) -> None:
        session = self.some_session()
        if session is not None:
            kind = self.rng.choice((Kind.REQUEST, Kind.REQUEST, Kind.PUSH))
            timeout_ms = self.rng.choice((500, 2_000, 6_000))
            session.run(
                kind, self.rng.choice(CLUSTERS), self.rng.randint(1, 24), key=self.some_key(), timeout_ms=timeout_ms,
                site=self.some_scope(),
            )  # fmt: skip

    def push(self) -> None:
        if (session := self.some_session()) is not None:
            session.push(self.rng.choice(CLUSTERS), key=self.some_key(), site=self.some_scope())

    def survey(self) -> None:
        if (session := self.some_session()) is not None:
            session.survey(
                self.rng.choice(CLUSTERS),
                key=self.some_key(),
                timeout_ms=self.rng.choice((200, 4_000)),
                site=self.some_scope(),
            )

    def publish(self) -> None:
        if (session := self.some_session()) is not None:
            for _ in range(self.rng.choice((1, 3))):
                session.publish(
                    self.rng.choice(TOPICS), self.rng.randint(1, 4), key=self.some_key()
                )

    def flood(self) -> None:
        """Publish more than a small queue holds."""
        if (session := self.some_session()) is not None:
            topic, key = self.rng.choice(TOPICS), self.some_key()
            for _ in range(self.rng.randint(10, 60)):
                session.publish(topic, key=key, size=2_000)

    def broadcast(self) -> None:
        if (session := self.some_session()) is not None:
            session.broadcast(
                self.rng.choice(CLUSTERS), self.rng.randint(1, 3), key=self.some_key()
            )

    def open_tunnel(self) -> None:
        if (session := self.some_session()) is not None and len(session.tunnels) < 4:
            session.open_tunnel(
                self.rng.choice(CLUSTERS), key=self.some_key(), site=self.some_scope()
            )

    def use_tunnel(self) -> None:
        session = self.some_session()
        if session is not None and session.tunnels:
            self.rng.choice(list(session.tunnels.values())).send(self.rng.choice((1, 10, 100)))

    def close_tunnel(self) -> None:
        session = self.some_session()
        if session is not None and session.tunnels:
            self.rng.choice(list(session.tunnels.values())).close(
                self.rng.choice((Cause.CLOSED, Cause.BROKEN))
            )

    # -- calls to one member, and callers that leave -----------------------------------------------------------

    def _some_caller(self) -> SimSession | None:
        sessions = [s for s in self.net.sessions if not s.leaving]
        return self.calls_rng.choice(sessions) if sessions else None

    def _some_target(self) -> SimMember | None:
        """Return a member of any relay, or one that may have left."""
        rng = self.calls_rng
        if self._former and rng.random() < 0.15:
            return rng.choice(self._former)
        members = [m for s in self.net.sessions for m in s.members.values()]
        if not members:
            return None
        member = rng.choice(members)
        self._former = [*self._former[-7:], member]
        return member

    def request_member(self) -> None:
        self._call_member(Kind.REQUEST)

    def push_to_member(self) -> None:
        self._call_member(Kind.PUSH)

    def _call_member(self, kind: Kind) -> None:
        session, member = self._some_caller(), self._some_target()
        if session is not None and member is not None:
            timeout_ms = self.calls_rng.choice((20, 500, 2_000, 6_000))
            session.call(
                kind, member.name, key=member.key, timeout_ms=timeout_ms, member=member.member_id
            )

    def run_to_member(self) -> None:
        session, member = self._some_caller(), self._some_target()
        if session is not None and member is not None:
            rng = self.calls_rng
            session.run(
                rng.choice((Kind.REQUEST, Kind.PUSH)), member.name, rng.randint(1, 12), key=member.key,
                timeout_ms=rng.choice((500, 6_000)), member=member.member_id,
            )  # fmt: skip

    def tunnel_to_member(self) -> None:
        session, member = self._some_caller(), self._some_target()
        if session is not None and member is not None and len(session.tunnels) < 4:
            session.open_tunnel(member.name, key=member.key, member=member.member_id)

    def leave_calls(self) -> None:
        """Let a session leave some of its calls, wherever they are."""
        if (session := self._some_caller()) is not None:
            waiting = [
                call for call in session.calls.values()
                if not call.outcome and call.kind in (Kind.REQUEST, Kind.SURVEY)
            ]  # fmt: skip
            if waiting:
                session.cancel(
                    *self.calls_rng.sample(waiting, self.calls_rng.randint(1, len(waiting)))
                )

    def ask_and_leave(self) -> None:
        """Let a session call, and leave the calls before or while they run."""
        if (session := self._some_caller()) is not None:
            rng = self.calls_rng
            name, key = rng.choice(CLUSTERS), rng.choice((KEY, OTHER_KEY))
            calls = session.run(Kind.REQUEST, name, rng.randint(1, 8), key=key, timeout_ms=6_000)
            calls.append(session.survey(name, key=key, timeout_ms=4_000))
            self.net.clock.after(rng.choice((0, 500, 3_000, 200_000)), session.cancel, *calls)

    def _call_or_leave(self) -> None:
        weights, actions = zip(*self._calls, strict=True)
        if self.calls_rng.random() < 0.4:
            action = self.calls_rng.choices(actions, weights)[0]
            action()
            self.did_calls[action.__name__] = self.did_calls.get(action.__name__, 0) + 1
        for session in self.net.sessions:
            for member in (*session.members.values(), *session.former):
                self.net.ledger.check_cancelled(member)

    # -- waiting -----------------------------------------------------------------------------------------------

    def _some_waiting(self) -> SimSession | None:
        sessions = [s for s in self.net.sessions if not s.leaving]
        return self.waits_rng.choice(sessions) if sessions else None

    @property
    def sinks(self) -> list[SimSink]:
        """All subscriptions that publishers wait for."""
        return [sink for s in self.net.sessions for sink in s.waiting.sinks.values()]

    def publish_waiting(self) -> None:
        """Publish with waiting, mostly more than a first window."""
        rng = self.waits_rng
        session = self._some_waiting()
        if session is not None and session.waiting.queued < 100:
            topic, key = rng.choice(TOPICS), rng.choice((KEY, KEY, OTHER_KEY))
            size = rng.choice((64, 2_000, 9_000))
            for _ in range(rng.choice((1, 10, 40))):
                session.publish_waiting(topic, rng.randint(1, 4), key=key, size=size)

    def pause(self) -> None:
        """Let a subscription handle nothing for a while."""
        if sinks := self.sinks:
            self.waits_rng.choice(sinks).pause()

    def resume(self) -> None:
        if paused := [sink for sink in self.sinks if sink.paused]:
            self.waits_rng.choice(paused).resume()

    def mute(self) -> None:
        """Lose the next credit that a session grants."""
        if (session := self._some_waiting()) is not None and session.waiting.sinks:
            session.waiting.mute = 1

    def _look_who_is_left_out(self) -> None:
        now = {id(one): one for relay in self.net.relays for one in left_out(relay.router)}
        back = [one for key, one in self._left_out.items() if key not in now]
        self.recoveries += sum(not one.left_out and not one.neighbor.closed for one in back)
        self._left_out = now

    def _wait_or_let_wait(self) -> None:
        weights, actions = zip(*self._waiting, strict=True)
        if self.waits_rng.random() < 0.3:
            action = self.waits_rng.choices(actions, weights)[0]
            action()
            self.did_waiting[action.__name__] = self.did_waiting.get(action.__name__, 0) + 1
        for session in self.net.sessions:
            if not session.relay.frozen:
                for publisher in session.waiting.publishers.values():
                    publisher.check()
        self._look_who_is_left_out()

    # -- faults ------------------------------------------------------------------------------------------------

    def bye(self) -> None:
        if (session := self.some_session()) is not None:
            session.bye()

    def die(self) -> None:
        if (session := self.some_session()) is not None:
            session.die()

    def stall(self) -> None:
        if (session := self.some_session()) is not None:
            session.stall()

    def wake(self) -> None:
        stalled = [session for session in self.net.sessions if session.stalled]
        if stalled:
            self.rng.choice(stalled).wake()

    def _pair(self) -> tuple[int, int]:
        if self.net.federated:
            pair = self.rng.choice(list(self.net.wires))
            return self.rng.choice((pair, pair[::-1]))
        a, b = self.rng.sample(range(len(self.net.relays)), 2)
        return a, b

    def cut(self) -> None:
        self.net.cut(*self._pair())

    def garble(self) -> None:
        """Lose or repeat the next change of a relay's interest on its way to another relay."""
        relay, host = self._pair()
        twice = self.rng.random() < 0.5

        def swallow(at: SimRelay, from_host: int, frame: bytes) -> int:
            if (at.host, from_host) != (relay, host) or not is_change(frame):
                return 1
            self.net.note(f"{at} gets a change from {host} {'twice' if twice else 'not at all'}")
            self.net.copies_of_control = None
            self.garbled += 1
            return 2 if twice else 0

        self.net.copies_of_control = swallow

    def stop(self) -> None:
        self.net.stop(*self._pair())

    def heal(self) -> None:
        stopped = [pair for pair, wire in self.net.wires.items() if wire.stopped]
        if stopped:
            self.net.heal(*self.rng.choice(stopped))

    def crash(self) -> None:
        if (relay := self.some_relay()) is not None:
            relay.crash(silent=self.rng.random() < 0.5)

    def retire(self) -> None:
        if (relay := self.some_relay()) is not None:
            relay.retire(self.rng.choice((0, 50_000, 500_000)))

    def come_back(self) -> None:
        if (relay := self.some_relay(alive=False)) is not None:
            self.net.come_back(relay.host)

    def freeze(self) -> None:
        if (relay := self.some_relay()) is not None:
            relay.freeze()

    def thaw(self) -> None:
        if frozen := [relay for relay in self.net.relays if relay.alive and relay.frozen]:
            self.rng.choice(frozen).thaw()

    @property
    def resyncs(self) -> int:
        """How often the running relays asked for a snapshot again."""
        routers = [relay.router for relay in self.net.relays]
        return sum(router.peer_interest.resyncs + router.federation.resyncs for router in routers)

    # -- a life ------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Run `steps` steps. Check everything after each `ROUND_STEPS`, and at the end, when all have left."""
        try:
            self._run(steps)
        except Violation:
            raise
        except Exception as err:  # any error must show the seed
            raise self.net.violation(f"{type(err).__name__}: {err}") from err

    def _run(self, steps: int) -> None:
        for relay in self.net.relays:
            self._attach(relay)
        for step in range(1, steps + 1):
            action = self.rng.choices(self._actions, self._weights)[0]
            action()
            self.did[action.__name__] = self.did.get(action.__name__, 0) + 1
            often = self.rng.random() < 0.97
            self.net.run(self.rng.expovariate(20) if often else self.rng.uniform(0.5, 5))
            self._wait_or_let_wait()
            self._call_or_leave()
            if step % ROUND_STEPS == 0 or step == steps:
                self.rest()
        self.all_leave()

    def rest(self) -> None:
        """End all faults, let the network settle, and check all promises."""
        self.rounds += 1
        for sink in self.sinks:
            sink.pace_us = min(sink.pace_us, 200)
            sink.resume()
        for session in self.net.sessions:
            session.waiting.mute = 0
        self.net.calm()
        self._look_who_is_left_out()
        for member in [m for s in self.net.sessions for m in (*s.members.values(), *s.former)]:
            member.service_us = 500
            member.finish_all()
            member.faults = False
            if not member.leaving:
                member.refuse = None
        self.net.run(1.0)
        self.net.check_converged()
        self.net.check_idle_but_tunnels()
        self.net.ledger.audit()
        self.probe()
        self.net.ledger.audit()
        self.net.ledger.forget()

    def probe(self) -> None:
        """Check that publications, broadcasts, surveys and requests arrive everywhere in a network without faults."""
        net, rng = self.net, self.rng
        for host in rng.sample(range(len(net.relays)), 2):
            caller = net.relays[host].session("probe")
            net.run(0.1)
            for topic in TOPICS:
                before = {session.uid: len(session.casts) for session in net.sessions}
                tag = caller.publish(topic)
                net.run(self.reach_s)
                for session in net.sessions:
                    got = session.casts[before[session.uid] :].count(tag)
                    wants = session.wants(topic, KEY)
                    if not wants <= got <= max(wants, session.wants_in_group(topic, KEY)):
                        net.violate(
                            f"at peace, {session} got publication {tag} to {topic!r} {got} times, not {wants}"
                        )
                groups = {
                    group for s in net.sessions for pattern, group, key in s.subscriptions
                    if group and key == KEY and s.matches(pattern, topic)
                }  # fmt: skip
                if net.ledger.groups_reached(tag) != groups:
                    net.violate(
                        f"at peace, publication {tag} reached {net.ledger.groups_reached(tag)}, not {groups}"
                    )
            for name in CLUSTERS:
                self._probe_cluster(caller, name)
            caller.bye()
            net.run(0.1)
        self.probe_waiting(net.relays[rng.randrange(len(net.relays))])

    def probe_waiting(self, relay: SimRelay) -> None:
        """Check that, without faults, a waiting publisher never stalls, and that its subscriptions get everything."""
        net = self.net
        publisher = relay.session("waiting")
        net.run(0.1)
        before = {session.uid: len(session.casts) for session in net.sessions}
        stalls = net.ledger.stalls
        for topic in TOPICS:
            for _ in range(40):
                flow = publisher.publish_waiting(topic, size=4_000)
            for _ in range(3):
                net.run(self.reach_s)
                if not flow.queue:
                    break
            roomy = net.port_bytes > 4 * FIRST_WINDOW  # otherwise its own queues make it wait
            if flow.queue or (roomy and net.ledger.stalls > stalls):
                net.violate(f"at peace, {publisher} still has {len(flow.queue)} for {topic!r}")
            net.run(2 * self.reach_s)
            for session in net.sessions:
                wants = any(
                    key == KEY and not group and session.matches(pattern, topic)
                    for pattern, group, key in session.waiting.sinks
                )
                got = set(session.casts[before[session.uid] :])
                near = session.relay.site == relay.site
                if wants and near and roomy and (missing := set(flow.sent) - got):
                    net.violate(
                        f"at peace, {session} misses {len(missing)} of {topic!r}, and waits"
                    )
        publisher.bye()
        net.run(0.1)

    def _probe_cluster(self, caller: SimSession, name: str) -> None:
        net = self.net
        members = [
            m for s in net.sessions for m in s.members.values() if m.name == name and m.key == KEY
        ]
        tag = caller.broadcast(name)
        survey = caller.survey(name)
        net.run(3 * self.reach_s)
        calls = []
        for _ in range(3):  # one by one, as a small member cannot hold two
            calls.append(caller.request(name))
            net.run(self.reach_s)
        for member in members:
            if (tag in member.casts) is not (Kind.BROADCAST in member.kinds):
                net.violate(f"at peace, {member.member_id} missed broadcast {tag} to {name!r}")
        asked = {member.member_id for member in members if Kind.SURVEY in member.kinds}
        if (
            set(survey.answers) != asked
            or survey.lost
            or survey.outcome != ("done" if asked else "no_members")
        ):
            net.violate(
                f"at peace, {survey} ended as {survey.outcome!r}: answers of {sorted(survey.answers)}, "
                f"members {sorted(asked)}, lost {survey.lost}"
            )
        serving = [member for member in members if Kind.REQUEST in member.kinds]
        served = bool(serving)
        home = {m.member_id for m in serving if m.session.relay.site == caller.relay.site}
        for call in calls:
            if home and call.by not in home:
                net.violate(f"at peace, {call} was answered by {call.by}, and not at home")
            if call.outcome != ("reply" if served else "no_members"):
                net.violate(f"at peace, {call} ended as {call.outcome!r}: {call.detail}")

    def all_leave(self) -> None:
        """End all sessions, and check that every relay's tables are as in a relay that never had sessions."""
        for session in self.net.sessions:
            session.bye()
        self.net.calm()
        self.net.check_converged()
        self.net.check_idle()
        for relay, sizes in zip(self.net.relays, self.net.table_sizes(), strict=True):
            for table, size in sorted(sizes.items()):
                if self.net.federated and table in PASSED_ON:
                    continue
                if size > self.fresh[relay.host].get(table, 0) and table not in BY_DESIGN:
                    was = self.fresh[relay.host].get(table, 0)
                    self.net.violate(
                        f"{relay}: {table} has {size} entries after everybody left, {was} before"
                    )


def is_change(frame: bytes) -> bool:
    """Return whether a frame is a change of interest. (A snapshot is lost only together with its link.)"""
    if frame[KIND_AT] != Kind.INTEREST:
        return False
    change = decode_control(memoryview(frame), 0, len(frame))
    return isinstance(change, Interest) and not change.reset and bool(change.base)


def play(seed: int, steps: int, *, sites: bool = False) -> Chaos:
    """Run one life and return it. Raises Violation when a promise is broken."""
    chaos = Chaos(seed, sites=sites)
    chaos.run(steps)
    return chaos
