"""Departures, step 5: tests with a relay and a store in the same process, and a member that is lost."""

import asyncio

import departures
import notices
import pytest

import iris
from iris.testing import LocalCluster


async def test_a_change_is_published_and_kept(iris_stream_cluster: LocalCluster) -> None:
    cluster = iris_stream_cluster
    async with (
        cluster.client() as client,
        cluster.serve(notices.service),
        cluster.serve(departures.service),
        client.subscribe("departures.*") as board,
    ):
        await client.wait_for_subscribers("departures.JFK", 1, timeout=5.0)
        change = departures.Change("B6 17", 40)
        await client.request("departures", change, timeout=5.0, method="change")
        shown = await anext(aiter(board))
        assert (shown.name, shown.decode(departures.Flight).delay) == ("departures.JFK", 40)
        async with asyncio.timeout(5):
            while await client.request("notices", 1, timeout=5.0) != ["B6 17 + 40"]:
                await asyncio.sleep(0.01)


async def test_an_unknown_flight_is_refused_and_changes_nothing(
    iris_cluster: LocalCluster, iris_client: iris.Client
) -> None:
    async with iris_cluster.serve(departures.service):
        with pytest.raises(iris.RemoteError) as refused:
            await iris_client.request("departures", "XX 1", timeout=5.0, method="status")
        assert refused.value.code == "unknown_flight"


async def test_callers_learn_at_once_that_the_service_is_gone(
    iris_cluster: LocalCluster, iris_client: iris.Client
) -> None:
    async with iris_cluster.serve(departures.service) as member:
        iris_cluster.lose(member)
        with pytest.raises(iris.NoMembers) as lost:
            await iris_client.request("departures", "B6 17", timeout=5.0, method="status")
        assert not lost.value.may_have_run  # so it can safely be sent again
