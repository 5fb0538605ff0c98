"""A handler that calls `sys.exit` answers its caller at once, and then ends the program with its exit code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support import commands, warm
from support.commands import Shell, dev_relay
from support.waiting import PATIENCE_S, until

import iris
import iris.blocking
from iris.logs import event_of
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(120)

SERVICE = """
import asyncio
import signal
import sys
import iris

service = iris.Service("exits")


@service.on_request
async def coroutine(text: str) -> str:
    sys.exit(3)


@service.on_request("plain")
def plain(text: str) -> str:
    sys.exit(3)


@service.on_request("threads", threads=2)
def thread(text: str) -> str:
    sys.exit(3)


@service.on_request("interrupt")
async def interrupt(text: str) -> str:
    raise KeyboardInterrupt


@service.on_survey
async def vote(text: str) -> str:
    sys.exit(3)


@service.on_push
def push(text: str) -> None:
    sys.exit(3)


@service.on_broadcast
async def cast(text: str) -> None:
    sys.exit(3)


@service.on_tunnel
async def tunnel(tunnel: iris.Tunnel) -> None:
    sys.exit(3)


@service.on_publish("news.>")
async def news(text: str) -> None:
    sys.exit(3)


@service.on_publish("olds.>")
def olds(text: str) -> None:
    sys.exit(3)


async def main() -> None:
    async with iris.connect() as client, client.serve(service):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def host() -> Iterator[Shell]:
    with commands.short_directory("iris-exit-") as root, dev_relay(root):
        (root / "exits.py").write_text(SERVICE)
        shell = Shell(root)
        yield shell
        shell.finish()


@pytest.fixture
async def caller(host: Shell, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[iris.Client]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.root))
    async with iris.connect(host.root / "iris" / "relay.sock") as client:
        yield client


def started(host: Shell) -> subprocess.Popen[bytes]:
    """Return a member that serves."""
    member = warm.Popen(
        [sys.executable, str(Path(host.root) / "exits.py")], env=host.environ, cwd=host.root,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    host.started.append(member)
    assert member.stdout is not None
    assert member.stdout.readline() == b"ready\n"
    return member


async def ended(member: subprocess.Popen[bytes], code: int) -> None:
    """Assert that a member ended with this exit code and said which handler ended it."""
    _, err = await asyncio.to_thread(member.communicate, timeout=PATIENCE_S)
    assert member.returncode == code, err
    assert b"client.handler_exited" in err
    assert b"The event loop of this program ends" in err


@pytest.mark.parametrize("method", ["", "plain", "threads", "interrupt"])
async def test_the_caller_gets_an_error_and_the_program_its_exit_code(
    host: Shell, caller: iris.Client, method: str
) -> None:
    member = started(host)
    with pytest.raises(iris.RemoteError) as caught:
        await caller.request("exits", "x", method=method or None, timeout=PATIENCE_S)
    kind = "KeyboardInterrupt" if method == "interrupt" else "SystemExit: 3"
    assert str(caught.value) == f"exits: {kind}; the program of the member ends"
    assert caught.value.may_have_run
    await ended(member, -2 if method == "interrupt" else 3)


@pytest.mark.parametrize("call", ["survey", "push", "broadcast", "tunnel", "news", "olds"])
async def test_every_kind_of_handler_ends_the_program(
    host: Shell, caller: iris.Client, call: str
) -> None:
    member = started(host)
    if call == "survey":
        survey = caller.survey("exits", "x", timeout=PATIENCE_S)
        assert [answer async for answer in survey] == []
        assert list(survey.failed.values()) == ["SystemExit: 3; the program of the member ends"]
    elif call == "push":
        await caller.push("exits", "x")
    elif call == "broadcast":
        await caller.broadcast("exits", "x")
    elif call == "tunnel":
        with pytest.raises(iris.TunnelBroken):
            async with caller.tunnel("exits", timeout=PATIENCE_S) as tunnel:
                await tunnel.recv()
    else:
        await caller.publish(f"{call}.today", "x")
    await ended(member, 3)


async def test_iris_run_ends_with_the_exit_code_of_a_handler(
    host: Shell, caller: iris.Client
) -> None:
    process = host.start("run", "exits")
    await caller.wait_for_members("exits", 1, timeout=PATIENCE_S)
    with pytest.raises(iris.RemoteError, match="SystemExit: 3; the program of the member ends"):
        await caller.request("exits", "x", timeout=PATIENCE_S)
    commands.end(process, 3)


async def test_a_handler_of_a_blocking_client_fails_alone(
    host: Shell, caller: iris.Client, caplog: pytest.LogCaptureFixture
) -> None:
    service = iris.Service("thread")

    @service.on_request
    async def leave(text: str) -> str:
        if text == "leave":
            sys.exit(3)
        return text

    client = iris.blocking.connect(host.root / "iris" / "relay.sock")
    with client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="SystemExit: 3"):
            await caller.request("thread", "leave", timeout=PATIENCE_S)
        assert await caller.request("thread", "stay", timeout=PATIENCE_S, type=str) == "stay"
    assert [r.levelname for r in caplog.records if event_of(r) == "client.handler_exited"] == [
        "ERROR"
    ]


async def test_a_function_for_losses_that_exits_leaves_an_orderly_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exits: list[BaseException] = []

    def told(lost: iris.Loss) -> None:
        sys.exit(3)

    async with LocalCluster() as cluster, cluster.client() as client:
        client._runtime.exit_loop = exits.append  # type: ignore[method-assign]  # it would end the tests
        client.on_loss = told
        await client.push("nobody", b"")
        await until(lambda: exits != [])
    assert [type(error) for error in exits] == [SystemExit]
