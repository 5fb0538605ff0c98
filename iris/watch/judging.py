"""Who is slow, and why it is thought so: a phrase with figures for each reason.

The limits are those at which a person would look closer. Alarms are rules over metrics, and have limits of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from iris.core.troubles import ADVICE, described
from iris.losses import CAUSES
from iris.watch.history import History
from iris.watch.network import Link, Member, Program, Relay, Slow, Stream, Trouble, called
from iris.watch.relays import Relays
from iris.watch.sample import number, text, whole
from iris.wire.names import plural

TIMES_MEDIAN: Final = 4
"""A member is slow if its p99 is so many times the median of its cluster."""
MIN_P99_MS: Final = 5.0
MIN_TIMED: Final = 20
"""Calls in the last 10 s from which a p99 is taken seriously."""
MIN_MEMBERS: Final = 3
WAITING_S: Final = 5.0
"""How long a queue may hold messages in every sample."""
TIMES_RTT: Final = 4
MIN_RTT_MS: Final = 20.0
FULL_SHARE: Final = 0.5
LATELY_S: Final = 60.0
"""Drops before that are not of interest any more."""
CLOCK_MS: Final = 1000.0
"""Clocks that differ by more are worth a look: messages are refused from 10 minutes on."""


class Judge:
    """Judges one sample after the other."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._lowest: dict[tuple[str, str], float] = {}
        """(relay, peer) -> lowest round trip of the link, in ms."""

    def judge(
        self, relays: Relays, clusters: Sequence[tuple[str, list[Member]]], streams: Iterable[Stream]
    ) -> list[Slow]:  # fmt: skip
        """Return what is slow, what has been so for longest first."""
        found: list[tuple[str, str, str, str, list[str]]] = []
        names: dict[str, str] = {}
        for name, members in clusters:
            median_ms = _median_p99(members)
            for member in members:
                names[member.id] = member.called
                why = list(_member(member, median_ms, heard=relays.hears(member.relay)))
                found.append(("member", member.id, member.host, text(name), why))
        whys: dict[tuple[str, int], list[str]] = {}
        """(relay, session) -> what a relay knows of it, or it has reported itself."""
        ended: dict[tuple[str, int], tuple[str, str]] = {}
        """(relay, session) -> what people call it, and its host."""
        for relay, slow in relays.lately_slow:
            if number(slow["last_s"]) > LATELY_S:
                continue
            if slow.get("link"):
                found.append(("link", text(slow["label"]), relay.host, "", [_dropped(slow)]))
                continue
            session = relay.id, whole(slow["session"])
            ended[session] = text(slow["label"]), relay.host
            whys.setdefault(session, []).append(_dropped(slow))
        for relay, trouble in relays.troubles:
            if trouble.cause in ADVICE and trouble.last_s <= LATELY_S:
                session = relay.id, trouble.session
                ended[session] = called(trouble.program, trouble.pid), relay.host
                whys.setdefault(session, []).append(_trouble(trouble))
        for program in relays.programs:
            why = [*whys.pop((program.relay, program.session), ()), *_program(program)]
            found.append(("program", program.called, program.host, "", why))
        for session, why in whys.items():  # those that are not connected any more
            found.append(("program", *ended[session], "", why))
        lowest = {}
        for link in relays.links:
            key = link.relay, link.peer
            if link.rtt_ms:
                lowest[key] = min(self._lowest.get(key, link.rtt_ms), link.rtt_ms)
            found.append(("link", link.peer_host or link.address, link.relay_host, "", list(_link(link, lowest.get(key)))))  # fmt: skip
            found.append(("clock", link.peer_host, link.relay_host, "", list(_clock(link))))
        self._lowest = lowest
        for relay in relays.relays.values():
            found.append(("relay", relay.host, relay.host, "", list(_relay(relay))))
        for stream in streams:
            if stream.failed:
                found.append(("stream", stream.name, stream.host, stream.name, [stream.failed]))
            for consumer in stream.consumers:
                why = []
                if consumer.lag and not consumer.workers:
                    why.append(f"no workers, and a lag of {plural(consumer.lag, 'message')}")
                elif consumer.lag and (consumer.lag_rate or 0) >= 0.1:
                    why.append(f"lag of {plural(consumer.lag, 'message')}, growing by {_per_s(consumer.lag_rate)}")  # fmt: skip
                if consumer.dead:
                    why.append(f"{plural(consumer.dead, 'dead letter')} not stored yet")
                found.append(("consumer", consumer.name, stream.host, stream.name, why))
        rows = [
            Slow(
                kind=kind, who=who, name=names.get(who, who), host=host, where=where, why=why,
                since_s=self._history.since(("slow", kind, who, host, where), bool(why)),
            )
            for kind, who, host, where, why in found
        ]  # fmt: skip
        return sorted((row for row in rows if row.why), key=lambda row: -row.since_s)


def _median_p99(members: list[Member]) -> float:
    """Return the median of the p99 of a cluster's members in ms; 0.0 if too few have had enough calls."""
    known = [m.p99_ms for m in members if m.p99_ms is not None and m.timed >= MIN_TIMED]
    return statistics.median(known) if len(known) >= MIN_MEMBERS else 0.0


def _member(member: Member, median_ms: float, *, heard: bool) -> Iterator[str]:
    """Yield what is slow or fails at a member; if `heard`, without what its program has reported to a relay."""
    if member.state == "silent":
        yield "does not answer" + (f": {member.error}" if member.error else "")
        return
    p99_ms = member.p99_ms or 0.0
    if (
        member.timed >= MIN_TIMED
        and p99_ms >= MIN_P99_MS
        and p99_ms >= TIMES_MEDIAN * median_ms > 0
    ):
        times = p99_ms / median_ms
        yield f"p99 {_ms(p99_ms)}, {times:.0f} times the median of its cluster ({_ms(median_ms)})"
    queue = f"queue of {plural(member.queued, 'message')}{_size(member.queued_bytes)}"
    if member.queued and (member.queued_rate or 0.0) >= 0.1:
        yield f"{queue}, growing by {_per_s(member.queued_rate)}"
    elif member.queued_for_s >= WAITING_S:
        yield f"{queue}, not empty for {member.queued_for_s:.0f} s"
    if member.loop_held:
        yield f"handlers held up the event loop {plural(member.loop_held, 'time')} in the last minute"
    if member.failed_rate and not heard:
        share = member.failed_rate / (member.failed_rate + (member.handled_rate or 0.0))
        yield f"{share:.0%} of its calls fail ({_per_s(member.failed_rate)}): a handler raises an exception"
    for cause, rate in member.dropped_rates.items():
        if rate > 0 and not (heard and cause in CAUSES):
            yield f"drops {_per_s(rate)}: {cause}"


def _program(program: Program) -> Iterator[str]:
    if program.held_for_s >= WAITING_S:
        yield (
            f"{plural(program.held, 'message')} queued in the relay for {program.held_for_s:.0f} s, because it does not read fast enough"
        )


def _dropped(slow: dict[str, Any]) -> str:
    topics = ", ".join(text(topic) for topic in slow.get("topics", ())[:3])
    text_ = f"{plural(whole(slow['dropped']), 'message')} dropped, the last {number(slow['last_s']):.0f} s ago"
    return f"{text_}; topics: {topics}" if topics else text_


def _trouble(trouble: Trouble) -> str:
    what = described(trouble.cause, trouble.total, trouble.names)
    return f"{what}; the last {trouble.last_s:.0f} s ago"


def _link(link: Link, lowest_ms: float | None) -> Iterator[str]:
    if link.state == "suspended":
        yield "lost a moment ago"
    if link.state == "unlinked":
        yield f"cannot be linked: {link.error}"
    rtt_ms = link.rtt_ms or 0.0
    if lowest_ms and rtt_ms >= MIN_RTT_MS and rtt_ms >= TIMES_RTT * lowest_ms:
        yield f"round trip {_ms(rtt_ms)}, {rtt_ms / lowest_ms:.0f} times its lowest ({_ms(lowest_ms)})"
    if link.held:
        yield f"{plural(link.held, 'message')} queued for it{_size(link.queued_bytes)}"


def _clock(link: Link) -> Iterator[str]:
    offset_ms, error_ms = link.clock_offset_ms, link.clock_error_ms
    if offset_ms is not None and abs(offset_ms) - (error_ms or 0.0) > CLOCK_MS:
        yield f"its clock differs from that of {link.relay_host} by {_ms(offset_ms)} (± {_ms(error_ms or 0.0)})"


def _relay(relay: Relay) -> Iterator[str]:
    if relay.state == "away":
        yield relay.error or "does not answer"
    queued, limit = relay.queued_bytes or 0, relay.queue_limit_bytes or 0
    if limit and queued >= FULL_SHARE * limit:
        yield f"its queues hold {queued / limit:.0%} of their limit ({limit / 1e6:,.0f} MB)"


def _ms(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:,.1f} s"
    return f"{value:.0f} ms" if abs(value) >= 10 else f"{value:.1f} ms"


def _per_s(rate: float | None) -> str:
    rate = rate or 0.0
    return f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.1f} a second"


def _size(size: int) -> str:
    return f" ({size / 1e6:,.1f} MB)" if size >= 100_000 else ""
