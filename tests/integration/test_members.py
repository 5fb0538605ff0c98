"""Who is there, and who comes and goes."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio

import pytest
from integration.kit import cut, echo_service, named
from support.waiting import until

import iris
from iris.errors import LocalProtocolError
from iris.testing import LocalCluster
from relay.core import control


async def test_members_lists_who_is_there_by_kind_relay_and_label() -> None:
    service = echo_service("db")
    service.on_push(lambda payload: None)
    async with LocalCluster() as cluster, named(cluster, "first") as first:
        assert len(await first.members("db")) == 0
        async with first.serve(service) as binding:
            async with named(cluster, "second") as second, second.serve(echo_service("db")):
                members = await second.members("db")
                assert [info.label for info in members] == ["first", "second"]
                assert members[0].member == binding.member_id
                assert members[0].relay == cluster.relay.router.relay_id.hex()
                assert (members.serving("request"), members.serving("push")) == (2, 1)
                assert (members.serving("tunnel"), members.cluster) == (0, "db")
        assert len(await first.members("db")) == 0


async def test_members_counts_those_under_other_keys() -> None:
    other = iris.Keyring.single(iris.ClusterKey(b"o" * 32))
    async with LocalCluster() as cluster, cluster.client() as client:
        async with cluster.client(keyring=other) as stranger, stranger.serve(echo_service("db")):
            members = await client.members("db")
            (key,) = other.for_cluster("db")
            assert len(members) == 0
            assert members.others == {key.key_id[:4].hex(): 1}


async def test_wait_for_members_returns_as_soon_as_they_are_there() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        waiting = asyncio.create_task(client.wait_for_members("echo", 2, timeout=10))
        async with cluster.client() as first, first.serve(echo_service()):
            await first.flush()
            await cluster.settle()
            assert not waiting.done()
            async with cluster.client() as second, second.serve(echo_service()):
                assert len(await waiting) == 2
        assert len(await client.wait_for_members("echo", 0, timeout=5)) == 0


async def test_wait_for_members_that_do_not_come_says_how_many_are_there() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        with pytest.raises(iris.RequestTimeout, match="1 of 2 members"):
            await client.wait_for_members("echo", 2, timeout=0.05)


async def test_watch_members_sees_joins_leaves_and_crashes() -> None:
    async with LocalCluster() as cluster, cluster.client() as watcher:
        counts: list[int] = []
        seen: set[str] = set()

        async def follow() -> None:
            async for members in watcher.watch_members("echo"):
                counts.append(len(members))
                seen.update(info.member for info in members)

        task = asyncio.create_task(follow())
        await until(lambda: counts == [0])
        async with named(cluster, "a") as a, a.serve(echo_service()):
            await until(lambda: counts[-1] == 1)
            async with named(cluster, "b") as b:
                async with b.serve(echo_service()):
                    await until(lambda: counts[-1] == 2)
                    await cut(cluster, "b")
                    # What leaves and comes back within a turn is one change.
                    await until(lambda: len(seen) == 3 and counts[-1] == 2)
                await until(lambda: counts[-1] == 1)
        await until(lambda: counts[-1] == 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_watch_follows_to_the_next_relay_and_ends_with_the_client() -> None:
    async with LocalCluster() as cluster:
        seen: list[list[str]] = []
        async with named(cluster, "watcher") as watcher, named(cluster, "member") as member:

            async def follow() -> None:
                async for members in watcher.watch_members("echo"):
                    seen.append([info.member for info in members])

            task = asyncio.create_task(follow())
            async with member.serve(echo_service()) as binding:
                await until(lambda: seen and seen[-1] == [binding.member_id])
                old = binding.member_id
                await cluster.stop_relay()
                await cluster.start_relay()
                await until(lambda: seen[-1] == [binding.member_id] and binding.member_id != old)
        await asyncio.wait_for(task, 5)


async def test_a_service_without_handlers_is_not_a_member() -> None:
    service = iris.Service("quiet")
    service.on_publish("t")(lambda payload: None)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        assert len(await client.members("quiet")) == 0
        with pytest.raises(iris.NoMembers):
            await client.request("quiet", b"", timeout=5)


async def test_two_services_of_one_client_are_two_members() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.serve(echo_service()) as one, client.serve(echo_service()) as two:
            assert one.member_id != two.member_id
            assert len(await client.members("echo")) == 2
        assert len(await client.members("echo")) == 0


async def test_status_shows_sessions_clusters_and_a_balanced_account() -> None:
    async with LocalCluster() as cluster, named(cluster, "me") as client:
        async with client.serve(echo_service()), client.subscribe("t"):
            for _ in range(10):
                await client.request("echo", b"", timeout=5)
            status = await client.status()
            (session,) = status["sessions"]
            assert (session["label"], session["members"], session["subscriptions"]) == ("me", 1, 1)
            assert list(status["clusters"]) == ["echo"]
            accounts = status["accounts"]
            assert (accounts["in"], accounts["out"], accounts["held"]) == (20, 20, 0)


async def test_one_watch_too_many_ends_neither_the_session_nor_another_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "MAX_WATCHES", 1)
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as member:
        changes = aiter(client.watch_members("echo"))
        assert len(await anext(changes)) == 0
        with pytest.raises(LocalProtocolError, match="this session already has 1 watches"):
            await client.members("echo")
        with pytest.raises(LocalProtocolError, match="members of other"):
            await anext(aiter(client.watch_members("other")))
        async with member.serve(echo_service("echo")):
            assert len(await anext(changes)) == 1
        await changes.aclose()
        assert (await client.members("echo")).cluster == "echo"


async def test_a_call_that_no_member_serves_is_answered_with_what_there_is() -> None:
    service = iris.Service("hearer")
    service.on_broadcast(lambda message: None)
    service.on_survey(lambda message: None)
    strange = iris.Keyring.single(iris.ClusterKey(bytes(32)))
    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as member,
        cluster.client(keyring=strange) as other,
        member.serve(service),
        member.serve(service),
    ):
        with pytest.raises(iris.NoMembers) as caught:
            await caller.request("hearer", b"", timeout=5)
        assert str(caught.value) == "hearer: no members serve requests; 2 members serve: survey, broadcast"  # fmt: skip
        with pytest.raises(iris.NoMembers) as caught:
            await caller.request("haerer", b"", timeout=5)
        assert str(caught.value) == (
            "haerer: no members have joined under this name; check its spelling, and that the service runs"
        )
        with pytest.raises(iris.NoMembers) as caught:
            await other.request("hearer", b"", timeout=5)
        assert str(caught.value).startswith("hearer: no members serve requests under your key ")
        assert "; members under other keys: 2 under " in str(caught.value)
