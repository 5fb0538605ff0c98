"""Surveys: every member answers or is named as missing."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from integration.kit import cut, fill, named
from support.waiting import until

import iris
from iris.testing import LocalCluster


@contextlib.asynccontextmanager
async def members(cluster: LocalCluster, services: list[iris.Service]) -> AsyncIterator[list[str]]:
    """Serve each from a client of its own; gives the member ids."""
    async with contextlib.AsyncExitStack() as stack:
        ids = []
        for number, service in enumerate(services):
            client = await stack.enter_async_context(named(cluster, f"member{number}"))
            ids.append((await stack.enter_async_context(client.serve(service))).member_id)
        yield ids


def answering(text: str, name: str = "db") -> iris.Service:
    service = iris.Service(name)

    @service.on_survey
    def answer(question: str) -> str:
        return f"{text}: {question}"

    return service


async def test_every_member_answers() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering(t) for t in "abc"]) as ids:
            survey = caller.survey("db", "who?", timeout=5, type=str)
            assert sorted([answer async for answer in survey]) == ["a: who?", "b: who?", "c: who?"]
            assert sorted(survey.answered) == sorted(ids)
            assert survey.missing == []
            assert survey.failed == {}


async def test_answers_come_as_whole_messages_unless_a_type_is_asked_for() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a")]) as ids:
            (answer,) = [a async for a in caller.survey("db", "q", timeout=5)]
            assert isinstance(answer, iris.Message)
            assert answer.payload == b"a: q"
            assert answer.headers == {"iris-member": ids[0]}


async def test_a_member_that_fails_is_named_with_its_error() -> None:
    failing = iris.Service("db")

    @failing.on_survey
    def fail(question: str) -> None:
        raise ValueError("not me")

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a"), failing]) as ids:
            survey = caller.survey("db", "q", timeout=5, type=str)
            assert [answer async for answer in survey] == ["a: q"]
            assert survey.failed == {ids[1]: "ValueError: not me"}
            assert survey.missing == []


async def test_a_member_lost_on_the_way_is_missing_by_name() -> None:
    hanging, started = iris.Service("db"), asyncio.Event()

    @hanging.on_survey
    async def hang(question: str) -> None:
        started.set()
        await asyncio.Event().wait()

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a"), hanging]) as ids:
            survey = caller.survey("db", "q", timeout=10, type=str)

            async def collect() -> list[str]:
                return [answer async for answer in survey]

            task = asyncio.create_task(collect())
            await started.wait()
            for worker in asyncio.all_tasks():
                if worker.get_name() == "iris-db":
                    await cut(cluster, "member1")
                    worker.cancel()
            assert await task == ["a: q"]
            assert survey.missing == [ids[1]]


async def test_a_survey_that_times_out_names_who_did_not_answer() -> None:
    hanging, release = iris.Service("db"), asyncio.Event()

    @hanging.on_survey
    async def hang(question: str) -> str:
        await release.wait()
        return "too late"

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a"), hanging]) as ids:
            survey = caller.survey("db", "q", timeout=0.1, type=str)
            assert [answer async for answer in survey] == ["a: q"]
            assert survey.missing == [ids[1]]
            release.set()
            await cluster.settle()
            assert survey.answered == [ids[0]]


async def test_members_that_are_full_count_as_missing() -> None:
    full = iris.Service("db", limits=iris.Limits(concurrency=1, queue_bytes=1))
    release, started = asyncio.Event(), asyncio.Event()

    @full.on_survey
    async def hang(question: str) -> str:
        started.set()
        await release.wait()
        return "done"

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [full, answering("a")]) as ids:
            first = caller.survey("db", "1", timeout=5, type=str)

            async def collect() -> list[str]:
                return [answer async for answer in first]

            task = asyncio.create_task(collect())
            await started.wait()
            second = caller.survey("db", "2", timeout=5, type=str)
            assert [answer async for answer in second] == ["a: 2"]
            assert second.missing == [ids[0]]
            release.set()
            assert sorted(await task) == ["a: 1", "done"]
            assert first.missing == []


async def test_a_survey_of_a_cluster_that_is_all_full_ends_at_once_with_all_missing() -> None:
    full = iris.Service("db", limits=iris.Limits(concurrency=1, queue_bytes=1))
    release, started = asyncio.Event(), asyncio.Event()

    @full.on_survey
    async def hang(question: str) -> str:
        started.set()
        await release.wait()
        return "done"

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [full]) as ids:
            first = asyncio.create_task(anext(aiter(caller.survey("db", "1", timeout=5, type=str))))
            await started.wait()
            second = caller.survey("db", "2", timeout=30, type=str)
            assert [answer async for answer in second] == []
            assert second.missing == ids
            release.set()
            assert await first == "done"


async def test_a_survey_without_members_raises_no_members() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        with pytest.raises(iris.NoMembers):
            await fill([], caller.survey("db", "q", timeout=5))


async def test_members_that_serve_no_surveys_are_not_asked() -> None:
    other = iris.Service("db")
    other.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a"), other]) as ids:
            survey = caller.survey("db", "q", timeout=5, type=str)
            assert [answer async for answer in survey] == ["a: q"]
            assert (survey.answered, survey.missing) == ([ids[0]], [])


async def test_a_survey_may_be_left_early_and_its_later_answers_go_nowhere() -> None:
    release = asyncio.Event()
    slow = iris.Service("db")

    @slow.on_survey
    async def later(question: str) -> str:
        await release.wait()
        return "late"

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering("a"), slow]):
            answers = aiter(caller.survey("db", "q", timeout=5, type=str))
            assert await anext(answers) == "a: q"
            await answers.aclose()
            release.set()
            await cluster.settle()
            assert [a async for a in caller.survey("db", "2", timeout=5, type=str)]


async def test_an_answer_may_be_deferred_and_carry_headers() -> None:
    service, owed = iris.Service("db"), []

    @service.on_survey
    def later(request: iris.Request) -> None:
        owed.append(request.defer())

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [service]) as ids:
            task = asyncio.create_task(anext(aiter(caller.survey("db", "q", timeout=5))))
            await until(lambda: owed)
            owed[0].reply(iris.Reply([1, 2], {"h": "v"}))
            answer = await task
            assert answer.value == [1, 2]
            assert answer.headers == {"h": "v", "iris-member": ids[0]}


async def test_a_body_that_does_not_decode_is_a_failed_answer() -> None:
    service = iris.Service("db")

    @service.on_survey
    def number(value: int) -> int:
        return value

    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [service]) as ids:
            survey = caller.survey("db", {"no": "number"}, timeout=5)
            assert [a async for a in survey] == []
            assert list(survey.failed) == ids
            assert "does not decode as int" in survey.failed[ids[0]]


async def test_a_survey_answer_names_the_member_that_was_asked_though_it_moved() -> None:
    service = iris.Service("c")
    running, go = asyncio.Event(), asyncio.Event()

    @service.on_survey
    async def answer(payload: bytes) -> bytes:
        running.set()
        await go.wait()
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as asker,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        asked = binding.member_id
        survey = asker.survey("c", b"x", timeout=30)

        async def ask() -> list[Any]:
            return [each.payload async for each in survey]

        asking = asyncio.create_task(ask())
        await running.wait()
        moving = asyncio.create_task(member.reload_keys(cluster.keyring))
        await until(lambda: binding.member_id != asked)
        go.set()
        assert await asking == [b"x"]
        await moving
        assert survey.answered == [asked]
        assert survey.missing == []


async def test_the_items_of_a_survey_name_the_member_of_each_answer_typed_or_not() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        async with members(cluster, [answering(t) for t in "ab"]) as ids:
            survey = caller.survey("db", "who?", timeout=5, type=str)
            found = {member: answer async for member, answer in survey.items()}
            assert found == {ids[0]: "a: who?", ids[1]: "b: who?"}
            assert (sorted(survey.answered), survey.missing) == (sorted(ids), [])
            whole = caller.survey("db", "who?", timeout=5)
            assert {m: answer.payload async for m, answer in whole.items()} == {
                ids[0]: b"a: who?", ids[1]: b"b: who?",
            }  # fmt: skip
