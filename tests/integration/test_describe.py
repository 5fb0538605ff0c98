"""Members describe themselves and answer pings, also when their handlers are busy or serve no requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from integration.kit import freeze, named
from support.waiting import until

import iris
from iris import blocking
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)


class Order(msgspec.Struct):
    number: int
    sku: str = ""


class Odd:
    """A type without a JSON Schema."""


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster() as made:
        yield made


def orders(**options: Any) -> iris.Service:
    service = iris.Service("orders", version="1.4", description="Takes orders.", **options)

    @service.on_request("place")
    async def place(order: Order, client: iris.Client) -> int:
        """Place an order.

        It is final.
        """
        if order.number < 0:
            raise iris.Refusal("below_zero")
        if order.number == 0:
            raise ValueError("zero")
        return order.number

    @service.on_request
    def other(payload: bytes) -> bytes:
        return payload

    @service.on_push
    def note(message: iris.Message) -> None: ...

    @service.on_publish("prices.>")
    def price(value: dict[str, float]) -> None: ...

    return service


def by_name(one: iris.Description) -> dict[tuple[str, str], iris.HandlerInfo]:
    return {(each.kind, each.name): each for each in one.handlers}


async def test_a_member_describes_its_handlers_with_their_types(cluster: LocalCluster) -> None:
    async with (
        cluster.client() as member,
        cluster.client() as caller,
        member.serve(orders()) as binding,
    ):
        (one,) = await caller.describe("orders", timeout=5)
        assert (one.member, one.service, one.version) == (binding.member_id, "orders", "1.4")
        assert (one.description, one.running, one.queued) == ("Takes orders.", 0, 0)
        assert one.uptime_s >= 0
        assert one.iris
        found = by_name(one)
        assert found.keys() == {
            ("request", "place"), ("request", ""), ("push", ""), ("publish", "prices.>"),
        }  # fmt: skip
        place = found["request", "place"]
        assert (place.function, place.doc) == ("place", "Place an order.\n\nIt is final.")  # fmt: skip
        assert (place.argument, place.result) == ("Order", "int")
        assert place.argument_schema == msgspec.json.schema(Order)
        assert place.result_schema == {"type": "integer"}
        other = found["request", ""]
        assert (other.argument, other.argument_schema, other.result) == ("bytes", None, "bytes")
        assert (found["push", ""].argument, found["push", ""].argument_schema) == ("", None)
        assert found["publish", "prices.>"].argument == "dict[str, float]"
        assert not found["publish", "prices.>"].counted


async def test_counts_and_times_are_kept_for_each_method(cluster: LocalCluster) -> None:
    async with (
        cluster.client() as member,
        cluster.client() as caller,
        member.serve(orders()),
    ):
        for number, raised in ((1, False), (2, False), (-1, True), (0, True)):
            call = caller.request("orders", Order(number), timeout=5, method="place")
            if raised:
                with pytest.raises(iris.RemoteError):
                    await call
            else:
                await call
        with pytest.raises(iris.RemoteError, match="does not decode"):
            await caller.request("orders", {"sku": 1}, timeout=5, method="place")
        await caller.request("orders", b"", timeout=5)
        with pytest.raises(iris.RemoteError, match="no_method"):
            await caller.request("orders", b"", timeout=5, method="refund")
        (one,) = await caller.describe("orders", timeout=5)
        place, other = by_name(one)["request", "place"], by_name(one)["request", ""]
        assert (place.handled, place.failed, place.refused, place.expired) == (2, 1, 2, 0)
        assert place.timed == 2
        assert 0 < place.mean_ms <= place.max_ms
        assert (other.handled, other.failed, other.refused, other.timed) == (1, 0, 0, 1)


async def test_of_plain_functions_every_sixteenth_call_is_timed_and_all_are_counted(
    cluster: LocalCluster,
) -> None:
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)

    @service.on_push
    async def take(payload: bytes) -> None: ...

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        for _ in range(33):
            await caller.request("echo", b"", timeout=5)
            await caller.push("echo", b"")
        await until(lambda: member.received_messages == 66)
        (one,) = await caller.describe("echo", timeout=5)
        assert (by_name(one)["request", ""].handled, by_name(one)["request", ""].timed) == (33, 3)
        assert by_name(one)["push", ""].handled == by_name(one)["push", ""].timed > 0


async def test_a_member_whose_handlers_are_busy_describes_itself(cluster: LocalCluster) -> None:
    service = iris.Service("busy", limits=iris.Limits(concurrency=1))
    gate = asyncio.Event()

    @service.on_request
    async def wait(payload: bytes) -> None:
        await gate.wait()

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        calls = [asyncio.ensure_future(caller.request("busy", b"", timeout=30)) for _ in range(3)]
        await until(lambda: member.received_messages == 3)
        (one,) = await caller.describe("busy", timeout=5)
        assert (one.running, one.queued) == (3, 2)
        (ping,) = await caller.ping("busy", timeout=5)
        assert ping.member == one.member
        assert ping.rtt_s > 0
        gate.set()
        await asyncio.gather(*calls)


async def test_members_that_serve_no_requests_are_asked_too(cluster: LocalCluster) -> None:
    casts = iris.Service("mixed")
    casts.on_broadcast(lambda payload: None)
    surveys = iris.Service("mixed")
    surveys.on_survey(lambda payload: payload)
    async with (
        cluster.client() as one,
        cluster.client() as two,
        cluster.client() as caller,
        one.serve(casts) as first,
        two.serve(surveys) as second,
    ):
        found = await caller.describe("mixed", timeout=5)
        assert [each.member for each in found] == [first.member_id, second.member_id]
        assert [[h.kind for h in each.handlers] for each in found] == [["broadcast"], ["survey"]]
        pings = await caller.ping("mixed", timeout=5)
        assert [each.member for each in pings] == [first.member_id, second.member_id]
        assert (pings.failed, pings.sites) == ({}, {})


async def test_a_member_that_does_not_answer_is_in_failed(cluster: LocalCluster) -> None:
    async with (
        named(cluster, "good") as good,
        named(cluster, "stuck") as stuck,
        cluster.client() as caller,
        good.serve(orders()) as one,
        stuck.serve(orders()) as other,
    ):
        resume = freeze(cluster, "stuck")
        found = await caller.ping("orders", timeout=0.2)
        resume()
        assert [each.member for each in found] == [one.member_id]
        assert isinstance(found.failed[other.member_id], iris.RequestTimeout)
        assert await caller.describe("nobody", timeout=5) == []


async def test_types_without_a_schema_are_named_as_text(cluster: LocalCluster) -> None:
    service = iris.Service("odd")

    @service.on_request
    def odd(payload: object) -> Odd: ...

    service.on_survey(len)
    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        (one,) = await caller.describe("odd", timeout=5)
    request, survey = by_name(one)["request", ""], by_name(one)["survey", ""]
    assert (request.argument, request.argument_schema) == ("object", None)
    assert (request.result, request.result_schema) == ("Odd", None)
    assert (survey.argument, survey.result) == ("", "")


def test_the_blocking_client_describes_and_pings() -> None:
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    with blocking.connect(embedded=True, keyring=keyring) as client, client.serve(orders()):
        (one,) = client.describe("orders")
        assert one.version == "1.4"
        (ping,) = client.ping("orders")
        assert ping.member == one.member
