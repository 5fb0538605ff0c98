"""Translate names of the first Iris to names of this one.

In the first Iris any string is a name; here a name is tokens joined by dots. A name that is valid here
stays as it is, so programs of both kinds meet under it. In other names the bytes that are not allowed
are written as %XX: white space and control characters, "*", ">" and "%", bytes that are not UTF-8, a
"." at either end or after another, every "." of a name with more than 32 tokens, and ":" in a cluster
name, because it would name a site. Different names never become the same name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

MAX_NAME_BYTES: Final = 255
MAX_TOKENS: Final = 32
CACHED: Final = 4096
"""Number of names whose translation is cached. Names that are too long are not cached, so each entry is small."""

_STRANGE: Final = r"[\s*>%\x00-\x1f\x7f-\x9f\ud800-\udfff]|(?<![^.])\.|\.(?![^.])"
_IN_TOPICS: Final = re.compile(_STRANGE)
_IN_CLUSTERS: Final = re.compile(_STRANGE + "|:")


class BadName(ValueError):
    """A name that is empty or too long."""


@lru_cache(CACHED)
def cluster_name(name: bytes) -> str:
    """Return the cluster for a name of the first Iris; raises BadName."""
    return _translate(name, _IN_CLUSTERS, "cluster")


@lru_cache(CACHED)
def topic_name(name: bytes) -> str:
    """Return the topic for a name of the first Iris; raises BadName."""
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
