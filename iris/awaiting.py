"""What a handler returned besides a plain value: awaitables, which are awaited, and generators, which are mistakes.

A plain function around a coroutine function, such as a lambda or a decorated function, cannot be told from others
before it has returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

from iris.errors import ConfigError
from iris.parameters import code_of, name_of

_MAX_PLAIN: Final = 256
_plain: Final[set[type]] = {bytes, str, int, float, bool, dict, list, tuple, type(None)}
"""Types that are neither awaitables nor generators: those above, and at most `_MAX_PLAIN` that were looked at."""


def is_late(value: object) -> bool:
    """Return whether a handler that returned `value` has not done its work yet: it is an awaitable or a generator."""
    kind = type(value)
    if kind in _plain:
        return False
    if hasattr(kind, "__await__") or issubclass(kind, (GeneratorType, AsyncGeneratorType)):
        return True
    if len(_plain) < _MAX_PLAIN:
        _plain.add(kind)
    return False


async def finished(value: Any) -> Any:
    """Await what a handler returned, until it is a plain value, and return that.

    Raises TypeError for a generator, and what the awaitable raises.
    """
    while is_late(value):
        if not inspect.isawaitable(value):
            kind = "an async generator" if isinstance(value, AsyncGeneratorType) else "a generator"
            raise TypeError(
                f"the handler returned {kind}, whose body never runs; return a value or an awaitable"
            )
        value = await value
    return value


def drop(value: object) -> None:
    """Close an awaitable that nothing awaits, so that Python does not warn of it."""
    if isinstance(value, CoroutineType):
        value.close()


def check_function(function: Callable[..., Any]) -> None:
    """Raise ConfigError if a function cannot be a handler, because it is a generator function."""
    code = code_of(function)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise ConfigError(
            f"handler {name_of(function)!r} is a generator function, whose body would never run; "
            "use a plain function or a coroutine function, without `yield`"
        )


def check_callback(what: str, function: Callable[..., Any] | None) -> None:
    """Raise ConfigError if a callback that nothing awaits is a coroutine function or a generator function."""
    if function is None:
        return
    code = code_of(function)
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code) or inspect.isgeneratorfunction(code):  # fmt: skip
        raise ConfigError(
            f"{what} must be a plain function, because nothing awaits it, but {name_of(function)!r} is not; "
            "define it with `def`, and start a task in it to wait for something"
        )


def check_returned(value: object) -> None:
    """Raise TypeError if a callback returned an awaitable or a generator."""
    if is_late(value):
        drop(value)
        raise TypeError(
            f"the callback returned a {type(value).__name__}, which nothing awaits; start a task in it instead"
        )
