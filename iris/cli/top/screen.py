"""What `iris top` shows and how keys change it. A screen is lines of styled text; nothing here knows a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from iris.cli.top.figures import count, cut, padded, per_second, width
from iris.cli.top.tables import VIEWS, Cell, Column, Table, grade
from iris.watch import Network
from iris.wire.names import plural

Span = tuple[str, str]
"""(text, style)."""
Line = list[Span]
NAMES: Final = tuple(VIEWS)
FIRST: Final = {
    name: view(Network(serial=0, time_us=0, interval_s=0.0)).sort for name, view in VIEWS.items()
}
"""View -> the column that it is sorted by at first."""
MIN_TEXT: Final = 20
"""Columns to which a column of text is cut before other columns are left out."""
MAX_TEXT: Final = 40
MIN_FIGURE: Final = 5
"""Columns of a figure at least, so that a table does not move with every sample."""
MAX_FILTER: Final = 64
OTHERS: Final = ("relays", "clusters", "streams", "programs", "drops", "links")
"""Views that are shown with the one that is chosen, if the terminal is wide: beside it, or else below it."""
OTHER_ROWS: Final = 6
MIN_SIDE: Final = 48
"""Columns in which other views are shown beside the one that is chosen."""
WIDE: Final = 140
"""At this width, other views are shown below the chosen one if there is no room beside it."""
STEP: Final = 8
"""The other views begin at a multiple of this, so that they do not move with every sample."""
EDGE: Final = " │ "
SLOW_LINES: Final = 4
WIDE_TABS: Final = 100
"""At this width, the names of views have their numbers."""
KEYS: Final = "q quit  ←→ view  s/S sort  r reverse  / filter  p pause  ? help"
HELP: Final = (
    "1 to 9, ←, →, Tab   choose a view",
    "↑, ↓, PgUp, PgDn    scroll; Home and End go to the first and last row",
    "s, S                sort by the next or previous column that is shown",
    "r                   reverse the order",
    "/                   show only rows with a text; Enter keeps it, Esc removes it",
    "p, space            pause",
    "q, Ctrl-C           quit",
    "",
    "Rates are per second since the sample before. P50 and P99 are of the calls timed in the last 10 s.",
    "LOOP counts how often handlers held up their event loop in the last minute.",
    "A relay that is not asked is known by its links, and has no rates; --also asks more relays.",
)


@dataclass(slots=True)
class Screen:
    """The state that keys change: the view, its order and filter, and how far it is scrolled."""

    view: str = NAMES[0]
    filter: str = ""
    typing: bool = False
    """Whether keys go to the filter."""
    helping: bool = False
    paused: bool = False
    top: int = 0
    """Number of the first row that is shown."""
    quit: bool = False
    sorts: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """View -> (column, whether the order is reversed)."""
    _shown: tuple[str, ...] = ()
    """Titles of the columns on the screen."""
    _rows: int = 0
    _page: int = 1

    # -- keys ------------------------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """Handle one key: a character, or a name such as "left"."""
        if self.typing:
            self._type(key)
        elif self.helping:
            self.helping, self.quit = False, key == "q"
        elif key in ("left", "right", "tab"):
            step = -1 if key == "left" else 1
            self._show(NAMES[(NAMES.index(self.view) + step) % len(NAMES)])
        elif key.isdecimal() and 1 <= int(key) <= len(NAMES):
            self._show(NAMES[int(key) - 1])
        elif key in ("s", "S"):
            self._sort(1 if key == "s" else -1)
        elif key == "r":
            column, reverse = self._order()
            self.sorts[self.view] = column, not reverse
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self.filter = ""
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key in ("?", "h"):
            self.helping = True
        elif key == "q":
            self.quit = True
        else:
            self._scroll(key)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable() and len(self.filter) < MAX_FILTER:
            self.filter += key
        self.top = 0

    def _show(self, view: str) -> None:
        self.view, self.top = view, 0

    def _sort(self, step: int) -> None:
        column, reverse = self._order()
        shown = self._shown or (column,)
        at = shown.index(column) if column in shown else -1
        self.sorts[self.view] = shown[(at + step) % len(shown)], reverse if at < 0 else False

    def _scroll(self, key: str) -> None:
        steps = {"up": -1, "down": 1, "pageup": -self._page, "pagedown": self._page, "home": -self._rows, "end": self._rows}  # fmt: skip
        self.top = max(0, min(self.top + steps.get(key, 0), self._rows - self._page))

    def _order(self) -> tuple[str, bool]:
        """Return the column by which the view is sorted, and whether the order is reversed."""
        return self.sorts.get(self.view, (FIRST[self.view], False))

    # -- drawing ---------------------------------------------------------------------------------------------

    def draw(self, network: Network | None, columns: int, lines: int) -> list[Line]:
        """Return the screen: at most so many lines, none wider than so many columns."""
        if network is None:
            return [fitted([("iris top: waiting for the first sample", "")], columns)][:lines]
        head = [summary(network), self._tabs(network, columns)]
        if self.helping:
            body = [*([(text, "")] for text in HELP)]
        else:
            body = self._body(network, columns, lines - len(head) - 1)
        foot: Line = [(f"/{self.filter}▏" if self.typing else KEYS, "dim" if not self.typing else "")]  # fmt: skip
        middle = body[: max(0, lines - len(head) - 1)]
        blank: list[Line] = [[] for _ in range(lines - len(head) - 1 - len(middle))]
        return [fitted(line, columns) for line in [*head, *middle, *blank, foot][:lines]]

    def _tabs(self, network: Network, columns: int) -> Line:
        line: Line = []
        for number, name in enumerate(NAMES, 1):
            some = f" {len(network.slow)}" if name == "slow" and network.slow else ""
            text = f"{number} {name}{some}" if columns >= WIDE_TABS else f"{name}{some}"
            style = "reverse" if name == self.view else "warn" if some else "dim"
            line += [(text, style), (" ", "")]
        if self.paused:
            line.append(("PAUSED", "warn"))
        return line

    def _body(self, network: Network, columns: int, lines: int) -> list[Line]:
        table = VIEWS[self.view](network)
        notes = [[(problem, "bad")] for problem in network.problems[:2]]
        if self.view != "slow" and network.slow and lines >= 10:
            notes += [[(text, "warn")] for text in slow_lines(network, SLOW_LINES)]
        rows = filtered(table.rows, self.filter)
        if self.filter and not self.typing:
            notes.insert(0, [(f"filter: {self.filter} ({len(rows)} of {plural(len(table.rows), 'row')})", "dim")])  # fmt: skip
        column, reverse = self._order()
        rows = ordered(table, rows, column, reverse)
        space = max(1, lines - 1 - len(notes))
        self._rows, self._page = len(rows), space
        self.top = max(0, min(self.top, len(rows) - space))
        drawn, self._shown = grid(
            table, rows[self.top : self.top + space], columns, column, reverse
        )
        if not rows:
            drawn.append([("no row has this text" if table.rows else table.empty, "dim")])
        left = len(rows) - self.top - space
        if left > 0 or table.more:
            texts = [f"{plural(left, 'row')} below"] * (left > 0) + [table.more] * bool(table.more)
            notes = [[("; ".join(texts), "dim")], *notes]
        room = max(0, lines - len(notes))
        body: list[Line] = [*drawn[:room], *([] for _ in range(room - len(drawn)))]
        taken = max((sum(width(text) for text, _ in line) for line in drawn), default=0)
        taken += -taken % STEP
        if columns - taken >= MIN_SIDE:
            body = beside(body, self._others(network, columns - taken - width(EDGE), room), taken)
        elif columns >= WIDE:
            others = self._others(network, columns, room - len(drawn) - 1)
            body[len(drawn) + 1 : len(drawn) + 1 + len(others)] = others
        return [*body, *notes]

    def _others(self, network: Network, columns: int, lines: int) -> list[Line]:
        """Return the first rows of other views, as many as there is room for."""
        found: list[Line] = []
        for name in OTHERS:
            table = VIEWS[name](network)
            if name == self.view or not table.rows:
                continue
            rows = ordered(table, [*table.rows], table.sort, False)
            drawn, _ = grid(table, rows[:OTHER_ROWS], columns, "", False)
            if len(rows) > OTHER_ROWS:
                drawn.append([(f"{len(rows) - OTHER_ROWS:,} more", "dim")])
            block: list[Line] = [[]] * bool(found) + [[(name, "reverse")], *drawn]
            if len(found) + len(block) > lines:
                break
            found += block
        return found


def summary(network: Network) -> Line:
    """Return the line of sums."""
    away = sum(relay.state == "away" for relay in network.relays)
    up = len(network.relays) - away
    rates = {
        word: getattr(network.totals, f"{word}_rate")
        for word in ("in", "out", "dropped", "refused")
    }
    at = datetime.fromtimestamp(network.time_us / 1e6)  # noqa: DTZ006 - a person's clock
    well = not away and not network.slow and not network.problems
    line: Line = [(f"iris top {at:%H:%M:%S}", "bold")]
    line += [("  ", ""), (plural(up, "relay"), "good" if well else "")]
    if away:
        line += [(", ", ""), (f"{away} away", "bad")]
    total = sum(cluster.total for cluster in network.clusters)
    line.append((f"  {plural(total, 'member')}", ""))
    for word, rate in rates.items():
        style = "bad" if rate and word in ("dropped", "refused") else ""
        shown = "-" if rate is None else per_second(rate)
        line += [("  ", ""), (f"{word} {shown}/s", style)]
    lag = max((stream.lag for stream in network.streams), default=0)
    if lag:
        line.append((f"  lag {count(lag)}", "warn"))
    if unwanted := network.totals.unwanted_rate:
        line.append((f"  unwanted {per_second(unwanted)}/s", "dim"))
    return line


def slow_lines(network: Network, most: int) -> list[str]:
    """Return a line for what is slow, what has been so for longest first."""
    found = [
        f"{each.kind} {each.name} on {each.host}{f' ({each.where})' if each.where else ''}: {'; '.join(each.why)}"
        for each in network.slow[:most]
    ]
    more = len(network.slow) - most
    return [*found, f"{more} more in the view slow"] if more > 0 else found


def filtered(rows: Sequence[tuple[Cell, ...]], wanted: str) -> list[tuple[Cell, ...]]:
    """Return the rows that have a text in one of their cells, upper or lower case."""
    text = wanted.casefold()
    return [row for row in rows if any(text in cell.text.casefold() for cell in row)]


def ordered(
    table: Table, rows: list[tuple[Cell, ...]], column: str, reverse: bool
) -> list[tuple[Cell, ...]]:
    """Return rows by a column: text from a to z and figures from the largest on, or the other way round."""
    index = next((i for i, each in enumerate(table.columns) if each.title == column), 0)
    text = table.columns[index].left

    def place(row: tuple[Cell, ...]) -> tuple[float, str]:
        value = row[index].value
        return (value, "") if isinstance(value, float | int) else (-1.0, value.casefold())

    return sorted(rows, key=place, reverse=reverse if text else not reverse)


def grid(
    table: Table, rows: Sequence[tuple[Cell, ...]], columns: int, sort: str, reverse: bool
) -> tuple[list[Line], tuple[str, ...]]:
    """Return a table as lines of at most so many columns, and the titles of the columns that fit."""
    titles = [_title(each, sort, reverse) for each in table.columns]
    widths = [
        max(
            [
                width(titles[i]),
                0 if each.left else MIN_FIGURE,
                *(min(width(row[i].text), _most(each)) for row in rows),
            ]
        )
        for i, each in enumerate(table.columns)
    ]
    least = [
        min(w, max(width(titles[i]), MIN_TEXT)) if table.columns[i].left else w
        for i, w in enumerate(widths)
    ]
    shown = list(range(len(widths)))
    while len(shown) > 1 and sum(least[i] + 1 for i in shown) - 1 > columns:
        shown.remove(max(shown, key=lambda i: (table.columns[i].rank, i)))
    spare = columns - (sum(widths[i] + 1 for i in shown) - 1)
    for i in sorted(shown, key=lambda i: -widths[i]):  # the widest texts are cut first
        if spare >= 0:
            break
        given = min(widths[i] - least[i], -spare)
        widths[i] -= given
        spare += given
    last = shown[-1]
    if table.columns[last].left and spare > 0:
        full = max((width(row[last].text) for row in rows), default=0)
        widths[last] = max(widths[last], min(full, widths[last] + spare))

    def line(texts: Iterable[Span]) -> Line:
        found: Line = []
        for i, (text, style) in zip(shown, texts, strict=True):
            if found:
                found.append((" ", ""))
            found.append((padded(text, widths[i], left=table.columns[i].left), style))
        return found

    head = line((titles[i], "bold") for i in shown)
    body = [line((row[i].text, row[i].style if i else grade(row)) for i in shown) for row in rows]
    return [head, *body], tuple(table.columns[i].title for i in shown)


def beside(left: list[Line], right: list[Line], columns: int) -> list[Line]:
    """Return lines with others beside them, which begin after so many columns."""
    if not right:
        return left
    found: list[Line] = []
    for number, line in enumerate(left):
        blank = " " * (columns - sum(width(text) for text, _ in line))
        other = right[number] if number < len(right) else []
        found.append([*line, (blank, ""), (EDGE, "dim"), *other])
    return found


def _title(column: Column, sort: str, reverse: bool) -> str:
    if column.title != sort:
        return column.title
    mark = "▲" if reverse != column.left else "▼"
    return column.title + mark if column.left else mark + column.title


def _most(column: Column) -> int:
    return MAX_TEXT if column.left else 1 << 30


def fitted(line: Line, columns: int) -> Line:
    """Return a line cut to so many columns."""
    found: Line = []
    left = columns
    for text, style in line:
        shown = cut(text, left)
        found.append((shown, style))
        left -= width(shown)
        if left <= 0:
            break
    return found


def as_text(network: Network, columns: int, filter: str = "") -> str:
    """Return all tables with rows as plain text."""
    parts = ["".join(text for text, _ in summary(network))]
    parts += [f"problem: {problem}" for problem in network.problems]
    for view in VIEWS.values():
        table = view(network)
        rows = ordered(table, filtered(table.rows, filter), table.sort, False)
        if rows:
            lines, _ = grid(table, rows, columns, "", False)
            parts += [
                "",
                table.name,
                *("".join(text for text, _ in line).rstrip() for line in lines),
            ]
            parts += [table.more] * bool(table.more)
    return "".join(f"{part}\n" for part in parts)
