"""Headers that cannot be sent are refused with the documented errors, in every call that has headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored

import iris
from iris.core.bundle import MAX_HEADERS_BYTES

WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": ({"a": 1}, iris.EncodeError, "header names and values must be str, not int"),
    "bytes": ({b"a": "1"}, iris.EncodeError, "header names and values must be str, not bytes"),
    "a surrogate": ({"a": "\ud800"}, iris.EncodeError, "the header 'a' has a surrogate"),
    "pairs": ([("a", "1")], iris.EncodeError, "headers must be a dict of str to str, not list"),
    "text": ("a: 1", iris.EncodeError, "headers must be a dict of str to str, not str"),
    "too much": (
        {"a": "x" * MAX_HEADERS_BYTES},
        iris.MessageTooLarge,
        f"headers of 3078 bytes are over the limit of {MAX_HEADERS_BYTES}; put what is large into the payload",
    ),
}


async def tunnel(client: iris.Client, headers: Any) -> None:
    async with client.tunnel("echo", timeout=5, headers=headers):
        pytest.fail("the tunnel was opened")


async def survey(client: iris.Client, headers: Any) -> None:
    async for _ in client.survey("echo", "x", timeout=5, headers=headers):
        pytest.fail("the survey was sent")


async def many(client: iris.Client, headers: Any) -> None:
    async for outcome in client.request_many("echo", ["x"], timeout=5, headers=headers):
        assert outcome.error is not None
        raise outcome.error


async def offer(client: iris.Client, headers: Any) -> None:
    client.offer("news", "x", headers=headers)


async def stage(client: iris.Client, headers: Any) -> None:
    async with client.streams.stage("log", writer="w", batch=1) as staging:
        await staging.append("x", headers=headers)


CALLS: dict[str, Callable[[iris.Client, Any], Awaitable[Any]]] = {
    "request": lambda c, h: c.request("echo", "x", timeout=5, headers=h),
    "request_many": many,
    "push": lambda c, h: c.push("echo", "x", headers=h),
    "survey": survey,
    "broadcast": lambda c, h: c.broadcast("echo", "x", headers=h),
    "publish": lambda c, h: c.publish("news", "x", headers=h),
    "offer": offer,
    "tunnel": tunnel,
    "append": lambda c, h: c.streams.append("log", "x", headers=h),
    "append at an offset": lambda c, h: c.streams.append("log", "x", headers=h, expect=0),
    "stage": stage,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_headers_that_cannot_be_sent_are_refused_in_every_call(
    tmp_path: Path, wrong: str
) -> None:
    headers, kind, text = WRONG[wrong]
    async with stored(tmp_path) as (_, client, member):
        await client.streams.create("log")
        service = iris.Service("echo")

        @service.on_request
        @service.on_survey
        @service.on_push
        @service.on_broadcast
        def echo(payload: str) -> str:
            pytest.fail("it was sent")

        @service.on_tunnel
        async def talk(tunnel: iris.Tunnel) -> None: ...

        async with member.serve(service):
            for name, call in CALLS.items():
                with pytest.raises(iris.IrisError) as caught:
                    await call(client, headers)
                assert type(caught.value) is kind, name
                assert text in str(caught.value), name


@pytest.mark.parametrize("wrong", ["a number", "too much"])
async def test_headers_of_a_reply_that_cannot_be_sent_are_an_error_of_the_handler(
    tmp_path: Path, wrong: str
) -> None:
    headers, _, text = WRONG[wrong]
    async with stored(tmp_path) as (_, client, member):
        service = iris.Service("echo")

        @service.on_request
        def echo(payload: str) -> object:
            return iris.Reply(payload, headers=headers)

        async with member.serve(service):
            with pytest.raises(iris.RemoteError, match=text):
                await client.request("echo", "x", timeout=5)
