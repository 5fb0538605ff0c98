"""`member=`: a call goes to the member that is named, in one process, between processes and over a link."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio

import pytest
from integration.kit import cut, echo_service, named
from support.links import Site, linked
from support.relays import client as connected
from support.waiting import eventually, until

import iris
import iris.blocking
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)


def numbered(number: int) -> iris.Service:
    service = iris.Service("shards")
    service.on_request(lambda payload: f"{number}")
    service.on_push(lambda payload: pushed.append(number))
    pushed: list[int] = []
    service.pushed = pushed  # type: ignore[attr-defined]

    @service.on_tunnel
    async def tunnel(line: iris.Tunnel) -> None:
        await line.send(b"%d" % number)

    return service


async def test_every_kind_of_call_goes_to_the_member_that_is_named() -> None:
    services = [numbered(number) for number in range(3)]
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as other:
        async with (
            other.serve(services[0]),
            other.serve(services[1]) as one,
            other.serve(services[2]),
        ):
            for _ in range(20):
                reply = await client.request("shards", b"", timeout=5.0, member=one.member_id)
                assert reply == b"1"
                await client.push("shards", b"", member=one.member_id)
            async with client.tunnel("shards", timeout=5.0, member=one.member_id) as line:
                assert await line.recv() == b"1"
            tunnel = await client.open_tunnel("shards", timeout=5.0, member=one.member_id)
            assert await tunnel.recv() == b"1"
            await tunnel.close()
            await client.flush()
            await until(lambda: services[1].pushed == [1] * 20)  # type: ignore[attr-defined]
            assert services[0].pushed == services[2].pushed == []  # type: ignore[attr-defined]
        for call in (
            client.request("shards", b"", timeout=5.0, member=one.member_id),
            client.open_tunnel("shards", timeout=5.0, member=one.member_id),
        ):
            with pytest.raises(iris.NoMembers, match=f"member {one.member_id} has left") as caught:
                await call
            assert not caught.value.may_have_run
        await client.push("shards", b"", member=one.member_id)
        await client.flush()
        assert isinstance(client.losses[-1].error, iris.NoMembers)


async def test_a_member_that_reconnects_is_another_one() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, named(cluster, "m") as other:
        async with other.serve(echo_service("db")) as binding:
            before = binding.member_id
            assert await client.request("db", b"x", timeout=5.0, member=before) == b"x"
            await cut(cluster, "m")
            await until(lambda: binding.member_id not in ("", before))
            with pytest.raises(iris.NoMembers, match="has left"):
                await client.request("db", b"x", timeout=5.0, member=before)
            assert await client.request("db", b"x", timeout=5.0, member=binding.member_id) == b"x"


async def test_a_member_that_serves_no_requests_says_so_itself() -> None:
    service = iris.Service("news")
    service.on_broadcast(lambda payload: None)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service) as one:
        with pytest.raises(iris.RemoteError, match="does not serve requests") as caught:
            await client.request("news", b"x", timeout=5.0, member=one.member_id)
        assert not caught.value.may_have_run
        with pytest.raises(iris.NoMembers, match="does not serve tunnels"):
            await client.open_tunnel("news", timeout=5.0, member=one.member_id)
        assert cluster.relay.router.accounts.report(0)["held"] == 0
        assert one.running == 0


@pytest.mark.parametrize(
    "member", ["", "7", "abc.7", f"{'ab' * 16}.0", f"{'AB' * 16}.7", f"{'ab' * 16}.{1 << 63}"]
)
async def test_what_is_not_a_member_id_is_refused_before_anything_is_sent(member: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        for call in (
            client.request("db", b"", timeout=1.0, member=member),
            client.push("db", b"", member=member),
            client.open_tunnel("db", timeout=1.0, member=member),
        ):
            with pytest.raises(iris.InvalidName, match="is not a member id; use an id from"):
                await call
        assert client.sent_messages == 0


async def test_a_member_and_a_site_exclude_each_other() -> None:
    member = f"{'ab' * 16}.7"
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.InvalidName, match="names a site"):
            await client.request("eu:db", b"", timeout=1.0, member=member)
        with pytest.raises(iris.NoMembers, match="members of other sites cannot be called alone"):
            await client.request(".:db", b"", timeout=1.0, member=member)


async def test_a_member_behind_a_link_is_reached_and_its_end_is_said(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    async with (
        connected(one.config.socket_path) as client,
        connected(two.config.socket_path) as far,
        connected(one.config.socket_path) as near,
    ):
        async with near.serve(numbered(1)):
            async with far.serve(numbered(2)) as binding:
                await client.wait_for_members("shards", 2, timeout=5.0)
                replies = [
                    client.request("shards", b"", timeout=5.0, member=binding.member_id)
                    for _ in range(100)
                ]
                assert set(await asyncio.gather(*replies)) == {b"2"}
                async with client.tunnel("shards", timeout=5.0, member=binding.member_id) as line:
                    assert await line.recv() == b"2"
            with pytest.raises(iris.NoMembers, match="has left"):
                await client.request("shards", b"", timeout=5.0, member=binding.member_id)


def test_blocking_calls_take_a_member() -> None:
    with iris.blocking.connect(embedded=True) as client, client.serve(numbered(4)):
        (one,) = client.members("shards")
        assert client.request("shards", b"", timeout=5.0, member=one.member) == b"4"
        client.push("shards", b"", member=one.member)
        with client.tunnel("shards", timeout=5.0, member=one.member) as line:
            assert line.recv() == b"4"
        with pytest.raises(iris.NoMembers, match="has left"):
            client.request("shards", b"", timeout=5.0, member=f"{one.relay}.999")
