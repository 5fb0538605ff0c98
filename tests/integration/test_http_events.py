"""The HTTP bridge: publications and streams as server-sent events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from integration.http_kit import ALL, FEW, TOKENS, Events, bridged
from support.waiting import until
from support.web import http

import iris
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.topics import Reader


async def test_publications_arrive_in_order_with_all_that_they_have(tmp_path: Path) -> None:
    async with bridged(tmp_path) as bridge, bridge.events("/topics/news.%3E") as events:
        async with bridge.cluster.client() as other:
            await other.publish("news.a", "text", headers={"n": "1"})
            await other.publish("news.a", b"\xff")
            await other.publish("news.a.b", {"k": [1]})
        assert await events.take(3) == [
            {"name": "news.a", "payload": "text", "encoding": "utf-8", "headers": {"n": "1"}},
            {"name": "news.a", "payload": "/w==", "encoding": "base64"},
            {"name": "news.a.b", "payload": {"k": [1]}, "encoding": "object"},
        ]


async def test_line_breaks_in_a_payload_do_not_make_events(tmp_path: Path) -> None:
    async with bridged(tmp_path) as bridge, bridge.events("/topics/a") as events:
        text = "x\n\nevent: end\rdata: {}\r\n\n"
        await bridge.post("/topics/a", text.encode())
        await bridge.post("/topics/a", b"next")
        assert [each["payload"] for each in await events.take(2)] == [text, "next"]


async def test_readers_of_a_filter_share_one_subscription_that_ends_with_the_last(
    tmp_path: Path,
) -> None:
    async with bridged(tmp_path) as bridge:
        stats = bridge.bridge.client.stats
        async with bridge.events("/topics/a.*") as one:
            async with bridge.events("/topics/a.*") as two, bridge.events("/topics/b") as other:
                assert len(stats().subscriptions) == 2
                assert bridge.application.topics.readers == 3
                assert (await bridge.post("/topics/a.x", b"1")).json == {"subscribers": 1}
                assert (await one.take(1), await two.take(1)) == (
                    [{"name": "a.x", "payload": "1", "encoding": "utf-8"}],
                ) * 2
                del other
            await until(lambda: bridge.application.topics.readers == 1)
            await bridge.post("/topics/a.x", b"2")
            assert (await one.take(1))[0]["payload"] == "2"
        await until(lambda: stats().subscriptions == ())
        async with bridge.events("/topics/a.*") as again:
            await bridge.post("/topics/a.x", b"3")
            assert (await again.take(1))[0]["payload"] == "3"


async def test_a_slow_reader_loses_alone_and_is_told_how_many(tmp_path: Path) -> None:
    count, size = 600, 20_000
    async with (
        bridged(tmp_path, reader_bytes=100_000) as bridge,
        bridge.events("/topics/a") as quick,
        http(bridge.address) as connection,
    ):
        connection.send("GET", "/topics/a", {"authorization": f"Bearer {ALL}"})
        await connection.start()
        connection.writer.transport.pause_reading()
        async with bridge.cluster.client() as other:
            got: list[Any] = []
            for number in range(count):
                await other.publish("a", b"%06d" % number + b"x" * size)
                got += await quick.take(1)
        assert [int(each["payload"][:6]) for each in got] == list(range(count))
        connection.writer.transport.resume_reading()
        slow, numbers, lost = Events(connection), [], 0
        while len(numbers) + lost < count:
            event = await slow.next()
            assert event is not None
            if event.get("event") == "loss":
                assert event["data"]["cause"] == "slow reader"
                assert event["data"]["count"] > 0
                lost += event["data"]["count"]
            else:
                number = int(event["data"]["payload"][:6])
                assert number == len(numbers) + lost  # what is told stands where it is missing
                numbers.append(number)
        assert len(numbers) + lost == count
        assert lost > 0
        assert bridge.application.topics.lost["slow reader"] == lost


async def test_a_reader_that_takes_nothing_is_disconnected(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, stall_s=0.1, reader_bytes=100_000) as bridge,
        http(bridge.address) as connection,
    ):
        connection.send("GET", "/topics/a", {"authorization": f"Bearer {ALL}"})
        await connection.start()
        connection.writer.transport.pause_reading()
        async with bridge.cluster.client() as other:
            while bridge.application.topics.readers:
                await other.publish("a", b"x" * 100_000)
                await asyncio.sleep(0)
        await until(lambda: bridge.application.failed["stalled reader"] == 1)


async def test_a_stream_without_events_has_comments(tmp_path: Path) -> None:
    async with bridged(tmp_path, heartbeat_s=0.01) as bridge, bridge.events("/topics/a") as events:
        text = b""
        async for chunk in events.connection.chunks():
            text += chunk
            if text.count(b": \n\n") > 2:
                break
        assert text.startswith(b"retry: 1000\n: connected\n\n")


async def test_a_loss_before_the_bridge_is_told_to_all_its_readers(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path) as bridge,
        bridge.events("/topics/a") as one,
        bridge.events("/topics/a") as two,
    ):
        (feed,) = bridge.application.topics._feeds.values()
        feed._missed(iris.Loss("publish", "a", b"", 7, "link lost"))
        feed._missed(iris.Loss("publish", "a", b"", None, "relay lost"))
        for events in (one, two):
            found = await events.take(1)
            found += await events.take(1)
            assert found == [
                {"count": 7, "cause": "link lost"},
                {"count": None, "cause": "relay lost"},
            ]


async def test_what_is_too_much_for_the_bridge_is_told_at_its_place(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, filter_bytes=3000) as bridge,
        bridge.events("/topics/a") as one,
        bridge.events("/topics/a") as two,
    ):
        (feed,) = bridge.application.topics._feeds.values()
        for number in range(20):  # in one turn of the loop, so that nothing is handed out meanwhile
            feed._take(iris.Message(b"%04d" % number + b"x" * 700, "a"))
            if number == 10:
                feed._missed(iris.Loss("publish", "a", b"", 7, "link lost"))
        await until(lambda: not feed._waiting)
        feed._take(iris.Message(b"last", "a"))
        for events in (one, two):
            got = [await events.take(1) for _ in range(6)]
            assert [each[0].get("payload", "")[:4] for each in got] == [
                "0000",
                "0001",
                "0002",
                "",
                "",
                "last",
            ]
            assert sorted((each[0]["cause"], each[0]["count"]) for each in got[3:5]) == [
                ("link lost", 7),
                ("the bridge was too slow", 17),
            ]
        assert bridge.application.topics.lost["the bridge was too slow"] == 34


async def test_limits_of_readers_and_filters_are_answered(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, max_readers=2, max_filters=1) as bridge,
        bridge.events("/topics/a"),
    ):
        answer = await bridge.get("/topics/b")
        assert (answer.status, answer.json["type"]) == (503, "/problems/full")
        async with bridge.events("/topics/a"):
            assert (await bridge.get("/topics/a")).status == 503
        await until(lambda: bridge.application.topics.readers == 1)
        async with bridge.events("/topics/a"):
            pass


async def test_a_reload_of_tokens_ends_streams_and_admits_by_the_new_ones(tmp_path: Path) -> None:
    async with bridged(tmp_path) as bridge, bridge.events("/topics/shop.a", token=FEW) as events:
        (tmp_path / "tokens.toml").write_text(
            TOKENS.replace(FEW, "another-token-0123456789-0123456789")
        )
        bridge.bridge.reload()
        event = await events.next()
        assert event is not None
        assert event["event"] == "end"
        assert await events.next() is None
        assert (await bridge.get("/topics/shop.a", token=FEW)).status == 401
        (tmp_path / "tokens.toml").write_text("broken")
        bridge.bridge.reload()
        await until(lambda: not bridge.bridge._reloads)
        assert (await bridge.get("/ready", token="")).status == 200
        assert (await bridge.post("/topics/a", b"x")).status == 202


async def test_a_stop_ends_streams_with_an_event(tmp_path: Path) -> None:
    async with bridged(tmp_path) as bridge, bridge.events("/topics/a") as events:
        bridge.application.end_streams()
        event = await events.next()
        assert event is not None
        assert event["event"] == "end"


async def test_an_append_is_answered_with_its_offset_when_it_is_stored(tmp_path: Path) -> None:
    async with bridged(tmp_path, data=True) as bridge, bridge.cluster.client() as other:
        await other.streams.create("orders", dedup_window=60.0)
        for number in range(3):
            answer = await bridge.post(
                "/streams/orders", b"%d" % number, {"iris-header-n": str(number)}
            )
            assert (answer.status, answer.json) == (201, {"offset": number})
        again = [
            await bridge.post("/streams/orders", b"once", {"idempotency-key": "abc"})
            for _ in range(3)
        ]
        assert [answer.json for answer in again] == [{"offset": 3}] * 3
        answer = await bridge.post("/streams/orders", b"4", {"iris-expect": "9"})
        assert (answer.status, answer.json["end"], answer.json["may_have_run"]) == (412, 4, False)
        assert (await bridge.post("/streams/orders", b"4", {"iris-expect": "4"})).json == {
            "offset": 4
        }
        assert (await bridge.post("/streams/orders", b"", {"iris-tombstone": "true"})).status == 409
        assert (await bridge.post("/streams/nothing", b"x")).status == 404
        for headers in ({"iris-expect": "-1"}, {"iris-expect": "x"}, {"iris-expect": "1" * 30}):
            assert (await bridge.post("/streams/orders", b"x", headers)).status == 400
        stored = [message.payload async for message in other.streams.read("orders", follow=False)]
        assert stored == [b"0", b"1", b"2", b"once", b"4"]


async def test_a_stream_is_read_from_anywhere_and_resumed_after_the_last_event(
    tmp_path: Path,
) -> None:
    async with bridged(tmp_path, data=True) as bridge, bridge.cluster.client() as other:
        await other.streams.create("orders")
        await other.streams.append_many("orders", [b"%d" % number for number in range(5)])

        async def read(target: str, **headers: str) -> list[tuple[str, str]]:
            found = []
            async with bridge.events(
                target, {name.replace("_", "-"): text for name, text in headers.items()}
            ) as events:
                while (event := await events.next()) is not None:
                    found.append(
                        (event.get("id", event.get("event", "")), event["data"].get("payload", ""))
                    )
            return found

        whole = [(str(number), str(number)) for number in range(5)] + [("end", "")]
        assert await read("/streams/orders?follow=false") == whole
        assert await read("/streams/orders?follow=false&start=3") == whole[3:]
        assert await read("/streams/orders?follow=false&start=last") == whole[4:]
        assert await read("/streams/orders?follow=false&start=new") == whole[5:]
        assert await read("/streams/orders?follow=false&start=2000-01-01T00:00:00Z") == whole
        assert (
            await read("/streams/orders?follow=false&start=first", last_event_id="2") == whole[3:]
        )
        async with bridge.events("/streams/orders", {"last-event-id": "4"}) as events:
            await other.streams.append("orders", b"5")
            event = await events.next()
            assert event is not None
            assert (event["id"], event["data"]["payload"], event["data"]["offset"]) == ("5", "5", 5)
        await until(lambda: bridge.application.streams.readers == 0)
        for target, status in (("/streams/orders?start=99", 409), ("/streams/orders?start=x", 400), ("/streams/orders?follow=x", 400),
                               ("/streams/nothing", 404), ("/streams/orders?%ff", 400)):  # fmt: skip
            assert (await bridge.get(target)).status == status, target


async def test_a_gap_of_a_stream_is_an_event_of_its_own_and_can_be_resumed_after(
    tmp_path: Path,
) -> None:
    async with bridged(tmp_path, data=True) as bridge, bridge.cluster.client() as other:
        await other.streams.create("orders", max_messages=2)
        for number in range(40):
            await other.streams.append("orders", b"%d" % number)
        while await other.streams.find("orders", "first") == 0:
            await other.streams.append("orders", b"more")
        async with bridge.events("/streams/orders?start=0") as events:
            gap = await events.next()
            assert gap is not None
            assert gap["event"] == "gap"
            assert gap["data"]["first"] == 0
            assert gap["data"]["cause"] == "retention"
            assert int(gap["id"]) == gap["data"]["end"] - 1
            message = await events.next()
            assert message is not None
            assert int(message["id"]) == gap["data"]["end"]
        async with bridge.events("/streams/orders", {"last-event-id": gap["id"]}) as events:
            assert (await events.next() or {})["id"] == message["id"]


async def test_readers_of_streams_are_limited_and_a_store_that_ends_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.bridges.http.streams.PATIENCE_S", 0.2)
    async with (
        bridged(tmp_path, data=True, max_stream_readers=1) as bridge,
        bridge.cluster.client() as other,
    ):
        await other.streams.create("orders")
        await other.streams.append("orders", b"0")
        async with bridge.events("/streams/orders") as events:
            assert (await events.next() or {})["id"] == "0"
            assert (await bridge.get("/streams/orders")).status == 503
            await bridge.cluster.stop_store()
            event = await events.next()
            assert event is not None
            assert event["event"] == "error"
            assert event["data"]["type"] in ("/problems/store-unavailable", "/problems/no-stream")
            assert await events.next() is None


async def test_events_wait_within_the_bound_of_a_reader() -> None:
    reader = Reader(100)
    assert reader.offer(b"a" * 300, 1) == 0  # an empty queue takes one event of any size
    assert reader.offer(b"b" * 10, 2) == 2
    reader.lose("relay lost", 0)
    assert await reader.next(1.0) == b"a" * 300
    assert reader.offer(b"c" * 10, 1) == 0
    text = await reader.next(1.0)
    assert [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: ")] == [
        {"count": 2, "cause": "slow reader"},
        {"count": None, "cause": "relay lost"},
    ]
    assert text.endswith(b"c" * 10)
    reader.end()
    assert await reader.next(1.0) == b""


def test_limits_of_the_bridge_are_checked() -> None:
    with pytest.raises(iris.ConfigError, match="max_body_bytes: 1 is not from"):
        HttpConfig(max_body_bytes=1)
    with pytest.raises(iris.ConfigError, match="stall_s: 0 is not valid"):
        HttpConfig(stall_s=0)
