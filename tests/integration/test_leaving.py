"""Leaving is graceful, and bounded all the same."""

from __future__ import annotations

import iris
from iris.testing import LocalCluster


async def test_leaving_ends_although_an_idle_tunnel_is_still_open() -> None:
    service = iris.Service("db")

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        async for _ in tunnel:
            pass

    config = iris.ClientConfig(drain_timeout_s=0.05)
    async with LocalCluster() as cluster, cluster.client() as opener:
        async with cluster.client(config=config) as member, member.serve(service):
            tunnel = await opener.open_tunnel("db", timeout=5)
        try:
            await tunnel.recv()
        except iris.TunnelBroken:
            broken = True
        assert broken, "and the opener hears of it"


async def test_pushes_that_were_routed_are_not_told_as_lost_when_the_relay_goes() -> None:
    service = iris.Service("work")
    got: list[bytes] = []
    service.on_push(lambda payload: got.append(payload))
    async with LocalCluster() as cluster, cluster.client() as sender:
        async with cluster.client() as member, member.serve(service):
            await sender.push("work", b"x")
            await sender.flush()
        await cluster.settle()
        await cluster.stop_relay()
        await cluster.start_relay()
        await sender.flush()
        assert got == [b"x"]
        assert not [lost for lost in sender.losses if lost.kind == "push"]
