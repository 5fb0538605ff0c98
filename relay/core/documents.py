"""The answer to STATUS: one JSON document, made in parts.

A relay can have a hundred thousand names to show. To collect them and to encode them takes 100 ms, so it is done a few
at a time, as the session that asks has its turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from iris.wire.texts import sound_json

Part = dict[str, Any]
"""Some keys of a document. A later part may go on with a list or a dict, which must be empty where it begins."""


def joined(parts: Iterable[Part]) -> Part:
    """Return the document that parts make."""
    document: Part = {}
    for part in parts:
        for name, value in part.items():
            if name not in document:
                document[name] = value
            elif isinstance(value, dict):
                document[name] |= value
            else:
                document[name] += value
    return document


class Document:
    """The JSON of a document, part by part. It is ASCII, so its length is its size in bytes."""

    __slots__ = ("_texts", "size")

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        """Key -> the JSON of its value; of a list or dict that goes on, that of each part without its brackets."""
        self.size = 2

    def add(self, part: Part) -> None:
        """Encode a part."""
        for name, value in part.items():
            text = sound_json(json.dumps(value))
            if name in self._texts:
                text = text[1:-1]
            else:
                self.size += len(name) + 4
            self._texts.setdefault(name, []).append(text)
            self.size += len(text) + 1

    def __str__(self) -> str:
        """Return the whole document."""
        shown = []
        for name, (first, *more) in self._texts.items():
            value = f"{first[0]}{','.join(more)}{first[-1]}" if more else first
            shown.append(f'"{name}":{value}')
        return f"{{{','.join(shown)}}}"
