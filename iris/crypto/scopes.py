"""What a ticket, or the issuer of tickets, allows: names by verb.

    verb         allows                                             names are
    request, push, survey, broadcast, tunnel, members               filters of clusters
    serve        to serve a cluster                                 the same
    publish, subscribe                                              filters of topics
    read         to read a stream                                   filters of streams
    consume      to take messages from a stream as a consumer       the same, with "#" and a consumer for this one alone
    append       to append to a stream                              the same

A name that no entry of its verb matches is not allowed. "orders#invoices" is the consumer "invoices" of the stream
"orders"; a final "*" stands for any rest of a consumer's name. The first "#" counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Self

from iris.errors import ConfigError, InvalidName
from iris.wire.names import MAX_NAME_BYTES, check_filter, covers, did_you_mean, matches

VERBS: Final = (
    "request", "push", "survey", "broadcast", "tunnel", "members", "serve", "publish", "subscribe", "read", "consume", "append",
)  # fmt: skip
MAX_PATTERNS: Final = 256
"""Most filters in one scope."""
_ANY: Final = "*"


class Scope:
    """Filters by verb. Immutable."""

    __slots__ = ("_addresses", "_consumers", "_patterns")

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        """Raises ConfigError: a verb is unknown, a filter is outside the grammar, or there are too many."""
        for verb, filters in patterns.items():
            if verb not in VERBS:
                raise ConfigError(
                    f"allow.{verb[:40]}: there is no such verb{did_you_mean(verb, VERBS)}; the verbs are {', '.join(VERBS)}"
                )
            for each in filters:
                address, consumer = _split(verb, each)
                try:
                    check_filter(address)
                except InvalidName as error:
                    raise ConfigError(f"allow.{verb}: {error}") from error
                if not _is_consumer(consumer):
                    raise ConfigError(
                        f"allow.{verb}: {each[:80]!r} must have the name of a consumer after its '#'; use up to {MAX_NAME_BYTES} "
                        "bytes without spaces, and '*' as the last character only"
                    )
        if sum(map(len, patterns.values())) > MAX_PATTERNS:
            raise ConfigError(f"allow: there are over {MAX_PATTERNS} names; use filters")
        self._patterns: Final = {verb: tuple(filters) for verb, filters in patterns.items()}
        self._consumers: Final = [_split("consume", each) for each in patterns.get("consume", ())]
        self._addresses: Final = {
            **self._patterns, "consume": tuple(stream for stream, _ in self._consumers)
        }  # fmt: skip
        """Verb -> filters of names, without consumers."""

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
        """Return whether `verb` is allowed for a name or, for "subscribe", for all topics of a filter.

        For "consume", see `consumes`, too.
        """
        test = covers if verb == "subscribe" else matches
        return any(test(pattern, name) for pattern in self._addresses.get(verb, ()))

    def consumes(self, stream: str, consumer: str = "") -> bool:
        """Return whether "consume" is allowed for a consumer of a stream; without a name, for all of them."""
        return any(
            consumer.startswith(only[:-1]) if only.endswith(_ANY) else consumer == only
            for pattern, only in self._consumers
            if matches(pattern, stream)
        )

    def __eq__(self, other: object) -> bool:
        return self._patterns == other._patterns if isinstance(other, Scope) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._patterns.items())))

    def __repr__(self) -> str:
        return f"Scope({self._patterns!r})"


def _split(verb: str, pattern: str) -> tuple[str, str]:
    """Return the filter of names in an entry of a scope, and the pattern of consumers: `_ANY` if it has none."""
    address, mark, consumer = pattern.partition("#") if verb == "consume" else (pattern, "", "")
    return address, consumer if mark else _ANY


def _is_consumer(pattern: str) -> bool:
    name = pattern.removesuffix(_ANY)
    return (
        0 < len(pattern.encode(errors="replace")) <= MAX_NAME_BYTES
        and _ANY not in name
        and name.isprintable()
        and " " not in name
    )
