"""ZeroMQ with zmq.asyncio, without a broker: default high-water marks, so PUB drops when a subscriber is behind.

A topic is a prefix of the message, in one frame. Readers await once, then read the waiting messages without
awaiting. Requests are DEALER to ROUTER with an id, the stream is PUSH to PULL, whose `send` waits at the high-water
mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import zmq
from zmq.asyncio import Context, Socket

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took, background

DRAINED = 1000
"""Most messages read before the event loop turns: the default high-water mark."""


class ZeroMqPublisher(Publisher):
    def __init__(self, socket: Socket, topic: str) -> None:
        self._socket = socket
        self._prefix = topic.encode() + b" "

    async def burst(self, payloads: Sequence[bytes]) -> None:
        send, prefix = self._socket.send, self._prefix
        for payload in payloads:
            await send(prefix + payload)


class ZeroMqRequester(Requester):
    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._numbers = count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._reading = background(drain(socket, self._answered))

    def _answered(self, message: list[bytes]) -> None:
        number, payload = message
        answer = self._waiting.pop(number)
        if not answer.cancelled():
            answer.set_result(payload)

    async def request(self, payload: bytes) -> bytes:
        number = next(self._numbers).to_bytes(8, "big")
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart([number, payload])
        return await answer


class ZeroMqSender(Sender):
    def __init__(self, context: Context, socket: Socket) -> None:
        self._context = context
        self._socket = socket

    async def send(self, payload: bytes) -> None:
        await self._socket.send(payload)

    async def finish(self) -> None:
        self._socket.close()
        await asyncio.to_thread(self._context.term)  # lingers until everything is sent


class ZeroMq(Peer):
    name = "zeromq"

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._context = Context()

    def prepare(self) -> None:
        for name in ("publications", "requests", "stream"):
            self.choose_port(name)

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return ZeroMqPublisher(self._socket(zmq.PUB, "publications", bind=True), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        prefix = topic.encode() + b" "
        start = len(prefix)
        socket = self._socket(zmq.SUB, "publications")
        socket.subscribe(prefix)
        self._reading = background(drain(socket, lambda frames: took(frames[0][start:])))

    async def replier(self) -> None:
        socket = self._socket(zmq.ROUTER, "requests", bind=True)
        # ROUTER never blocks, so nothing is awaited.
        self._reading = background(drain(socket, plain(socket).send_multipart))

    async def requester(self) -> Requester:
        return ZeroMqRequester(self._socket(zmq.DEALER, "requests"))

    async def receiver(self, took: Took) -> None:
        socket = self._socket(zmq.PULL, "stream", bind=True)
        self._reading = background(drain(socket, lambda frames: took(frames[0])))

    async def sender(self) -> Sender:
        return ZeroMqSender(self._context, self._socket(zmq.PUSH, "stream"))

    def _socket(self, kind: int, port: str, *, bind: bool = False) -> Socket:
        socket = self._context.socket(kind)
        (socket.bind if bind else socket.connect)(f"tcp://127.0.0.1:{self.port(port)}")
        return socket


def plain(socket: Socket) -> zmq.Socket[bytes]:
    """Return the same socket with blocking calls."""
    return zmq.Socket.shadow(socket.underlying)


async def drain(socket: Socket, take: Callable[[list[bytes]], Any]) -> None:
    """Deliver every message."""
    receive = plain(socket).recv_multipart
    while True:
        take(await socket.recv_multipart())
        try:
            for _ in range(DRAINED):
                take(receive(zmq.NOBLOCK))
        except zmq.Again:
            continue
        await asyncio.sleep(
            0
        )  # more messages wait, so the next receive would not let the loop turn


PEER = ZeroMq
