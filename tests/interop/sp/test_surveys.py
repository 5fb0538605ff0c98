"""SURVEYOR and RESPONDENT."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pynng
import pytest
from interop.sp.kit import Bridge, World, nngcat, outlives_nng

import iris


def one_of(crowd: str, name: str) -> iris.Service:
    service = iris.Service(crowd)

    @service.on_survey
    def answer(question: str) -> str:
        if question == "fail":
            raise ValueError(name)
        return f"{name}: {question}"

    return service


@pytest.mark.parametrize("entry", ["respondent", "respondent-ws"])
@outlives_nng
async def test_a_surveyor_program_gets_the_answer_of_every_member(
    world: World, bridge: Bridge, ws_bridge: Bridge, entry: str
) -> None:
    names = [f"m{number}" for number in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            client = await stack.enter_async_context(world.client())
            await stack.enter_async_context(client.serve(one_of("crowd", name)))
        await client.wait_for_members("crowd", len(names), timeout=10)
        url = (ws_bridge if entry.endswith("ws") else bridge).url(entry)
        cat = await stack.enter_async_context(
            nngcat("--surveyor", "--dial", url, "--data", "who", "--quoted", "--recv-timeout", "3")
        )
        received = {await cat.line() for _ in names}
        assert received == {f"{name}: who" for name in names}


async def test_surveys_run_beside_each_other_and_lose_no_answer(
    world: World, bridge: Bridge
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client())
        for name in ("one", "two", "three", "four"):
            other = await stack.enter_async_context(world.client())
            await stack.enter_async_context(other.serve(one_of("crowd", name)))
        await client.wait_for_members("crowd", 4, timeout=10)
        with pynng.Surveyor0(dial=bridge.url("respondent"), survey_time=10_000) as socket:

            async def ask(number: int) -> int:
                with socket.new_context() as context:
                    await context.asend(b"%d" % number)
                    received = {await context.arecv() for _ in range(4)}
                    return len(received)

            # A surveyor of nng has a queue of 8 surveys for each peer, and drops the next.
            for begin in range(0, 40, 8):
                asked = (ask(number) for number in range(begin, begin + 8))
                assert await asyncio.gather(*asked) == [4] * 8


async def test_a_burst_of_surveys_reaches_a_respondent_program(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client:
        with pynng.Respondent0(dial=bridge.url("surveyor")) as socket:
            await bridge.until_serving("surveyor")
            await client.wait_for_members("surveyed", 1, timeout=10)

            async def respond() -> None:
                with socket.new_context() as context:
                    while True:
                        await context.asend(await context.arecv())

            responding = [asyncio.create_task(respond()) for _ in range(8)]

            async def ask(number: int) -> list[bytes]:
                survey = client.survey("surveyed", b"%d" % number, timeout=10, type=bytes)
                return [answer async for answer in survey]

            received = await asyncio.gather(*(ask(number) for number in range(50)))
            pending = set(responding)
            while pending:  # pynng swallows a cancellation that comes as a call completes
                for task in pending:
                    task.cancel()
                _, pending = await asyncio.wait(pending, timeout=0.1)
    assert received == [[b"%d" % number] for number in range(50)]


@outlives_nng
async def test_over_ws_no_respondent_program_is_taken_for_a_slow_one(
    world: World, ws_bridge: Bridge
) -> None:
    url = ws_bridge.url("surveyor-ws")
    async with world.client() as client, nngcat("--respondent", "--dial", url, "--data", "here"):
        await ws_bridge.until_serving("surveyor-ws")
        await client.wait_for_members("surveyed-ws", 1, timeout=10)
        for number in range(20):
            survey = client.survey("surveyed-ws", b"%d" % number, timeout=10, type=bytes)
            assert [answer async for answer in survey] == [b"here"]
    assert "slow peer" not in ws_bridge.status("surveyor-ws")["losses"]


async def test_a_respondent_that_reads_nothing_is_waited_for_once_and_counted(
    world: World,
) -> None:
    entry = f'[[socket]]\nprotocol = "surveyor"\nname = "s"\ncluster = "stalled"\nmax_message_bytes = 2_000_000\nlisten = "{world.ipc("stalled")}"\n'
    bridge = Bridge(world, entry)
    async with world.client() as client:
        with socket_of_a_respondent(world.root / "stalled"), pynng.Respondent0(dial=bridge.url("s")) as good:  # fmt: skip
            await bridge.until_serving("s", 2)
            await client.wait_for_members("stalled", 1, timeout=10)
            for number in range(30):
                survey = client.survey("stalled", b"%d" % number + bytes(500_000), timeout=20, type=bytes)  # fmt: skip
                answering = asyncio.create_task(good.arecv())
                asking = asyncio.create_task(anext(aiter(survey)))
                assert (await answering).startswith(b"%d\0" % number)
                await good.asend(b"%d" % number)
                assert await asking == b"%d" % number
            # 9 wait in nng; each of the others is lost to the one, and counted.
            assert bridge.status("s")["losses"]["slow peer"] in range(15, 23)
    assert bridge.end() == 0


@contextlib.contextmanager
def socket_of_a_respondent(path: Path) -> Iterator[socket.socket]:
    """A peer that sends its header over ipc and then neither reads nor writes."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(b"\0SP\0\0\x63\0\0")
        yield peer


async def test_members_that_fail_are_counted(world: World, bridge: Bridge) -> None:
    async with world.client() as client, client.serve(one_of("crowd", "one")):
        with pynng.Surveyor0(dial=bridge.url("respondent"), survey_time=300) as socket:
            await socket.asend(b"fail")
            with pytest.raises(pynng.Timeout):
                await socket.arecv()
        await bridge.until_lost("respondent", "members that failed")


async def test_a_respondent_program_answers_surveys_of_its_cluster(
    world: World, bridge: Bridge
) -> None:
    url = bridge.url("surveyor")
    async with world.client() as client, nngcat("--respondent", "--dial", url, "--data", "here", "--quoted") as cat:  # fmt: skip
        await bridge.until_serving("surveyor")
        await client.wait_for_members("surveyed", 1, timeout=10)
        survey = client.survey("surveyed", b"who", timeout=5, type=bytes)
        assert [answer async for answer in survey] == [b"here"]
        assert await cat.line() == "who"


async def test_all_respondent_programs_answer_as_a_list(world: World, bridge: Bridge) -> None:
    url = bridge.url("surveyor-all")
    async with world.client() as client, nngcat("--respondent", "--dial", url, "--data", "a"), nngcat("--respondent", "--dial", url, "--data", "b"):  # fmt: skip
        await bridge.until_serving("surveyor-all", 2)
        await client.wait_for_members("surveyed-all", 1, timeout=10)
        survey = client.survey("surveyed-all", b"who", timeout=5, type=list[bytes])
        (answer,) = [answer async for answer in survey]
        assert sorted(answer) == [b"a", b"b"]


async def test_responses_that_do_not_fit_into_one_answer_are_counted(
    world: World, bridge: Bridge
) -> None:
    url = bridge.url("surveyor-all")
    async with world.client() as client:
        with pynng.Respondent0(dial=url) as one, pynng.Respondent0(dial=url) as two:
            await bridge.until_serving("surveyor-all", 2)
            await client.wait_for_members("surveyed-all", 1, timeout=10)

            async def respond(socket: pynng.Socket) -> None:
                await socket.arecv()
                await socket.asend(bytes(700_000))

            survey = client.survey("surveyed-all", b"who", timeout=5, type=list[bytes])
            responding = asyncio.gather(respond(one), respond(two))
            assert [answer async for answer in survey] == [[bytes(700_000)]]
            await responding
    assert bridge.status("surveyor-all")["losses"]["answer full"] == 1


async def test_a_survey_that_no_respondent_program_answers_fails_for_its_member(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client:
        with pynng.Respondent0(dial=bridge.url("surveyor")):
            await bridge.until_serving("surveyor")
            await client.wait_for_members("surveyed", 1, timeout=10)
            survey = client.survey("surveyed", b"who", timeout=8)
            assert [answer async for answer in survey] == []
            (detail,) = survey.failed.values()
            assert "no SP peer answered" in detail
