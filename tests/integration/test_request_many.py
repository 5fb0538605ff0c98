"""`client.request_many`: many requests at once, each with its own end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from integration.kit import cut, named
from support.waiting import until

import iris
from iris.testing import LocalCluster


async def test_every_payload_gets_its_reply_as_it_comes() -> None:
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:
        service = iris.Service("square")

        @service.on_request
        def square(number: int) -> int:
            return number * number

        async with member.serve(service):
            got = {
                outcome.number: outcome.result()
                async for outcome in caller.request_many(
                    "square", range(1000), timeout=10, type=int
                )
            }
    assert got == {number: number * number for number in range(1000)}


async def test_what_fails_is_an_outcome_and_the_others_go_on() -> None:
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:
        service = iris.Service("picky")

        @service.on_request
        def picky(word: str) -> str:
            if word == "no":
                raise ValueError("not this one")
            return word.upper()

        async with member.serve(service):
            words = ["a", "no", "b", "x" * (caller.message_limit + 1)]
            outcomes = {o.number: o async for o in caller.request_many("picky", words, timeout=10)}
    assert [outcomes[0].result(), outcomes[2].result()] == [b"A", b"B"]
    assert isinstance(outcomes[1].error, iris.RemoteError)
    assert isinstance(outcomes[3].error, iris.MessageTooLarge)
    with pytest.raises(iris.RemoteError, match="not this one"):
        outcomes[1].result()


async def test_no_more_are_on_the_way_than_was_said() -> None:
    running = most = 0
    release = asyncio.Event()
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:
        service = iris.Service("slow", limits=iris.Limits(concurrency=100))

        @service.on_request
        async def slow(number: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            return number

        async with member.serve(service):
            taken = 0

            def payloads() -> Iterator[int]:
                nonlocal taken
                for number in range(50):
                    taken += 1
                    yield number

            asking = caller.request_many("slow", payloads(), timeout=10, in_flight=8)
            first = asyncio.ensure_future(anext(asking))
            await until(lambda: running == 8)
            assert taken == 8
            release.set()
            numbers = [(await first).number, *[outcome.number async for outcome in asking]]
    assert sorted(numbers) == list(range(50))
    assert most == 8


async def test_a_name_that_is_none_is_said_before_anything_is_sent() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        with pytest.raises(iris.InvalidName):
            await anext(caller.request_many("not a name", [b"x"], timeout=1))
        assert caller.sent_messages == 0


async def test_who_stops_listening_leaves_nothing_behind() -> None:
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:
        service = iris.Service("echo")

        @service.on_request
        def echo(data: bytes) -> bytes:
            return data

        async with member.serve(service):
            asking = caller.request_many("echo", [b"x"] * 100, timeout=10)
            async for _ in asking:
                break
            await asking.aclose()  # type: ignore[attr-defined]  # a generator
            await caller.flush()
            session = caller._runtime.session
            assert session is not None
            assert not len(session.requests)


async def test_nobody_there_is_the_outcome_of_each() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        outcomes = [o async for o in caller.request_many("nobody", [b"a", b"b"], timeout=0.5)]
    assert [type(o.error) for o in outcomes] == [iris.NoMembers] * 2
    assert not any(o.error.may_have_run for o in outcomes if isinstance(o.error, iris.RequestError))


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_lost_relay_ends_each_unless_it_may_be_sent_again(idempotent: bool) -> None:
    asked, release = asyncio.Event(), asyncio.Event()
    async with LocalCluster() as cluster, cluster.client() as member:
        service = iris.Service("held")

        @service.on_request
        async def held(number: int) -> int:
            asked.set()
            await release.wait()
            return number

        async with named(cluster, "caller") as caller, member.serve(service):
            asking = caller.request_many("held", range(3), timeout=10, idempotent=idempotent)
            first = asyncio.ensure_future(anext(asking))
            await asked.wait()
            await cut(cluster, "caller")
            release.set()
            outcomes = [await first, *[outcome async for outcome in asking]]
    if idempotent:
        assert sorted(o.result() for o in outcomes) == [0, 1, 2]
    else:
        assert [type(o.error) for o in outcomes] == [iris.ConnectionLost] * 3


async def test_with_a_member_all_requests_go_to_it_and_none_to_another() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        ran: list[str] = []
        async with cluster.client() as first, cluster.client() as second:
            services = {}
            for name, client in (("a", first), ("b", second)):
                service = iris.Service("square")

                async def square(number: int, name: str = name) -> int:
                    ran.append(name)
                    return number * number

                service.on_request(square)
                services[name] = await client.serve(service).__aenter__()
            wanted = services["b"].member_id
            asking = caller.request_many("square", range(50), timeout=10, type=int, member=wanted)
            assert sorted([one.result() async for one in asking]) == [n * n for n in range(50)]
            assert set(ran) == {"b"}
        gone = [one async for one in caller.request_many("square", [1], timeout=10, member=wanted)]
        assert [type(one.error) for one in gone] == [iris.NoMembers]
        with pytest.raises(iris.InvalidName):
            caller.request_many("square", [1], timeout=10, member="nobody")


async def test_each_request_of_many_passes_the_middleware_and_keeps_its_number() -> None:
    seen: list[iris.Call] = []

    async def around(call: iris.Call, call_next: iris.CallNext) -> object:
        seen.append(call)
        if call.payload == 3:
            call.payload = 30
        if call.payload == 4:
            raise iris.Overloaded(call.name, "not today")
        return await call_next(call)

    async with LocalCluster() as cluster, cluster.client() as member:
        service = iris.Service("square")
        running = most = 0

        @service.on_request
        async def square(number: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return number * number

        async with member.serve(service), cluster.client(middleware=[around]) as caller:
            asking = caller.request_many("square", range(9), timeout=10, type=int, in_flight=3)
            outcomes = {one.number: one async for one in asking}
            assert sorted(outcomes) == list(range(9))
            assert [outcomes[n].reply for n in (2, 3, 4, 8)] == [4, 900, None, 64]
            assert isinstance(outcomes[4].error, iris.Overloaded)
            assert {(call.kind, call.name, call.timeout) for call in seen} == {("request", "square", 10)}  # fmt: skip
            assert most <= 3
            with pytest.raises(iris.InvalidName):
                caller.request_many("no such name", [1], timeout=10, method="a b")


async def test_an_exception_of_middleware_ends_many_and_leaving_the_loop_ends_its_requests() -> (
    None
):
    entered = asyncio.Event()

    async def around(call: iris.Call, call_next: iris.CallNext) -> object:
        if call.payload == 1:
            raise ValueError("a bug")
        entered.set()
        try:
            return await asyncio.Event().wait()
        finally:
            left.append(call.payload)

    left: list[object] = []
    async with LocalCluster() as cluster, cluster.client(middleware=[around]) as caller:
        with pytest.raises(ValueError, match="a bug"):
            async for _ in caller.request_many("square", [0, 1], timeout=10):
                pass
        assert left == [0]
