"""Options that several verbs of `iris stream` share, how they are parsed, and how figures are printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

import typer

from iris.cli import output
from iris.streams import StreamGap
from iris.wire.names import plural, printable

_UNITS: Final = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(B|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_AGE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhd])")
_NONE: Final = ("0", "none")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_size(text: str) -> int:
    """Return a size in bytes, 0 for "none"; raises BadParameter (exit code 2)."""
    if text in _NONE:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is not a size; write a number and B, KiB, MiB, GiB or TiB, such as 10GiB"
        )
    return int(Decimal(found[1]) * _UNITS[(found[2] or "B").lower()])


def parse_age(text: str) -> float:
    """Return a duration in seconds, 0 for "none"; raises BadParameter."""
    if text in _NONE:
        return 0.0
    found = _AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write a number and s, m, h or d, such as 7d"
        )
    return float(Decimal(found[1]) * _SECONDS[found[2]])


def parse_time(text: str) -> datetime:
    """Return an ISO 8601 time, in this host's time zone if it names none; raises BadParameter."""
    try:
        moment = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment < _EPOCH:
        raise typer.BadParameter(f"{text!r} is not a time; write it like 2026-01-31T12:00:00Z")
    return moment


def parse_start(text: str) -> str | int | datetime:
    """Return the start of a read, as `Streams.read` accepts it; raises BadParameter."""
    if text in ("first", "last", "new"):
        return text
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    try:
        return parse_time(text)
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{text!r} is not a start; use first, last, new, an offset or a time such as 2026-01-31T12:00:00Z"
        ) from None


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the stream.")]
Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Name of the consumer.")]
Uuid = Annotated[
    str, typer.Option("--uuid", metavar="HEX", help="Which stream, if two stores have one of this name.", show_default=False)
]  # fmt: skip
MaxBytes = Annotated[
    int | None, typer.Option("--max-bytes", metavar="SIZE", parser=parse_size, help="Keep at most this much: 512MiB, 10GiB; 0 for no limit.", show_default=False)
]  # fmt: skip
MaxMessages = Annotated[
    int | None, typer.Option("--max-messages", metavar="N", min=0, help="Keep at most N messages; 0 for no limit.", show_default=False)
]  # fmt: skip
MaxAge = Annotated[
    float | None, typer.Option("--max-age", metavar="AGE", parser=parse_age, help="Keep messages this long: 90s, 30m, 12h, 7d; 0 for no limit.", show_default=False)
]  # fmt: skip
DedupWindow = Annotated[
    float | None, typer.Option("--dedup-window", metavar="AGE", parser=parse_age, help="Remember the ids of appended messages this long: 10m, 1d; 0 for not at all.", show_default=False)
]  # fmt: skip
Partition = Annotated[
    int | None, typer.Option("--partition", metavar="N", min=0, help="Only this partition of the stream.", show_default=False)
]  # fmt: skip
StartAt = Annotated[
    Any, typer.Option("--start", metavar="WHERE", parser=parse_start, help="Where to start: first, last, new, an offset, or an ISO time.")
]  # fmt: skip


def size_text(size: int) -> str:
    """Return a size for people, such as "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"


def age_text(seconds: float) -> str:
    """Return a duration for people, in the largest unit of which it has at least one."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"


def gap_text(gap: StreamGap) -> str:
    """Return the line that reports offsets without messages."""
    last = gap.end - 1
    where = f"offset {gap.first}" if last <= gap.first else f"offsets {gap.first} to {last}"
    if gap.partition:
        where += f" of partition {gap.partition}"
    cause = printable(gap.cause)
    if gap.count == 0:
        return f"nothing at {where}: {cause}"
    number = "an unknown number of messages" if gap.count is None else plural(gap.count, "message")
    return f"missing at {where}: {number}: {cause}"


def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print rows: a table on a terminal, in which the columns `right` are right-aligned; separated by tabs in a pipe.

    In a pipe, titles are printed only if there are rows.
    """
    titles = [title.upper() for title in titles]
    if not sys.stdout.isatty():
        lines = [titles, *rows] if titles and rows else rows
        output.write("".join("\t".join(line) + "\n" for line in lines).encode())
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        justify: Literal["left", "right"] = "right" if title.lower() in right else "left"
        table.add_column(title, no_wrap=True, justify=justify)
    for row in rows:
        table.add_row(*map(output.cell, row))
    output.console().print(table)
