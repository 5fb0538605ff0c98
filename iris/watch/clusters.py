"""Clusters and their members, from member lists and from what the members say of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from iris.describing import Description, HandlerInfo
from iris.losses import CAUSES
from iris.watch.history import History, merged, percentile, summed
from iris.watch.network import MAX_HANDLERS, MAX_MEMBERS, Cluster, Drop, HandlerRates, Member
from iris.watch.relays import Relays
from iris.watch.sample import ClusterAnswer, MemberAnswer, number, sentence, text, whole
from iris.wire.frames import MemberInfo
from iris.wire.kinds import Kind

UNWANTED: Final = "unwanted"
"""Cause that is not a fault: nobody in the process wants the message any more."""
MAX_CAUSES: Final = 16
"""Causes of drops that are taken from one member."""
OUTCOMES: Final = ("handled", "failed", "refused", "expired")


@dataclass(slots=True)
class Clusters:
    """What the members of one sample say."""

    clusters: list[Cluster] = field(default_factory=list)
    every: list[tuple[str, list[Member]]] = field(default_factory=list)
    """Cluster -> all its members, also those that are not shown."""
    drops: list[Drop] = field(default_factory=list)


class ClusterReader:
    """Reads the members of one sample after the other."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._known: dict[str, tuple[Member, dict[int, int]]] = {}
        """Member id -> its latest figures, and its calls by time, for samples in which it is not asked."""

    def read(self, answers: dict[str, ClusterAnswer], relays: Relays) -> Clusters:
        """Return the clusters of one sample: those with a key, and those that relays count."""
        found = Clusters()
        known: dict[str, tuple[Member, dict[int, int]]] = {}
        for name, answer in answers.items():
            members = []
            times = []
            for info in answer.members:
                member, spent = self._member(info, answer.answers.get(info.member), relays, found)
                known[info.member] = member, spent
                members.append(member)
                times.append(spent)
            if members or answer.others or answer.sites or name in relays.clusters:
                found.every.append((name, members))
                found.clusters.append(_cluster(name, answer, members, merged(times)))
        self._known = known
        for name, (total, by_key) in relays.clusters.items():
            if name not in answers:
                keys = {text(key): count for key, count in by_key.items()}
                found.clusters.append(
                    Cluster(name=text(name), keyed=False, total=total, other_members=total, other_keys=keys)
                )  # fmt: skip
        return found

    def _member(
        self, info: MemberInfo, answer: MemberAnswer | None, relays: Relays, found: Clusters
    ) -> tuple[Member, dict[int, int]]:
        known = self._known.get(info.member)
        if answer is not None and answer.description is not None:
            return self._described(info, answer.description, relays, found)
        silent = answer is not None and answer.silent
        state = "silent" if silent else "unasked" if answer is None else "up"
        error = sentence(answer.error) if answer is not None else ""
        if known is None:
            return _bare(info, relays, state, error), {}
        member, times = known
        if answer is None and member.state == "silent":
            state, error = member.state, member.error
        return structs.replace(member, state=state, error=error), {} if silent else times

    def _described(
        self, info: MemberInfo, said: Description, relays: Relays, found: Clusters
    ) -> tuple[Member, dict[int, int]]:
        history, member = self._history, info.member
        age_s = number(said.uptime_s)
        host = text(said.host) or relays.host_of(info.relay)
        handlers, times = [], []
        counted = [each for each in said.handlers if each.counted]
        for each in counted[:MAX_HANDLERS]:
            row, spent = self._handler(member, each, age_s)
            handlers.append(row)
            times.append(spent)
        spent = merged(times)
        rates = {
            outcome: history.rate(
                ("member", member, outcome), sum(whole(getattr(each, outcome)) for each in counted), age_s
            )
            for outcome in OUTCOMES
        }  # fmt: skip
        dropped = {}
        for cause, count in list(said.dropped.items())[:MAX_CAUSES]:
            if cause == UNWANTED:
                continue
            rate = history.rate(("dropped", member, cause), whole(count), age_s)
            dropped[text(cause)] = rate or 0.0
            if cause in CAUSES and relays.hears(info.relay):
                continue  # its program has reported it
            found.drops.append(
                Drop(where=f"member {text(member)}", host=host, cause=text(cause), rate=rate, total=whole(count))
            )  # fmt: skip
        queued = whole(said.queued)
        return Member(
            id=text(member), host=host, relay=text(info.relay), site=text(info.site), program=text(info.label),
            service=text(said.service), version=text(said.version), iris=text(said.iris), pid=whole(said.pid),
            serves=_served(info), age_s=age_s, running=whole(said.running), queued=queued,
            queued_bytes=whole(said.queued_bytes), queued_for_s=history.since(("queued", member), queued > 0),
            queued_rate=history.trend(("queue", member), queued),
            p50_ms=percentile(spent, 0.5), p99_ms=percentile(spent, 0.99), timed=sum(spent.values()),
            max_ms=max((number(each.max_ms) for each in counted if each.timed), default=None),
            dropped_rates=dropped, loop_held=int(history.grown(("loop", member), whole(said.loop_held))),
            handlers=handlers, handled_rate=rates["handled"], failed_rate=rates["failed"],
            refused_rate=rates["refused"], expired_rate=rates["expired"],
        ), spent  # fmt: skip

    def _handler(
        self, member: str, said: HandlerInfo, age_s: float
    ) -> tuple[HandlerRates, dict[int, int]]:
        key = (member, said.kind, said.name)
        spent = self._history.lately(("times", *key), said.times)
        rates = {
            outcome: self._history.rate(
                ("handler", *key, outcome), whole(getattr(said, outcome)), age_s
            )
            for outcome in OUTCOMES
        }
        return HandlerRates(
            kind=text(said.kind), name=text(said.name), p50_ms=percentile(spent, 0.5), p99_ms=percentile(spent, 0.99),
            max_ms=number(said.max_ms) if said.timed else None, handled_rate=rates["handled"], failed_rate=rates["failed"],
            refused_rate=rates["refused"], expired_rate=rates["expired"],
        ), spent  # fmt: skip


def _cluster(
    name: str, answer: ClusterAnswer, members: list[Member], times: dict[int, int]
) -> Cluster:
    rates = {
        outcome: summed(getattr(member, f"{outcome}_rate") for member in members)
        for outcome in OUTCOMES
    }
    busiest = sorted(
        members, key=lambda m: (m.state != "silent", -m.queued, -(m.handled_rate or 0))
    )
    shown = {member.id for member in busiest[:MAX_MEMBERS]}
    return Cluster(
        name=text(name), keyed=True, total=len(members), members=[m for m in members if m.id in shown],
        other_members=max(0, len(members) - MAX_MEMBERS),
        other_keys={text(key): whole(count) for key, count in answer.others.items()},
        sites={text(site): whole(count) for site, count in answer.sites.items()},
        running=sum(member.running for member in members), queued=sum(member.queued for member in members),
        p50_ms=percentile(times, 0.5), p99_ms=percentile(times, 0.99), handled_rate=rates["handled"], failed_rate=rates["failed"],
            refused_rate=rates["refused"], expired_rate=rates["expired"],
    )  # fmt: skip


def _bare(info: MemberInfo, relays: Relays, state: str, error: str) -> Member:
    return Member(
        id=text(info.member), host=relays.host_of(info.relay), relay=text(info.relay), site=text(info.site),
        program=text(info.label), serves=_served(info), state=state, error=error,
    )  # fmt: skip


def _served(info: MemberInfo) -> list[str]:
    """Return the kinds of message that a member serves, as `iris members` names them."""
    return [
        "tunnel" if kind == Kind.TUNNEL_OPEN else Kind(kind).name.lower() for kind in info.kinds
    ]
