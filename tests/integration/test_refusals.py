"""Handlers that refuse with a code: what callers get, and what the service counts and logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from integration.kit import Collector
from support.waiting import until

import iris
from iris import blocking
from iris.testing import LocalCluster


@contextlib.asynccontextmanager
async def pair_of(*services: iris.Service) -> AsyncIterator[tuple[iris.Client, iris.Client]]:
    """A client that serves these, and another."""
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        cluster.client() as caller,
        contextlib.AsyncExitStack() as stack,
    ):
        for service in services:
            await stack.enter_async_context(member.serve(service))
        yield member, caller


def shop() -> iris.Service:
    service = iris.Service("shop")

    @service.on_request
    async def order(wanted: iris.Request) -> int:
        count = wanted.decode(int)
        if count > 2:
            raise iris.Refusal("out_of_stock", left=2)
        if count < 0:
            raise ValueError("below zero")
        return 2 - count

    @service.on_survey
    def ask(wanted: bytes) -> bytes:
        raise iris.Refusal("closed", "until Monday")

    @service.on_push
    def note(wanted: bytes) -> None:
        raise iris.Refusal("closed")

    return service


async def test_a_refusal_arrives_with_code_and_details_and_is_not_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair_of(shop()) as (member, caller):
        with pytest.raises(iris.RemoteError) as refused:
            await caller.request("shop", 3, timeout=5)
        with pytest.raises(iris.RemoteError) as failed:
            await caller.request("shop", -1, timeout=5)
        assert (refused.value.code, refused.value.details) == ("out_of_stock", {"left": 2})
        assert refused.value.may_have_run
        assert str(refused.value) == "shop: out_of_stock (left=2)"
        assert (failed.value.code, failed.value.details) == (None, {})
        assert member.counters == {"failed handlers": 1}
    (logged,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "raised ValueError: below zero" in logged


async def test_refusals_among_many_requests_have_their_own_code_each() -> None:
    async with pair_of(shop()) as (_, caller):
        many = [one async for one in caller.request_many("shop", range(5), timeout=5)]
    assert sorted(one.reply for one in many if one.error is None) == [0, 1, 2]
    for one in many:
        if one.error is not None:
            assert isinstance(one.error, iris.RemoteError)
            assert one.error.code == "out_of_stock"


async def test_a_survey_keeps_the_refusal_of_each_member() -> None:
    async with pair_of(shop()) as (_, caller):
        answers = caller.survey("shop", b"", timeout=5)
        assert [one async for one in answers] == []
    ((identity, error),) = answers.errors.items()
    assert (error.code, error.details) == ("closed", {})
    assert answers.failed == {identity: "closed: until Monday"}


async def test_a_push_that_is_refused_counts_as_run_and_is_not_reported() -> None:
    async with pair_of(shop()) as (member, caller):
        async with caller.watch_losses() as losses:
            await caller.push("shop", b"")
            await caller.flush()
        await until(lambda: member.received_messages == 1)
        assert losses == []
        assert member.counters == {}


async def test_a_deferred_reply_may_be_a_refusal() -> None:
    service = iris.Service("later")
    held: list[iris.Deferred] = []

    @service.on_request
    def hold(request: iris.Request) -> None:
        held.append(request.defer())
        held[0].fail(iris.Refusal("too_late", hour=18))

    async with pair_of(service) as (_, caller):
        with pytest.raises(iris.RemoteError) as refused:
            await caller.request("later", b"", timeout=5)
    assert (refused.value.code, refused.value.details) == ("too_late", {"hour": 18})


async def test_the_refusal_of_another_service_that_a_handler_lets_through_is_a_failure() -> None:
    service = iris.Service("front")
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:

        @service.on_request
        async def forward(count: int) -> int:
            return await member.request("shop", count, timeout=5, type=int)

        async with member.serve(shop()), member.serve(service):
            with pytest.raises(iris.RemoteError) as failed:
                await caller.request("front", 3, timeout=5)
        assert (failed.value.code, failed.value.details) == (None, {})
        assert failed.value.detail == "RemoteError: shop: out_of_stock (left=2)"
        assert member.counters == {"failed handlers": 1}


async def test_details_over_the_limit_are_a_failure_of_the_handler_that_says_so() -> None:
    service = iris.Service("wordy")

    @service.on_request
    def explain(payload: bytes) -> bytes:
        raise iris.Refusal("why", text="x" * 2048)

    async with pair_of(service) as (member, caller):
        with pytest.raises(iris.RemoteError, match="over the limit of 2048") as failed:
            await caller.request("wordy", b"", timeout=5)
        assert failed.value.code is None
        assert member.counters == {"failed handlers": 1}


async def test_a_refusal_of_a_broadcast_or_publication_is_logged_because_nobody_gets_it() -> None:
    service = iris.Service("listeners")
    seen = Collector()

    @service.on_broadcast
    def listen(message: iris.Message) -> None:
        seen(message)
        raise iris.Refusal("closed")

    @service.on_publish("news")
    def read(message: iris.Message) -> None:
        seen(message)
        raise iris.Refusal("closed")

    async with pair_of(service) as (member, caller):
        await caller.broadcast("listeners", b"1")
        await caller.publish("news", b"2")
        await until(lambda: len(seen.messages) == 2)
        assert member.counters == {"failed handlers": 2}


def test_a_blocking_client_gets_the_code_and_the_details() -> None:
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    with blocking.connect(embedded=True, keyring=keyring) as client, client.serve(shop()):
        with pytest.raises(iris.RemoteError) as refused:
            client.request("shop", 3, timeout=5)
        (outcome,) = client.request_many("shop", [3], timeout=5)
    assert (refused.value.code, refused.value.details) == ("out_of_stock", {"left": 2})
    assert isinstance(outcome.error, iris.RemoteError)
    assert outcome.error.code == "out_of_stock"
