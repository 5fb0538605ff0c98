"""An error about a deadline names the timeout that the caller gave, and for how long of it the relay was away."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from integration.kit import named
from support.waiting import until

import iris
from iris.testing import LocalCluster

TIMEOUT_S = 0.8
AWAY = r"within 0\.8 s \(the relay was away for [\d.]+ s of it\)"


def silent() -> iris.Service:
    """A service that never answers."""
    service = iris.Service("silent")

    @service.on_request
    async def never(payload: bytes) -> None:
        await asyncio.Event().wait()

    @service.on_tunnel
    async def accept(tunnel: iris.Tunnel) -> None: ...

    return service


async def test_a_request_that_waited_for_a_relay_names_the_whole_timeout_and_the_absence() -> None:
    async with (
        LocalCluster() as cluster,
        named(cluster, "caller", drain_timeout_s=0.1) as caller,
        caller.serve(silent()),
    ):
        await cluster.stop_relay()
        await until(lambda: caller._runtime.session is None)
        one = asyncio.create_task(caller.request("silent", b"", timeout=TIMEOUT_S))

        async def many() -> list[iris.Outcome]:
            return [o async for o in caller.request_many("silent", [b"1"], timeout=TIMEOUT_S)]

        several = asyncio.create_task(many())
        await until(lambda: caller._runtime._away_s(0.0) >= 0.01)
        await cluster.start_relay()
        with pytest.raises(iris.RequestTimeout, match="silent: no reply " + AWAY) as caught:
            await one
        assert caught.value.may_have_run
        assert re.fullmatch("no reply " + AWAY, caught.value.detail)
        (outcome,) = await several
        assert re.fullmatch("silent: no reply " + AWAY, str(outcome.error))


async def test_a_timeout_without_an_absence_names_only_the_timeout() -> None:
    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        named(cluster, "member", drain_timeout_s=0.1) as member,
        member.serve(silent()),
    ):
        with pytest.raises(iris.RequestTimeout, match=r"^silent: no reply within 0\.05 s$"):
            await caller.request("silent", b"", timeout=0.05)


async def test_waits_for_members_and_subscribers_name_the_absence() -> None:
    async with LocalCluster() as cluster, named(cluster, "a", drain_timeout_s=0.1) as client:
        await client.flush()
        await cluster.stop_relay()
        await until(lambda: client._runtime.session is None)
        await until(lambda: client._runtime._away_s(0.0) >= 0.002)
        away = r"0\.05 s \(the relay was away for [\d.]+ s of it\)$"
        with pytest.raises(iris.RequestTimeout, match="^a: the relay did not list the members within " + away):  # fmt: skip
            await client.members("a", timeout=0.05)
        with pytest.raises(iris.RequestTimeout, match="^t: the topic has 0 of 1 subscriber after " + away):  # fmt: skip
            await client.wait_for_subscribers("t", 1, timeout=0.05)
        with pytest.raises(iris.StreamUnavailable, match="^stream s: not acknowledged within " + away[:-1]):  # fmt: skip
            await client.streams.append("s", b"", timeout=0.05)
        with pytest.raises(iris.StreamUnavailable, match=r"^stream s: no relay was connected within 0\.2 s"):  # fmt: skip
            await client.streams.delete("s", timeout=0.2)
        with pytest.raises(iris.ConnectionLost, match=r"^relay: no relay was connected within 0\.05 s$"):  # fmt: skip
            await client.status(timeout=0.05)


async def test_an_answer_of_the_relay_that_is_late_names_the_whole_timeout() -> None:
    async with LocalCluster() as cluster, named(cluster, "a", drain_timeout_s=0.1) as client:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        until_s = time.monotonic() + 0.01
        with pytest.raises(iris.RequestTimeout, match=r"^relay: the relay did not answer within 5 s$"):  # fmt: skip
            await client._runtime.answered(never, "the relay did not answer", 5.0, until_s)
