"""The model of a live network, from made-up samples: rates, bounds, and who is slow with the figures that say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iris.describing import Description, HandlerInfo
from iris.streams.listing import StreamInfo
from iris.tally import bucket_end, bucket_of
from iris.watch import network as limits
from iris.watch.model import Model
from iris.watch.network import Network, Slow, Totals, as_json
from iris.watch.sample import ClusterAnswer, MemberAnswer, RelayAnswer, Sample, StreamAnswer
from iris.wire.consumers import ConsumerInfo
from iris.wire.frames import MemberInfo
from iris.wire.kinds import Kind

OURS, THEIRS = "a" * 32, "b" * 32
HOSTILE = "\x1b[31mred\x07\n<script>alert(1)</script>"


def report(**changes: Any) -> dict[str, Any]:
    """Return a status as relays give it."""
    accounts = {
        "in": 0,
        "copied": 0,
        "out": 0,
        "unwanted": 0,
        "refused": 0,
        "expired": 0,
        "held": 0,
        "dropped": {},
    }
    return {
        "relay": OURS, "host": "one", "site": "", "draining": False, "uptime_s": 100.0, "sessions": [], "links": [], "sites": [],
        "clusters": {}, "accounts": {**accounts, **changes.pop("accounts", {})}, "suspended": [],
        "queues": {"bytes": 0, "limit_bytes": 1000, "full": 0, "shed": 0}, "slow": [], **changes,
    }  # fmt: skip


def link(peer: str = THEIRS, **changes: Any) -> dict[str, Any]:
    return {
        "peer": peer, "label": "two", "site": "", "rtt_us": 500, "held": 0, "members": 1, "address": "10.0.0.2:7400",
        "in_frames": 0, "out_frames": 0, "in_bytes": 0, "queued_bytes": 0, **changes,
    }  # fmt: skip


def session(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "session": number, "label": "web", "pid": 7, "user": "uid 1", "members": 0, "subscriptions": 1, "running": 0,
        "waiting": 0, "tunnels": 0, "held": 0, **changes,
    }  # fmt: skip


def info(serial: int, relay: str = OURS, **changes: Any) -> MemberInfo:
    return MemberInfo(f"{relay}.{serial}", [int(Kind.REQUEST)], [bytes(16)], relay, **changes)


def said(handled: int = 0, times: dict[int, int] | None = None, **changes: Any) -> MemberAnswer:
    handlers = [
        HandlerInfo("request", "place", "place", counted=True, handled=handled, timed=handled, times=times or {}, max_ms=9.0)
    ]  # fmt: skip
    given: dict[str, Any] = {
        "member": "", "service": "orders", "version": "1", "description": "", "handlers": handlers, "running": 0,
        "queued": 0, "uptime_s": 10.0, "iris": "0.1", "host": "one", "pid": 5, **changes,
    }  # fmt: skip
    return MemberAnswer(Description(**given))


def took(ms: float, calls: int) -> dict[int, int]:
    return {bucket_end(bucket_of(round(ms * 1e6))): calls}


class Seen:
    """A model that is given samples two seconds apart."""

    def __init__(self) -> None:
        self.model = Model()
        self.at_s = 1000.0

    def look(self, *relays: dict[str, Any] | str, later_s: float = 2.0, **more: Any) -> Network:
        answers = [
            RelayAnswer(f"/run/{n}", "here", None, each) if isinstance(each, str) else RelayAnswer(f"/run/{n}", "here", each)
            for n, each in enumerate(relays)
        ]  # fmt: skip
        self.at_s += later_s
        return self.model.update(Sample(self.at_s, 0, answers, **more))

    def members(self, *answers: MemberAnswer | None, **more: Any) -> Network:
        infos = [info(serial) for serial in range(len(answers))]
        given = {i.member: a for i, a in zip(infos, answers, strict=True) if a is not None}
        return self.look(report(), clusters={"orders": ClusterAnswer(infos, answers=given)}, **more)


def reasons(network: Network, kind: str) -> list[Slow]:
    return [slow for slow in network.slow if slow.kind == kind]


# -- relays and links ------------------------------------------------------------------------------------------


def test_totals_become_rates_by_the_relays_own_clock() -> None:
    seen = Seen()
    first = seen.look(report(accounts={"in": 100, "dropped": {"slow receiver": 5}}))
    assert first.interval_s == 0.0
    assert first.relays[0].in_rate is None
    second = seen.look(
        report(uptime_s=104.0, accounts={"in": 140, "dropped": {"slow receiver": 13}})
    )
    assert second.relays[0].in_rate == 10.0
    assert second.relays[0].dropped_rate == 2.0
    assert [(drop.cause, drop.rate, drop.total) for drop in second.drops] == [("slow receiver", 2.0, 13)]  # fmt: skip
    assert (second.serial, second.interval_s) == (2, 2.0)


def test_what_nobody_wants_is_one_figure_and_no_drop() -> None:
    seen = Seen()
    seen.look(report())
    network = seen.look(
        report(uptime_s=102.0, accounts={"in": 90, "unwanted": 58, "dropped": {"slow receiver": 4}}),
        clusters={"orders": ClusterAnswer([info(1)], answers={f"{OURS}.1": said(dropped={"unwanted": 7})})},
    )  # fmt: skip
    assert network.totals.unwanted_rate == network.relays[0].unwanted_rate == 29.0
    assert network.totals.dropped_rate == 2.0
    assert network.relays[0].account["unwanted"] == 58
    assert [drop.cause for drop in network.drops] == ["slow receiver"]
    assert reasons(network, "member") == []


def test_totals_are_sums_of_everything_that_is_known() -> None:
    seen = Seen()
    empty = seen.look(report(), report(relay=THEIRS))
    assert empty.totals == Totals()
    accounts = {"in": 20, "out": 28, "refused": 4, "dropped": {f"cause {n}": 2 for n in range(100)}}
    network = seen.look(
        report(uptime_s=102.0, accounts=accounts),
        report(relay=THEIRS, uptime_s=102.0, accounts=accounts),
    )
    totals = network.totals
    assert (totals.in_rate, totals.out_rate, totals.refused_rate) == (20.0, 28.0, 4.0)
    assert (totals.unwanted_rate, totals.handled_rate) == (0.0, 0.0)
    assert network.other["drops"] > 0
    again = {**accounts, "dropped": {f"cause {n}": 4 for n in range(100)}}
    network = seen.look(
        report(uptime_s=104.0, accounts=again), report(relay=THEIRS, uptime_s=104.0, accounts=again)
    )
    assert network.totals.dropped_rate == 200.0, "also of the rows that the table leaves out"


def test_a_relay_that_does_not_answer_is_away_under_its_name_and_comes_back() -> None:
    seen = Seen()
    seen.look(report())
    away = seen.look("no relay at /run/0")
    assert [(relay.host, relay.state, relay.error) for relay in away.relays] == [
        ("one", "away", "no relay at /run/0")
    ]
    assert away.problems == ["relay /run/0: no relay at /run/0"]
    assert reasons(away, "relay")[0].why == ["no relay at /run/0"]
    back = seen.look(report(relay="c" * 32))
    assert [relay.state for relay in back.relays] == ["up"]


def test_a_relay_whose_link_is_lost_is_shown_until_another_of_its_host_takes_its_place() -> None:
    seen = Seen()
    assert [relay.host for relay in seen.look(report(links=[link()])).relays] == ["one", "two"]
    suspended = seen.look(report(suspended=[THEIRS]))
    assert [(relay.host, relay.state) for relay in suspended.relays] == [("one", "up"), ("two", "suspended")]  # fmt: skip
    lost = seen.look(report())
    assert [(relay.host, relay.state) for relay in lost.relays] == [("one", "up"), ("two", "away")]
    back = seen.look(report(links=[link("c" * 32)]))
    assert [(relay.id[0], relay.state) for relay in back.relays] == [("a", "up"), ("c", "up")]


def test_a_relay_that_was_lost_long_ago_is_not_shown() -> None:
    seen = Seen()
    seen.look(report(links=[link()]))
    seen.look(report())
    assert len(seen.look(report(), later_s=601.0).relays) == 1


def test_links_have_round_trips_and_rates_and_tell_when_these_rise() -> None:
    seen = Seen()
    seen.look(report(links=[link(rtt_us=10_000)]))
    network = seen.look(report(uptime_s=102.0, links=[link(rtt_us=50_000, in_frames=40)]))
    assert (network.links[0].rtt_ms, network.links[0].in_rate) == (50.0, 20.0)
    (slow,) = reasons(network, "link")
    assert slow.why == ["round trip 50 ms, 5 times its lowest (10 ms)"]


def test_a_status_that_cannot_be_read_is_a_problem_and_not_an_error() -> None:
    network = Seen().look({"relay": 1, "accounts": []})
    assert network.relays == []
    assert network.problems[0].startswith("relay /run/0: cannot read its status: ")


def test_totals_alone_are_shown_of_a_relay_that_is_limited() -> None:
    limited = {
        "relay": OURS, "site": "", "draining": False, "limited": "not yours", "sessions": [], "links": [], "uptime_s": 5.0,
        "counts": {"sessions": 3, "links": 2, "clusters": 1, "sites": 0}, "accounts": report()["accounts"],
    }  # fmt: skip
    (relay,) = Seen().look(limited).relays
    assert (relay.limited, relay.sessions, relay.links, relay.queued_bytes) == (True, 3, 2, None)


# -- clusters --------------------------------------------------------------------------------------------------


def test_the_figures_of_members_add_up_to_those_of_their_cluster() -> None:
    seen = Seen()
    seen.members(said(0), said(0))
    network = seen.members(
        said(20, took(2.0, 20), uptime_s=12.0), said(40, took(8.0, 40), uptime_s=12.0, queued=3)
    )
    (cluster,) = network.clusters
    assert (cluster.total, cluster.handled_rate, cluster.queued) == (2, 30.0, 3)
    assert cluster.p50_ms == pytest.approx(8.0, rel=0.125)
    one, two = cluster.members
    assert (one.handled_rate, one.handlers[0].handled_rate, one.age_s) == (10.0, 10.0, 12.0)
    assert one.p99_ms == pytest.approx(2.0, rel=0.125)
    assert (two.timed, two.pid, two.host) == (40, 5, "one")


def test_a_cluster_without_a_key_is_only_counted() -> None:
    network = Seen().look(
        report(clusters={"secret": {"1f2e3d4c": 2}}, linked_clusters={"secret": 3, "far": 1})
    )
    assert [(c.name, c.keyed, c.total, c.other_members, c.other_keys) for c in network.clusters] == [
        ("far", False, 1, 1, {}), ("secret", False, 5, 5, {"1f2e3d4c": 2}),
    ]  # fmt: skip


def test_a_member_that_is_not_asked_keeps_its_figures_and_one_that_is_silent_is_slow() -> None:
    seen = Seen()
    seen.members(said(10))
    unasked = seen.members(None)
    assert (unasked.clusters[0].members[0].state, unasked.clusters[0].members[0].age_s) == ("unasked", 10.0)  # fmt: skip
    silent = seen.members(MemberAnswer(None, "no reply within 2 s", silent=True))
    assert silent.clusters[0].members[0].state == "silent"
    (slow,) = reasons(silent, "member")
    assert (slow.why, slow.where) == (["does not answer: no reply within 2 s"], "orders")


def test_a_member_that_takes_longer_than_the_others_is_slow_and_the_figures_say_so() -> None:
    seen = Seen()
    seen.members(*[said(0)] * 4)
    quick = said(100, took(10.0, 100), uptime_s=12.0)
    network = seen.members(quick, quick, quick, said(100, took(120.0, 100), uptime_s=12.0))
    (slow,) = reasons(network, "member")
    assert slow.who.endswith(".3")
    assert slow.name.strip() == "5", "its program has no label, so there is only the process id"
    assert slow.why[0].startswith("p99 1")
    assert slow.why[0].endswith("times the median of its cluster (10 ms)") or "times the median of its cluster (" in slow.why[0]  # fmt: skip


def test_queues_that_grow_and_event_loops_that_are_held_up_are_reasons() -> None:
    seen = Seen()
    seen.members(said())
    network = seen.members(
        said(
            queued=30,
            queued_bytes=3_100_000,
            loop_held=4,
            uptime_s=12.0,
            dropped={"expired": 6},
        ),
    )
    assert reasons(network, "member")[0].why == [
        "queue of 30 messages (3.1 MB), growing by 15 a second",
        "handlers held up the event loop 4 times in the last minute",
    ]
    still = seen.members(said(queued=30, loop_held=4, uptime_s=14.0, dropped={"expired": 10}))
    assert "drops 2.0 a second: expired" in reasons(still, "member")[0].why
    for _ in range(6):
        still = seen.members(said(queued=30, uptime_s=14.0))
    assert reasons(still, "member")[0].why == ["queue of 30 messages, not empty for 14 s"]
    assert reasons(still, "member")[0].since_s == 14.0


def test_programs_that_do_not_read_are_slow() -> None:
    seen = Seen()
    slow = {
        "session": 1,
        "label": "web",
        "link": False,
        "dropped": 12,
        "last_s": 3.0,
        "topics": ["a.b"],
    }
    for _ in range(4):
        network = seen.look(report(sessions=[session(held=9)], slow=[slow]))
    assert reasons(network, "program")[0].why == [
        "12 messages dropped, the last 3 s ago; topics: a.b",
        "9 messages queued in the relay for 6 s, because it does not read fast enough",
    ]


def trouble(cause: str = "queue full", count: int = 5, last_s: float = 1.0, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "session": 1, "label": "web", "pid": 7, "user": "uid 1", "address": "", "cause": cause, "count": count,
        "names": {"t.a": count}, "since_s": last_s, "last_s": last_s, **more,
    }  # fmt: skip


def test_what_a_program_reports_to_its_relay_needs_attention_for_a_minute() -> None:
    seen = Seen()
    rows = [trouble(count=58_676), trouble("handler failed", 20), trouble("uncounted", 3)]
    network = seen.look(report(sessions=[session()], troubles={"latest": rows}))
    (slow,) = reasons(network, "program")
    assert (slow.who, slow.host) == ("web (pid 7)", "one")
    assert slow.why == [
        "lost 58,676 messages of t.a: its own queue was full; the last 1 s ago",
        "20 calls of t.a failed: a handler raised an exception; the last 1 s ago",
    ]
    (program,) = network.programs
    assert (program.lost_messages, program.failed) == (58_676, 20)
    (drop,) = network.drops
    assert (drop.where, drop.cause, drop.total) == (
        "program web (pid 7)",
        "queue full: t.a",
        58_676,
    )
    assert len(network.troubles) == 3
    late = seen.look(report(sessions=[session()], troubles={"latest": [trouble(last_s=61.0)]}))
    assert reasons(late, "program") == []
    assert late.programs[0].lost_messages == 5


def test_a_relay_that_stopped_makes_no_program_need_attention() -> None:
    rows = [trouble("uncounted", 3)]
    network = Seen().look(report(sessions=[session()], troubles={"latest": rows}))
    assert reasons(network, "program") == []
    assert (network.programs[0].lost_messages, network.programs[0].failed) == (0, 0)


def test_a_program_that_has_ended_is_still_named_with_what_it_lost() -> None:
    network = Seen().look(report(troubles={"latest": [trouble()]}))
    assert [slow.who for slow in reasons(network, "program")] == ["web (pid 7)"]


def test_what_a_member_has_reported_to_a_relay_that_was_asked_is_shown_once() -> None:
    failing = [HandlerInfo("request", "place", "place", counted=True, handled=90, failed=10)]
    before = [HandlerInfo("request", "place", "place", counted=True)]
    seen = Seen()
    seen.members(said(handlers=before, dropped={"slow member": 2}))
    network = seen.members(said(handlers=failing, dropped={"slow member": 9}, uptime_s=12.0))
    assert reasons(network, "member") == []
    assert network.drops == []
    assert network.clusters[0].members[0].failed_rate == 5.0


def test_a_member_that_fails_at_a_relay_that_was_not_asked_needs_attention() -> None:
    seen = Seen()

    def look(failed: int, handled: int, uptime_s: float) -> Network:
        handlers = [
            HandlerInfo("request", "", "place", counted=True, handled=handled, failed=failed)
        ]
        answer = said(handlers=handlers, uptime_s=uptime_s, dropped={"slow member": failed})
        there = info(1, THEIRS)
        clusters = {"orders": ClusterAnswer([there], answers={there.member: answer})}
        return seen.look(report(links=[link()]), clusters=clusters)

    look(0, 0, 10.0)
    network = look(20, 180, 12.0)
    (slow,) = reasons(network, "member")
    assert slow.why == [
        "10% of its calls fail (10 a second): a handler raises an exception",
        "drops 10 a second: slow member",
    ]
    assert [drop.cause for drop in network.drops] == ["slow member"]


# -- streams ---------------------------------------------------------------------------------------------------


def stream(name: str, messages: int, next: int, consumers: list[ConsumerInfo] | None = None) -> StreamAnswer:  # fmt: skip
    return StreamAnswer(
        StreamInfo(
            name, name * 4, "orders.>", "", 0, 0, 0.0, False, False, 0, next, messages, 100, 1, 0, "s1", "one", 0, "", []
        ),
        consumers or [],
    )  # fmt: skip


def consumer(lag: int, **changes: Any) -> ConsumerInfo:
    given = {"workers": 1, **changes}
    return ConsumerInfo("billing", True, True, 0, 0, lag, 0, 0, **given)


def test_streams_have_rates_lag_and_dead_letters() -> None:
    seen = Seen()
    seen.look(report(), streams=[stream("log", 100, 100, [consumer(10)])])
    network = seen.look(
        report(),
        streams=[stream("log", 120, 120, [consumer(24)]), stream("log.dead", 3, 3)],
    )
    (log,) = network.streams
    assert (log.in_rate, log.lag, log.dead_letters, log.source) == (10.0, 24, 3, "topic orders.>")
    assert (log.consumers[0].lag_rate, log.consumers[0].settled_rate) == (7.0, 3.0)
    (slow,) = reasons(network, "consumer")
    assert slow.why == ["lag of 24 messages, growing by 7.0 a second"]
    kept = seen.look(report())
    assert kept.streams == network.streams, "stores were not asked this time"


def test_a_consumer_without_workers_is_told() -> None:
    network = Seen().look(report(), streams=[stream("log", 9, 9, [consumer(9, workers=0)])])
    assert reasons(network, "consumer")[0].why == ["no workers, and a lag of 9 messages"]


# -- bounds and names ------------------------------------------------------------------------------------------


def test_tables_are_bounded_and_say_how_much_is_left_out() -> None:
    many = 1000
    infos = [info(serial) for serial in range(many)]
    network = Seen().look(
        report(
            clusters={f"c{n}": {"k": 1} for n in range(many)},
            links=[link(f"{n:032x}") for n in range(many)],
            sessions=[session(n) for n in range(many)],
            accounts={"dropped": {f"cause {n}": 1 for n in range(many)}},
            troubles={"latest": [trouble("missing", session=n) for n in range(many)]},
        ),
        clusters={"orders": ClusterAnswer(infos, answers={i.member: said() for i in infos})},
        streams=[
            stream(f"s{n}", 1, 1, [consumer(1)] * (many if not n else 0)) for n in range(many)
        ],
    )
    sizes = {
        "clusters": (len(network.clusters), limits.MAX_CLUSTERS, many + 1),
        "links": (len(network.links), limits.MAX_LINKS, many),
        "relays": (len(network.relays), limits.MAX_RELAYS, many + 1),
        "programs": (len(network.programs), limits.MAX_PROGRAMS, many),
        "streams": (len(network.streams), limits.MAX_STREAMS, many),
        "troubles": (len(network.troubles), limits.MAX_TROUBLES, many),
        "drops": (len(network.drops), limits.MAX_DROPS, many),
    }
    for table, (shown, limit, every) in sizes.items():
        assert shown == limit, table
        assert network.other[table] == every - limit, table
    orders = next(cluster for cluster in network.clusters if cluster.name == "orders")
    assert (len(orders.members), orders.other_members, orders.total) == (limits.MAX_MEMBERS, many - limits.MAX_MEMBERS, many)  # fmt: skip
    worst = next(each for each in network.streams if each.consumers)
    assert (len(worst.consumers), worst.other_consumers) == (limits.MAX_CONSUMERS, many - limits.MAX_CONSUMERS)  # fmt: skip
    assert len(as_json(network)) < 400_000


def test_names_of_others_cannot_control_a_terminal() -> None:
    network = Seen().look(
        report(
            host=HOSTILE, clusters={HOSTILE: {HOSTILE: 1}}, links=[link(label=HOSTILE, address=HOSTILE)],
            sessions=[session(label=HOSTILE, user=HOSTILE)], accounts={"dropped": {HOSTILE: 1}},
            troubles={"latest": [trouble(HOSTILE, label=HOSTILE, names={HOSTILE: 1})]},
            sites=[{"site": HOSTILE, "ways": [], "rtt_us": 1, "cost_ms": 0, "clusters": 0, "topics": 0}],
        ),
        clusters={
            "orders": ClusterAnswer(
                [info(1, label=HOSTILE)], others={HOSTILE: 1}, sites={HOSTILE: 1},
                answers={f"{OURS}.1": said(service=HOSTILE, version=HOSTILE * 100, host=HOSTILE, dropped={HOSTILE: 1})},
            )
        },
        streams=[stream(HOSTILE, 1, 1, [consumer(1)])],
        problems=[HOSTILE],
    )  # fmt: skip

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [found for pair in value.items() for each in pair for found in texts(each)]
        if isinstance(value, list):
            return [found for each in value for found in texts(each)]
        return [value] if isinstance(value, str) else []

    found = texts(json.loads(as_json(network)))
    assert sum("red" in each for each in found) >= 15
    for each in found:
        assert each.isprintable(), each
        assert len(each) <= limits.MAX_SENTENCE


def test_figures_of_others_that_are_no_numbers_count_as_nothing() -> None:
    seen = Seen()
    network = seen.look(
        report(links=[link(rtt_us=float("nan"), in_frames="many")], uptime_s=float("inf")),
        clusters={"orders": ClusterAnswer([info(1)], answers={f"{OURS}.1": said(uptime_s=float("nan"))})},
    )  # fmt: skip
    assert network.links[0].rtt_ms == 0.0
    assert network.clusters[0].members[0].age_s == 0.0
    json.loads(as_json(network))
