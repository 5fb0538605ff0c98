"""Iris: a relay with `--data`, which starts its store. Public names only.

An append is acknowledged when it is synced; appends that arrive meanwhile share the next sync. One client calls
`append_many` with 1,000 messages, 8 times before the first call returns.

With the option `bucket` ("file" or "s3") the store has a bucket, a directory or a service of this machine, and with
`durability` "bucket" an append is acknowledged when it is there. This takes longer, so there are 16 calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from peers import TOPIC, Server
from peers.iris_ import TIMEOUT_S, Iris

import iris
from iris.crypto.keys import GroupKey
from streams import Appender, Durable, Missing, Offering, State, TookMany
from streams.s3 import NAME, environ

BUCKET_INFLIGHT = 16
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


class BucketAppender(IrisAppender):
    INFLIGHT = BUCKET_INFLIGHT


class IrisOffering(Offering):
    def __init__(self, client: iris.Client) -> None:
        self._client = client

    async def offer(self, payloads: Sequence[bytes]) -> None:
        offer = self._client.offer
        for payload in payloads:
            if not offer(TOPIC, payload):
                await self._client.publish(TOPIC, payload)


class IrisStreams(Iris, Durable):
    @property
    def url(self) -> str:
        """The bucket; "" if there is none."""
        where = self.setup.get("bucket", "")
        return {"": "", "file": f"file://{self.directory}/bucket", "s3": f"s3://{NAME}/bench"}[where]  # fmt: skip

    @property
    def bucket_environ(self) -> dict[str, str]:
        """What a process needs to find the bucket."""
        return environ(self.port("s3")) if self.url.startswith("s3:") else {}

    def prepare(self) -> None:
        super().prepare()
        if not self.url:
            return
        make_group_key(self.data)
        if self.url.startswith("s3:"):
            self.choose_port("s3")

    def servers(self) -> list[Server]:
        more = ["--data", str(self.data), *(["--bucket", self.url] if self.url else [])]
        relays = [
            dataclasses.replace(
                made, command=[*made.command, *more], env={**made.env, **self.bucket_environ}
            )
            for made in super().servers()
        ]
        if not self.bucket_environ:
            return relays
        port = self.port("s3")
        command = [sys.executable, "-m", "streams.s3", str(port)]
        return [Server("s3", command, ("127.0.0.1", port)), *relays]

    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        streams = (await self._connect(0)).streams
        durability = self.setup.get("durability", "disk")
        await _once_up(
            lambda: streams.create(name, topic=topic, max_bytes=keep * size, durability=durability)
        )

    async def delete(self, name: str) -> None:
        await (await self._connect(0)).streams.delete(name, timeout=TIMEOUT_S)

    async def state(self, name: str) -> State:
        streams = (await self._connect(0)).streams
        info = await _once_up(lambda: streams.describe(name, timeout=TIMEOUT_S))
        return State(info.end, info.messages, info.size_bytes)

    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        made = BucketAppender if self.setup.get("durability") == "bucket" else IrisAppender
        return made(await self._connect(0), name)

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


def make_group_key(data: Path) -> None:
    """Make the data directory of a store, with the key of its group."""
    data.mkdir(mode=0o700)
    with open(data / "group.key", "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:  # fmt: skip
        file.write(GroupKey(bytes(32)).reveal())


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
