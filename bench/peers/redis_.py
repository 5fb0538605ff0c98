"""Redis: redis-server without persistence and redis-py (asyncio, hiredis). PUBLISH is a round trip, so publications
are sent in pipelines. Redis does not have requests, so a request is two publications with an id. RESP2, because
with RESP3 redis-py formats every message for its log. The limit that disconnects slow readers is off, because it
would end a run instead of slowing it down."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from certificates import make_certificates
from redis.asyncio import Redis

from peers import TOPIC, Peer, Publisher, Requester, Server, Took, background

REQUESTS = "bench.echo"
REPLIES = "bench.reply."
NUMBER = struct.Struct(">I")
WHO, ID = 4, 8
"""Bytes of the requester's part of an id, which names its reply channel, and of the whole id, which ends with the
request's number."""


async def publish(client: Redis, messages: Sequence[tuple[str, bytes]]) -> None:
    pipeline = client.pipeline(transaction=False)
    for channel, payload in messages:
        pipeline.publish(channel, payload)
    await pipeline.execute()


class RedisPublisher(Publisher):
    def __init__(self, client: Redis, topic: str) -> None:
        self._client = client
        self._topic = topic

    async def burst(self, payloads: Sequence[bytes]) -> None:
        await publish(self._client, [(self._topic, payload) for payload in payloads])


class Outbox:
    """Publish in pipelines, one at a time: all messages of one turn of the event loop or one round trip."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: list[tuple[str, bytes]] = []
        self._wake = asyncio.Event()
        self._task = background(self._flush())

    def put(self, channel: str, payload: bytes) -> None:
        self._waiting.append((channel, payload))
        self._wake.set()

    async def _flush(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            await publish(self._client, waiting)


class RedisRequester(Requester):
    def __init__(self, outbox: Outbox, who: bytes) -> None:
        self._outbox = outbox
        self._who = who
        self._number = 0
        self._asked: dict[bytes, asyncio.Future[bytes]] = {}
        self._loop = asyncio.get_running_loop()

    async def request(self, payload: bytes) -> bytes:
        self._number += 1
        name = self._who + NUMBER.pack(self._number)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[name] = answer
        self._outbox.put(REQUESTS, name + payload)
        return await answer

    def answered(self, data: bytes) -> None:
        waiter = self._asked.pop(data[:ID])
        if not waiter.done():  # the run no longer waits for it
            waiter.set_result(data[ID:])


class RedisPeer(Peer):
    name = "redis"
    needs: ClassVar[Sequence[str]] = ("redis-server",)

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._listening: list[asyncio.Task[None]] = []

    def prepare(self) -> None:
        self.choose_port("server")
        port = self.port("server")
        lines = [
            "bind 127.0.0.1",
            f'dir "{self.directory}"',
            'save ""',
            "appendonly no",
            "client-output-buffer-limit pubsub 0 0 0",
            f"port 0\ntls-port {port}" if self.secured else f"port {port}",
        ]
        if self.secured:
            certificates = make_certificates(self.directory)
            self.setup["ca"] = str(certificates.ca)
            lines += [
                f"tls-cert-file {certificates.cert}",
                f"tls-key-file {certificates.key}",
                "tls-auth-clients no",
            ]
        (self.directory / "redis.conf").write_text("\n".join(lines) + "\n")

    def servers(self) -> list[Server]:
        command = ["redis-server", str(self.directory / "redis.conf")]
        return [Server("redis-server", command, listens=("127.0.0.1", self.port("server")))]

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return RedisPublisher(self._client(), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        await self._subscribe(self._client(), topic, took)

    async def replier(self) -> None:
        client = self._client()
        outbox = Outbox(client)

        def echo(data: bytes) -> None:
            outbox.put(REPLIES + data[:WHO].hex(), data)

        await self._subscribe(client, REQUESTS, echo)

    async def requester(self) -> Requester:
        client, who = self._client(), os.urandom(WHO)
        requester = RedisRequester(Outbox(client), who)
        await self._subscribe(client, REPLIES + who.hex(), requester.answered)
        return requester

    def _client(self) -> Redis:
        tls = {"ssl": True, "ssl_ca_certs": self.setup["ca"]} if self.secured else {}
        return Redis(host="127.0.0.1", port=self.port("server"), protocol=2, **tls)

    async def _subscribe(self, client: Redis, channel: str, took: Took) -> None:
        pubsub = client.pubsub()
        await pubsub.subscribe(channel)
        messages = pubsub.listen()
        await anext(messages)  # the server's confirmation of the subscription

        async def listen() -> None:
            async for message in messages:
                took(message["data"])

        self._listening.append(background(listen()))


PEER = RedisPeer
