"""NATS JetStream: a file store with one replica, nats-py. Appends use `publish_async`, with 4,000 unacknowledged
(its default), and replays an ordered consumer. Logs that record a topic receive messages of the plain `publish`.

With the option `servers`, as many servers make a cluster, and each has a replica. An append is then acknowledged when
a majority of them has handed it to its kernel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig
from peers import TOPIC
from peers.nats_ import TIMEOUT_S, Nats

from streams import Appender, Durable, Missing, Offering, State, TookMany

MANY = 1000
PAUSE_S = 0.1
ASK_S = 2.0


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
        for number in range(self.setup["servers"]):
            with (self.directory / f"nats{number}.conf").open("a") as file:
                file.write(f'server_name: "n{number}"\n')
                file.write(f'jetstream {{ store_dir: "{self.data_of(number)}"{sync} }}\n')

    def data_of(self, number: int) -> Path:
        """Directory that a server writes to."""
        return self.data / str(number)

    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        config = StreamConfig(
            name=name, subjects=[topic or name], storage=StorageType.FILE, max_bytes=keep * size or -1,
            num_replicas=self.setup["servers"],
        )  # fmt: skip
        asking = await self._jetstream()
        if self.setup["servers"] > 1:
            asking = (await self._connect(0)).jetstream(timeout=ASK_S)
        until_s = time.monotonic() + TIMEOUT_S
        while True:  # a cluster answers nothing until it has elected who may create
            try:
                await asking.add_stream(config)
                return
            except (Error, TimeoutError):
                if self.setup["servers"] == 1 or time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)

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
