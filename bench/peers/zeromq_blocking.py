"""ZeroMQ with blocking calls, without a broker: default high-water marks, so PUB drops when a subscriber is behind.

A topic is a prefix of the message, in one frame. Receivers read in a thread; requests are DEALER to ROUTER, in
order, so that they do not need an id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import zmq

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took

Socket = zmq.Socket[bytes]


class BlockingPublisher(Publisher):
    def __init__(self, socket: Socket, topic: str) -> None:
        self._socket = socket
        self._prefix = topic.encode() + b" "

    async def burst(self, payloads: Sequence[bytes]) -> None:
        send, prefix = self._socket.send, self._prefix
        for payload in payloads:
            send(prefix + payload)


class BlockingRequester(Requester):
    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    async def request(self, payload: bytes) -> bytes:
        self._socket.send(payload)
        return self._socket.recv()

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        send, receive = self._socket.send, self._socket.recv
        for payload in payloads:
            send(payload)
        return [receive() for _ in payloads]


class BlockingSender(Sender):
    def __init__(self, context: zmq.Context[Socket], socket: Socket) -> None:
        self._context = context
        self._socket = socket

    async def send(self, payload: bytes) -> None:
        self._socket.send(payload)

    async def finish(self) -> None:
        self._socket.close()
        await asyncio.to_thread(self._context.term)  # lingers until everything is sent


class ZeroMqBlocking(Peer):
    name = "zeromq-blocking"
    blocking = True

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._context = zmq.Context()

    def prepare(self) -> None:
        for name in ("publications", "requests", "stream"):
            self.choose_port(name)

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return BlockingPublisher(self._socket(zmq.PUB, "publications", bind=True), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        prefix = topic.encode() + b" "
        start = len(prefix)
        socket = self._socket(zmq.SUB, "publications")
        socket.subscribe(prefix)
        forever(lambda: took(socket.recv()[start:]))

    async def replier(self) -> None:
        socket = self._socket(zmq.ROUTER, "requests", bind=True)
        forever(lambda: socket.send_multipart(socket.recv_multipart()))

    async def requester(self) -> Requester:
        return BlockingRequester(self._socket(zmq.DEALER, "requests"))

    async def receiver(self, took: Took) -> None:
        socket = self._socket(zmq.PULL, "stream", bind=True)
        forever(lambda: took(socket.recv()))

    async def sender(self) -> Sender:
        return BlockingSender(self._context, self._socket(zmq.PUSH, "stream"))

    def _socket(self, kind: int, port: str, *, bind: bool = False) -> Socket:
        socket = self._context.socket(kind)
        (socket.bind if bind else socket.connect)(f"tcp://127.0.0.1:{self.port(port)}")
        return socket


def forever(step: Callable[[], Any]) -> None:
    """Repeat a function in a thread of its own until the process ends."""

    def run() -> None:
        while True:
            step()

    Thread(target=run, daemon=True).start()


PEER = ZeroMqBlocking
