"""What is not a name is refused before anything is sent, for each parameter that becomes a name on the wire.

The connection that other services of the process share stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

import iris
import iris.blocking
from iris.errors import LocalProtocolError
from iris.testing import LocalCluster
from iris.wire import frames

BAD: Final = (
    0,
    1.5,
    False,
    True,
    b"",
    b"orders",
    " ",
    "a b",
    "\ud800",
    "a\x00",
    [],
    ["orders"],
    object(),
)
"""Values that cannot be a name. None cannot either where a name is needed."""
UUIDS: Final = (0, 7, True, b"ab", "xyz", "ab", "\ud800", [], object())
Use = Callable[[iris.Client, Any], Any]


NEEDED: Final[dict[str, Use]] = {
    "request": lambda client, name: client.request(name, b"", timeout=5.0),
    "request_many": lambda client, name: client.request_many(name, [b""], timeout=5.0),
    "push": lambda client, name: client.push(name, b""),
    "survey": lambda client, name: client.survey(name, b"", timeout=5.0),
    "broadcast": lambda client, name: client.broadcast(name, b""),
    "offer_broadcast": lambda client, name: client.offer_broadcast(name, b""),
    "publish": lambda client, name: client.publish(name, b""),
    "publish and report": lambda client, name: client.publish(name, b"", count=True),
    "publish and wait": lambda client, name: client.publish(name, b"", when_full="wait"),
    "offer": lambda client, name: client.offer(name, b""),
    "offer an object": lambda client, name: client.offer(name, {}),
    "subscribe": lambda client, name: client.subscribe(name),
    "audience": lambda client, name: client.audience(name),
    "wait_for_subscribers": lambda client, name: client.wait_for_subscribers(name, 1, timeout=5.0),
    "tunnel": lambda client, name: client.tunnel(name, timeout=5.0),
    "open_tunnel": lambda client, name: client.open_tunnel(name, timeout=5.0),
    "members": lambda client, name: client.members(name),
    "watch_members": lambda client, name: client.watch_members(name),
    "wait_for_members": lambda client, name: client.wait_for_members(name, 0, timeout=5.0),
    "describe": lambda client, name: client.describe(name),
    "ping": lambda client, name: client.ping(name),
    "Service": lambda client, name: iris.Service(name),
    "on_publish": lambda client, name: iris.Service("s").on_publish(name)(print),
    "create": lambda client, name: client.streams.create(name),
    "stream: partitions": lambda client, name: client.streams.partitions(name),
    "stream: describe": lambda client, name: client.streams.describe(name),
    "stream: change": lambda client, name: client.streams.change(name, max_bytes=9),
    "stream: change partitions": lambda client, name: client.streams.change(name, partitions=3),
    "stream: pause": lambda client, name: client.streams.pause(name),
    "stream: resume": lambda client, name: client.streams.resume(name),
    "stream: delete": lambda client, name: client.streams.delete(name),
    "stream: move": lambda client, name: client.streams.move(name, to="host"),
    "stream: promote": lambda client, name: client.streams.promote(name),
    "stream: append": lambda client, name: client.streams.append(name, b"m"),
    "stream: append with a key": lambda client, name: client.streams.append(name, b"m", key="k"),
    "stream: append_many": lambda client, name: client.streams.append_many(name, [b"m"]),
    "stream: stage": lambda client, name: client.streams.stage(name, writer="w", batch=0),
    "stream: commit": lambda client, name: client.streams.commit(name, writer="w", batch=0, attempts=[]),
    "stream: discard": lambda client, name: client.streams.discard(name, writer="w", batch=0),
    "stream: read": lambda client, name: client.streams.read(name),
    "stream: find": lambda client, name: client.streams.find(name, "first"),
    "stream: fetch": lambda client, name: client.streams.fetch(name, 0),
    "stream: consumer of": lambda client, name: client.streams.consumer(name, "c"),
    "stream: consumer": lambda client, name: client.streams.consumer("kept", name),
    "stream: mirror of": lambda client, name: client.streams.mirror(name, "copy"),
    "stream: mirror": lambda client, name: client.streams.mirror("kept", name),
    "stream: consumers": lambda client, name: client.streams.consumers(name),
    "stream: delete_consumer of": lambda client, name: client.streams.delete_consumer(name, "c"),
    "stream: delete_consumer": lambda client, name: client.streams.delete_consumer("kept", name),
    "stream: change_consumer of": lambda client, name: client.streams.change_consumer(name, "c"),
    "stream: change_consumer": lambda client, name: client.streams.change_consumer("kept", name),
    "stream: pause_consumer": lambda client, name: client.streams.pause_consumer("kept", name),
    "stream: resume_consumer": lambda client, name: client.streams.resume_consumer("kept", name),
    "stream: dead_letters of": lambda client, name: client.streams.dead_letters(name, "c"),
    "stream: redrive of": lambda client, name: client.streams.redrive(name, "c"),
    "stream: redrive": lambda client, name: client.streams.redrive("kept", name),
    "stream: writer": lambda client, name: client.streams.stage("kept", writer=_unless_text(name), batch=0),
    "stream: writer of commit": lambda client, name: client.streams.commit("kept", writer=_unless_text(name), batch=0, attempts=[]),
}  # fmt: skip
"""Parameters that must be a name."""
OPTIONAL: Final[dict[str, Use]] = {
    "member of request": lambda client, name: client.request("shop", b"", timeout=5.0, member=name),
    "member of request_many": lambda client, name: client.request_many("shop", [b""], timeout=5.0, member=name),
    "member of push": lambda client, name: client.push("shop", b"", member=name),
    "member of tunnel": lambda client, name: client.tunnel("shop", timeout=5.0, member=name),
    "method of request": lambda client, name: client.request("shop", b"", timeout=5.0, method=name),
    "method of request_many": lambda client, name: client.request_many("shop", [b""], timeout=5.0, method=name),
    "method of push": lambda client, name: client.push("shop", b"", method=name),
    "method of survey": lambda client, name: client.survey("shop", b"", timeout=5.0, method=name),
}  # fmt: skip
"""Parameters that may be None, but not empty."""
GROUPS: Final[dict[str, Use]] = {
    "group of subscribe": lambda client, name: client.subscribe("orders.>", group=name),
    "group of on_publish": lambda client, name: iris.Service("s").on_publish("orders.>", group=name)(print),
    "topic of create": lambda client, name: client.streams.create("made", topic=name),
    "cluster of create": lambda client, name: client.streams.create("made", cluster=name),
    "consumer of dead_letters": lambda client, name: client.streams.dead_letters("kept", name),
    "balance": lambda client, name: client.streams.balance(name),
}  # fmt: skip
"""Parameters that are "" or None if there is none."""
UUID: Final[dict[str, Use]] = {
    "describe": lambda client, uuid: client.streams.describe("kept", uuid=uuid),
    "partitions": lambda client, uuid: client.streams.partitions("kept", uuid=uuid),
    "change": lambda client, uuid: client.streams.change("kept", max_bytes=9, uuid=uuid),
    "delete": lambda client, uuid: client.streams.delete("kept", uuid=uuid),
    "append": lambda client, uuid: client.streams.append("kept", b"m", uuid=uuid),
    "append_many": lambda client, uuid: client.streams.append_many("kept", [b"m"], uuid=uuid),
    "commit": lambda client, uuid: client.streams.commit("kept", writer="w", batch=0, attempts=[], uuid=uuid),
    "discard": lambda client, uuid: client.streams.discard("kept", writer="w", batch=0, uuid=uuid),
    "read": lambda client, uuid: client.streams.read("kept", uuid=uuid).batch(),
    "find": lambda client, uuid: client.streams.find("kept", "first", uuid=uuid),
    "fetch": lambda client, uuid: client.streams.fetch("kept", 0, uuid=uuid),
    "consumer": lambda client, uuid: client.streams.consumer("kept", "c", uuid=uuid).batch(),
    "consumers": lambda client, uuid: client.streams.consumers("kept", uuid=uuid),
    "redrive": lambda client, uuid: client.streams.redrive("kept", "c", uuid=uuid),
}  # fmt: skip
HEADERS: Final[dict[str, Use]] = {
    "request": lambda client, headers: client.request("shop", b"", timeout=5.0, headers=headers),
    "push": lambda client, headers: client.push("shop", b"", headers=headers),
    "survey": lambda client, headers: client.survey("shop", b"", timeout=5.0, headers=headers),
    "broadcast": lambda client, headers: client.broadcast("shop", b"", headers=headers),
    "publish": lambda client, headers: client.publish("orders.new", b"", headers=headers),
    "offer": lambda client, headers: client.offer("orders.new", b"", headers=headers),
    "tunnel": lambda client, headers: client.tunnel("shop", timeout=5.0, headers=headers),
    "append": lambda client, headers: client.streams.append("kept", b"m", headers=headers),
    "append_many": lambda client, headers: client.streams.append_many("kept", [b"m"], headers=headers),
}  # fmt: skip
KEYS: Final[dict[str, Use]] = {
    "key": lambda client, key: client.streams.append("kept", b"m", key=key),
    "message_id": lambda client, key: client.streams.append("kept", b"m", message_id=key),
}  # fmt: skip


def _unless_text(name: Any) -> Any:
    """Return a value that cannot name a writer, because any text can."""
    return name if name == "" or not isinstance(name, str) else b"w"


async def used(use: Use, client: iris.Client, value: Any) -> None:
    made = use(client, value)
    if hasattr(made, "__aenter__"):
        async with made:
            pass
    elif hasattr(made, "__aiter__"):
        async for _ in made:
            break
    elif isinstance(made, Awaitable):
        await made


@contextlib.asynccontextmanager
async def others_served(data: Path | None = None) -> AsyncIterator[iris.Client]:
    """Yield a client with a service, and check in the end that its connection is still the first."""
    service = iris.Service("shop")

    @service.on_request
    def answer(question: bytes) -> bytes:
        return question

    async with (
        LocalCluster(data=data) as cluster,
        cluster.client() as client,
        client.serve(service),
        cluster.client() as other,
    ):
        yield client
        assert await other.request("shop", b"still there", timeout=5.0) == b"still there"
        assert client.stats().reconnects == 0
        assert client.stats().losses == 0


KEYRING: Final = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
REFUSALS: Final = (iris.ConfigError, iris.InvalidName, iris.EncodeError)


async def refused(use: Use, client: iris.Client, values: tuple[Any, ...]) -> None:
    wrong = {}
    for value in values:
        try:
            await used(use, client, value)
        except REFUSALS:
            continue
        except TypeError as err:  # Python's own refusal of a list
            if not str(err).startswith("unhashable type"):
                wrong[repr(value)] = f"{type(err).__name__}: {err}"
        except Exception as err:
            wrong[repr(value)] = f"{type(err).__name__}: {err}"
        else:
            wrong[repr(value)] = "accepted"
    assert wrong == {}


@pytest.mark.parametrize("verb", NEEDED)
async def test_what_is_no_name_is_refused_where_a_name_is_needed(verb: str, tmp_path: Path) -> None:
    async with others_served(tmp_path) as client:
        await refused(NEEDED[verb], client, (None, "", *BAD))


@pytest.mark.parametrize("verb", OPTIONAL)
async def test_what_is_no_member_or_method_is_refused(verb: str) -> None:
    async with others_served() as client:
        await refused(OPTIONAL[verb], client, ("", *BAD))


@pytest.mark.parametrize("verb", GROUPS)
async def test_what_is_no_name_is_refused_where_a_name_may_be_left_out(
    verb: str, tmp_path: Path
) -> None:
    async with others_served(tmp_path) as client:
        await client.streams.create("kept")
        await refused(GROUPS[verb], client, BAD)
        await used(GROUPS[verb], client, None)


@pytest.mark.parametrize("verb", UUID)
async def test_what_is_no_uuid_is_refused(verb: str, tmp_path: Path) -> None:
    async with others_served(tmp_path) as client:
        await client.streams.create("kept")
        await refused(UUID[verb], client, UUIDS)


@pytest.mark.parametrize("verb", HEADERS)
async def test_headers_that_are_not_texts_are_refused(verb: str, tmp_path: Path) -> None:
    bad = (
        {"a": 1},
        {"a": None},
        {1: "a"},
        {b"a": "b"},
        {"a": b"b"},
        {"\ud800": "a"},
        {"a": "\ud800"},
        "ab",
        b"ab",
        7,
        [("a", "b")],
        {"a"},
    )
    async with others_served(tmp_path) as client:
        await client.streams.create("kept")
        await refused(HEADERS[verb], client, bad)


@pytest.mark.parametrize("what", KEYS)
async def test_a_key_that_is_neither_text_nor_bytes_is_refused(what: str, tmp_path: Path) -> None:
    async with others_served(tmp_path) as client:
        await client.streams.create("kept", dedup_window=10.0)
        await refused(
            KEYS[what], client, (0, 7, False, True, 1.5, [], ["a"], {}, object(), "\ud800")
        )


@pytest.mark.parametrize("value", [0, False, b"", [], "a b"])
def test_a_thread_cannot_subscribe_with_what_is_no_group(value: Any, tmp_path: Path) -> None:
    with iris.blocking.connect(embedded=True, keyring=KEYRING) as client:
        with pytest.raises(iris.InvalidName), client.subscribe("orders.>", group=value):
            pass
        with client.subscribe("orders.>", group=None) as orders:
            client.publish("orders.new", b"1")
            assert next(orders).payload == b"1"


@pytest.mark.parametrize("value", [None, 0, b"text", ["text"]])
def test_what_a_program_says_of_itself_must_be_text(value: Any) -> None:
    for make in (
        lambda: iris.ClientConfig(label=value),
        lambda: iris.Service("shop", version=value),
        lambda: iris.Service("shop", description=value),
    ):
        with pytest.raises(iris.ConfigError, match="must be a str, not"):
            make()


async def test_a_frame_that_breaks_the_protocol_costs_its_own_call_and_is_not_sent() -> None:
    async with others_served() as client:
        session = client._runtime.session
        assert session is not None
        waiter = asyncio.get_running_loop().create_future()
        session.ask(lambda number: frames.Subscribe(number, "orders.>", [b"k" * 16], None), waiter)  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(LocalProtocolError, match="SUBSCRIBE frame would break the protocol"):
            await waiter
        with pytest.raises(LocalProtocolError, match="MEMBERS frame would break the protocol"):
            session.watch("", [b"k" * 16], lambda _: None, stay=True)
