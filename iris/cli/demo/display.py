"""Show the demo's progress: a live table on a terminal, one line a second elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from iris.cli import output
from iris.cli.demo.figures import Figures, percentile

if TYPE_CHECKING:
    from rich.table import Table

RECENT: Final = 2000
"""Number of latest latencies from which the displayed percentiles are computed."""


class Screen(Protocol):
    """Where progress is shown; a context manager."""

    def note(self, text: str) -> None:
        """Show what happens now."""

    def update(self) -> None:
        """Show the present figures; called a few times a second."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make(figures: Figures) -> Screen:
    """Return a screen for standard output: live on a terminal, plain elsewhere."""
    return LiveScreen(figures) if sys.stdout.isatty() else PlainScreen(figures)


class _Rates:
    """Rates over about the last second."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._samples = [(time.monotonic(), 0, 0, 0, 0)]

    def now(self) -> tuple[float, ...]:
        """Return the numbers published, received, answered and streamed per second."""
        figures = self._figures
        sample = (
            time.monotonic(), figures.published, figures.dashboard.rows, figures.answered, figures.streamed,
        )  # fmt: skip
        self._samples = [*self._samples[-4:], sample]
        first = self._samples[0]
        elapsed = max(sample[0] - first[0], 1e-9)
        return tuple((new - old) / elapsed for new, old in zip(sample[1:], first[1:], strict=True))


class PlainScreen:
    """One line a second, for logs and pipes."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """Print `text` with the time elapsed."""
        output.write(f"{self._elapsed():6.1f} s  {text}\n".encode())

    def update(self) -> None:
        """Print the figures, at most once a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        figures = self._figures
        recent = figures.latencies[-RECENT:]
        output.write(
            f"{self._elapsed():6.1f} s  published {figures.published:,} of {figures.to_publish:,}, received "
            f"{figures.dashboard.rows:,}; answers {figures.answered:,}, p50 {1e3 * percentile(recent, 0.5):.2f} ms, p99 "
            f"{1e3 * percentile(recent, 0.99):.2f} ms; sent through the tunnel {figures.streamed:,} of "
            f"{figures.to_stream:,}, waited {figures.held_back:.1f} s for its reader; members {len(figures.survivors)}\n".encode()
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._figures.started


class LiveScreen:
    """A table that is redrawn four times a second."""

    def __init__(self, figures: Figures) -> None:
        from rich.live import Live

        self._figures = figures
        self._rates = _Rates(figures)
        self._note = ""
        self._live = Live(self._table(), auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.update()
        self._live.stop()

    def note(self, text: str) -> None:
        """Show `text` above the table."""
        self._note = text
        self.update()

    def update(self) -> None:
        """Redraw the table."""
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        from rich.table import Table

        figures = self._figures
        published, received, answered, streamed = self._rates.now()
        recent = figures.latencies[-RECENT:]
        seconds = time.monotonic() - figures.started
        table = Table(title=f"{seconds:5.1f} s  {self._note}", title_justify="left", min_width=76)
        table.add_column("what")
        table.add_column("count", justify="right", min_width=10)
        table.add_column("per second", justify="right", min_width=10)
        table.add_column("", min_width=34)

        def line(what: str, count: int, rate: float | None, more: str = "") -> None:
            table.add_row(what, f"{count:,}", "" if rate is None else f"{rate:,.0f}", more)

        line("flights published", figures.published, published, f"of {figures.to_publish:,}")
        line("flights received", figures.dashboard.rows, received, f"missed {figures.missed:,}")
        line(
            "requests answered", figures.answered, answered,
            f"p50 {1e3 * percentile(recent, 0.5):.2f} ms, p99 {1e3 * percentile(recent, 0.99):.2f} ms",
        )  # fmt: skip
        line(
            "sent through the tunnel", figures.streamed, streamed,
            f"of {figures.to_stream:,}, waited {figures.held_back:.1f} s",
        )  # fmt: skip
        table.add_section()
        for member in figures.members.values():
            if member.killed:
                state = f"killed; {len(figures.reported_after)} callers notified"
            elif member.pid == figures.tunnel_pid:
                state = f"answered {member.answered:,}, reads the tunnel"
            else:
                state = f"answered {member.answered:,}"
            line(f"member {member.pid} received", member.rows, None, state)
        return table
