"""Print the results as Markdown. Figures are medians of the rounds, with the extremes in brackets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
Column = tuple[str, str, str]
"""(title, path of the figure, format)."""

APPEND: Sequence[Column] = (
    ("messages/s", "rate", ",.0f"),
    ("MB/s", "mb_s", ",.1f"),
    ("disk, MB/s", "disk_mb_s", ",.0f"),
    ("of the disk", "disk_ratio", ".3f"),
    ("overwritten, times", "overwritten_times", ".1f"),
)
SINGLE: Sequence[Column] = (
    ("p50, µs", "append_p50_us", ",.0f"),
    ("p99, µs", "append_p99_us", ",.0f"),
    ("bare put, p50, µs", "put_p50_us", ",.0f"),
    ("round trip, p50, µs", "round_trip_p50_us", ",.0f"),
    ("both, µs", "least_us", ",.0f"),
    ("p50 / both", "least_ratio", ".2f"),
)
REPLAY: Sequence[Column] = (
    ("messages", "filled", ",.0f"),
    ("warm, messages/s", "warm.rate", ",.0f"),
    ("warm, MB/s", "warm.mb_s", ",.0f"),
    ("cold, messages/s", "cold.rate", ",.0f"),
    ("cold, MB/s", "cold.mb_s", ",.0f"),
)
LIVE: Sequence[Column] = (
    ("p50 without, µs", "plain.p50_us", ",.0f"),
    ("p50 with, µs", "recorded.p50_us", ",.0f"),
    ("ratio", "p50_ratio", ".2f"),
    ("p99 without, µs", "plain.p99_us", ",.0f"),
    ("p99 with, µs", "recorded.p99_us", ",.0f"),
    ("ratio", "p99_ratio", ".2f"),
    ("sent/s without", "plain.sent_rate", ",.0f"),
    ("sent/s with", "recorded.sent_rate", ",.0f"),
)
COUNTS: Sequence[Column] = (
    ("sent without", "plain.sent", ",.0f"),
    ("received", "plain.received", ",.0f"),
    ("lost", "plain.lost", ",.0f"),
    ("sent with", "recorded.sent", ",.0f"),
    ("received", "recorded.received", ",.0f"),
    ("lost", "recorded.lost", ",.0f"),
    ("recorded", "recorded.log.recorded", ",.0f"),
    ("not recorded", "recorded.log.not_recorded", ",.0f"),
    ("of these reported", "recorded.log.told.messages", ",.0f"),
)
BELOW = {
    "append": "A log keeps a quarter of what a run writes (Iris, NATS: by bytes; Redis: by count, MAXLEN ~); a short run before it shows how much that "
    "is. Disk: 1 MiB and fdatasync in a loop, just before each run.",
    "single": "Bare put: 1 KiB into RocksDB, synced, in one process; round trip: a request of 1 KiB to an echo through the same relay. Both just before each run.",
    "replay": "Warm: just after it was written. Cold: the servers were restarted, and all pages of their files dropped from the page cache; the bytes that stayed "
    "cached are in the JSON (cold_cached_bytes).",
    "live": "Messages of 1 KiB to one subscriber; latencies of the delivered ones, from when each was due. Not recorded: sent and not in the log; reported: not recorded and reported by the log as a gap.",
}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = ["# Durable streams beside other logs", ""]
    reasons: list[str] = []
    for cell in document["cells"]:
        lines += _cell(document, cell, reasons)
    lines += _processes(document)
    if reasons:
        lines += ["## Not run, failed", "", *(f"* {reason}" for reason in reasons), ""]
    lines += ["## Facts", ""]
    facts, options = document["facts"], document["options"]
    lines += [f"* {name}: {plain(value)}" for name, value in {**facts, **options}.items()]
    lines += [f"* {entry['title']}: {entry['version']}" for entry in document["systems"]]
    return "\n".join(lines) + "\n"


def _cell(document: Mapping[str, Any], cell: Run, reasons: list[str]) -> list[str]:
    kind = cell["id"].partition("-")[0]
    columns = {"append": APPEND, "single": SINGLE, "replay": REPLAY, "live": LIVE}[kind]
    head = ["", "durability", *(title for title, _, _ in columns)]
    lines = [
        f"## {cell['title'][0].upper()}{cell['title'][1:]}",
        "",
        row(head),
        row(["---"] * len(head)),
    ]
    for entry in document["systems"]:
        here = [r for r in document["runs"] if (r["system"], r["cell"]) == (entry["name"], cell["id"])]  # fmt: skip
        good = [r["figures"] for r in here if r["status"] == "ok"]
        bad = [r for r in here if r["status"] != "ok"]
        for run in bad:
            reasons.append(f"{entry['title']}, {cell['title']}, round {run['round']}, {run['status']}: {plain(run['reason'])}")  # fmt: skip
        for figures in good[:1]:
            if kind == "replay" and figures["cold"] is None:
                reasons.append(f"{entry['title']}, {cell['title']}, cold, not run: {figures['cold_reason']}")  # fmt: skip
        first = [entry["title"], entry["durability"]]
        if not good:
            first += [bad[0]["status"] if bad else "not run"] + [""] * (len(columns) - 1)
        else:
            first += [figure_text(good, path, form) for _, path, form in columns]
            if bad:
                first[2] += f" ({len(bad)} of {len(here)} {bad[0]['status']})"
        lines.append(row(first))
    counts = []
    if kind == "live":
        head = ["", *(title for title, _, _ in COUNTS)]
        counts = ["", row(head), row(["---"] * len(head))]
        for entry in document["systems"]:
            good = [r["figures"] for r in document["runs"] if (r["system"], r["cell"], r["status"]) == (entry["name"], cell["id"], "ok")]  # fmt: skip
            if good:
                texts = (figure_text(good, path, form) for _, path, form in COUNTS)
                counts.append(row([entry["title"], *texts]))
    return [*lines, *counts, "", BELOW[kind], ""]


def _processes(document: Mapping[str, Any]) -> list[str]:
    lines = ["## Processes", "", "Processor seconds: the median of the rounds, without the start of interpreters. Memory: the most that was resident at once, in any round.", ""]  # fmt: skip
    lines += [row(["load", "system", "process", "processor, s", "memory, MB"]), row(["---"] * 5)]
    for cell in document["cells"]:
        for entry in document["systems"]:
            spent: dict[str, list[Run]] = {}
            for run in document["runs"]:
                if (run["system"], run["cell"]) == (entry["name"], cell["id"]):
                    for process in run.get("processes", ()):
                        spent.setdefault(process["name"], []).append(process)
            for name, found in spent.items():
                cpu_s = statistics.median(each["cpu_s"] for each in found)
                peak = max(each["peak_bytes"] for each in found)
                lines.append(row([cell["id"], entry["title"], name, f"{cpu_s:.2f}", f"{peak / 1e6:,.0f}"]))  # fmt: skip
    return [*lines, ""]


def figure_text(figures: Iterable[Run], path: str, form: str) -> str:
    """Return the median of a figure, with its extremes."""
    found = [value for each in figures if (value := _at(each, path)) is not None]
    if not found:
        return "-"
    median: Callable[[list[float]], float] = statistics.median
    text = format(median(found), form)
    if min(found) == max(found):
        return text
    return f"{text} ({format(min(found), form)}-{format(max(found), form)})"


def _at(figures: Any, path: str) -> float | None:
    for name in path.split("."):
        if not isinstance(figures, Mapping) or name not in figures:
            return None
        figures = figures[name]
    found: float | None = figures
    return found


def row(cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def plain(value: object) -> str:
    """Return a value as text that does not end a cell."""
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
