"""What a site exports to and imports from other sites.

Lists of names and filters, with "!" before those that are denied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from iris.wire.kinds import NO_KEY, Kind
from iris.wire.names import covers, matches, overlaps

MAX_REFUSED: Final = 1024
"""Limit of rules that are counted apart, because another site chooses the names in them."""

_LOG: Final = re.compile("[0-9a-f]{32}")


class Patterns:
    """A list of patterns. Without an allowed pattern everything is allowed; a denied one wins."""

    __slots__ = ("_allowed", "_denied", "_open")

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """`patterns` have passed `check_filter`, apart from a leading "!"."""
        self._denied = [text[1:] for text in patterns if text.startswith("!")]
        self._allowed = [text for text in patterns if not text.startswith("!")] or [">"]
        self._open = self._allowed == [">"] and not self._denied

    def allow(self, name: str) -> bool:
        """Whether a cluster or topic is allowed."""
        if self._open:
            return True
        return any(matches(text, name) for text in self._allowed) and not any(
            matches(text, name) for text in self._denied
        )

    def may_allow(self, pattern: str) -> bool:
        """Whether any topic that matches the filter `pattern` may be allowed."""
        if self._open:
            return True
        return any(overlaps(text, pattern) for text in self._allowed) and not any(
            covers(text, pattern) for text in self._denied
        )


class Policy:
    """What may cross between sites.

    `exported`: our clusters that other sites may call, and our topics that they may receive. `imported`:
    theirs for ours.

    A log is called by its uuid, and judged by its stream's name, which its store sends in JOIN. Calls of
    the stores themselves, under NO_KEY, never cross.
    """

    __slots__ = ("exported", "imported", "refused")

    def __init__(self, exported: Sequence[str] = (), imported: Sequence[str] = ()) -> None:
        self.exported = Patterns(exported)
        self.imported = Patterns(imported)
        self.refused: dict[str, int] = {}
        """"site: rule" -> declarations and entries refused."""

    def leaving(self, kind: int, name: str, key_id: bytes) -> str:
        """Return why messages of ours may not go to another site, or an empty text."""
        if kind == Kind.PUBLISH:
            return "" if self.exported.allow(name) else f"{name} is not exported"
        return "" if _crosses(self.imported, kind, name, key_id) else f"{name} is not imported"

    def entering(self, kind: int, name: str, key_id: bytes) -> str:
        """Return why messages of another site may not enter, or an empty text.

        A log is not judged here: see `exports`.
        """
        if kind == Kind.PUBLISH:
            return "" if self.imported.allow(name) else f"{name} is not imported"
        return "" if _crosses(self.exported, kind, name, key_id) else f"{name} is not exported"

    def exports(
        self, kinds: Mapping[int, int], name: str, key_id: bytes, tag: str
    ) -> dict[int, int]:
        """Return what other sites may use of what a member serves at an address.

        Returns kind -> handlers. `tag` is the one in JOIN.
        """
        if key_id == NO_KEY:
            return {}
        log = self.exported.allow(tag) if is_log(name) else self.exported.allow(name)
        other = self.exported.allow(name)
        return {k: n for k, n in kinds.items() if (log if k == Kind.STREAM else other)}

    def imports(self, kinds: Mapping[int, int], name: str, key_id: bytes) -> dict[int, int]:
        """Return what our sessions may use of what another site serves at an address."""
        return {k: n for k, n in kinds.items() if _crosses(self.imported, k, name, key_id)}

    def refuse(self, site: str, rule: str, count: int = 1) -> None:
        """Count something that was refused from or to a site."""
        rule_key = f"{site}: {rule}"
        if rule_key not in self.refused and len(self.refused) >= MAX_REFUSED:
            rule_key = "others"
        self.refused[rule_key] = self.refused.get(rule_key, 0) + count


def is_log(name: str) -> bool:
    """Whether a name is the uuid of a stream's log, by which logs are addressed."""
    return _LOG.fullmatch(name) is not None


def _crosses(patterns: Patterns, kind: int, name: str, key_id: bytes) -> bool:
    if key_id == NO_KEY:
        return False
    return patterns.allow(name) or (kind == Kind.STREAM and is_log(name))
