"""NATS: nats-server and nats-py with their defaults. Requests use its own `request`; TLS is one block of the
configuration."""

from __future__ import annotations

import shutil
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats
from certificates import make_certificates
from nats.aio.client import Client
from nats.aio.msg import Msg

from peers import TOPIC, Peer, Publisher, Requester, Server, Took

SUBJECT = "bench.echo"
TIMEOUT_S = 60.0


class NatsPublisher(Publisher):
    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic

    async def burst(self, payloads: Sequence[bytes]) -> None:
        publish, topic = self._client.publish, self._topic
        for payload in payloads:
            await publish(topic, payload)

    async def flush(self) -> None:
        await self._client.flush(timeout=TIMEOUT_S)


class NatsRequester(Requester):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def request(self, payload: bytes) -> bytes:
        return (await self._client.request(SUBJECT, payload, timeout=TIMEOUT_S)).data


class Nats(Peer):
    name = "nats"

    def prepare(self) -> None:
        count = self.setup["servers"]
        for number in range(count):
            self.choose_port(f"client{number}")
            self.choose_port(f"route{number}")
        lines = []
        if self.secured:
            certificates = make_certificates(self.directory)
            self.setup["ca"] = str(certificates.ca)
            lines.append(
                f'tls {{ cert_file: "{certificates.cert}", key_file: "{certificates.key}" }}'
            )
        for number in range(count):
            text = [f'listen: "127.0.0.1:{self.port(f"client{number}")}"', *lines]
            if count > 1:
                others = [n for n in range(count) if n != number]
                routes = ", ".join(f'"nats://127.0.0.1:{self.port(f"route{n}")}"' for n in others)
                listen = f'listen: "127.0.0.1:{self.port(f"route{number}")}"'
                text.append(f"cluster {{ name: bench, {listen}, routes: [{routes}] }}")
            (self.directory / f"nats{number}.conf").write_text("\n".join(text) + "\n")

    def servers(self) -> list[Server]:
        beside = Path(sys.executable).with_name("nats-server")
        command = str(beside) if beside.exists() else shutil.which("nats-server") or "nats-server"
        return [
            Server(
                name=f"nats-server {number}",
                command=[command, "-c", str(self.directory / f"nats{number}.conf")],
                listens=("127.0.0.1", self.port(f"client{number}")),
            )
            for number in range(self.setup["servers"])
        ]

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return NatsPublisher(await self._connect(0), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        async def take(message: Msg) -> None:
            took(message.data)

        client = await self._connect(1)
        # Its default limits (65,536 messages, 128 MiB) drop what a slow callback leaves, as for any user.
        await client.subscribe(topic, cb=take)
        await client.flush()

    async def replier(self) -> None:
        async def echo(message: Msg) -> None:
            await message.respond(message.data)

        client = await self._connect(1)
        await client.subscribe(SUBJECT, cb=echo)
        await client.flush()

    async def requester(self) -> Requester:
        return NatsRequester(await self._connect(0))

    async def _connect(self, side: int) -> Client:
        number = min(side, self.setup["servers"] - 1)
        options: dict[str, Any] = {}
        if self.secured:
            options["tls"] = ssl.create_default_context(cafile=self.setup["ca"])
        scheme = "tls" if self.secured else "nats"
        return await nats.connect(f"{scheme}://127.0.0.1:{self.port(f'client{number}')}", **options)


PEER = Nats
