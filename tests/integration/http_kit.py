"""What the tests of the HTTP bridge share: a bridge of a `LocalCluster`, and a reader of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import commands, warm
from support.commands import Shell, dev_relay, end
from support.waiting import PATIENCE_S, wait_until
from support.web import Answer, Http, ask, http

import iris
from iris.testing import LocalCluster
from iris.web import server
from relay.bridges.http.config import VERBS, HttpConfig
from relay.bridges.http.process import Front, HttpBridge

ROOT = Path(__file__).parents[2]
ALL = "a-token-for-everything-0123456789-0123456789"
FEW = "a-token-for-few-things-0123456789-0123456789"
TOKENS = f"""
[[token]]
name = "all"
token = "{ALL}"
{"".join(f'allow.{verb} = [">"]' + chr(10) for verb in VERBS)}
[[token]]
name = "few"
token = "{FEW}"
allow.push = ["orders", "mail.*"]
allow.subscribe = ["shop.>"]
"""


OTHER = "a-token-of-somebody-else-0123456789-0123456789"
TWO = f"""
{TOKENS}
[[token]]
name = "other"
token = "{OTHER}"
{"".join(f'allow.{verb} = [">"]' + chr(10) for verb in VERBS)}
"""
"""As `TOKENS`, with one of somebody else, for everything."""


class Bridge:
    """A bridge that serves, and a client of it with the token for everything."""

    def __init__(self, cluster: LocalCluster, bridge: HttpBridge, address: str) -> None:
        self.cluster = cluster
        self.bridge = bridge
        self.application = bridge.application
        self.address = address

    async def get(
        self, target: str, headers: Mapping[str, str] | None = None, token: str = ALL
    ) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            return await ask(self.address, "GET", target, headers, token=token)

    async def post(
        self,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        token: str = ALL,
    ) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            return await ask(self.address, "POST", target, headers, body, token=token)

    @contextlib.asynccontextmanager
    async def events(
        self, target: str, headers: Mapping[str, str] | None = None, token: str = ALL
    ) -> AsyncIterator[Events]:
        """Open an event stream, which must be answered with 200."""
        async with http(self.address) as connection:
            connection.send("GET", target, {"authorization": f"Bearer {token}", **(headers or {})})
            async with asyncio.timeout(PATIENCE_S):
                answer = await connection.start()
            assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream"), (
                answer
            )
            yield Events(connection)


class Events:
    """Reads an event stream."""

    def __init__(self, connection: Http) -> None:
        self.connection = connection
        self._chunks = connection.chunks()
        self._text = b""

    async def next(self) -> dict[str, Any] | None:
        """Return the next event as {"event", "id", "data"}; None at the end. Comments are skipped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while b"\n\n" not in self._text:
                    try:
                        self._text += await anext(self._chunks)
                    except StopAsyncIteration:
                        return None
                block, _, self._text = self._text.partition(b"\n\n")
                fields = dict(
                    line.split(": ", 1)
                    for line in block.decode().split("\n")
                    if not line.startswith(":")
                )
                if "data" in fields:
                    return {**fields, "data": json.loads(fields["data"])}

    async def take(self, count: int) -> list[Any]:
        """Return the data of the next events."""
        found = [await self.next() for _ in range(count)]
        return [each and each["data"] for each in found]


@contextlib.asynccontextmanager
async def bridged(
    tmp_path: Path, *, tokens: str = TOKENS, data: bool = False, service: iris.Service | None = None, keyring: iris.Keyring | None = None,
    **limits: Any,
) -> AsyncIterator[Bridge]:  # fmt: skip
    """Run a cluster in this process, with a bridge on a free port, and a service if one is given."""
    path = tmp_path / "tokens.toml"
    path.write_text(tokens)
    path.chmod(0o600)
    config = replace(HttpConfig(drain_s=1, body_s=PATIENCE_S), **limits)
    stop = asyncio.Event()
    async with LocalCluster(data=tmp_path / "data" if data else None) as cluster:
        settings = iris.ClientConfig(
            message_limit_bytes=config.max_body_bytes, reconnect_min_s=0.005, reconnect_max_s=0.02
        )
        async with contextlib.AsyncExitStack() as stack:
            if service is not None:
                await stack.enter_async_context(cluster.serve(service))
            client = await stack.enter_async_context(
                cluster.client(config=settings, keyring=keyring)
            )
            front = Front(tokens=path)
            bridge = HttpBridge(front, config, client)
            listener = server.listen("listen", "127.0.0.1:0")
            serving = asyncio.create_task(bridge.serve(listener, stop))
            try:
                yield Bridge(cluster, bridge, server.address_of(listener))
            finally:
                stop.set()
                async with asyncio.timeout(PATIENCE_S):
                    await serving


@contextlib.contextmanager
def running(shell: Shell, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `iris bridge http` on a free port; yield its address and the process, which the block may end."""
    log = shell.root / "bridge.log"
    with log.open("wb") as file:
        process = warm.Popen(
            commands.command("bridge", "http", "--listen", "127.0.0.1:0", *arguments), env=shell.environ, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file,
        )  # fmt: skip
    shell.started.append(process)
    try:
        wait_until(lambda: b'"http.serving"' in log.read_bytes() or process.poll() is not None)
        served = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["event"] for line in served][:2] == ["http.reads", "http.serving"], served
        yield served[1]["address"], process
        if process.poll() is None:
            process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()
        assert '"http.stopped"' in log.read_text()
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def a_host() -> Iterator[Shell]:
    """Yield a shell on a host with a relay, a store and the service of the README."""
    programs = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.S | re.M
    )
    with (
        commands.short_directory("iris-http-") as root,
        dev_relay(root, "--data", str(root / "data")),
    ):
        (root / "greetings.py").write_text(
            next(block for block in programs if "def greet" in block)
        )
        shell = Shell(root)
        process = shell.start("run", "greetings")
        wait_until(lambda: shell.run("members", "greeter").returncode == 0)
        yield shell
        process.terminate()
        end(process)
        shell.finish()
