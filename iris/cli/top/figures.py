"""Figures as `iris top` writes them: short, so that a column of them stays narrow."""

from __future__ import annotations

import unicodedata


def count(value: float) -> str:
    """Return a number: 999,999, then 1.2M."""
    return f"{value:,.0f}" if value < 1e6 else _scaled(value)


def per_second(value: float) -> str:
    """Return a rate: 0, 0.3, 12, 1,204, 1.2M."""
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)


def change(value: float) -> str:
    """Return the change of a level per second, with its sign: +1.5, -3, 0."""
    if abs(value) < 0.05:
        return "0"
    return ("+" if value > 0 else "-") + per_second(abs(value))


def size(value: float) -> str:
    """Return bytes: 999 B, 1.2 kB, 3.4 GB."""
    return f"{value:.0f} B" if value < 1000 else _scaled(value, " ") + "B"


def milliseconds(value: float) -> str:
    """Return a time in ms: 0.03 ms, 1.2 ms, 840 ms, 2.1 s."""
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} ms"


def signed_ms(value: float, error: float) -> str:
    """Return a difference of clocks with its limit of error: +0.4±0.2 ms."""
    return f"{value:+.1f}±{error:.1f} ms"


def share(value: float) -> str:
    """Return a share of 1 in percent."""
    return f"{value:.2%}"


def age(value: float) -> str:
    """Return seconds: 42s, 3m10s, 5h02m, 12d03h."""
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def _scaled(value: float, space: str = "") -> str:
    prefixes = "kMGTP"
    step = 0
    value /= 1000
    while value >= 1000 and step + 1 < len(prefixes):
        value /= 1000
        step += 1
    return f"{value:.1f}{space}{prefixes[step]}"


def width(text: str) -> int:
    """Return how many columns of a terminal a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """Return a text that takes at most so many columns, with "…" in place of what is cut off."""
    if width(text) <= columns:
        return text
    kept = ""
    left = columns - 1
    for character in text:
        left -= _columns(character)
        if left < 0:
            break
        kept += character
    return kept + "…" if columns > 0 else ""


def padded(text: str, columns: int, *, left: bool) -> str:
    """Return a text in exactly so many columns."""
    shown = cut(text, columns)
    blank = " " * (columns - width(shown))
    return shown + blank if left else blank + shown
