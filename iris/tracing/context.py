"""The trace context in the headers of a message, by default W3C `traceparent`, `tracestate` and `baggage`.

Headers are sealed with the message, so no relay can read or change the context. A context that arrives comes from a
holder of the key. It may be malformed all the same, and is ignored then, without an exception and without a log line.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Final

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, Span, get_current_span, set_span_in_context

from iris.core.bundle import MAX_HEADERS_BYTES, Headers, headers_bytes
from iris.logs import logger

log = logger("iris.client")

QUIET_S: Final = 10.0
"""Seconds between two log lines about contexts that did not fit."""
_BAGGAGE: Final = "baggage"
_MAX_CHARACTERS: Final = 512
"""Longest `traceparent` and `tracestate`."""
_MAX_MEMBERS: Final = {"tracestate": 32, _BAGGAGE: 180}
_STATE: Final = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[ !-+\--<>-~]{0,255}[!-+\--<>-~]"
)
_TOKEN: Final = r"[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*"
_VALUE: Final = r"=[ \t]*[!#-+\--:<-\[\]-~]*[ \t]*"
_MEMBER: Final = re.compile(rf"{_TOKEN}{_VALUE}(;{_TOKEN}({_VALUE})?)*")


class Carried(dict[str, str]):
    """Headers that carry the context of a span already, so a call that passes them on makes no other span."""


class Propagation:
    """Puts the context of spans into headers, and gets it out again."""

    def __init__(self, propagator: TextMapPropagator | None) -> None:
        self._given = propagator
        self._left_out = 0
        """Messages whose context was shortened since the last log line."""
        self._quiet_until_s = 0.0

    @property
    def _propagator(self) -> TextMapPropagator:
        return self._given or propagate.get_global_textmap()

    def own(self, headers: Headers) -> bool:
        """Return whether the sender itself has put a trace context into the headers."""
        return not headers.keys().isdisjoint(self._propagator.fields - {_BAGGAGE})

    def inject(self, span: Span, headers: Headers | None, name: str) -> Carried:
        """Return a copy of the headers with the context of `span`. The sender's own headers are never replaced.

        `name` is where the message goes, for the log: what would exceed the limit of headers is left out.
        """
        if headers and self.own(headers):
            return Carried(headers)
        carried = Carried()
        self._propagator.inject(carried, set_span_in_context(span))
        added = list(carried)
        if headers:
            carried.update(headers)
            added = [field for field in added if field not in headers]
        elif len(added) <= 1:
            return carried
        with contextlib.suppress(
            TypeError, ValueError
        ):  # the call says what is wrong with its headers
            self._shorten(carried, added, name)
        return carried

    def _shorten(self, carried: Carried, added: list[str], name: str) -> None:
        """Remove added fields, the least important first, until the headers are within their limit."""
        left_out = []
        added.sort(key=lambda field: (field != _BAGGAGE, field != "tracestate"))
        while added and headers_bytes(carried) > MAX_HEADERS_BYTES:
            left_out.append(added[0])
            del carried[added.pop(0)]
        if left_out:
            self._left_out += 1
            now_s = time.monotonic()
            if now_s >= self._quiet_until_s:
                fields = {"name": name, "fields": left_out, "limit": MAX_HEADERS_BYTES, "messages": self._left_out}  # fmt: skip
                log.warning("client.context_shortened", extra={"fields": fields})
                self._left_out, self._quiet_until_s = 0, now_s + QUIET_S

    def extract(self, headers: Headers | None) -> Context:
        """Return the context of a message, and nothing else; an empty one if it has none that is valid."""
        if not headers:
            return Context()
        wrong = [field for field in ("traceparent", "tracestate", _BAGGAGE) if field in headers and not _well_formed(field, headers[field])]  # fmt: skip
        if wrong:
            headers = {name: value for name, value in headers.items() if name not in wrong}
        return self._propagator.extract(headers, Context())

    def link(self, headers: Headers | None) -> list[Link]:
        """Return a link to the span in which a message was sent; none if it has no valid context."""
        return links_to(self.extract(headers))


def links_to(context: Context) -> list[Link]:
    """Return a link to the span of a context, if it has one."""
    found = get_current_span(context).get_span_context()
    return [Link(found)] if found.is_valid else []


def _well_formed(field: str, value: str) -> bool:
    """Return whether OpenTelemetry reads a field without a log line, which a peer could make it write at any rate.

    A wrong `traceparent` is not logged unless it is too long.
    """
    if field != _BAGGAGE and len(value) > _MAX_CHARACTERS:
        return False
    if field == "traceparent":
        return True
    members = [member for each in value.split(",") if (member := each.strip(" \t"))]
    pattern = _MEMBER if field == _BAGGAGE else _STATE
    return len(members) <= _MAX_MEMBERS[field] and all(map(pattern.fullmatch, members))
