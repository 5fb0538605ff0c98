"""HDR plots: the whole latency distribution on a logarithmic axis of percentiles.

matplotlib is imported when a plot is drawn, so that tables do not need it.
"""

from __future__ import annotations

import io
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reports.latency import PERCENTILES, Distribution
from reports.results import PAIR, TLS, Cell, Peer, Results
from reports.tables import count, digits, share, total

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#d62728",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17a2b0",
    "#e377c2",
    "#8c564b",
    "#b8a000",
    "#7f7f7f",
)
"""Colours of the systems without TLS, in the order of columns; each is readable on white and on black."""
TINT, SHADE = 0.45, 0.55
SATURATED_NS = 1_000_000_000
LOG_FROM = 100
SIZE_INCHES = (10, 6.6)
RIGHT = 1_000_000


class Shades(NamedTuple):
    ink: str
    line: str
    paper: str


PRINT = Shades("#1a1a1a", "#c8c8c8", "#ffffff")
STAND_INS = Shades("#010203", "#040506", "#070809")
PAGE = Shades("currentColor", "var(--line)", "none")
"""The colours of the page, light or dark, that replace `STAND_INS` in an SVG."""


def colours(results: Results) -> dict[str, str]:
    """Return peer name -> colour, the same in every plot. TLS has a tint of the plain system's colour, two servers
    a shade."""
    drawn = [cell for cell in results.cells if cell.shows == "open"]
    chosen: dict[str, str] = {}
    taken = 0
    for peer in results.peers:
        plain = chosen.get(peer.name.removesuffix(TLS).removesuffix(PAIR))
        if plain is not None:
            parts = [int(plain[i : i + 2], 16) for i in (1, 3, 5)]
            if peer.name.endswith(TLS):
                parts = [round(part + TINT * (255 - part)) for part in parts]
            else:
                parts = [round(part * SHADE) for part in parts]
            chosen[peer.name] = "#" + "".join(f"{part:02x}" for part in parts)
        elif any(results.good(peer, cell) for cell in drawn):
            chosen[peer.name] = COLOURS[taken % len(COLOURS)]
            taken += 1
    return chosen


def _limits(curves: list[Distribution]) -> tuple[bool, float | None]:
    """Return whether y is logarithmic, and its upper limit in ms if saturated systems are off the scale."""
    calm = [c for c in curves if (c.at(2) or 0) <= SATURATED_NS and c.curve()[1]]
    if not calm:
        return False, None
    top = max(c.curve()[1][-1] for c in calm)
    lowest = min(c.at(2) or c.curve()[1][0] for c in calm)
    if top > LOG_FROM * max(1, lowest):
        return True, None
    if len(calm) == len(curves):
        return False, None
    median = statistics.median(c.at(2) or 0 for c in calm)
    return False, max(1.05 * top, min(20 * median, 4 * top)) / 1e6


def _title(results: Results, cell: Cell, curves: list[Distribution]) -> str:
    asked = sorted(
        {
            run.figures["asked_rate"] or 0
            for peer in results.peers
            for run in results.good(peer, cell)
        }
    )
    rounds = max((len(results.of(peer, cell)) for peer in results.peers), default=0)
    parts = [f"{cell.workload}: {cell.title}"]
    below = []
    if asked:
        below.append(" and ".join(f"{count(each)}/s" for each in asked) + " asked for")
    below.append(f"{count(sum(c.total for c in curves))} samples")
    below.append("1 round" if rounds == 1 else f"{rounds} rounds together")
    return "\n".join([*parts, ", ".join(below)])


def _label(results: Results, peer: Peer, cell: Cell, top_ms: float | None) -> str:
    good = results.good(peer, cell)
    if not good:
        return f"{peer.title}: failed"
    label = peer.title
    median = results.samples(peer, cell, "corrected").at(2)
    if median is None:
        label += ": too few samples"
    elif top_ms is not None and median > top_ms * 1e6:
        label += f" (off the scale: p50 {digits(median / 1e9)} s)"
    elif median > SATURATED_NS:
        label += f" (p50 {digits(median / 1e9)} s)"
    if unanswered := total(good, "unanswered"):
        label += f" ({share(unanswered, unanswered + total(good, 'answered'))} unanswered)"
    return label


def _axes(
    axes: Axes, shades: Shades, across: float, logarithmic: bool, top_ms: float | None
) -> None:
    ticks = {1: "0 %", **{one_in: f"{label[1:]} %" for label, one_in in PERCENTILES.items()}}
    axes.set_xscale("log")
    axes.set_xlim(1, across)
    axes.set_xticks([x for x in ticks if x <= across], [ticks[x] for x in ticks if x <= across])
    axes.minorticks_off()
    axes.set_xlabel("percentile")
    axes.set_ylabel("latency, ms (logarithmic)" if logarithmic else "latency, ms")
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=top_ms)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    axes.grid(True, color=shades.line, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(shades.line)
    axes.tick_params(which="both", colors=shades.ink)
    axes.xaxis.label.set_color(shades.ink)
    axes.yaxis.label.set_color(shades.ink)


def draw(results: Results, cell: Cell, shades: Shades) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=SIZE_INCHES, facecolor=shades.paper, layout="constrained")
    axes = figure.add_subplot(facecolor=shades.paper)
    measured = [peer for peer in results.peers if results.good(peer, cell)]
    curves = [results.samples(peer, cell, "corrected") for peer in measured]
    logarithmic, top_ms = _limits(curves)
    right = max((c.curve()[0][-1] for c in curves if c.curve()[0]), default=100.0)
    handles, labels = [], []
    by_name = colours(results)
    for peer in results.peers:
        if results.outcome(peer, cell) == "not run":
            continue  # the table has the reason
        labels.append(_label(results, peer, cell, top_ms))
        if peer not in measured:
            handles.append(Line2D([], [], color="none"))
            continue
        colour = by_name[peer.name]
        for kind, style in (("uncorrected", (0, (4, 2))), ("corrected", "-")):
            across, up = results.samples(peer, cell, kind).curve()
            heights = [value / 1e6 for value in up]
            (line,) = axes.plot(across, heights, color=colour, linestyle=style, linewidth=1.7)
        handles.append(line)
    _axes(axes, shades, min(RIGHT, max(100.0, right)), logarithmic, top_ms)
    handles += [
        Line2D([], [], color=shades.ink),
        Line2D([], [], color=shades.ink, linestyle=(0, (4, 2))),
    ]
    labels += ["corrected: from when it was due", "uncorrected: from when it was sent"]
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False, labelcolor=shades.ink
    )
    title = axes.set_title(_title(results, cell, curves), color=shades.ink, loc="left")
    for text in (title, *legend.get_texts()):
        text.set_parse_math(False)  # matplotlib would read it as mathematics
    return figure


def plots(results: Results, directory: Path) -> list[Path]:
    """Draw one PNG per open-loop cell, named by its id. Raises ImportError without matplotlib."""
    paths = []
    for cell in results.cells:
        if cell.shows != "open":
            continue
        figure = draw(results, cell, PRINT)
        paths.append(directory / f"{cell.name}.png")
        figure.savefig(paths[-1], format="png", dpi=120, metadata={"Software": None})
    return paths


def svg(results: Results, cell: Cell) -> str:
    """Return an SVG for use within a page: without prologue and namespaces, with unique ids and the colours of the
    page."""
    import matplotlib

    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": cell.name, "svg.fonttype": "none"}):
        draw(results, cell, STAND_INS).savefig(written, format="svg", metadata=nothing)
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{cell.name}-", text)
    for stand_in, colour in zip(STAND_INS, PAGE, strict=True):
        text = text.replace(stand_in, colour)
    return text.strip()
