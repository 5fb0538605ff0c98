"""Sessions and a router back to back: calls and casts between members and callers."""

from __future__ import annotations

import json

import pytest
from protocol.kit import KEY, LIMIT, OTHER_KEY, Host, Network, Result, control_of, kind_of

from iris.core.conversation import State
from iris.core.interfaces import Delivery
from iris.errors import (
    ConnectionLost,
    NoMembers,
    Overloaded,
    RelayError,
    RemoteError,
    RequestTimeout,
)
from iris.wire import frames
from iris.wire.kinds import Kind, Refusal
from relay.core.limits import Limits


def echo(delivery: Delivery) -> None:
    delivery.reply(delivery.message.payload, None, False)


def test_a_request_reaches_one_member_and_its_reply_comes_back(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)
    answer = caller.request("db", b"hello")
    net.run()
    assert answer.value == b"hello"


def test_hello_is_answered_with_what_a_proof_must_sign(net: Network) -> None:
    host = net.host()
    assert host.session.relay_id == net.router.relay_id
    assert host.session.session_id == host.peer.session_id
    assert host.session.message_limit == LIMIT


def test_a_refused_request_runs_once_at_another_member(net: Network) -> None:
    caller = net.host()
    first, second = net.host().serve("db", echo), net.host().serve("db", echo)
    first.refusal = Refusal.FULL
    answers = [caller.request("db", b"%d" % n) for n in range(4)]
    net.run()
    assert [answer.value for answer in answers] == [b"0", b"1", b"2", b"3"]
    assert (len(first.deliveries), len(second.deliveries)) == (0, 4)


def test_a_request_that_all_refuse_is_overloaded_and_certainly_did_not_run(net: Network) -> None:
    caller = net.host()
    services = [net.host().serve("db", echo) for _ in range(6)]
    for service in services:
        service.refusal = Refusal.FULL
    answer = caller.request("db")
    net.run()
    assert isinstance(answer.error, Overloaded)
    assert not answer.error.may_have_run
    refused = sum(host.session.dropped.get("refused: full", 0) for host in net.hosts)
    assert refused == 4, "the first member and three others are tried"


def test_nobody_there_is_said_at_once_and_names_the_other_keys(net: Network) -> None:
    caller, stranger = net.host(), net.host(keys=[OTHER_KEY])
    stranger.serve("db", echo)
    answer = caller.request("db")
    net.run()
    assert isinstance(answer.error, NoMembers)
    assert not answer.error.may_have_run
    assert f"1 under {OTHER_KEY.key_id[:4].hex()}…" in str(answer.error)
    assert KEY.key_id[:4].hex() in str(answer.error)


def test_a_member_that_does_not_serve_the_kind_does_not_count(net: Network) -> None:
    caller, member = net.host(), net.host()
    ack = Result()
    member.session.out.prove(KEY)
    kinds = {int(Kind.PUSH): frames.Serving(1, 1)}
    member.session.ask(lambda number: frames.Join(number, "db", [KEY.key_id], kinds), ack)
    answer = caller.request("db")
    net.run()
    assert isinstance(answer.error, NoMembers)


def test_a_lost_member_ends_its_requests_as_may_have_run(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db")
    answer = caller.request("db")
    net.run()
    assert not answer.done()
    member.lose()
    net.run()
    assert isinstance(answer.error, ConnectionLost)
    assert answer.error.may_have_run


def test_an_idempotent_request_is_sealed_again_for_another_member(net: Network) -> None:
    caller, first = net.host(), net.host()
    lost = first.serve("db")
    answer = caller.request("db", b"x", idempotent=True)
    net.run()
    second = net.host().serve("db", echo)
    first.lose()
    net.run()
    assert answer.value == b"x"
    assert lost.deliveries[0].counter != second.deliveries[0].counter


def test_a_request_times_out_in_virtual_time_and_its_late_reply_is_dropped(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    answer = caller.request("db", timeout_ms=500)
    net.run()
    net.pass_time(0.49)
    assert not answer.done()
    net.pass_time(0.02)
    assert isinstance(answer.error, RequestTimeout)
    assert isinstance(answer.error, TimeoutError)
    service.deliveries[0].reply(b"late", None, False)
    net.run()
    assert caller.session.dropped == {"late answers": 1}


def test_a_message_whose_deadline_passed_on_the_way_is_not_started(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    answer = caller.request("db", timeout_ms=100)
    caller.speak()
    net.router.now_us += 100_001  # time passes while the frame is between relay and member
    net.run()
    assert service.deliveries == []
    assert isinstance(answer.error, RequestTimeout)
    assert not answer.error.may_have_run


def test_a_deadline_that_passed_before_the_relay_is_not_handed_on(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", echo)
    answer = caller.request("db", timeout_ms=100)
    net.router.now_us += 200_000
    net.run()
    assert service.deliveries == []
    assert isinstance(answer.error, RequestTimeout)
    assert member.session.received_messages == 0
    assert net.router.accounts.expired == 1


def test_an_error_answer_says_whether_it_may_have_run(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", lambda d: d.fault("no: ü\n", may_have_run=d.message.payload == b"ran"))
    ran, not_ran = caller.request("db", b"ran"), caller.request("db", b"no")
    net.run()
    for answer, expected in ((ran, True), (not_ran, False)):
        assert isinstance(answer.error, RemoteError)
        assert answer.error.detail == "no: ü\n"
        assert answer.error.may_have_run is expected


def test_a_forgotten_request_leaves_nothing_behind(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    waiter = Result()
    pending = caller.send("db", b"", waiter)
    net.run()
    caller.session.requests.forget(pending)
    assert not caller.session.busy
    service.deliveries[0].reply(b"", None, False)
    net.run()
    assert not waiter.done()


def test_pushes_give_their_credit_back_once_per_turn(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db", lambda delivery: delivery.finish())
    received: list[frames.Credit] = []
    handlers = net.router._from_sessions._handlers
    route = handlers[frames.Credit]

    def credited(session: object, credit: frames.Credit) -> None:
        received.append(credit)
        route(session, credit)  # type: ignore[arg-type]

    handlers[frames.Credit] = credited
    for _ in range(1000):
        caller.push("db", b"x" * 10)
    net.run()
    assert sum(len(credit.hops) for credit in received) == 1000
    assert len(received) < 10


def test_more_pushes_than_a_member_queues_are_reported_as_lost(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db", concurrency=2, limit_bytes=1)
    for _ in range(5):
        caller.push("db")
    net.run()
    assert len(service.deliveries) == 2
    assert [(loss.kind, loss.name, loss.count) for loss in caller.losses] == [("push", "db", 1)] * 3
    for delivery in service.deliveries:
        delivery.finish()
    net.run()


def test_pushes_with_a_lost_member_are_reported_one_by_one(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db")
    for _ in range(3):
        caller.push("db")
    net.run()
    member.lose()
    net.run()
    assert sum(loss.count or 0 for loss in caller.losses) == 3


def test_pushes_that_a_member_gives_back_unstarted_are_reported_with_the_reason(
    net: Network,
) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    for timeout_ms in (1000, 1000, 60_000, 60_000):
        caller.push("db", timeout_ms=timeout_ms)
    net.run()
    net.pass_time(2)
    for delivery, started in zip(service.deliveries, (True, False, True, False), strict=True):
        delivery.finish(started=started)
    net.run()
    late, stopped = (loss.error for loss in caller.losses)
    assert isinstance(late, RequestTimeout)
    assert isinstance(stopped, RelayError)
    assert not late.may_have_run
    assert not stopped.may_have_run
    assert [(loss.kind, loss.name, loss.count) for loss in caller.losses] == [("push", "db", 1)] * 2
    assert not member.peer.in_flight
    net.check()


@pytest.mark.parametrize("which", ["not done with", "twice"])
def test_what_is_unstarted_is_among_what_is_done_with(net: Network, which: str) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    caller.push("db")
    caller.request("db")
    net.run()
    push, request = (delivery.hop for delivery in service.deliveries)
    unstarted = [request] if which == "not done with" else [push, push]
    member.session.out.control(frames.Credit(service.member, Kind.PUSH, [push], unstarted))
    net.run()
    assert "unstarted" in member.ended_because


def test_credit_for_what_was_not_handed_over_is_the_members_error(net: Network) -> None:
    member = net.host()
    service = member.serve("db")
    member.session.out.control(frames.Credit(service.member, Kind.PUSH, [1]))
    net.run()
    assert "not dispatched" in member.ended_because


def test_a_caller_with_too_much_on_the_way_is_overloaded_by_its_own_relay() -> None:
    net = Network(limits=Limits(pending=3))
    caller, member = net.host(), net.host()
    service = member.serve("db")
    answers = [caller.request("db") for _ in range(4)]
    net.run()
    assert [answer.done() for answer in answers] == [False, False, False, True]
    assert isinstance(answers[3].error, Overloaded)
    for delivery in service.deliveries:
        delivery.reply(b"", None, False)
    net.run()
    net.check()


def test_members_with_a_free_handler_come_before_saturated_ones(net: Network) -> None:
    caller = net.host()
    small = net.host().serve("db", concurrency=1)
    large = net.host().serve("db", concurrency=8)
    for _ in range(9):
        caller.request("db")
    net.run()
    assert (len(small.deliveries), len(large.deliveries)) == (1, 8)
    for service in (small, large):
        for delivery in service.deliveries:
            delivery.reply(b"", None, False)
    net.run()


def test_a_survey_first_says_who_is_asked_and_last_who_was_lost(net: Network) -> None:
    caller = net.host()
    hosts = [net.host() for _ in range(4)]
    net_id = net.router.relay_id.hex()
    services = [host.serve("db", echo) for host in hosts[:2]]
    services.append(hosts[2].serve("db"))  # does not answer
    services.append(hosts[3].serve("db", echo))
    services[3].refusal = Refusal.FULL
    answers = caller.survey("db", b"q")
    net.run()
    ids = [f"{net_id}.{service.member}" for service in services]
    assert answers.roster_ids == ids
    assert answers.payloads == [b"q", b"q"]
    assert answers.end is None
    hosts[2].lose()
    net.run()
    assert answers.end is not None
    lost, error = answers.end
    assert (sorted(lost), error) == (sorted([ids[2], ids[3]]), None)


def test_a_survey_that_times_out_ends_without_an_error(net: Network) -> None:
    caller, member = net.host(), net.host()
    service = member.serve("db")
    answers = caller.survey("db", timeout_ms=100)
    net.run()
    net.pass_time(0.2)
    assert answers.end == ([], None)
    service.deliveries[0].reply(b"", None, False)
    net.run()
    assert answers.payloads == []


def test_a_survey_without_members_raises_no_members(net: Network) -> None:
    answers = net.host().survey("db")
    net.run()
    assert answers.end is not None
    assert isinstance(answers.end[1], NoMembers)


def test_a_broadcast_reaches_every_member_in_the_senders_order(net: Network) -> None:
    senders = [net.host(), net.host()]
    services = [net.host().serve("db") for _ in range(3)]
    for n in range(20):
        for host in senders:
            host.publish("db", b"%d" % n, kind=Kind.BROADCAST)
    net.run()
    for service in services:
        by_source: dict[bytes, list[int]] = {}
        for message in service.casts:
            by_source.setdefault(message.source, []).append(int(message.payload))
        assert list(by_source.values()) == [list(range(20))] * 2


def test_two_filters_of_one_session_get_one_copy_on_the_wire(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    wide, narrow = receiver.subscribe("a.>"), receiver.subscribe("a.b")
    copies: list[bytes] = []

    def watch(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.PUBLISH:
            copies.append(frame)
        return [frame]

    net.tamper = watch
    sender.publish("a.b", b"1", b"2")
    sender.publish("a.c", b"3")
    net.run()
    assert (wide.payloads, narrow.payloads) == ([b"1", b"2", b"3"], [b"1", b"2"])
    assert len(copies) == 2


def test_a_duplicate_subscription_of_a_session_is_refused(net: Network) -> None:
    host = net.host()
    host.subscribe("a.>")
    acks = {group: Result() for group in ("", "g")}
    for group, ack in acks.items():
        host.session.ask(
            lambda number, group=group: frames.Subscribe(number, "a.>", [KEY.key_id], group),  # type: ignore[misc]
            ack,
        )
    net.run()
    assert acks[""].message.error == "this session is already subscribed to 'a.>'"
    assert acks["g"].message.error == "", "a group is another subscription"


def test_one_member_of_each_group_and_every_plain_subscriber_gets_a_message(net: Network) -> None:
    sender, both, other = net.host(), net.host(), net.host()
    plain = both.subscribe("a.*")
    shared = [both.subscribe("a.b", group="g"), other.subscribe("a.>", group="g")]
    alone = other.subscribe(">", group="h")
    for n in range(20):
        sender.publish("a.b", b"%d" % n)
    net.run()
    assert plain.payloads == alone.payloads == [b"%d" % n for n in range(20)]
    assert sorted(shared[0].payloads + shared[1].payloads, key=int) == plain.payloads
    assert shared[0].payloads
    assert shared[1].payloads
    assert not sender.losses
    assert not both.losses
    assert not other.losses


def test_a_message_that_matches_several_filters_of_a_group_reaches_it_once(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inboxes = [receiver.subscribe("a.*", group="g"), receiver.subscribe("a.b", group="g")]
    copies: list[bytes] = []

    def watch(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.PUBLISH:
            copies.append(frame)
        return [frame]

    net.tamper = watch
    sender.publish("a.b", b"x")
    net.run()
    assert len(copies) == 1
    assert sum(len(inbox.payloads) for inbox in inboxes) >= 1


def test_a_dropped_bundle_is_reported_exactly_when_there_is_room_again(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.publish("a", b"0")
    net.run()
    receiver.port.room = 0
    sender.publish("a", b"1", b"2", b"3")
    sender.publish("a", b"4")
    net.run()
    receiver.port.room = None
    net.router.writable(receiver.peer)
    net.run()
    assert inbox.payloads == [b"0"]
    assert [gap.count for gap in inbox.gaps] == [4]
    sender.publish("a", b"5")
    net.run()
    assert inbox.payloads == [b"0", b"5"]
    assert sum(gap.count or 0 for gap in inbox.gaps) == 4, "the next message repeats no gap"


@pytest.mark.parametrize("first_known", [True, False])
def test_gaps_around_what_arrived_are_reported_exactly(net: Network, first_known: bool) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sent = 0

    def publish(count: int, *, room: int | None) -> None:
        nonlocal sent
        receiver.port.room = room
        sender.publish("a", *[b"%d" % (sent + n) for n in range(count)])
        sent += count
        net.run()

    if first_known:
        publish(1, room=None)
    for dropped, passed in ((5, 5), (20, 1), (3, 2), (7, 0)):
        publish(dropped, room=0)
        if passed:
            publish(passed, room=passed)
    receiver.port.room = None
    net.router.writable(receiver.peer)
    net.run()
    reported = sum(gap.count or 0 for gap in inbox.gaps)
    assert len(inbox.payloads) + reported == sent
    publish(1, room=None)
    reported = sum(gap.count or 0 for gap in inbox.gaps)
    assert len(inbox.payloads) + reported == sent


def test_what_nobody_wants_is_counted_as_unwanted(net: Network) -> None:
    host = net.host()
    host.publish("a", b"1", b"2")
    net.run()
    assert net.router.accounts.unwanted == 2


def test_unsubscribing_ends_delivery_and_prunes_the_tree(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a.*.c")
    sender.publish("a.b.c", b"1")
    net.run()
    ack = Result()
    receiver.session.ask(lambda number: frames.Unsubscribe(number, "a.*.c"), ack)
    net.run()
    sender.publish("a.b.c", b"2")
    net.run()
    assert inbox.payloads == [b"1"]
    assert ack.message.error == ""
    assert net.router.interest._topics == {}


def test_an_alias_table_that_is_full_goes_on_by_redeclaring() -> None:
    net = Network(limits=Limits(aliases=16))
    receiver, sender = net.host(), net.host()
    sender.session.out._aliases._limit = 16
    inbox = receiver.subscribe(">")
    for turn in range(3):
        for n in range(100):
            sender.publish(f"t{n}", b"%d" % turn)
        net.run()
    assert len(inbox.messages) == 300
    assert not inbox.gaps
    assert not receiver.ended_because
    assert not sender.ended_because
    for n in range(100):
        got = [message.payload for message in inbox.messages if message.name == f"t{n}"]
        assert got == [b"0", b"1", b"2"]
    net.check()


def test_watchers_hear_of_joins_and_leaves_and_a_member_under_two_keys_counts_once(
    net: Network,
) -> None:
    watcher, member = net.host(keys=[KEY, OTHER_KEY]), net.host(keys=[KEY, OTHER_KEY])
    for key in (KEY, OTHER_KEY):
        watcher.session.out.prove(key)
    received: list[frames.Membership] = []
    watcher.session.watch("db", [KEY.key_id, OTHER_KEY.key_id], received.append, stay=True)
    net.run()
    assert [m.joined for m in received] == [[]]
    member.serve("db", keys=[KEY, OTHER_KEY])
    assert len(received) == 2
    assert [info.key_ids for info in received[1].joined] == [[KEY.key_id, OTHER_KEY.key_id]]
    member.lose()
    net.run()
    assert received[2].left == [received[1].joined[0].member]


def test_bye_is_answered_when_all_before_it_has_been_routed(net: Network) -> None:
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.publish("a", b"last words")
    sender.session.out.control(frames.Bye("done"))
    net.run()
    assert inbox.payloads == [b"last words"]
    assert sender.session.state is State.ENDED
    assert sender.peer.closed


def test_a_pong_says_that_everything_before_the_ping_was_routed(net: Network) -> None:
    caller = net.host()
    result = Result()
    caller.push("nobody")
    caller.session.ask(frames.Ping, result)
    net.run()
    assert isinstance(result.message, frames.Pong)
    assert [loss.name for loss in caller.losses] == ["nobody"]


def test_an_answer_that_waits_for_other_relays_takes_back_nothing_of_what_was_routed() -> None:
    net = Network(relays=2)
    _, there = net.link(0, 1)
    there.tamper = lambda frame: []  # the other relay is slow
    caller, member = net.host(), net.host()
    member.serve("db")
    settled, routed = Result(), Result()
    caller.session.ask(frames.Settle, settled)
    caller.push("db", timeout_ms=60_000)
    caller.session.ask(frames.Ping, routed)
    net.run()
    assert routed.done()
    assert not settled.done()
    net.pass_time(1.1)
    assert settled.done()
    caller.lose("the relay went away")
    assert caller.losses == [], "a member has it"


def test_the_end_of_a_session_ends_everything_that_it_waits_for(net: Network) -> None:
    caller, member = net.host(), net.host()
    member.serve("db")
    answer, survey, ack = caller.request("db"), caller.survey("db"), Result()
    caller.session.ask(frames.Status, ack)
    net.run()
    assert ack.message is not None
    caller.lose("the relay went away")
    assert isinstance(answer.error, ConnectionLost)
    assert survey.end is not None
    assert isinstance(survey.end[1], ConnectionLost)
    member.lose()


def test_a_relay_that_drains_tells_members_and_newcomers(net: Network) -> None:
    drained: list[str] = []
    hosts = [net.host("old")]
    hosts[0].draining = lambda: drained.append("old")  # type: ignore[method-assign]
    net.router.drain(1000)
    net.run()
    assert drained == ["old"]
    seen: list[frames.Drain] = []

    def watch(host: Host, frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.DRAIN:
            seen.append(control_of(frame))
        return [frame]

    net.tamper = watch
    net.host("new")
    assert seen == [frames.Drain(0)]


def test_a_process_of_another_user_of_this_host_sees_numbers_and_no_names(net: Network) -> None:
    own, other = net.host("payroll"), net.host("other")
    own.serve("salaries")
    other.peer.ours = False
    documents = []
    for host in (own, other):
        report = Result()
        host.session.ask(frames.Status, report)
        net.run()
        documents.append(json.loads(report.message.document))
    full, limited = documents
    assert full["sessions"][0]["label"] == "payroll"
    assert "salaries" in full["clusters"]
    assert limited["counts"]["sessions"] == 2
    assert "payroll" not in str(limited)
    assert "salaries" not in str(limited)
    assert "clusters" not in limited


def test_a_status_that_does_not_fit_a_frame_is_replaced_by_numbers(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = net.host("own")
    monkeypatch.setattr(net.router, "status_extra", lambda: {"long": "x" * (16 << 20)})
    report = Result()
    host.session.ask(frames.Status, report)
    net.run()
    assert json.loads(report.message.document)["counts"]["sessions"] == 1
    assert not host.ended_because
