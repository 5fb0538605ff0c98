"""A value that is out of range is refused before it is sent, by the name and in the unit of the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored

import iris


async def first(messages: Any) -> None:
    async for _ in messages:
        return


WRONG: dict[str, Callable[[iris.Client], Awaitable[Any]]] = {
    "ack_timeout must be from 0.001 to 86400 s, not 0": lambda c: first(c.streams.consumer("log", "w", ack_timeout=0)),
    "ack_timeout must be from 0.001 to 86400 s, not 90000": lambda c: c.streams.change_consumer("log", "w", ack_timeout=90_000),
    "max_deliver must be from 0 to 65535, not 65536": lambda c: first(c.streams.consumer("log", "w", max_deliver=65_536)),
    "prefetch must be from 1 to 1048576, not 2000000": lambda c: first(c.streams.consumer("log", "w", prefetch=2_000_000)),
    "shared must be True or False, not 'yes'": lambda c: first(c.streams.consumer("log", "w", shared="yes")),  # type: ignore[arg-type]  # that is the test
    "batch_bytes must be from 1 to 67108864, not 0": lambda c: first(c.streams.read("log", batch_bytes=0)),
    "patience must be at least 0.001 s, not -1": lambda c: first(c.streams.read("log", patience=-1)),
    "start must be from 0 to 9223372036854775807, not -3": lambda c: c.streams.fetch("log", -3),
    "max_bytes must be from 1 to 67108864, not 100000000": lambda c: c.streams.fetch("log", 0, max_bytes=100_000_000),
    "wait must be from 0 to 60 s, not 61": lambda c: c.streams.fetch("log", 0, wait=61),
    "expect must be from 0 to 9223372036854775807, not -1": lambda c: c.streams.append("log", "x", expect=-1),
    "key must be str or bytes, not 5": lambda c: c.streams.append("log", "x", key=5),  # type: ignore[arg-type]  # that is the test
    "message_id must be str or bytes, not 5": lambda c: c.streams.append("log", "x", message_id=5),  # type: ignore[arg-type]  # that is the test
    "ttl must be a number, not '5'": lambda c: c.streams.append("log", "x", ttl="5"),  # type: ignore[arg-type]  # that is the test
    "deliver_at must be a datetime, not 'now'": lambda c: c.streams.append("log", "x", deliver_at="now"),  # type: ignore[arg-type]  # that is the test
    "timeout must be a number, not '5'": lambda c: c.streams.append("log", "x", timeout="5"),  # type: ignore[arg-type]  # that is the test
    "timeout must be a number, not '6'": lambda c: c.streams.append_many("log", ["x"], timeout="6"),  # type: ignore[arg-type]  # that is the test
    "max_age must be from 0 to 9.22337e+12 s, not 1e+18": lambda c: c.streams.create("other", max_age=1e18),
    "dedup_window must be from 0 to 9.22337e+12 s, not 1e+18": lambda c: c.streams.change("log", dedup_window=1e18),
    "offset must be from 0 to 9223372036854775807, not -1": lambda c: c.streams.redrive("log", "w", offset=-1),
}  # fmt: skip


async def test_a_value_that_a_store_would_refuse_is_named_by_the_client(tmp_path: Path) -> None:
    async with stored(tmp_path) as (_, client, _):
        await client.streams.create("log")
        for text, call in WRONG.items():
            with pytest.raises(iris.IrisError) as caught:
                await call(client)
            assert (type(caught.value), str(caught.value)) == (iris.ConfigError, text)


@pytest.mark.parametrize("name", ["concurrency", "queue_bytes", "tunnels"])
def test_limits_that_a_relay_would_refuse_are_named_before_the_service_joins(name: str) -> None:
    with pytest.raises(iris.ConfigError, match=rf"^{name} must be from 1 to \d+, not {10**30}$"):
        iris.Limits(**{name: 10**30})


async def request_many(client: iris.Client, messages: Any) -> None:
    await first(client.request_many("echo", messages, timeout=5))


async def stage(client: iris.Client, messages: Any) -> None:
    async with client.streams.stage("log", writer="w", batch=1) as staging:
        await staging.append_many(messages)


async def passed_on(call: iris.Call, call_next: Any) -> Any:
    return await call_next(call)


@pytest.mark.parametrize(
    "one", [b"abc", "abc", bytearray(b"abc"), memoryview(b"abc"), {"a": 1}, 7], ids=repr
)
async def test_one_message_is_not_taken_for_many(tmp_path: Path, one: Any) -> None:
    async with stored(tmp_path) as (cluster, client, _):
        await client.streams.create("log")
        async with cluster.client(middleware=[passed_on]) as wrapped:
            for call, name, instead in (
                (lambda: request_many(client, one), "payloads", "request"),
                (lambda: request_many(wrapped, one), "payloads", "request"),
                (lambda: client.streams.append_many("log", one), "messages", "append"),
                (lambda: stage(client, one), "messages", "append"),
            ):
                with pytest.raises(iris.ConfigError) as caught:
                    await call()
                assert str(caught.value) == (
                    f"{name} must be a list or another iterable of messages, not {type(one).__name__}; "
                    f"send one message with {instead}"
                )
        assert (await client.streams.describe("log")).messages == 0
