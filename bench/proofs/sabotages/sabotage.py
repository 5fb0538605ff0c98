"""What a sabotage is."""

from __future__ import annotations

from typing import NamedTuple


class Sabotage(NamedTuple):
    """A check taken out."""

    id: str
    path: str
    """Of the module, from the root of the tree."""
    function: str
    """As "Class.method"."""
    find: str
    """Part of the function, as it stands there but for line breaks."""
    put: str
    tests: tuple[str, ...]
    """Files, or tests in them, as pytest takes them."""
    breaks: str
    """What somebody could do then."""
