"""REQ and REP."""

from __future__ import annotations

import asyncio

import pynng
import pytest
from interop.sp.kit import WAIT_S, Bridge, World, eventually, make_certificate, nngcat, outlives_nng

import iris


def answers() -> iris.Service:
    service = iris.Service("answers")

    @service.on_request
    def answer(question: str) -> str:
        return f"{question}!"

    return service


@pytest.mark.parametrize("transport", ["ipc", "tcp", "ws", "tls", "wss"])
@outlives_nng
async def test_a_req_program_asks_a_cluster_over_each_transport(
    world: World, bridge: Bridge, ws_bridge: Bridge, transport: str
) -> None:
    url = (ws_bridge if transport in ("ws", "wss") else bridge).url(f"rep-{transport}")
    tls = ["--cacert", f"{world.root}/server.pem"] if transport in ("tls", "wss") else []
    url = url.replace("127.0.0.1", "localhost") if tls else url
    asking = nngcat("--req", "--dial", url, *tls, "--data", "ping", "--quoted")
    async with world.client() as client, client.serve(answers()), asking as cat:
        assert await cat.line() == "ping!"


async def test_with_tls_ca_only_a_program_with_a_certificate_of_it_is_let_in(
    world: World, bridge: Bridge
) -> None:
    make_certificate(world.root, "stranger")
    url = bridge.url("rep-mutual").replace("127.0.0.1", "localhost")

    def dial(own: str | None) -> pynng.Socket:
        given = {"cert": "pem", "key": "key"} if own else {}
        config = pynng.TLSConfig(
            pynng.TLSConfig.MODE_CLIENT,
            server_name="localhost",
            ca_string=(world.root / "server.pem").read_text(),
            **{f"own_{what}_string": (world.root / f"{own}.{end}").read_text() for what, end in given.items()},
        )  # fmt: skip
        socket = pynng.Req0(tls_config=config, recv_timeout=20_000)
        try:
            socket.dial(url, block=True)
        except BaseException:
            socket.close()
            raise
        return socket

    for stranger in (None, "stranger"):
        with pytest.raises(pynng.NNGException):
            await asyncio.to_thread(dial, stranger)
    async with world.client() as client, client.serve(answers()):
        with await asyncio.to_thread(dial, "server") as admitted:
            await admitted.asend(b"ping")
            assert await admitted.arecv() == b"ping!"


async def test_one_slow_request_holds_no_other(world: World) -> None:
    entry = '[[socket]]\nprotocol = "rep"\ncluster = "answers"\nname = "slow"\ntimeout_s = 30\nlisten = "{0}"\n'
    bridge = Bridge(world, entry.format(world.ipc("slow-rep")))
    service = iris.Service("answers", limits=iris.Limits(concurrency=256))
    begun, others_answered = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def answer(question: str) -> str:
        if question == "slow":
            begun.set()
            await others_answered.wait()
        return f"{question}!"

    async with world.client() as client, client.serve(service):
        with pynng.Req0(dial=bridge.url("slow"), recv_timeout=30_000) as socket:

            async def ask(question: bytes) -> bytes:
                with socket.new_context() as context:
                    await context.asend(question)
                    answer: bytes = await context.arecv()
                    return answer

            slow = asyncio.create_task(ask(b"slow"))
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
            fast = await asyncio.gather(*(ask(b"%d" % n) for n in range(200)))
            assert fast == [b"%d!" % n for n in range(200)]
            assert not slow.done()
            others_answered.set()
            assert await slow == b"slow!"
    assert await asyncio.to_thread(bridge.end) == 0


async def test_a_failed_request_is_answered_with_the_text_of_error_reply(
    world: World, bridge: Bridge
) -> None:
    with pynng.Req0(dial=bridge.url("rep-error"), recv_timeout=10_000) as socket:
        await socket.asend(b"anybody?")
        assert (await socket.arecv()).startswith(b"!NoMembers: missing")


async def test_without_it_a_failed_request_is_counted_and_not_answered(
    world: World, bridge: Bridge
) -> None:
    with pynng.Req0(dial=bridge.url("rep-silent"), recv_timeout=500) as socket:
        await socket.asend(b"anybody?")
        with pytest.raises(pynng.Timeout):
            await socket.arecv()
    await bridge.until_lost("rep-silent", "NoMembers")


async def test_a_rep_program_answers_requests_of_its_cluster(world: World, bridge: Bridge) -> None:
    url = bridge.url("req")
    async with world.client() as client, nngcat("--rep", "--dial", url, "--data", "pong", "--quoted") as cat:  # fmt: skip
        await bridge.until_serving("req")
        await client.wait_for_members("asked", 1, timeout=10)
        assert await client.request("asked", b"ping", timeout=5) == b"pong"
        assert await cat.line() == "ping"


async def test_a_bridge_dials_a_rep_program_that_listens(world: World, bridge: Bridge) -> None:
    async with world.client() as client, nngcat("--rep", "--listen", bridge.url("req-dial"), "--data", "pong"):  # fmt: skip
        await bridge.until_serving("req-dial")
        await client.wait_for_members("asked-by-dialling", 1, timeout=10)
        assert await client.request("asked-by-dialling", b"ping", timeout=5) == b"pong"


async def test_a_rep_program_that_goes_away_ends_its_requests_and_the_membership(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client:
        socket = pynng.Rep0(dial=bridge.url("req"))
        await bridge.until_serving("req")
        await client.wait_for_members("asked", 1, timeout=10)
        asking = asyncio.create_task(client.request("asked", b"never", timeout=10))
        assert await socket.arecv() == b"never"
        await asyncio.to_thread(socket.close)
        with pytest.raises(iris.RemoteError, match="ConnectionReset"):
            await asking
        async for members in client.watch_members("asked"):
            if not len(members):
                break
        with pytest.raises(iris.NoMembers):
            await client.request("asked", b"nobody", timeout=5)


async def test_a_rep_program_that_does_not_answer_in_time_is_an_error_for_its_caller_alone(
    world: World, bridge: Bridge
) -> None:
    async with world.client() as client:
        with pynng.Rep0(dial=bridge.url("req")) as socket:
            await bridge.until_serving("req")
            await client.wait_for_members("asked", 1, timeout=10)
            context, other = socket.new_context(), socket.new_context()
            late = asyncio.create_task(client.request("asked", b"never", timeout=10))
            assert await context.arecv() == b"never"
            good = asyncio.create_task(client.request("asked", b"now", timeout=10))
            assert await other.arecv() == b"now"
            await other.asend(b"yes")
            assert await good == b"yes"
            with pytest.raises(iris.RemoteError, match="no SP peer answered"):
                await late
            context.close()
            other.close()
    await eventually(lambda: bridge.status("req")["losses"].get("sp: no answer", 0) >= 1)


async def test_a_bridge_dials_with_tls_and_checks_the_certificate(world: World) -> None:
    entry = '[[socket]]\nprotocol = "req"\ncluster = "{0}"\nname = "{0}"\ndial = "{1}"\ntls_ca = "{2}"\n'
    config = pynng.TLSConfig(
        pynng.TLSConfig.MODE_SERVER,
        own_cert_string=(world.root / "server.pem").read_text(),
        own_key_string=(world.root / "server.key").read_text(),
    )
    with pynng.Rep0(tls_config=config) as server:
        url = str(server.listen("tls+tcp://127.0.0.1:0").url).replace("127.0.0.1", "localhost")
        right, wrong = f"{world.root}/server.pem", f"{world.root}/other.pem"
        make_certificate(world.root, "other")
        bridge = Bridge(
            world, entry.format("sealed", url, right) + entry.format("fooled", url, wrong)
        )
        async with world.client() as client:
            await client.wait_for_members("sealed", 1, timeout=20)
            asking = asyncio.create_task(client.request("sealed", b"who", timeout=10))
            assert await server.arecv() == b"who"
            await server.asend(b"me")
            assert await asking == b"me"
            with pytest.raises(iris.NoMembers):
                await client.request("fooled", b"who", timeout=5)
        assert bridge.status("fooled")["peers"] == 0
        assert await asyncio.to_thread(bridge.end) == 0
