"""Keys change under load, member by member, and nobody notices."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, echo_service, named
from support.waiting import until

import iris
from iris.testing import LocalCluster

OLD, NEW = iris.ClusterKey(b"o" * 32), iris.ClusterKey(b"n" * 32)


async def test_a_key_is_added_promoted_and_retired_under_load_without_a_loss() -> None:
    keyring = iris.Keyring.single(OLD)
    stages = [keyring := keyring.add("default", NEW), keyring := keyring.promote("default"), keyring.retire("default")]  # fmt: skip
    casts = [Collector(), Collector()]
    topic = Collector()
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster())
        first = iris.Keyring.single(OLD)
        clients = [
            await stack.enter_async_context(named(cluster, f"c{n}", keyring=first))
            for n in range(3)
        ]
        caller, *members = clients
        for member, got in zip(members, casts, strict=True):
            service = echo_service("db")

            @service.on_broadcast
            def cast(message: iris.Message, got: Collector = got) -> None:
                got(message)

            service.on_loss(got.gap)
            await stack.enter_async_context(member.serve(service))
        await stack.enter_async_context(members[0].subscribe("t.>", topic, on_loss=topic.gap))
        errors: list[BaseException] = []
        requests = published = 0
        stop = asyncio.Event()

        async def ask() -> None:
            nonlocal requests
            while not stop.is_set():
                try:
                    assert await caller.request("db", b"%d" % requests, timeout=10)
                    requests += 1
                except iris.IrisError as err:
                    errors.append(err)

        async def cast_and_publish() -> None:
            nonlocal published
            while not stop.is_set():
                await caller.broadcast("db", b"%d" % published)
                await caller.publish("t.x", b"%d" % published)
                published += 1
                if published % 3 == 0:
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask()) for _ in range(8)]
        tasks.append(asyncio.create_task(cast_and_publish()))
        for stage in stages:
            for client in (*members, caller):
                before = requests
                await client.reload_keys(stage)
                await until(lambda before=before: requests > before + 50)  # type: ignore[misc]  # a bound default
        stop.set()
        await asyncio.gather(*tasks)
        await caller.flush()
        await until(lambda: all(len(got.messages) >= published for got in (*casts, topic)))
        await cluster.settle()
        assert errors == []
        for got in (*casts, topic):
            assert got.numbers == list(range(published))
            assert not got.gaps
        there = await caller.members("db")
        assert [info.key_ids for info in there] == [[NEW.key_id]] * 2
        assert there.others == {}


async def test_a_member_under_two_keys_counts_once() -> None:
    both = iris.Keyring.single(OLD).add("default", NEW)
    async with LocalCluster() as cluster:
        async with cluster.client(keyring=both) as member, member.serve(echo_service("db")):
            there = await member.members("db")
            assert [info.key_ids for info in there] == [[OLD.key_id, NEW.key_id]]
            for key in (OLD, NEW):
                async with cluster.client(keyring=iris.Keyring.single(key)) as other:
                    assert len(await other.members("db")) == 1
                    assert await other.request("db", b"x", timeout=5) == b"x"


async def test_reloading_while_a_request_is_in_flight_waits_for_its_reply() -> None:
    service, release = iris.Service("slow"), asyncio.Event()
    started: list[bytes] = []

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        started.append(payload)
        await release.wait()
        return payload

    keyring = iris.Keyring.single(OLD)
    async with (
        LocalCluster() as cluster,
        cluster.client(keyring=keyring) as caller,
        cluster.client(keyring=keyring) as member,
        member.serve(service),
    ):
        task = asyncio.create_task(caller.request("slow", b"x", timeout=10))
        await until(lambda: started)
        again = iris.Keyring.parse(keyring.dump())  # equal keys, other objects: as from the file
        reloads = [asyncio.create_task(client.reload_keys(again)) for client in (caller, member)]
        await until(lambda: len(cluster.relay.hub.ports) == 4)
        release.set()
        assert await task == b"x"
        await asyncio.gather(*reloads)
        assert len(cluster.relay.hub.ports) == 2
        assert await caller.request("slow", b"y", timeout=5) == b"y"


async def test_a_reload_that_cannot_serve_any_more_fails_and_changes_nothing() -> None:
    async with LocalCluster() as cluster:
        async with named(cluster, "member", keyring=iris.Keyring.single(OLD)) as member:
            async with member.serve(echo_service("db")):
                with pytest.raises(iris.KeyringError):
                    await member.reload_keys(iris.Keyring({"other": (NEW,)}))
                assert await member.request("db", b"x", timeout=5) == b"x"
                await cluster.settle()
                assert len(cluster.relay.hub.ports) == 1


async def test_a_retired_key_opens_and_serves_nothing_any_more() -> None:
    both = iris.Keyring.single(NEW).add("default", OLD)
    got = Collector()
    async with LocalCluster() as cluster:
        async with cluster.client(keyring=both) as member, member.serve(echo_service("db")):
            async with (
                member.subscribe("t", got),
                cluster.client(keyring=iris.Keyring.single(OLD)) as late,
            ):
                assert await late.request("db", b"x", timeout=5) == b"x"
                await member.reload_keys(both.retire("default"))
                with pytest.raises(iris.NoMembers):
                    await late.request("db", b"x", timeout=5)
                await late.publish("t", b"x")
                await late.flush()
                await cluster.settle()
                assert got.messages == []


async def test_work_under_a_retired_key_ends_with_the_drain_time() -> None:
    both = iris.Keyring.single(NEW).add("default", OLD)
    service, started, ended = iris.Service("db"), asyncio.Event(), asyncio.Event()

    @service.on_request
    async def never(payload: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    @service.on_tunnel
    async def wait(tunnel: iris.Tunnel) -> None:
        try:
            async for _ in tunnel:
                pass
        finally:
            ended.set()

    async with (
        LocalCluster() as cluster,
        named(cluster, "member", keyring=both, drain_timeout_s=0.05) as member,
        member.serve(service),
        cluster.client(keyring=iris.Keyring.single(OLD)) as late,
    ):
        asking = asyncio.create_task(late.request("db", b"x", timeout=10))
        tunnel = await late.open_tunnel("db", timeout=5)
        await started.wait()
        await member.reload_keys(both.retire("default"))
        with pytest.raises(iris.ConnectionLost):
            await asking
        with pytest.raises(iris.TunnelBroken):
            await tunnel.recv()
        await ended.wait()


async def test_status_says_which_keys_each_session_uses() -> None:
    both = iris.Keyring.single(NEW).add("default", OLD)
    old, new = OLD.key_id.hex()[:8], NEW.key_id.hex()[:8]
    async with LocalCluster() as cluster, named(cluster, "member", keyring=both) as member:

        async def keys() -> list[str]:
            sessions = (await member.status())["sessions"]
            return next(s["keys"] for s in sessions if s["label"] == "member")

        assert await keys() == []
        async with member.serve(echo_service("db")):
            assert await keys() == sorted((old, new))
            await member.reload_keys(both.retire("default"))
            assert await keys() == [new]


async def test_a_watch_follows_the_keys_that_are_in_use() -> None:
    both = iris.Keyring.single(OLD).add("default", NEW)
    async with (
        LocalCluster() as cluster,
        cluster.client(keyring=iris.Keyring.single(OLD)) as watcher,
        cluster.client(keyring=iris.Keyring.single(NEW)) as member,
        member.serve(echo_service("db")),
    ):
        changes = aiter(watcher.watch_members("db"))
        assert len(await anext(changes)) == 0
        await watcher.reload_keys(both.promote("default").retire("default"))
        while len(await anext(changes)) != 1:
            pass
        assert [s["keys"] for s in (await watcher.status())["sessions"]] == [
            [NEW.key_id.hex()[:8]]
        ] * 2
        await changes.aclose()


async def test_reloading_without_a_relay_fails_within_the_connect_timeout() -> None:
    async with LocalCluster() as cluster, named(cluster, "a", connect_timeout_s=0.2) as client:
        await cluster.stop_relay()
        await until(lambda: not cluster.relay.hub.ports)
        with pytest.raises(iris.IrisError):
            await client.reload_keys(cluster.keyring)
        await cluster.start_relay()
        await client.flush(timeout=5)


async def test_watches_and_members_go_on_after_a_reload() -> None:
    async with LocalCluster() as cluster:
        async with cluster.client() as watcher, cluster.client() as member:
            changes = aiter(watcher.watch_members("echo"))
            assert len(await anext(changes)) == 0
            await watcher.reload_keys(cluster.keyring)
            async with member.serve(echo_service()):
                while len(await anext(changes)) != 1:
                    pass
            while len(await anext(changes)) != 0:
                pass
            await changes.aclose()


async def test_a_stream_is_used_under_each_key_and_a_retired_key_keeps_no_channel(
    tmp_path: Path,
) -> None:
    keyring = iris.Keyring.single(OLD)
    async with (
        LocalCluster(data=tmp_path) as cluster,
        named(cluster, "c", keyring=keyring) as client,
    ):
        streams = client.streams
        await streams.create("orders")
        written = [await streams.append("orders", b"0")]

        def shown() -> set[bytes]:
            """Return the ids of the keys whose channels are open in this session."""
            attachment: Any = client._attachment
            return {key[1] for key in attachment.session.store_calls._channels}

        assert shown() == {OLD.key_id}
        for stage in (
            keyring := keyring.add("default", NEW),
            keyring := keyring.promote("default"),
            keyring.retire("default"),
        ):
            await client.reload_keys(stage)
            assert not shown()  # a channel ends with its session
            await streams.share_keys()
            written.append(await streams.append("orders", b"%d" % len(written)))
            written.append(await streams.append("orders", b"", expect=len(written)))
            assert len(await streams.list()) == 1
        assert written == list(range(7))
        assert shown() == {NEW.key_id}
        async with streams.consumer("orders", "all") as work:
            found = await work.batch()
        # Records under the retired key are reported, not left out.
        readable = {m.offset for m in found if m.payload}
        assert 5 in readable
        assert readable.isdisjoint({0, 1})
        assert OLD.key_id.hex() in (await streams.describe("orders")).key_ids


async def test_a_move_to_new_keys_waits_for_the_handlers_that_run() -> None:
    service = iris.Service("slow")
    running, go = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        running.set()
        await go.wait()
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        before = binding.member
        call = asyncio.create_task(caller.request("slow", b"x", timeout=30))
        await running.wait()
        moving = asyncio.create_task(member.reload_keys(cluster.keyring))
        await until(lambda: binding.member != before)
        await cluster.settle()
        assert not moving.done()
        go.set()
        assert await call == b"x"
        await moving
