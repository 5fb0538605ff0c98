"""The life of a service while it is served: it joins, and in the end it leaves and finishes what it accepted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from iris.deadlines import within
from iris.parameters import Provided
from iris.runtime import Runtime
from iris.service import Service
from iris.serving import ServiceBinding
from iris.subscription import Subscription


@contextlib.asynccontextmanager
async def serving(
    runtime: Runtime, service: Service, client: object
) -> AsyncIterator[ServiceBinding]:
    """Serve `service` while the block runs; see `Client.serve`. Handlers can ask for the `client`."""
    attachment = runtime.attached()
    provided = Provided([client])
    binding = ServiceBinding(runtime, service, provided)
    topics = [topic._replace(handler=topic.handler.resolved(provided)) for topic in service.topics]
    _, session = await runtime.ready(service.name, runtime.config.connect_timeout_s)
    runtime.registry.services.append(binding)
    subscriptions: list[Subscription] = []
    try:
        for topic in topics:
            subscriptions.append(
                Subscription(
                    runtime,
                    topic.pattern,
                    topic.handler.as_callback(),
                    topic.group,
                    on_gap=binding.on_gap,
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
