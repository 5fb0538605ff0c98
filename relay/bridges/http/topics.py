"""Publications as server-sent events.

All readers of a filter share one subscription. A publication is encoded once; each reader has a queue of such events,
bounded in bytes. When it is full, events are dropped for this reader alone, and an event `loss` with their number takes
their place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Final

import iris
from iris.documents import as_document
from iris.web.sending import event
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.replies import HEARTBEAT
from relay.bridges.http.shares import Share

CHUNK_BYTES: Final = 64 << 10
"""Events are sent together up to this size."""
READERS_AT_ONCE: Final = 100
"""Readers that get an event before other work has its turn."""
MESSAGE_BYTES: Final = 256
"""Bytes counted for each message that waits, besides its payload."""
SLOW_READER: Final = "slow reader"
BRIDGE_FULL: Final = "the bridge was too slow"
STOPPED: Final = event(
    {"reason": "the bridge is stopping or has read its tokens again; connect again"}, "end"
)


class Reader:
    """One event stream: the queue of events of one client."""

    def __init__(self, limit_bytes: int) -> None:
        self.dropped = 0
        """Events dropped so far, because this reader was slow."""
        self._limit_bytes = limit_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lost: Counter[str] = Counter()
        """Lost publications that are not in the queue as an event yet: cause -> count; 0 if it is unknown."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def offer(self, data: bytes, count: int) -> int:
        """Queue `count` events, or drop them and return their number."""
        dropped = 0
        if self._queued_bytes + len(data) > self._limit_bytes and self._queue:
            self._lost[SLOW_READER] += count
            self.dropped += count
            dropped = count
        else:
            self._note_lost()
            self._put(data)
        self._wake()
        return dropped

    def lose(self, cause: str, count: int) -> None:
        """Tell the reader of publications that did not reach the bridge; `count` is 0 if it is unknown."""
        self._lost[cause] += count
        self._wake()

    def end(self) -> None:
        """End the stream, after what is queued."""
        self._ended = True
        self._wake()

    async def next(self, heartbeat_s: float) -> bytes:
        """Return what to send next; b"" at the end, a comment if nothing happens for `heartbeat_s`."""
        if not self._queue:
            self._note_lost()
        if not self._queue and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(heartbeat_s):
                    await self._waiter
            except TimeoutError:
                return HEARTBEAT
            finally:
                self._waiter = None
            if not self._queue:
                self._note_lost()
        if not self._queue:
            return b""
        chunk = [self._queue.popleft()]
        size = len(chunk[0])
        while self._queue and size + len(self._queue[0]) <= CHUNK_BYTES:
            size += len(self._queue[0])
            chunk.append(self._queue.popleft())
        self._queued_bytes -= size
        return b"".join(chunk)

    def _note_lost(self) -> None:
        """Queue the events of losses; they are small and as many as there are causes."""
        if not self._lost:
            return
        lost, self._lost = self._lost, Counter()
        for cause, count in lost.items():
            self._put(event({"count": count or None, "cause": cause}, "loss"))

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued_bytes += len(data)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Feed:
    """One filter that is read: its subscription, and its readers."""

    def __init__(self, topics: Topics, pattern: str, config: HttpConfig, user: str) -> None:
        self.pattern = pattern
        self.user = user
        """The token in whose share of filters it counts: of a reader."""
        self.users: Counter[str] = Counter()
        """Readers of each token."""
        self.readers: dict[Reader, None] = {}
        self._topics = topics
        self._limit_bytes = config.filter_bytes
        self._waiting: deque[iris.Message | Counter[str]] = deque()
        """Messages, and losses at their places."""
        self._waiting_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.subscription = topics.client.subscribe(pattern, self._take, on_loss=self._missed)

    async def close(self) -> None:
        """End the subscription."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        await self.subscription.close()

    def _take(self, message: iris.Message) -> None:
        size = len(message.payload) + MESSAGE_BYTES
        if self._waiting and self._waiting_bytes + size > self._limit_bytes:
            self._lose(BRIDGE_FULL, 1)
            return
        self._waiting_bytes += size
        self._put(message)

    def _missed(self, loss: iris.Loss) -> None:
        self._lose(loss.cause, loss.count or 0)

    def _lose(self, cause: str, count: int) -> None:
        """Note a loss behind what waits, so that readers are told at its place."""
        if not self._waiting or not isinstance(self._waiting[-1], Counter):
            self._put(Counter())
        last = self._waiting[-1]
        assert isinstance(last, Counter)
        last[cause] += count

    def _put(self, item: iris.Message | Counter[str]) -> None:
        self._waiting.append(item)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._hand_out(), name=f"http-{self.pattern}")  # fmt: skip

    async def _hand_out(self) -> None:
        """Give what waits to all readers, some readers at a time."""
        try:
            while self._waiting:
                lost = self._waiting[0]
                if isinstance(lost, Counter):
                    self._waiting.popleft()
                    for reader in self.readers:
                        for cause, count in lost.items():
                            reader.lose(cause, count)
                    self._topics.lost[BRIDGE_FULL] += lost[BRIDGE_FULL] * len(self.readers)
                    continue
                data, count = self._next_events()
                for number, reader in enumerate(list(self.readers)):
                    if number % READERS_AT_ONCE == READERS_AT_ONCE - 1:
                        await asyncio.sleep(0)
                    self._topics.lost[SLOW_READER] += reader.offer(data, count)
                    self._topics.events += count
                await asyncio.sleep(0)
        finally:
            self._task = None

    def _next_events(self) -> tuple[bytes, int]:
        """Return the next messages as events, and their number: up to the next loss, and about `CHUNK_BYTES`."""
        parts: list[bytes] = []
        size = 0
        while self._waiting and size < CHUNK_BYTES:
            message = self._waiting[0]
            if isinstance(message, Counter):
                break
            self._waiting.popleft()
            self._waiting_bytes -= len(message.payload) + MESSAGE_BYTES
            parts.append(event(as_document(message)))
            size += len(parts[-1])
        return b"".join(parts), len(parts)


class Topics:
    """All event streams of topics."""

    def __init__(self, client: iris.Client, config: HttpConfig) -> None:
        self.client = client
        self.events = 0
        """Events offered to readers."""
        self.lost: Counter[str] = Counter()
        """Events lost in the bridge: cause -> count."""
        self._config = config
        self._feeds: dict[str, Feed] = {}
        self._places = Share(config.max_readers, "event streams", self.lost)
        self._filters = Share(config.max_filters, "filters", self.lost)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def readers(self) -> int:
        """Number of event streams."""
        return self._places.total

    @contextlib.asynccontextmanager
    async def reading(self, pattern: str, user: str) -> AsyncIterator[Reader]:
        """Read a filter for a user: the block is entered when the relays know its subscription.

        Raises:
            Problem: too many readers or filters, or too many of this user.
            IrisError: as `Client.subscribe`.
        """
        with self._places.place(user):
            async with self._reading(pattern, user) as reader:
                yield reader

    @contextlib.asynccontextmanager
    async def _reading(self, pattern: str, user: str) -> AsyncIterator[Reader]:
        feed = self._feeds.get(pattern)
        if feed is None:
            self._filters.check(user)
            feed = self._feeds[pattern] = Feed(self, pattern, self._config, user)
            self._filters.take(user)
        reader = Reader(self._config.reader_bytes)
        feed.readers[reader] = None
        feed.users[user] += 1
        try:
            await feed.subscription.ready()
            yield reader
        finally:
            del feed.readers[reader]
            feed.users[user] -= 1
            if not feed.users[user]:
                del feed.users[user]
                if user == feed.user and feed.users:  # another one has it from now on
                    self._filters.give(user)
                    feed.user = next(iter(feed.users))
                    self._filters.take(feed.user)
            if not feed.readers and self._feeds.get(pattern) is feed:
                del self._feeds[pattern]
                self._filters.give(feed.user)
                closing = asyncio.get_running_loop().create_task(feed.close(), name="http-close")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def end(self) -> None:
        """End all event streams."""
        for feed in self._feeds.values():
            for reader in feed.readers:
                reader.end()

    async def closed(self) -> None:
        """Wait until subscriptions without readers have ended."""
        await asyncio.gather(*self._closing, return_exceptions=True)
