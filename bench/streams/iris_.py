"""Iris: a relay with `--data`, which starts its store. Public names only.

An append is acknowledged when it is synced; appends that arrive meanwhile share the next sync. One client calls
`append_many` with 1,000 messages, 8 times before the first call returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from peers import TOPIC, Server
from peers.iris_ import TIMEOUT_S, Iris

import iris
from streams import Appender, Durable, Missing, Offering, State, TookMany

START_S = 15.0
PAUSE_S = 0.05
Answer = TypeVar("Answer")


class IrisAppender(Appender):
    def __init__(self, client: iris.Client, name: str) -> None:
        self._streams = client.streams
        self._name = name

    async def append_many(self, payloads: Sequence[bytes]) -> int:
        offsets = await self._streams.append_many(self._name, payloads, timeout=TIMEOUT_S)
        return len(set(offsets))

    async def append(self, payload: bytes) -> None:
        await self._streams.append(self._name, payload, timeout=TIMEOUT_S)


class IrisOffering(Offering):
    def __init__(self, client: iris.Client) -> None:
        self._client = client

    async def offer(self, payloads: Sequence[bytes]) -> None:
        offer = self._client.offer
        for payload in payloads:
            if not offer(TOPIC, payload):
                await self._client.publish(TOPIC, payload)


class IrisStreams(Iris, Durable):
    def servers(self) -> list[Server]:
        return [
            dataclasses.replace(made, command=[*made.command, "--data", str(self.data)])
            for made in super().servers()
        ]

    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        streams = (await self._connect(0)).streams
        await _once_up(lambda: streams.create(name, topic=topic, max_bytes=keep * size))

    async def delete(self, name: str) -> None:
        await (await self._connect(0)).streams.delete(name, timeout=TIMEOUT_S)

    async def state(self, name: str) -> State:
        streams = (await self._connect(0)).streams
        info = await _once_up(lambda: streams.describe(name, timeout=TIMEOUT_S))
        return State(info.next, info.messages, info.size_bytes)

    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        return IrisAppender(await self._connect(0), name)

    async def replay(self, name: str, took: TookMany) -> Missing:
        client = await self._connect(1)
        missing = Missing()
        causes: Counter[str] = Counter()
        async with client.streams.read(name, "first", follow=False) as reader:
            async for messages in reader.batches():
                took([message.payload for message in messages])
            for gap in reader.gaps:
                causes[gap.cause] += 1
                missing.of_unknown_count += gap.count is None
                missing.messages += gap.count or 0
        missing.causes = dict(causes)
        return missing

    async def offering(self) -> Offering:
        return IrisOffering(await self._connect(0))

    async def _connect(self, side: int) -> iris.Client:
        client = getattr(self, "_client", None)
        if client is None:
            client = self._client = await super()._connect(side)
        return client


async def _once_up(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeat a call until it is answered, because a relay that has just started may not have its store yet."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            return await ask()
        except iris.IrisError:
            if time.monotonic() > until_s:
                raise
        await asyncio.sleep(PAUSE_S)


DURABLE = IrisStreams
