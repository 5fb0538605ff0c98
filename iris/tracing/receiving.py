"""What programs iterate over, with a span for each message: subscriptions, and consumers of streams; and appends."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from iris.core.bundle import Headers
from iris.core.message import Message
from iris.runtime import Runtime
from iris.streams import Streams
from iris.streams.consuming import Consumer
from iris.streams.records import StreamMessage
from iris.subscription import Subscription
from iris.tracing.handlers import traced_callback
from iris.tracing.spans import COUNT, GROUP, KIND, OFFSET, SUBSCRIPTION, Sending, Spans


class TracedSubscription(Subscription):
    """A subscription with a span for each message that its handler or its iteration receives."""

    def __init__(
        self, spans: Spans, runtime: Runtime, pattern: str, handler: Callable[[Message], object] | None = None, group: str = "",
        *arguments: Any, **options: Any,
    ) -> None:  # fmt: skip
        if handler is not None:
            handler = traced_callback(handler, spans, pattern, group)
        self._spans = spans
        super().__init__(runtime, pattern, handler, group, *arguments, **options)

    async def __anext__(self) -> Message:
        message = await super().__anext__()
        attributes = {KIND: "publish", SUBSCRIPTION: self.filter}
        if self.group:
            attributes[GROUP] = self.group
        self._spans.receive(message.name, (message,), attributes)
        return message


class _Ready(deque[StreamMessage]):
    """Messages that a consumer holds for its program. Each gets a span when it is taken out."""

    def __init__(self, received: Callable[[Sequence[StreamMessage]], None]) -> None:
        super().__init__()
        self._received = received

    def popleft(self) -> StreamMessage:
        message = super().popleft()
        self._received((message,))
        return message


class TracedConsumer(Consumer):
    """A consumer with a span for each message, or for each batch, that the program gets."""

    def __init__(self, spans: Spans, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spans = spans
        self._ready = _Ready(self._received)

    async def batch(self) -> list[StreamMessage]:
        messages = await super().batch()
        self._received(messages, batch=True)
        return messages

    def _received(self, messages: Sequence[StreamMessage], *, batch: bool = False) -> None:
        attributes = {KIND: "consume", GROUP: self.name, OFFSET: messages[0].offset}
        self._spans.receive(self.stream, messages, attributes, batch=batch)


class TracedStreams(Streams):
    """Streams whose appends make spans, and whose consumers do."""

    def __init__(self, spans: Spans, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._spans = spans
        self._make_consumer = functools.partial(TracedConsumer, spans)

    async def append(
        self, name: str, message: object, *, headers: Headers | None = None, **options: Any
    ) -> int:
        span, carried = self._spans.send("append", name, headers)
        with Sending(span):
            offset = await super().append(name, message, headers=carried, **options)
            span.set_attribute(OFFSET, offset)
            return offset

    async def append_many(
        self, name: str, messages: Sequence[object], *, headers: Headers | None = None, **options: Any
    ) -> list[int]:  # fmt: skip
        span, carried = self._spans.send("append", name, headers)
        span.set_attribute(COUNT, len(messages))
        with Sending(span):
            return await super().append_many(name, messages, headers=carried, **options)
