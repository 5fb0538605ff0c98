"""The tables of `iris top`, from a network: their columns, and a row of cells for each thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from iris.cli.top.figures import (
    age,
    change,
    count,
    milliseconds,
    per_second,
    share,
    signed_ms,
    size,
)
from iris.watch import Network

Style = Literal["", "good", "bad", "warn", "dim"]
Value = str | float


@dataclass(frozen=True, slots=True)
class Column:
    """One column. On a narrow screen those of the highest `rank` are left out first."""

    title: str
    rank: int = 0
    left: bool = False
    """Whether it is text, which stands at the left and may be cut."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what it is sorted by."""

    text: str
    value: Value
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Table:
    """One view: rows of as many cells as there are columns."""

    name: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]
    sort: str
    """Column that it is sorted by at first."""
    empty: str
    """What is shown if there are no rows."""
    more: str = ""
    """What is left out of it; empty if nothing is."""


def _text(value: str, style: Style = "") -> Cell:
    return Cell(value, value, style)


def _number(
    value: float | None, show: Callable[[float], str] = count, style: Style = "", *, marked: bool = False
) -> Cell:  # fmt: skip
    """Return a cell of a figure; with `marked`, in the style only if it is over 0."""
    if value is None:
        return Cell("-", -1.0, "dim")
    return Cell(show(value), value, style if value > 0 or not marked else "")


def _rate(value: float | None) -> Cell:
    return _number(value, per_second)


def _bad_rate(value: float | None) -> Cell:
    return _number(value, per_second, "bad", marked=True)


def _state(state: str) -> Cell:
    styles: dict[str, Style] = {"up": "good", "unasked": "dim", "draining": "warn", "suspended": "warn"}  # fmt: skip
    return _text(state, styles.get(state, "bad"))


def grade(row: Sequence[Cell]) -> Style:
    """Return the colour of a row: that of the worst in it, good if nothing is wrong, dim if nothing is known of it."""
    if row[0].style == "dim":
        return "dim"
    styles = {cell.style for cell in row}
    return next((style for style in _WORST if style in styles), "good")


_WORST: Final[tuple[Style, ...]] = ("bad", "warn")


def _host(relay_host: str, relay: str) -> Cell:
    return _text(relay_host or relay[:8])


def members(network: Network) -> Table:
    """Members by cluster and host."""
    slow = {each.who for each in network.slow if each.kind == "member"}

    def rows() -> Iterator[tuple[Cell, ...]]:
        for cluster in network.clusters:
            for member in cluster.members:
                lost = sum(member.dropped_rates.values())
                yield (
                    _text(cluster.name), _text(member.host), _text(member.called, "warn" if member.id in slow else ""), _state(member.state),
                    _rate(member.handled_rate), _bad_rate(member.failed_rate), _number(member.p50_ms, milliseconds), _number(member.p99_ms, milliseconds),
                    _number(member.queued, style="warn", marked=True), _number(member.running), _number(member.age_s, age),
                    _bad_rate(lost), _number(member.loop_held, style="warn", marked=True), _bad_rate(member.refused_rate), _number(member.max_ms, milliseconds),
                    _text(member.version), _text(member.iris), _text(member.id.rpartition(".")[2]),
                )  # fmt: skip
            if cluster.other_members:
                yield _rest(cluster.name, cluster.other_members, cluster.keyed)

    columns = (
        Column("CLUSTER", left=True), Column("HOST", left=True), Column("PROGRAM", left=True), Column("STATE", 2, left=True),
        Column("HANDLED/S"), Column("FAILED/S", 1), Column("P50", 2), Column("P99"), Column("QUEUE"), Column("RUN", 3), Column("AGE", 4),
        Column("DROP/S", 5), Column("LOOP", 6), Column("REFUSED/S", 7), Column("MAX", 8), Column("VERSION", 9, left=True), Column("IRIS", 10, left=True),
        Column("SERIAL", 11, left=True),
    )  # fmt: skip
    empty = "no members in the clusters for which this keyring has keys"
    return Table("members", columns, list(rows()), "CLUSTER", empty)


def _rest(cluster: str, other: int, keyed: bool) -> tuple[Cell, ...]:
    what = f"{other:,} more" if keyed else f"{other:,} (no key here)"
    blank = Cell("", -1.0)
    return (_text(cluster, "dim"), _text(""), Cell(what, "\uffff", "dim"), *[blank] * 15)


def clusters(network: Network) -> Table:
    """Clusters, with the sums of their members."""
    rows = [
        (
            _text(c.name, "" if c.keyed else "dim"), _number(c.total), _rate(c.handled_rate), _bad_rate(c.failed_rate), _bad_rate(c.refused_rate),
            _number(c.p50_ms, milliseconds), _number(c.p99_ms, milliseconds), _number(c.queued, style="warn", marked=True), _number(c.running),
            _bad_rate(c.expired_rate), _number(sum(c.sites.values())), _number(sum(c.other_keys.values())),
        )
        for c in network.clusters
    ]  # fmt: skip
    columns = (
        Column("CLUSTER", left=True), Column("MEMBERS"), Column("HANDLED/S"), Column("FAILED/S"), Column("REFUSED/S", 2), Column("P50", 1),
        Column("P99"), Column("QUEUE"), Column("RUN", 1), Column("EXPIRED/S", 4), Column("IN SITES", 3), Column("OTHER KEYS", 5),
    )  # fmt: skip
    return Table(
        "clusters", columns, rows, "CLUSTER", "no clusters", _left_out(network, "clusters")
    )


def relays(network: Network) -> Table:
    """Relays: those that are asked with their totals, others by their links."""
    rows = [
        (
            _host(r.host, r.id), _state(r.state), _number(r.uptime_s, age), _rate(r.in_rate), _rate(r.out_rate), _number(r.unwanted_rate, per_second, "dim"), _bad_rate(r.dropped_rate),
            _bad_rate(r.refused_rate), _bad_rate(r.expired_rate), _number(r.held, style="warn", marked=True), _number(r.queued_bytes, size),
            _number(r.sessions), _number(r.links), _text(r.site), _text(r.id[:8]), _text(r.error or r.address, "bad" if r.error else "dim"),
        )
        for r in network.relays
    ]  # fmt: skip
    columns = (
        Column("HOST", left=True), Column("STATE", left=True), Column("UP", 2), Column("IN/S"), Column("OUT/S"), Column("UNWANTED/S", 2), Column("DROP/S"),
        Column("REFUSED/S", 3), Column("EXPIRED/S", 7), Column("HELD"), Column("QUEUED", 1), Column("SESSIONS", 4), Column("LINKS", 5),
        Column("SITE", 8, left=True), Column("RELAY", 9, left=True), Column("ADDRESS OR ERROR", 6, left=True),
    )  # fmt: skip
    return Table("relays", columns, rows, "HOST", "no relays", _left_out(network, "relays"))


def links(network: Network) -> Table:
    """Links between relays, as the relays that are asked see them."""
    rows = [
        (
            _host(each.relay_host, each.relay), _host(each.peer_host, each.peer), _state(each.state), _number(each.rtt_ms, milliseconds),
            _rate(each.in_rate), _rate(each.out_rate), _number(each.in_bytes_rate, size), _number(each.queued_bytes, size),
            _number(each.held, style="warn", marked=True), _number(each.members), _clock(each.clock_offset_ms, each.clock_error_ms),
            _text(each.error or each.address, "bad" if each.error else "dim"),
        )
        for each in network.links
    ]  # fmt: skip
    columns = (
        Column("FROM", left=True), Column("TO", left=True), Column("STATE", left=True), Column("RTT"), Column("IN/S"), Column("OUT/S"),
        Column("BYTES/S", 2), Column("QUEUED", 1), Column("HELD"), Column("MEMBERS", 4), Column("CLOCK", 3), Column("ADDRESS OR ERROR", 5, left=True),
    )  # fmt: skip
    return Table("links", columns, rows, "FROM", "no links to other relays", _left_out(network, "links"))  # fmt: skip


def _clock(offset_ms: float | None, error_ms: float | None) -> Cell:
    if offset_ms is None:
        return Cell("-", -1.0, "dim")
    return Cell(signed_ms(offset_ms, error_ms or 0.0), abs(offset_ms))


def sites(network: Network) -> Table:
    """The own site, and those that gateways lead to."""
    rows = [
        (
            _text(s.name or ("(this site)" if s.own else ""), ""), _state(s.state), _number(s.rtt_ms, milliseconds), _number(s.loss, share),
            _number(None if s.own else s.cost_ms, lambda ms: f"{ms:.0f} ms"), _number(None if s.own else s.ways),
            _number(None if s.own else s.clusters), _number(None if s.own else s.topics),
        )
        for s in network.sites
    ]  # fmt: skip
    columns = (
        Column("SITE", left=True), Column("STATE", left=True), Column("RTT"), Column("LOSS"), Column("COST"), Column("WAYS"),
        Column("CLUSTERS"), Column("TOPICS"),
    )  # fmt: skip
    return Table("sites", columns, rows, "SITE", "no sites", _left_out(network, "sites"))


def programs(network: Network) -> Table:
    """Programs that are connected to the relays that are asked."""
    slow = {(each.host, each.who) for each in network.slow if each.kind == "program"}
    rows = [
        (
            _text(p.host), _text(p.label, "warn" if (p.host, p.called) in slow else ""), _number(p.pid, lambda pid: f"{pid:.0f}"), _number(p.members), _number(p.subscriptions), _number(p.running),
            _number(p.waiting), _number(p.tunnels), _number(p.held, style="warn", marked=True), _number(p.held_for_s, age, "warn", marked=True),
            _number(p.lost_messages), _number(p.failed), _text(p.user),
        )
        for p in network.programs
    ]  # fmt: skip
    columns = (
        Column("HOST", left=True), Column("PROGRAM", left=True), Column("PID"), Column("MEMBERS", 2), Column("SUBS", 2), Column("RUN"),
        Column("WAIT"), Column("TUNNELS", 3), Column("HELD"), Column("HELD FOR", 4),
        Column("LOST"), Column("FAILED", 1), Column("USER", 5, left=True),
    )  # fmt: skip
    empty = "no programs are shown: the relay runs as another user, or does not answer"
    return Table("programs", columns, rows, "HELD", empty, _left_out(network, "programs"))


def streams(network: Network) -> Table:
    """Streams with their consumers: one row for each consumer, and one for a stream without any."""

    def rows() -> Iterator[tuple[Cell, ...]]:
        none = _number(None)
        for stream in network.streams:
            start = (_text(stream.name, "bad" if stream.failed else ""),)
            end = (
                _rate(stream.in_rate), _number(stream.messages), _number(stream.dead_letters, style="bad", marked=True), _number(stream.size_bytes, size),
                _number(stream.lost_messages, style="bad", marked=True), _text(stream.host), _text(stream.failed or stream.source, "bad" if stream.failed else "dim"),
            )  # fmt: skip
            for each in stream.consumers:
                yield (
                    *start, _text(each.name), _number(each.lag, style="warn", marked=True), _number(each.lag_rate, change, "warn", marked=True),
                    _number(each.workers), _number(each.pending), _number(each.redelivering, style="warn", marked=True), *end,
                )  # fmt: skip
            if not stream.consumers:
                yield (*start, _text("-", "dim"), *[none] * 5, *end)
            if stream.other_consumers:
                blank = Cell("", -1.0)
                yield (
                    *start,
                    Cell(f"{stream.other_consumers:,} more", "\uffff", "dim"),
                    *[blank] * 12,
                )

    columns = (
        Column("STREAM", left=True), Column("CONSUMER", left=True), Column("LAG"), Column("LAG +/S", 1), Column("WORKERS", 3), Column("PENDING", 4),
        Column("AGAIN", 5), Column("IN/S"), Column("MESSAGES", 2), Column("DEAD"), Column("SIZE", 6), Column("LOST", 7), Column("HOST", 8, left=True),
        Column("SOURCE", 9, left=True),
    )  # fmt: skip
    empty = "no streams under the keys of this keyring"
    return Table("streams", columns, list(rows()), "STREAM", empty, _left_out(network, "streams"))


def drops(network: Network) -> Table:
    """Messages that relays and members dropped, by cause."""
    rows = [
        (_text(d.host), _text(d.where), _text(d.cause), _bad_rate(d.rate), _number(d.total))
        for d in network.drops
    ]
    columns = (
        Column("HOST", 1, left=True), Column("WHERE", left=True), Column("CAUSE", left=True), Column("DROP/S"), Column("IN ALL"),
    )  # fmt: skip
    return Table("drops", columns, rows, "DROP/S", "no drops", _left_out(network, "drops"))


def slow(network: Network) -> Table:
    """What is slow, loses messages or fails, and why it is thought so."""
    rows = [
        (_text(s.kind), _text(s.name), _text(s.host), _text(s.where), _number(s.since_s, age), _text("; ".join(s.why), "warn"))
        for s in network.slow
    ]  # fmt: skip
    columns = (
        Column("WHAT", 1, left=True), Column("WHO", left=True), Column("HOST", 2, left=True), Column("CLUSTER OR STREAM", 3, left=True),
        Column("FOR"), Column("WHY", left=True),
    )  # fmt: skip
    return Table("slow", columns, rows, "FOR", "nothing is slow", _left_out(network, "slow"))


def _left_out(network: Network, table: str) -> str:
    count_ = network.other.get(table, 0)
    return f"{count_:,} more {table} are not shown" if count_ else ""


VIEWS: Final[dict[str, Callable[[Network], Table]]] = {
    "members": members,
    "clusters": clusters,
    "relays": relays,
    "links": links,
    "sites": sites,
    "programs": programs,
    "streams": streams,
    "drops": drops,
    "slow": slow,
}
"""Name -> view, in the order of the keys 1 to 9."""
