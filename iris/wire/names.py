"""The grammar of cluster names, topics and filters, and topic matching.

    cluster = token *("." token)              1 to 255 bytes of UTF-8, at most 32 tokens
    topic   = token *("." token)              the same grammar
    filter  = part *("." part) ["." ">"]      part is a token or "*"; ">" alone matches every topic
    token   = 1*char                          any character but ".", "*", ">", white space and controls

`*` matches exactly one token, a final `>` one or more. Names compare byte by byte: case matters, nothing is normalised.
"""

from __future__ import annotations

import re
from typing import Final

from iris.errors import InvalidName

MAX_NAME_BYTES: Final = 255
MAX_TOKENS: Final = 32

_TOKEN: Final = r"[^\s.*>\x00-\x1f\x7f-\x9f\ud800-\udfff]+"
_NAME: Final = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_FILTER: Final = re.compile(rf"(?:>|(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?)")


def check_cluster(name: str) -> str:
    """Return `name`; raises InvalidName if it is no cluster name."""
    return _check(name, _NAME, "cluster name")


def check_topic(name: str) -> str:
    """Return `name`; raises InvalidName if it is no topic (a topic has no wildcards)."""
    return _check(name, _NAME, "topic")


def check_filter(name: str) -> str:
    """Return `name`; raises InvalidName if it is no topic filter."""
    return _check(name, _FILTER, "topic filter")


def check_group(name: str) -> str:
    """Return `name`; raises InvalidName if it is no queue group name (same grammar as a cluster)."""
    return _check(name, _NAME, "queue group")


def matches(pattern: str, topic: str) -> bool:
    """Whether the filter `pattern` selects `topic`. Both must have passed their check."""
    if pattern == topic:
        return True
    parts, tokens = pattern.split("."), topic.split(".")
    if parts[-1] == ">":
        if len(tokens) < len(parts):
            return False
        parts.pop()
    elif len(tokens) != len(parts):
        return False
    return all(part in ("*", token) for part, token in zip(parts, tokens, strict=False))


def _check(name: object, grammar: re.Pattern[str], what: str) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"{what} must be a str, not {type(name).__name__}")
    shown = name if len(name) <= 80 else name[:77] + "..."
    if not grammar.fullmatch(name):
        raise InvalidName(
            f"{shown!r} is not a {what}: tokens joined by '.', without spaces"
            + (
                ", '*' or '>'"
                if grammar is _NAME
                else "; '*' stands for one token, a final '>' for the rest"
            )
        )
    if len(name.encode()) > MAX_NAME_BYTES or name.count(".") >= MAX_TOKENS:
        raise InvalidName(f"{what} {shown!r} is over {MAX_NAME_BYTES} bytes or {MAX_TOKENS} tokens")
    return name


def printable(text: str) -> str:
    """Return what another process wrote as a terminal may show it: nobody moves somebody's cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
