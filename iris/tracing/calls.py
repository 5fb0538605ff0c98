"""The calls of a client inside spans. Each takes the place of the client's own call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from opentelemetry.trace import Span

from iris.core.bundle import Headers
from iris.iterating import Iteration
from iris.request_many import Outcome
from iris.survey import Survey
from iris.tracing.context import Carried
from iris.tracing.spans import ACCEPTED, COUNT, FAILED, Sending, Spans, failed
from iris.tunnel import Tunnel


def trace_calls(client: Any, spans: Spans) -> None:
    """Replace the calls of a client that send."""
    client.request = _awaited(spans, client.request, "request", "cluster")
    client.push = _awaited(spans, client.push, "push", "cluster")
    client.broadcast = _awaited(spans, client.broadcast, "broadcast", "cluster")
    client.publish = _awaited(spans, client.publish, "publish", "topic")
    client.offer = _offered(spans, client.offer, "publish", "topic")
    client.offer_broadcast = _offered(spans, client.offer_broadcast, "broadcast", "cluster")
    client.open_tunnel = _awaited(spans, client.open_tunnel, "tunnel", "cluster")
    client.tunnel = _tunnel(spans, client.tunnel)
    client.request_many = _request_many(spans, client.request_many)
    client.survey = _survey(spans, client.survey)


def _awaited(
    spans: Spans, call: Callable[..., Awaitable[Any]], operation: str, parameter: str
) -> Any:
    """Return a coroutine function with a span for each call; `parameter` names its first one."""

    @functools.wraps(call)
    async def traced(*arguments: Any, headers: Headers | None = None, **options: Any) -> Any:
        if type(headers) is Carried:
            return await call(*arguments, headers=headers, **options)
        name = arguments[0] if arguments else options.get(parameter)
        span, carried = spans.send(operation, name, headers, options.get("method") or "")
        with Sending(span):
            return await call(*arguments, headers=carried, **options)

    return traced


def _offered(spans: Spans, call: Callable[..., bool], operation: str, parameter: str) -> Any:
    """Return a plain function with a span for each call."""

    @functools.wraps(call)
    def traced(*arguments: Any, headers: Headers | None = None, **options: Any) -> bool:
        if type(headers) is Carried:
            return call(*arguments, headers=headers, **options)
        name = arguments[0] if arguments else options.get(parameter)
        span, carried = spans.send(operation, name, headers)
        with Sending(span):
            accepted = call(*arguments, headers=carried, **options)
            if not accepted:
                span.set_attribute(ACCEPTED, False)
            return accepted

    return traced


def _tunnel(
    spans: Spans, call: Callable[..., contextlib.AbstractAsyncContextManager[Tunnel]]
) -> Any:
    @functools.wraps(call)
    @contextlib.asynccontextmanager
    async def traced(
        *arguments: Any, headers: Headers | None = None, **options: Any
    ) -> AsyncIterator[Tunnel]:
        name = arguments[0] if arguments else options.get("cluster")
        span, carried = spans.send("tunnel", name, headers)
        with Sending(span):
            async with call(*arguments, headers=carried, **options) as tunnel:
                yield tunnel

    return traced


def _request_many(spans: Spans, call: Callable[..., Iteration[Outcome[Any]]]) -> Any:
    """Return `request_many` with one span, which begins with the iteration, as the sending does."""

    @functools.wraps(call)
    def traced(
        *arguments: Any, headers: Headers | None = None, **options: Any
    ) -> Iteration[Outcome[Any]]:
        name = arguments[0] if arguments else options.get("cluster")
        carried = Carried()
        outcomes = call(*arguments, headers=carried, **options)
        begin = functools.partial(_begin, spans, "request", name, headers, carried, options)
        return _Outcomes(outcomes, begin)

    return traced


class _Outcomes(Iteration[Outcome[Any]]):
    """The outcomes of `request_many`, inside one span."""

    def __init__(self, outcomes: Iteration[Outcome[Any]], begin: Callable[[], Span]) -> None:
        self._outcomes = outcomes
        self._begin = begin
        self._span: Span | None = None
        self._count = self._failures = 0

    @property
    def _of(self) -> str:
        return self._outcomes._of

    async def __anext__(self) -> Outcome[Any]:
        self._begun()
        if self._span is None:
            self._span = self._begin()
        try:
            outcome = await anext(self._outcomes)
        except asyncio.CancelledError:
            raise
        except BaseException as err:
            if not isinstance(err, StopAsyncIteration):
                failed(self._span, err)
            self._end()
            raise
        self._count += 1
        self._failures += outcome.error is not None
        return outcome

    def _release(self) -> None:
        self._outcomes._end()
        if self._span is not None:
            self._span.set_attributes({COUNT: self._count, FAILED: self._failures})
            self._span.end()


def _survey(spans: Spans, call: Callable[..., Survey[Any]]) -> Any:
    """Return `survey` with one span, which begins with the iteration, as the survey does."""

    @functools.wraps(call)
    def traced(*arguments: Any, headers: Headers | None = None, **options: Any) -> Survey[Any]:
        name = arguments[0] if arguments else options.get("cluster")
        carried = Carried(headers or {})
        survey = call(*arguments, headers=carried, **options)
        start = survey._start

        async def traced_start(this: Survey[Any]) -> Callable[[], None]:
            span = _begin(spans, "survey", name, headers, carried, options)
            try:
                forget = await start(this)
            except BaseException as err:
                failed(span, err)
                span.end()
                raise

            def end() -> None:
                forget()
                if survey._error is not None:
                    failed(span, survey._error)
                span.set_attributes({COUNT: len(survey.answered), FAILED: len(survey.failed)})
                span.end()

            return end

        survey._start = traced_start
        return survey

    return traced


def _begin(
    spans: Spans, operation: str, name: object, headers: Headers | None, carried: Carried, options: dict[str, Any]
) -> Span:  # fmt: skip
    """Start the span of a call that has taken `carried` as its headers, and fill those in."""
    span, filled = spans.send(operation, name, headers, options.get("method") or "")
    carried.update(filled or {})
    return span
