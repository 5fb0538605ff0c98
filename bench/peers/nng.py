"""nng with pynng's asyncio calls, without a broker: default buffers, so Pub0 drops when a subscriber is behind.

A topic is a prefix of the message. Requests are Req0 to Rep0, with one context for each that is in flight; the
stream is Push0 to Pull0, whose `send` waits while the receiver is behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pynng

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took, background

REPLIERS = 64
"""Number of answering contexts: the most requests in flight in a closed loop."""


class NngPublisher(Publisher):
    def __init__(self, socket: pynng.Pub0, topic: str) -> None:
        self._socket = socket
        self._prefix = topic.encode() + b" "

    async def burst(self, payloads: Sequence[bytes]) -> None:
        send, prefix = self._socket.asend, self._prefix
        for payload in payloads:
            await send(prefix + payload)


class NngRequester(Requester):
    def __init__(self, socket: pynng.Req0) -> None:
        self._socket = socket
        self._free: list[pynng.Context] = []

    async def request(self, payload: bytes) -> bytes:
        context = self._free.pop() if self._free else self._socket.new_context()
        await context.asend(payload)
        reply: bytes = await context.arecv()
        self._free.append(context)
        return reply


class NngSender(Sender):
    def __init__(self, socket: pynng.Push0) -> None:
        self._socket = socket

    async def send(self, payload: bytes) -> None:
        await self._socket.asend(payload)


class Nng(Peer):
    name = "nng"

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._tasks: list[asyncio.Task[None]] = []

    def prepare(self) -> None:
        for name in ("publications", "requests", "stream"):
            self.choose_port(name)

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return NngPublisher(pynng.Pub0(listen=self._address("publications")), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        prefix = topic.encode() + b" "
        start = len(prefix)
        socket = pynng.Sub0(topics=prefix)
        socket.dial(self._address("publications"), block=False)  # the publisher starts later

        async def read() -> None:
            while True:
                took((await socket.arecv())[start:])

        self._tasks.append(background(read()))

    async def replier(self) -> None:
        socket = pynng.Rep0(listen=self._address("requests"))

        async def echo(context: pynng.Context) -> None:
            while True:
                await context.asend(await context.arecv())

        for _ in range(REPLIERS):
            self._tasks.append(background(echo(socket.new_context())))

    async def requester(self) -> Requester:
        return NngRequester(pynng.Req0(dial=self._address("requests")))

    async def receiver(self, took: Took) -> None:
        socket = pynng.Pull0(listen=self._address("stream"))

        async def read() -> None:
            while True:
                took(await socket.arecv())

        self._tasks.append(background(read()))

    async def sender(self) -> Sender:
        return NngSender(pynng.Push0(dial=self._address("stream")))

    def _address(self, port: str) -> str:
        return f"tcp://127.0.0.1:{self.port(port)}"


PEER = Nng
