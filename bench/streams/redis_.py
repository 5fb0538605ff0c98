"""Redis Streams: redis-server with `appendonly yes` and `appendfsync always`, redis-py (asyncio, hiredis). XADD is
sent in pipelines of 1,000 on 4 connections, because on one connection client and server would wait for each other
in turn. So the order of batches is not kept. Retention is MAXLEN ~, reading XRANGE COUNT 1000. A Redis stream
cannot record publications.
"""

from __future__ import annotations

from collections.abc import Sequence

from peers.redis_ import RedisPeer
from redis.asyncio import Redis

from streams import Appender, Durable, Missing, State, TookMany

FIELD = b"d"
COUNT = 1000


class RedisAppender(Appender):
    INFLIGHT = 4

    def __init__(self, client: Redis, name: str, keep: int) -> None:
        self._client = client
        self._name = name
        self._keep = keep or None

    async def append_many(self, payloads: Sequence[bytes]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for payload in payloads:
            pipeline.xadd(self._name, {FIELD: payload}, maxlen=self._keep, approximate=True)
        return len(await pipeline.execute())

    async def append(self, payload: bytes) -> None:
        await self._client.xadd(self._name, {FIELD: payload}, maxlen=self._keep, approximate=True)


class RedisStreams(RedisPeer, Durable):
    ordered = False
    records_topics = "no stream records what is published"
    drops_cache = "its whole log is in memory"

    def prepare(self) -> None:
        super().prepare()
        self.data.mkdir()
        with (self.directory / "redis.conf").open("a") as file:
            file.write(f'dir "{self.data}"\nappendonly yes\nappendfsync always\n')

    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        pass  # XADD creates it

    async def delete(self, name: str) -> None:
        await self._one().unlink(name)

    async def state(self, name: str) -> State:
        info = await self._one().xinfo_stream(name)
        return State(info["entries-added"], info["length"], 0)

    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        return RedisAppender(self._one(), name, keep)

    async def replay(self, name: str, took: TookMany) -> Missing:
        client = self._one()
        last = await client.xrevrange(name, count=1)
        end = last[0][0].decode() if last else "+"
        start = "-"
        while entries := await client.xrange(name, start, end, count=COUNT):
            took([fields[FIELD] for _, fields in entries])
            start = f"({entries[-1][0].decode()}"
        return Missing()

    def _one(self) -> Redis:
        client = getattr(self, "_only", None)
        if client is None:
            client = self._only = self._client()
        return client


DURABLE = RedisStreams
