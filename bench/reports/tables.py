"""The tables of a report, independent of a format; they are printed as Markdown and as HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from reports.latency import PERCENTILES
from reports.results import Cell, Peer, Results, Run

KINDS = {
    "publish": "publish",
    "closed": "requests, closed loop",
    "rate": "requests, closed loop",
    "open": "requests at a fixed rate, open loop",
    "stream": "streams",
}
NONE = "-"
Show = Callable[[float], str]


@dataclass(frozen=True)
class Entry:
    text: str
    note: str = ""
    """Small text beside the main text."""
    marks: tuple[str, ...] = ()
    """Numbers of its footnotes."""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A measure with an entry for each system; or, in a table, a system with an entry for each measure."""

    label: str
    entries: list[Entry]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[Row]
    below: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    tables: list[Table]
    footnotes: list[str] = field(default_factory=list)
    """Texts of the footnotes, numbered from 1, each once."""
    plot: Cell | None = None


# -- numbers ----------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Format a number with three significant digits, and commas from a thousand on: 0.0312, 4.10, 56.2, 12,300."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def rate(value: float) -> str:
    for unit, factor in ((" M", 1_000_000), (" k", 1_000)):
        if float(f"{value:.3g}") >= factor:
            return digits(value / factor) + unit
    return digits(value)


def milliseconds(value_ns: float) -> str:
    return digits(value_ns / 1_000_000)


def megabytes(value: float) -> str:
    return digits(value / 1_000_000)


def count(value: float) -> str:
    return f"{value:,.0f}"


def seconds(value_s: float) -> str:
    whole = round(value_s)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{digits(value_s)} s"


def share(of: float, total: float) -> str:
    """Format a share as a percentage; only 0 is shown as 0 %, and only all as 100 %."""
    percent = 100 * of / total
    if percent >= 99.5 and of < total:
        return "over 99 %"
    if percent < 0.01:
        return "under 0.01 %"
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %"


# -- figures ----------------------------------------------------------------------------------------------


def figure(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.figures.get(name)


def total(runs: Sequence[Run], name: str) -> float:
    return sum(run.figures.get(name) or 0 for run in runs)


def losses(runs: Sequence[Run]) -> str:
    found = faults(runs, "wrong")
    if (lost := total(runs, "lost")) > 0:
        found.insert(0, f"{share(lost, lost + total(runs, 'received'))} lost")
    return ", ".join(found)


def mistakes(runs: Sequence[Run]) -> str:
    return ", ".join(faults(runs, "lost", "wrong"))


def faults(runs: Sequence[Run], *names: str) -> list[str]:
    return [f"{count(total(runs, name))} {name}" for name in names if total(runs, name)]


def processes(what: str, show: Show, runs: Sequence[Run]) -> str:
    """Return the part of each process, median of the rounds; processes of one name count together."""
    names = dict.fromkeys(used.name for run in runs for used in run.processes)
    parts = []
    for name in names:
        each = [[getattr(p, what) for p in run.processes if p.name == name] for run in runs]
        number = max(map(len, each))
        several = f" x {number}" if number > 1 else ""
        parts.append(f"{name}{several} {show(statistics.median(map(sum, each)))}")
    return ", ".join(parts)


class Builder:
    """The tables of one section, which share their footnotes."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.footnotes: list[str] = []

    def table(self, title: str, cell: Cell, measures: list[Row], below: str = "") -> Table:
        """Return a line for each system that has runs of the cell, and a column for each measure."""
        rows = [
            Row(peer.title, [measure.entries[index] for measure in measures])
            for index, peer in enumerate(self.results.peers)
            if self.results.of(peer, cell)
        ]
        return Table(title, [measure.label for measure in measures], rows, below)

    def mark(self, text: str) -> str:
        if text not in self.footnotes:
            self.footnotes.append(text)
        return str(self.footnotes.index(text) + 1)

    def marks(self, peer: Peer, cell: Cell) -> tuple[str, ...]:
        runs = self.results.of(peer, cell)
        texts = [
            f"{run.status}: {run.reason or 'no reason was given'}"
            for run in runs
            if run.status != "ok"
        ]
        used = len(self.results.good(peer, cell))
        if used < sum(run.status == "ok" for run in runs):
            texts.append(
                "a round beside which other processes took over a fifth of a processor is left out"
            )
        if any(not run.steady for run in runs):
            texts.append("a round of it was not steady")
        return tuple(dict.fromkeys(self.mark(text) for text in texts))

    def row(
        self,
        label: str,
        cell: Cell,
        take: Callable[[Run], float | None],
        show: Show,
        *,
        better: Callable[[list[float]], float] | None,
        note: Callable[[Sequence[Run]], str] = lambda runs: "",
        absent: Callable[[Sequence[Run]], str] = lambda runs: NONE,
        lossy_too: bool = False,
    ) -> Row:
        """Return medians over the rounds. `better` (max, min) picks the best of those without a fault;
        `lossy_too` means that the figure itself excludes faults."""
        entries: list[Entry] = []
        fair: dict[int, float] = {}
        for peer in self.results.peers:
            runs, good = self.results.of(peer, cell), self.results.good(peer, cell)
            marks = self.marks(peer, cell)
            values = [value for run in good if (value := take(run)) is not None]
            if not good:
                entries.append(Entry(self.results.outcome(peer, cell), marks=marks))
                continue
            notes = [note(good)] if note(good) else []
            if len(values) > 1:
                notes.insert(0, f"({show(min(values))}-{show(max(values))})")
            if len(good) < len(runs):
                notes.append(f"{len(good)} of {len(runs)} rounds")
            elif values and len(values) < len(good):
                notes.append(f"in {len(values)} of {len(good)} rounds")
            if not values:
                entries.append(Entry(absent(good), "; ".join(notes), marks))
                continue
            median = statistics.median(values)
            if not peer.floor and (lossy_too or all(run.faultless for run in good)):
                fair[len(entries)] = median
            entries.append(Entry(show(median), "; ".join(notes), marks))
        return Row(label, bold(entries, fair, better))

    def figures(self, cell: Cell) -> list[Row]:
        if cell.shows == "publish":
            return self._publish(cell)
        if cell.shows == "rate":
            return [self.row("requests/s", cell, figure("rate"), rate, better=max, note=mistakes)]
        if cell.shows == "stream":
            return [self.row("MB/s", cell, figure("rate_mb_s"), digits, better=max, note=mistakes)]
        if cell.shows == "closed":
            first = self.row("requests/s", cell, figure("rate"), rate, better=max, note=mistakes)
        else:
            first = self._answered(cell)
        return [first, *self._latencies(cell)]

    def _publish(self, cell: Cell) -> list[Row]:
        def none(runs: Sequence[Run]) -> str:
            return NONE if all(run.faultless for run in runs) else "none"

        sent = self.row("sent msg/s", cell, figure("sent_rate"), rate, better=None)
        received = self.row(
            "received msg/s",
            cell,
            figure("received_rate"),
            rate,
            better=max,
            note=losses,
        )
        lossless = self.row(
            "highest msg/s tried without loss",
            cell,
            figure("lossless_rate"),
            rate,
            better=max,
            absent=none,
            lossy_too=True,
        )
        return [sent, received, lossless]

    def _answered(self, cell: Cell) -> Row:
        entries = []
        for peer in self.results.peers:
            good, marks = self.results.good(peer, cell), self.marks(peer, cell)
            if not good:
                entries.append(Entry(self.results.outcome(peer, cell), marks=marks))
                continue
            unanswered = total(good, "unanswered")
            asked = unanswered + total(good, "answered")
            text = f"{share(unanswered, asked)} unanswered" if unanswered else "all answered"
            text = ", ".join([text, *faults(good, "errors", "wrong")])
            wanted, sent = total(good, "asked_rate"), total(good, "sent_rate")
            slow = f"{rate(sent / len(good))}/s sent" if sent < 0.99 * wanted else ""
            entries.append(Entry(text, slow, marks))
        return Row("answered", entries)

    def _latencies(self, cell: Cell) -> list[Row]:
        def at(label: str) -> Callable[[Run], float | None]:
            if label == "max":
                return lambda run: run.samples(cell.latency).max_ns
            return lambda run: run.samples(cell.latency).at(PERCENTILES[label])

        return [
            self.row(f"{label}, ms", cell, at(label), milliseconds, better=min)
            for label in ("p50", "p99", "p99.9", "max")
        ]

    def cost(self, cell: Cell) -> list[Row]:
        same_work = min if cell.shows == "open" else None
        return [
            self.row(
                "CPU s",
                cell,
                lambda run: run.total("cpu_s"),
                digits,
                better=same_work,
                note=partial(processes, "cpu_s", digits),
            ),
            self.row(
                "peak MB",
                cell,
                lambda run: run.total("peak_bytes"),
                megabytes,
                better=min,
                note=partial(processes, "peak_bytes", megabytes),
            ),
        ]

    def percentiles(self, cell: Cell) -> list[Row]:
        """Return percentiles of all good rounds together; the uncorrected value is the note."""
        labels = [*PERCENTILES, "max"]
        entries: dict[str, list[Entry]] = {label: [] for label in labels}
        fair: dict[str, dict[int, float]] = {label: {} for label in labels}
        samples: list[Entry] = []
        for column, peer in enumerate(self.results.peers):
            good = self.results.good(peer, cell)
            if not good:
                missing = Entry(self.results.outcome(peer, cell), marks=self.marks(peer, cell))
                for row in (samples, *entries.values()):
                    row.append(missing)
                continue
            corrected = self.results.samples(peer, cell, "corrected")
            uncorrected = self.results.samples(peer, cell, "uncorrected")
            samples.append(Entry(count(corrected.total), marks=self.marks(peer, cell)))
            for label in labels:
                one_in = PERCENTILES.get(label)
                value = corrected.at(one_in) if one_in else corrected.max_ns
                sent = uncorrected.at(one_in) if one_in else uncorrected.max_ns
                note = f"({milliseconds(sent)})" if sent is not None else ""
                entries[label].append(Entry(NONE if value is None else milliseconds(value), note))
                if not peer.floor and value is not None and all(run.faultless for run in good):
                    fair[label][column] = value
        rows = [Row(f"{label}, ms", bold(entries[label], fair[label], min)) for label in labels]
        return [*rows, Row("samples", samples)]


def bold(
    entries: list[Entry], fair: dict[int, float], better: Callable[[list[float]], float] | None
) -> list[Entry]:
    """Mark the best figure and those that print the same, unless there is only one figure."""
    if better is None or len(fair) < 2:
        return entries
    best = better(list(fair.values()))
    text = next(entries[column].text for column, value in fair.items() if value == best)
    return [
        replace(entry, best=column in fair and entry.text == text)
        for column, entry in enumerate(entries)
    ]


# -- sections ---------------------------------------------------------------------------------------------


def systems(results: Results) -> Section:
    rows = [
        Row(peer.title, [Entry(peer.version or NONE), Entry(peer.secured or NONE)])
        for peer in results.peers
    ]
    return Section("Systems", [Table("", ["version", "secured by"], rows)])


def workloads(results: Results) -> list[Section]:
    sections = []
    for workload, cells in results.workloads().items():
        builder = Builder(results)
        kinds = dict.fromkeys(KINDS[cell.shows] for cell in cells)
        tables = [
            builder.table(cell.title, cell, [*builder.figures(cell), *builder.cost(cell)])
            for cell in cells
        ]
        tables[-1] = replace(tables[-1], below=f"{MEDIANS} {COST}")
        sections.append(Section(f"{workload}: {', '.join(kinds)}", tables, builder.footnotes))
    return sections


def distributions(results: Results) -> list[Section]:
    sections = []
    for cell in results.cells:
        if cell.shows == "open":
            builder = Builder(results)
            table = builder.table("", cell, builder.percentiles(cell), PERCENTILES_BELOW)
            title = f"Latency: {cell.title}"
            sections.append(Section(title, [table], builder.footnotes, cell))
    return sections


def machine(results: Results) -> Section:
    facts = [
        Row(name.replace("_", " "), [Entry(plain(value))]) for name, value in results.facts.items()
    ]
    options = [
        Row(name.replace("_", " "), [Entry(plain(value))])
        for name, value in results.options.items()
    ]
    runs = [run for _, _, run in results.all_runs()]
    tally = ", ".join(
        f"{count(sum(run.status == status for run in runs))} {status}"
        for status in ("ok", "failed", "not run")
    )
    unsteady = sum(not run.steady for run in runs)
    done = [
        Row("duration", [Entry(seconds(results.spent_s))]),
        Row("runs", [Entry(f"{tally}; {count(unsteady)} not steady")]),
        Row("CPU time stolen", [Entry(f"{digits(sum(run.stolen_s for run in runs))} s")]),
    ]
    return Section("Machine and duration", [Table("", [""], [*facts, *options, *done])])


def plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)


def sections(results: Results) -> list[Section]:
    return [
        systems(results),
        *workloads(results),
        *distributions(results),
        machine(results),
    ]


MEDIANS = (
    "Each figure is the median of the rounds, with (lowest-highest). Bold: the best, floors apart, of those that lost "
    f"nothing, got nothing wrong and left nothing unanswered. {NONE}: not measured, or fewer than ten "
    "samples lie beyond the percentile."
)
COST = (
    "CPU and memory: all processes of a run together; memory is the sum of each one's peak. CPU seconds compare only "
    "where every system had the same work, at a fixed rate: elsewhere none is bold."
)
PERCENTILES_BELOW = (
    "All rounds together. From the time a request was due; in parentheses from the time it was sent, which "
    f"leaves out what it waited before (coordinated omission). {NONE}: fewer than ten samples lie beyond."
)
