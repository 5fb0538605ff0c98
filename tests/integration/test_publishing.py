"""Publish and subscribe: order, filters, queue groups, and what happens when a receiver is slow."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest
from integration.kit import Collector, echo_service, fill, freeze, named
from support.waiting import until

import iris
from iris.core.credit import MIN_QUEUE_BYTES, WhenQueueFull
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.testing import LocalCluster
from iris.wire.names import matches


async def test_a_wildcard_selects_and_everything_comes_in_the_publishers_order() -> None:
    star, rest, exact = Collector(), Collector(), Collector()
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with (
            sub.subscribe("orders.*", star),
            sub.subscribe("orders.>", rest),
            sub.subscribe("orders.eu", exact),
        ):
            for n in range(500):
                await pub.publish("orders.eu", b"%d" % n)
                await pub.publish("orders.eu.de", b"%d" % n)
                await pub.publish("other", b"no")
            await until(lambda: len(rest.messages) == 1000)
            assert star.numbers == exact.numbers == list(range(500))
            for topic in ("orders.eu", "orders.eu.de"):
                got = [int(m.payload) for m in rest.messages if m.name == topic]
                assert got == list(range(500))


async def test_several_publishers_each_keep_their_order() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as sub, sub.subscribe("t", got):
        async with cluster.client() as a, cluster.client() as b:

            async def send(client: iris.Client) -> None:
                for n in range(200):
                    await client.publish("t", b"%d" % n)
                    if n % 5 == 0:
                        await asyncio.sleep(0)

            await asyncio.gather(send(a), send(b))
            await until(lambda: len(got.messages) == 400)
        by_source: dict[bytes, list[int]] = {}
        for message in got.messages:
            by_source.setdefault(message.source, []).append(int(message.payload))
        assert list(by_source.values()) == [list(range(200))] * 2


async def test_objects_text_and_headers_arrive_as_they_were_sent() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as client, client.subscribe("t", got):
        for payload, headers in (
            (b"raw", None), ("text", None), ({"a": [1, None]}, None), (b"h", {"k": "v"}), (b"", None),
        ):  # fmt: skip
            await client.publish("t", payload, headers=headers)
        await until(lambda: len(got.messages) == 5)
        assert [m.value for m in got.messages] == [b"raw", b"text", {"a": [1, None]}, b"h", b""]
        assert [m.headers for m in got.messages] == [None, None, None, {"k": "v"}, None]


async def test_each_queue_group_gets_a_message_once_and_plain_subscribers_all() -> None:
    plain, *grouped = (Collector() for _ in range(4))
    other = Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as pub,
        cluster.client() as one,
        cluster.client() as two,
        one.subscribe("jobs.*", plain),
        one.subscribe("jobs.*", grouped[0], group="workers"),
        two.subscribe("jobs.*", grouped[1], group="workers"),
        two.subscribe("jobs.>", grouped[2], group="workers"),
        one.subscribe("jobs.a", other, group="audit"),
    ):
        for n in range(100):
            await pub.publish("jobs.a", b"%d" % n)
            await pub.flush()
        await until(lambda: len(plain.messages) == 100 and len(other.messages) == 100)
        await cluster.settle()
        assert plain.numbers == other.numbers == list(range(100))
        first = grouped[0].numbers
        second = grouped[1].numbers + grouped[2].numbers
        assert sorted(first + second) == list(range(100))
        assert min(len(first), len(second)) >= 30
        assert not any(c.gaps for c in (plain, other, *grouped))


async def test_two_filters_of_one_group_in_one_process_get_a_message_once_between_them() -> None:
    wide, narrow = Collector(), Collector()
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with (
            sub.subscribe("jobs.>", wide, group="g"),
            sub.subscribe("jobs.a", narrow, group="g"),
        ):
            for n in range(20):
                await pub.publish("jobs.a", b"%d" % n)
            await pub.flush()
            await until(lambda: len(wide.messages) + len(narrow.messages) >= 20)
            await cluster.settle()
            assert sorted(wide.numbers + narrow.numbers) == list(range(20))


async def test_two_subscriptions_of_one_filter_get_all_and_end_one_by_one() -> None:
    first, second = Collector(), Collector()
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.subscribe("t", first):
            async with client.subscribe("t", second):
                await client.publish("t", b"0")
                await until(lambda: first.messages and second.messages)
            await client.publish("t", b"1")
            await until(lambda: len(first.messages) == 2)
        assert (first.numbers, second.numbers) == ([0, 1], [0])


async def test_after_the_end_of_a_subscription_nothing_is_delivered_and_the_relay_forgets_it() -> (
    None
):
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.subscribe("t", got):
            await client.publish("t", b"0")
            await until(lambda: got.messages)
        await client.publish("t", b"1")
        await client.flush()
        await cluster.settle()
        assert got.numbers == [0]
        assert (await client.status())["accounts"]["unwanted"] == 1
        async with client.subscribe("t", got):
            await client.publish("t", b"2")
            await until(lambda: len(got.messages) == 2)
        assert got.numbers == [0, 2]
        assert not got.gaps, "what nobody followed is no gap"


async def test_async_for_gives_what_a_callback_gets() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.subscribe("t", got), client.subscribe("t") as subscription:
            for n in range(300):
                await client.publish("t", b"%d" % n, headers={"n": str(n)} if n % 3 else None)
            iterated = []
            async for message in subscription:
                iterated.append(message)
                if len(iterated) == 300:
                    break
            assert iterated == got.messages


async def test_breaking_out_of_async_for_loses_nothing_within_async_with() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.subscribe("t") as subscription:
            for n in range(10):
                await client.publish("t", b"%d" % n)
            numbers = []
            for stop in (3, 7, 10):
                async for message in subscription:
                    numbers.append(int(message.payload))
                    if len(numbers) == stop:
                        break
            assert numbers == list(range(10))


async def test_async_for_alone_ends_its_subscription_when_it_is_left() -> None:
    async with LocalCluster() as cluster, named(cluster, "sub") as client:
        messages = aiter(client.subscribe("t"))
        task = asyncio.create_task(anext(messages))
        await client.flush()
        await client.publish("t", b"x")
        assert (await task).payload == b"x"
        await messages.aclose()
        await client.flush()
        (session,) = (await client.status())["sessions"]
        assert session["subscriptions"] == 0


async def test_iteration_ends_when_the_client_is_closed() -> None:
    async with LocalCluster() as cluster:
        async with cluster.client() as client:
            subscription = await client.subscribe("t").ready()

            async def collect() -> list[bytes]:
                return [message.payload async for message in subscription]

            task = asyncio.create_task(collect())
            await client.publish("t", b"last")
            await client.flush()
        assert await task == [b"last"]


@pytest.mark.parametrize("when_full", get_args(WhenQueueFull))
async def test_a_full_subscription_does_what_it_was_told_and_reports_the_exact_loss(
    when_full: WhenQueueFull,
) -> None:
    gaps = Collector()
    limit_bytes = MIN_QUEUE_BYTES if when_full == "wait" else 3000
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with sub.subscribe(
            "t", when_full=when_full, limit_bytes=limit_bytes, on_loss=gaps.gap
        ) as slow:
            for n in range(100):  # this publisher does not wait
                await pub.publish("t", b"%d" % n + b" " * (limit_bytes // 15))
                await pub.flush()
            await cluster.settle()
            messages: list[iris.Message] = []
            if when_full == "close":
                with pytest.raises(iris.Overloaded, match=r"when_full='close'"):
                    await fill(messages, slow)
            else:
                await slow.close()  # what is queued is still there
                await fill(messages, slow)
            got = [int(message.payload) for message in messages]
            assert len(got) + gaps.lost == 100
            assert 5 < len(got) < 20
            expected = range(100 - len(got), 100) if when_full == "drop-old" else range(len(got))
            assert got == list(expected)
            assert slow.lost_messages == gaps.lost
            assert sub.counters["slow subscriber"] == gaps.lost
            assert {gap.cause for gap in gaps.gaps} == {"slow subscriber"}


async def test_a_subscription_that_was_full_and_closed_takes_nothing_more() -> None:
    gaps = Collector()
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with sub.subscribe("t", when_full="close", limit_bytes=500, on_loss=gaps.gap) as slow:
            for n in range(10):
                await pub.publish("t", b"%d" % n + b" " * 200)
                await pub.flush()
            await cluster.settle()
            got: list[int] = []

            async def read_on() -> None:
                async for message in slow:
                    got.append(int(message.payload))
                    await pub.publish("t", b"again")
                    await pub.flush()
                    await cluster.settle()

            with pytest.raises(iris.Overloaded):
                await read_on()
            assert got == list(range(len(got)))
            assert len(got) + gaps.lost == 10 + len(got), "each later one is lost, and reported"


async def test_a_slow_coroutine_handler_is_bounded_in_the_same_way() -> None:
    got, release = Collector(), asyncio.Event()

    async def slow(message: iris.Message) -> None:
        await release.wait()
        got(message)

    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with sub.subscribe("t", slow, limit_bytes=3000, on_loss=got.gap):
            for n in range(100):
                await pub.publish("t", b"%d" % n + b" " * 200)
                await pub.flush()
            release.set()
            await until(lambda: len(got.messages) + got.lost == 100)
            await cluster.settle()
            assert len(got.messages) + got.lost == 100
            assert got.numbers == list(range(len(got.numbers)))
            assert got.lost > 50


async def test_what_the_relay_drops_for_a_slow_receiver_is_reported_exactly() -> None:
    got, witness = Collector(), Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as pub,
        named(cluster, "slow") as slow,
        cluster.client() as other,
        slow.subscribe("t.*", got, on_loss=got.gap),
        other.subscribe("t.>", witness, on_loss=witness.gap),
    ):
        limit = cluster.relay.config.port_queue_bytes
        sent = dict.fromkeys(range(3), 0)
        for round_number in range(3):
            resume = freeze(cluster, "slow")
            for n in range(limit // 20_000):
                topic = n % 3
                size = (60_000, 100, 30_000)[(n + round_number) % 3]
                await pub.publish(f"t.{topic}", b"%d" % sent[topic] + b" " * size)
                sent[topic] += 1
                if n % 20 == 0:
                    await pub.flush()
            await pub.flush()
            resume()
            total = sum(sent.values())
            await until(lambda total=total: len(got.messages) + got.lost >= total)  # type: ignore[misc]  # a bound default
        await cluster.settle()
        total = sum(sent.values())
        assert len(got.messages) + got.lost == total
        assert got.lost > 0
        assert len(witness.messages) == total
        assert not witness.gaps
        for topic, count in sent.items():
            numbers = [int(m.payload) for m in got.messages if m.name == f"t.{topic}"]
            reported = sum(gap.count or 0 for gap in got.gaps if gap.name == f"t.{topic}")
            assert numbers == sorted(set(numbers))
            assert len(numbers) + reported == count
        for topic in sent:
            await pub.publish(f"t.{topic}", b"%d" % sent[topic])
        await until(lambda: len(got.messages) + got.lost >= total + 3)
        await cluster.settle()
        assert len(got.messages) + got.lost == total + 3


async def test_a_group_member_learns_of_drops_on_its_own_queue() -> None:
    got = [Collector(), Collector()]
    async with (
        LocalCluster() as cluster,
        cluster.client() as pub,
        named(cluster, "one") as one,
        one.subscribe("t", got[0], group="g", on_loss=got[0].gap),
    ):
        resume = freeze(cluster, "one")
        total = 2 * cluster.relay.config.port_queue_bytes // 60_000
        for n in range(total):
            await pub.publish("t", b"%d" % n + b" " * 60_000)
        await pub.flush()
        resume()
        await until(lambda: len(got[0].messages) + got[0].lost >= total)
        await cluster.settle()
        assert len(got[0].messages) + got[0].lost == total
        assert got[0].lost > 0


async def test_a_slow_group_member_is_passed_over() -> None:
    slow, fast = Collector(), Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as pub,
        named(cluster, "slow") as one,
        cluster.client() as two,
        one.subscribe("t", slow, group="g", on_loss=slow.gap),
        two.subscribe("t", fast, group="g", on_loss=fast.gap),
    ):
        resume = freeze(cluster, "slow")
        total = 2 * cluster.relay.config.port_queue_bytes // 60_000
        for n in range(total):
            await pub.publish("t", b"%d" % n + b" " * 60_000)
            await pub.flush()
        resume()
        await until(lambda: len(slow.messages) + len(fast.messages) >= total)
        await cluster.settle()
        assert sorted(slow.numbers + fast.numbers) == list(range(total))
        assert not slow.gaps
        assert not fast.gaps


async def test_offer_refuses_when_the_write_buffer_is_full_and_publish_waits() -> None:
    got = Collector()
    async with (
        LocalCluster() as cluster,
        named(cluster, "pub", write_high_bytes=4096) as pub,
        cluster.client() as sub,
        sub.subscribe("t", got),
    ):
        taken = 0
        while pub.offer("t", b"%d" % taken + b" " * 10_000):
            taken += 1
            if taken % 100 == 0:
                await asyncio.sleep(0)
            assert taken < 10_000, "it never refuses"
        waiting = asyncio.create_task(pub.publish("t", b"%d" % taken))
        await waiting
        await until(lambda: len(got.messages) == taken + 1)
        assert got.numbers == list(range(taken + 1))
        assert pub.offer("t", b"room again")
        await until(lambda: len(got.messages) == taken + 2)


async def test_publications_while_the_relay_is_away_arrive_when_it_is_back() -> None:
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "pub") as pub, named(cluster, "sub") as sub:
            async with sub.subscribe("t", got):
                await pub.publish("t", b"0")
                await until(lambda: got.messages)
                await cluster.stop_relay()
                for n in range(1, 20):
                    await pub.publish("t", b"%d" % n)
                sub_back = asyncio.create_task(sub.flush(timeout=10))
                await cluster.start_relay()
                await sub_back
                await until(lambda: got.numbers[-1] == 19)
                await cluster.settle()
                assert got.numbers == [0, *range(got.numbers[1], 20)]
                async with sub.subscribe("later", got):
                    await pub.publish("later", b"20")
                    await until(lambda: got.numbers[-1] == 20)


async def test_publications_kept_for_the_relays_return_keep_their_order_with_later_ones() -> None:
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "both") as client, client.subscribe("t", got):
            await cluster.stop_relay()
            for n in range(50):
                await client.publish("t", b"%d" % n)
            await cluster.start_relay()
            for n in range(50, 100):
                await client.publish("t", b"%d" % n)
                await asyncio.sleep(0)
            await until(lambda: len(got.messages) == 100)
            assert got.numbers == list(range(100))


async def test_the_buffer_for_the_relays_return_is_bounded_and_says_so() -> None:
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "pub", offline_bytes=2000) as pub, pub.subscribe("t", got):
            await cluster.stop_relay()
            await until(lambda: not cluster.relay.hub.ports)
            kept = 0

            async def publish() -> None:
                nonlocal kept
                while True:
                    await pub.publish("t", b"%d" % kept + b" " * 100)
                    kept += 1

            with pytest.raises(iris.ConnectionLost) as caught:
                await publish()
            assert not caught.value.may_have_run
            assert 5 < kept < 20
            await cluster.start_relay()
            await until(lambda: len(got.messages) == kept)
            assert got.numbers == list(range(kept))


async def test_a_publication_without_a_key_is_refused_at_once_even_without_a_relay() -> None:
    keyring = iris.Keyring({"topic:orders": (iris.ClusterKey(b"k" * 32),)})
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "pub", keyring=keyring) as pub, pub.subscribe("orders.>", got):
            with pytest.raises(iris.KeyringError):
                await pub.publish("other", b"x")
            await cluster.stop_relay()
            await until(lambda: not cluster.relay.hub.ports)
            with pytest.raises(iris.KeyringError):
                await pub.publish("other", b"x")
            await pub.publish("orders.eu", b"kept")
            await cluster.start_relay()
            await until(lambda: got.messages)
            assert got.payloads == [b"kept"]


async def test_a_filter_without_a_key_is_refused_and_does_not_stand_in_the_way_of_a_reconnect() -> (
    None
):
    keyring = iris.Keyring({"topic:orders": (iris.ClusterKey(b"k" * 32),)})
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "sub", keyring=keyring) as sub, sub.subscribe("orders.>", got):
            with pytest.raises(iris.KeyringError):
                async with sub.subscribe("other.*"):
                    raise AssertionError("not subscribed")
            with pytest.raises(iris.KeyringError):
                await fill([], sub.subscribe("another.*"))
            with pytest.raises(iris.KeyringError):
                sub.subscribe("nobody.waits.for.its.answer", got)
            await cluster.stop_relay()
            await cluster.start_relay()
            await sub.flush(timeout=5)
            await sub.publish("orders.eu", b"x")
            await until(lambda: got.messages)


async def test_topics_under_another_key_are_another_address() -> None:
    ours, theirs = Collector(), Collector()
    other = iris.Keyring.single(iris.ClusterKey(b"o" * 32))
    async with (
        LocalCluster() as cluster,
        cluster.client() as us,
        cluster.client(keyring=other) as them,
        us.subscribe(">", ours),
        them.subscribe(">", theirs),
    ):
        await us.publish("t", b"ours")
        await them.publish("t", b"theirs")
        await until(lambda: ours.messages and theirs.messages)
        await cluster.settle()
        assert (ours.payloads, theirs.payloads) == ([b"ours"], [b"theirs"])


async def test_a_filter_that_may_match_several_keys_opens_all_of_them() -> None:
    keys = [iris.ClusterKey(bytes([n]) * 32) for n in range(3)]
    keyring = iris.Keyring({"default": keys[:1], "topic:a": keys[1:2], "topic:a.b": keys[2:]})
    got = Collector()
    async with LocalCluster() as cluster, cluster.client(keyring=keyring) as client:
        async with client.subscribe(">", got):
            for topic in ("x", "a.x", "a.b.x"):
                await client.publish(topic, topic.encode())
            await until(lambda: len(got.messages) == 3)
            assert sorted(got.payloads) == [b"a.b.x", b"a.x", b"x"]


async def test_a_callback_that_fails_misses_only_its_own_message() -> None:
    got: list[bytes] = []

    def fail_on_one(message: iris.Message) -> None:
        if message.payload == b"1":
            raise RuntimeError("one")
        got.append(message.payload)

    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.subscribe("t", fail_on_one):
            for n in range(4):
                await client.publish("t", b"%d" % n)
            await until(lambda: len(got) == 3)
            assert got == [b"0", b"2", b"3"]
            assert client.counters["failed handlers"] == 1


async def test_a_service_may_handle_publications_with_typed_payloads() -> None:
    service = iris.Service("watcher")
    got: list[Any] = []

    @service.on_publish("prices.*")
    def price(value: dict[str, int]) -> None:
        got.append(value)

    @service.on_publish("jobs.*", group="g")
    async def job(text: str) -> None:
        got.append(text)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await client.publish("prices.x", {"a": 1})
        await client.publish("jobs.y", "work")
        await until(lambda: len(got) == 2)
        assert sorted(got, key=str) == ["work", {"a": 1}]
    assert (await_counts := client.counters) == {} or await_counts.get("failed handlers", 0) == 0


@pytest.mark.parametrize("pattern", ["", "a b", "a.>.b", "a*"])
async def test_a_filter_outside_the_grammar_is_refused(pattern: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.InvalidName):
            client.subscribe(pattern)


async def test_an_event_is_compared_with_no_exact_topic_but_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def counting(pattern: str, topic: str) -> bool:
        compared.append(pattern)
        return matches(pattern, topic)

    async with LocalCluster() as cluster, cluster.client() as client:
        received: list[str] = []
        for number in range(50):
            client.subscribe(f"t.{number}", lambda message: received.append(message.name))
        client.subscribe("t.*", lambda message: received.append("*"))
        last = client.subscribe("t.>", lambda message: received.append(">"))
        await last.ready()
        monkeypatch.setattr("iris.registry.matches", counting)
        for number in range(50):
            await client.publish(f"t.{number}", b"x")
        await until(lambda: len(received) == 150)
        assert sorted(set(received)) == sorted(["*", ">", *(f"t.{number}" for number in range(50))])
        assert set(compared) == {"t.*", "t.>"}
        last.stop()
        await client.publish("t.0", b"x")
        await until(lambda: len(received) == 152)
        assert received[-2:] == ["t.0", "*"]


async def test_a_service_whose_topic_has_no_key_leaves_nothing_behind() -> None:
    service = echo_service()
    service.on_publish("a.>")(lambda payload: None)
    service.on_publish("b.>")(lambda payload: None)
    key = ClusterKey(bytes(32))
    keyring = Keyring({"echo": (key,), "topic:a": (key,)})
    async with LocalCluster() as cluster, cluster.client(keyring=keyring) as member:
        with pytest.raises(iris.KeyringError):
            async with member.serve(service):
                pass
        assert not member._registry.services
        assert not member._registry._subscriptions


async def test_a_coroutine_subscription_finishes_what_it_accepted_when_it_is_closed() -> None:
    got: list[bytes] = []
    first, go = asyncio.Event(), asyncio.Event()

    async def keep(message: iris.Message) -> None:
        first.set()
        await go.wait()
        got.append(message.payload)

    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as reader:
        subscription = await reader.subscribe("t", keep).ready()
        for n in range(5):
            await sender.publish("t", b"%d" % n)
        await sender.flush()
        await first.wait()
        await cluster.settle()
        closing = asyncio.create_task(subscription.close())
        await cluster.settle()
        go.set()
        await closing
        assert got == [b"0", b"1", b"2", b"3", b"4"]
        assert not reader._runtime.working


async def test_a_plain_handler_that_raises_cancelled_error_does_not_cost_the_session() -> None:
    def cancel(message: iris.Message) -> None:
        raise asyncio.CancelledError

    collector = Collector()
    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as reader:
        session = reader._attachment.session  # type: ignore[union-attr]
        await reader.subscribe("t", cancel).ready()
        await reader.subscribe("t", collector).ready()
        await sender.publish("t", b"x")
        await until(lambda: collector.payloads == [b"x"])
        assert reader.counters["failed handlers"] == 1
        assert reader._attachment.session is session  # type: ignore[union-attr]


async def test_tasks_that_share_a_subscription_get_each_message_once_and_all_end() -> None:
    got: list[int] = []

    async def work(subscription: iris.Subscription) -> None:
        async for message in subscription:
            got.append(int(message.payload))
            await asyncio.sleep(0)

    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with sub.subscribe("t") as subscription:
            tasks = [asyncio.create_task(work(subscription)) for _ in range(3)]
            for n in range(200):
                await pub.publish("t", b"%d" % n)
                if n % 7 == 0:
                    await until(lambda sent=n: len(got) > sent)  # type: ignore[misc]  # all wait again
            await until(lambda: len(got) == 200)
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)
        assert sorted(got) == list(range(200))
