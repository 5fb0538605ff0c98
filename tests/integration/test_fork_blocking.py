"""A blocking client that was connected before a fork: the child's copy refuses to work, and the parent goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from support.relays import Daemon

from relay.daemon import Relay

pytestmark = pytest.mark.timeout(120)

COMMON = """
import asyncio, contextlib, gc, os, signal, socket, sys, threading, traceback
import iris, iris.blocking
from iris import ClientConfig

kind, relay, access = sys.argv[1:4]
if kind == "asyncio":
    iris.blocking._new_loop = asyncio.new_event_loop
keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
config = ClientConfig(relay=relay, access=access or None, label="parent", reconnect_max_s=0.1)

def connected():
    return iris.blocking.connect(config=config, keyring=keyring)

def connections():
    "Return the inodes of all sockets that are connected to an address."
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:
            if one.getpeername():
                found.add(os.fstat(one.fileno()).st_ino)
    return found

def in_child(work, *, leave=os._exit):
    "Fork, and return when the child has done `work` and has left without an error."
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        leave(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except iris.Closed as err:
        assert "fork" in str(err) and "connect" in str(err), err
    else:
        raise AssertionError(f"{call} was not refused")

def echo():
    service = iris.Service("echo")

    @service.on_request
    async def answer(payload: bytes) -> bytes:
        return payload

    @service.on_tunnel
    async def back(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message)

    return service
"""

REFUSED = """
def work():
    assert not connections(), "the child holds a connection of the parent"
    for call in (
        lambda: client.request("echo", b"x", timeout=5), lambda: client.push("echo", b"x"), lambda: client.broadcast("echo", b"x"),
        lambda: client.publish("t", b"x"), lambda: client.offer("t", b"x"), lambda: client.flush(), lambda: client.audience("t"),
        lambda: client.wait_for_subscribers("t", 1, timeout=5), lambda: client.request_many("echo", [b"x"], timeout=5),
        lambda: client.survey("echo", b"x", timeout=5), lambda: client.members("echo"), lambda: client.describe("echo"),
        lambda: client.wait_for_members("echo", 1, timeout=5), lambda: client.ping("echo"), lambda: client.status(),
        lambda: client.reload_keys(keyring), lambda: client.stats(), lambda: client.losses, lambda: next(client.watch_members("echo")),
        lambda: client.call(lambda c: c.flush()), lambda: client.start(lambda c: c.flush()), lambda: waiting.result(),
        lambda: client.streams.create("s"), lambda: client.streams.append("s", b"x"), lambda: client.streams.read("s"),
        lambda: client.streams.consumer("s", "c"), lambda: next(messages), lambda: next(watched), lambda: tunnel.send(b"x"),
        lambda: tunnel.recv(), lambda: next(iter(tunnel)), lambda: tunnel.finish(), lambda: client.serve(echo()).__enter__(),
        lambda: client.subscribe("t").__enter__(), lambda: client.tunnel("echo", timeout=5).__enter__(),
        lambda: client.watch_losses().__enter__(),
    ):
        refused(call)
    # What leaves its block, or is dropped, does so in silence.
    blocks.close()
    client.close()
    client.close()

def connects_again():
    with connected() as own:
        assert own.request("echo", b"the child's own", timeout=20) == b"the child's own"

with connected() as client, contextlib.ExitStack() as blocks:
    blocks.enter_context(client.serve(echo()))
    messages = blocks.enter_context(client.subscribe("t"))
    tunnel = blocks.enter_context(client.tunnel("echo", timeout=20))
    watched = client.watch_members("echo")
    waiting = client.start(lambda c: asyncio.sleep(3600))
    next(watched)
    assert connections()
    in_child(work)
    in_child(connects_again)
    client.publish("t", b"after")
    assert next(messages).payload == b"after"
    tunnel.send(b"x")
    assert tunnel.recv() == b"x"
    assert client.request("echo", b"y", timeout=20) == b"y"
    assert client._client._attachment.reconnects == 0, "the parent lost its session"
    waiting.cancel()
print("served on")
"""

COLLECTED = """
def collect():
    "Do with the parent's connection what a destructor might: the epoll set is the parent's, too."
    global client, blocks, messages, tunnel
    connection = transports.pop()
    number = connection.get_extra_info("socket").fileno()
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as inherited:
        inherited.shutdown(socket.SHUT_RDWR)
    connection.abort()
    del client, blocks, messages, tunnel, connection
    gc.collect()

client = connected()
blocks = contextlib.ExitStack()
blocks.enter_context(client.serve(echo()))
messages = blocks.enter_context(client.subscribe("t"))
tunnel = blocks.enter_context(client.tunnel("echo", timeout=20))
transports = [client._client._attachment.pump._transport]
for leave in (os._exit, sys.exit):
    for work in (collect, lambda: None):
        in_child(work, leave=leave)
        client.publish("t", b"after")
        assert next(messages).payload == b"after"
        tunnel.send(b"x")
        assert tunnel.recv() == b"x"
        assert client.request("echo", b"y", timeout=20) == b"y"
        assert client._client._attachment.reconnects == 0, "the parent lost its session"
blocks.close()
client.close()
print("served on")
"""

STREAMS = """
def work():
    for call in (
        lambda: next(reader), lambda: reader.batch(), lambda: next(reader.batches()), lambda: reader.gaps, lambda: next(consumer),
        lambda: consumer.ack(first), lambda: consumer.flush(), lambda: staging.append(b"x"), lambda: staging.finish(),
        lambda: mirror.run(), lambda: client.streams.list(),
    ):
        refused(call)
    consumer.stop()
    blocks.close()

with connected() as client, contextlib.ExitStack() as blocks:
    client.streams.create("s")
    client.streams.append_many("s", [b"1", b"2", b"3"])
    reader = blocks.enter_context(client.streams.read("s", start="first"))
    consumer = blocks.enter_context(client.streams.consumer("s", "c", shared=True))
    staging = blocks.enter_context(client.streams.stage("s", writer="w", batch=1))
    mirror = blocks.enter_context(client.streams.mirror("s", "copy"))
    next(reader)
    first = next(consumer)
    in_child(work)
    assert [next(reader).payload, next(consumer).payload] == [b"2", b"2"]
    consumer.ack(first)
    consumer.flush()
print("served on")
"""

DIRECT = """
def work():
    for number, inode in pairs.items():
        assert os.fstat(number).st_ino != inode, "the child holds an end of a tunnel"
    refused(tunnel.send, b"x")

with connected() as client, connected() as other, other.serve(echo()), client.tunnel("echo", timeout=20) as tunnel:
    pairs = {}
    while len(pairs) < 2:  # both ends are in this process
        tunnel.send(bytes(1 << 20))
        assert tunnel.recv() == bytes(1 << 20)
        for one in (client, other):
            for end in one._client._attachment.pump.session.tunnels.ends.values():
                if end.pair is not None:
                    number = end.pair._socket.fileno()
                    pairs[number] = os.fstat(number).st_ino
    in_child(work)
    tunnel.send(b"y")
    assert tunnel.recv() == b"y"
print("served on")
"""


def remote_of(relay: Relay) -> str:
    assert relay.remote is not None
    host, port = relay.remote.addresses[0]
    return f"tls://{host}:{port}"


async def run(script: str, *arguments: str) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONASYNCIO")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", COMMON + script, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    said, errors = await asyncio.wait_for(process.communicate(), 100)
    assert not errors, errors.decode()
    assert said == b"served on\n"


@pytest.mark.parametrize("link", ["socket", "tls"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("script", [REFUSED, COLLECTED], ids=["refused", "collected"])
async def test_a_blocking_client_refuses_in_the_child_of_a_fork_and_the_parent_goes_on(
    relay: Relay, access: Path, loop: str, link: str, script: str
) -> None:
    if link == "tls":
        await run(script, loop, remote_of(relay), str(access))
    else:
        await run(script, loop, str(relay.config.socket_path), "")


async def test_streams_of_a_blocking_client_are_refused_in_the_child_of_a_fork(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as daemon:
        await run(STREAMS, "uvloop", str(daemon.socket), "")


async def test_the_child_of_a_fork_lets_go_of_the_socket_pairs_of_direct_tunnels(
    relay: Relay,
) -> None:
    await run(DIRECT, "uvloop", str(relay.config.socket_path), "")
