"""Handlers of every kind receive the client, the whole message and their payload by annotation."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from integration.kit import cut, named
from support.waiting import PATIENCE_S, until

import iris
from iris.testing import LocalCluster


class Order(msgspec.Struct):
    number: int


class Unknown:
    pass


async def test_handlers_of_every_kind_receive_the_client_that_serves_them() -> None:
    service = iris.Service("orders")
    got: dict[str, Any] = {}

    @service.on_request
    async def place(order: Order, client: iris.Client, request: iris.Request) -> Any:
        got["request"] = client
        return order.number, request.headers

    @service.on_push
    def remind(client: iris.Client, order: Order) -> None:
        got["push"] = client, order

    @service.on_survey
    def count(message: iris.Message, client: iris.Client) -> int:
        got["survey"] = client
        return len(message.payload)

    @service.on_broadcast
    async def reload(order: Order, client: iris.Client) -> None:
        got["broadcast"] = client, order

    @service.on_tunnel
    async def carry(tunnel: iris.Tunnel, client: iris.Client) -> None:
        got["tunnel"] = client
        await tunnel.send(await tunnel.recv())

    @service.on_publish("orders.>")
    def note(order: Order, client: iris.Client) -> None:
        got["publish"] = client, order

    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        cluster.client() as server,
        asyncio.timeout(PATIENCE_S),
        server.serve(service),
    ):
        assert await client.request("orders", Order(7), timeout=9, headers={"a": "b"}) == [
            7,
            {"a": "b"},
        ]
        await client.push("orders", Order(8))
        assert [each.value async for each in client.survey("orders", b"abc", timeout=9)] == [3]
        await client.broadcast("orders", Order(9))
        await client.publish("orders.new", Order(10))
        async with client.tunnel("orders", timeout=9) as tunnel:
            await tunnel.send(b"x")
            assert await tunnel.recv() == b"x"
        await until(lambda: len(got) == 6)
    assert got == {
        "request": server, "push": (server, Order(8)), "survey": server, "broadcast": (server, Order(9)),
        "tunnel": server, "publish": (server, Order(10)),
    }  # fmt: skip


async def test_a_loss_handler_receives_the_loss_and_the_client() -> None:
    service = iris.Service("orders")
    got: list[Any] = []

    @service.on_broadcast
    def reload(what: str) -> None: ...

    @service.on_loss
    def missed(lost: iris.Loss, client: iris.Client) -> None:
        got.append((lost.kind, client))

    async with LocalCluster() as cluster, named(cluster, "server") as server, server.serve(service):
        await cut(cluster, "server")
        await until(lambda: bool(got))
    assert got == [("broadcast", server)]


async def test_a_request_beside_other_parameters_can_be_deferred() -> None:
    service = iris.Service("orders")
    waiting: list[iris.Deferred] = []

    @service.on_request
    def place(order: Order, request: iris.Request) -> None:
        waiting.append(request.defer())

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        asking = asyncio.create_task(client.request("orders", Order(7), timeout=PATIENCE_S))
        await until(lambda: bool(waiting))
        waiting[0].reply("later")
        assert await asking == b"later"


async def test_a_payload_that_does_not_fit_has_not_run() -> None:
    service = iris.Service("orders")

    @service.on_request
    async def place(order: Order, request: iris.Request, client: iris.Client) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="as Order") as caught:
            await client.request("orders", {"number": "x"}, timeout=PATIENCE_S)
        assert not caught.value.may_have_run


@pytest.mark.parametrize("register", ["on_request", "on_tunnel", "on_publish", "on_loss"])
async def test_a_parameter_that_cannot_be_filled_ends_serve_before_anything_has_joined(
    register: str,
) -> None:
    service = iris.Service("orders")
    service.on_survey(lambda message: None)

    def place(order: Order, unknown: Unknown) -> None: ...

    if register == "on_tunnel":

        async def place(order: Order, unknown: Unknown) -> None: ...  # type: ignore[misc]  # tunnels take no other

    (service.on_publish("x") if register == "on_publish" else getattr(service, register))(place)
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(
            iris.ConfigError, match="'place': nothing fits parameter 'unknown: Unknown'"
        ):
            async with client.serve(service):
                pytest.fail("it is served")
        assert len(await client.members("orders")) == 0


async def test_a_subscriber_receives_what_its_annotations_name() -> None:
    got: list[Any] = []

    async def note(order: Order, client: iris.Client) -> None:
        got.append((order, client))

    def plain(message):  # type: ignore[no-untyped-def]  # the case under test
        got.append(message.name)

    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        client.subscribe("orders.>", note),
        client.subscribe("orders.>", plain),
    ):
        await client.publish("orders.new", Order(7))
        await until(lambda: len(got) == 2)
    assert sorted(got, key=str) == [(Order(7), client), "orders.new"]
