"""Three sites of two gateways and one more relay each, connected through proxies: their view of each other, and
faults.

`make proof AREA=sites` runs the tests under load at large counts.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hosts.kit import Failed, Program, received_by, wait_until
from hosts.sites import Federation
from proofs.scenarios import sites
from support.namespaces import Lan

pytestmark = [pytest.mark.timeout(180), pytest.mark.net]

ONE_WAY_S = 0.02
COUNT = 2_000
SEED = 20_241


class World:
    """The three sites, a program at each gateway, and one at the third relay of each site that only calls."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        gateways = (relay for site in federation.sites.values() for relay in site.relays[:2])
        self.programs = {relay.name: relay.program(relay.name) for relay in gateways}
        self.callers = {
            name: federation.program(name, 2, f"{name}-caller") for name in federation.sites
        }

    def all(self) -> list[Program]:
        return [*self.programs.values(), *self.callers.values()]

    def sees(self, site: str, cluster: str, home: int, away: dict[str, int]) -> None:
        """Return when a site's caller knows these numbers of local and remote members."""
        caller = self.callers[site]
        caller.sees_members(home, cluster)
        wait_until(
            lambda: caller.do("sites", cluster=cluster) == away, f"{site} sees {away} of {cluster}"
        )


@pytest.fixture(scope="module")
def world(_hosts_can_be_built: None) -> Iterator[World]:
    with (
        tempfile.TemporaryDirectory(prefix="iris-sites-") as directory,
        Lan() as lan,
        Federation(
            lan, Path(directory), plain=1, delay_s=ONE_WAY_S, arguments=store_at_each(directory)
        ) as federation,
    ):
        federation.joined()
        yield World(federation)
        # After every test all accounts must balance, and no relay may hold messages.
        federation.settled()


@pytest.fixture(autouse=True)
def _clean(world: World) -> Iterator[None]:
    for program in world.all():
        program.do("forget")
    yield
    for program in world.all():
        program.do("leave_all")


def store_at_each(directory: str) -> Callable[[str], Sequence[str]]:
    """Return the further arguments of a host's gateway: the first of us and of eu has a store."""
    return lambda host: ("--data", f"{directory}/{host}") if host in ("us1", "eu1") else ()


def serve(cluster: str, *programs: Program) -> None:
    """Let programs serve a cluster."""
    for command in [program.begin("serve", cluster=cluster) for program in programs]:
        command.result()


# -- calls ---------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_in_another_site_where_nobody_at_home_serves(world: World) -> None:
    serve("far", world.programs["us2"])
    world.sees("eu", "far", 0, {"us": 1})
    assert world.callers["eu"].request("far", "hello") == "us2: hello"
    assert world.callers["eu"].request("far", "") == "us2: "


def test_requests_stay_home_fail_over_and_return(world: World) -> None:
    home, away, caller = world.programs["eu2"], world.programs["us1"], world.callers["eu"]
    serve("work", home, away)
    world.sees("eu", "work", 1, {"us": 1})
    ended = caller.do("requests", cluster="work", count=200, in_flight=4, timeout=20.0)
    assert ended == {"eu2": 200}
    home.do("leave", cluster="work")
    wait_until(lambda: caller.request("work", "x") == "us1: x", "us answers")
    serve("work", home)
    wait_until(lambda: caller.request("work", "x") == "eu2: x", "eu answers again")
    ended = caller.do("requests", cluster="work", count=200, in_flight=4, timeout=20.0)
    assert ended == {"eu2": 200}


def test_a_request_refused_by_all_at_home_runs_at_once_in_another_site(world: World) -> None:
    home, away, caller = world.programs["eu2"], world.programs["us1"], world.callers["eu"]
    home.do("serve", cluster="tight", concurrency=1, limit_bytes=1)
    serve("tight", away)
    world.sees("eu", "tight", 1, {"us": 1})
    held = caller.begin("request", cluster="tight", payload="hold it", timeout=20.0)
    home.event("holding")
    assert caller.request("tight", "second") == "us1: second"
    home.do("release")
    assert held.result() == "eu2: hold it"


def test_a_site_is_named_on_purpose(world: World) -> None:
    serve("who", *(world.programs[f"{site}1"] for site in ("eu", "us", "ap")))
    caller = world.callers["eu"]
    world.sees("eu", "who", 1, {"ap": 1, "us": 1})
    assert [caller.request(f"{site}:who", "x") for site in ("eu", "us", "ap")] == [
        "eu1: x", "us1: x", "ap1: x",
    ]  # fmt: skip
    with pytest.raises(Failed, match=r"connected to a site .mars."):
        caller.request("mars:who", "x")
    world.programs["us1"].do("leave", cluster="who")
    wait_until(lambda: caller.do("sites", cluster="who") == {"ap": 1}, "us has nobody")
    with pytest.raises(Failed, match="NoMembers"):
        caller.request("us:who", "x")


def test_pushes_and_tunnels_reach_another_site(world: World) -> None:
    serve("far", world.programs["ap1"])
    world.sees("eu", "far", 0, {"ap": 1})
    world.callers["eu"].do("push", cluster="far", payloads=[str(n) for n in range(50)])
    assert Counter(world.programs["ap1"].received("push", 50)) == Counter(map(str, range(50)))
    assert (
        world.callers["eu"].do("tunnel", cluster="far", count=200, size=20_000, timeout=20.0) == 200
    )


def test_surveys_and_broadcasts_reach_the_federation_or_the_site(world: World) -> None:
    serve("all", *world.programs.values())
    for site in world.federation.sites:
        others = {name: 2 for name in world.federation.sites if name != site}
        world.sees(site, "all", 2, others)
    caller = world.callers["eu"]
    everywhere = caller.do("survey", cluster="all", payload="x", timeout=20.0)
    assert everywhere["answers"] == sorted(f"{name}: x" for name in world.programs)
    assert not everywhere["missing"]
    home = caller.do("survey", cluster="all", payload="x", timeout=20.0, scope="site")
    assert home["answers"] == ["eu1: x", "eu2: x"]
    caller.do("broadcast", cluster="all", payloads=["federation"])
    caller.do("broadcast", cluster="all", payloads=["site"], scope="site")
    caller.do("broadcast", cluster="all", payloads=["federation again"])
    for name, program in world.programs.items():
        wanted = ["federation", "federation again"]
        expected = Counter([*wanted, "site"] if name.startswith("eu") else wanted)
        wait_until(
            lambda p=program, e=expected: Counter(p.do("received", what="broadcast")) == e, name
        )  # type: ignore[misc]  # bound at once
        assert not program.do("received", what="gap"), name


# -- publications --------------------------------------------------------------------------------------------------


def test_every_subscriber_gets_one_copy_in_order_over_the_ring(world: World) -> None:
    subscribers = list(world.programs.values())
    for program in subscribers:
        program.do("subscribe", pattern="ring.>")
    for caller in world.callers.values():
        caller.reaches("ring.probe", *subscribers)
    for program in subscribers:
        program.do("forget_probes")
    sending = [
        caller.begin("publish", topic=f"ring.{site}", first=0, count=COUNT)
        for site, caller in world.callers.items()
    ]
    for command in sending:
        command.result()
    for program in subscribers:
        named = program.received("named", len(sending) * COUNT)
        for site in world.callers:
            of_site = [int(item.split()[1]) for item in named if item.startswith(f"ring.{site} ")]
            assert of_site == list(range(COUNT)), (program.name, site)
        assert len(named) == len(sending) * COUNT
        assert not program.do("received", what="gap")


def test_a_queue_group_gives_one_member_in_the_federation_the_nearest_first(world: World) -> None:
    here, there = world.programs["eu2"], [world.programs["us1"], world.programs["us2"]]
    for program in (here, *there):
        program.do("subscribe", pattern="jobs.>", group="workers")
    watcher = world.programs["ap1"]
    watcher.do("subscribe", pattern="jobs.>")
    caller = world.callers["eu"]
    caller.reaches("jobs.probe", here, watcher)
    caller.do("publish", topic="jobs.eu", first=0, count=100)
    assert here.received("publish", 100) == [str(n) for n in range(100)]
    assert [p.do("received", what="publish") for p in there] == [[], []]
    for program in (here, *there):
        program.do("forget_probes")
    far = world.callers["ap"]

    def known() -> bool:
        far.do("publish", topic="jobs.probe", first=-1, count=1)
        return any(program.do("received", what="probe") for program in (here, *there))

    wait_until(known, "ap knows that other sites have workers")
    far.do("publish", topic="jobs.ap", first=100, count=100)
    got = received_by([here, *there], "publish", 200)
    assert sorted(map(int, got)) == list(range(200))
    assert sorted(map(int, watcher.received("publish", 200))) == list(range(200))


def test_what_nobody_wants_over_there_costs_no_wan_byte(world: World) -> None:
    federation = world.federation
    wanted, caller = world.programs["us1"], world.callers["eu"]
    wanted.do("subscribe", pattern="quiet.>")
    caller.reaches("quiet.probe", wanted)

    def publish() -> None:
        caller.do("publish", topic="quiet.x", first=0, count=COUNT)
        # ap is as far away, so some messages would have arrived there by now.
        assert len(wanted.received("publish", COUNT)) == COUNT

    grown, took_s = _growth(federation, "ap", publish)
    # Beats and acknowledgements continue, for as long as a slow machine takes.
    idle, _ = _growth(federation, "ap", lambda: time.sleep(took_s))
    # 2,000 messages of 4 bytes with their seals would be many more bytes.
    assert grown < idle + 6_000, (idle, grown)


def _growth(federation: Federation, site: str, work: Callable[[], object]) -> tuple[int, float]:
    """Do `work`; return the bytes that a site received meanwhile, and the time."""
    before, began_s = federation.sites[site].received_bytes, time.monotonic()
    work()
    took_s = time.monotonic() - began_s
    return federation.sites[site].received_bytes - before, took_s


# -- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_of_another_site_is_read_and_mirrored_by_its_name(world: World) -> None:
    recorder, reader = world.callers["us"], world.callers["eu"]
    recorder.do("record", name="log", topic="log.>")
    recorder.do("publish", topic="log.us", first=0, count=50)
    wait_until(lambda: len(recorder.do("read", name="log")) == 50, "all is recorded")
    hears_of(reader, "us:log")
    assert reader.do("read", name="us:log") == [str(n) for n in range(50)]
    with pytest.raises(Failed, match="NoStream"):
        reader.do("read", name="log")
    assert reader.do("mirror", source="us:log", name="log-us") == 50
    recorder.do("publish", topic="log.us", first=50, count=25)
    wait_until(lambda: len(recorder.do("read", name="log")) == 75, "all is recorded")
    assert reader.do("mirror", source="us:log", name="log-us") == 25
    assert reader.do("read", name="log-us") == [str(n) for n in range(75)]


def hears_of(reader: Program, stream: str) -> None:
    """Return when a stream of another site is known at the relay of `reader`."""

    def known() -> bool:
        try:
            reader.do("read", name=stream)
        except Failed as err:
            return err.error != "NoStream"
        return True

    wait_until(known, f"{reader.name} hears of {stream}")


# -- under load ----------------------------------------------------------------------------------------------------


def test_the_ring_of_three_gives_exactly_one_copy_at_a_rate(world: World) -> None:
    sites.ring(world.federation, 15_000)


def test_wan_connections_that_break_lose_only_what_is_reported(world: World) -> None:
    sites.cuts(world.federation, 4, SEED)


def test_a_gateway_that_dies_or_freezes_leaves_its_share_to_the_other(world: World) -> None:
    sites.gateway_kills(world.federation, 3, SEED)


def test_a_site_that_is_lost_is_missed_and_found_again(world: World) -> None:
    sites.site_lost(world.federation)


def test_another_site_answers_when_the_last_member_at_home_is_lost(world: World) -> None:
    sites.failover(world.federation, 1)


# -- rules ---------------------------------------------------------------------------------------------------------


def test_exports_and_imports_are_enforced(lan: Lan, tmp_path: Path) -> None:
    rules = {
        "eu": ("--export", "open", "--export", "news.>", "--export", "!news.secret.>"),
        "us": (
            "--import",
            "open",
            "--import",
            "hidden",
            "--import",
            "news.>",
            "--import",
            "gossip",
        ),
    }
    rules["eu"] += ("--data", str(tmp_path / "data"))
    arguments = lambda host: rules[host[:2]]  # noqa: E731 - it fits the line
    with Federation(lan, tmp_path, ("eu", "us"), gateways=1, arguments=arguments) as federation:
        federation.joined()
        _enforced(federation)


def _enforced(federation: Federation) -> None:
    member = federation.program("eu", name="member")
    caller = federation.program("us", name="caller")
    for cluster in ("open", "hidden", "third"):
        member.do("serve", cluster=cluster)
    member.do("record", name="open", topic="open.>")
    wait_until(lambda: caller.do("sites", cluster="open") == {"eu": 1}, "us sees what eu exports")
    assert caller.request("open", "x") == "member: x"
    for cluster in ("hidden", "third"):
        assert caller.do("sites", cluster=cluster) == {}
        with pytest.raises(Failed, match="NoMembers"):
            caller.request(cluster, "x")
    caller.do("subscribe", pattern=">")
    member.reaches("news.probe", caller)
    for topic in ("news.plain", "news.secret.plan", "gossip", "news.last"):
        member.do("publish", topic=topic, first=1, count=1)
    wait_until(lambda: "news.last 1" in caller.do("received", what="named"), "the last has come")
    assert caller.do("received", what="named") == ["news.plain 1", "news.last 1"]
    refused = federation.sites["us"].relays[0].status()["sites_refused"]
    assert not refused, "eu advertised nothing that us would have to refuse"
    member.do("publish", topic="open.x", first=5, count=1)
    wait_until(lambda: member.do("read", name="open") == ["5"], "it is recorded")
    hears_of(caller, "eu:open")
    assert caller.do("read", name="eu:open") == ["5"]
