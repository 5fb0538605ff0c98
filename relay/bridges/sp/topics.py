"""PUB and SUB: an SP message is topic, separator and payload, so that SP's prefixes select topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

import iris
from iris import InvalidName, IrisError, RelayUnavailable, RequestError
from relay.bridges.sp.bridge import JOIN_AGAIN_S, Backlog, Bridge
from relay.bridges.sp.config import SocketConfig

MAX_TOPIC_BYTES: Final = 255
POLL_S: Final = 0.005
"""Time between two checks whether the slowest peer has caught up."""
Handler = Callable[[iris.Message], Coroutine[Any, Any, None] | None]


def selects(pattern: str, topic: str) -> bool:
    """Whether a filter selects a topic. Both must be valid."""
    parts, tokens = pattern.split("."), topic.split(".")
    if parts[-1] == ">" and len(tokens) >= len(parts):
        tokens[len(parts) - 1 :] = [">"]
    return len(parts) == len(tokens) and all(map(_fits, parts, tokens))


class Mapping:
    """Converts between Iris's (topic, payload) and one SP message."""

    def __init__(self, config: SocketConfig) -> None:
        self._topic = config.topic
        self._under = config.under
        self._separator = config.separator.encode()
        self._bare = config.bare
        self._heads: dict[str, bytes] = {}

    def split(self, data: bytes) -> tuple[str, bytes]:
        """Return the topic and payload of an SP message; raises InvalidName if it does not begin with a topic."""
        if self._topic:
            return self._topic, data
        end_limit = MAX_TOPIC_BYTES + len(self._separator)
        end = data.find(self._separator, 0, end_limit)
        if end < 0:
            raise InvalidName(f"no separator {self._separator!r} in the first {end_limit} bytes")
        try:
            name = data[:end].decode()
        except UnicodeDecodeError as err:
            raise InvalidName("the topic is not UTF-8") from err
        return self._under + name, data[end + len(self._separator) :]

    def join(self, topic: str, payload: bytes) -> bytes:
        """Return the SP message; raises InvalidName for a topic that a receiver would read as another."""
        if self._bare:
            return payload
        head = self._heads.get(topic)
        if head is None:
            name = topic.removeprefix(self._under).encode()
            if self._separator in name:
                raise InvalidName(f"topic {topic!r} contains the separator {self._separator!r}")
            head = name + self._separator
            if len(self._heads) < 4096:
                self._heads[topic] = head
        return head + payload


def _fits(part: str, token: str) -> bool:
    return part in ("*", token)


class SubBridge(Bridge):
    """Messages of PUB peers become publications.

    Messages that Iris does not accept at once are queued within `queue_bytes`, then dropped.
    """

    async def run(self) -> None:
        """Publish until cancelled."""
        mapping = Mapping(self.config)
        backlog = Backlog(self, self.client.publish)

        async def read() -> None:
            async for data in self.incoming():
                try:
                    topic, payload = mapping.split(data)
                    if len(backlog) or not self.client.offer(topic, payload):
                        backlog.add(topic, payload)
                except InvalidName as err:
                    self.tally.count_lost("malformed", err)
                except IrisError as err:
                    self.tally.count_lost(type(err).__name__, err)

        async with asyncio.TaskGroup() as group:
            group.create_task(backlog.drain())
            group.create_task(read())


class SubscribingBridge(Bridge):
    """Sends the publications of its topics to SP peers."""

    async def deliver_topics(self, topics: tuple[str, ...], take: Handler) -> None:
        """Pass each publication to `take` once, until `stop`.

        Publishers that wait for subscribers wait for a coroutine function.
        """
        waits, group = self.config.waits, self.config.group

        def once(before: tuple[str, ...]) -> Handler:
            if group or not before:
                return take  # in a group, one filter gets each message; otherwise every matching filter does

            async def waiting(message: iris.Message) -> None:
                if not any(selects(pattern, message.name) for pattern in before):
                    await cast(Coroutine[Any, Any, None], take(message))

            def at_once(message: iris.Message) -> None:
                if not any(selects(pattern, message.name) for pattern in before):
                    take(message)

            return waiting if waits else at_once

        subscriptions = [
            self.client.subscribe(
                pattern,
                once(topics[:number]),
                group=group,
                limit_bytes=self.config.queue_bytes,
                when_full="wait" if waits else "drop-new",
            )
            for number, pattern in enumerate(topics)
        ]
        for subscription in subscriptions:
            while True:
                try:
                    await subscription.ready()
                    break
                except (RequestError, RelayUnavailable):  # the relay was lost while subscribing
                    await asyncio.sleep(JOIN_AGAIN_S)
        self.ready.set()
        await self.stopped.wait()
        for subscription in subscriptions:
            await subscription.close()


class PubBridge(SubscribingBridge):
    """Publications reach SUB peers. nng drops the oldest for a peer that is behind and does not report
    it: see `when_full`.
    """

    async def run(self) -> None:
        """Send until `stop`."""
        mapping = Mapping(self.config)
        most = max(1, self.config.queue_messages // 2)
        room = most
        """Messages that may be sent before the bridge checks again how far the slowest peer is behind."""

        def deliver(message: iris.Message) -> None:
            try:
                data = mapping.join(message.name, message.payload)
            except InvalidName as err:
                self.tally.count_lost("malformed", err)
            else:
                self.cast(data)

        async def wait(message: iris.Message) -> None:
            nonlocal room
            while room <= 0:
                room = most - self.socket.behind()
                if room > 0 or self.stopping:
                    break
                await asyncio.sleep(POLL_S)
            room -= 1
            deliver(message)

        await self.deliver_topics(self.config.topics, wait if self.config.waits else deliver)


class TopicPushBridge(SubscribingBridge):
    """Publications reach PULL peers, each one peer.

    A message is handled when nng has it, so slow peers make waiting publishers wait.
    """

    async def run(self) -> None:
        """Send until `stop`."""
        turn = asyncio.Lock()

        async def forward(message: iris.Message) -> None:
            self.in_flight += 1
            try:
                async with turn:
                    await self.socket.send(message.payload)
            except BaseException as err:
                self.tally.count_lost("stopping" if self.stopping else type(err).__name__, err)
                raise
            finally:
                self.ended(0)

        await self.deliver_topics(self.config.topics, forward)
