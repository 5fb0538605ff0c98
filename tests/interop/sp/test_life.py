"""Start, stop, and the events that a bridge must survive."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pynng
import pytest
from interop.sp.kit import WAIT_S, Bridge, World, a_world, eventually, nngcat, until
from support.pages import Scraped, scrape
from support.waiting import wait_until

import iris
from iris.keyfiles import create_keys

REP = '[[socket]]\nprotocol = "rep"\ncluster = "answers"\nname = "rep"\ntimeout_s = 5\nlisten = "{url}"\n'


@pytest.fixture
def own_world(_foreign_programs: None) -> Iterator[World]:
    """A relay that a test may end."""
    yield from a_world()


def upper() -> iris.Service:
    service = iris.Service("answers")
    service.on_request(bytes.upper)
    return service


async def test_a_bridge_lives_through_a_restart_of_its_relay(own_world: World) -> None:
    world = own_world
    bridge = Bridge(world, REP.format(url=world.ipc("rep")) + f'[[socket]]\nprotocol = "req"\ncluster = "asked"\nname = "req"\nlisten = "{world.ipc("req")}"\n')  # fmt: skip
    async with world.client() as client, client.serve(upper()):
        with pynng.Req0(dial=bridge.url("rep"), recv_timeout=20_000) as socket, pynng.Rep0(dial=bridge.url("req")) as server:  # fmt: skip
            await socket.asend(b"before")
            assert await socket.arecv() == b"BEFORE"
            world.relay.kill()
            await asyncio.to_thread(world.start_relay)
            await client.wait_for_members("answers", 1, timeout=20)
            with contextlib.suppress(iris.RequestTimeout):
                await client.wait_for_members("asked", 1, timeout=20)
            assert len(await client.members("asked")) == 1, bridge.written()
            async with asyncio.timeout(30):
                while True:  # the bridge's own session may be back a moment later
                    await socket.asend(b"after")
                    socket.recv_timeout = 6000
                    try:
                        assert await socket.arecv() == b"AFTER"
                        break
                    except pynng.Timeout:
                        continue
            asking = asyncio.create_task(client.request("asked", b"who", timeout=10))
            assert await server.arecv() == b"who"
            await server.asend(b"me")
            assert await asking == b"me"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_with_what_is_in_flight(
    world: World, number: signal.Signals
) -> None:
    path = world.root / f"life-{number}"
    bridge = Bridge(world, REP.format(url=f"ipc://{path}"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    service = iris.Service("answers")
    asked = asyncio.Event()

    @service.on_request
    async def answer(question: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(0.5)
        return b"late but true"

    async with world.client() as client, client.serve(service):
        with pynng.Req0(dial=f"ipc://{path}", recv_timeout=10_000) as socket:
            await socket.asend(b"?")
            await asked.wait()
            bridge.process.send_signal(number)
            assert await socket.arecv() == b"late but true"
        assert await asyncio.to_thread(bridge.process.wait, 20) == 0
    assert not path.exists()
    assert "Traceback" not in bridge.written()
    assert bridge.events("bridge.status")[-1]["to_sp"] == 1


async def test_it_ends_in_time_with_peers_that_neither_read_nor_answer(world: World) -> None:
    entries = REP.format(url=world.ipc("stuck-rep"))
    for protocol, extra in (("pair", ""), ("bus", ""), ("push", ""), ("req", ""), ("surveyor", "")):
        entries += f'[[socket]]\nprotocol = "{protocol}"\nname = "{protocol}"\ncluster = "stuck-{protocol}"\nlisten = "{world.ipc(f"stuck-{protocol}")}"\n{extra}'
    entries += f'[[socket]]\nprotocol = "pub"\ntopics = ["stuck"]\nname = "pub"\nlisten = "{world.ipc("stuck-pub")}"\n'
    bridge = Bridge(world, entries)
    service = iris.Service("answers")
    asked = asyncio.Event()

    @service.on_request
    async def never(question: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(60)
        return b""

    async with world.client(drain_timeout_s=0.1) as client, client.serve(service):
        with pynng.Req0(dial=bridge.url("rep")) as req, pynng.Rep0(dial=bridge.url("req")), pynng.Pull0(dial=bridge.url("push")), pynng.Pair0(dial=bridge.url("pair")):  # fmt: skip
            await req.asend(b"?")
            async with asyncio.timeout(WAIT_S):
                await asked.wait()
            await client.wait_for_members("stuck-req", 1, timeout=10)
            await client.wait_for_members("stuck-push", 1, timeout=10)
            asking = asyncio.create_task(client.request("stuck-req", b"?", timeout=30))
            for _ in range(3000):
                await client.push("stuck-push", bytes(4096))
            await client.flush()
            assert await asyncio.to_thread(bridge.end) == 0
            with pytest.raises(iris.RequestError):
                await asking
    assert bridge.events("bridge.status")[0]["losses"] == {"stopping": 1}, (
        "the request of the REQ program"
    )
    assert not list(world.root.glob("stuck-*"))


async def test_it_ends_cleanly_while_both_sides_keep_sending(world: World) -> None:
    entries = ""
    for protocol, address in (("pull", "cluster"), ("respondent", "cluster"), ("bus", "cluster"), ("sub", "topic"), ("rep", "cluster")):  # fmt: skip
        entries += f'[[socket]]\nprotocol = "{protocol}"\nname = "{protocol}"\n{address} = "flood"\nlisten = "{world.ipc(f"flood-{protocol}")}"\n'
    entries += f'[[socket]]\nprotocol = "pub"\nname = "pub"\ntopics = ["flood"]\nlisten = "{world.ipc("flood-pub")}"\n'
    bridge = Bridge(world, entries)
    service = iris.Service("flood")
    service.on_push(lambda data: None)
    service.on_survey(lambda data: b"")
    service.on_broadcast(lambda data: None)
    service.on_request(lambda data: b"")
    kinds = {"pull": pynng.Push0, "respondent": pynng.Surveyor0, "bus": pynng.Bus0, "sub": pynng.Pub0, "rep": pynng.Req0}  # fmt: skip
    over = threading.Event()

    def flood(socket: pynng.Socket) -> None:
        while not over.is_set():
            with contextlib.suppress(pynng.Timeout):
                socket.send(b"flood |x")

    async with world.client() as client, client.serve(service):

        async def publish() -> None:
            while True:
                await client.publish("flood", b"x")
                await asyncio.sleep(0)

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(kind(dial=bridge.url(name), send_timeout=100)) for name, kind in kinds.items()]  # fmt: skip
            stack.enter_context(pynng.Sub0(dial=bridge.url("pub"), topics=""))
            flooding = [asyncio.create_task(asyncio.to_thread(flood, s)) for s in sockets]
            publishing = asyncio.create_task(publish())
            try:
                for name in kinds:
                    await eventually(lambda name=name: bridge.status(name)["from_sp"])
                await eventually(lambda: bridge.status("pub")["to_sp"])
                assert await asyncio.to_thread(bridge.end) == 0
            finally:
                over.set()
                publishing.cancel()
                await asyncio.gather(*flooding)
    assert "Traceback" not in bridge.written()
    assert not bridge.events("bridge.stuck")


async def test_a_changed_keyring_is_taken_up_at_a_sighup(own_world: World) -> None:
    world = own_world
    bridge = Bridge(world, REP.format(url=world.ipc("rep")) + f'[[socket]]\nprotocol = "req"\ncluster = "asked"\nname = "req"\nlisten = "{world.ipc("req")}"\n')  # fmt: skip
    keys = world.root / "keys"
    file = keys / "keyring.toml"
    before = file.read_bytes()
    file.write_text("no keyring")
    bridge.process.send_signal(signal.SIGHUP)
    refused = bridge.logged("bridge.keys_not_reloaded", 2)
    assert [line["socket"] for line in refused] == ["rep", "req"]
    file.write_bytes(before)
    with pynng.Req0(dial=bridge.url("rep"), recv_timeout=20_000) as socket:
        async with world.client() as client, client.serve(upper()):
            await socket.asend(b"old keys")
            assert await socket.arecv() == b"OLD KEYS"
        shutil.rmtree(keys)
        create_keys(keys)
        bridge.process.send_signal(signal.SIGHUP)
        bridge.logged("bridge.keys_reloaded", 2)
        async with world.client() as client, client.serve(upper()):
            await socket.asend(b"new keys")
            assert await socket.arecv() == b"NEW KEYS"
            with pynng.Rep0(dial=bridge.url("req")) as server:
                await bridge.until_serving("req")
                await client.wait_for_members("asked", 1, timeout=20)
                asking = asyncio.create_task(client.request("asked", b"who", timeout=20))
                assert await server.arecv() == b"who"
                await server.asend(b"me")
                assert await asking == b"me"
    assert bridge.end() == 0


def test_a_file_that_is_not_a_socket_is_left_alone(world: World) -> None:
    path = world.root / "precious"
    path.write_text("precious")
    second = Bridge(world, REP.format(url=f"ipc://{path}"), ready=False)
    assert second.process.wait(20) == 2
    assert f"iris: rep: listen: {path} exists and is not a socket" in second.written()
    assert path.read_text() == "precious"


def test_it_ends_with_success_when_stopped_before_its_relay_answers(own_world: World) -> None:
    own_world.relay.process.send_signal(signal.SIGSTOP)
    try:
        bridge = Bridge(own_world, REP.format(url=own_world.ipc("frozen")), ready=False)
        until(lambda: handles(bridge.process.pid, signal.SIGTERM))
        assert bridge.end() == 0
    finally:
        own_world.relay.process.send_signal(signal.SIGCONT)
    assert not list(own_world.root.glob("frozen"))


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


async def test_a_second_signal_ends_it_at_once(world: World) -> None:
    bridge = Bridge(world, REP.format(url=world.ipc("twice")))
    service = iris.Service("answers")
    asked = asyncio.Event()

    @service.on_request
    async def never(question: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(60)
        return b""

    async with world.client(drain_timeout_s=0.1) as client, client.serve(service):
        with pynng.Req0(dial=bridge.url("rep")) as req:
            await req.asend(b"?")
            await asked.wait()
            bridge.process.send_signal(signal.SIGTERM)
            bridge.process.send_signal(signal.SIGINT)
            code = await asyncio.to_thread(bridge.process.wait, 20)
    # Both may reach one turn of its loop, or the first was not yet through.
    assert code in (0, 1)


async def test_what_a_killed_bridge_left_is_replaced(world: World) -> None:
    path = world.root / "killed"
    Bridge(world, REP.format(url=f"ipc://{path}")).kill()
    assert path.exists()
    bridge = Bridge(world, REP.format(url=f"ipc://{path}"))
    async with world.client() as client, client.serve(upper()), nngcat("--req", "--dial", f"ipc://{path}", "--data", "a", "--quoted") as cat:  # fmt: skip
        assert await cat.line() == "A"
    assert bridge.end() == 0
    assert not path.exists()


def test_an_address_in_use_is_named_and_taken_from_nobody(world: World, bridge: Bridge) -> None:
    second = Bridge(world, REP.format(url=bridge.url("rep-ipc")), ready=False)
    assert second.process.wait(20) == 2
    assert f"iris: rep: listen: {bridge.url('rep-ipc')}: Address in use" in second.written()
    assert Path(bridge.url("rep-ipc").removeprefix("ipc://")).exists()


def test_a_wrong_file_is_named_by_entry_and_field(world: World) -> None:
    second = Bridge(world, REP.format(url="tcp://0.0.0.0:1"), ready=False)
    assert second.process.wait(20) == 2
    assert "iris: socket 1: listen: 0.0.0.0 is not a loopback address" in second.written()


def test_without_a_relay_it_says_so_and_leaves_nothing(world: World) -> None:
    path = world.root / "no-relay"
    here = {**world.environ, "IRIS_RELAY": str(world.root / "nobody.sock")}
    second = Bridge(world, REP.format(url=f"ipc://{path}"), ready=False, environ=here)
    assert second.process.wait(20) == 2
    assert "nobody.sock" in second.written()
    assert not path.exists()


async def test_more_peers_than_allowed_are_turned_away(world: World) -> None:
    url = world.ipc("crowded")
    bridge = Bridge(world, REP.format(url=url) + "max_peers = 2\n")
    async with world.client() as client, client.serve(upper()):
        with pynng.Req0(dial=url, recv_timeout=20_000) as one, pynng.Req0(dial=url):
            await bridge.until_peers(
                "rep", 2
            )  # before another comes, who would else be let in first
            with pynng.Req0(dial=url):
                await bridge.until_lost("rep", "too many peers")
                await one.asend(b"a")
                assert await one.arecv() == b"A"
                assert bridge.status("rep")["peers"] == 2
    until(lambda: bridge.status("rep")["peers"] == 0)


async def test_the_counts_of_each_socket_are_metrics(own_world: World) -> None:
    world = own_world
    entries = REP.format(url=world.ipc("metrics"))
    bridge = Bridge(world, entries, arguments=("--metrics", "127.0.0.1:0"))
    (line,) = bridge.logged("bridge.metrics")

    def counted() -> Scraped | None:
        """Return the page once it has the answer, which is counted after it was sent."""
        page = scrape(line["address"])
        out = page.sum("iris_bridge_messages_total", socket="rep", direction="out")
        return page if out else None

    async with world.client() as client, client.serve(upper()):
        with pynng.Req0(dial=bridge.url("rep"), recv_timeout=20_000) as socket:
            await socket.asend(b"a")
            assert await socket.arecv() == b"A"
            page = await asyncio.to_thread(wait_until, counted)
    assert page.sum("iris_bridge_ready", bridge="sp") == 1
    assert page.sum("iris_bridge_peers", socket="rep") == 1
    assert page.sum("iris_bridge_messages_total", socket="rep", direction="in") == 1
    assert page.sum("iris_bridge_messages_total", socket="rep", direction="out") == 1
    assert page.sum("iris_bridge_losses_total", socket="rep") == 0
