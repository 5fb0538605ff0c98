"""The type of a sabotage."""

from __future__ import annotations

from typing import NamedTuple


class Sabotage(NamedTuple):
    """One check to remove, and the tests that must notice."""

    id: str
    path: str
    """Module path, relative to the repository root."""
    function: str
    """Qualified name within the module, such as "Class.method"."""
    find: str
    """Expression in the function, exactly as written except for line breaks."""
    put: str
    tests: tuple[str, ...]
    """Test files, or tests in them, in pytest's notation."""
    breaks: str
    """What becomes possible without the check."""
