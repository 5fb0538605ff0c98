"""Requests: one member, at most once, and always an end that says whether it may have run."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from typing import Any

import pytest
from integration.kit import cut, echo_service, named, port_of
from support.waiting import until

import iris
from iris.testing import LocalCluster


async def test_a_request_gets_its_reply() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller, cluster.client() as member:
        async with member.serve(echo_service()):
            assert await caller.request("echo", b"hello", timeout=5) == b"hello"


async def test_a_client_may_call_its_own_service() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        assert await client.request("echo", b"me", timeout=5) == b"me"


@pytest.mark.parametrize("size", [0, 1, 65_536, 1 << 20])
async def test_replies_of_any_size_up_to_the_limit_come_back_whole(size: int) -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert await client.request("echo", payload, timeout=5) == payload


async def test_a_request_over_the_limit_is_not_sent() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        with pytest.raises(iris.MessageTooLarge, match="tunnel"):
            await client.request("echo", bytes((1 << 20) + 1), timeout=5)
        assert await client.request("echo", b"still here", timeout=5) == b"still here"


async def test_a_reply_over_the_limit_is_an_error_and_the_member_goes_on() -> None:
    service = iris.Service("big")

    @service.on_request
    def big(size: int) -> bytes:
        return bytes(size)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="over"):
            await client.request("big", (1 << 20) + 1, timeout=5)
        assert await client.request("big", 3, timeout=5) == bytes(3)


async def test_an_empty_reply_stays_empty_and_none_is_none() -> None:
    service = iris.Service("quiet")

    @service.on_request
    def quiet(payload: bytes) -> object:
        return {b"empty": b"", b"none": None, b"null": iris.Reply(None)}[payload]

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        assert await client.request("quiet", b"empty", timeout=5) == b""
        for payload in (b"none", b"null"):
            assert await client.request("quiet", payload, timeout=5) is None


@pytest.mark.parametrize(
    "text", ["plain", "", "ünïcödé ☃ \U0001f680", "two\nlines\ttabs\x00nul", "x" * 4096]
)
async def test_the_text_of_a_failed_request_arrives_byte_for_byte(text: str) -> None:
    service = iris.Service("fails")

    @service.on_request
    def fails(request: iris.Request) -> None:
        request.defer().fail(text)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError) as caught:
            await client.request("fails", b"", timeout=5)
        assert caught.value.detail == text
        assert caught.value.cluster == "fails"
        assert caught.value.may_have_run


@pytest.mark.parametrize("coroutine", [False, True])
async def test_an_exception_of_a_handler_is_a_remote_error_with_its_name_and_text(
    coroutine: bool,
) -> None:
    service = iris.Service("raises")
    if coroutine:

        @service.on_request
        async def raises(payload: bytes) -> None:
            raise LookupError("no such row: ß")
    else:

        @service.on_request
        def raises_at_once(payload: bytes) -> None:
            raise LookupError("no such row: ß")

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for _ in range(3):
            with pytest.raises(iris.RemoteError) as caught:
                await client.request("raises", b"", timeout=5)
            assert caught.value.detail == "LookupError: no such row: ß"
        assert client.counters["failed handlers"] == 3


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [ValueError("\udcff"), Unprintable()], ids=["surrogate", "broken __str__"]
)
@pytest.mark.parametrize("coroutine", [False, True])
async def test_an_error_that_has_no_text_is_still_an_answer(
    error: Exception, coroutine: bool
) -> None:
    service = iris.Service("odd", limits=iris.Limits(concurrency=1))

    async def later(payload: bytes) -> bytes:
        if payload == b"fail":
            raise error
        return payload

    def at_once(payload: bytes) -> bytes:
        if payload == b"fail":
            raise error
        return payload

    service.on_request(later if coroutine else at_once)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError):
            await client.request("odd", b"fail", timeout=2)
        assert await client.request("odd", b"fine", timeout=2) == b"fine"


async def test_a_handler_that_is_cancelled_inside_does_not_hold_up_those_behind_it() -> None:
    service = iris.Service("cancels", limits=iris.Limits(concurrency=1))

    @service.on_request
    async def cancels(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        if payload == b"cancelled":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return payload

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        results = await asyncio.gather(
            *(client.request("cancels", p, timeout=2) for p in (b"cancelled", b"1", b"2")),
            return_exceptions=True,
        )
        assert isinstance(results[0], iris.RemoteError)
        assert results[1:] == [b"1", b"2"]


async def test_a_request_that_nobody_answers_times_out() -> None:
    service = iris.Service("slow")
    release = asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> None:
        await release.wait()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RequestTimeout, match=r"0\.05 s") as caught:
            await client.request("slow", b"", timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.may_have_run
        release.set()
        await cluster.settle()


async def test_a_timeout_that_is_not_above_zero_is_the_callers_mistake() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        for timeout in (0, -1):
            with pytest.raises((iris.ConfigError, iris.RequestTimeout)):
                await client.request("echo", b"", timeout=timeout)


async def test_nobody_there_is_said_at_once_and_names_members_under_other_keys() -> None:
    other = iris.Keyring.single(iris.ClusterKey(b"o" * 32))
    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client(keyring=other) as stranger,
        stranger.serve(echo_service("db")),
    ):
        started = time.monotonic()
        with pytest.raises(iris.NoMembers) as caught:
            await caller.request("db", b"", timeout=30)
        assert time.monotonic() - started < 15
        assert not caught.value.may_have_run
        (key,) = other.for_cluster("db")
        assert f"under {key.key_id[:4].hex()}…" in str(caught.value)
        assert await stranger.request("db", b"mine", timeout=5) == b"mine"


async def test_when_every_member_is_full_the_request_is_overloaded_and_has_not_run() -> None:
    service = iris.Service("busy", limits=iris.Limits(concurrency=1, queue_bytes=300))
    release, ran = asyncio.Event(), []

    @service.on_request
    async def busy(payload: bytes) -> bytes:
        ran.append(payload)
        await release.wait()
        return payload

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        first = [
            asyncio.create_task(client.request("busy", b"%d" % n, timeout=5)) for n in range(2)
        ]
        await until(lambda: ran)
        await client.flush()
        with pytest.raises(iris.Overloaded) as caught:
            await client.request("busy", bytes(250), timeout=5)
        assert not caught.value.may_have_run
        release.set()
        assert await asyncio.gather(*first) == [b"0", b"1"]
        assert ran == [b"0", b"1"]


async def test_a_request_refused_by_a_full_member_runs_once_on_another() -> None:
    """The member's own limit is tighter than the relay believes, so the frame itself comes back."""
    ran: list[str] = []
    release = asyncio.Event()
    services = {name: iris.Service("db", limits=iris.Limits(concurrency=8)) for name in "ab"}
    for name, service in services.items():

        @service.on_request
        async def run(payload: bytes, name: str = name) -> bytes:
            ran.append(name)
            await release.wait()
            return name.encode()

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as first,
        cluster.client() as second,
        first.serve(services["a"]) as binding,
        second.serve(services["b"]),
    ):
        binding._limits = iris.Limits(concurrency=8, queue_bytes=1)
        tasks = [asyncio.create_task(caller.request("db", b"", timeout=5)) for _ in range(5)]
        await until(lambda: len(ran) == 5)
        release.set()
        assert sorted(await asyncio.gather(*tasks)) == [b"a", b"b", b"b", b"b", b"b"]
        assert sorted(ran) == ["a", "b", "b", "b", "b"]


async def test_a_member_lost_in_the_middle_is_connection_lost_that_may_have_run() -> None:
    service = iris.Service("db")
    started = asyncio.Event()

    @service.on_request
    async def never(payload: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        named(cluster, "member") as member,
        contextlib.AsyncExitStack() as stack,
    ):
        await stack.enter_async_context(member.serve(service))
        task = asyncio.create_task(caller.request("db", b"", timeout=5))
        await started.wait()
        await cut(cluster, "member")
        with pytest.raises(iris.ConnectionLost, match="the member's session was lost") as caught:
            await task
        assert caught.value.may_have_run
        for worker in asyncio.all_tasks():
            if worker.get_name() == "iris-db":
                worker.cancel()


async def test_an_idempotent_request_is_answered_by_another_member() -> None:
    started = asyncio.Event()
    hanging, healthy = iris.Service("db"), echo_service("db")

    @hanging.on_request
    async def hang(payload: bytes) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b"never"

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        named(cluster, "doomed") as doomed,
        cluster.client() as survivor,
        contextlib.AsyncExitStack() as stack,
    ):
        binding = await stack.enter_async_context(doomed.serve(hanging))
        task = asyncio.create_task(caller.request("db", b"x", timeout=5, idempotent=True))
        await started.wait()
        async with survivor.serve(healthy):
            binding.leaving = True  # it does not come back as a member
            await cut(cluster, "doomed")
            assert await task == b"x"
        await binding.stop()


async def test_a_deferred_reply_may_come_long_after_the_handler_returned() -> None:
    service = iris.Service("later")
    owed: list[iris.Deferred] = []

    @service.on_request
    def later(request: iris.Request) -> str:
        owed.append(request.defer())
        return "what it returns is ignored"

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        tasks = [asyncio.create_task(client.request("later", b"", timeout=5)) for _ in range(3)]
        await until(lambda: len(owed) == 3)
        await client.flush()
        assert not any(task.done() for task in tasks)
        for number, deferred in enumerate(reversed(owed)):
            deferred.reply({"number": number})
            deferred.reply("only the first answer counts")
            deferred.fail("neither does this")
        assert await asyncio.gather(*tasks) == [{"number": n} for n in (2, 1, 0)]


async def test_a_deferred_reply_that_is_dropped_is_an_error() -> None:
    service = iris.Service("forgets")

    @service.on_request
    def forgets(request: iris.Request) -> None:
        request.defer()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        task = asyncio.create_task(client.request("forgets", b"", timeout=5))
        await client.flush()
        gc.collect()
        with pytest.raises(iris.RemoteError, match="deferred reply"):
            await task


async def test_a_deferred_reply_of_a_coroutine_outlives_an_exception_after_it() -> None:
    service = iris.Service("later")
    owed: list[iris.Deferred] = []

    @service.on_request
    async def later(request: iris.Request) -> None:
        owed.append(request.defer())
        raise RuntimeError("after the promise")

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        task = asyncio.create_task(client.request("later", b"", timeout=5))
        await until(lambda: owed)
        owed[0].reply(b"kept")
        assert await task == b"kept"


async def test_headers_travel_both_ways_sealed_with_their_message() -> None:
    service = iris.Service("headers")

    @service.on_request
    def headers(message: iris.Message) -> iris.Reply:
        assert message.headers is not None
        return iris.Reply(message.payload, {"seen": message.headers["traceparent"]})

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        reply = await client.request(
            "headers", b"x", timeout=5, headers={"traceparent": "00-ü"}, type=iris.Message
        )
        assert isinstance(reply, iris.Message)
        assert (reply.payload, reply.headers, reply.name) == (b"x", {"seen": "00-ü"}, "headers")
        assert len(reply.source) == 16


async def test_a_reply_that_does_not_fit_the_type_asked_for_is_a_decode_error() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        assert await client.request("echo", b"\x91\x07", timeout=5, type=list[int]) == [7]
        with pytest.raises(iris.DecodeError, match="int"):
            await client.request("echo", b"\xa1x", timeout=5, type=int)


async def test_a_request_cancelled_at_its_await_leaves_nothing_behind() -> None:
    service = iris.Service("slow")
    release, started = asyncio.Event(), []

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        started.append(payload)
        await release.wait()
        return payload

    async with LocalCluster() as cluster, named(cluster, "caller") as caller:
        async with cluster.client() as member, member.serve(service):
            tasks = [
                asyncio.create_task(caller.request("slow", b"%d" % n, timeout=5)) for n in range(5)
            ]
            await until(lambda: len(started) == 5)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            status = await caller.status()
            release.set()
            await cluster.settle()
            (mine,) = [s for s in (await caller.status())["sessions"] if s["label"] == "caller"]
            assert (mine["waiting"], mine["running"]) == (0, 0)
            assert status["accounts"]["held"] == 0
            late = asyncio.create_task(caller.request("slow", b"next", timeout=5))
            assert await late == b"next"


async def test_a_request_cancelled_before_its_first_turn_is_not_answered_to_anybody() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echo_service()):
        task = asyncio.create_task(client.request("echo", b"x", timeout=5))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.request("echo", b"y", timeout=5) == b"y"


async def test_four_members_get_about_equal_shares() -> None:
    counts = dict.fromkeys(range(4), 0)
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster())
        caller = await stack.enter_async_context(cluster.client())
        for number in counts:
            service = iris.Service("db")

            @service.on_request
            async def run(payload: bytes, number: int = number) -> bytes:
                counts[number] += 1
                await asyncio.sleep(0)
                return payload

            member = await stack.enter_async_context(cluster.client())
            await stack.enter_async_context(member.serve(service))
        for _ in range(20):
            await asyncio.gather(*(caller.request("db", b"", timeout=5) for _ in range(40)))
        assert sum(counts.values()) == 800
        assert min(counts.values()) >= 150
        assert max(counts.values()) <= 250


async def test_saturated_members_are_passed_over_while_others_have_a_free_handler() -> None:
    release = asyncio.Event()
    counts = {"small": 0, "large": 0}
    limits = {"small": iris.Limits(concurrency=1), "large": iris.Limits(concurrency=20)}
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster())
        caller = await stack.enter_async_context(cluster.client())
        for name in counts:
            service = iris.Service("db", limits=limits[name])

            @service.on_request
            async def run(payload: bytes, name: str = name) -> None:
                counts[name] += 1
                await release.wait()

            member = await stack.enter_async_context(cluster.client())
            await stack.enter_async_context(member.serve(service))
        tasks = [asyncio.create_task(caller.request("db", b"", timeout=5)) for _ in range(21)]
        await until(lambda: sum(counts.values()) == 21)
        assert counts == {"small": 1, "large": 20}
        release.set()
        await asyncio.gather(*tasks)


async def test_a_request_whose_deadline_passed_in_the_members_queue_is_not_started() -> None:
    service = iris.Service("db", limits=iris.Limits(concurrency=1))
    release, ran = asyncio.Event(), []

    @service.on_request
    async def run(payload: bytes) -> bytes:
        ran.append(payload)
        await release.wait()
        return payload

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        first = asyncio.create_task(client.request("db", b"first", timeout=5))
        await until(lambda: ran)
        with pytest.raises(iris.RequestTimeout):
            await client.request("db", b"late", timeout=0.02)
        release.set()
        assert await first == b"first"
        await cluster.settle()
        assert ran == [b"first"]


async def test_many_requests_at_once_all_get_their_own_reply() -> None:
    service = iris.Service("echo")

    @service.on_request
    async def echo(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return payload

    async with LocalCluster() as cluster, cluster.client() as caller, cluster.client() as member:
        async with member.serve(service):
            replies = await asyncio.gather(
                *(caller.request("echo", b"%d" % n, timeout=10) for n in range(2000))
            )
            assert replies == [b"%d" % n for n in range(2000)]


async def test_one_key_listed_in_two_entries_of_the_keyring_is_one_key() -> None:
    secret = iris.ClusterKey(b"k" * 32)
    text = iris.Keyring.single(secret).add("echo", iris.ClusterKey(b"l" * 32)).dump()
    keyring = iris.Keyring.parse(text)
    async with LocalCluster() as cluster, cluster.client(keyring=keyring) as client:
        async with client.serve(echo_service("echo")), client.serve(echo_service("other")):
            assert await client.request("echo", b"1", timeout=5) == b"1"
            assert await client.request("other", b"2", timeout=5) == b"2"


async def test_invalid_names_and_missing_keys_are_said_before_anything_is_sent() -> None:
    keyring = iris.Keyring.parse(iris.Keyring({"db": (iris.ClusterKey(b"k" * 32),)}).dump())
    async with LocalCluster() as cluster, cluster.client(keyring=keyring) as client:
        with pytest.raises(iris.InvalidName):
            await client.request("no spaces", b"", timeout=1)
        with pytest.raises(iris.KeyringError, match="iris key add other"):
            await client.request("other", b"", timeout=1)
        with pytest.raises(iris.KeyringError):
            async with client.serve(echo_service("other")):
                raise AssertionError("not served")
        assert port_of(cluster, client.config.label).session.pending == 0


async def test_a_closed_client_says_so() -> None:
    async with LocalCluster() as cluster:
        client = cluster.client()
        with pytest.raises(iris.Closed):
            await client.request("echo", b"", timeout=1)
        async with client:
            pass
        with pytest.raises(iris.Closed):
            await client.request("echo", b"", timeout=1)
        with pytest.raises(iris.Closed):
            client.offer("a", b"")
        await client.close()


async def test_a_deferred_reply_collected_in_another_thread_fails_on_the_loop() -> None:
    service = iris.Service("later")
    held: list[iris.Deferred] = []
    seen: list[int] = []

    @service.on_request
    def later(request: iris.Request) -> None:
        held.append(request.defer())

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        answer_error = binding.answer_error

        def noted(*args: Any, **kwargs: Any) -> None:
            seen.append(threading.get_ident())
            answer_error(*args, **kwargs)

        binding.answer_error = noted  # type: ignore[method-assign]
        call = asyncio.create_task(caller.request("later", b"", timeout=5))
        await until(lambda: held)

        def collect() -> None:
            held.clear()
            gc.collect()

        await asyncio.to_thread(collect)
        with pytest.raises(iris.RemoteError, match="deferred reply"):
            await call
        assert seen == [threading.get_ident()]
