"""All patterns of messages, between members on three hosts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.kit import Failed, Network, Program, received_by
from support.namespaces import Lan

pytestmark = [pytest.mark.timeout(120), pytest.mark.net]


class Mesh:
    """Three hosts, each with a program that serves "echo" and one that does not."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.relays = network.hosts("abc")
        network.meshed()
        self.a, self.b, self.c = self.members = network.members(*self.relays)
        self.caller = self.relays[0].program("caller")
        self.caller.sees_members(3)

    def only(self, program: Program, cluster: str) -> None:
        """Let a single program serve a cluster, and return when the caller's relay knows it."""
        program.do("serve", cluster=cluster)
        self.caller.sees_members(1, cluster)


@pytest.fixture(scope="module")
def mesh(_hosts_can_be_built: None) -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory(prefix="iris-hosts-") as directory, Lan() as lan:
        built = Mesh(Network(lan, Path(directory)))
        yield built
        # After every test all accounts must balance, and no relay may hold messages.
        for relay in built.relays:
            status = relay.settled()
            assert {link["held"] for link in status["links"]} == {0}


@pytest.fixture(autouse=True)
def _forget(mesh: Mesh) -> None:
    for member in mesh.members:
        member.do("forget")


# -- one member ----------------------------------------------------------------------------------------------------


def test_a_request_is_answered_on_another_host(mesh: Mesh) -> None:
    mesh.only(mesh.b, "far")
    assert mesh.caller.request("far", "hello") == "b: hello"
    assert mesh.caller.request("far", "empty") == ""
    assert mesh.c.request("far", "hello") == "b: hello"


def test_a_handler_that_fails_on_another_host_is_reported_to_the_caller(mesh: Mesh) -> None:
    mesh.only(mesh.b, "failing")
    with pytest.raises(Failed, match="on purpose") as failed:
        mesh.caller.request("failing", "fail")
    assert (failed.value.error, failed.value.may_have_run) == ("RemoteError", True)


def test_a_cluster_that_nobody_serves_has_no_members_at_once(mesh: Mesh) -> None:
    with pytest.raises(Failed) as failed:
        mesh.caller.request("nobody", "hello", timeout=3600.0)
    assert (failed.value.error, failed.value.may_have_run) == ("NoMembers", False)


@pytest.mark.parametrize("size", [65_537, 1_000_000])
def test_a_large_request_comes_back_whole_from_another_host(size: int, mesh: Mesh) -> None:
    mesh.only(mesh.c, f"large-{size}")
    text = "x" * size
    assert mesh.caller.request(f"large-{size}", text) == f"c: {text}"


def test_a_request_that_is_not_answered_in_time_says_that_it_may_have_run(mesh: Mesh) -> None:
    mesh.only(mesh.b, "slow")
    with pytest.raises(Failed) as failed:
        mesh.caller.request("slow", "hold", timeout=0.5)
    assert (failed.value.error, failed.value.may_have_run) == ("RequestTimeout", True)
    mesh.b.do("release")


def test_many_requests_are_shared_by_the_members_of_all_hosts(mesh: Mesh) -> None:
    for member in mesh.members:
        member.do("serve", cluster="shared", concurrency=2)
    mesh.caller.sees_members(3, "shared")
    ended = mesh.caller.do("requests", cluster="shared", count=3000, in_flight=24, timeout=20.0)
    assert sum(ended.values()) == 3000
    assert set(ended) == {"a", "b", "c"}


def test_a_full_member_refuses_and_another_host_answers(mesh: Mesh) -> None:
    """Each runs one call at a time: calls that find their host busy run elsewhere, and none runs twice."""
    for member in mesh.members:
        member.do("serve", cluster="single", concurrency=1)
    mesh.caller.sees_members(3, "single")
    ended = mesh.caller.do("requests", cluster="single", count=600, in_flight=3, timeout=20.0)
    assert sum(ended.values()) == 600
    assert set(ended) <= {"a", "b", "c"}
    ran = [number for member in mesh.members for number in member.received("request", 0)]
    assert sorted(ran, key=int) == [str(number) for number in range(600)]


def test_each_push_is_handled_once_somewhere(mesh: Mesh) -> None:
    numbers = [str(number) for number in range(300)]
    mesh.only(mesh.c, "far-work")
    mesh.caller.do("push", cluster="far-work", payloads=numbers)
    assert sorted(mesh.c.received("push", 300), key=int) == numbers
    for member in mesh.members:
        member.do("forget")
    mesh.caller.do("push", cluster="echo", payloads=numbers)
    assert sorted(received_by(mesh.members, "push", 300), key=int) == numbers


@pytest.mark.parametrize(("count", "size"), [(200, 40_000), (3, 3_000_000), (2000, 100)])
def test_a_tunnel_to_another_host_keeps_every_message_in_order(
    count: int, size: int, mesh: Mesh
) -> None:
    cluster = f"tunnel-{size}"
    mesh.only(mesh.b, cluster)
    right = mesh.caller.do("tunnel", cluster=cluster, count=count, size=size, timeout=20.0)
    assert right == count


# -- all members ---------------------------------------------------------------------------------------------------


def test_a_survey_is_answered_by_every_host(mesh: Mesh) -> None:
    for asker in (mesh.caller, *mesh.members):
        answered = asker.do("survey", cluster="echo", payload="who", timeout=20.0)
        assert answered["answers"] == ["a: who", "b: who", "c: who"]
        assert answered["missing"] == []
        assert answered["failed"] == {}


def test_a_broadcast_reaches_every_host_once_and_in_order(mesh: Mesh) -> None:
    numbers = [str(number) for number in range(500)]
    mesh.caller.do("broadcast", cluster="echo", payloads=numbers)
    for member in mesh.members:
        assert member.received("broadcast", 500) == numbers


def test_twenty_thousand_publications_arrive_once_and_in_order_on_every_host(mesh: Mesh) -> None:
    count = 20_000
    for member in mesh.members:
        member.do("subscribe", pattern="news.>")
    mesh.caller.reaches("news.ready", *mesh.members)
    mesh.caller.do("publish", topic="news.today", first=0, count=count)
    for member in mesh.members:
        assert member.received("publish", count) == [str(number) for number in range(count)]
        assert member.received("gap", 0) == []
        member.do("leave", cluster="news.>")


def test_a_queue_group_over_several_hosts_gets_each_publication_once(mesh: Mesh) -> None:
    count = 3000
    mesh.a.do("subscribe", pattern="orders.>")
    for worker in (mesh.b, mesh.c):
        worker.do("subscribe", pattern="orders.>", group="workers")
    mesh.caller.reaches("orders.ready", *mesh.members)
    mesh.caller.do("publish", topic="orders.new", first=0, count=count)
    everything = [str(number) for number in range(count)]
    assert mesh.a.received("publish", count) == everything
    assert sorted(received_by((mesh.b, mesh.c), "publish", count), key=int) == everything
    for member in mesh.members:
        member.do("leave", cluster="orders.>")


# -- who is there --------------------------------------------------------------------------------------------------


def test_members_of_other_hosts_are_seen_coming_and_leaving(mesh: Mesh) -> None:
    for there, member in enumerate(mesh.members, 1):
        member.do("serve", cluster="visited")
        ids = mesh.caller.do("wait_members", cluster="visited", count=there, timeout=20.0)
        assert len(set(ids)) == there
    hosts = {member_id.split(".")[0] for member_id in ids}
    assert hosts == {relay.id for relay in mesh.relays}
    for left, member in enumerate(mesh.members, 1):
        member.do("leave", cluster="visited")
        mesh.caller.sees_members(3 - left, "visited")


def test_a_relay_shows_its_links(mesh: Mesh) -> None:
    for relay in mesh.relays:
        links = relay.links()
        assert set(links) == {other.id for other in mesh.relays} - {relay.id}
        for link in links.values():
            assert link["rtt_us"] > 0
            assert link["in_frames"] > 0
            assert link["out_frames"] > 0
            assert "7430" in link["address"] or not link["dialled"]
