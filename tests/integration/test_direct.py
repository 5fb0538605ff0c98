"""Tunnels of one host by socket pairs, with a real relay at a real socket, and processes that are killed."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

import iris
from iris.core.direct import DIRECT_AFTER_BYTES
from iris.crypto.keys import ClusterKey
from iris.errors import PeerProtocolError, TunnelBroken
from iris.keyfiles import save_keyring
from iris.pairs import PairSocket, fetch_socket
from iris.wire.codec import encode_control
from iris.wire.frames import Fetch
from relay.config import RelayConfig
from relay.core.direct import DirectTunnels
from relay.daemon import Relay
from relay.net.pairs import Pairs

pytestmark = pytest.mark.timeout(60)

SECRET = bytes(range(32))
KEYS = iris.Keyring.single(ClusterKey(SECRET))
MIB = 1 << 20
BLOCK = bytes(range(256)) * 256
PATIENCE_S = 20.0

MEMBER = """
import asyncio, sys, iris
from iris.crypto.keys import ClusterKey

async def main(path):
    service = iris.Service("blocks")

    @service.on_tunnel
    async def echo(tunnel):
        async for message in tunnel:
            await tunnel.send(message)

    keyring = iris.Keyring.single(ClusterKey(bytes(range(32))))
    async with iris.connect(keyring=keyring, relay=path) as client, client.serve(service):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


@contextlib.asynccontextmanager
async def relay_at(directory: Path, **settings: Any) -> AsyncIterator[Relay]:
    relay = Relay(RelayConfig(socket_path=directory / "relay.sock", dev=True, **settings))
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop(drain_s=0)
        assert not relay.hub.pairs.waiting
        assert not relay.router.direct.table.total


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    async with relay_at(tmp_path / "run") as relay:
        yield relay


def party(relay: Relay | Path, **settings: Any) -> iris.Client:
    path = relay if isinstance(relay, Path) else relay.config.socket_path
    return iris.connect(keyring=KEYS, relay=path, **settings)


@contextlib.asynccontextmanager
async def ends(relay: Relay) -> AsyncIterator[tuple[iris.Tunnel, iris.Tunnel]]:
    """Give (opener's end, member's end) of an open tunnel between two clients."""
    service, held, done = iris.Service("blocks"), [], asyncio.Event()

    @service.on_tunnel
    async def keep(tunnel: iris.Tunnel) -> None:
        held.append(tunnel)
        await done.wait()

    async with party(relay) as opener, party(relay) as member, member.serve(service):
        async with opener.tunnel("blocks", timeout=5) as left:
            await until(lambda: held)
            try:
                yield left, held[0]
            finally:
                done.set()


async def carry(source: iris.Tunnel, sink: iris.Tunnel, size: int) -> None:
    """Send so many bytes in messages of many sizes, and compare what arrives."""
    sent, came = hashlib.sha256(), hashlib.sha256()
    sizes = []
    left = size
    for number in range(1 << 20):
        if left <= 0:
            break
        sizes.append((number * 7919) % 200_000)
        left -= sizes[-1]

    async def send() -> None:
        for number, length in enumerate(sizes):
            message = (number.to_bytes(4, "big") + BLOCK * 4)[: length + 4]
            sent.update(message)
            await source.send(message)

    sending = asyncio.create_task(send())
    for _ in sizes:
        came.update(await sink.recv())
    await sending
    assert came.digest() == sent.digest()


def way(tunnel: iris.Tunnel) -> PairSocket | None:
    return tunnel._end.pair  # type: ignore[return-value]


async def moved(left: iris.Tunnel, right: iris.Tunnel) -> None:
    await carry(left, right, DIRECT_AFTER_BYTES + MIB)
    await until(lambda: all(end._end.direct and end._end.direct.moved for end in (left, right)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_bytes_are_right_across_the_move_and_after_it(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        routed = relay.router.accounts.in_
        await asyncio.gather(carry(left, right, 40 * MIB), carry(right, left, 40 * MIB))
        assert relay.router.accounts.in_ == routed, "nothing passed through the relay"
    await until(lambda: not relay.router.direct.table.total)
    assert relay.router.direct.status()["made"] == 1


async def test_what_passed_is_shown_beside_the_relays_own_account(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        await carry(left, right, 8 * MIB)
    await until(lambda: relay.router.direct.passed[3] > 8 * MIB)
    async with party(relay) as client:
        shown = (await client.status())["direct"]
    # Who closes leaves unread what credit the other side gave last.
    assert 8 * MIB < shown["received_bytes"] <= shown["sent_bytes"]
    assert 0 < shown["received_records"] <= shown["sent_records"]
    assert shown["open"] == 0
    assert relay.router.accounts.balance() == 0


async def test_iris_status_has_a_line_of_them(relay: Relay, tmp_path: Path) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        command = [sys.executable, "-m", "iris.cli", "status", "--relay", str(relay.config.socket_path)]  # fmt: skip
        environ = {**os.environ, "IRIS_CONFIG": str(tmp_path)}
        save_keyring(tmp_path / "keyring.toml", iris.Keyring.single(ClusterKey(bytes(32))))
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=environ
        )
    assert (
        "direct tunnels: 1 open (limit 512), 1 in all; their ends report 0 records sent"
        in done.stdout
    )


async def test_a_tunnel_that_carries_little_asks_for_nothing(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await carry(left, right, DIRECT_AFTER_BYTES // 2)
        assert relay.router.direct.made == 0
        assert left._end.direct is None


async def test_half_close_and_close_lose_nothing(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        assert (await asyncio.gather(send(left, left.finish), all_of(right)))[1] == [BLOCK] * 200
        assert (await asyncio.gather(send(right, right.close), all_of(left)))[1] == [BLOCK] * 200


async def send(tunnel: iris.Tunnel, end: Callable[[], Awaitable[None]]) -> None:
    for _ in range(200):
        await tunnel.send(BLOCK)
    await end()


async def all_of(tunnel: iris.Tunnel) -> list[bytes]:
    return [message async for message in tunnel]


async def test_a_client_that_closes_leaves_nothing_unwritten(relay: Relay) -> None:
    service = iris.Service("blocks")
    came: list[int] = []
    done = asyncio.Event()

    @service.on_tunnel
    async def take(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            came.append(len(message))
        done.set()

    async with party(relay) as member, member.serve(service):
        async with party(relay) as opener:
            tunnel = await opener.open_tunnel("blocks", timeout=5)
            for _ in range(400):
                await tunnel.send(BLOCK)
            await until(lambda: way(tunnel) is not None)
            for _ in range(100):
                await tunnel.send(BLOCK)
            await tunnel.close()
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
    assert came == [len(BLOCK)] * 500


async def test_many_small_messages_pass_in_order(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)

        async def send() -> None:
            for number in range(20_000):
                await left.send(number.to_bytes(8, "big"))
                if number % 100 == 0:
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        for number in range(20_000):
            assert int.from_bytes(await right.recv(), "big") == number
        await sending


async def test_a_slow_reader_holds_its_sender_and_no_more_memory(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await left.send(BLOCK)
                sent += 1

        sending = asyncio.create_task(send())
        before = -1
        while sent != before:  # until it stands still
            before = sent
            await asyncio.sleep(0.2)
        assert sent * len(BLOCK) <= 20 * MIB
        assert right._end.buffered <= 16 * MIB
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def test_descriptors_are_given_back(relay: Relay) -> None:
    async with party(relay):
        pass
    before = descriptors()
    for _ in range(5):
        async with ends(relay) as (left, right):
            await moved(left, right)
            assert relay.router.direct.table.total == 1
    await until(lambda: not relay.hub.ports)
    await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("of", ["opener", "member"])
async def test_the_pair_shut_down_by_somebody_breaks_both_ends(relay: Relay, of: str) -> None:
    with contextlib.suppress(TunnelBroken):
        async with ends(relay) as (left, right):
            await moved(left, right)
            ours = way(left if of == "opener" else right)
            assert ours is not None
            ours._socket.shutdown(socket.SHUT_RDWR)
            await until(lambda: left.closed and right.closed)
            for tunnel in (left, right):
                with pytest.raises(
                    TunnelBroken, match=r"direct connection broke|peer broke it off"
                ):
                    await tunnel.recv()
            raise TunnelBroken("on purpose")
    await until(lambda: not relay.router.direct.table.total)


async def test_garbage_in_the_pair_breaks_the_tunnel(relay: Relay) -> None:
    with contextlib.suppress(TunnelBroken):
        async with ends(relay) as (left, right):
            await moved(left, right)
            ours = way(left)
            assert ours is not None
            ours._socket.send((64).to_bytes(4, "little") + bytes(64))
            with pytest.raises(TunnelBroken, match="not the next record"):
                await right.recv()
            with pytest.raises(TunnelBroken):
                await left.recv()
            raise TunnelBroken("on purpose")


# -- what cannot be had --------------------------------------------------------------------------------------


async def test_a_relay_that_makes_no_pairs_carries_it_all(tmp_path: Path) -> None:
    async with relay_at(tmp_path / "run", max_direct_tunnels=0) as relay:
        async with ends(relay) as (left, right):
            await carry(left, right, 8 * MIB)
            assert way(left) is None
        assert relay.router.direct.refused == {"the limit is reached": 1}


async def test_without_descriptors_it_stays_with_the_relay(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none)
    async with ends(relay) as (left, right):
        await carry(left, right, 8 * MIB)
        assert way(left) is None
    assert relay.router.direct.refused == {"no descriptor is free": 1}


async def test_a_client_that_cannot_fetch_stays_with_the_relay(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> None:
        raise PeerProtocolError("the relay sent no descriptor")

    monkeypatch.setattr("iris.pairs.fetch_socket", none)
    async with ends(relay) as (left, right):
        await carry(left, right, 8 * MIB)
        assert relay.router.direct.made == 1
        assert way(left) is None


async def test_a_stranger_with_a_wrong_token_gets_nothing(relay: Relay) -> None:
    async with ends(relay) as (left, right):
        await moved(left, right)
        with pytest.raises(PeerProtocolError, match="no descriptor"):
            await fetch_socket(relay.config.socket_path, "iris", bytes(16))
        await carry(left, right, MIB)
    assert relay.hub.protocol_errors == 1


def test_a_token_is_good_once_and_for_its_user_alone() -> None:
    pairs = Pairs()
    pair = pairs.make("uid 1", "uid 2")
    assert pair is not None
    assert pairs.take(pair.tokens[0], "uid 2") is None
    assert pairs.take(pair.tokens[0], "uid 1") is pair.ends[0]
    assert pairs.take(pair.tokens[0], "uid 1") is None
    pair.end()
    assert pairs.take(pair.tokens[1], "uid 2") is None
    assert not pairs.waiting
    assert pair.ends[0].fileno() == -1


@contextlib.asynccontextmanager
async def passing(path: Path, passed: Sequence[int]) -> AsyncIterator[None]:
    """Serve a socket that answers every connection with these descriptors."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            socket.send_fds(connection, [b"\0"], passed)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        answering = asyncio.create_task(asyncio.to_thread(answer))
        try:
            yield
        finally:
            await answering


@pytest.mark.parametrize("kind", ["pipe", "file", "datagram socket", "two sockets"])
async def test_a_descriptor_that_a_relay_should_not_pass_is_closed_again(
    tmp_path: Path, kind: str
) -> None:
    async def fetch() -> socket.socket:
        async with passing(path, passed):
            return await fetch_socket(path, "", bytes(16))

    path = tmp_path / "relay.sock"
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            reading, writing = os.pipe()
            passed = [reading]
            for each in (reading, writing):
                stack.callback(os.close, each)
        elif kind == "file":
            passed = [stack.enter_context((tmp_path / "file").open("wb")).fileno()]
        elif kind == "datagram socket":
            passed = [
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).fileno()
            ]
        else:
            passed = [stack.enter_context(each).fileno() for each in socket.socketpair()]
        with contextlib.suppress(PeerProtocolError):
            (await fetch()).close()
        path.unlink()
        before = descriptors()  # the event loop has its threads now
        if kind == "two sockets":
            (await fetch()).close()
        else:
            with pytest.raises(PeerProtocolError, match="a descriptor"):
                await fetch()
        assert descriptors() == before


async def test_a_token_that_was_used_gets_nothing_more(relay: Relay) -> None:
    pair = relay.hub.pairs.make(f"uid {os.geteuid()}", f"uid {os.geteuid()}")
    assert pair is not None
    ours = await fetch_socket(relay.config.socket_path, "iris", pair.tokens[0])
    pair.ends[1].send(b"through")
    assert ours.recv(16) == b"through"
    assert not os.get_inheritable(ours.fileno())
    ours.close()
    with pytest.raises(PeerProtocolError):
        await fetch_socket(relay.config.socket_path, "iris", pair.tokens[0])
    pair.end()


async def test_a_session_that_has_greeted_fetches_nothing(relay: Relay) -> None:
    async with party(relay) as client:
        session = client._attachment.session  # type: ignore[union-attr]
        assert session is not None
        session.out.raw(encode_control(Fetch(bytes(16))))
        client._attachment.touch()  # type: ignore[union-attr]
        await until(lambda: relay.hub.protocol_errors == 1)


def test_the_figures_of_a_relay_that_made_none() -> None:
    assert DirectTunnels(4).status()["made"] == 0


# -- kills ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process(*command: str, says: bytes = b"") -> AsyncIterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)  # noqa: ASYNC220 - it starts at once
    try:
        if says:
            assert running.stdout is not None
            assert await asyncio.to_thread(running.stdout.readline) == says
        yield running
    finally:
        running.kill()
        await asyncio.to_thread(running.wait)
        assert running.stdout is not None
        running.stdout.close()


async def flood(tunnel: iris.Tunnel) -> None:
    while True:
        await tunnel.send(BLOCK)


async def read(tunnel: iris.Tunnel) -> None:
    async for message in tunnel:
        assert message == BLOCK


async def broken_by(tunnel: iris.Tunnel, kill: Any) -> None:
    """Send and receive until the tunnel has moved, do what kills, and see both callers hear of it."""
    sending, reading = asyncio.create_task(flood(tunnel)), asyncio.create_task(read(tunnel))
    await until(lambda: way(tunnel) is not None)
    kill()
    await until(lambda: tunnel.closed)
    for task in (sending, reading):
        with pytest.raises(TunnelBroken):
            await task
    await tunnel.close()


async def test_a_member_that_is_killed_breaks_it(relay: Relay) -> None:
    path = str(relay.config.socket_path)
    async with party(relay) as client, process("-c", MEMBER, path, says=b"ready\n") as member:
        tunnel = await client.open_tunnel("blocks", timeout=5)
        await broken_by(tunnel, member.kill)
    await until(lambda: not relay.router.direct.table.total)


async def test_a_relay_that_is_killed_breaks_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    path = directory / "relay.sock"
    async with process("-m", "relay", "--dev", "--socket", str(path)) as daemon:
        await until(path.exists)
        async with process("-c", MEMBER, str(path), says=b"ready\n"), party(path) as client:
            await client.wait_for_members("blocks", 1, timeout=PATIENCE_S)
            tunnel = await client.open_tunnel("blocks", timeout=5)
            await broken_by(tunnel, lambda: daemon.send_signal(signal.SIGKILL))
