"""The summary of a comparison: one figure for each load and system, the median of its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from reports.latency import PERCENTILES
from reports.results import Cell, Peer, Results, Run
from reports.tables import NONE, Entry, Row, Table, digits, milliseconds, rate, share, total

FIGURES: dict[str, tuple[tuple[str, str, Callable[[float], str]], ...]] = {
    "publish": (("messages/s without loss", "lossless_rate", rate),),
    "closed": (("p50, ms", "p50", milliseconds),),
    "rate": (("requests/s", "rate", rate),),
    "open": (("p50, ms", "p50", milliseconds), ("p99, ms", "p99", milliseconds)),
    "stream": (("MB/s", "rate_mb_s", digits),),
}
"""Kind of cell -> its rows: (unit, figure or percentile, format)."""
KIND = {"closed": "uncorrected", "open": "corrected"}


def summary(results: Results) -> Table:
    """Return a row for each load and figure that a system has, and a column for each system."""
    rows = []
    for cell in results.cells:
        for unit, name, show in FIGURES[cell.shows]:
            entries = [_entry(results, peer, cell, name, show) for peer in results.peers]
            if any(entry.text != NONE for entry in entries):
                rows.append(Row(f"{cell.title}: {unit}", entries))
    return Table("", [peer.title for peer in results.peers], rows)


def _entry(
    results: Results, peer: Peer, cell: Cell, name: str, show: Callable[[float], str]
) -> Entry:
    runs = results.good(peer, cell)
    unanswered = total(runs, "unanswered")
    if unanswered:
        return Entry(f"{share(unanswered, unanswered + total(runs, 'answered'))} unanswered")
    values = [value for run in runs if (value := _value(run, cell, name)) is not None]
    return Entry(show(statistics.median(values)) if values else NONE)


def _value(run: Run, cell: Cell, name: str) -> float | None:
    if name in PERCENTILES:
        return run.samples(KIND[cell.shows]).at(PERCENTILES[name])
    return run.figures.get(name)
