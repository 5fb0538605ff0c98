"""Validation errors of msgspec in the words of people who set an option: its name, its unit and what is allowed."""

from __future__ import annotations

import re
from typing import Final

_KINDS: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bytes": "bytes",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_UNITS: Final = {"_us": 1e6, "_ms": 1e3, "_s": 1}
"""Ending of a field's name -> how many of its unit are a second."""
_LIMIT: Final = re.compile(r"Expected `(\w+)`( of length)? (>=|<=|>|<|==) (-?[\d.]+)")
_KIND: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_BOUNDS: Final = {
    ">=": "at least",
    "<=": "at most",
    ">": "above",
    "<": "below",
    "==": "exactly",
}


def in_words(error: Exception) -> str:
    """Return "ack_timeout must be at least 0.001 s" for "Expected `int` >= 1000 - at `$.ack_timeout_us`".

    A text that it does not know is returned with the name of the field in front.
    """
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if limit := _LIMIT.fullmatch(text):
        _, length, bound, number = limit.groups()
        name, unit, shown = field, "", number
        for ending, per_second in _UNITS.items():
            if field.endswith(ending) and not length:
                name, unit = field.removesuffix(ending), " s"
                shown = f"{float(number) / per_second:g}"
                break
        what = "the length of " if length else ""
        said = f"must be {_BOUNDS[bound]} {shown}{unit}"
        return f"{what}{name} {said}" if name else f"the value {said}"
    if kind := _KIND.fullmatch(text):
        wanted, got = (" or ".join(_KINDS.get(one, one) for one in part.split(" | ")) for part in kind.groups())  # fmt: skip
        return f"{field or 'the value'} must be {wanted}, not {got}"
    return f"{field}: {text}" if field else text
