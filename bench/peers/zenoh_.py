"""Zenoh, peer to peer without a router or discovery: publications with CongestionControl.BLOCK, so that nothing is
dropped.

By default, messages of 3 KiB and more go through shared memory on one host, the rest over TCP. Requests are a
querier and a queryable, express, called back directly on zenoh's threads (faster here; for subscribers the default
is).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import zenoh
from zenoh.handlers import Callback

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took

ECHO = "bench/echo"
STREAM = "bench/stream"
TIMEOUT_S = 60.0
POLL_S = 0.01
BLOCK = zenoh.CongestionControl.BLOCK


class ZenohPublisher(Publisher):
    def __init__(self, publisher: zenoh.Publisher) -> None:
        self._put = publisher.put

    async def burst(self, payloads: Sequence[bytes]) -> None:
        put = self._put
        for payload in payloads:
            put(payload)


class ZenohRequester(Requester):
    def __init__(self, querier: zenoh.Querier) -> None:
        self._querier = querier
        self._loop = asyncio.get_running_loop()

    async def request(self, payload: bytes) -> bytes:
        answer: asyncio.Future[zenoh.Reply] = self._loop.create_future()

        def settle(reply: zenoh.Reply) -> None:
            if not answer.done():
                answer.set_result(reply)

        def replied(reply: zenoh.Reply) -> None:
            self._loop.call_soon_threadsafe(settle, reply)

        self._querier.get(Callback(replied, indirect=False), payload=payload)
        async with asyncio.timeout(TIMEOUT_S):
            reply = await answer
        if reply.err is not None:
            raise RuntimeError(f"the replier failed: {reply.err.payload.to_string()}")
        return reply.ok.payload.to_bytes()


class ZenohSender(Sender):
    def __init__(self, publisher: zenoh.Publisher) -> None:
        self._put = publisher.put

    async def send(self, payload: bytes) -> None:
        self._put(payload)


class Zenoh(Peer):
    name = "zenoh"

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._sessions: list[zenoh.Session] = []

    def prepare(self) -> None:
        for name in ("publications", "requests", "stream"):
            self.choose_port(name)

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        session = self._open(listen="publications")
        return ZenohPublisher(session.declare_publisher(topic, congestion_control=BLOCK))

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        # There are one publisher and several subscribers: these connect, and try again until it listens.
        self._subscribe(self._open(connect="publications"), topic, took)

    async def replier(self) -> None:
        def echo(query: zenoh.Query) -> None:
            with query:  # at its end, the requester knows that there are no more replies
                query.reply(ECHO, query.payload, congestion_control=BLOCK, express=True)

        session = self._open(listen="requests")
        self._queryable = session.declare_queryable(ECHO, Callback(echo, indirect=False))

    async def requester(self) -> Requester:
        querier = self._open(connect="requests").declare_querier(
            ECHO,
            consolidation=zenoh.ConsolidationMode.NONE,  # there is exactly one reply
            timeout=TIMEOUT_S,
            congestion_control=BLOCK,
            express=True,
        )
        await matched(querier)
        return ZenohRequester(querier)

    async def receiver(self, took: Took) -> None:
        self._subscribe(self._open(listen="stream"), STREAM, took)

    async def sender(self) -> Sender:
        session = self._open(connect="stream")
        publisher = session.declare_publisher(STREAM, congestion_control=BLOCK)
        await matched(publisher)
        return ZenohSender(publisher)

    def _subscribe(self, session: zenoh.Session, expression: str, took: Took) -> None:
        self._subscription = session.declare_subscriber(
            expression, lambda sample: took(sample.payload.to_bytes())
        )

    def _open(self, listen: str | None = None, connect: str | None = None) -> zenoh.Session:
        config = zenoh.Config()
        for name, value in {
            "mode": "peer",
            "listen/endpoints": self._endpoints(listen),
            "connect/endpoints": self._endpoints(connect),
            "connect/timeout_ms": -1,
            "connect/exit_on_failure": False,
            "connect/retry": {"period_init_ms": 100, "period_max_ms": 500},
            "scouting/multicast/enabled": False,
            "scouting/gossip/enabled": False,
        }.items():
            config.insert_json5(name, json.dumps(value))
        session = zenoh.open(config)
        self._sessions.append(session)  # garbage collection would close it
        return session

    def _endpoints(self, port: str | None) -> list[str]:
        return [] if port is None else [f"tcp/127.0.0.1:{self.port(port)}"]


async def matched(declared: zenoh.Publisher | zenoh.Querier) -> None:
    """Return when the other end has been discovered."""
    async with asyncio.timeout(TIMEOUT_S):
        while not declared.matching_status:  # noqa: ASYNC110 - what else it offers calls from threads
            await asyncio.sleep(POLL_S)


PEER = Zenoh
