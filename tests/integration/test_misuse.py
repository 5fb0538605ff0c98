"""A client that is used too early, too late or in the wrong form says what to do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import iris
from iris.streams import Streams

NOT_OPEN = "this client is not connected yet; enter it with `async with`, or await its open()"
CLIENT: dict[str, Callable[[Any], Any]] = {
    "audience": lambda c: c.audience("a"),
    "broadcast": lambda c: c.broadcast("a", "b"),
    "describe": lambda c: c.describe("a"),
    "flush": lambda c: c.flush(),
    "members": lambda c: c.members("a"),
    "offer": lambda c: c.offer("a", "b"),
    "offer_broadcast": lambda c: c.offer_broadcast("a", "b"),
    "open_tunnel": lambda c: c.open_tunnel("a", timeout=1),
    "ping": lambda c: c.ping("a"),
    "publish": lambda c: c.publish("a", "b"),
    "push": lambda c: c.push("a", "b"),
    "reload_keys": lambda c: c.reload_keys(),
    "request": lambda c: c.request("a", "b", timeout=1),
    "request_many": lambda c: anext(c.request_many("a", ["b"], timeout=1)),
    "serve": lambda c: c.serve(iris.Service("a")).__aenter__(),
    "stats": lambda c: c.stats(),
    "status": lambda c: c.status(),
    "subscribe": lambda c: c.subscribe("a"),
    "survey": lambda c: anext(aiter(c.survey("a", "b", timeout=1))),
    "tunnel": lambda c: c.tunnel("a", timeout=1).__aenter__(),
    "wait_for_members": lambda c: c.wait_for_members("a", 1, timeout=1),
    "wait_for_subscribers": lambda c: c.wait_for_subscribers("a", 1, timeout=1),
    "watch_losses": lambda c: c.watch_losses().__aenter__(),
    "watch_members": lambda c: anext(c.watch_members("a")),
}
STREAMS: dict[str, Callable[[Any], Any]] = {
    "append": lambda s: s.append("a", "b"),
    "append_many": lambda s: s.append_many("a", ["b"]),
    "balance": lambda s: s.balance(),
    "change": lambda s: s.change("a", max_bytes=1),
    "change_consumer": lambda s: s.change_consumer("a", "b", max_deliver=1),
    "commit": lambda s: s.commit("a", writer="w", batch=1, attempts=[]),
    "consumer": lambda s: anext(s.consumer("a", "b")),
    "consumers": lambda s: s.consumers("a"),
    "create": lambda s: s.create("a"),
    "dead_letters": lambda s: s.dead_letters("a"),
    "delete": lambda s: s.delete("a"),
    "delete_consumer": lambda s: s.delete_consumer("a", "b"),
    "handover": lambda s: s.handover("a", "b"),
    "handover_consumer": lambda s: s.handover_consumer("a", "b"),
    "describe": lambda s: s.describe("a"),
    "discard": lambda s: s.discard("a", writer="w", batch=1),
    "fetch": lambda s: s.fetch("a", 0),
    "find": lambda s: s.find("a", "first"),
    "list": lambda s: s.list(),
    "mirror": lambda s: s.mirror("eu:a", "a").__aenter__(),
    "move": lambda s: s.move("a", to="b"),
    "partitions": lambda s: s.partitions("a"),
    "pause": lambda s: s.pause("a"),
    "pause_consumer": lambda s: s.pause_consumer("a", "b"),
    "promote": lambda s: s.promote("a"),
    "read": lambda s: anext(aiter(s.read("a"))),
    "redrive": lambda s: s.redrive("a", "b"),
    "resume": lambda s: s.resume("a"),
    "resume_consumer": lambda s: s.resume_consumer("a", "b"),
    "share_keys": lambda s: s.share_keys(),
    "stage": lambda s: s.stage("a", writer="w", batch=1).append("x"),
    "stores": lambda s: s.stores(),
}


def methods(kind: type, *others: str) -> set[str]:
    """Return the public methods of a class, without `others`."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name for name, _ in found if not name.startswith("_")} - set(others)


async def done(call: Callable[[Any], Any], of: object) -> None:
    result = call(of)
    if inspect.isawaitable(result):
        await result


async def test_every_method_of_a_client_that_is_not_open_says_how_to_open_it() -> None:
    assert methods(iris.Client, "open", "close") == set(CLIENT)
    assert methods(Streams, "finish", "end", "keys_changed") == set(STREAMS)
    client = iris.connect(embedded=True)
    calls = [(name, call, client) for name, call in CLIENT.items()]
    calls += [(f"streams.{name}", call, client.streams) for name, call in STREAMS.items()]
    for name, call, of in calls:
        with pytest.raises(iris.Closed) as caught:
            await done(call, of)
        assert str(caught.value) == NOT_OPEN, name
    with pytest.raises(iris.Closed):
        _ = client.keyring


async def test_what_is_awaited_instead_of_entered_says_how_to_use_it() -> None:
    async with iris.connect(embedded=True) as client:
        for thing, use in (
            (iris.connect(embedded=True), "async with iris.connect(...) as client:"),
            (client.subscribe("a"), "async with client.subscribe(...) as messages:"),
            (client.survey("a", "b", timeout=1), "async for answer in client.survey(...):"),
            (client.streams.read("a"), "async for message in client.streams.read(...):"),
            (client.streams.consumer("a", "b"), "async with client.streams.consumer(...) as work:"),
            (client.streams.stage("a", writer="w", batch=1), "async with client.streams.stage(...) as staging:"),
        ):  # fmt: skip
            wrong: Any = thing
            with pytest.raises(TypeError) as caught:
                await wrong
            name = type(thing).__name__
            assert str(caught.value) == f"a {name} cannot be awaited; use `{use}`"
            with pytest.raises(TypeError) as caught, wrong:
                pytest.fail("it was entered")
            assert str(caught.value) == f"a {name} needs `async with`: `{use}`"


@pytest.mark.parametrize("payload", [b"x", "x"], ids=repr)
def test_a_client_whose_loop_is_closed_sends_nothing_and_says_so(payload: object) -> None:
    client = iris.connect(embedded=True)

    async def begin() -> None:
        await client.open()
        await client.publish("a", payload)

    async def use() -> None:
        for _ in range(3):
            for call in (
                lambda: client.publish("a", payload),
                lambda: client.request("a", payload, timeout=1),
                lambda: client.push("a", payload),
                lambda: client.streams.append("a", payload),
            ):
                with pytest.raises(iris.Closed, match="belongs to an event loop that is closed"):
                    await call()

    asyncio.run(begin())
    asyncio.run(use())
