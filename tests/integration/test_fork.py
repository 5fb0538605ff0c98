"""After a fork nothing is sealed twice under one counter: the child's copy of a client refuses to work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, os, traceback
import iris
from iris.testing import LocalCluster

async def main():
    async with LocalCluster() as cluster, cluster.client() as client:
        service = iris.Service("db")

        @service.on_tunnel
        async def hold(tunnel):
            await tunnel.recv()

        got = []
        async with client.serve(service), client.subscribe("t", got.append):
            tunnel = await client.open_tunnel("db", timeout=5)
            await client.publish("t", b"1")
            await client.flush()
            sealers = [sealer for sealer, _ in client._attachment.out._sealers.values()]
            pid = os.fork()
            if pid == 0:
                in_child(client, sealers)
            _, status = os.waitpid(pid, 0)
            await client.publish("t", b"2")
            await tunnel.send(b"the parent goes on")
            await client.flush()
            await cluster.settle()
            print(os.waitstatus_to_exitcode(status), [m.payload for m in got])

def in_child(client, sealers):
    try:
        assert sealers
        for sealer in sealers:
            try:
                sealer.seal(b"x", b"")
            except iris.IrisError as err:
                assert "forked" in str(err)
            else:
                raise AssertionError("sealed twice under one counter")
        asyncio.run(refused(client))
        asyncio.run(anew())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

async def refused(client):
    async def offer():
        client.offer("t", b"x")

    for call in (
        client.publish("t", b"x"), offer(), client.request("db", b"x", timeout=1), client.push("db", b"x"),
        client.broadcast("db", b"x"), client.flush(), client.members("db"), client.open_tunnel("db", timeout=1),
    ):
        try:
            await call
        except iris.Closed as err:
            assert "fork" in str(err), err
        else:
            raise AssertionError("not refused")
    await client.close()

async def anew():
    got = []
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    async with iris.connect(embedded=True, keyring=keyring) as client, client.subscribe("t", got.append):
        await client.publish("t", b"the child's own")
        await client.flush()
    assert [m.payload for m in got] == [b"the child's own"]

asyncio.run(main())
"""


def run(script: str, expected: str, *arguments: str) -> None:
    # In its debug mode asyncio says on stderr whatever took long, which on a busy machine is anything.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONASYNCIO")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == expected


def test_a_forked_child_seals_nothing_and_the_parent_goes_on() -> None:
    run(SCRIPT, "0 [b'1', b'2']\n")


DRAINING = """
import asyncio, os, traceback
import iris
from iris.testing import LocalCluster

async def main():
    async with LocalCluster() as cluster, cluster.client() as client:
        service = iris.Service("db")
        begun, go_on = asyncio.Event(), asyncio.Event()

        @service.on_tunnel
        async def hold(tunnel):
            await tunnel.recv()

        @service.on_request
        async def answer(payload):
            begun.set()
            await go_on.wait()
            return payload

        async with client.serve(service):
            tunnel = await client.open_tunnel("db", timeout=5)
            asked = asyncio.create_task(client.request("db", b"x", timeout=20))
            await begun.wait()
            old = client._attachment.pump
            moving = asyncio.create_task(client.reload_keys(client._registry.keyring))
            while client._attachment.pump is old and not moving.done():
                await asyncio.sleep(0)
            sealers = [sealer for sealer, _ in old.session.out._sealers.values()]
            ends = list(old.session.tunnels.ends.values())
            assert sealers and ends and not moving.done() and old.connected
            pid = os.fork()
            if pid == 0:
                in_child(old, sealers, ends)
            _, status = os.waitpid(pid, 0)
            go_on.set()
            print(os.waitstatus_to_exitcode(status), await asked)
            await tunnel.send(b"the parent goes on")
            await tunnel.close()
            await moving

def in_child(old, sealers, ends):
    try:
        for seal in [sealer.seal for sealer in sealers] + [end._send.encrypt for end in ends]:
            try:
                seal(b"x", b"")
            except iris.IrisError as err:
                assert "forked" in str(err)
            else:
                raise AssertionError("sealed twice under one counter")
        # Nor is anything written between what the parent writes.
        old.session.out.chunks.append(b"y")
        old.flush()
        assert old.session.out.chunks == [b"y"]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

asyncio.run(main())
"""


def test_a_forked_child_seals_nothing_with_a_session_that_drains() -> None:
    """A client that moves to another session keeps the old one until its tunnels and requests have ended."""
    run(DRAINING, "0 b'x'\n")


BEGUN = """
import asyncio, gc, os, signal, sys, traceback
from pathlib import Path
import iris
from iris.metrics import ClientCollector
from iris.testing import LocalCluster

kept = []
go_on = asyncio.Event()
service = iris.Service("db", limits=iris.Limits(concurrency=8))

@service.on_request
async def answer(payload: bytes, message: iris.Message) -> bytes:
    if payload == b"late":
        await go_on.wait()
    return payload

@service.on_survey
async def count(payload: bytes) -> bytes:
    return payload

@service.on_tunnel
async def back(tunnel):
    async for message in tunnel:
        await tunnel.send(message)

deferring = iris.Service("later")

@deferring.on_request
def later(request: iris.Request) -> None:
    kept.append(request.defer())

async def payloads(client, stream):
    await client.streams.create(stream)
    await client.streams.append_many(stream, [b"1", b"2", b"3"])

async def main(data):
    async with LocalCluster(data=data) as cluster, cluster.client() as client, cluster.client() as other:
        await payloads(client, "s")
        async with (
            client.serve(service), client.serve(deferring), client.subscribe("t") as topic,
            client.streams.read("s", start="first") as reader, client.streams.consumer("s", "c", shared=True) as consumer,
        ):
            later = asyncio.create_task(client.request("later", b"x", timeout=30))
            while not kept:
                await asyncio.sleep(0.01)
            for number in range(4):  # two of them in each bundle
                await other.publish("t", b"%d" % number)
                if number % 2:
                    await other.flush()
            tunnel = await client.open_tunnel("db", timeout=5)
            survey = aiter(client.survey("db", b"x", timeout=30))
            many = aiter(client.request_many("db", [b"x", b"late", b"y"], timeout=30))
            members = aiter(client.watch_members("db"))
            messages = aiter(topic)
            for one in (survey, many, members, messages, reader, consumer):
                await anext(one)
            await tunnel.send(b"a")
            await tunnel.send(b"b")
            assert await tunnel.recv() == b"a"
            while not tunnel._end._chunks:
                await asyncio.sleep(0.01)
            collector = ClientCollector(client, registry=None)
            assert list(collector.collect())
            forked = os.fork()
            if not forked:
                in_child(client, tunnel, (survey, many, members, messages, reader, consumer), reader, consumer, collector)
            _, status = await asyncio.to_thread(os.waitpid, forked, 0)
            for one in (messages, reader, consumer):
                await anext(one)
            assert await tunnel.recv() == b"b"
            kept.pop().reply(b"answered by the parent")
            assert await later == b"answered by the parent"
            print(os.waitstatus_to_exitcode(status))
            await tunnel.close()
            go_on.set()
            assert len([outcome.result() async for outcome in many]) == 2

def in_child(*arguments):
    signal.alarm(15)
    try:
        asyncio.run(refused(*arguments))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

async def refused(client, tunnel, begun, reader, consumer, collector):
    calls = [lambda one=one: anext(one) for one in begun]
    calls += [lambda: tunnel.send(b"x"), tunnel.recv, tunnel.finish, reader.batch, consumer.batch]
    for call in calls:
        try:
            await call()
        except (iris.Closed, iris.TunnelBroken) as err:
            assert "fork" in str(err) and "connect" in str(err), err
        else:
            raise AssertionError(f"{call} was not refused")
    await consumer.close()
    await reader.close()
    assert not any(metric.samples for metric in collector.collect())
    kept.clear()  # nobody here answers
    gc.collect()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_what_was_begun_before_a_fork_is_refused_in_the_child_and_goes_on_in_the_parent(
    tmp_path: Path,
) -> None:
    run(BEGUN, "0\n", str(tmp_path / "data"))


DEADLINE = """
import asyncio, os
from iris.deadlines import HANDLED, carried, handled_us

async def handler():
    def work():
        inherited.append(handled_us())
        pid = os.fork()
        if not pid:
            os._exit(0 if handled_us() == 0 else 1)
        inherited.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    HANDLED[asyncio.current_task()] = 5
    await asyncio.to_thread(carried(work))

inherited = []
asyncio.run(handler())
print(inherited)
"""


def test_a_process_that_a_handler_forks_does_not_inherit_the_deadline_of_its_request() -> None:
    """It may be a worker of a pool, which lives on after the request."""
    run(DEADLINE, "[5, 0]\n")
