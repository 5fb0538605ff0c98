"""The summary: every figure compared with the file."""

from __future__ import annotations

from iris.cli.demo.data import Tally, Truth
from iris.cli.demo.figures import Figures, percentile


def compare(figures: Figures, truth: Truth) -> tuple[list[str], bool]:
    """Return the lines of the summary, and True if all figures agree and nothing was lost."""
    checks = [
        (figures.finished, "the demo ran to its end"),
        _rows("dashboard", figures.dashboard.rows, figures.dashboard.checksum, truth.all),
        *(
            _rows(f"member {member.pid}", member.rows, member.checksum, truth.all)
            for member in figures.survivors
        ),
        _rows(
            f"tunnel for airline {figures.carrier}", *figures.read, truth.by_carrier.get(figures.carrier, Tally()),
            f"; the sender waited {figures.held_back:.1f} s for its slow reader",
        ),
        _averages(figures, truth),
        _requests(figures),
        *(_kill(figures, member.pid) for member in figures.members.values() if member.killed),
    ]  # fmt: skip
    agrees = all(ok for ok, _ in checks) and figures.lost == 0
    lines = ["", *(f"{'ok  ' if ok else 'FAIL'}  {text}" for ok, text in checks)]
    if figures.dropped:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in figures.dropped.items())
        lines.append(f"      the relay dropped, for the killed member: {causes}")
    lines.append(
        f"{'ok  ' if agrees else 'FAIL'}  sent {figures.published + figures.asked:,} ({figures.published:,} flights + "
        f"{figures.asked:,} requests), refused {figures.refused:,}, "
        f"received {figures.dashboard.rows + figures.answered:,}, lost {figures.lost:,}"
    )
    return lines, agrees


def _rows(who: str, rows: int, checksum: int, truth: Tally, more: str = "") -> tuple[bool, str]:
    agrees = (rows, checksum) == (truth.rows, truth.checksum)
    compared = (
        "as in the file"
        if agrees
        else f"but the file has {truth.rows:,}, checksum {truth.checksum:016x}"
    )
    return agrees, f"{who}: {rows:,} flights, checksum {checksum:016x}, {compared}{more}"


def _averages(figures: Figures, truth: Truth) -> tuple[bool, str]:
    wanted = truth.all.departures
    # A route whose flights were all cancelled has no delay; members answer with 0 departures.
    given = {route: answer for route, answer in figures.averages.items() if answer[0]}
    wrong = [
        route for route in wanted.keys() | given.keys() if wanted.get(route) != given.get(route)
    ]
    if wrong:
        return False, f"average delays: {len(wrong)} of {len(wanted)} routes differ from the file"
    busiest = max(wanted, key=lambda route: wanted[route][0])
    count, minutes = wanted[busiest]
    return True, (
        f"average delays of {len(wanted)} routes, as in the file; e.g. {minutes / count:.1f} min for {busiest[1]} from "
        f"{busiest[0]}"
    )


def _requests(figures: Figures) -> tuple[bool, str]:
    fine = figures.timed_out == 0 and figures.asked == figures.answered
    latencies = figures.latencies
    return fine, (
        f"requests: {figures.asked:,} asked, {figures.answered:,} answered, {figures.timed_out:,} timeouts; "
        f"p50 {1e3 * percentile(latencies, 0.5):.2f} ms, p99 {1e3 * percentile(latencies, 0.99):.2f} ms, "
        f"slowest {1e3 * percentile(latencies, 1.0):.0f} ms"
    )


def _kill(figures: Figures, pid: int) -> tuple[bool, str]:
    reported = figures.reported_after
    return bool(reported), (
        f"member {pid} was killed with {len(reported)} requests in flight; their callers got an error within "
        f"{1e3 * max(reported, default=0.0):.1f} ms and sent them again"
    )
