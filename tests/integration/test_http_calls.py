"""The HTTP bridge: requests, pushes, broadcasts, surveys and publications."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from integration.http_kit import ALL, FEW, bridged
from support.waiting import until
from support.web import http

import iris
from iris import Refusal
from relay.bridges.http.metrics import source


class Shop:
    """A service that does what tests need."""

    def __init__(self, name: str = "shop") -> None:
        self.got: list[Any] = []
        self.started = asyncio.Event()
        self.cancelled = 0
        self.service = service = iris.Service(name, limits=iris.Limits(concurrency=1))

        @service.on_request
        async def echo(message: iris.Message) -> Any:
            self.got.append(message)
            return message.value

        @service.on_request("refuse")
        def refuse(message: iris.Message) -> None:
            raise Refusal("out_of_stock", "none left", sku="a-1", left=0)

        @service.on_request("fail")
        def fail(message: iris.Message) -> None:
            raise ValueError("a bug")

        @service.on_request("typed")
        def typed(number: int) -> int:
            return number + 1

        @service.on_request("headers")
        def headers(message: iris.Message) -> iris.Reply:
            return iris.Reply(b"ok", headers={"answer": "42", "not-for-http": "a\nb"})

        @service.on_request("wait", on_cancel="cancel")
        async def wait(message: iris.Message) -> None:
            self.started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        @service.on_push
        def push(message: iris.Message) -> None:
            self.got.append(message)

        @service.on_broadcast
        def broadcast(message: iris.Message) -> None:
            self.got.append(message)

        @service.on_survey
        def survey(message: iris.Message) -> Any:
            if message.payload == b"fail":
                raise Refusal("busy")
            return {
                "asked": message.value.decode()
                if isinstance(message.value, bytes)
                else message.value
            }


async def test_bytes_and_text_are_sent_as_they_are_and_so_are_replies(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        for body in (b"hello", b"", b"\x00\xff", "größe".encode()):
            answer = await bridge.post("/clusters/shop/request", body)
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["content-type"] == "application/octet-stream"
        answer = await bridge.post("/clusters/shop/request", b"hi", {"accept": "text/plain"})
        assert (answer.headers["content-type"], answer.body) == ("text/plain; charset=utf-8", b"hi")
    assert not any(message.packed for message in shop.got)


async def test_json_and_messagepack_are_sent_as_objects_and_come_back_as_is_wanted(
    tmp_path: Path,
) -> None:
    shop = Shop()
    value = {"sku": "a-1", "count": 3, "tags": ["x", None, True, 1.5]}
    async with bridged(tmp_path, service=shop.service) as bridge:
        for kind in (
            "application/json",
            "application/json; charset=utf-8",
            "application/cloudevents+json",
        ):
            answer = await bridge.post(
                "/clusters/shop/request", json.dumps(value).encode(), {"content-type": kind}
            )
            assert (answer.status, answer.json) == (200, value)
            assert answer.headers["content-type"] == "application/json"
        packed = msgspec.msgpack.encode(value)
        answer = await bridge.post(
            "/clusters/shop/request",
            packed,
            {"content-type": "application/msgpack", "accept": "application/msgpack"},
        )
        assert (answer.headers["content-type"], msgspec.msgpack.decode(answer.body)) == (
            "application/msgpack",
            value,
        )
        answer = await bridge.post(
            "/clusters/shop/request",
            b"3",
            {"content-type": "application/json", "iris-method": "typed"},
        )
        assert answer.json == 4
    assert all(message.packed for message in shop.got)


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"", "application/json"), (b"{", "application/json"), (b"[" * 100_000, "application/json"), (b"\xc1", "application/msgpack"),
     (b"\x91" * 100_000, "application/msgpack"), (b"", "application/msgpack"), (b"1" + b"0" * 30, "application/json")],
)  # fmt: skip
async def test_a_body_that_is_not_what_it_says_is_refused_and_not_sent(
    tmp_path: Path, body: bytes, kind: str
) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        answer = await bridge.post("/clusters/shop/request", body, {"content-type": kind})
        assert answer.status == 400, answer
        assert answer.json["may_have_run"] is False
    assert shop.got == []


async def test_headers_of_a_message_are_http_headers_with_a_prefix_both_ways(
    tmp_path: Path,
) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        answer = await bridge.post(
            "/clusters/shop/request",
            b"x",
            {"Iris-Header-Order": "7", "traceparent": trace, "x-other": "no"},
        )
        assert answer.status == 200
        assert shop.got[0].headers == {"order": "7", "traceparent": trace}
        answer = await bridge.post("/clusters/shop/request", b"x", {"iris-method": "headers"})
        assert answer.headers["iris-header-answer"] == "42"
        assert not [name for name in answer.headers if "not-for" in name]
        answer = await bridge.post("/clusters/shop/request", b"x", {"iris-header-big": "y" * 4000})
        assert answer.status == 431


async def test_errors_of_calls_say_whether_they_may_have_run(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:

        async def problem(target: str, body: bytes = b"", **headers: str) -> Any:
            answer = await bridge.post(
                target, body, {name.replace("_", "-"): text for name, text in headers.items()}
            )
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json["status"] == answer.status
            return answer.status, answer.json["type"], answer.json["may_have_run"], answer.json

        status, kind, ran, found = await problem("/clusters/shop/request", iris_method="refuse")
        assert (status, kind, ran) == (422, "/problems/refused", True)
        assert (found["code"], found["details"]) == ("out_of_stock", {"sku": "a-1", "left": 0})
        status, kind, ran, _ = await problem("/clusters/shop/request", iris_method="fail")
        assert (status, kind, ran) == (502, "/problems/handler-failed", True)
        status, kind, ran, _ = await problem("/clusters/shop/request", iris_method="nothing")
        assert (status, kind, ran) == (404, "/problems/no-method", False)
        status, kind, ran, _ = await problem("/clusters/shop/request", b"text", iris_method="typed")
        assert (status, kind, ran) == (422, "/problems/not-accepted", False)
        status, kind, ran, _ = await problem("/clusters/nobody/request")
        assert (status, kind, ran) == (503, "/problems/no-members", False)
        status, kind, ran, _ = await problem("/clusters/nobody/push")
        assert (status, kind, ran) == (503, "/problems/no-members", False)
        status, kind, ran, _ = await problem(
            "/clusters/shop/request", iris_method="wait", iris_timeout="0.05"
        )
        assert (status, kind, ran) == (504, "/problems/timeout", True)
        for headers in ({"iris_timeout": "x"}, {"iris_timeout": "0"}, {"iris_timeout": "1e9"}, {"iris_timeout": "nan"},
                        {"iris_idempotent": "perhaps"}, {"iris_member": "me"}, {"iris_method": "a b"}):  # fmt: skip
            status, kind, ran, _ = await problem("/clusters/shop/request", **headers)
            assert (status, kind, ran) == (400, "/problems/invalid", False), headers


async def test_a_client_that_disconnects_ends_its_call(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        async with http(bridge.address) as client:
            client.send(
                "POST",
                "/clusters/shop/request",
                {"authorization": f"Bearer {ALL}", "iris-method": "wait", "iris-timeout": "60"},
                b"x",
            )
            await asyncio.wait_for(shop.started.wait(), 20)
        await until(lambda: shop.cancelled == 1)
        await until(lambda: bridge.application.room.calls.total == 0)
        assert bridge.application.failed["caller left"] == 1


async def test_a_push_runs_and_one_that_nobody_takes_is_the_callers_error_alone(
    tmp_path: Path,
) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        answers = await asyncio.gather(
            *(
                bridge.post(f"/clusters/{('shop', 'nobody')[number % 2]}/push", b"%d" % number)
                for number in range(40)
            )
        )
        assert [answer.status for answer in answers] == [202, 503] * 20
        assert answers[0].body == b""
        await until(lambda: len(shop.got) == 20)
        assert not bridge.bridge.client.losses


async def test_a_broadcast_and_a_publication_are_answered_when_they_are_routed(
    tmp_path: Path,
) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        assert (await bridge.post("/clusters/shop/broadcast", b"all")).status == 202
        await until(lambda: [message.payload for message in shop.got] == [b"all"])
        async with bridge.cluster.client() as other, other.subscribe("news.>") as news:
            answer = await bridge.post(
                "/topics/news.today", b'{"a": 1}', {"content-type": "application/json"}
            )
            assert (answer.status, answer.json) == (202, {"subscribers": 1})
            async for message in news:
                assert message.value == {"a": 1}
                break
        assert (await bridge.post("/topics/news.today", b"x")).json == {"subscribers": 0}


async def test_a_survey_streams_lines_and_ends_with_a_sum(tmp_path: Path) -> None:
    one, two = Shop(), Shop()
    async with bridged(tmp_path, service=one.service) as bridge, bridge.cluster.serve(two.service):
        answer = await bridge.post("/clusters/shop/survey", b"version?")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert [line["payload"] for line in lines[:2]] == [{"asked": "version?"}] * 2
        assert lines[0]["member"] != lines[1]["member"]
        assert lines[2] == {"done": {"answered": 2, "failed": 0, "missing": []}}
        lines = [
            json.loads(line)
            for line in (await bridge.post("/clusters/shop/survey", b"fail")).body.splitlines()
        ]
        assert [line["code"] for line in lines[:2]] == ["busy", "busy"]
        assert lines[2] == {"done": {"answered": 0, "failed": 2, "missing": []}}


async def test_a_survey_of_nobody_says_so(tmp_path: Path) -> None:
    async with bridged(tmp_path) as bridge:
        answer = await bridge.post("/clusters/nobody/survey", b"")
        assert answer.status in (200, 503), answer
        if answer.status == 200:
            assert json.loads(answer.body) == {"done": {"answered": 0, "failed": 0, "missing": []}}


async def test_a_token_allows_its_verbs_and_names_alone(tmp_path: Path) -> None:
    shop, orders = Shop(), Shop("orders")
    async with (
        bridged(tmp_path, service=shop.service) as bridge,
        bridge.cluster.serve(orders.service),
    ):
        assert (await bridge.post("/clusters/orders/push", b"", token=FEW)).status == 202
        for target in ("/clusters/shop/push", "/clusters/orders/request", "/clusters/orders/broadcast", "/clusters/orders/survey",
                       "/clusters/eu:orders/push", "/topics/shop.a", "/streams/orders", "/clusters/mail.a.b/push"):  # fmt: skip
            answer = await bridge.post(target, b"", token=FEW)
            assert (answer.status, answer.json["type"]) == (403, "/problems/forbidden"), target
        for target in ("/topics/%3E", "/topics/*.a", "/topics/mail.a", "/streams/orders"):
            assert (await bridge.get(target, token=FEW)).status == 403, target
        assert (await bridge.post("/clusters/orders/push", b"", token="wrong")).status == 401
        assert (await bridge.post("/clusters/orders/push", b"", token="")).status == 401
        assert (
            await bridge.post("/clusters/orders/push", b"", {"host": "evil.example"})
        ).status == 421
        assert (
            await bridge.post("/clusters/orders/push", b"", {"origin": "https://evil.example"})
        ).status == 403


async def test_the_metrics_of_a_bridge_count_what_it_was_asked_and_what_it_refused(
    tmp_path: Path,
) -> None:
    async with bridged(tmp_path, service=Shop().service) as bridge:
        for _ in range(3):
            assert (await bridge.post("/clusters/shop/request", b"x")).status == 200
        assert (await bridge.post("/clusters/shop/request", b"", token="wrong")).status == 401
        async with bridge.events("/topics/news.%3E") as events:
            assert (await bridge.post("/topics/news.shop", b"y")).status == 202
            assert await events.next()
            page = source(bridge.bridge).page().decode().splitlines()
        for line in (
            'iris_bridge_ready{bridge="http"} 1.0',
            'iris_bridge_peers{bridge="http",socket="subscribe"} 1.0',
            'iris_bridge_messages_total{bridge="http",direction="in",socket="request"} 3.0',
            'iris_bridge_messages_total{bridge="http",direction="in",socket="publish"} 1.0',
            'iris_bridge_messages_total{bridge="http",direction="out",socket="subscribe"} 1.0',
            'iris_bridge_losses_total{bridge="http",cause="token",socket="http"} 1.0',
        ):
            assert line in page


async def test_names_are_decoded_after_the_path_is_split(tmp_path: Path) -> None:
    odd = iris.Service("a/b")

    @odd.on_request
    def echo(message: iris.Message) -> bytes:
        return message.payload

    async with bridged(tmp_path, service=odd) as bridge:
        assert (await bridge.post("/clusters/a%2Fb/request", b"x")).body == b"x"
        assert (await bridge.post("/clusters/a%2fb/request?x=1", b"x")).body == b"x"
        assert (await bridge.post("/clusters/a/b/request", b"x")).status == 404
        for target in ("/clusters/%FF/request", "/clusters/a%20b/request", "/clusters/a%0Ab/request", "/clusters//request",
                       "/clusters/*/request", "/topics/a.*", "/clusters/" + "x" * 300 + "/request", "/clusters/a..b/request",
                       "/clusters/%ED%A0%80/request", "/clusters/a%00/request"):  # fmt: skip
            answer = await bridge.post(target, b"x")
            assert (answer.status, answer.json["type"]) == (400, "/problems/invalid"), target
        for target in (
            "/",
            "/clusters/a/b",
            "/clusters/a/request/",
            "/../clusters/a/request",
            "/clusters",
            "/openapi.json/x",
        ):
            assert (await bridge.post(target, b"x")).status == 404, target
        for target, allow in (("/clusters/a/request", "POST"), ("/openapi.json", "GET")):
            answer = await bridge.get(target) if allow == "POST" else await bridge.post(target)
            assert (answer.status, answer.headers["allow"]) == (405, allow)


async def test_a_body_over_the_limit_is_refused_announced_or_not(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service, max_body_bytes=64 << 10) as bridge:
        assert (await bridge.post("/clusters/shop/request", b"x" * (64 << 10))).status == 200
        answer = await bridge.post("/clusters/shop/request", b"x" * ((64 << 10) + 1))
        assert (answer.status, answer.json["may_have_run"]) == (413, False)

        async with http(bridge.address) as client:
            client.writer.write(
                f"POST /clusters/shop/request HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALL}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(9):  # chunks without an end
                client.writer.write(b"2000\r\n" + b"x" * 8192 + b"\r\n")
            assert b" 413 " in await client.reader.readline()
        assert bridge.application.room.bytes == 0


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async with bridged(tmp_path, body_s=0.05) as bridge, http(bridge.address) as client:
        client.writer.write(
            f"POST /clusters/shop/request HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALL}\r\ncontent-length: 100\r\n\r\nx".encode()
        )
        assert b" 408 " in await client.reader.readline()
        assert bridge.application.room.calls.total == 0


async def test_a_full_bridge_says_so_and_recovers(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service, max_calls=1, calls_bytes=100) as bridge:
        answer = await bridge.post("/clusters/shop/request", b"x" * 101)
        assert (answer.status, answer.json["type"], answer.headers["retry-after"]) == (
            503,
            "/problems/full",
            "1",
        )
        waiting = asyncio.create_task(
            bridge.post("/clusters/shop/request", b"", {"iris-method": "wait", "iris-timeout": "1"})
        )
        await asyncio.wait_for(shop.started.wait(), 20)
        assert (await bridge.post("/clusters/shop/request", b"x")).status == 503
        assert (await waiting).status == 504
        assert (await bridge.post("/clusters/shop/request", b"x")).status == 200


async def test_a_name_without_a_key_is_the_operators_matter(tmp_path: Path) -> None:
    keyring = iris.Keyring({"shop": (iris.ClusterKey(bytes(32)),)})
    async with bridged(tmp_path, keyring=keyring) as bridge:
        for target in (
            "/clusters/other/request",
            "/clusters/other/push",
            "/clusters/other/survey",
            "/topics/news",
        ):
            answer = await bridge.post(target, b"x")
            assert (answer.status, answer.json["type"], answer.json["may_have_run"]) == (
                403,
                "/problems/no-key",
                False,
            ), target
        assert (await bridge.get("/topics/news")).status == 403


async def test_without_a_relay_nothing_runs_and_the_bridge_recovers(tmp_path: Path) -> None:
    shop = Shop()
    async with bridged(tmp_path, service=shop.service) as bridge:
        assert (await bridge.get("/ready", token="")).status == 200
        await bridge.cluster.stop_relay()
        answer = await bridge.post("/clusters/shop/request", b"x", {"iris-timeout": "0.05"})
        assert (answer.status, answer.json["may_have_run"]) == (503, False)
        answer = await bridge.post("/clusters/shop/push", b"x", {"iris-timeout": "0.05"})
        assert (answer.status, answer.json["may_have_run"]) == (503, False)
        assert (await bridge.get("/live", token="")).status == 200
        await bridge.cluster.start_relay()

        async def runs() -> bool:
            return (
                await bridge.post("/clusters/shop/request", b"x", {"iris-timeout": "5"})
            ).status == 200

        async with asyncio.timeout(20):
            while not await runs():
                pass


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    shop, random = Shop(), Random(7)
    targets = (
        "POST /clusters/shop/request",
        "POST /clusters/shop/push",
        "POST /clusters/shop/survey",
        "GET /topics/a",
        "POST /topics/a",
    )
    async with bridged(tmp_path, service=shop.service) as bridge:

        async def leave() -> None:
            method, target = random.choice(targets).split()
            body = b"x" * random.randrange(1, 30_000) if method == "POST" else b""
            head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALL}\r\ncontent-length: {len(body)}\r\n\r\n"
            sent = head.encode() + body
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(bridge.address.rpartition(":")[2])
            )
            writer.write(sent[: random.randrange(len(sent) + 1)])
            for _ in range(random.randrange(20)):
                await asyncio.sleep(0)
            writer.transport.abort()
            del reader

        for _ in range(10):
            await asyncio.gather(*(leave() for _ in range(30)))
        application = bridge.application
        await until(
            lambda: (
                not (
                    application.room.calls.total
                    or application.room.bytes
                    or application.topics.readers
                )
            )
        )
        await until(lambda: bridge.bridge.client.stats().subscriptions == ())
        assert (await bridge.post("/clusters/shop/request", b"still here")).body == b"still here"
        assert bridge.bridge.guard.denied == {}
