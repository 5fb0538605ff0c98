"""A service: decorated handlers that join a cluster and run within count and byte limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from iris.config import Limits
from iris.core.credit import WhenFull
from iris.core.interfaces import Lost
from iris.errors import ConfigError, InvalidName
from iris.handlers import Handler
from iris.wire.frames import Serving
from iris.wire.kinds import Kind
from iris.wire.names import check_cluster, check_filter, check_group, split_site

F = TypeVar("F", bound=Callable[..., Any])


class Service:
    """What a member of the cluster `name` does. Serve it with `Client.serve`, or `iris run module:service`.

    A handler takes one argument; its annotation chooses what it gets: `iris.Message` or `iris.Request` the whole message,
    bytes or str the raw payload, another type the payload decoded into it, none the bytes or the object that was sent. It
    may be a plain function, called at once on the event loop, or a coroutine function, run `limits.concurrency` at a time.
    """

    def __init__(self, name: str, *, limits: Limits | None = None) -> None:
        self.name = check_cluster(name)
        if split_site(name)[0]:
            raise InvalidName(f"{name!r} names a site; a service serves in its own")
        self.limits = limits or Limits()
        self.handlers: dict[Kind, Handler] = {}
        self.topics: list[tuple[str, str, Handler, int, WhenFull]] = []
        """Filter, group, handler, and how often it runs at once."""
        self.gap_handler: Callable[[Lost], object] | None = None

    def on_request(self, function: F) -> F:
        """Answer requests with what the function returns; None is an empty reply, an exception a RemoteError."""
        return self._take(Kind.REQUEST, function)

    def on_push(self, function: F) -> F:
        """Handle pushes."""
        return self._take(Kind.PUSH, function)

    def on_survey(self, function: F) -> F:
        """Answer surveys, as `on_request`."""
        return self._take(Kind.SURVEY, function)

    def on_broadcast(self, function: F) -> F:
        """Handle broadcasts, each sender's in its order."""
        return self._take(Kind.BROADCAST, function)

    def on_tunnel(self, function: F) -> F:
        """Handle tunnels: a coroutine function that gets an `iris.Tunnel`; when it returns, the tunnel is closed."""
        if not asyncio.iscoroutinefunction(function):
            raise ConfigError("a tunnel handler is a coroutine function")
        return self._take(Kind.TUNNEL_OPEN, function)

    def on_publish(
        self, pattern: str, *, group: str = "", concurrency: int = 1, when_full: WhenFull = "drop"
    ) -> Callable[[F], F]:
        """Handle what is published to topics that match `pattern`; with a `group`, one of its members gets each bundle.

        `when_full` as in `Subscription`.

        A coroutine function runs `concurrency` times at once, for as many pairs of publisher and topic: what one publisher sends to
        one topic is handled in its order. (`limits.concurrency` counts requests, pushes and surveys.)
        """
        check_filter(pattern)
        if group:
            check_group(group)

        def register(function: F) -> F:
            self.topics.append((pattern, group, Handler(function), concurrency, when_full))
            return function

        return register

    def on_gap(self, function: Callable[[Lost], object]) -> Callable[[Lost], object]:
        """Hear of broadcasts and publications that were lost on the way."""
        self.gap_handler = function
        return function

    def _take(self, kind: Kind, function: F) -> F:
        if kind in self.handlers:
            raise ConfigError(f"{self.name} has a handler for that already")
        self.handlers[kind] = Handler(function)
        return function

    @property
    def kinds(self) -> dict[int, Serving]:
        """What a JOIN says."""
        limits = self.limits
        return {
            int(kind): Serving(
                limits.tunnels if kind == Kind.TUNNEL_OPEN else limits.concurrency,
                limits.queue_bytes,
            )
            for kind in self.handlers
        }
