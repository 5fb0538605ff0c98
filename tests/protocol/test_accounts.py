"""All counts for sessions, users and keys over thousands of random steps: in whatever way an entry ends, its count is
reduced.

Sessions of several users at three relays in two sites join, watch, subscribe, call, answer, refuse, credit, open
tunnels, leave and disconnect; links and WAN connections are cut and return; ports are full; relays drain; time passes.
After each step the counts must equal the existing entries, and in the end they must be 0.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from protocol.kit import KEY, LinkEnd
from protocol.test_quotas import Party
from protocol.test_sites import Sites, WanEnd

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import END, FLAGS_AT, HOP, decode_control, encode_control, tunnel_frame
from iris.wire.frames import Serving
from iris.wire.kinds import FLAG_REFUSED, TUNNEL_KINDS, Cause, Kind, Refusal
from relay.core import calls as calls_module
from relay.core import overdue as overdue_module
from relay.core.neighbor import Neighbor, Survey
from relay.core.router import Router

KEY_ID = KEY.key_id
CALLS = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN)
ANSWERS = {Kind.REQUEST: (Kind.REPLY, Kind.FAULT), Kind.SURVEY: (Kind.ANSWER, Kind.FAULT)}
NAMES = ("db", "web")
SITES = ("", "ams", "ber", "nowhere")
LIFE_US = 20_000_000
PENDING = 6


class Actor(Party):
    """A session that does anything that the protocol allows, and sometimes what it forbids."""

    def __init__(self, router: Router, user: str, rng: random.Random) -> None:
        super().__init__(router, user)
        self.rng = rng
        self.hop = 0
        self.aliases: dict[tuple[int, str, str], int] = {}
        self.tasks: list[bytes] = []
        """Calls in flight at this member."""
        self.tunnels: list[int] = []
        self.names: dict[int, tuple[int, str, int]] = {}
        """The relay's aliases: alias -> (kind, name, member)."""
        self.ended = False

    def tell(self, body: frames.Control | bytes) -> None:
        """Send a frame. If it breaks a rule, end the session, as the daemon does."""
        if self.session.closed:
            self.ended = True
        if self.ended:
            return
        try:
            self.say(body)
        except PeerProtocolError:
            self.lose()

    def lose(self) -> None:
        self.router.session_down(self.session)
        self.ended = True

    def alias(self, kind: int, name: str, site: str = "") -> int:
        address = (kind, name, site)
        number = self.aliases.get(address)
        if number is None:
            number = self.aliases[address] = len(self.aliases)
            self.tell(frames.Declare(number, kind, name, KEY_ID, bytes(16), site=site))
        return number

    def listen(self) -> None:
        """Handle all received frames."""
        while self.port.out:
            frame = self.port.out.popleft()
            kind = frame[4]
            if kind < 0x40:
                body = decode_control(memoryview(frame), 0, len(frame))
                if isinstance(body, frames.Declare):
                    self.names[body.alias] = (body.kind, body.name, body.member)
            elif kind in CALLS:
                self.tasks.append(frame)
            elif kind in TUNNEL_KINDS and kind != Kind.TUNNEL_END:
                self.tunnels.append(HOP.unpack_from(frame)[4])

    # -- steps ----------------------------------------------------------------------------------------------------

    def ask_for(self, build: Callable[[int], frames.Control]) -> None:
        self.number += 1
        self.tell(build(self.number))

    def joins(self) -> None:
        served = self.rng.sample(CALLS, self.rng.randint(1, 4))
        kinds: dict[int, Serving] = {k: Serving(self.rng.choice((1, 8)), 4096) for k in served}
        name = self.rng.choice(NAMES)
        self.ask_for(lambda number: frames.Join(number, name, self.keys * 2, kinds))

    def leaves(self) -> None:
        if self.session.members:
            serial = self.rng.choice(list(self.session.members))
            self.ask_for(lambda number: frames.Leave(number, serial))

    def subscribes(self) -> None:
        pattern, group = self.rng.choice(("t", "t.u", "t.*", ">")), self.rng.choice(("", "g", "h"))
        whether = frames.Subscribe if self.rng.random() < 0.6 else None
        if whether:
            self.ask_for(lambda number: frames.Subscribe(number, pattern, self.keys, group))
        else:
            self.ask_for(lambda number: frames.Unsubscribe(number, pattern, group))

    def watches(self) -> None:
        name = self.rng.choice(NAMES)
        if self.session.watches and self.rng.random() < 0.4:
            self.tell(frames.Unwatch(self.rng.choice(list(self.session.watches))))
        else:
            self.ask_for(lambda number: frames.Members(number, name, self.keys, True))

    def calls(self) -> None:
        kind, name = self.rng.choice(CALLS), self.rng.choice(NAMES)
        alias = self.alias(kind, name, self.rng.choice(SITES))
        self.hop += 1
        hop = self.hop if self.rng.random() < 0.8 else max(1, self.hop - self.rng.randint(1, 3))
        wait_us = self.rng.choice((0, 1_000, 300_000, 4_000_000, 30_000_000))
        deadline_us = self.router.now_us + wait_us if wait_us else 0
        body = END.pack(0, 0, 1, 0) + bytes(self.rng.choice((16, 900)))
        self.tell(HOP.pack(22 + len(body), kind, 0, alias, hop, deadline_us) + body)
        if kind == Kind.TUNNEL_OPEN:
            self.tunnels.append(hop)

    def answers(self) -> None:
        """End a call in flight in one of all possible ways."""
        self.listen()
        if not self.tasks:
            return
        frame = self.tasks.pop(self.rng.randrange(len(self.tasks)))
        _, kind, _, alias, hop, _ = HOP.unpack_from(frame)
        _, name, member = self.names.get(alias, (0, "db", 0))
        how = self.rng.choice(("answer", "answer", "refuse", "twice", "ignore", "foul"))
        if how in ("refuse", "twice"):
            back = bytearray(frame)
            reason = self.rng.choice((Refusal.FULL, Refusal.FULL, Refusal.LEAVING, *Refusal))
            back[FLAGS_AT] = FLAG_REFUSED | reason << 4
            for _ in range(1 + (how == "twice")):
                self.tell(bytes(back))
        elif how == "foul" and self.rng.random() < 0.1:
            self.tell(
                HOP.pack(22 + 24, Kind.REPLY, 0, self.alias(Kind.REPLY, "other"), hop, 0)
                + bytes(24)
            )
        elif how != "answer":
            return
        elif kind == Kind.PUSH:
            unstarted = [hop] if self.rng.random() < 0.3 else []
            self.tell(frames.Credit(member, Kind.PUSH, [hop], unstarted))
        elif kind == Kind.TUNNEL_OPEN:
            if self.rng.random() < 0.6:
                self.tell(tunnel_frame(Kind.TUNNEL_ACCEPT, hop, bytes(32)))
            self.tunnels.append(hop)
        else:
            answer = self.rng.choice(ANSWERS[Kind(kind)])
            self.tell(HOP.pack(22 + 40, answer, 0, self.alias(answer, name), hop, 0) + bytes(40))

    def tunnels_on(self) -> None:
        if self.tunnels:
            hop = self.rng.choice(self.tunnels)
            if self.rng.random() < 0.5:
                self.tell(tunnel_frame(Kind.TUNNEL_DATA, hop, bytes(50)))
            else:
                self.tunnels.remove(hop)
                self.tell(tunnel_frame(Kind.TUNNEL_END, hop, bytes((Cause.BROKEN,))))

    def goes(self) -> None:
        if self.rng.random() < 0.5:
            self.tell(frames.Bye())
        self.lose()

    def fills(self) -> None:
        """Let the port refuse messages, or accept them again."""
        if self.port.room is None:
            self.port.room = 0
        else:
            self.port.room = None
            self.router.writable(self.session)


class World:
    """Three relays in two sites, and the present sessions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.net = Sites("ams", "ams", "ber")
        self.actors: list[Actor] = []
        for router in self.net.routers:
            router.limits.pending = PENDING
            for table in self.tables(router).values():
                table.limit = 16
            router.quotas.parked.limit = 1_600
        first, second = [end for end in self.net.ends if isinstance(end, LinkEnd)][:2]
        self.link: tuple[LinkEnd, LinkEnd] | None = (first, second)
        self.wan: tuple[WanEnd, WanEnd] | None = self.net.connect(0, 2)

    @staticmethod
    def tables(router: Router) -> dict[str, Any]:
        quotas = router.quotas
        return {"members": quotas.members, "subscriptions": quotas.subscriptions, "watches": quotas.watches, "parked": quotas.parked}  # fmt: skip

    def step(self) -> None:
        rng, net = self.rng, self.net
        self.actors = [actor for actor in self.actors if not actor.ended]
        roll = rng.random()
        if len(self.actors) < 4 or (roll < 0.05 and len(self.actors) < 14):
            actor = Actor(rng.choice(net.routers), f"uid {rng.randrange(3)}", rng)
            self.actors.append(actor)
            actor.joins()
        elif roll < 0.09:
            self.connections()
        elif roll < 0.14:
            net.pass_time(rng.choice((0.01, 0.3, 0.3, 4, 25)))
        else:
            actor = rng.choice(self.actors)
            choices = (Actor.calls, Actor.answers, Actor.joins, Actor.leaves, Actor.subscribes, Actor.watches, Actor.tunnels_on, Actor.goes, Actor.fills)  # fmt: skip
            for step in rng.choices(choices, (40, 30, 5, 3, 5, 5, 8, 0.3, 1), k=4):
                step(actor)
        net.run()
        for actor in self.actors:
            actor.listen()

    def connections(self) -> None:
        """Cut a link or WAN connection, connect it again, or let it refuse frames for a while."""
        roll = self.rng.random()
        if roll < 0.5:
            end = self.rng.choice(self.net.ends) if self.net.ends else None
            if end is not None:
                end.room = 0 if end.room is None else None
        elif roll < 0.75:
            if self.link is None:
                self.link = self.net.link(0, 1)
            else:
                if self.rng.random() < 0.3:  # with a goodbye, after which no entry is suspended
                    self.link[0].control(encode_control(frames.Bye("leaving")))
                    self.net.run()
                self.net.cut(self.link)
                self.link = None
        elif self.wan is None:
            self.wan = self.net.connect(0, 2)
        else:
            self.net.lose(self.wan)
            self.wan = None

    # -- what must be -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that all counts equal the existing entries."""
        for router in self.net.routers:
            assert router.accounts.balance() == 0
            self._check_tables(router)
            self._check_waiting(router)
            self._check_connections(router)

    def _check_tables(self, router: Router) -> None:
        there: dict[str, Counter[str]] = {name: Counter() for name in self.tables(router)}
        for session in router.sessions.values():
            members = [member for member in session.members.values() if not member.left]
            keyed = sum(len(member.key_ids) for member in members)
            assert session.keyed == keyed
            there["members"][session.user] += keyed
            there["subscriptions"][session.user] += session.topic_nodes
            there["watches"][session.user] += sum(len(w.key_ids) for w in session.watches.values())
            groups = Counter(group for _, group in session.subscriptions if group)
            assert session.groups == groups
            for member in session.members.values():
                for load in member.loads.values():
                    mine = [h for h in session.in_flight.values() if h.load is load]
                    assert load.messages == len(mine)
                    assert load.bytes == sum(h.size for h in mine)
                    pushes = {hop for hop, h in session.in_flight.items() if h.load is load}
                    assert not load.pushes or set(load.pushes) == pushes
        for entry in router._calls.parking.waiting:
            there["parked"][entry.origin.user] += len(entry.frame)
        for name, table in self.tables(router).items():
            assert table.held == +there[name], name
            assert table.total == there[name].total(), name

    def _check_waiting(self, router: Router) -> None:
        waiting: Counter[int] = Counter()
        surveys: dict[Survey, int] = {}
        openings = set()
        for neighbor in router.neighbors.values():
            for handed in neighbor.in_flight.values():
                if handed.survey is not None:
                    surveys[handed.survey] = surveys.get(handed.survey, 0) + 1
                elif handed.waits:
                    waiting[handed.origin.number] += 1
                else:  # only late or abandoned calls
                    assert handed.deadline_us < router.now_us
                    assert handed.deadline_us or not handed.until_us
        for survey, count in surveys.items():
            assert survey.open == count
            waiting[survey.origin.number] += survey.waits
        for entry in router._calls.parking.waiting:
            waiting[entry.origin.number] += 1
            if entry.route.kind == Kind.TUNNEL_OPEN:
                openings.add((entry.origin.number, entry.hop))
        assert set(router._calls.parking._openings) == openings
        for number, neighbor in router.neighbors.items():
            assert neighbor.pending == waiting[number], neighbor.label
            self._check_tunnels(router, neighbor)

    def _check_tunnels(self, router: Router, neighbor: Neighbor) -> None:
        for hop, tunnel in neighbor.tunnels.items():
            mine = [end for end in ((tunnel.opener, tunnel.opener_hop), (tunnel.member, tunnel.member_hop)) if end == (neighbor, hop)]  # fmt: skip
            assert len(mine) == 1
            assert tunnel.opener.tunnels[tunnel.opener_hop] is tunnel
            assert tunnel.member.tunnels[tunnel.member_hop] is tunnel
            assert tunnel.member_hop in tunnel.member.in_flight
            assert router.neighbors[tunnel.opener.number] is tunnel.opener
        for hop, handed in neighbor.in_flight.items():
            assert (handed.load.kind != Kind.TUNNEL_OPEN) or hop in neighbor.tunnels

    def _check_connections(self, router: Router) -> None:
        asked: Counter[int] = Counter()
        for neighbor in router.neighbors.values():
            for handed in neighbor.in_flight.values():
                if handed.route.demand is not None and handed.survey is None:
                    asked[id(handed.route.demand)] += 1
        for link in router.links.values():
            for counted in link.demands.values():
                assert counted.messages == asked[id(counted)]
        for far in (*router.links.values(), *router.wans.values()):
            held: Counter[int] = Counter()
            whole: Counter[int] = Counter()
            for handed in far.in_flight.values():
                assert handed.share is not None
                held[id(handed.share)] += 1
                whole[id(handed.share.whole)] += 1
            for number, share in far.shares.items():
                assert share.held == held[id(share)]
                assert number in router.neighbors
            for user in far.users.values():
                assert user.held == whole[id(user)]
                assert user.sessions == sum(s.whole is user for s in far.shares.values())
                assert user.held or user.sessions
            assert len(far.in_flight) <= PENDING
            messages: Counter[int] = Counter(id(handed.load) for handed in far.in_flight.values())
            for load in getattr(far, "loads", {}).values():
                assert load.messages == messages[id(load)]


def nothing_is_left(world: World) -> None:
    """End all sessions, and check that no count, table or mark is left anywhere."""
    for actor in world.actors:
        actor.lose()
    world.net.run()
    world.net.pass_time(5)
    world.check()
    for router in world.net.routers:
        for table in world.tables(router).values():
            assert (table.total, table.held) == (0, {})
        assert not router.sessions
        assert not len(router.interest.watches)
        assert not router.advertiser._groups
        assert not router.advertiser._topics
        for neighbor in router.neighbors.values():
            assert not neighbor.in_flight
            assert not neighbor.tunnels
            assert not neighbor.shares or all(n in router.neighbors for n in neighbor.shares)
            assert neighbor.pending == 0
        for link in router.links.values():
            assert not link.addresses
            assert not link.topics
            assert not link.copy.members


def join(keys: list[bytes], served: dict[int, Serving], number: int) -> frames.Join:
    return frames.Join(number, "db", keys, served)


def honest_users_are_served(world: World) -> None:
    """Check that the users from before, and a new one, can do everything again."""
    net = world.net
    for router in net.routers:
        router.limits.pending = 64
    if world.link is None:
        world.link = net.link(0, 1)
    if world.wan is None:
        world.wan = net.connect(0, 2)
    for end in net.ends:
        end.room = None
    for user in ("uid 0", "uid 9"):
        servers = [Actor(router, user, world.rng) for router in net.routers]
        for server in servers:
            served: dict[int, Serving] = {kind: Serving(64, 1 << 20) for kind in CALLS}
            assert not server.ask(partial(join, server.keys, served))
            assert not server.subscribe("t.u", "g")
            server.say(frames.Members(1, "db", [KEY_ID], True))
            assert server.received(frames.Membership)
        net.settle()
        caller = Actor(net.router, user, world.rng)
        for hop, (kind, site) in enumerate(
            ((kind, site) for kind in CALLS for site in ("", "ber")), start=1
        ):
            alias = caller.alias(kind, "db", site)
            body = END.pack(0, 0, 1, 0) + bytes(64)
            caller.say(HOP.pack(22 + len(body), kind, 0, alias, hop, 0) + body)
        net.settle()
        for server in servers:
            server.listen()
        assert not caller.received(frames.Fail)
        kinds_seen = Counter(frame[4] for server in servers for frame in server.tasks)
        assert kinds_seen[Kind.REQUEST] == kinds_seen[Kind.PUSH] == 2
        assert kinds_seen[Kind.TUNNEL_OPEN] == 2
        assert kinds_seen[Kind.SURVEY] == 4
        for each in (*servers, caller):
            each.lose()
        net.settle()


@pytest.fixture(autouse=True)
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a call without a deadline is abandoned."""
    monkeypatch.setattr(overdue_module, "LIFE_US", LIFE_US)
    monkeypatch.setattr(calls_module, "LIFE_US", LIFE_US)


@pytest.mark.parametrize("seed", range(5))
def test_whichever_way_it_ends_nothing_stays_counted(seed: int) -> None:
    world = World(seed)
    for _ in range(600):
        world.step()
        world.check()
    quotas = [table for router in world.net.routers for table in world.tables(router).values()]
    assert sum(table.refused for table in quotas)  # without a refusal the quotas are not tested
    nothing_is_left(world)
    honest_users_are_served(world)
    nothing_is_left(world)


@pytest.mark.parametrize("seed", range(2))
def test_relays_that_are_about_to_stop_count_on_as_well(seed: int) -> None:
    world = World(100 + seed)
    for draining in (None, 0, 2):
        if draining is not None:
            world.net.routers[draining].drain(1_000)
        for _ in range(200):
            world.step()
            world.check()
    nothing_is_left(world)
