"""The life of a service while it is served.

Its lifespan is entered, it joins, and in the end it leaves, finishes what it accepted, and leaves the lifespan.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

from iris.deadlines import within
from iris.loop_watch import watching
from iris.middleware import MiddlewareHandler
from iris.parameters import Provided
from iris.runtime import Runtime
from iris.service import Service
from iris.serving import ServiceBinding
from iris.subscription import Subscription
from iris.tracer import Tracer


@contextlib.asynccontextmanager
async def serving(
    runtime: Runtime, service: Service, client: object, tracer: Tracer | None = None
) -> AsyncIterator[ServiceBinding]:
    """Serve `service` while the block runs; see `Client.serve`. Handlers can ask for the `client`."""
    runtime.attached()
    async with _entered(runtime, service, client) as provided:
        provided.tracer = tracer
        try:
            with watching(service.name, service.in_loop):
                async with _joined(runtime, service, provided) as binding:
                    yield binding
        finally:
            for close in provided.on_close:
                close()


@contextlib.asynccontextmanager
async def _entered(runtime: Runtime, service: Service, client: object) -> AsyncIterator[Provided]:
    """Enter the lifespan of the service, and leave it with at most `drain_timeout_s` for its exit.

    An exception of the block is not passed to the lifespan, so what follows its `yield` always runs.
    """
    wrap = None
    if service.middleware:
        wrap = partial(MiddlewareHandler, middleware=service.middleware)
    if service.lifespan is None:
        yield Provided(client, wrap=wrap)
        return
    lifespan = service.lifespan(client)
    value = await lifespan.__aenter__()
    try:
        yielded = value if type(value) is tuple else () if value is None else (value,)
        yield Provided(client, yielded, wrap)
    finally:
        bound_s = runtime.config.drain_timeout_s
        async with asyncio.timeout(bound_s) as bound:
            try:
                await lifespan.__aexit__(None, None, None)
            except asyncio.CancelledError as err:
                if not bound.expired():
                    raise
                text = f"the lifespan of service {service.name!r} did not end within {bound_s:g} s (drain_timeout_s)"
                raise TimeoutError(text) from err


@contextlib.asynccontextmanager
async def _joined(
    runtime: Runtime, service: Service, provided: Provided
) -> AsyncIterator[ServiceBinding]:
    attachment = runtime.attached()
    binding = ServiceBinding(runtime, service, provided)
    topics = [topic._replace(handler=topic.handler.resolved(provided)) for topic in service.topics]
    _, session = await runtime.in_use(service.name, runtime.config.connect_timeout_s)
    runtime.registry.services.append(binding)
    subscriptions: list[Subscription] = []
    subscribe: Callable[..., Subscription]
    subscribe = Subscription if provided.tracer is None else provided.tracer.subscription
    try:
        for topic in topics:
            subscriptions.append(
                subscribe(
                    runtime,
                    topic.pattern,
                    topic.handler.as_callback(),
                    topic.group,
                    on_loss=binding.on_loss,
                    concurrency=topic.concurrency,
                    when_full=topic.when_full,
                )
            )
        if service.handlers:
            joined = runtime.registry.join(session, binding)
            attachment.touch()
            await within(
                joined,
                runtime.config.connect_timeout_s,
                f"the relay did not register the service {service.name!r}",
            )
        for subscription in subscriptions:
            await subscription.registered()
        await runtime.settled()
        yield binding
    finally:
        # Everything is sent before the first await, so that a cancelled task leaves, too.
        leaving = binding.leave()
        for subscription in subscriptions:
            subscription.stop()
        try:
            closing = [subscription.close() for subscription in subscriptions]
            await asyncio.gather(*closing, leaving)
        finally:
            await binding.stop()
            runtime.registry.forget(binding)
