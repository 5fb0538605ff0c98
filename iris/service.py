"""A service: handlers, added with decorators, for the messages of one cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, Literal, NamedTuple, TypeVar, overload

from msgspec import UNSET, UnsetType

from iris.awaiting import check_callback, check_function
from iris.config import Limits
from iris.core.credit import WhenQueueFull
from iris.errors import ConfigError, InvalidName
from iris.handlers import Handler
from iris.methods import Methods, check_served
from iris.middleware import Middleware, checked
from iris.threads import ThreadHandler
from iris.wire.frames import Serving
from iris.wire.kinds import Kind
from iris.wire.names import check_cluster, check_filter, check_group, optional, split_site

F = TypeVar("F", bound=Callable[Concatenate[Any, ...], Any])
"""A handler: it has at least one parameter."""
A = TypeVar("A", bound=Callable[Concatenate[Any, ...], Coroutine[Any, Any, Any]])
"""A handler that is a coroutine function."""
OnCancel = Literal["finish", "cancel"]
"""What happens to a handler whose caller has left."""
Lifespan = Callable[[Any], AbstractAsyncContextManager[object]]
"""Function of the client that returns the context manager of a service's lifespan."""


class Topic(NamedTuple):
    """A handler of publications, and how it is subscribed."""

    pattern: str
    group: str
    handler: Handler
    concurrency: int
    when_full: WhenQueueFull


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

    A service may have several handlers for requests, pushes and surveys: `@service.on_request("place")` handles the
    requests that name the method "place".

    A coroutine function runs at most `limits.concurrency` times at once. A plain function is called directly in the
    event loop, so it must not block, unless it is registered with `threads`. If it returns an awaitable, as a lambda
    around a coroutine function does, that is awaited; from then on it runs as a coroutine function. Generator functions
    are refused.

    `lifespan` is called with the client and returns an async context manager. It is entered before the service joins,
    and left after the service has left and finished what it accepted; it stays entered through reconnects. Handlers
    receive what it yields, an object or a tuple of objects, by the annotation of a parameter.

    `middleware` runs around all handlers of messages, the first one outermost: coroutine functions
    `async def middleware(request: iris.Request, call_next)` that return what `await call_next(request)` returned, or
    another reply, or raise. With middleware all handlers run within `limits.concurrency`.

    `version` and `description` are shown to those who ask with `Client.describe`.

    Raises:
        InvalidName: the name is not allowed.
        ConfigError: `lifespan` is an async generator function, `middleware` holds no coroutine functions, or `version`
            or `description` is not text.
    """

    def __init__(
        self, name: str, *, limits: Limits | None = None, lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (), version: str = "", description: str = "",
    ) -> None:  # fmt: skip
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
        self.middleware = checked(middleware)
        for what, text in (("version", version), ("description", description)):
            if not isinstance(text, str):
                raise ConfigError(f"{what} must be a str, not {type(text).__name__}")
        self.version = version
        self.description = description
        self.handlers: dict[Kind, Handler] = {}
        self.topics: list[Topic] = []
        """Handlers of publications."""
        self.loss_handler: Handler | None = None

    @overload
    def on_request(self, function: F, /) -> F: ...
    @overload
    def on_request(
        self, method: str = "", /, *, on_cancel: Literal["cancel"]
    ) -> Callable[[A], A]: ...
    @overload
    def on_request(
        self, method: str = "", /, *, threads: int = 0, on_cancel: OnCancel = "finish"
    ) -> Callable[[F], F]: ...
    def on_request(
        self, function: Any = None, /, *, threads: int = 0, on_cancel: OnCancel = "finish"
    ) -> Any:
        """Decorator: handle requests with this function. Its return value is the reply.

        With the name of a method, `@service.on_request("place")`, it handles the requests that name this method.

        What the function returns arrives as it is, also None. If it raises, the caller gets a RemoteError with the text
        of the exception. The RemoteError of an `iris.Refusal` has its code and details, too.

        With `threads=8` a plain function may block: it runs in up to 8 threads of its own.

        A handler runs to its end even if its caller has left. With `on_cancel="cancel"` a coroutine function is
        cancelled when its caller cancels the request, reaches its timeout or is lost.
        """
        return self._on(Kind.REQUEST, function, threads, on_cancel)

    @overload
    def on_push(self, function: F, /) -> F: ...
    @overload
    def on_push(self, /, *, threads: int = 0) -> Callable[[F], F]: ...
    @overload
    def on_push(self, method: str, /, *, threads: int = 0) -> Callable[[F], F]: ...
    def on_push(self, function: Any = None, /, *, threads: int = 0) -> Any:
        """Decorator: handle pushes with this function; with the name of a method, only those that name it.

        `threads` is as with `on_request`.
        """
        return self._on(Kind.PUSH, function, threads)

    @overload
    def on_survey(self, function: F, /) -> F: ...
    @overload
    def on_survey(
        self, method: str = "", /, *, on_cancel: Literal["cancel"]
    ) -> Callable[[A], A]: ...
    @overload
    def on_survey(
        self, method: str = "", /, *, threads: int = 0, on_cancel: OnCancel = "finish"
    ) -> Callable[[F], F]: ...
    def on_survey(
        self, function: Any = None, /, *, threads: int = 0, on_cancel: OnCancel = "finish"
    ) -> Any:
        """Decorator: handle surveys with this function; with the name of a method, only those that name it.

        Its return value is the answer, as with `on_request`.

        `threads` and `on_cancel` are as with `on_request`.
        """
        return self._on(Kind.SURVEY, function, threads, on_cancel)

    @overload
    def on_broadcast(self, function: F, /) -> F: ...
    @overload
    def on_broadcast(self, /, *, threads: int = 0) -> Callable[[F], F]: ...
    def on_broadcast(self, function: Any = None, /, *, threads: int = 0) -> Any:
        """Decorator: handle broadcasts with this function.

        The broadcasts of one sender are handled in their order, so `threads` can be 1 at most.
        """
        if isinstance(function, str):
            raise ConfigError(
                f"broadcasts name no method, so on_broadcast cannot have the name {function!r}"
            )
        if threads > 1:
            raise ConfigError(
                f"threads of a broadcast handler must be 1, not {threads}: broadcasts are handled one after the other"
            )
        return self._on(Kind.BROADCAST, function, threads)

    def on_tunnel(self, function: A) -> A:
        """Decorator: handle tunnels with this coroutine function, which takes an `iris.Tunnel`.

        The tunnel is closed when the function returns, and broken on both sides if it raises.
        """
        handler = Handler(function)
        if not handler.is_coroutine:
            raise ConfigError(
                f"the tunnel handler of {self.name} must be a coroutine function; define it with `async def`"
            )
        self._add(Kind.TUNNEL_OPEN, handler)
        return function

    def on_publish(
        self,
        pattern: str,
        *,
        group: str | None = None,
        concurrency: int = 1,
        when_full: WhenQueueFull = "drop-new",
        threads: int = 0,
    ) -> Callable[[F], F]:
        """Decorator: handle publications to topics that match the filter `pattern`.

        With a `group`, each bundle goes to one subscriber of the group. `when_full` is as in `Subscription`.

        A coroutine function runs at most `concurrency` times at once, and once at a time for each publisher and
        topic, so that their messages are handled in order. (`limits.concurrency` does not apply to
        publications.) With `threads=8` a plain function may block: it runs in up to 8 threads of its own, and
        `concurrency` has no effect.
        """
        check_filter(pattern)
        shared = optional(group, check_group)

        def register(function: F) -> F:
            handler = _handler(function, threads)
            handler.kind_name = "publish"
            self.topics.append(Topic(pattern, shared, handler, threads or concurrency, when_full))
            return function

        return register

    def on_loss(self, function: F) -> F:
        """Decorator: call this plain function with each loss (`iris.Loss`) of broadcasts and publications."""
        check_function(function)
        check_callback("on_loss", function)
        self.loss_handler = Handler(function)
        return function

    def _on(
        self, kind: Kind, function: F | str | None, threads: int, on_cancel: OnCancel = "finish"
    ) -> Any:
        if on_cancel not in ("finish", "cancel"):
            raise ConfigError(f"on_cancel must be 'finish' or 'cancel', not {on_cancel!r}")
        if function is not None and not isinstance(function, str):
            self._add(kind, Handler(function))
            return function
        method = "" if function is None else check_served(function)

        def register(function: F) -> F:
            handler = _handler(function, threads)
            handler.cancels = on_cancel == "cancel"
            if handler.cancels and not handler.is_coroutine:
                raise ConfigError(
                    f"handler {handler.name!r} has on_cancel='cancel', but only a coroutine function can be cancelled; "
                    f"define it with `async def`, without threads"
                )
            self._add(kind, handler, method)
            return function

        return register

    def _add(self, kind: Kind, handler: Handler, method: str = "") -> None:
        handler.kind_name = kind.name.lower()
        present = self.handlers.get(kind)
        if method and not isinstance(present, Methods):
            present = Methods(self.name, kind, {"": present} if present is not None else {})
        if isinstance(present, Methods) and (method or "" not in present.handlers):
            handler = present.with_method(method, handler)
        elif present is not None:
            name = "tunnel" if kind == Kind.TUNNEL_OPEN else kind.name.lower()
            methods = kind in (Kind.REQUEST, Kind.PUSH, Kind.SURVEY)
            more = f'; give each a method: @service.on_{name}("name") (docs/methods.md)'
            raise ConfigError(
                f"service {self.name} already has a handler for this kind ({name}); it can have only one{more * methods}"
            )
        self.handlers[kind] = handler

    @property
    def methods(self) -> list[str]:
        """Names of the methods of all kinds, sorted."""
        found = [h.handlers for h in self.handlers.values() if isinstance(h, Methods)]
        return sorted({name for handlers in found for name in handlers if name})

    @property
    def in_loop(self) -> list[Callable[..., Any]]:
        """Functions of the service that are called in the event loop."""
        handlers = [*self.handlers.values(), *(topic.handler for topic in self.topics)]
        if self.loss_handler is not None:
            handlers.append(self.loss_handler)
        return [
            *self.middleware,
            *(function for handler in handlers for function in handler.in_loop),
        ]

    @property
    def kinds(self) -> dict[int, Serving]:
        """Kinds that the service serves, with their limits, as JOIN carries them to a relay of this version."""
        limits = self.limits
        return {
            int(kind): Serving(
                limits.tunnels if kind == Kind.TUNNEL_OPEN else _at_once(handler, limits),
                limits.queue_bytes,
                handler.cancels,
            )
            for kind, handler in self.handlers.items()
        }

    @property
    def method_count(self) -> int | UnsetType:
        """The number of methods as JOIN carries it; UNSET if there are none."""
        return min(len(self.methods), 0xFFFF) or UNSET


def _handler(function: Callable[..., Any], threads: int) -> Handler:
    return ThreadHandler(function, threads) if threads else Handler(function)


def _at_once(handler: Handler, limits: Limits) -> int:
    """Return how many messages a handler can run at once."""
    if isinstance(handler, Methods):
        return max(_at_once(each, limits) for each in handler.handlers.values())
    if isinstance(handler, ThreadHandler):
        return min(handler.threads, limits.concurrency)
    return limits.concurrency
