"""Print the results of bench/bucket.py as Markdown: medians of the rounds, with the extremes in brackets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from streams.report import Column, Run, figure_text, plain, row

PLACES: Final = {"file": "a directory of this disk", "s3": "S3 (moto)"}
TABLES: Final[Mapping[str, tuple[str, Sequence[Column], str]]] = {
    "append": (
        "Appends of 1 KiB, pipelined",
        (
            ("messages/s", "rate", ",.0f"),
            ("MB/s", "mb_s", ",.1f"),
            ("obstore's PUTs, MB/s", "bare_mb_s", ",.1f"),
            ("of these", "ratio", ".2f"),
            ("synced PUTs, MB/s", "synced_mb_s", ",.1f"),
            ("of these", "synced_ratio", ".2f"),
            ("bytes an object", "object_bytes", ",.0f"),
            ("PUTs per million", "puts_per_million", ",.0f"),
        ),
        "16 calls of 1,000 messages at a time. PUTs: objects of 4 MiB, 4 at a time, just before or after each run. obstore does not sync files.",
    ),
    "single": (
        "One append of 1 KiB after the other",
        (
            ("PUT, p50, ms", "put_p50_ms", ",.1f"),
            ("append, p50, ms", "append_p50_ms", ",.1f"),
            ("p90", "append_p90_ms", ",.1f"),
            ("wanted at most", "most_ms", ",.1f"),
            ("after a pause, p50, ms", "paused_p50_ms", ",.1f"),
            ("p90", "paused_p90_ms", ",.1f"),
        ),
        "PUT: 1.5 KiB, one after the other, synced. Wanted at most: 100 ms, the PUT and 5 ms. After a pause: 150 ms after the append before.",
    ),
    "trickle": (
        "A thousand messages each second",
        (
            ("messages/s", "rate", ",.0f"),
            ("PUTs/s", "puts_per_s", ",.1f"),
            ("PUTs per million", "puts_per_million", ",.0f"),
        ),
        "Single appends, evenly.",
    ),
    "jetstream": (
        "JetStream with three replicas",
        (
            ("messages/s", "rate", ",.0f"),
            ("MB/s", "mb_s", ",.1f"),
            ("never acknowledged", "missing", ",.0f"),
        ),
        "At most 4,000 messages of 1 KiB unacknowledged, as of one client of Iris. Three servers of this machine, which share its disk.",
    ),
    "kills": (
        "SIGKILL of what serves the log, and its disk deleted",
        (
            ("s to the next acknowledgement", "failover_s", ".2f"),
            ("acknowledged", "acknowledged", ",.0f"),
            ("lost", "lost", ",.0f"),
            ("doubled", "doubled", ",.0f"),
        ),
        "64 writers, each the next message when the one before is acknowledged. Acknowledged, lost and doubled are of one run.",
    ),
}
TITLES: Final = {
    "default": "sync_interval by default: acknowledged when two of three kernels have it, synced every 2 minutes",
    "always": "sync_interval: always: acknowledged when two of three disks have it",
    "iris-file": "Iris, a directory",
    "iris-s3": "Iris, S3 (moto)",
    "nats": "JetStream, three replicas, default",
    **PLACES,
}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = ["# Streams in a bucket", ""]
    reasons = []
    for cell, (title, columns, below) in TABLES.items():
        runs = [run for run in document["runs"] if run["cell"] == cell]
        if not runs:
            continue
        head = ["", *(name for name, _, _ in columns)]
        lines += [f"## {title}", "", row(head), row(["---"] * len(head))]
        for variant in dict.fromkeys(run["variant"] for run in runs):
            lines.append(_line(variant, [run for run in runs if run["variant"] == variant], columns))  # fmt: skip
        reasons += [f"{title}, {run['variant']}, round {run['round']}: {plain(run['reason'])}" for run in runs if run["status"] != "ok"]  # fmt: skip
        lines += ["", below, ""]
    if reasons:
        lines += ["## Failed", "", *(f"* {reason}" for reason in reasons), ""]
    lines += ["## Facts", ""]
    facts = {**document["facts"], **document["options"]}
    return "\n".join([*lines, *(f"* {name}: {plain(value)}" for name, value in facts.items())]) + "\n"  # fmt: skip


def _line(variant: str, runs: Sequence[Run], columns: Sequence[Column]) -> str:
    good = [run["figures"] for run in runs if run["status"] == "ok"]
    if not good:
        return row([TITLES[variant], "failed", *[""] * (len(columns) - 1)])
    return row([TITLES[variant], *(figure_text(good, path, form) for _, path, form in columns)])
