"""A service: handlers, added with decorators, for the messages of one cluster."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar

from iris.config import Limits
from iris.core.credit import WhenFull
from iris.errors import ConfigError, InvalidName
from iris.handlers import Handler
from iris.wire.frames import Serving
from iris.wire.kinds import Kind
from iris.wire.names import check_cluster, check_filter, check_group, split_site

F = TypeVar("F", bound=Callable[..., Any])
Lifespan = Callable[[Any], AbstractAsyncContextManager[object]]
"""Function of the client that returns the context manager of a service's lifespan."""


class Topic(NamedTuple):
    """A handler of publications, and how it is subscribed."""

    pattern: str
    group: str
    handler: Handler
    concurrency: int
    when_full: WhenFull


class Service:
    """The handlers of a member of the cluster `name`.

    Serve it with `Client.serve`, or with `iris run module:service`.

        service = iris.Service("thumbnails")

        @service.on_request
        async def shrink(photo: bytes) -> bytes: ...

    The annotation of a handler's parameter chooses what it receives:

    * `iris.Message` or `iris.Request`: the whole message
    * `iris.Client`: the client that serves it
    * the class of an object that `lifespan` yields: this object
    * bytes or str: the raw payload
    * another type: the payload decoded into that type
    * no annotation: the bytes or the object that was sent

    A handler may have several parameters, one of them for the payload. They are resolved when the service is served:
    `Client.serve` raises ConfigError if nothing fits a parameter.

    A coroutine function runs at most `limits.concurrency` times at once. A plain function is called directly in the
    event loop, so it must not block.

    `lifespan` is called with the client and returns an async context manager. It is entered before the service joins,
    and left after the service has left and finished what it accepted; it stays entered through reconnects. Handlers
    receive what it yields, an object or a tuple of objects, by the annotation of a parameter.

    Raises:
        InvalidName: the name is not allowed.
        ConfigError: `lifespan` is an async generator function.
    """

    def __init__(
        self, name: str, *, limits: Limits | None = None, lifespan: Lifespan | None = None
    ) -> None:
        self.name = check_cluster(name)
        if split_site(name)[0]:
            raise InvalidName(
                f"{name!r} names a site, but a service always serves in the site of its relay; leave the site out"
            )
        self.limits = limits or Limits()
        if inspect.isasyncgenfunction(lifespan):
            raise ConfigError(
                f"the lifespan of service {name!r} must return an async context manager; "
                f"decorate it with @contextlib.asynccontextmanager"
            )
        self.lifespan = lifespan
        self.handlers: dict[Kind, Handler] = {}
        self.topics: list[Topic] = []
        """Handlers of publications."""
        self.gap_handler: Handler | None = None

    def on_request(self, function: F) -> F:
        """Decorator: handle requests with this function. Its return value is the reply.

        None is sent as an empty reply. If the function raises, the caller gets a RemoteError with the text of the
        exception; if it raises an `iris.Refusal`, with its code and details.
        """
        return self._add(Kind.REQUEST, function)

    def on_push(self, function: F) -> F:
        """Decorator: handle pushes with this function."""
        return self._add(Kind.PUSH, function)

    def on_survey(self, function: F) -> F:
        """Decorator: handle surveys with this function. Its return value is the answer, as with `on_request`."""
        return self._add(Kind.SURVEY, function)

    def on_broadcast(self, function: F) -> F:
        """Decorator: handle broadcasts with this function.

        The broadcasts of one sender are handled in their order.
        """
        return self._add(Kind.BROADCAST, function)

    def on_tunnel(self, function: F) -> F:
        """Decorator: handle tunnels with this coroutine function, which takes an `iris.Tunnel`.

        The tunnel is closed when the function returns, and broken on both sides if it raises.
        """
        if not asyncio.iscoroutinefunction(function):
            raise ConfigError(
                f"the tunnel handler of {self.name} must be a coroutine function; define it with `async def`"
            )
        return self._add(Kind.TUNNEL_OPEN, function)

    def on_publish(
        self, pattern: str, *, group: str = "", concurrency: int = 1, when_full: WhenFull = "drop"
    ) -> Callable[[F], F]:
        """Decorator: handle publications to topics that match the filter `pattern`.

        With a `group`, each bundle goes to one member of the group. `when_full` is as in `Subscription`.

        A coroutine function runs at most `concurrency` times at once, and once at a time for each publisher and
        topic, so that their messages are handled in order. (`limits.concurrency` does not apply to
        publications.)
        """
        check_filter(pattern)
        if group:
            check_group(group)

        def register(function: F) -> F:
            self.topics.append(Topic(pattern, group, Handler(function), concurrency, when_full))
            return function

        return register

    def on_gap(self, function: F) -> F:
        """Decorator: call this function with each loss (`iris.Lost`) of broadcasts and publications."""
        self.gap_handler = Handler(function)
        return function

    def _add(self, kind: Kind, function: F) -> F:
        if kind in self.handlers:
            name = "tunnel" if kind == Kind.TUNNEL_OPEN else kind.name.lower()
            raise ConfigError(
                f"service {self.name} already has a handler for this kind ({name}); it can have only one"
            )
        self.handlers[kind] = Handler(function)
        return function

    @property
    def kinds(self) -> dict[int, Serving]:
        """Kinds that the service serves, with their limits, as JOIN carries them."""
        limits = self.limits
        return {
            int(kind): Serving(
                limits.tunnels if kind == Kind.TUNNEL_OPEN else limits.concurrency,
                limits.queue_bytes,
            )
            for kind in self.handlers
        }
