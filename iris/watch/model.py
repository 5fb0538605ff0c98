"""Makes a `Network` from each sample and what was seen before. It does no IO and reads no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from iris.watch import network as limits
from iris.watch.clusters import ClusterReader
from iris.watch.flows import StreamReader
from iris.watch.history import History, summed
from iris.watch.judging import Judge
from iris.watch.network import Cluster, Drop, Network, Relay, Totals
from iris.watch.relays import RelayReader
from iris.watch.sample import Sample, sentence

T = TypeVar("T")
MAX_PROBLEMS: Final = 16


class Model:
    """The network as one watch has seen it so far."""

    def __init__(self) -> None:
        self._history = History()
        self._relays = RelayReader(self._history)
        self._clusters = ClusterReader(self._history)
        self._streams = StreamReader(self._history)
        self._judge = Judge(self._history)
        self._serial = 0
        self._at_s = 0.0

    def update(self, sample: Sample) -> Network:
        """Return the network after one more sample."""
        self._history.begin(sample.at_s)
        relays = self._relays.read(sample.relays, sample.at_s)
        clusters = self._clusters.read(sample.clusters, relays)
        streams = self._streams.read(sample.streams)
        slow = self._judge.judge(relays, clusters.every, streams)
        interval_s = sample.at_s - self._at_s if self._serial else 0.0
        self._serial, self._at_s = self._serial + 1, sample.at_s
        other: dict[str, int] = {}

        def first(table: str, rows: Sequence[T], limit: int, weight: Callable[[T], Any], name: Callable[[T], Any]) -> list[T]:  # fmt: skip
            """Return at most `limit` rows, those of most weight, in the order of their names."""
            if len(rows) > limit:
                other[table] = len(rows) - limit
                rows = sorted(rows, key=weight, reverse=True)[:limit]
            return sorted(rows, key=name)

        drops = [drop for drop in relays.drops + clusters.drops if drop.total]
        totals = _totals([*relays.relays.values()], clusters.clusters, drops)
        return Network(
            totals=totals, serial=self._serial, time_us=sample.time_us, interval_s=interval_s,
            relays=first("relays", [*relays.relays.values()], limits.MAX_RELAYS, lambda r: (r.asked, r.state != "up"), lambda r: (not r.asked, r.host, r.id)),
            links=first("links", relays.links, limits.MAX_LINKS, lambda li: (li.state != "up", li.queued_bytes, li.rtt_ms or 0), lambda li: (li.relay_host, li.peer_host, li.peer)),
            sites=first("sites", [*relays.sites.values()], limits.MAX_SITES, lambda s: (s.own, s.state != "up"), lambda s: (not s.own, s.name)),
            clusters=first("clusters", clusters.clusters, limits.MAX_CLUSTERS, _weight, lambda c: c.name),
            programs=first("programs", relays.programs, limits.MAX_PROGRAMS, lambda p: (p.held, p.running + p.waiting), lambda p: (p.host, p.label, p.session)),
            streams=first("streams", streams, limits.MAX_STREAMS, lambda s: (bool(s.failed), s.lag, s.dead_letters), lambda s: (s.name, s.uuid)),
            drops=first("drops", drops, limits.MAX_DROPS, lambda d: (d.rate or 0, d.total), lambda d: (-(d.rate or 0), -d.total)),
            troubles=first("troubles", [each for _, each in relays.troubles], limits.MAX_TROUBLES, lambda t: -t.last_s, lambda t: (t.host, t.program, t.session, t.cause)),
            slow=first("slow", slow, limits.MAX_SLOW, lambda s: s.since_s, lambda s: -s.since_s),
            problems=[sentence(each) for each in [*sample.problems, *relays.problems]][:MAX_PROBLEMS],
            other=other,
        )  # fmt: skip


def _totals(relays: list[Relay], clusters: list[Cluster], drops: list[Drop]) -> Totals:
    rates = {
        f"{word}_rate": summed(getattr(relay, f"{word}_rate") for relay in relays)
        for word in ("in", "out", "refused", "unwanted", "dropped")
    }
    known = rates["in_rate"] is not None
    elsewhere = summed(drop.rate for drop in drops if not drop.where.startswith("relay "))
    dropped = summed([rates.pop("dropped_rate"), elsewhere])
    return Totals(
        **rates,
        dropped_rate=dropped,
        handled_rate=summed(cluster.handled_rate for cluster in clusters) or 0.0 if known else None,
    )


def _weight(cluster: Cluster) -> tuple[bool, int, float]:
    return cluster.keyed, cluster.queued, cluster.handled_rate or 0.0
