"""The parameters of a handler, and the objects that it can ask for by annotation."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from iris.errors import ConfigError

MISSING: Final[Any] = object()
"""What `Provided.find` returns if no object fits."""


class UnreadableAnnotation(ConfigError):
    """An annotation of a handler cannot be evaluated."""


class Parameter(NamedTuple):
    """A parameter of a handler that it needs a value for."""

    name: str
    hint: Any = None
    """Its evaluated annotation; None if it has none, or Any."""
    keyword_only: bool = False

    @property
    def type(self) -> type | None:
        """The class to look for among the provided objects; None if a payload alone can have this annotation."""
        found = typing.get_origin(self.hint) or self.hint
        if not isinstance(found, type) or found.__module__ == "builtins":
            return None
        return found

    def __str__(self) -> str:
        shown = getattr(self.hint, "__name__", self.hint)
        return f"'{self.name}'" if self.hint is None else f"'{self.name}: {shown}'"


class Provided:
    """Objects that the handlers of one service can ask for: the client, and what lifespan yielded."""

    def __init__(
        self, client: object, objects: Iterable[object] = (), wrap: Callable[[Any], Any] | None = None
    ) -> None:  # fmt: skip
        """Raises ConfigError if an object cannot be told from a payload by its type."""
        self.client = client
        self.wrap = wrap
        """Puts middleware around a handler; None if there is none."""
        self.tracer: Any = None
        """The `iris.tracer.Tracer` that makes spans for the handlers, or None."""
        self.on_close: list[Callable[[], None]] = []
        """Called when the service is no longer served."""
        self._objects = [client, *objects]
        for each in self._objects:
            if type(each).__module__ == "builtins":
                raise ConfigError(
                    f"cannot provide an object of type {type(each).__name__} to handlers, because a payload may have "
                    f"this type, too; put it into an object of a class of yours"
                )

    def find(self, wanted: type | None) -> Any:
        """Return the object of the class `wanted`, or of a subclass; MISSING if there is none.

        Raises ConfigError if there are several.
        """
        if wanted is None:
            return MISSING
        found = [each for each in self._objects if type(each) is wanted]
        found = found or [each for each in self._objects if wanted in type(each).__mro__]
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} objects of type {wanted.__name__} are available; give them classes of their own"
            )
        return found[0] if found else MISSING

    def __str__(self) -> str:
        return ", ".join(type(each).__name__ for each in self._objects)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a handler for errors and the log."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or an object with `__call__`: it has the annotations and the `async`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters without a default, or the first one if all have a default.

    Raises:
        ConfigError: there is no parameter, or several can receive nothing but the payload.
        UnreadableAnnotation: an annotation cannot be evaluated.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [Parameter("message")]  # a builtin without a signature is called with the payload
    name = name_of(function)
    if not parameters:
        raise ConfigError(f"handler {name!r} must take at least one argument, the message")
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    try:
        hints = typing.get_type_hints(code_of(function))
    except Exception as err:  # whatever the user's annotations raise when they are evaluated
        raise UnreadableAnnotation(
            f"cannot evaluate the annotation of handler {name!r}: {err}"
        ) from err
    found = []
    for parameter in needed or parameters[:1]:
        hint = hints.get(parameter.name)
        hint = None if hint is Any else hint
        found.append(Parameter(parameter.name, hint, parameter.kind is parameter.KEYWORD_ONLY))
    payloads = [parameter for parameter in found if parameter.type is None]
    if len(payloads) > 1:
        raise ConfigError(
            f"handler {name!r} has {len(payloads)} parameters for the payload ({', '.join(map(str, payloads))}), but "
            f"only one can receive it; annotate the others with what they receive, such as iris.Client"
        )
    return found
