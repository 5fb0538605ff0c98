"""What a ticket, or the issuer of tickets, allows: names by verb.

    verb         allows                                             names are
    request, push, survey, broadcast, tunnel, members               filters of clusters
    serve        to serve a cluster                                 the same
    publish, subscribe                                              filters of topics
    read         to read a stream                                   filters of streams
    consume      to take messages from a stream as a consumer       the same
    append       to append to a stream                              the same

A name that no entry of its verb matches is not allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Self

from iris.errors import ConfigError, InvalidName
from iris.wire.names import check_filter, covers, did_you_mean, matches

VERBS: Final = (
    "request", "push", "survey", "broadcast", "tunnel", "members", "serve", "publish", "subscribe", "read", "consume", "append",
)  # fmt: skip
MAX_PATTERNS: Final = 256
"""Most filters in one scope."""


class Scope:
    """Filters by verb. Immutable."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        """Raises ConfigError: a verb is unknown, a filter is outside the grammar, or there are too many."""
        for verb, filters in patterns.items():
            if verb not in VERBS:
                raise ConfigError(
                    f"allow.{verb[:40]}: there is no such verb{did_you_mean(verb, VERBS)}; the verbs are {', '.join(VERBS)}"
                )
            for each in filters:
                try:
                    check_filter(each)
                except InvalidName as error:
                    raise ConfigError(f"allow.{verb}: {error}") from error
        if sum(map(len, patterns.values())) > MAX_PATTERNS:
            raise ConfigError(f"allow: there are over {MAX_PATTERNS} names; use filters")
        self._patterns: Final = {verb: tuple(filters) for verb, filters in patterns.items()}

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the scope written as a map of lists, as JSON and TOML have it. Raises ConfigError."""
        if not isinstance(value, dict) or not value:
            raise ConfigError('allow: say what is allowed, such as allow.subscribe = ["news.>"]')
        for verb, filters in value.items():
            if not isinstance(filters, list | tuple) or not all(
                isinstance(each, str) for each in filters
            ):
                raise ConfigError(f'allow.{verb[:40]}: write a list of names, such as ["news.>"]')
        return cls(value)

    def allows(self, verb: str, name: str) -> bool:
        """Return whether `verb` is allowed for a name or, for "subscribe", for all topics of a filter."""
        test = covers if verb == "subscribe" else matches
        return any(test(pattern, name) for pattern in self._patterns.get(verb, ()))

    def __eq__(self, other: object) -> bool:
        return self._patterns == other._patterns if isinstance(other, Scope) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._patterns.items())))

    def __repr__(self) -> str:
        return f"Scope({self._patterns!r})"
