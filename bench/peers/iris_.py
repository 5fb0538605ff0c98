"""Iris as its users run it: a relay (two linked ones for W6), payloads sealed end to end, public names only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypeVar

import iris
from iris.keyfiles import create_keys
from peers import TOPIC, Peer, Publisher, Requester, Sender, Server, Took

CLUSTER = "bench-echo"
STREAM = "bench-stream"
PATIENCE_S = 10.0
TIMEOUT_S = 60.0
Kept = TypeVar("Kept")
WhenFull = Literal["drop", "wait"]


class IrisPublisher(Publisher):
    def __init__(self, client: iris.Client, topic: str, when_full: WhenFull) -> None:
        self._client = client
        self._topic = topic
        self._when_full = when_full

    async def burst(self, payloads: Sequence[bytes]) -> None:
        offer, topic, when_full = self._client.offer, self._topic, self._when_full
        for payload in payloads:
            if not offer(topic, payload, when_full=when_full):
                await self._client.publish(topic, payload, when_full=when_full)

    async def flush(self) -> None:
        await self._client.flush(timeout=TIMEOUT_S)


class IrisRequester(Requester):
    def __init__(self, client: iris.Client) -> None:
        self._client = client

    async def request(self, payload: bytes) -> bytes:
        return await self._client.request(CLUSTER, payload, timeout=TIMEOUT_S)


class IrisSender(Sender):
    def __init__(self, tunnel: iris.Tunnel) -> None:
        self._tunnel = tunnel

    async def send(self, payload: bytes) -> None:
        await self._tunnel.send(payload)

    async def finish(self) -> None:
        await self._tunnel.finish()


class Iris(Peer):
    name = "iris"
    waits = False
    """Whether publishers wait for subscribers."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._open: list[AbstractAsyncContextManager[Any]] = []

    def prepare(self) -> None:
        create_keys(self.directory / "keys")
        if self.setup["servers"] > 1:
            self.choose_port("link0")
            self.choose_port("link1")

    def servers(self) -> list[Server]:
        made = []
        for number in range(self.setup["servers"]):
            runtime = self.directory / f"relay{number}"
            runtime.mkdir(mode=0o700)
            command = ["-m", "relay", "--socket", self._socket(number), "--no-mdns"]
            command += ["--bind=127.0.0.1", f"--port={self.setup.get(f'link{number}', 0)}"]
            if number:
                command += ["--join", f"127.0.0.1:{self.port('link0')}"]
            env = {"XDG_RUNTIME_DIR": str(runtime), "IRIS_CONFIG": str(self.directory / "keys")}
            made.append(
                Server(f"relay {number}", [sys.executable, *command], self._socket(number), env)
            )
        return made

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return IrisPublisher(await self._connect(0), topic, "wait" if self.waits else "drop")

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        def take(message: iris.Message) -> None:
            took(message.payload)

        client = await self._connect(1)
        await self._keep(
            client.subscribe(topic, take, when_full="wait" if self.waits else "drop-new")
        )

    async def replier(self) -> None:
        service = iris.Service(CLUSTER)

        @service.on_request
        def echo(payload: bytes) -> bytes:
            return payload

        client = await self._connect(1)
        await self._keep(client.serve(service))

    async def requester(self) -> Requester:
        client = await self._connect(0)
        await client.wait_for_members(CLUSTER, 1, timeout=PATIENCE_S)
        return IrisRequester(client)

    async def receiver(self, took: Took) -> None:
        service = iris.Service(STREAM)

        @service.on_tunnel
        async def take(tunnel: iris.Tunnel) -> None:
            async for payload in tunnel:
                took(payload)

        client = await self._connect(1)
        await self._keep(client.serve(service))

    async def sender(self) -> Sender:
        client = await self._connect(0)
        await client.wait_for_members(STREAM, 1, timeout=PATIENCE_S)
        return IrisSender(await self._keep(client.tunnel(STREAM, timeout=PATIENCE_S)))

    def _socket(self, number: int) -> str:
        return str(self.directory / f"relay{number}" / "relay.sock")

    async def _connect(self, side: int) -> iris.Client:
        os.environ["IRIS_CONFIG"] = str(self.directory / "keys")
        number = min(side, self.setup["servers"] - 1)
        # `iris run` sets this; other programs have to set it themselves.
        config = iris.ClientConfig(relay=self._socket(number), keep_freed_memory=True)
        return await self._keep(iris.connect(config=config))

    async def _keep(self, opened: AbstractAsyncContextManager[Kept]) -> Kept:
        """Enter a context manager and leave it open until the process ends."""
        self._open.append(opened)  # garbage collection would close it
        return await opened.__aenter__()


PEER = Iris
