"""After a fork nothing is sealed twice under one counter: the child's copy of a client refuses to work."""

from __future__ import annotations

import os
import subprocess
import sys

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


def run(script: str, expected: str) -> None:
    # In its debug mode asyncio says on stderr whatever took long, which on a busy machine is anything.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONASYNCIO")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environ, capture_output=True, text=True, timeout=20,
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
