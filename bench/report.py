"""The results of a comparison as tables, plots and a page.

    python bench/report.py results/latest.json [DIRECTORY]
    python bench/report.py results/latest.json --summary        # one table, on stdout

Writes report.md, report.html and a PNG for each load at a fixed rate, beside the results if no directory is given.
The page is one file without external references. Plots need matplotlib; without it, everything else is written.

The plots follow Tyler Treat's "Benchmarking Message Queue Latency": the whole distribution, not a mean, with and
without the time that a request waited to be sent. Equal results make equal files.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import plots as drawing
from reports.latency import merge, percentile_rows
from reports.page import page
from reports.results import ReportError, Results
from reports.summary import summary
from reports.tables import Entry, Section, Table, sections

__all__ = ["ReportError", "html", "main", "markdown", "merge", "percentile_rows", "plots", "write"]

Document = Mapping[str, Any]
TITLE = "Iris beside other messaging systems"


def _plain(text: str) -> str:
    """Escape text for a table cell in Markdown."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", " ".join(text.split()))


def _entry(entry: Entry) -> str:
    text = f"**{_plain(entry.text)}**" if entry.best else _plain(entry.text)
    marks = f"<sup>{', '.join(entry.marks)}</sup>" if entry.marks else ""
    note = f" <sub>{_plain(entry.note)}</sub>" if entry.note else ""
    return f"{text}{marks}{note}"


def _table(table: Table) -> list[str]:
    lines = [f"### {_plain(table.title)}", ""] if table.title else []
    lines.append(f"| | {' | '.join(map(_plain, table.columns))} |")
    lines.append("|---|" + ("---:|" if any(table.columns) else "---|") * len(table.columns))
    for row in table.rows:
        lines.append(f"| {_plain(row.label)} | {' | '.join(map(_entry, row.entries))} |")
    return [*lines, "", *([_plain(table.below), ""] if table.below else [])]


def _section(section: Section, pictures: set[str]) -> list[str]:
    lines = [f"## {_plain(section.title)}", ""]
    if section.plot and (name := f"{section.plot.name}.png") in pictures:
        lines += [f"![{_plain(section.title)}]({name})", ""]
    for table in section.tables:
        lines += _table(table)
    lines += [f"{number}. {_plain(text)}" for number, text in enumerate(section.footnotes, 1)]
    return [*lines, ""] if section.footnotes else lines


def markdown(document: Document | Results, pictures: Sequence[Path] = ()) -> str:
    """Return the report as Markdown, showing the `pictures` that lie beside it."""
    results = _results(document)
    names = {path.name for path in pictures}
    lines = [f"# {TITLE}", ""]
    for section in sections(results):
        lines += _section(section, names)
    return "\n".join(lines).rstrip() + "\n"


def plots(document: Document | Results, directory: Path) -> list[Path]:
    """Write one PNG per open-loop cell, named by its id. Raises ImportError without matplotlib."""
    return drawing.plots(_results(document), directory)


def html(document: Document | Results, *, with_plots: bool = True) -> str:
    """Return the page. Raises ImportError without matplotlib, unless `with_plots` is off."""
    results = _results(document)
    cells = [cell for cell in results.cells if with_plots and cell.shows == "open"]
    return page(results, TITLE, {cell.name: drawing.svg(results, cell) for cell in cells})


def write(document: Document | Results, directory: Path) -> list[Path]:
    """Write all files, with plots if matplotlib is installed, and print their names."""
    results = _results(document)
    directory.mkdir(parents=True, exist_ok=True)
    can_plot = importlib.util.find_spec("matplotlib") is not None
    pictures = plots(results, directory) if can_plot else []
    text, whole = directory / "report.md", directory / "report.html"
    text.write_text(markdown(results, pictures), encoding="utf-8")
    whole.write_text(html(results, with_plots=can_plot), encoding="utf-8")
    return [text, whole, *pictures]


def _results(document: Document | Results) -> Results:
    return document if isinstance(document, Results) else Results(document)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables, plots and a page of a comparison.")
    parser.add_argument("results", type=Path, help="JSON that the comparison wrote")
    parser.add_argument("directory", type=Path, nargs="?", help="where to (default: beside it)")
    parser.add_argument("--summary", action="store_true", help="print one table, write nothing")
    options = parser.parse_args(arguments)
    try:
        if options.summary:
            print("\n".join(_table(summary(Results.read(options.results)))).rstrip())
            return 0
        written = write(Results.read(options.results), options.directory or options.results.parent)
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    if not any(path.suffix == ".png" for path in written):
        print("report: no plots: matplotlib is not installed, or nothing to draw", file=sys.stderr)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
