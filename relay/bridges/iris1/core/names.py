"""Names of the first Iris as names of ours.

There any string is a name; ours are tokens joined by dots. A name that is one of ours stays as it is, so programs of both
kinds meet under it. In any other, what does not fit is written as %XX, byte by byte: white space and controls, "*", ">"
and "%", bytes that are no UTF-8, a "." that begins, ends or follows another, all of them in a name of more than 32 tokens;
and in a cluster's name ":", which would name a site. No two names become one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

MAX_NAME_BYTES: Final = 255
MAX_TOKENS: Final = 32
CACHED: Final = 4096
"""Names whose translation is kept; those that cannot be are not, so each is short."""

_STRANGE: Final = r"[\s*>%\x00-\x1f\x7f-\x9f\ud800-\udfff]|(?<![^.])\.|\.(?![^.])"
_IN_TOPICS: Final = re.compile(_STRANGE)
_IN_CLUSTERS: Final = re.compile(_STRANGE + "|:")


class BadName(ValueError):
    """It is empty, or too long."""


@lru_cache(CACHED)
def cluster_name(name: bytes) -> str:
    """Return the cluster that the first Iris calls `name`; raises BadName."""
    return _translate(name, _IN_CLUSTERS, "cluster")


@lru_cache(CACHED)
def topic_name(name: bytes) -> str:
    """Return the topic that the first Iris calls `name`; raises BadName."""
    return _translate(name, _IN_TOPICS, "topic")


def _translate(name: bytes, strange: re.Pattern[str], what: str) -> str:
    if not name:
        raise BadName(f"the {what} name is empty")
    text = strange.sub(_escape, name.decode(errors="surrogateescape"))
    if text.count(".") >= MAX_TOKENS:
        text = text.replace(".", "%2E")
    if len(text.encode()) > MAX_NAME_BYTES:
        raise BadName(f"the {what} name is longer than {MAX_NAME_BYTES} bytes")
    return text


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogateescape"))
