"""The grammar of cluster names, topics and filters, and topic matching.

    cluster = token *("." token)              1 to 255 bytes of UTF-8, at most 32 tokens
    topic   = token *("." token)              the same grammar
    filter  = part *("." part) ["." ">"]      part is a token or "*"; ">" alone matches every topic
    token   = 1*char                          any character but ".", "*", ">", white space and controls
    member  = 32(0-9 / a-f) "." 1*digit       the id of a relay, and the number of one of its members
    method  = a-z *(a-z / 0-9 / "_" / "-" / ".")   1 to 64 characters, in either case; "iris.…" belongs to the library
    site    = a-z *(a-z / 0-9 / "-")          1 to 32 characters; "site:name" is the cluster or stream of that site

`*` matches exactly one token, a final `>` one or more. Names compare byte by byte: case matters, nothing is normalised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from iris.errors import InvalidName

MAX_NAME_BYTES: Final = 255
MAX_TOKENS: Final = 32
MAX_METHOD_BYTES: Final = 64
RESERVED_METHODS: Final = "iris."
"""Start of the names of methods that the library itself answers."""

_TOKEN: Final = r"[^\s.*>\x00-\x1f\x7f-\x9f\ud800-\udfff]+"
_NAME: Final = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_MEMBER: Final = re.compile(r"[0-9a-f]{32}\.[1-9][0-9]{0,18}")
_UUID: Final = re.compile(r"[0-9a-f]{32}")
_SITE: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_METHOD: Final = re.compile(rf"[A-Za-z][A-Za-z0-9_.-]{{0,{MAX_METHOD_BYTES - 1}}}")
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_FILTER: Final = re.compile(rf"(?:>|(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?)")


def check_cluster(name: str) -> str:
    """Return `name`. Raises InvalidName if it is not a cluster name."""
    return _check(name, _NAME, "cluster name")


def check_topic(name: str) -> str:
    """Return `name`. Raises InvalidName if it is not a topic; a topic has no wildcards."""
    return _check(name, _NAME, "topic")


def check_filter(name: str) -> str:
    """Return `name`. Raises InvalidName if it is not a topic filter."""
    return _check(name, _FILTER, "topic filter")


def check_group(name: str) -> str:
    """Return `name`. Raises InvalidName if it is not a queue group name, whose grammar is that of a cluster name."""
    return _check(name, _NAME, "queue group")


def optional(name: object, check: Callable[[Any], str]) -> str:
    """Return `check(name)`, or "" for None and "", which mean no name. Other false values, such as 0, are checked."""
    return "" if name is None or name == "" else check(name)


def check_uuid(uuid: object) -> str:
    """Return the uuid of a log, or "" for none, which None and "" mean. Raises InvalidName."""
    if uuid is None or uuid == "":
        return ""
    if not isinstance(uuid, str) or not _UUID.fullmatch(uuid):
        raise InvalidName(
            f"{str(uuid)[:80]!r} is not the uuid of a stream; use its 32 hex digits, as `iris stream list` shows them"
        )
    return uuid


def check_method(name: object) -> str:
    """Return `name`. Raises InvalidName if it is not the name of a method."""
    if not isinstance(name, str) or not _METHOD.fullmatch(name):
        raise InvalidName(
            f"{str(name)[:80]!r} is not the name of a method; use 1 to {MAX_METHOD_BYTES} letters, digits, '_', '-' and '.', "
            "beginning with a letter"
        )
    return name


def check_site(name: str) -> str:
    """Return `name`. Raises InvalidName if it is not a site name."""
    if not _SITE.fullmatch(name):
        raise InvalidName(
            f"{name[:80]!r} is not a site name; use 1 to 32 of a-z, 0-9 and '-', beginning with a letter"
        )
    return name


def split_site(name: str) -> tuple[str, str]:
    """Return the site and the rest of "site:name". The site is "" if none is named, and "." for the local site.

    A name may contain ":" itself. The part before the first ":" is a site only if it matches the grammar of sites.
    """
    site, colon, rest = name.partition(":")
    if colon and rest and (site == "." or _SITE.fullmatch(site)):
        return site, rest
    return "", name


def check_address(name: str) -> tuple[str, str]:
    """Return the site ("" for none, "." for the local site) and the name of a cluster or stream.

    Raises:
        InvalidName: the name is outside the grammar.
    """
    if not isinstance(name, str):
        check_cluster(name)
    site, bare = split_site(name)
    return site, check_cluster(bare)


def split_member(member: str) -> tuple[bytes, int]:
    """Return (relay id, serial) of a member id, as member lists show it.

    Raises:
        InvalidName: it is not a member id.
    """
    if _MEMBER.fullmatch(str(member)):
        relay, _, serial = member.partition(".")
        if int(serial) < 1 << 63:
            return bytes.fromhex(relay), int(serial)
    raise InvalidName(
        f"{member!r} is not a member id; use an id from client.members() or `iris members`, "
        f"such as {'0123456789abcdef' * 2}.7"
    )


def check_member(cluster: str, member: str) -> str:
    """Return `member`.

    Raises:
        InvalidName: it is not a member id, or `cluster` names a site.
    """
    site, _ = check_address(cluster)
    if site not in ("", "."):
        raise InvalidName(
            f"{cluster!r} names a site, but only members of this site can be called one by one; leave the site "
            "or the member out"
        )
    split_member(member)
    return member


def overlaps(one: str, other: str) -> bool:
    """Return whether some topic matches both filters. Both must have passed `check_filter`."""
    ones, others = one.split("."), other.split(".")
    for a, b in zip(ones, others, strict=False):
        if ">" in (a, b):
            return True  # both have at least one token left
        if a != b and "*" not in (a, b):
            return False
    return len(ones) == len(others)


def covers(wide: str, narrow: str) -> bool:
    """Return whether every topic that matches the filter `narrow` also matches `wide`."""
    parts, tokens = wide.split("."), narrow.split(".")
    if parts[-1] == ">":
        parts.pop()
        if len(tokens) <= len(parts):
            return False
    elif len(tokens) != len(parts) or tokens[-1] == ">":
        return False
    return all(
        part == token or (part == "*" and token != ">")
        for part, token in zip(parts, tokens, strict=False)
    )


def is_wild(pattern: str) -> bool:
    """Return whether a filter has wildcards. It must have passed `check_filter`."""
    return "*" in pattern or pattern[-1] == ">"


def matches(pattern: str, topic: str) -> bool:
    """Return whether the filter `pattern` matches `topic`. Both must have passed their check."""
    if pattern == topic:
        return True
    if not is_wild(pattern):
        return False
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
            f"{shown!r} is not a {what}; use parts joined by '.', "
            + (
                "and no spaces, no '*' and no '>'"
                if grammar is _NAME
                else "and no spaces: '*' stands for one part, a final '>' for one or more"
            )
        )
    if len(name.encode()) > MAX_NAME_BYTES or name.count(".") >= MAX_TOKENS:
        raise InvalidName(
            f"{what} {shown!r} is over the limit of {MAX_NAME_BYTES} bytes or {MAX_TOKENS} parts"
        )
    return name


def printable(text: str) -> str:
    """Return text of another process with unprintable characters replaced by "?", so that it cannot
    control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def visible(text: str) -> str:
    """Return a text of several lines with the characters that control a terminal, or the direction of writing, as JSON
    escapes them. So JSON stays JSON. Newlines and tabs stay as they are."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plural(count: int, word: str) -> str:
    """Return a number with its word: "1 byte", "2 bytes"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Return words as people list them: "a", "a and b", "a, b and c"."""
    *others, final = words
    return f"{', '.join(others)} {last} {final}" if others else final


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'queue_bytes'?" if one of the `known` names resembles `name`, else ""."""
    from difflib import get_close_matches  # only for errors

    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
