"""Gateways back to back: real sessions and routers, with links and WAN connections in memory. The rules for frames of
gateways, and the outcome when a gateway breaks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from protocol.kit import KEY, LIMIT, OTHER_KEY, LinkEnd, Network, control_of, feed, kind_of

from iris.errors import NoMembers, PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import END, HOP, encode_control, tunnel_frame
from iris.wire.kinds import FLAG_REFUSED, UNKNOWN_COUNT, Cause, HopClass, Kind, Refusal
from iris.wire.link_frames import MemberEntry, SiteCluster, SiteEntry, SiteTopic, TopicEntry
from relay.core import federation as federation_module
from relay.core import policy as policy_module
from relay.core import site_routes as sites_module
from relay.core import surveys as surveys_module
from relay.core.limits import Limits
from relay.core.policy import Policy
from relay.core.router import Router

SENDER = bytes(range(16))
NOTHING: dict[type, dict[str, Any]] = {SiteCluster: {"kinds": {}}, SiteTopic: {"count": 0}}
KEY_ID = KEY.key_id


class WanEnd(LinkEnd):
    """One gateway's side of a WAN connection."""

    def _frame(self, buf: memoryview, start: int, end: int) -> None:
        try:
            self.router.frame_in(self.link, buf, start, end)
        except PeerProtocolError as err:
            self.why = str(err)
            for end in (self, self.other):
                end.router.wan_down(end.link)

    def receive(self, *bodies: frames.Control) -> str:
        """Deliver frames from the other gateway; return the rule that they broke, or ""."""
        for body in bodies:
            self.receive_frame(encode_control(body))
        return self.why

    def receive_frame(self, frame: bytes) -> str:
        if not self.link.closed:
            feed(self.reader, frame)
        return self.why

    def said(self, cls: type) -> list[Any]:
        """Return the control frames of a type that wait to be sent."""
        bodies = [control_of(frame) for frame in self.out if kind_of(frame) < 0x40]
        return [body for body in bodies if isinstance(body, cls)]


class Sites(Network):
    """Relays of several sites: `Sites("ams", "ams", "ber")`. Relays of a site are linked. WAN connections are made by
    `connect`.
    """

    def __init__(self, *sites: str, policies: dict[str, Policy] | None = None) -> None:
        super().__init__(relays=len(sites), limits=Limits(aliases=1024))
        for number, (router, site) in enumerate(zip(self.routers, sites, strict=True)):
            router.sites.site = site
            router.sites.policy = (policies or {}).get(site, router.sites.policy)
            for other in range(number):
                if sites[other] == site:
                    self.link(other, number)

    def connect(self, one: int, other: int, cost_ms: int = 0) -> tuple[WanEnd, WanEnd]:
        """Connect two gateways; return both ends."""
        routers = self.routers[one], self.routers[other]
        ends = WanEnd(self, routers[0]), WanEnd(self, routers[1])
        hellos = routers[0].hello(routers[0].now_us), routers[1].hello(0)
        ends[0].other, ends[1].other = ends[1], ends[0]
        ends[0].link = routers[0].wan_up(ends[0], hellos[1], routers[1].site, cost_ms)
        ends[1].link = routers[1].wan_up(ends[1], hellos[0], routers[0].site, cost_ms)
        self.ends += ends
        self.settle()
        return ends

    def lose(self, ends: tuple[WanEnd, WanEnd]) -> None:
        """Break a connection, and notify both gateways. Frames in transit are lost."""
        for end in ends:
            self.ends.remove(end)
            end.router.wan_down(end.link)
        self.settle()

    def settle(self) -> None:
        """Let changes reach all relays."""
        for _ in range(8):
            self._move()
            self._advance(25_000)
        self.run()


def reply(text: bytes) -> Callable[[Any], None]:
    return lambda delivery: delivery.reply(text, None, False)


# -- what passes -------------------------------------------------------------------------------------------------


def test_a_site_is_advertised_as_a_whole_and_its_members_are_called() -> None:
    net = Sites("ams", "ber", "ber")
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    ours, theirs = net.connect(0, 1)
    bob.serve("db", reply(b"pong"))
    inbox = bob.subscribe("news.*")
    net.settle()
    answer = alice.request("db", b"ping")
    alice.publish("news.today", b"one", b"two")
    net.settle()
    assert answer.value == b"pong"
    assert inbox.payloads == [b"one", b"two"]
    (way,) = net.router.sites.site_routes["ber"].values()
    kinds, members = way.clusters[("db", KEY_ID)]
    assert members == 1
    assert kinds[Kind.REQUEST] == 16
    assert way.topics == {("news.*", KEY_ID, ""): 1}
    assert not ours.why
    assert not theirs.why
    net.check()


def test_every_hop_class_is_said_where_it_is_due() -> None:
    net = Sites("ams", "ams", "ber", "ber")
    said: list[tuple[int, frames.Declare]] = []
    ends = {id(end): number for number, end in enumerate(net.ends)}

    def listen(end: LinkEnd, where: int) -> None:
        def tamper(frame: bytes) -> list[bytes]:
            if kind_of(frame) == Kind.DECLARE:
                said.append((where, control_of(frame)))
            return [frame]

        end.tamper = tamper

    net.connect(1, 2)
    for number, end in enumerate(net.ends):
        listen(end, ends.setdefault(id(end), number))
    alice, bob = net.host("alice"), net.host("bob", relay=3)
    bob.serve("db", reply(b"pong"))
    net.settle()
    answer = alice.request("db", b"ping")
    net.settle()
    assert answer.value == b"pong"
    hops = [(body.kind, body.hop_class, body.site) for _, body in said]
    assert hops == [
        (Kind.REQUEST, HopClass.TO_WAN, "ber"),  # Alice's relay to its gateway
        (Kind.REQUEST, HopClass.TO_WAN, "ber"),  # over the WAN
        (Kind.REQUEST, HopClass.FROM_WAN, ""),  # on to Bob's relay
        (Kind.REPLY, HopClass.MESH, ""),
        (Kind.REPLY, HopClass.TO_WAN, "ams"),
        (Kind.REPLY, HopClass.FROM_WAN, ""),
    ]


def test_members_of_other_sites_are_counted() -> None:
    net = Sites("ams", "ber", "ber", "cph")
    net.connect(0, 1)
    net.connect(0, 3)
    alice = net.host("alice")
    for relay in (1, 2, 2, 3):
        net.host("server", relay=relay).serve("db")
    net.settle()
    assert net.router.sites.members("db", [KEY_ID, OTHER_KEY.key_id]) == {"ber": 3, "cph": 1}
    replies: list[Any] = []

    def keep(host: Any, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.MEMBERSHIP:
            replies.append(control_of(frame))
        return [frame]

    net.tamper = keep
    alice.subscribe("own")  # proves the key
    alice.say(encode_control(frames.Members(77, "db", [KEY_ID])))
    net.run()
    (membership,) = replies
    assert membership.sites == {"ber": 3, "cph": 1}
    assert not membership.joined


def test_what_a_site_does_not_import_or_export_is_refused_at_both_gateways_and_counted() -> None:
    net = Sites("ams", "ber")
    ours, theirs = net.connect(0, 1)
    net.router.sites.policy = Policy(["news.>"], ["db"])
    net.routers[1].sites.policy = Policy(["db"], ["news.>"])
    # Ams does not send this itself; Ber made it up.
    publish = frames.Declare(0, Kind.PUBLISH, "other", KEY_ID, SENDER, True, [], 0, 2, "ber")
    call = frames.Declare(1, Kind.REQUEST, "web", KEY_ID, SENDER, True, [], 0, 2, "ber")
    assert not theirs.receive(publish, call)
    theirs.receive_frame(data(Kind.PUBLISH, 0, 0))
    theirs.receive_frame(data(Kind.REQUEST, 1, hop_for(theirs)))
    router = net.routers[1]
    assert router.sites.policy.refused == {
        "ams: other is not imported": 1,
        "ams: web is not exported": 1,
    }
    assert router.accounts.dropped == {"not allowed": 1}
    (fail,) = theirs.said(frames.Fail)
    assert (fail.cause, fail.detail) == (Cause.REFUSED, "web is not exported")
    # Entries of Ber that Ams does not import stay unknown.
    entries = [SiteCluster("ber", name, KEY_ID, {Kind.REQUEST: 1}, 1) for name in ("db", "web")]
    topics = [SiteTopic("ber", name, KEY_ID, "", 1) for name in ("news.*", "other")]
    version = ours.link.replica.version
    assert not ours.receive(
        link_frames.Interest(version, version + 1, clusters=entries, site_topics=topics)
    )
    (way,) = net.router.sites.site_routes["ber"].values()
    assert [name for name, _ in way.clusters] == ["db"]
    assert [name for name, *_ in way.topics] == ["news.*"]
    assert not net.router.sites.policy.refused
    net.check()


# -- what no gateway says ----------------------------------------------------------------------------------------


def data(kind: int, alias: int, hop: int, *, flags: int = 0, count: int = 1) -> bytes:
    """Return a data frame as a relay sends it."""
    body = b"\0" * 64
    return HOP.pack(46 + len(body), kind, flags, alias, hop, 0) + END.pack(0, 1000, count, 0) + body


def hop_for(end: LinkEnd) -> int:
    """Return a hop id that the gateway at the other end of `end` may choose."""
    return 5 | (end.link.own_hop ^ end.link.own_hop_mask)


def declare(alias: int = 0, kind: int = Kind.REQUEST, **fields: Any) -> frames.Declare:
    fields = {"name": "db", "key_id": KEY_ID, "sender_id": SENDER, "hop_class": 2, "site": "ams", **fields}  # fmt: skip
    return frames.Declare(alias, kind, **fields)


def interest(**fields: Any) -> link_frames.Interest:
    """Return a snapshot."""
    return link_frames.Interest(0, 9, reset=True, **fields)


def cluster(site: str = "ber", name: str = "db", **fields: Any) -> SiteCluster:
    return SiteCluster(site, name, KEY_ID, fields.get("kinds", {Kind.REQUEST: 1}), 1)


def topic(site: str = "ber", name: str = "news", group: str = "") -> SiteTopic:
    return SiteTopic(site, name, KEY_ID, group, 1)


def gap(kind: int = Kind.PUBLISH, site: str = "ams") -> frames.Gap:
    return frames.Gap(kind, "news", KEY_ID, SENDER, 0, 1, "because", site=site)


MEMBER = MemberEntry(1, "db", [KEY_ID], {Kind.REQUEST: 1})
BREACHES: dict[str, tuple[frames.Control, str]] = {
    "a cluster of another site": (interest(clusters=[cluster("cph")]), "describes another site"),
    "a cluster of our site": (interest(clusters=[cluster("ams")]), "describes another site"),
    "a cluster of no site": (interest(clusters=[cluster("")]), "describes another site"),
    "a topic of another site": (interest(site_topics=[topic("cph")]), "describes another site"),
    "members": (interest(joined=[MEMBER]), "may carry clusters and site_topics only"),
    "members that left": (interest(left=[1]), "may carry clusters and site_topics only"),
    "topics of a relay": (
        interest(topics=[TopicEntry("news", KEY_ID, "", 1)]),
        "may carry clusters and site_topics only",
    ),
    "what it reaches": (interest(sites=[SiteEntry("cph")]), "may carry clusters and site_topics only"),
    "no cluster name": (interest(clusters=[cluster(name="a b")]), "not a cluster"),
    "no filter": (interest(site_topics=[topic(name="a..b")]), "not a"),
    "no group": (interest(site_topics=[topic(group="a b")]), "not a"),
    "an unknown kind": (interest(clusters=[cluster(kinds={3: 1})]), "unknown kind"),
    "a local class": (declare(hop_class=HopClass.LOCAL), "hop class 0 is not allowed from another site"),
    "the class of a mesh": (declare(hop_class=HopClass.MESH), "hop class 1 is not allowed from another site"),
    "what came from a WAN": (declare(hop_class=HopClass.FROM_WAN), "hop class 3 is not allowed from another site"),
    "an unknown class": (declare(hop_class=77), "hop class 77 is not allowed from another site"),
    "a message for a third site": (declare(site="cph"), "DECLARE for site 'cph' arrived at site 'ams'"),
    "an answer for a third site": (declare(kind=Kind.REPLY, site="cph"), "DECLARE for site 'cph'"),
    "a message for no site": (declare(site=""), "DECLARE for site '' arrived at site 'ams'"),
    "too high an alias": (declare(alias=1024), "over the limit"),
    "an alias for no kind": (declare(kind=0x30), "alias for frames of kind"),
    "an alias for no name": (declare(name="a b"), "not a cluster"),
    "a loss of a third site": (gap(site="cph"), "GAP for site 'cph' arrived at site 'ams'"),
    "a loss of requests": (gap(Kind.REQUEST), "GAP for frames of kind 0x40"),
    "HELLO": (frames.Hello(1, 0), "unexpected Hello frame"),
    "LINK_HELLO": (link_frames.LinkHello(1, 0, SENDER, 0, 0, LIMIT), "unexpected LinkHello frame"),
    "PROVE": (frames.Prove(1, bytes(32), bytes(64)), "unexpected Prove frame"),
    "JOIN": (frames.Join(1, "db", [KEY_ID], {Kind.REQUEST: frames.Serving(1, 1)}), "unexpected Join frame"),
    "SUBSCRIBE": (frames.Subscribe(1, "news", [KEY_ID]), "unexpected Subscribe frame"),
    "MEMBERS": (frames.Members(1, "db", [KEY_ID]), "unexpected Members frame"),
    "STATUS": (frames.Status(1), "unexpected Status frame"),
    "DRAIN": (frames.Drain(1), "unexpected Drain frame"),
    "LOADS": (link_frames.Loads([]), "unexpected Loads frame"),
    "ASK_PEERS": (link_frames.AskPeers(), "unexpected AskPeers frame"),
    "PEERS": (link_frames.Peers([]), "unexpected Peers frame"),
}  # fmt: skip


@pytest.fixture
def net() -> Sites:
    """Two gateways of Ams, one of Ber and one of Cph, with sessions of Alice and Bob."""
    return Sites("ams", "ams", "ber", "cph")


class Victim:
    """The first gateway of Ams, and the functions that must work whatever Ber sends to it."""

    def __init__(self, net: Sites) -> None:
        self.net = net
        self.end, self.other = net.connect(0, 2)
        self.cph = net.connect(0, 3)
        self.alice, self.bob = net.host("alice"), net.host("bob", relay=3)
        self.carol = net.host("carol", relay=1)
        self.bob.serve("bobs", reply(b"bob"))
        self.carol.serve("carols", reply(b"carol"))
        self.inbox = self.bob.subscribe("news")
        net.settle()

    def works(self) -> None:
        """Check that all other sessions and relays still work."""
        answers = [self.alice.request(name) for name in ("bobs", "carols")]
        self.alice.publish("news", b"text")
        self.net.settle()
        assert [answer.value for answer in answers] == [b"bob", b"carol"]
        assert self.inbox.payloads[-1] == b"text"
        assert not self.cph[0].why
        self.net.check()


@pytest.mark.parametrize("what", BREACHES)
def test_a_gateway_that_breaks_a_rule_loses_its_own_connection_and_no_other(
    net: Sites, what: str
) -> None:
    victim = Victim(net)
    body, why = BREACHES[what]
    assert why in victim.end.receive(body)
    assert victim.end.link.closed
    assert "ber" not in net.router.sites.site_routes
    victim.works()


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (data(Kind.REQUEST, 7, 0), "alias 7 was not declared"),
        (data(Kind.PUBLISH, 0, 0), "alias 0 was not declared"),
        (data(Kind.REPLY, 0, 0), "alias 0 was not declared"),
        (data(Kind.REQUEST, 0, 0)[:40], "shorter than"),
        (tunnel_frame(Kind.TUNNEL_DATA, 9, b"")[:8], "shorter than"),
    ],
)
def test_a_data_frame_that_means_nothing_ends_the_connection(
    net: Sites, frame: bytes, why: str
) -> None:
    victim = Victim(net)
    victim.end.receive(declare(0))
    size = (len(frame) - 4).to_bytes(4, "little")
    assert why in victim.end.receive_frame(size + frame[4:])
    victim.works()


def test_a_hop_id_of_ours_or_a_tunnel_twice_ends_the_connection(net: Sites) -> None:
    victim = Victim(net)
    victim.end.receive(declare(0))
    ours = hop_for(victim.end) ^ victim.end.link.own_hop_mask
    assert "range reserved for this relay" in victim.end.receive_frame(data(Kind.REQUEST, 0, ours))
    victim.works()
    again, _ = net.connect(0, 2)
    again.receive(declare(0, Kind.TUNNEL_OPEN, name="carols"))
    again.receive_frame(data(Kind.TUNNEL_OPEN, 0, hop_for(again)))
    assert "already in use by an open tunnel" in again.receive_frame(
        data(Kind.TUNNEL_OPEN, 0, hop_for(again))
    )
    net.settle()
    assert not net.router.links[net.routers[1].relay_id].tunnels


def test_answers_under_unknown_hop_ids_are_dropped_and_counted(net: Sites) -> None:
    victim = Victim(net)
    for number, kind in enumerate((Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY)):
        victim.end.receive(declare(number, kind))
        victim.end.receive_frame(data(kind, number, 99))
    refused = FLAG_REFUSED | Refusal.FULL << 4
    victim.end.receive_frame(data(Kind.REQUEST, 0, 99, flags=refused))
    victim.end.receive_frame(tunnel_frame(Kind.TUNNEL_DATA, 99, b"x"))
    victim.end.receive_frame(tunnel_frame(Kind.TUNNEL_END, 99, b"\0"))
    assert not victim.end.receive(frames.Fail(99, 1), frames.Roster(99, ["x"]), frames.Done(99))
    assert net.router.accounts.dropped["late answer"] == 5
    assert net.router.accounts.dropped["late tunnel frame"] == 1
    victim.works()


def test_a_frame_that_was_refused_comes_back_as_it_was_or_not_at_all(net: Sites) -> None:
    victim = Victim(net)
    mallory = net.host("mallory", relay=2)
    mallory.serve("mallorys")
    net.settle()
    answer = victim.alice.request("mallorys", b"text")
    net.settle()
    (hop,) = victim.end.link.in_flight
    changed = data(Kind.REQUEST, 0, hop, flags=FLAG_REFUSED | Refusal.FULL << 4)
    assert "returned with another kind or length" in victim.end.receive_frame(changed)
    net.settle()
    assert answer.error is not None
    mallory.lose()
    victim.works()


def test_credit_is_given_for_pushes_alone_and_once(net: Sites) -> None:
    victim = Victim(net)
    mallory = net.host("mallory", relay=2)
    mallory.serve("mallorys")
    net.settle()
    victim.alice.push("mallorys")
    net.run()
    (hop,) = victim.end.link.in_flight
    assert not victim.end.receive(frames.Credit(0, Kind.PUSH, [hop]))
    assert not victim.end.receive(
        frames.Credit(0, Kind.PUSH, [hop, hop, 5])
    )  # this may be a late answer
    victim.alice.push("mallorys")
    net.run()
    (hop,) = victim.end.link.in_flight
    assert not victim.end.receive(frames.Credit(0, Kind.PUSH, [hop, hop]))
    answer = victim.alice.request("mallorys")
    net.run()
    (wan,) = [wan for wan in net.router.wans.values() if wan.site == "ber"]
    (hop,) = wan.in_flight
    frame = memoryview(bytearray(encode_control(frames.Credit(0, Kind.PUSH, [hop]))))
    with pytest.raises(PeerProtocolError, match="is not a push"):
        net.router.frame_in(wan, frame, 0, len(frame))
    assert not answer.done()


# -- bounds ------------------------------------------------------------------------------------------------------


def test_what_a_site_wants_is_bounded(net: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites_module, "MAX_WANTED", 4)
    monkeypatch.setattr(federation_module, "MAX_WANTED", 4)
    for entries in (
        {"clusters": [cluster(name=f"c{number}") for number in range(5)]},
        {"site_topics": [topic(name=f"t{number}") for number in range(5)]},
    ):
        end, _ = net.connect(0, 2)
        way = end.link.site_route
        assert not end.receive(interest(**entries))
        assert (len(way.clusters) + len(way.topics), way.dropped_entries) == (4, 1)
        assert not end.receive(link_frames.Interest(0, 9, reset=True, more=True, **entries))
        assert not end.receive(link_frames.Interest(0, 9, **entries))
        assert (len(way.clusters) + len(way.topics), way.dropped_entries) == (4, 7)
        # A change has the same bound as a snapshot.
        ((kind, (first, *_)),) = entries.items()
        named = "name" if kind == "clusters" else "filter"
        late = msgspec.structs.replace(first, **{named: "late"})
        assert not end.receive(link_frames.Interest(9, 10, **{kind: [late]}))
        assert (len(way.clusters) + len(way.topics), way.dropped_entries) == (4, 8)
        (status,) = net.router.federation.status(0, None)["sites"]
        assert status["untaken"] == 8
        # The end of a dropped entry breaks no rule, and does not free room twice.
        ended = [msgspec.structs.replace(e, **NOTHING[type(e)]) for e in entries[kind]]
        assert not end.receive(link_frames.Interest(10, 11, **{kind: ended}))
        assert (len(way.clusters) + len(way.topics), way.dropped_entries) == (0, 8)
        net.router.wan_down(end.link)
    Victim(net).works()


def test_members_of_a_survey_that_are_too_many_are_not_named(
    net: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys_module, "MAX_ROSTER", 4)
    victim = Victim(net)
    mallory = net.host("mallory", relay=2)
    mallory.serve("mallorys")
    net.settle()
    answers = victim.alice.survey("mallorys")
    net.run()
    (hop,) = victim.end.link.in_flight
    names = [f"m{number}" for number in range(4)]
    before = len(answers.roster_ids)
    assert not victim.end.receive(frames.Roster(hop, names))
    assert victim.end.link.dropped_entries == before
    assert not victim.end.receive(frames.Roster(hop, names))
    assert victim.end.link.dropped_entries == before + 4
    net.settle()
    assert len(answers.roster_ids) == 4
    mallory.lose()
    net.settle()
    assert answers.end is not None
    victim.works()


def test_refusals_are_counted_by_rule_up_to_a_bound(
    net: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "MAX_REFUSED", 3)
    net.router.sites.policy = Policy(["ours"], ["theirs"])
    end, _ = net.connect(0, 2)
    assert end.receive(*(declare(number, name=f"d{number}") for number in range(9))) == ""
    refused = net.router.sites.policy.refused
    assert len(refused) == 4
    assert refused["others"] == 6
    assert sum(refused.values()) == 9


def test_a_survey_of_a_site_names_at_most_so_many_that_it_only_counts(
    net: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.core.site_routes.MAX_NAMED", 3)
    victim = Victim(net)
    victim.end.receive(interest(clusters=[SiteCluster("ber", "many", KEY_ID, {Kind.SURVEY: 1 << 40}, 1 << 31)]))  # fmt: skip
    net.settle()
    answers = victim.alice.survey("many")
    net.ends.remove(victim.other)  # no answer comes back
    net.run()
    net.router.wan_down(victim.end.link)
    net.run()
    assert answers.end is not None
    assert answers.end[0] == ["ber:1", "ber:2", "ber:3"]


# -- our own site's gateways -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (interest(sites=[SiteEntry("ams")]), "advertises it as a remote site"),
        (interest(sites=[SiteEntry("no site")]), "site"),
        (interest(clusters=[cluster("ber")]), "which it does not reach"),
        (interest(site_topics=[topic("ber")]), "which it does not reach"),
        (interest(sites=[SiteEntry("ber")], clusters=[cluster(name="a b")]), "not a cluster"),
        (declare(hop_class=HopClass.TO_WAN, site=""), "must name a site with hop class TO_WAN"),
        (declare(hop_class=HopClass.MESH, site="ber"), "must name a site with hop class TO_WAN"),
        (
            declare(hop_class=HopClass.FROM_WAN, site="ams"),
            "must name a site with hop class TO_WAN",
        ),
        (declare(kind=Kind.REPLY, site="ber"), "must name a site with hop class TO_WAN"),
        (declare(hop_class=HopClass.LOCAL, site=""), "hop class 0 is not allowed over a link"),
    ],
)
def test_a_relay_of_our_own_site_that_breaks_a_rule_loses_its_link(
    net: Sites, body: frames.Control, why: str
) -> None:
    end = next(end for end in net.ends if end.router is net.router)
    feed(end.reader, encode_control(body))
    assert why in end.why
    assert not net.router.sites.site_routes


def test_sites_behind_one_gateway_are_bounded(net: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.core.reach.MAX_SITES", 3)
    end = next(end for end in net.ends if end.router is net.router)
    entries = [SiteEntry(f"s{number}") for number in range(4)]
    feed(end.reader, encode_control(interest(sites=entries)))
    clusters = [SiteCluster(f"s{number}", "db", KEY_ID, {64: 1}, 1) for number in range(4)]
    feed(end.reader, encode_control(link_frames.Interest(9, 10, clusters=clusters)))
    feed(end.reader, encode_control(link_frames.Interest(10, 11, sites=[SiteEntry("s3", False)])))
    assert not end.why
    assert list(net.router.sites.site_routes) == ["s0", "s1", "s2"]
    assert end.link.dropped_entries == 2


def test_what_is_sent_on_to_a_site_that_is_not_reached_comes_back_or_is_counted() -> None:
    net = Sites("ams", "ams")
    end = next(end for end in net.ends if end.router is net.router)
    bodies = [
        declare(0, Kind.PUBLISH, name="news", site="ber"),
        declare(1, Kind.REQUEST, site="ber"),
        declare(2, Kind.SURVEY, site="ber"),
    ]
    for body in bodies:
        feed(end.reader, encode_control(body))
    feed(end.reader, data(Kind.PUBLISH, 0, 0))
    feed(end.reader, data(Kind.REQUEST, 1, hop_for(end)))
    feed(end.reader, data(Kind.SURVEY, 2, hop_for(end) + 1))
    assert not end.why
    assert net.router.accounts.unwanted == 1
    kinds = [kind_of(frame) for frame in end.out]
    assert kinds == [Kind.REQUEST, Kind.FAIL]
    _, _, flags, *_ = HOP.unpack_from(end.out[0])
    assert flags == FLAG_REFUSED | Refusal.LEAVING << 4
    assert net.router.accounts.balance() == 0


def test_a_connection_to_our_own_site_is_refused() -> None:
    net = Sites("ams", "ams")
    end = WanEnd(net, net.router)
    with pytest.raises(PeerProtocolError, match="which is this site"):
        net.router.wan_up(end, net.routers[1].hello(0), "ams", 0)
    assert not net.router.wans
    assert net.router.deadline_us > net.router.now_us


# -- snapshots and goodbyes --------------------------------------------------------------------------------------


def test_a_snapshot_takes_the_place_of_what_was_known_and_leaves_alone_what_stays(
    net: Sites,
) -> None:
    end, _ = net.connect(0, 2)
    end.receive(interest(clusters=[cluster(name="a"), cluster(name="b")], site_topics=[topic()]))
    (way,) = net.router.sites.site_routes["ber"].values()
    load = way.load(Kind.REQUEST, "b", KEY_ID)
    # The snapshot comes in parts; the first one alone changes nothing.
    parts = {"clusters": [cluster(name="b")]}, {"clusters": [cluster(name="c")]}
    end.receive(link_frames.Interest(0, 20, reset=True, more=True, **parts[0]))
    assert sorted(name for name, _ in way.clusters) == ["a", "b"]
    end.receive(link_frames.Interest(0, 20, **parts[1]))
    assert sorted(name for name, _ in way.clusters) == ["b", "c"]
    assert not way.topics
    assert way.load(Kind.REQUEST, "b", KEY_ID) is load
    assert net.router.interest.subscribers("news", KEY_ID) == ([], {})


def test_a_change_that_does_not_follow_is_asked_for_again(net: Sites) -> None:
    end, other = net.connect(0, 2)
    version = end.link.replica.version
    end.receive(link_frames.Interest(version + 1, version + 2, clusters=[cluster()]))
    assert [resync.version for resync in end.said(link_frames.Resync)] == [version]
    end.receive(link_frames.Interest(version + 2, version + 3, clusters=[cluster(name="late")]))
    assert len(end.said(link_frames.Resync)) == 1  # the snapshot will contain it
    net.settle()
    assert not end.why
    assert not other.why
    (way,) = net.router.sites.site_routes["ber"].values()
    assert not way.clusters
    assert net.router.federation.resyncs == 1


def test_a_beat_of_another_version_has_a_lost_change_made_good(net: Sites) -> None:
    _, other = net.connect(0, 2)
    other.tamper = lambda frame: () if kind_of(frame) == Kind.INTEREST else (frame,)
    net.host("bob", relay=2).serve("db", reply(b"pong"))
    net.settle()
    (way,) = net.router.sites.site_routes["ber"].values()
    assert not way.clusters
    other.tamper = lambda frame: (frame,)
    net.pass_time(2.5)
    assert [name for name, _ in way.clusters] == ["db"]


def test_a_snapshot_of_a_gateway_leaves_the_ways_over_it_alone(net: Sites) -> None:
    net.connect(1, 2)
    net.host("bob", relay=2).serve("db", reply(b"pong"))
    net.settle()
    (way,) = net.router.sites.site_routes["ber"].values()
    assert not way.own
    net.routers[1].advertiser.on_resync(net.routers[1].links[net.router.relay_id], None)
    net.settle()
    assert list(net.router.sites.site_routes["ber"].values()) == [way]
    assert [name for name, _ in way.clusters] == ["db"]


def test_a_gateway_that_says_goodbye_is_not_waited_for(net: Sites) -> None:
    end, _ = net.connect(0, 2)
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    bob.serve("db", reply(b"pong"))
    inbox = bob.subscribe("news")
    net.settle()
    alice.publish("news", b"one")
    net.settle()
    end.receive(frames.Bye())
    assert end.finished
    answer = alice.request("db", timeout_ms=5_000)
    net.run()
    with pytest.raises(NoMembers):
        _ = answer.value
    assert not inbox.gaps


def test_an_error_of_the_other_gateway_ends_the_connection_with_its_words(net: Sites) -> None:
    end, _ = net.connect(0, 2)
    end.receive(frames.Error("you broke\x1b[2J it"))
    assert end.finished
    assert end.why.startswith("the other gateway reported: you broke")
    assert "\x1b" not in end.why
    assert not net.router.sites.site_routes


def test_another_sites_text_about_a_call_cannot_move_a_cursor_here() -> None:
    net = Sites("ams", "ber")
    ours, _ = net.connect(0, 1)
    alice = net.host("alice")
    net.host("bob", relay=1).serve("db")
    net.settle()
    answer = alice.request("db")
    net.run()
    (asked,) = ours.link.in_flight
    survey = alice.survey("db")
    net.run()
    (surveyed,) = ours.link.in_flight.keys() - {asked}
    ours.receive(
        frames.Fail(asked, Cause.REFUSED, "no\x1b[2J"),
        frames.Roster(surveyed, ["bob\x1b[2J"]),
        frames.Done(surveyed, ["bob\x1b[2J"]),
    )
    net.run()
    assert answer.error is not None
    assert survey.end is not None
    shown = [str(answer.error), *survey.roster_ids, *survey.end[0]]
    assert len(shown) >= 3
    assert not any("\x1b" in text for text in shown)


def test_a_gateway_that_is_about_to_stop_withdraws_what_it_advertised(net: Sites) -> None:
    net.connect(0, 2)
    net.connect(1, 2)
    alice, bob = net.host("alice", relay=1), net.host("bob", relay=2)
    carol = net.host("carol")
    carol.serve("carols")
    bob.serve("db", reply(b"pong"))
    net.settle()
    ber = net.routers[2].sites.site_routes["ams"]
    assert [len(way.clusters) for way in ber.values()] == [1, 1]
    net.router.drain(10_000)
    bob.subscribe("news")
    net.settle()
    # Ber uses the other gateway, and so do our relays; changes break nothing.
    assert sorted(len(way.clusters) for way in ber.values()) == [0, 0]
    (way,) = net.routers[1].sites.site_routes["ber"].values()
    assert way.own
    answer = alice.request("db")
    net.settle()
    assert answer.value == b"pong"
    assert all(not end.why for end in net.ends)


@pytest.mark.parametrize("received", [False, True])
def test_a_connection_that_is_lost_in_a_drain_reports_what_was_on_its_way(received: bool) -> None:
    net = Sites("ams", "ber", "ber")
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    ends = net.connect(0, 1)
    inbox = bob.subscribe("news")
    net.settle()
    alice.publish("news", b"one")
    net.settle()
    net.routers[1].drain(10_000)
    if received:
        net.settle()
    alice.publish("news", b"two")
    alice.speak()
    net.lose(ends)
    assert inbox.payloads == [b"one"]
    assert len(inbox.gaps) == (not received), "after its answer nothing is on its way"


@pytest.mark.parametrize("received", [False, True])
def test_a_link_that_is_lost_in_a_drain_reports_to_the_site_behind_it_what_was_on_its_way(
    received: bool,
) -> None:
    net = Sites("ams", "ams", "ber")
    ends = net.ends[0], net.ends[1]
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    net.connect(1, 2)
    inbox = bob.subscribe("news")
    net.settle()
    alice.publish("news", b"one")
    net.settle()
    net.routers[1].drain(10_000)
    if received:
        net.settle()
    alice.publish("news", b"two")
    alice.speak()
    net.cut(ends)
    net.settle()
    assert inbox.payloads == [b"one"]
    assert len(inbox.gaps) == (not received)


def test_a_lost_connection_reports_the_loss_to_the_relays_behind_it(net: Sites) -> None:
    ends = net.connect(0, 2)
    alice, bob = net.host("alice", relay=2), net.host("bob", relay=1)
    inbox, other = bob.subscribe("news"), bob.subscribe("jobs", group="workers")
    net.settle()
    alice.publish("news", b"one")
    alice.publish("jobs", b"two")
    net.settle()
    assert (inbox.payloads, other.payloads) == ([b"one"], [b"two"])
    net.lose(ends)
    assert [(lost.count, lost.cause) for lost in inbox.gaps] == [
        (None, "a link on the way was lost")
    ]
    assert len(other.gaps) == 1


def test_a_bundle_crosses_once_although_one_copy_lags_behind(net: Sites) -> None:
    # Both gateways of Ams reach Ber; the first does not know the group yet.
    first, second = net.connect(0, 2)[0], net.connect(1, 2)[0]
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    plain, group = bob.subscribe("news"), bob.subscribe("news", group="workers")
    net.settle()
    first.receive(interest(site_topics=[topic()]))
    crossed: list[bytes] = []

    def count(frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.PUBLISH:
            crossed.append(frame)
        return [frame]

    first.tamper = second.tamper = count
    alice.publish("news", b"one")
    net.settle()
    assert len(crossed) == 1
    assert (plain.payloads, group.payloads) == ([b"one"], [b"one"])


def test_a_loss_of_messages_that_a_site_does_not_import_is_not_reported(net: Sites) -> None:
    end, _ = net.connect(0, 2)
    net.router.sites.policy = Policy([], ["news"])
    alice = net.host("alice")
    news, other = alice.subscribe("news"), alice.subscribe("other")
    for name in ("news", "other"):
        assert not end.receive(
            frames.Gap(Kind.PUBLISH, name, KEY_ID, SENDER, 0, 1, "lost", site="ams")
        )
    net.settle()
    assert [lost.count for lost in news.gaps] == [None]
    assert other.gaps == []


def test_a_beat_looks_only_at_the_losses_whose_second_is_over(net: Sites) -> None:
    """However many losses the other site makes up: it also chooses how often it beats."""

    class CountingDict(dict[Any, int]):
        looked = 0

        def __getitem__(self, key: Any) -> int:
            self.looked += 1
            return super().__getitem__(key)

        def items(self) -> Any:
            raise AssertionError("it looks at all")

    end, _ = net.connect(0, 2)
    wan = net.router.sites.wans[net.routers[2].relay_id]
    reports = wan.reported_us = CountingDict()

    def lose(*numbers: int) -> None:
        for number in numbers:
            assert not end.receive(
                frames.Gap(Kind.PUBLISH, f"n.{number}", KEY_ID, SENDER, 0, 1, "lost", site="ams")
            )

    def beat(now_us: int) -> list[str]:
        reports.looked = 0
        net.router.federation.beat(wan, wan.replica.version, now_us)
        return [name for _, name, *_ in reports]

    lose(*range(50))
    now_us = net.router.now_us
    net.router.now_us += 600_000
    lose(*range(50, 100))
    assert len(beat(now_us + 999_999)) == 100
    assert reports.looked == 1
    net.router.now_us = now_us + 1_000_000
    lose(3)  # reported again, and for another second
    assert beat(now_us + 1_500_000) == [*(f"n.{number}" for number in range(50, 100)), "n.3"]
    assert reports.looked == 50
    assert beat(now_us + 1_600_000) == ["n.3"]
    assert beat(now_us + 2_000_000) == []
    assert wan.reported_us is reports


def test_a_group_that_left_here_and_still_is_in_another_site_breaks_nothing(
    net: Sites,
) -> None:
    end, _ = net.connect(0, 2)
    net.connect(0, 3)
    net.host("bob", relay=3).subscribe("jobs", group="workers")
    net.settle()
    end.receive(declare(0, Kind.PUBLISH, name="jobs", plain=False, groups=["workers"]))
    assert not end.receive_frame(data(Kind.PUBLISH, 0, 0))
    alice = net.host("alice")
    inbox = alice.subscribe("other")
    alice.publish("jobs", b"one")
    net.settle()
    assert not inbox.payloads
    assert net.router.accounts.unwanted == 1
    assert net.router.accounts.balance() == 0


def test_a_loss_whose_number_nobody_knows_is_reported_in_the_site_it_was_sent_to(
    net: Sites,
) -> None:
    # A link between a publisher's relay and its gateway is lost, which is reported to the other site.
    ends = net.connect(1, 2)
    alice, bob = net.host("alice"), net.host("bob", relay=2)
    inbox = bob.subscribe("news")
    net.settle()
    alice.publish("news", b"one")
    net.settle()
    link = tuple(end for end in net.ends if not isinstance(end, WanEnd))
    net.cut(link)
    net.settle()
    assert inbox.payloads == [b"one"]
    assert [lost.count for lost in inbox.gaps] == [None]
    assert not ends[0].why
    assert UNKNOWN_COUNT not in [lost.count for lost in inbox.gaps]


def test_a_relay_that_knows_no_site_learns_it_from_a_link() -> None:
    net = Sites("ams", "")
    assert [router.site for router in net.routers] == ["ams", ""]
    net.link(0, 1)
    assert [router.site for router in net.routers] == ["ams", "ams"]
    assert isinstance(net.routers[1], Router)
