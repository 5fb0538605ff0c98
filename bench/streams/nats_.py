"""NATS JetStream: a file store with one replica, nats-py. Appends use `publish_async`, with 4,000 unacknowledged
(its default), and replays an ordered consumer. Logs that record a topic receive messages of the plain `publish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig
from peers import TOPIC
from peers.nats_ import TIMEOUT_S, Nats

from streams import Appender, Durable, Missing, Offering, State, TookMany

MANY = 1000


class NatsAppender(Appender):
    BATCH = 500
    INFLIGHT = 8

    def __init__(self, jetstream: JetStreamContext, name: str) -> None:
        self._jetstream = jetstream
        self._name = name
        self._turn = asyncio.Lock()

    async def append_many(self, payloads: Sequence[bytes]) -> int:
        publish, name = self._jetstream.publish_async, self._name
        async with self._turn:  # one batch after the other: it waits in between
            futures = [await publish(name, payload) for payload in payloads]
        return len(await asyncio.gather(*futures))

    async def append(self, payload: bytes) -> None:
        await self._jetstream.publish(self._name, payload, timeout=TIMEOUT_S)


class NatsOffering(Offering):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def offer(self, payloads: Sequence[bytes]) -> None:
        publish = self._client.publish
        for payload in payloads:
            await publish(TOPIC, payload)


class NatsStreams(Nats, Durable):
    def prepare(self) -> None:
        super().prepare()
        sync = f", sync_interval: {self.setup['sync']}" if self.setup["sync"] else ""
        with (self.directory / "nats0.conf").open("a") as file:
            file.write(f'jetstream {{ store_dir: "{self.data}"{sync} }}\n')

    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        config = StreamConfig(
            name=name, subjects=[topic or name], storage=StorageType.FILE, max_bytes=keep * size or -1
        )  # fmt: skip
        await (await self._jetstream()).add_stream(config)

    async def delete(self, name: str) -> None:
        await (await self._jetstream()).delete_stream(name)

    async def state(self, name: str) -> State:
        state = (await (await self._jetstream()).stream_info(name)).state
        return State(state.last_seq, state.messages, state.bytes)

    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        return NatsAppender(await self._jetstream(), name)

    async def replay(self, name: str, took: TookMany) -> Missing:
        jetstream = await self._jetstream()
        info = await jetstream.stream_info(name)
        left = info.state.messages
        if not left:
            return Missing()
        payloads: list[bytes] = []
        done = asyncio.Event()

        async def take(message: Msg) -> None:
            nonlocal left
            payloads.append(message.data)
            left -= 1
            if len(payloads) == MANY or not left:
                took(payloads)
                payloads.clear()
                if left <= 0:
                    done.set()

        subjects = info.config.subjects
        reading = await jetstream.subscribe(
            subjects[0], stream=name, cb=take, ordered_consumer=True
        )
        await done.wait()
        await reading.unsubscribe()
        return Missing()

    async def offering(self) -> Offering:
        return NatsOffering(await self._connect(0))

    async def _jetstream(self) -> JetStreamContext:
        made = getattr(self, "_made", None)
        if made is None:
            made = self._made = (await self._connect(0)).jetstream(timeout=TIMEOUT_S)
        return made


DURABLE = NatsStreams
