"""The report of a bench: figures of all processes together, for people or as JSON. It has distributions, not
averages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from iris.cli import output
from iris.cli.bench import samples
from iris.cli.bench.jobs import BEHIND, Load, Outcome
from iris.wire.names import printable

PERCENTILES: Final = {
    "p50": 500_000,
    "p90": 100_000,
    "p99": 10_000,
    "p99.9": 1_000,
    "p99.99": 100,
    "p99.999": 10,
    "p99.9999": 1,
}
"""Percentile name -> samples beyond it, per million."""
MIN_BEYOND: Final = 10
"""Percentiles with fewer samples beyond them are left out: they would show chance, not the system."""
KEPT_UP: Final = 0.99


@dataclass(frozen=True, slots=True)
class Part:
    """Result of one worker; `problem` is the reason if there is no outcome."""

    worker: str
    host: str
    label: str
    outcome: Outcome | None
    problem: str = ""


class Report:
    """Sum of all outcomes of one load."""

    def __init__(self, load: Load, outcomes: list[Outcome], parts: list[Part]) -> None:
        self.load = load
        self.parts = parts
        self.due = sum(o.due for o in outcomes)
        self.sent = sum(o.sent for o in outcomes)
        self.answered = sum(o.answered for o in outcomes)
        self.errors = _sum([o.errors for o in outcomes])
        self.not_sent = _sum([o.not_sent for o in outcomes])
        self.lost = _sum([o.lost for o in outcomes])
        self.sent_rate = sum(o.sent / o.sending_s for o in outcomes)
        self.answered_rate = sum(o.answered / o.total_s for o in outcomes)
        self.latest_ms = max((o.latest_ms for o in outcomes), default=0.0)
        kept = sum((o.due - o.not_sent.get(BEHIND, 0)) / o.sending_s for o in outcomes)
        asked = sum(o.due / load.seconds for o in outcomes)
        self.behind = load.rate is not None and kept < KEPT_UP * asked
        """True if less than 99 % of the wanted rate could be sent."""
        self.uncorrected = samples.merge([o.uncorrected for o in outcomes])
        corrected = [o.corrected for o in outcomes if o.corrected is not None]
        self.corrected = None if load.rate is None else samples.merge(corrected)

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints. Latencies are in microseconds; `histogram` is HDR in
        nanoseconds, base64."""
        load = self.load
        return {
            "verb": load.verb,
            "target": load.target,
            "loop": "closed" if load.rate is None else "open",
            "rate": load.rate,
            "inflight": load.inflight,
            "size": load.size,
            "seconds": load.seconds,
            "connections": load.connections,
            "sent_rate": round(self.sent_rate, 3),
            "answered_rate": round(self.answered_rate, 3),
            "answered_mb_s": round(self.answered_rate * load.size / 1e6, 6),
            "due": self.due,
            "sent": self.sent,
            "answered": self.answered,
            "errors": self.errors,
            "not_sent": self.not_sent,
            "lost": self.lost,
            "behind": self.behind,
            "latest_ms": round(self.latest_ms, 3),
            "corrected": None if self.corrected is None else _distribution(self.corrected),
            "uncorrected": _distribution(self.uncorrected),
            "workers": [_worker(part) for part in self.parts],
        }

    def show(self) -> None:
        """Print the report for people."""
        from rich.table import Table

        load = self.load
        lines: list[str] = []
        write = lines.append
        pace = f"{load.inflight:,} in flight" if load.rate is None else f"{load.rate:,g}/s"
        connections = (
            "" if load.verb != "request" else f", {_plural(load.connections, 'connection')}"
        )
        each = " at each worker" if self.parts and connections else ""
        write(
            f"{load.verb} {load.target}: {pace}, {load.size:,} bytes, {load.seconds:g} s{connections}{each}"
        )
        done = {"request": "answered", "publish": "delivered", "tunnel": "acknowledged"}[load.verb]
        asked = "" if load.rate is None else f"wanted {load.rate:,.1f}/s, "
        write(
            f"  {asked}sent {self.sent_rate:,.1f}/s, {done} {self.answered_rate:,.1f}/s"
            f" ({self.answered_rate * load.size / 1e6:,.3f} MB/s)"
        )
        write(f"  sent {self.sent:,}, {done} {self.answered:,}")
        for title, counts in (
            ("errors", self.errors),
            ("not sent", self.not_sent),
            ("lost", self.lost),
        ):
            if counts:
                write(f"  {title}: " + ", ".join(f"{n} {c:,}" for n, c in counts.items()))
        if self.behind:
            write(f"  {self._why_behind()}")
        for part in self.parts:
            write(f"  worker {_worker_line(part, done)}")
        if load.rate is None:
            write(
                "  closed loop: a slow answer delays the next request, so the time spent waiting is counted once only"
            )
        elif self.errors or self.not_sent or self.lost:
            write(f"  latencies count {done} messages only")
        output.write("".join(f"{printable(line)}\n" for line in lines).encode())
        if not self.answered:
            return
        table = Table(box=None, pad_edge=False)
        table.add_column(f"  {_plural(self.answered, 'sample')}", no_wrap=True)
        columns = [self.uncorrected]
        if self.corrected is not None:
            table.add_column("FROM INTENDED SEND", justify="right", no_wrap=True)
            columns.insert(0, self.corrected)
        table.add_column("FROM ACTUAL SEND", justify="right", no_wrap=True)
        distributions = [_percentiles(column) for column in columns]
        for name in distributions[0]:
            shown = [f"{us / 1000:,.3f} ms" for us in (d[name] for d in distributions)]
            table.add_row(f"  {name}", *shown)
        output.console().print(table)

    def _why_behind(self) -> str:
        what = {
            "request": "this generator could not send at that rate",
            "publish": "this generator, or a full write buffer, could not keep up with that rate",
            "tunnel": "this generator, or the tunnel's credit, could not keep up with that rate",
        }[self.load.verb]
        late = f"the latest message was sent {self.latest_ms:,.1f} ms after it was due"
        return f"FELL BEHIND: {what}; {late}. Lower --rate, or add --workers."


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _percentiles(histogram: Any) -> dict[str, float]:
    """Return percentile name -> microseconds, for those with enough samples beyond them, and the maximum."""
    count = histogram.get_total_count()
    found = {
        name: histogram.get_value_at_percentile(100 - beyond / 10_000) / 1000
        for name, beyond in PERCENTILES.items()
        if count * beyond >= MIN_BEYOND * 1_000_000
    }
    if count:
        found["max"] = histogram.get_max_value() / 1000
    return found


def _distribution(histogram: Any) -> dict[str, Any]:
    return {
        "samples": histogram.get_total_count(),
        "latency_us": _percentiles(histogram),
        "histogram": histogram.encode().decode(),
    }


def _worker(part: Part) -> dict[str, Any]:
    named: dict[str, Any] = {"worker": part.worker, "host": part.host, "label": part.label}
    outcome = part.outcome
    if outcome is None:
        return {**named, "problem": part.problem}
    return {
        **named,
        "due": outcome.due,
        "sent": outcome.sent,
        "answered": outcome.answered,
        "sent_rate": round(outcome.sent / outcome.sending_s, 3),
        "errors": outcome.errors,
        "not_sent": outcome.not_sent,
        "lost": outcome.lost,
    }


def _worker_line(part: Part, done: str) -> str:
    name = " ".join(filter(None, (part.worker, part.host, part.label)))
    outcome = part.outcome
    if outcome is None:
        return f"{name}: NO RESULT: {part.problem}"
    bad = sum(map(sum, (c.values() for c in (outcome.errors, outcome.not_sent, outcome.lost))))
    rate = outcome.sent / outcome.sending_s
    tail = f", {bad:,} failed" if bad else ""
    return f"{name}: sent {outcome.sent:,} at {rate:,.1f}/s, {done} {outcome.answered:,}{tail}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
