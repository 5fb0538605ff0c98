"""One self-contained HTML page, including style and plots."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from reports.results import Results
from reports.tables import Entry, Section, Table, plain, sections

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #666c73; --line: #d4d7db; --best: #0a6b2d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #15171a; --soft: #9aa1a9; --line: #3a3f45; --best: #6fd391; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
a { color: inherit; }
p, ol { max-width: 60rem; }
.soft, small, sup { color: var(--soft); }
.below, ol { font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
th:first-child { position: sticky; left: 0; max-width: 16rem; text-align: left; font-weight: 400; background: var(--paper); }
td small { display: block; font-size: .78rem; }
td b { color: var(--best); }
.facts td { text-align: left; overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 36rem; max-width: 60rem; height: auto; color: var(--ink); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
@media (max-width: 40rem) { body { padding: .6rem; } th:first-child { max-width: 8.5rem; } th, td { padding: .3rem .4rem; } }
"""


def _cell(entry: Entry) -> str:
    text = f"<b>{escape(entry.text)}</b>" if entry.best else escape(entry.text)
    marks = f"<sup>{escape(', '.join(entry.marks))}</sup>" if entry.marks else ""
    note = f" <small>{escape(entry.note)}</small>" if entry.note else ""
    return f"<td>{text}{marks}{note}</td>"


def _table(table: Table) -> str:
    lines = [f"<h3>{escape(table.title)}</h3>"] if table.title else []
    texts = not any(table.columns)
    lines.append(f'<div class="wide"><table{" class=facts" if texts else ""}>')
    if not texts:
        heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
        lines.append(f"<thead><tr><th></th>{heads}</tr></thead>")
    lines.append("<tbody>")
    for row in table.rows:
        cells = "".join(_cell(entry) for entry in row.entries)
        lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    if table.below:
        lines.append(f'<p class="below soft">{escape(table.below)}</p>')
    return "\n".join(lines)


def _section(section: Section, number: int, plots: Mapping[str, str]) -> str:
    lines = [f'<section id="s{number}">', f"<h2>{escape(section.title)}</h2>"]
    if section.plot and (plot := plots.get(section.plot.name)):
        lines.append(f"<figure>{plot}</figure>")
    lines += [_table(table) for table in section.tables]
    if section.footnotes:
        notes = "".join(f"<li>{escape(text)}</li>" for text in section.footnotes)
        lines.append(f'<ol class="soft">{notes}</ol>')
    return "\n".join([*lines, "</section>"])


def page(results: Results, title: str, plots: Mapping[str, str]) -> str:
    """Return the page. `plots` maps the id of a cell to its SVG element, which is inserted unchanged."""
    every = sections(results)
    links = "".join(
        f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(every)
    )
    about = f"commit {plain(results.facts.get('commit'))}, {plain(results.facts.get('utc'))}"
    body = "\n".join(_section(section, number, plots) for number, section in enumerate(every))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(about)}</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""
