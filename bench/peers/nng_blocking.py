"""nng with pynng's blocking calls, without a broker: default buffers, so Pub0 drops when a subscriber is behind.

A topic is a prefix of the message. Receivers read in a thread; requests are Req0 to Rep0, several at once with one
context each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import pynng

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took


class BlockingPublisher(Publisher):
    def __init__(self, socket: pynng.Pub0, topic: str) -> None:
        self._socket = socket
        self._prefix = topic.encode() + b" "

    async def burst(self, payloads: Sequence[bytes]) -> None:
        send, prefix = self._socket.send, self._prefix
        for payload in payloads:
            send(prefix + payload)


class BlockingRequester(Requester):
    def __init__(self, socket: pynng.Req0) -> None:
        self._socket = socket
        self._contexts: list[pynng.Context] = []

    async def request(self, payload: bytes) -> bytes:
        self._socket.send(payload)
        reply: bytes = self._socket.recv()
        return reply

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        while len(self._contexts) < len(payloads):
            self._contexts.append(self._socket.new_context())
        used = self._contexts[: len(payloads)]
        for context, payload in zip(used, payloads, strict=True):
            context.send(payload)
        return [context.recv() for context in used]


class BlockingSender(Sender):
    def __init__(self, socket: pynng.Push0) -> None:
        self._socket = socket

    async def send(self, payload: bytes) -> None:
        self._socket.send(payload)


class NngBlocking(Peer):
    name = "nng-blocking"
    blocking = True

    def prepare(self) -> None:
        for name in ("publications", "requests", "stream"):
            self.choose_port(name)

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        return BlockingPublisher(pynng.Pub0(listen=self._address("publications")), topic)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        prefix = topic.encode() + b" "
        start = len(prefix)
        socket = pynng.Sub0(topics=prefix)
        socket.dial(self._address("publications"), block=False)  # the publisher starts later
        forever(lambda: took(socket.recv()[start:]))

    async def replier(self) -> None:
        socket = pynng.Rep0(listen=self._address("requests"))
        forever(lambda: socket.send(socket.recv()))

    async def requester(self) -> Requester:
        return BlockingRequester(pynng.Req0(dial=self._address("requests")))

    async def receiver(self, took: Took) -> None:
        socket = pynng.Pull0(listen=self._address("stream"))
        forever(lambda: took(socket.recv()))

    async def sender(self) -> Sender:
        return BlockingSender(pynng.Push0(dial=self._address("stream")))

    def _address(self, port: str) -> str:
        return f"tcp://127.0.0.1:{self.port(port)}"


def forever(step: Callable[[], Any]) -> None:
    """Repeat a function in a thread of its own until the process ends."""

    def run() -> None:
        while True:
            step()

    Thread(target=run, daemon=True).start()


PEER = NngBlocking
