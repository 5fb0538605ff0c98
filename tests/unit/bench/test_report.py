"""What a comparison measured is reported whole: no figure without its samples, its losses or its reason."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram

BENCH = Path(__file__).resolve().parents[3] / "bench"
PEERS = ("iris", "nats", "rabbitmq", "zenoh", "nats-tls")
PNG = b"\x89PNG\r\n\x1a\n"
BROKEN = "exit 1 | <no address> & *gone*"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("report")


def histogram(values_ns: Iterator[float] | list[float]) -> HdrHistogram:
    made = HdrHistogram(1, 120_000_000_000, 3)
    for value in values_ns:
        made.record_value(max(1, int(value)))
    return made


def latency(rng: random.Random, samples: int, median_ms: float) -> dict[str, str]:
    """A tail that begins at about p99; the uncorrected latencies have half of it."""
    body = [rng.lognormvariate(0, 0.3) for _ in range(samples)]
    tail = [rng.expovariate(0.5) if rng.random() < 0.02 else 0.0 for _ in range(samples)]
    scale = median_ms * 1e6
    kinds = {"corrected": 1.0, "uncorrected": 0.5}
    return {
        kind: histogram([scale * (b + part * t) for b, t in zip(body, tail, strict=True)])
        .encode()
        .decode()
        for kind, part in kinds.items()
    }


def figures(shows: str, rng: random.Random, samples: int, worth: float) -> dict[str, Any]:
    around = worth * rng.uniform(0.95, 1.05)
    if shows == "publish":
        sent = int(500_000 * around)
        return {
            "sent_rate": sent / 1.5,
            "received_rate": sent / 1.5,
            "received": sent,
            "sent": sent,
            "lost": 0,
            "lossless_rate": 300_000 * around,
        }
    if shows == "open":
        return {
            "asked_rate": 3000,
            "sent_rate": 2999.0,
            "answered": samples,
            "unanswered": 0,
            "errors": 0,
        }
    if shows == "stream":
        return {"rate_mb_s": 800 * around, "messages": 9000, "wrong": 0}
    return {"rate": 12_000 * around, "requests": 24_000, "wrong": 0}


CELLS = (
    ("w1-1k", "W1", "publish 1 KiB, one to one", "publish"),
    ("w3-1", "W3", "request 256 B, one in flight", "closed"),
    ("w3-64", "W3", "request 256 B, 64 in flight", "rate"),
    ("w4-1k-3000", "W4", "request 1 KiB, 16 connections", "open"),
    ("w4-64k-500", "W4", "request 64 KiB, 16 connections", "open"),
    ("w5", "W5", "stream of 64 KiB messages", "stream"),
)


def make_document(samples: int = 2500, rounds: int = 2) -> dict[str, Any]:
    """RabbitMQ fails in W1 and is saturated in one cell; Zenoh does not run in W5; plain NATS loses
    most of what it is sent, at twice the rate of the others."""
    rng = random.Random(7)
    runs: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        for name, _, _, shows in CELLS:
            for rank, peer in enumerate(PEERS):
                run = {"round": number, "peer": peer, "cell": name, "status": "ok", "reason": ""}
                runs.append(run)
                if (peer, shows) == ("rabbitmq", "publish"):
                    run |= {"status": "failed", "reason": BROKEN}
                    continue
                if (peer, shows) == ("zenoh", "stream"):
                    run |= {"status": "not run", "reason": "it has no streams"}
                    continue
                run["figures"] = figures(shows, rng, samples, 1 + 0.1 * rank)
                run["processes"] = [
                    {"name": f"{peer} {i}", "cpu_s": 0.5 + rng.random(), "peak_bytes": 40_000_000}
                    for i in range(3)
                ]
                run |= {"stolen_s": 0.01, "steady": True}
                slow = (peer, name) == ("rabbitmq", "w4-64k-500")
                if shows in ("open", "closed"):
                    run["latency"] = latency(rng, samples, 4000 if slow else 0.3 + 0.2 * rank)
                if shows == "closed":
                    del run["latency"]["corrected"]
                if (peer, shows) == ("nats", "publish"):
                    run["figures"] |= {"received": 495_000, "sent": 1_500_000, "lost": 1_005_000}
                    run["figures"] |= {"sent_rate": 1_000_000.0, "received_rate": 990_000.0}
    titles = {"iris": "Iris", "nats": "NATS", "rabbitmq": "RabbitMQ", "zenoh": "Zenoh"}
    return {
        "facts": {
            "commit": "0123abc",
            "uncommitted_changes": False,
            "cpu": "A processor <fast>",
            "cpus": 2,
            "packages": {"uvloop": "0.21", "pynng": "0.8"},
            "utc": "2026-01-02T03:04:05Z",
            "load_1m_5m_15m": [0.1, 0.2, 0.3],
        },
        "options": {"rounds": rounds, "load_s": 5.0, "burst_s": 1.5, "quick": False},
        "spent_s": 1500.0,
        "peers": [
            {
                "name": peer,
                "title": titles.get(peer, "NATS, TLS"),
                "secured": "sealed end to end" if peer == "iris" else "",
                "version": "1.0",
            }
            for peer in PEERS
        ],
        "cells": [
            dict(zip(("id", "workload", "title", "shows"), cell, strict=True)) for cell in CELLS
        ],
        "runs": runs,
    }


MADE = make_document()


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(MADE)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def column(text: str, title: str, label: str) -> list[str]:
    """What a Markdown table says of each system: the column that begins so, of the first table below the title."""
    _, found, below = text.partition(f"# {title}\n")
    assert found, title
    lines = [row for row in below.partition("\n|---")[0].splitlines() if row.startswith("|")]
    column = next(i for i, head in enumerate(cells(lines[-1])) if head.startswith(label))
    rows = below.partition("\n|---")[2].splitlines()[1:]
    return [
        cells(row)[column] for row in itertools.takewhile(lambda row: row.startswith("|"), rows)
    ]


@pytest.mark.parametrize(
    ("samples", "last"), [(19, None), (20, "p50"), (999, "p90"), (1000, "p99"), (9999, "p99")]
)
def test_a_percentile_needs_ten_samples_beyond_it(
    report: ModuleType, samples: int, last: str | None
) -> None:
    rows = report.percentile_rows(histogram([1000.0 * n for n in range(1, samples + 1)]))
    assert [label for label, _ in rows] == [
        "p50",
        "p90",
        "p99",
        "p99.9",
        "p99.99",
        "p99.999",
        "p99.9999",
        "max",
    ]
    known = [label for label, value in rows if value is not None]
    assert known[-1] == "max"
    assert (known[-2] if known[:-1] else None) == last
    assert dict(rows)["max"] == pytest.approx(1000 * samples, rel=1e-3)


def test_ten_million_samples_reach_six_nines(report: ModuleType) -> None:
    made = HdrHistogram(1, 120_000_000_000, 3)
    made.record_value(1_000_000, 9_999_990)
    made.record_value(5_000_000, 10)
    rows = dict(report.percentile_rows(made))
    assert rows["p99.9999"] == pytest.approx(1_000_000, rel=1e-3)
    assert rows["max"] == pytest.approx(5_000_000, rel=1e-3)


def test_a_histogram_of_nothing_has_no_values(report: ModuleType) -> None:
    assert {value for _, value in report.percentile_rows(histogram([]))} == {None}


def test_percentiles_agree_with_the_histogram(report: ModuleType) -> None:
    rng = random.Random(3)
    made = histogram([rng.lognormvariate(13, 1) for _ in range(30_000)])
    for label, value in report.percentile_rows(made)[:4]:
        assert value == pytest.approx(made.get_value_at_percentile(float(label[1:])), rel=5e-3)


def test_a_merge_has_every_sample_of_every_round(report: ModuleType) -> None:
    parts = [histogram([1e6] * 100), histogram([2e6] * 50), histogram([9e9]), histogram([])]
    merged = report.merge(part.encode() for part in parts)
    assert merged.get_total_count() == 151
    assert merged.get_count_at_value(1_000_000) == 100
    assert merged.get_max_value() == pytest.approx(9e9, rel=1e-3)
    with pytest.raises(ValueError, match="cannot be decoded"):
        report.merge(["bm9uc2Vuc2U="])


def test_tls_comes_after_its_plain_one(report: ModuleType, document: dict[str, Any]) -> None:
    systems = column(report.markdown(document), "request 256 B, 64 in flight", "")
    assert systems == ["Iris", "NATS", "NATS, TLS", "RabbitMQ", "Zenoh"]


def test_what_failed_or_was_not_run_says_so_and_why_once(
    report: ModuleType, document: dict[str, Any]
) -> None:
    text = report.markdown(document)
    assert column(text, "publish 1 KiB, one to one", "received")[3] == "failed<sup>1</sup>"
    assert column(text, "stream of 64 KiB messages", "MB/s")[4] == "not run<sup>1</sup>"
    assert text.count(r"1. failed: exit 1 \| &lt;no address&gt; &amp; \*gone\*") == 1
    assert text.count("1. not run: it has no streams") == 1
    page = report.html(document, with_plots=False)
    assert "<li>failed: exit 1 | &lt;no address&gt; &amp; *gone*</li>" in page
    assert "<no address>" not in page
    assert "<fast>" not in page


def test_a_round_that_failed_is_reported_beside_the_figure_of_the_others(
    report: ModuleType, document: dict[str, Any]
) -> None:
    run = next(r for r in document["runs"] if (r["peer"], r["cell"]) == ("iris", "w3-64"))
    run |= {"status": "failed", "reason": "the caller timed out"}
    text = report.markdown(document)
    assert "1 of 2 rounds" in column(text, "request 256 B, 64 in flight", "requests/s")[0]
    assert "1. failed: the caller timed out" in text


def test_a_round_that_was_not_steady_is_marked(
    report: ModuleType, document: dict[str, Any]
) -> None:
    run = next(r for r in document["runs"] if (r["peer"], r["cell"]) == ("iris", "w5"))
    run["steady"] = False
    text = report.markdown(document)
    assert "<sup>1</sup>" in column(text, "stream of 64 KiB messages", "MB/s")[0]
    assert "1. a round of it was not steady" in text


def test_a_system_has_one_colour_and_with_tls_a_tint_of_it(
    report: ModuleType, document: dict[str, Any]
) -> None:
    chosen = report.drawing.colours(report.Results(document))
    assert len(set(chosen.values())) == len(PEERS)
    assert (chosen["nats"], chosen["nats-tls"]) == ("#1f77b4", "#84b4d6")


def test_a_system_that_has_no_such_load_is_not_in_its_table(
    report: ModuleType, document: dict[str, Any]
) -> None:
    document["runs"] = [r for r in document["runs"] if (r["peer"], r["cell"]) != ("zenoh", "w3-64")]
    text = report.markdown(document)
    assert "Zenoh" not in column(text, "request 256 B, 64 in flight", "")
    assert "Zenoh" in column(text, "request 256 B, one in flight", "")


def test_the_best_is_bold_and_never_one_that_lost(
    report: ModuleType, document: dict[str, Any]
) -> None:
    text = report.markdown(document)
    received = column(text, "publish 1 KiB, one to one", "received")
    assert received[1].startswith("990 k <sub>")
    assert "67 % lost" in received[1]
    assert column(text, "publish 1 KiB, one to one", "sent")[1].startswith("1.00 M")
    assert [cell.startswith("**") for cell in received] == [False, False, True, False, False]
    p50 = column(text, "request 1 KiB, 16 connections", "p50")
    assert [cell.startswith("**") for cell in p50] == [True, False, False, False, False]


def test_one_that_leaves_requests_unanswered_has_not_the_best_latency(
    report: ModuleType, document: dict[str, Any]
) -> None:
    for run in document["runs"]:
        if (run["peer"], run["cell"]) == ("iris", "w4-1k-3000"):
            run["figures"] |= {"unanswered": 1, "errors": 2, "errors_by_name": {"Overloaded": 2}}
    text = report.markdown(document)
    assert column(text, "request 1 KiB, 16 connections", "answered")[0] == (
        "0.04 % unanswered, 4 errors"
    )
    assert column(text, "request 1 KiB, 16 connections", "p50")[1].startswith("**")


def test_a_stream_that_lost_or_spoiled_messages_says_how_many_and_is_not_the_best(
    report: ModuleType, document: dict[str, Any]
) -> None:
    for run in document["runs"]:
        if (run["peer"], run["cell"]) == ("nats-tls", "w5"):
            run["figures"] |= {"lost": 2, "wrong": 1}
    rates = column(report.markdown(document), "stream of 64 KiB messages", "MB/s")
    assert "4 lost, 2 wrong" in rates[2]
    assert [cell.startswith("**") for cell in rates] == [False, False, False, True, False]


def test_a_floor_is_shown_and_not_compared(report: ModuleType, document: dict[str, Any]) -> None:
    document["peers"][0]["floor"] = True
    p50 = column(report.markdown(document), "request 1 KiB, 16 connections", "p50")
    assert [cell.startswith("**") for cell in p50] == [False, True, False, False, False]


def test_what_each_process_used_stands_beside_the_sum(
    report: ModuleType, document: dict[str, Any]
) -> None:
    for run in document["runs"]:
        if (run["peer"], run["cell"]) == ("iris", "w5"):
            run["processes"] = [
                {"name": "relay 0", "cpu_s": 1.0, "peak_bytes": 50e6},
                {"name": "receiver", "cpu_s": 0.5, "peak_bytes": 30e6},
                {"name": "receiver", "cpu_s": 0.25, "peak_bytes": 20e6},
            ]
    text = report.markdown(document)
    used = column(text, "stream of 64 KiB messages", "CPU s")[0]
    assert used == "1.75 <sub>(1.75-1.75); relay 1.00, receiver x 2 0.750</sub>"
    peak = column(text, "stream of 64 KiB messages", "peak MB")[0]
    assert peak.endswith("relay 50.0, receiver x 2 50.0</sub>")


def test_no_rate_without_loss_is_said_to_be_none(
    report: ModuleType, document: dict[str, Any]
) -> None:
    for run in document["runs"]:
        if (run["peer"], run["cell"]) == ("nats", "w1-1k"):
            run["figures"]["lossless_rate"] = None
    assert column(report.markdown(document), "publish 1 KiB, one to one", "highest")[1] == "none"


def test_the_percentiles_are_of_all_rounds(report: ModuleType, document: dict[str, Any]) -> None:
    text = report.markdown(document)
    assert column(text, "Latency: request 1 KiB, 16 connections", "samples") == ["5,000"] * 5
    assert column(text, "Latency: request 1 KiB, 16 connections", "p99.99")[0].startswith("-")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.03124, "0.0312"),
        (4.1, "4.10"),
        (9.999, "10.0"),
        (56.24, "56.2"),
        (999.7, "1,000"),
        (12_345, "12,300"),
    ],
)
def test_figures_have_three_digits(report: ModuleType, value: float, text: str) -> None:
    assert importlib.import_module("reports.tables").digits(value) == text


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (1, "under 0.01 %"),
        (300, "0.03 %"),
        (670_000, "67 %"),
        (999_999, "over 99 %"),
        (1_000_000, "100 %"),
    ],
)
def test_a_loss_is_rounded_neither_to_none_nor_to_all(
    report: ModuleType, lost: int, text: str
) -> None:
    assert importlib.import_module("reports.tables").share(lost, 1_000_000) == text


def test_the_page_refers_to_nothing_outside(report: ModuleType, document: dict[str, Any]) -> None:
    page = report.html(document, with_plots=False)
    assert not re.search(r"https?:|//|@import|<script|<link|\bsrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))


def test_equal_results_make_equal_text(report: ModuleType, document: dict[str, Any]) -> None:
    assert report.markdown(document) == report.markdown(json.loads(json.dumps(document)))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d.pop("facts"), "results: 'facts' is missing"),
        (
            lambda d: d["runs"][0].update(peer="kafka"),
            r"runs\[0\]: peer 'kafka' is not one of iris",
        ),
        (lambda d: d["runs"][0].update(status="fine"), "status 'fine' is not one of ok, failed"),
        (
            lambda d: d["runs"][0]["figures"].pop("lost"),
            r"runs\[0\] \(iris, w1-1k, round 1\): figures: 'lost' is missing",
        ),
        (lambda d: d["runs"][0]["figures"].update(lost=float("nan")), "figures: 'lost' is nan"),
        (lambda d: d["runs"][0].update(stolen_s="much"), "'stolen_s' is 'much'"),
        (lambda d: d["cells"][0].update(id="../up"), r"cells\[0\]: the id '\.\./up' cannot be"),
        (
            lambda d: d["cells"][0].update(shows="art"),
            r"cells\[0\]: shows 'art' is not one of publish",
        ),
        (lambda d: d["runs"].append(d["runs"][0]), "have this run twice"),
        (lambda d: d["peers"].append(d["peers"][0]), "peers: iris more than once"),
        (
            lambda d: d["runs"][5]["latency"].update(uncorrected="AAAA"),
            r"w3-1, round 1\): latency: uncorrected: an HDR histogram cannot be decoded",
        ),
    ],
)
def test_bad_results_are_refused_by_the_name_of_what_is_wrong(
    report: ModuleType, document: dict[str, Any], spoil: Any, says: str
) -> None:
    spoil(document)
    with pytest.raises(report.ReportError, match=says):
        report.markdown(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "No such file"), ("{", "not JSON"), ("[]", "an object was expected")],
)
def test_a_file_that_holds_no_results_is_an_error_with_its_name(
    report: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    says: str,
) -> None:
    path = tmp_path / "latest.json"
    if text is not None:
        path.write_text(text)
    assert report.main([str(path)]) == 1
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert says in shown


def test_without_matplotlib_tables_and_page_are_written(
    report: ModuleType,
    document: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "latest.json"
    path.write_text(json.dumps(document))
    assert report.main([str(path), str(tmp_path / "out")]) == 0
    assert "no plots" in capsys.readouterr().err
    assert {made.name for made in (tmp_path / "out").iterdir()} == {"report.md", "report.html"}


def test_a_summary_has_one_figure_of_each_load_and_system(
    report: ModuleType, document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latest.json"
    path.write_text(json.dumps(document))
    assert report.main([str(path), "--summary"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert len(head.split("|")) == len(PEERS) + 3
    units = [row.split("|")[1].strip() for row in rows]
    assert units[0] == "publish 1 KiB, one to one: messages/s without loss"
    assert [unit for unit in units if "3000" in unit or "16 connections" in unit] == [
        "request 1 KiB, 16 connections: p50, ms",
        "request 1 KiB, 16 connections: p99, ms",
        "request 64 KiB, 16 connections: p50, ms",
        "request 64 KiB, 16 connections: p99, ms",
    ]
    column = [title.strip() for title in head.split("|")].index("RabbitMQ")
    assert rows[0].split("|")[column].strip() == "-", "it failed"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(120)
def test_plots_are_png_files_and_within_the_page(
    report: ModuleType, document: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    document["peers"][3]["title"] = "Zenoh <$x^2$>"
    written = report.write(document, tmp_path)
    pictures = [path for path in written if path.suffix == ".png"]
    assert [path.name for path in pictures] == ["w4-1k-3000.png", "w4-64k-500.png"]
    assert all(path.read_bytes().startswith(PNG) for path in pictures)
    text = (tmp_path / "report.md").read_text()
    assert all(f"]({path.name})" in text for path in pictures)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r"https?:|@import|<script|<link|<image|\bsrc=|xmlns", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', page)) <= set(ids)
    assert "off the scale: p50 4" in page
    assert "Zenoh &lt;$x^2$&gt;" in page
    again = tmp_path / "again"
    report.write(document, again)
    for path in written:
        assert (again / path.name).read_bytes() == path.read_bytes()


@pytest.mark.timeout(120)
def test_only_a_saturated_system_is_off_the_scale(
    report: ModuleType, document: dict[str, Any]
) -> None:
    pytest.importorskip("matplotlib")
    results = report.Results(document)
    for cell in (cell for cell in results.cells if cell.shows == "open"):
        (axes,) = report.drawing.draw(results, cell, report.drawing.PRINT).axes
        heights = sorted(max(line.get_ydata()) for line in axes.lines)
        lowest, highest = axes.get_ylim()
        assert lowest == 0
        saturated = [height for height in heights if height > 1000]
        assert len(saturated) == (2 if cell.name == "w4-64k-500" else 0)
        assert heights[len(heights) - len(saturated) - 1] < highest < 1000


def test_rounds_beside_which_something_else_ran_are_left_out_while_two_others_remain(
    report: ModuleType, document: dict[str, Any]
) -> None:
    document = make_document(rounds=3)
    opened = next(name for name, _, _, shows in CELLS if shows == "open")
    runs = [r for r in document["runs"] if (r["peer"], r["cell"]) == ("iris", opened)]
    results = importlib.import_module("reports.results").Results
    peer, cell = "iris", opened

    def counted() -> int:
        made = results(document)
        there = {p.name: p for p in made.peers}, {c.name: c for c in made.cells}
        return len(made.good(there[0][peer], there[1][cell]))

    assert counted() == len(runs) == 3
    runs[0]["others_s"] = 0.9
    assert counted() == 3
    runs[0]["others_s"] = 1.1
    assert counted() == 2
    assert "is left out" in report.markdown(document)
    # A median needs more than one round: with one undisturbed round left, all count, whatever ran beside them.
    runs[1]["others_s"] = 1.1
    assert counted() == 3
