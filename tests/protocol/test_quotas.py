"""Shares of tables: no session can fill a shared table, and entries of a peer beyond a limit end no connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from protocol.kit import KEY, OTHER_KEY, Host, LinkEnd, Network, Port, feed
from protocol.test_sites import Sites, reply

from iris.crypto.keys import ClusterKey
from iris.errors import LocalProtocolError, Overloaded, PeerProtocolError
from iris.membership import Watcher
from iris.wire import frames, link_frames
from iris.wire.codec import END, HOP, decode_control, encode_control
from iris.wire.frames import Serving
from iris.wire.kinds import NEVER_US, Cause, Kind
from iris.wire.link_frames import MemberEntry, TopicEntry
from relay.core import advertiser
from relay.core import calls as calls_module
from relay.core import control as control_module
from relay.core import federation as federation_module
from relay.core import link as link_module
from relay.core import parts as parts_module
from relay.core import peer_interest as peer_interest_module
from relay.core import site_routes as sites_module
from relay.core.limits import Limits
from relay.core.quotas import RELAYS_STORE
from relay.core.router import Router

KEY_ID = KEY.key_id
HOUR_S = 3600


class Party:
    """A session that sends plain frames, whose keys count as proven; its calls are answered at once."""

    def __init__(
        self, router: Router, user: str = "uid 1", keys: tuple[bytes, ...] = (KEY_ID,)
    ) -> None:
        self.router = router
        self.port = Port()
        self.session = router.session_up(self.port, user=user)
        self.say(frames.Hello(1, 0))
        self.session.proven |= set(keys)
        self.keys = list(keys)
        self.number = 0

    def say(self, body: frames.Control | bytes) -> None:
        frame = bytearray(body if isinstance(body, bytes) else encode_control(body))
        self.router.frame_in(self.session, memoryview(frame), 0, len(frame))

    def received(self, cls: type) -> list[Any]:
        """Return the control frames of a type that arrived since the last call, at the end of a turn."""
        while not self.router.interest.watches.deadline_us:
            self.router.interest.watches.expire()
        bodies = [decode_control(memoryview(f), 0, len(f)) for f in self.port.out if f[4] < 0x40]
        self.port.out.clear()
        return [body for body in bodies if isinstance(body, cls)]

    def ask(self, build: Callable[[int], frames.Control]) -> str:
        """Return the error of the ACK."""
        self.number += 1
        self.say(build(self.number))
        (ack,) = self.received(frames.Ack)
        assert ack.id == self.number
        return str(ack.error)

    def join(self, name: str) -> str:
        served = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY)
        kinds: dict[int, Serving] = {kind: Serving(8, 1 << 20) for kind in served}
        return self.ask(lambda number: frames.Join(number, name, self.keys, kinds))

    def subscribe(self, pattern: str, group: str = "") -> str:
        return self.ask(lambda number: frames.Subscribe(number, pattern, self.keys, group))

    def call(self, kind: Kind, hop: int, name: str = "db", *, deadline_us: int = 0) -> None:
        """Send one call; declare its alias at its first use."""
        if not self.session.routes:
            for alias, each in enumerate((Kind.REQUEST, Kind.PUSH, Kind.SURVEY)):
                self.say(frames.Declare(alias, each, name, KEY_ID, bytes(16)))
        alias = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY).index(kind)
        body = END.pack(0, 0, 1, 0) + bytes(64)
        self.say(HOP.pack(22 + len(body), kind, 0, alias, hop, deadline_us) + body)


def receive(end: LinkEnd, *bodies: frames.Control) -> str:
    """Deliver frames to one end of a link; return the rule that they broke, or ""."""
    for body in bodies:
        feed(end.reader, encode_control(body))
    return end.why


def never(delivery: Any) -> None:
    """Do not answer."""


# -- interest for other relays ----------------------------------------------------------------------------------------


def test_changes_of_one_session_are_sent_in_portions_and_who_settles_waits_for_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another relay needs longer to apply a change than a session to make it, and answers wait behind it."""
    monkeypatch.setattr(advertiser, "PORTION", 8)
    net = Network(relays=2)
    there = net.link(0, 1)[1].link
    party, other = Party(net.router), Party(net.router)
    known = []
    assert not any(party.join(f"many{number}") for number in range(12))
    members = list(party.session.members)
    other.say(frames.Settle(70))
    assert not any(party.subscribe(f"many{number}") for number in range(12))
    for _ in range(4):
        net._advance(advertiser.GATHER_US)
        net._move()
        known.append((len(there.copy.members), len(there.topics), len(other.received(frames.Ack))))
    assert known == [(8, 0, 0), (12, 4, 1), (12, 12, 0), (12, 12, 0)]
    for member in members:
        party.ask(lambda number, member=member: frames.Leave(number, member))  # type: ignore[misc]
    assert not party.join("stays")
    assert not party.join("leaves")
    party.ask(lambda number: frames.Leave(number, list(party.session.members)[-1]))
    sent = net.router.advertiser.journal.version
    net._advance(advertiser.GATHER_US)
    net._move()
    assert len(there.copy.members) == 4
    net.run()
    assert [entry.name for entry in there.copy.members.values()] == ["stays"]
    assert net.router.advertiser.journal.version == sent + 2


def test_that_a_store_has_started_is_told_after_its_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a call for a stream whose member is not known yet would fail, and not wait."""
    monkeypatch.setattr(advertiser, "PORTION", 8)
    net = Network(relays=2)
    there = net.link(0, 1)[1].link
    net.router.advertiser.set_store(starting=True, failed="", now_us=net.router.now_us)
    net.run()
    assert there.copy.starting
    party = Party(net.router)
    assert not any(party.join(f"many{number}") for number in range(20))
    net.router.advertiser.set_store(starting=False, failed="", now_us=net.router.now_us)
    known = []
    for _ in range(3):
        net._advance(advertiser.GATHER_US)
        net._move()
        known.append((len(there.copy.members), there.copy.starting))
    assert known == [(8, True), (16, True), (20, False)]


def test_a_gateway_that_stops_waits_for_nothing_that_it_will_not_send() -> None:
    net = Sites("ams", "ber")
    net.connect(0, 1)
    party = Party(net.router)
    net.router.federation.leave()
    assert not any(party.join(f"many{number}") for number in range(20))
    net.router.federation.expire(net.router.now_us)
    net.router.federation.expire(net.router.now_us + federation_module.WAN_GATHER_US)
    assert net.router.federation.deadline_us == NEVER_US


def test_the_portion_of_a_member_counts_each_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advertiser, "PORTION", 8)
    net = Network(relays=2)
    there = net.link(0, 1)[1].link
    party = Party(net.router, keys=tuple(bytes([number]) * 16 for number in range(6)))
    assert not any(party.join(f"many{number}") for number in range(4))
    known = []
    for _ in range(2):
        net._advance(advertiser.GATHER_US)
        net._move()
        known.append(len(there.copy.members))
    assert known == [2, 4]


def test_what_a_site_tells_others_and_what_these_tell_their_relays_goes_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (advertiser, federation_module):
        monkeypatch.setattr(module, "PORTION", 8)
    net = Sites("ams", "ber", "ber")
    net.connect(0, 1)
    party = Party(net.router)
    assert not any(party.subscribe(f"many{number}") for number in range(8))
    assert not any(party.join(f"many{number}") for number in range(12))
    assert not any(party.subscribe(f"more{number}") for number in range(4))
    known = []
    net._advance(1)
    net._advance(federation_module.WAN_GATHER_US)
    for _ in range(5):
        net._move()
        (site,), (behind,) = (
            router.sites.site_routes["ams"].values() for router in net.routers[1:]
        )
        known.append(
            [len(site.clusters) + len(site.topics), len(behind.clusters) + len(behind.topics)]
        )
        net._advance(advertiser.GATHER_US)
    assert known == [[8, 0], [16, 8], [24, 16], [24, 24], [24, 24]]


def test_no_site_waits_for_another_that_changes_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advertiser, "PORTION", 8)
    net = Sites("ams", "ber", "lon", "lon")
    net.connect(0, 2)
    net.connect(1, 2)
    for number, party in enumerate(map(Party, net.routers[:2])):
        assert not any(party.join(f"many{number}x{n}") for n in range(12 - 8 * number))
    net._advance(1)
    net._advance(federation_module.WAN_GATHER_US)
    net._move()
    net._advance(advertiser.GATHER_US)
    net._move()
    routes = net.routers[3].sites.site_routes
    assert [len(way.clusters) for site in ("ams", "ber") for way in routes[site].values()] == [4, 4]


# -- interest from other relays ---------------------------------------------------------------------------------------


def test_members_beyond_the_bound_end_no_link_when_they_join_or_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "MAX_COPY", 4)
    net = Network(relays=2)
    end, _ = net.link(0, 1)
    link = end.link
    base = link.replica.version
    entries = [MemberEntry(n, "db", [KEY_ID], {Kind.REQUEST: 1}) for n in range(6)]
    assert not receive(end, link_frames.Interest(base, 9, entries))
    assert (sorted(link.copy.members), link.dropped_entries, link.replica.version) == (
        [0, 1, 2, 3],
        2,
        9,
    )
    assert not receive(end, link_frames.Interest(9, 10, left=[5, 0, 4]))
    assert sorted(link.copy.members) == [1, 2, 3]
    assert not receive(end, link_frames.Interest(0, 11, entries, reset=True))
    assert (len(link.copy.members), link.dropped_entries) == (4, 4)
    assert not receive(end, link_frames.Interest(11, 12, left=[4, 5]))
    (entry,) = net.router.status()["links"]
    assert entry["untaken"] == 4
    # At most as many unknown members may leave as were dropped.
    assert "had not joined" in receive(end, link_frames.Interest(12, 13, left=[4]))


def test_topics_and_groups_beyond_the_bound_end_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_interest_module, "MAX_COPY", 4)
    monkeypatch.setattr(peer_interest_module, "MAX_GROUPS_HERE", 2)
    net = Network(relays=2)
    end, _ = net.link(0, 1)
    link = end.link
    base = link.replica.version
    grouped = [TopicEntry("jobs", KEY_ID, f"g{n}", 1) for n in range(3)]
    plain = [TopicEntry(f"t{n}", KEY_ID, "", 1) for n in range(3)]
    assert not receive(end, link_frames.Interest(base, 9, topics=[*grouped, *plain]))
    assert ([entry[2] or entry[0] for entry in link.topics], link.dropped_entries) == (["g0", "g1", "t0", "t1"], 2)  # fmt: skip
    ended = [TopicEntry(entry.filter, KEY_ID, entry.group, 0) for entry in (*grouped, *plain)]
    assert not receive(end, link_frames.Interest(9, 10, topics=ended))
    assert not (link.topics)
    assert not (link.weights)
    assert not (link.groups)
    assert not receive(end, link_frames.Interest(10, 11, topics=grouped[::-1]))
    assert [entry[2] for entry in link.topics] == ["g2", "g1"]


def test_sessions_with_many_filters_do_not_break_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (link_module, peer_interest_module):
        monkeypatch.setattr(module, "MAX_COPY", 64)
    net = Network(relays=2)
    ends = net.link(0, 1)
    for number in range(17):
        party = Party(net.router)
        for filter in range(4):
            assert not party.subscribe(f"t{number}.{filter}")
    net.run()
    assert [end.why for end in ends] == ["", ""]
    assert len(net.router.links) == len(net.routers[1].links) == 1


def test_sessions_of_one_user_leave_a_quarter_to_others() -> None:
    router = Network(limits=Limits(all_members=16, all_subscriptions=16)).router
    first, second, other = Party(router), Party(router), Party(router, "uid 2")
    crowd = [Party(router) for _ in range(3)]
    for number, party in enumerate((first, second, *crowd)):
        errors = [party.subscribe(f"t{number}.{n}") for n in range(2)]
        taken = 4 * number + 4 <= 12
        assert [not error for error in errors] == [taken, taken], number
    error = crowd[-1].subscribe("t")
    assert "uid 1" in error
    assert "subscription tokens (12 of 16" in error
    assert [bool(other.subscribe(f"o.{n}")) for n in range(3)] == [False, False, True]
    assert "the relay's limit of 16 subscription tokens is reached" in other.subscribe("o")
    keys = tuple(ClusterKey(bytes([n]) * 32).key_id for n in range(4))
    named = [Party(router, "uid 1", keys) for _ in range(4)]
    refused = [party.join("db") for party in named]
    assert [not error for error in refused] == [True, True, True, False]
    assert "members, each counted once per key" in refused[-1]
    assert [not other.join("db") for _ in range(5)] == [True, True, True, True, False]
    quotas: Any = router.status()["quotas"]
    assert quotas["members"]["held"] == quotas["subscriptions"]["held"] == 16
    assert quotas["members"]["refused"] == 2
    for party in (first, second, other, *crowd, *named):
        router.session_down(party.session)
    assert [table["held"] for table in router.quotas.status().values()] == [0] * 9  # type: ignore[index]
    assert not (router.quotas.members.held)
    assert not (router.quotas.subscriptions.held)


def test_sessions_of_one_user_share_the_keys_that_they_prove() -> None:
    net = Network(limits=Limits(all_keys=4))
    router = net.router
    parties = [Party(router, keys=()) for _ in range(4)]
    for party in parties[:3]:
        prove(party)
    with pytest.raises(PeerProtocolError, match=r"share of the relay's proven keys \(3 of 4"):
        prove(parties[3])
    prove(Party(router, "uid 2", keys=()))
    parties[0].say(frames.Release(KEY_ID))
    router.session_down(parties[1].session)
    assert router.quotas.keys.held == {"uid 1": 1, "uid 2": 1}
    prove(parties[3])


def test_one_user_does_not_take_all_places_of_questions() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    net.host("far", relay=1).subscribe("news")
    net.run()
    table = net.router.quotas.questions
    table.limit = 4
    asking, other = Party(net.router), Party(net.router, "uid 2")
    for number in range(4):
        asking.say(frames.Topic(number, "news", KEY_ID, True))
    # The last one is answered at once with what this relay knows.
    assert [each.id for each in asking.received(frames.Audience)] == [3]
    other.say(frames.Topic(9, "news", KEY_ID, True))
    assert not other.received(frames.Audience)
    assert table.status() == {"held": 4, "limit": 4, "refused": 1}
    net.router.now_us = net.router.audiences.deadline_us
    net.router.expire()
    assert (table.total, len(other.received(frames.Audience))) == (0, 1)


def prove(party: Party) -> None:
    session = party.session
    signature = KEY.sign_proof(
        relay_id=party.router.relay_id, session_id=session.session_id, challenge=session.challenge
    )
    party.say(frames.Prove(0, KEY.public_key, signature))


def test_one_session_has_no_more_than_a_quarter_of_all_members() -> None:
    router = Network(limits=Limits(all_members=1024)).router
    keys = tuple(ClusterKey(bytes([n]) * 32).key_id for n in range(64))
    party = Party(router, "uid 1", keys)
    errors = [party.join(f"c{n}") for n in range(6)]
    assert [not error for error in errors] == [True] * 4 + [False] * 2
    assert "256 members" in errors[-1]


def test_one_user_does_not_take_all_queue_groups_of_a_key() -> None:
    router = Network().router
    parties = [Party(router), Party(router), Party(router, "uid 2")]
    errors = [
        parties[number // 64].subscribe("jobs", f"g{number}")
        for number in range(advertiser.MAX_GROUPS_HERE)
    ]
    assert [not error for error in errors] == [True] * 96 + [False] * 32
    assert "uid 1 already use 96 of" in errors[-1]
    assert not parties[1].subscribe("jobs", "g0")
    assert not any(parties[2].subscribe("jobs", f"o{number}") for number in range(32))
    assert "already in 128 queue groups" in parties[2].subscribe("jobs", "another")


def test_nobody_locks_out_the_store_that_the_relay_runs() -> None:
    router = Network(limits=Limits(all_members=4, all_subscriptions=4)).router
    for user in ("uid 1", "uid 2"):
        party = Party(router, user)
        while not party.subscribe(f"t{party.number}"):
            pass
        assert not party.join("db")
    store = Party(router, RELAYS_STORE)
    assert not any(store.subscribe(f"t{number}") for number in range(4))
    assert not any(store.join(f"log{number}") for number in range(1))


def test_many_made_up_keys_cost_callers_of_a_name_nothing() -> None:
    net = Network()
    keys = [n.to_bytes(4, "big") + bytes(12) for n in range(1000)]
    for at in range(0, len(keys), 50):
        assert not Party(net.router, "uid 9", tuple(keys[at : at + 50])).join("db")
    party = Party(net.router)
    party.say(frames.Members(1, "db", [KEY_ID]))
    (membership,) = party.received(frames.Membership)
    assert len(membership.others) <= 65
    assert len(str(net.router.status()["clusters"])) < 4096


# -- interest for other sites ------------------------------------------------------------------------------------


def with_wan_limit(entries: int, monkeypatch: pytest.MonkeyPatch) -> Sites:
    """Return two sites that accept at most `entries` clusters and topics from each other."""
    for module in (sites_module, federation_module):
        monkeypatch.setattr(module, "MAX_WANTED", entries)
    return Sites("ams", "ber")


def test_entries_without_room_are_held_back_and_announced_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = with_wan_limit(8, monkeypatch)
    ours, theirs = net.connect(0, 1)
    mallory = net.host("mallory", keys=(OTHER_KEY,))
    services = [mallory.serve(f"m{number}") for number in range(9)]
    inboxes = [mallory.subscribe(f"m{number}", key=OTHER_KEY) for number in range(9)]
    alice = net.host("alice")
    alice.serve("db", reply(b"pong"))
    inbox = alice.subscribe("news")
    net.settle()
    assert len(inboxes) == len(services)
    assert (ours.why, theirs.why) == ("", "")
    way = theirs.link.site_route
    assert (len(way.clusters), len(way.topics), way.dropped_entries) == (7, 7, 0)
    assert net.router.status()["sites_untold"] == 6
    # A key can use all but the last quarter, so members of the other key can still be called and receive.
    bob = net.host("bob", relay=1)
    answer = bob.request("db", b"ping")
    bob.publish("news", b"text")
    net.settle()
    assert answer.value == b"pong"
    assert inbox.payloads == [b"text"]
    mallory.lose()
    net.settle()
    assert (len(way.clusters), len(way.topics)) == (1, 1)
    assert net.router.status()["sites_untold"] == 0


def test_an_entry_that_was_held_back_is_announced_when_another_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = with_wan_limit(4, monkeypatch)
    _, theirs = net.connect(0, 1)
    parties = [Party(net.router) for _ in range(5)]
    for number, party in enumerate(parties):
        assert not party.join(f"c{number}")
        assert not party.subscribe(f"t{number}")
    net.settle()
    way = theirs.link.site_route
    assert [name for name, _ in way.clusters] == ["c0", "c1", "c2"]
    net.router.session_down(parties[0].session)
    net.settle()
    assert [name for name, _ in way.clusters] == ["c1", "c2", "c3"]
    assert [entry[0] for entry in way.topics] == ["t1", "t2", "t3"]
    assert net.router.status()["sites_untold"] == 2


def test_as_many_queue_groups_of_a_site_are_reported_as_an_alias_can_name() -> None:
    net = Sites("ams", "ams", "ams", "ber")
    net.connect(0, 3)
    for relay in range(3):
        for user in range(2):
            party = Party(net.routers[relay], f"uid {user}")
            for number in range(64):
                assert not party.subscribe("jobs", f"{'x' * 240}.{relay}.{user}.{number}")
    net.settle()
    bob = net.host("bob", relay=3)
    bob.publish("jobs", b"1")
    net.settle()
    assert [end.why for end in net.ends] == [""] * len(net.ends)
    (wan,) = net.routers[3].wans.values()
    assert len(wan.site_route.topics) == sites_module.MAX_SITE_GROUPS
    assert net.router.status()["sites_untold"] == 384 - sites_module.MAX_SITE_GROUPS


def test_sites_with_much_interest_do_not_cut_a_gateway_off_from_its_own_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.core.reach.MAX_COPY", 8)
    net = Sites("ams", "ber", "cph")
    net.connect(0, 1)
    net.connect(0, 2)
    for router in net.routers[1:]:
        party = Party(router)
        for number in range(8):
            assert not party.subscribe(f"t{number}")
            assert not party.join(f"c{number}")
    net.settle()
    late = Router(b"z" * 16, entropy=net.entropy, message_limit=1 << 20, site="ams")
    late.now_us = net.router.now_us
    net.routers.append(late)
    ends = net.link(0, 3)
    net.settle()
    assert [end.why for end in ends] == ["", ""]
    counts = [len(way.topics) for ways in late.sites.site_routes.values() for way in ways.values()]
    assert counts == [6, 2]
    shown: Any = net.router.status()["sites"]
    assert [site["untold"] for site in shown] == [4, 12]


# -- calls that wait ---------------------------------------------------------------------------------------------


def fill(host: Host, count: int, **options: Any) -> int:
    """Send `count` requests that are not answered; return how many were refused."""
    answers = [host.request("db", timeout_ms=60_000, **options) for _ in range(count)]
    host.net.run()
    assert all(isinstance(answer.error, Overloaded) for answer in answers if answer.done())
    return sum(answer.done() for answer in answers)


def answer_all(service: Any) -> None:
    for delivery in service.deliveries:
        delivery.reply(b"", None, False)
    service.deliveries.clear()


@pytest.mark.parametrize("wan", [False, True])
def test_one_session_does_not_take_all_the_places_of_a_link_or_wan(wan: bool) -> None:
    net = Sites("ams", "ber" if wan else "ams")
    for router in net.routers:
        router.limits.pending = 16
    if wan:
        net.connect(0, 1)
    bob = net.host("bob", relay=1)
    service = bob.serve("db", never, concurrency=100)
    net.settle()
    alice, carol, dora = (net.host(name, user=name[0]) for name in ("alice", "ada", "dora"))
    assert fill(alice, 16) == 8
    # A second session of the same user gets the rest of its user's share.
    assert fill(carol, 16) == 12
    assert fill(dora, 4) == 0
    assert fill(dora, 1) == 1
    (far,) = [n for n in net.router.neighbors.values() if n.hop_class]
    assert len(far.in_flight) == 16
    answer_all(service)
    net.settle()
    assert not far.in_flight
    assert not any(share.held for share in (*far.shares.values(), *far.users.values()))
    late = alice.request("db", timeout_ms=60_000)
    net.run()
    assert not late.done()
    for host in (alice, carol, dora):
        host.lose()
    assert not far.shares
    assert far.users  # alice's former calls still wait there, and count
    answer_all(service)
    net.settle()
    assert not far.users
    net.check()


def test_a_user_that_reconnects_has_no_new_share() -> None:
    net = Network(relays=2, limits=Limits(pending=16))
    net.link(0, 1)
    service = net.host("bob", relay=1).serve("db", never, concurrency=100)
    for _ in range(4):
        alice = net.host("alice", user="uid 1")
        fill(alice, 8)
        alice.lose()
    (link,) = net.router.links.values()
    assert len(link.in_flight) == 12
    assert fill(net.host("dora", user="uid 2"), 4) == 0
    answer_all(service)
    net.run()
    assert not link.in_flight
    assert list(link.users) == ["uid 2"]
    assert all(router.accounts.balance() == 0 for router in net.routers)


def test_surveys_and_tunnels_count_in_the_share_too() -> None:
    net = Network(relays=2, limits=Limits(pending=8))
    net.link(0, 1)
    bob = net.host("bob", relay=1)
    service = bob.serve("db", never, concurrency=100)
    alice, dora = net.host("alice", user="uid 1"), net.host("dora", user="uid 2")
    for _ in range(2):
        alice.open_tunnel("db")
    surveys = [alice.survey("db", timeout_ms=60_000) for _ in range(3)]
    net.run()
    (link,) = net.router.links.values()
    assert len(link.in_flight) == 4
    assert [len(survey.roster_ids) for survey in surveys] == [1, 1, 0]
    assert surveys[2].end is not None
    assert fill(dora, 4) == 0
    answer_all(service)
    net.run()
    alice.lose()
    net.run()
    assert not link.in_flight
    assert all(router.accounts.balance() == 0 for router in net.routers)


def test_a_call_without_a_deadline_is_given_up_after_an_hour() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    assert not Party(net.routers[1]).join("db")
    near = Party(net.router)
    assert not near.join("web")
    net.run()
    far_caller, near_caller = Party(net.router), Party(net.router)
    for party, name in ((far_caller, "db"), (near_caller, "web")):
        party.call(Kind.REQUEST, 1, name)
        party.call(Kind.SURVEY, 2, name)
    net.run()
    (link,) = net.router.links.values()
    assert (len(link.in_flight), far_caller.session.pending) == (2, 2)
    net.pass_time(HOUR_S - 60)
    assert not far_caller.received(frames.Fail)
    assert far_caller.session.pending == near_caller.session.pending == 2
    net.pass_time(180)
    for party in (far_caller, near_caller):
        bodies = party.received(object)
        (fail,) = [body for body in bodies if isinstance(body, frames.Fail)]
        (done,) = [body for body in bodies if isinstance(body, frames.Done)]
        assert (fail.hop, fail.cause, fail.may_have_run) == (1, Cause.LOST, True)
        assert "60 minutes" in fail.detail
        assert (done.hop, len(done.lost)) == (2, 1)
        assert party.session.pending == 0
    assert not link.in_flight
    assert not any(share.held for share in link.users.values())
    assert all(router.accounts.balance() == 0 for router in net.routers)


def test_late_credit_for_a_push_that_was_given_up_is_ignored() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    assert not Party(net.routers[1]).join("db")
    near = Party(net.router)
    assert not near.join("web")
    net.run()
    caller, near_caller = Party(net.router), Party(net.router)
    for hop in (1, 2):
        caller.call(Kind.PUSH, hop)
        near_caller.call(Kind.PUSH, hop, "web")
    net.run()
    (link,) = net.router.links.values()
    hops = list(link.in_flight)
    net.pass_time(HOUR_S + 180)
    assert [fail.cause for fail in caller.received(frames.Fail)] == [Cause.LOST] * 2
    assert [fail.cause for fail in near_caller.received(frames.Fail)] == [Cause.LOST] * 2
    assert not link.in_flight
    # A call at a member of this relay stays in that member's account until it ends.
    (member,) = near.session.members.values()
    near.say(frames.Credit(member.serial, Kind.PUSH, list(near.session.in_flight)))
    assert not near.session.in_flight
    assert member.loads[Kind.PUSH].messages == 0
    assert not receive(ends[0], frames.Credit(0, Kind.PUSH, hops))


def test_a_site_that_credits_what_was_swept_keeps_its_connection() -> None:
    net = Sites("ams", "ber")
    net.router.limits.pending = 4
    ours, _ = net.connect(0, 1)
    net.host("bob", relay=1).serve("db", never, concurrency=100)
    net.settle()
    alice = net.host("alice")
    for _ in range(2):
        alice.push("db", timeout_ms=1000)
    net.settle()
    hops = list(ours.link.in_flight)
    assert len(hops) == 2
    net.pass_time(20)
    alice.push("db", timeout_ms=1000)
    net.settle()
    assert not set(hops) & ours.link.in_flight.keys()
    assert not ours.receive(frames.Credit(0, Kind.PUSH, hops))


def test_one_session_does_not_take_all_that_may_wait_for_a_relay_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "PARKED_BYTES", 16 * 118)
    net = Network(relays=2)
    ends = net.link(0, 1)
    net.host("bob", relay=1).serve("db", reply(b"pong"))
    net.cut(ends)
    first, second, other = Party(net.router), Party(net.router), Party(net.router, "uid 2")
    late_us = net.router.now_us + 60_000_000
    for party in (first, second, other):
        for hop in range(17):
            party.call(Kind.REQUEST, hop + 1, deadline_us=late_us)
    refused = [len(party.received(frames.Fail)) for party in (first, second, other)]
    assert refused == [9, 13, 13]
    assert net.router.accounts.refused == sum(refused)
    net.pass_time(4)
    assert net.router.quotas.parked.total == 0
    assert not net.router.quotas.parked.held
    assert net.router.accounts.balance() == 0


def test_a_member_that_finishes_nothing_is_handed_a_bounded_number_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "MAX_IN_FLIGHT", 4)
    net = Network()
    bob = net.host("bob")
    bob.serve("db", never, concurrency=1, limit_bytes=1 << 40)
    alice = net.host("alice")
    for _ in range(6):
        alice.request("db", timeout_ms=100)
        net.run()
        net.pass_time(2)
    assert len(bob.peer.in_flight) == 4
    assert net.router.accounts.balance() == 0


def watch(party: Party, number: int, name: str = "db") -> str:
    """Start a watch; return the error, or "" if its first answer came."""
    party.say(frames.Members(number, name, [KEY_ID], True))
    answers = (frames.Ack, frames.Membership)
    (answer,) = [body for body in party.received(object) if isinstance(body, answers)]
    assert answer.id == number
    return str(answer.error) if isinstance(answer, frames.Ack) else ""


def test_a_watch_too_many_is_refused_and_its_session_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "MAX_WATCHES", 3)
    router = Network(limits=Limits(all_watches=8)).router
    first, second, other = Party(router), Party(router), Party(router, "uid 2")
    assert [bool(watch(first, n)) for n in range(1, 5)] == [False] * 3 + [True]
    assert watch(first, 5).startswith("this session already has 3 watches")
    assert [bool(watch(second, n)) for n in range(1, 4)] == [False] * 3
    third = Party(router)
    assert (
        "sessions of uid 1 already use their share of the relay's watches, each counted once per key (6 of 8"
        in watch(third, 1)
    )
    assert [bool(watch(other, n)) for n in range(1, 4)] == [False, False, True]
    assert "the relay's limit of 8 watches, each counted once per key is reached" in watch(other, 9)
    # Without a watch all of them are answered, and those with a watch are notified of changes.
    third.say(frames.Members(2, "db", [KEY_ID]))
    assert len(third.received(frames.Membership)) == 1
    assert not third.join("db")
    assert [len(party.received(frames.Membership)) for party in (first, second, other)] == [3, 3, 2]
    first.say(frames.Unwatch(1))
    first.say(frames.Unwatch(4))
    assert not watch(third, 7)
    for party in (first, second, third, other):
        router.session_down(party.session)
    assert (router.quotas.watches.total, router.quotas.watches.held) == (0, {})


def test_a_watch_too_many_is_refused_and_no_other_watch_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "MAX_WATCHES", 1)
    net = Network()
    alice = net.host("alice")
    alice.session.out.prove(KEY)
    received: list[frames.Membership] = []
    refused: list[str] = []
    session = alice.session
    session.watch("db", [KEY_ID], received.append, refused=refused.append, stay=True)
    second = session.watch("web", [KEY_ID], received.append, refused=refused.append, stay=True)
    session.watch("web", [KEY_ID], received.append, stay=True)  # without a limit
    net.run()
    assert [text.split(",")[0] for text in refused] == ["this session already has 1 watches"]
    session.unwatch(second)
    net.host("bob").serve("db")
    assert [len(each.joined) for each in received] == [0, 1]
    assert not alice.ended_because


async def test_a_watcher_that_is_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "MAX_WATCHES", 1)
    net = Network()
    alice = net.host("alice")
    watchers = [Watcher("db", [KEY]) for _ in range(2)]
    for watcher in watchers:
        watcher.attach(alice.session)
    net.run()
    await watchers[0].first()
    for wait in (watchers[1].first, watchers[1].changed):
        with pytest.raises(
            LocalProtocolError, match=r"members of db: this session already has 1 watches"
        ):
            await wait()
    watchers[1].detach()
    watchers[0].detach()
    watchers[1].attach(alice.session)  # as after a reconnect
    net.run()
    await watchers[1].first()
    assert len(watchers[1].members()) == 0


def test_sessions_with_many_filters_do_not_part_the_mesh_at_the_bound_of_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, but only the receiver's limit is exceeded: 17 sessions, of which the last is one too many."""
    monkeypatch.setattr(link_module, "MAX_COPY", 16 * 64)
    monkeypatch.setattr(peer_interest_module, "MAX_COPY", 16 * 64)
    net = Network(relays=2)
    ends = net.link(0, 1)
    parties = [Party(net.router) for _ in range(17)]
    for number, party in enumerate(parties):
        assert not any(party.subscribe(f"t{number}x{n}") for n in range(64))
    net.run()
    assert [end.why for end in ends] == ["", ""]
    net.run()  # changes are sent in portions
    there = ends[1].link
    assert (len(there.topics), there.dropped_entries) == (16 * 64, 64)
    for party in parties:
        net.router.session_down(party.session)
    net.run()
    net.run()
    assert [end.why for end in ends] == ["", ""]
    assert not there.topics
    assert not parties[0].router.advertiser._topics
