"""PUB and SUB: a message of SP is `topic`, separator, payload, so that SP's prefixes select topics."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import iris
from iris import InvalidName, IrisError, RelayUnavailable, RequestError
from relay.bridges.sp.bridge import JOIN_AGAIN_S, Backlog, Bridge
from relay.bridges.sp.config import SocketConfig

MAX_TOPIC_BYTES: Final = 255


def selects(pattern: str, topic: str) -> bool:
    """Whether a filter selects a topic; both are valid."""
    parts, tokens = pattern.split("."), topic.split(".")
    if parts[-1] == ">" and len(tokens) >= len(parts):
        tokens[len(parts) - 1 :] = [">"]
    return len(parts) == len(tokens) and all(map(_fits, parts, tokens))


class Mapping:
    """Between Iris's (topic, payload) and the one message of SP."""

    def __init__(self, config: SocketConfig) -> None:
        self._topic = config.topic
        self._under = config.under
        self._separator = config.separator.encode()
        self._bare = config.bare
        self._heads: dict[str, bytes] = {}

    def split(self, data: bytes) -> tuple[str, bytes]:
        """Return the topic and payload of an SP message; raises InvalidName if it has no topic in front."""
        if self._topic:
            return self._topic, data
        end = data.find(self._separator, 0, MAX_TOPIC_BYTES + len(self._separator))
        if end < 0:
            raise InvalidName("no separator after a topic")
        try:
            name = data[:end].decode()
        except UnicodeDecodeError as err:
            raise InvalidName("a topic that is not UTF-8") from err
        return self._under + name, data[end + len(self._separator) :]

    def join(self, topic: str, payload: bytes) -> bytes:
        """Return the SP message; raises InvalidName for a topic that would be read as another."""
        if self._bare:
            return payload
        head = self._heads.get(topic)
        if head is None:
            name = topic.removeprefix(self._under).encode()
            if self._separator in name:
                raise InvalidName(f"{topic!r} holds the separator")
            head = name + self._separator
            if len(self._heads) < 4096:
                self._heads[topic] = head
        return head + payload


def _fits(part: str, token: str) -> bool:
    return part in ("*", token)


class SubBridge(Bridge):
    """Their PUB becomes publications. What Iris does not take at once waits within `queue_bytes`, then it is dropped."""

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
                    self.tally.lose("malformed", err)
                except IrisError as err:
                    self.tally.lose(type(err).__name__, err)

        async with asyncio.TaskGroup() as group:
            group.create_task(backlog.drain())
            group.create_task(read())


class PubBridge(Bridge):
    """Publications reach their SUB. nng drops the oldest for a peer that is behind, and does not tell."""

    async def run(self) -> None:
        """Send until told to stop."""
        mapping = Mapping(self.config)

        def deliver(message: iris.Message, before: tuple[str, ...]) -> None:
            if any(selects(pattern, message.name) for pattern in before):
                return  # it came by one of them
            try:
                data = mapping.join(message.name, message.payload)
            except InvalidName as err:
                self.tally.lose("malformed", err)
            else:
                self.cast(data)

        topics, group = self.config.topics, self.config.group
        subscriptions = [
            self.client.subscribe(
                pattern,
                # Of the filters of a group one gets each message, of others all that match.
                partial(deliver, before=() if group else topics[:number]),
                group=group,
                limit_bytes=self.config.queue_bytes,
            )
            for number, pattern in enumerate(topics)
        ]
        for subscription in subscriptions:
            while True:
                try:
                    await subscription.ready()
                    break
                except (RequestError, RelayUnavailable):  # it went away as we asked
                    await asyncio.sleep(JOIN_AGAIN_S)
        self.ready.set()
        await self.stopped.wait()
        for subscription in subscriptions:
            await subscription.close()
