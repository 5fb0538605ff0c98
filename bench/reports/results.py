"""The results of a benchmark, checked when read, so that the shape of a `Results` can be relied on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.latency import Distribution, merged_distribution

FIGURES = {
    "publish": ("sent_rate", "received_rate", "received", "lost"),
    "closed": ("rate", "wrong"),
    "rate": ("rate", "wrong"),
    "open": ("asked_rate", "sent_rate", "answered", "unanswered", "errors"),
    "stream": ("rate_mb_s", "wrong"),
}
FAULTS = ("lost", "wrong", "unanswered", "errors")
LATENCIES = {"closed": ("uncorrected",), "open": ("corrected", "uncorrected")}
STATUSES = ("ok", "failed", "not run")
TLS, PAIR = "-tls", "-2"
"""Suffixes of system names: the same system with TLS, or with two servers."""


class ReportError(ValueError):
    """The results cannot be reported; the message names the part and the reason."""


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    secured: str
    version: str
    floor: bool
    """True for a floor, which is not a system to use: it is not compared for the best figure."""


@dataclass(frozen=True)
class Cell:
    """One load. `name` is its id and the name of its plot's file."""

    name: str
    workload: str
    title: str
    shows: str

    @property
    def latency(self) -> str:
        """Latency that the table shows: the corrected one if sends have an intended time."""
        return LATENCIES[self.shows][0]


DISTURBED = 0.2
"""Share of a processor: if other programs use more, a run at a fixed rate does not count."""


@dataclass(frozen=True)
class Process:
    """Resources that one process used in a run; several may have one name."""

    name: str
    cpu_s: float
    peak_bytes: float


@dataclass(frozen=True)
class Run:
    status: str
    reason: str
    steady: bool
    figures: Mapping[str, float | None]
    processes: tuple[Process, ...]
    stolen_s: float
    latency: Mapping[str, str]
    others_s: float = 0.0
    """Processor seconds of processes outside the run."""

    @property
    def faultless(self) -> bool:
        """True if nothing was lost, wrong or unanswered; only then can a figure be the best."""
        return not any(self.figures.get(fault) for fault in FAULTS)

    def total(self, what: str) -> float | None:
        """Return `cpu_s` or `peak_bytes` of all processes together."""
        return sum(getattr(used, what) for used in self.processes) if self.processes else None

    def samples(self, kind: str) -> Distribution:
        return merged_distribution((self.latency[kind],))


def part(source: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(source, Mapping):
        raise ReportError(f"{where}: an object was expected, not {source!r:.60}")
    if key not in source:
        raise ReportError(f"{where}: {key!r} is missing")
    if not isinstance(source[key], kind):
        raise ReportError(f"{where}: {key!r} is {source[key]!r:.60}")
    if isinstance(source[key], float) and not math.isfinite(source[key]):
        raise ReportError(f"{where}: {key!r} is {source[key]}")
    return source[key]


def _one_of(value: str, known: Any, what: str, where: str) -> str:
    if value not in known:
        raise ReportError(f"{where}: {what} {value!r} is not one of {', '.join(known)}")
    return value


def _peer(source: Any, where: str) -> Peer:
    name = part(source, "name", str, where)
    texts = (str(source.get(key) or "") for key in ("secured", "version"))
    return Peer(name, part(source, "title", str, where), *texts, source.get("floor") is True)


def _cell(source: Any, where: str) -> Cell:
    name, workload, title, shows = (
        part(source, key, str, where) for key in ("id", "workload", "title", "shows")
    )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ReportError(f"{where}: the id {name!r} cannot be used as the name of a file")
    return Cell(name, workload, title, _one_of(shows, FIGURES, "shows", where))


def _run(source: Any, shows: str, where: str) -> Run:
    status = _one_of(part(source, "status", str, where), STATUSES, "status", where)
    reason = str(source.get("reason") or "")
    if status != "ok":
        return Run(status, reason, True, {}, (), 0.0, {})
    figures = part(source, "figures", Mapping, where)
    there = [key for key in (*FAULTS, "lossless_rate") if key in figures]
    for key in (*FIGURES[shows], *there):
        part(figures, key, (int, float, type(None)), f"{where}: figures")
    processes = source.get("processes") or []
    if not isinstance(processes, list):
        raise ReportError(f"{where}: 'processes' is {processes!r:.60}")
    used = [
        Process(
            part(process, "name", str, f"{where}: processes").rstrip(" 0123456789"),
            part(process, "cpu_s", (int, float), f"{where}: processes"),
            part(process, "peak_bytes", (int, float), f"{where}: processes"),
        )
        for process in processes
    ]
    run = Run(
        status,
        reason,
        source.get("steady") is not False,
        figures,
        tuple(used),
        part({"stolen_s": 0.0, **source}, "stolen_s", (int, float), where),
        source.get("latency") or {},
        part({"others_s": 0.0, **source}, "others_s", (int, float), where),
    )
    for kind in LATENCIES.get(shows, ()):
        part(run.latency, kind, str, f"{where}: latency")
        try:
            run.samples(kind)
        except ValueError as error:
            raise ReportError(f"{where}: latency: {kind}: {error}") from error
    return run


class Results:
    """Peers and cells in the order of columns and rows, and the runs of each pair."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.facts: Mapping[str, Any] = part(document, "facts", Mapping, "results")
        self.options: Mapping[str, Any] = part(document, "options", Mapping, "results")
        self.spent_s = float(part(document, "spent_s", (int, float), "results"))
        peers, cells, runs = (
            part(document, key, list, "results") for key in ("peers", "cells", "runs")
        )
        self.peers = _tls_after_plain([_peer(p, f"peers[{i}]") for i, p in enumerate(peers)])
        self.cells = [_cell(cell, f"cells[{i}]") for i, cell in enumerate(cells)]
        for what, names in (
            ("peers", [peer.name for peer in self.peers]),
            ("cells", [cell.name for cell in self.cells]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ReportError(f"{what}: {', '.join(twice)} more than once")
        shows = {cell.name: cell.shows for cell in self.cells}
        self._runs: dict[tuple[str, str], dict[int, Run]] = {}
        for i, source in enumerate(runs):
            where = f"runs[{i}]"
            peer = part(source, "peer", str, where)
            cell = part(source, "cell", str, where)
            number = part(source, "round", int, where)
            _one_of(peer, [known.name for known in self.peers], "peer", where)
            _one_of(cell, shows, "cell", where)
            where += f" ({peer}, {cell}, round {number})"
            rounds = self._runs.setdefault((peer, cell), {})
            if number in rounds:
                raise ReportError(f"{where}: the results have this run twice")
            rounds[number] = _run(source, shows[cell], where)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results. Raises ReportError if the file cannot be read, is not JSON, or has another content."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ReportError(f"{path}: not JSON: {error}") from error
        except ReportError as error:
            raise ReportError(f"{path}: {error}") from error

    def workloads(self) -> dict[str, list[Cell]]:
        grouped: dict[str, list[Cell]] = {}
        for cell in self.cells:
            grouped.setdefault(cell.workload, []).append(cell)
        return grouped

    def of(self, peer: Peer, cell: Cell) -> list[Run]:
        """Return all rounds of a pair in order, also failed ones."""
        return [run for _, run in sorted(self._runs.get((peer.name, cell.name), {}).items())]

    def good(self, peer: Peer, cell: Cell) -> list[Run]:
        """Return the rounds that count. For a fixed rate, these are the rounds without other work on the machine,
        if there are two."""
        done = [run for run in self.of(peer, cell) if run.status == "ok"]
        quiet = [run for run in done if not self.disturbed(cell, run)]
        return quiet if len(quiet) >= 2 else done

    def disturbed(self, cell: Cell, run: Run) -> bool:
        """Return whether others used a fifth of a processor while a fixed rate was measured."""
        load_s = self.options.get("load_s") or 0.0
        return cell.shows == "open" and run.others_s > DISTURBED * load_s > 0

    def outcome(self, peer: Peer, cell: Cell) -> str:
        """Return "ok" if a round was ok, else "failed" if a round failed, else "not run"."""
        seen = {run.status for run in self.of(peer, cell)}
        return next((status for status in STATUSES if status in seen), "not run")

    def samples(self, peer: Peer, cell: Cell, kind: str) -> Distribution:
        """Return the distribution of all good rounds together."""
        return merged_distribution(tuple(run.latency[kind] for run in self.good(peer, cell)))

    def all_runs(self) -> list[tuple[Peer, Cell, Run]]:
        return [(p, c, run) for p in self.peers for c in self.cells for run in self.of(p, c)]


def _tls_after_plain(peers: list[Peer]) -> list[Peer]:
    names = {peer.name for peer in peers}
    index = {peer.name: i for i, peer in enumerate(peers)}

    def order(peer: Peer) -> tuple[int, bool]:
        plain = peer.name.removesuffix(TLS)
        return index[plain if plain in names else peer.name], plain != peer.name

    return sorted(peers, key=order)
