"""Streams with several partitions: created, appended to, read and changed as one stream, on two stores."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from integration.stores import Store, created, stored, two_keys, whole
from msgspec import structs

from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey, public_id
from iris.errors import (
    ConfigError,
    InvalidName,
    NoStream,
    StreamError,
    StreamExists,
    StreamUnavailable,
)
from iris.streams import Offset
from iris.streams.signed_orders import orders_to_change
from iris.wire.streams import Change, Create, Described, Knock


async def test_partitions_are_spread_over_the_stores_and_hold_each_message_once(pair: Any) -> None:
    _, client, other, _ = pair
    made = await client.streams.create("orders", partitions=4, max_messages=1000)
    assert (made.partitions, made.partition, made.parent) == (4, 0, "")
    infos = await other.streams.partitions("orders")
    assert [info.name for info in infos] == ["orders", "orders/1", "orders/2", "orders/3"]
    assert set(Counter(info.store for info in infos).values()) == {2}
    assert [(info.partition, info.parent, info.max_messages) for info in infos[1:]] == [
        (number, made.uuid, 1000) for number in (1, 2, 3)
    ]
    assert await client.streams.create("orders", partitions=4, max_messages=1000) == made

    first = await asyncio.gather(*(client.streams.append("orders", b"%d" % n) for n in range(5)))
    assert first == [0, 1, 2, 3, 4]
    assert len({offset.partition for offset in first}) == 1  # one batch
    many = []
    for turn in range(8):
        many += await client.streams.append_many("orders", [b"m%d-%d" % (turn, n) for n in (0, 1)])
    assert {offset.partition for offset in many} == {0, 1, 2, 3}
    found = await whole(other)
    assert sorted(message.payload for message in found) == sorted(
        [b"%d" % n for n in range(5)] + [b"m%d-%d" % (turn, n) for turn in range(8) for n in (0, 1)]
    )
    for number in range(4):
        offsets = [message.offset for message in found if message.partition == number]
        assert offsets == list(range(len(offsets)))
        one = await whole(other, partition=number)
        assert [message.offset for message in one] == offsets
    names = [info.name for info in await other.streams.list()]
    assert names == ["orders", "orders/1", "orders/2", "orders/3"]


async def test_what_has_no_key_is_spread_by_calls_and_by_records_within_a_turn(pair: Any) -> None:
    _, client, _, _ = pair
    await client.streams.create("orders", partitions=4)
    await client.streams.append("orders", b"first")  # the partitions are known from here on
    streams = client.streams
    calls = await asyncio.gather(*(streams.append_many("orders", [b"x"] * 3) for _ in range(4)))
    assert {offset.partition for offsets in calls for offset in offsets} == {0, 1, 2, 3}
    assert all(len({offset.partition for offset in offsets}) == 1 for offsets in calls)
    small = await asyncio.gather(*(streams.append("orders", b"x") for _ in range(100)))
    assert len({offset.partition for offset in small}) == 1
    large = await asyncio.gather(*(streams.append("orders", bytes(20_000)) for _ in range(12)))
    assert Counter(offset.partition for offset in large) == {0: 3, 1: 3, 2: 3, 3: 3}


async def test_a_key_has_one_partition_and_its_order_whoever_appends(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4)
    for turn in range(3):
        for key in "abcdefgh":
            who = client if turn % 2 else other
            await who.streams.append("orders", f"{key}{turn}", key=key)
    of: dict[bytes, list[Any]] = {}
    for message in await whole(client):
        of.setdefault(message.key, []).append(message)
    assert all(len({message.partition for message in messages}) == 1 for messages in of.values())
    assert [message.payload for message in of[b"c"]] == [b"c0", b"c1", b"c2"]
    assert len({messages[0].partition for messages in of.values()}) > 2


async def test_an_id_is_stored_once_whichever_client_repeats_it(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4, dedup_window=3600.0)
    for number in range(6):
        first = await client.streams.append("orders", b"x", message_id=f"id{number}")
        again = await other.streams.append("orders", b"x", message_id=f"id{number}")
        assert (again, again.partition) == (first, first.partition)


async def test_an_offset_says_its_partition_also_after_pickling(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=2)
    await client.streams.append("orders", b"0", partition=1)
    offset = await client.streams.append("orders", b"1", partition=1, expect=1)
    assert (offset, offset.partition) == (1, 1)
    copy = pickle.loads(pickle.dumps(offset))
    assert isinstance(copy, Offset)
    assert (copy, copy.partition) == (1, 1)
    with pytest.raises(ConfigError, match="each partition counts its own offsets"):
        await client.streams.append("orders", b"x", expect=0)
    with pytest.raises(ConfigError, match="no partition 2; its partitions are 0 to 1"):
        await client.streams.append("orders", b"x", partition=2)
    assert await other.streams.append("orders/1", b"2") == 2
    await client.streams.create("plain")
    with pytest.raises(ConfigError, match="no partition 1; it has one, number 0"):
        await client.streams.append("plain", b"x", partition=1)
    assert await client.streams.append_many("plain", [b"x"], partition=0) == [0]


async def test_a_reader_goes_on_where_it_was_in_each_partition(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=3)
    for number in range(12):
        await client.streams.append("orders", b"%d" % number, partition=number % 3)
    async with other.streams.read("orders", follow=False) as reader:
        seen = [await anext(reader) for _ in range(6)]
        offsets = reader.offsets
        with pytest.raises(StreamError, match=r"reader\.offsets"):
            _ = reader.offset
    rest = await whole(other, start=offsets)
    assert sorted(m.payload for m in seen + rest) == sorted(b"%d" % n for n in range(12))
    with pytest.raises(StreamError, match="each with its own offsets"):
        await whole(other, start=3)
    with pytest.raises(StreamError, match="3 partitions, and `fetch` works on one"):
        await other.streams.fetch("orders", 0)
    page = await other.streams.fetch("orders", 2, partition=2)
    assert (page.high_water, await other.streams.find("orders", "new", partition=2)) == (4, 4)
    with pytest.raises(StreamError, match="`find` works on one"):
        await other.streams.find("orders", "new")


async def test_partitions_are_added_and_followed_and_never_removed(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other, _ = pair
    monkeypatch.setattr("iris.streams.interleaving.LAYOUT_S", 0.05)
    monkeypatch.setattr("iris.streams.spreading.LAYOUT_S", 0.0)
    await client.streams.create("orders")
    assert await other.streams.append("orders", b"old") == 0
    async with other.streams.read("orders", "new") as reader, asyncio.timeout(15):
        waiting = asyncio.ensure_future(anext(reader))
        assert (await client.streams.change("orders", partitions=3)).partitions == 3
        await client.streams.append("orders", b"zero", partition=0)
        assert (await waiting).payload == b"zero"
    assert (await client.streams.change("orders", partitions=4, compact=True)).compact
    async with other.streams.read("orders", {0: "new"}) as reader, asyncio.timeout(15):
        waiting = asyncio.ensure_future(anext(reader))
        await client.streams.change("orders", partitions=5)
        # A client that appended before notices the new partition by itself.
        while (await client.streams.append("orders", b"new")).partition != 4:
            pass
        seen = await waiting
        while seen.partition != 4:
            seen = await anext(reader)
    assert {info.compact for info in await client.streams.partitions("orders")} == {True}
    with pytest.raises(ConfigError, match="has 5, and partitions cannot be removed"):
        await client.streams.change("orders", partitions=4)
    with pytest.raises(StreamExists, match=r"differs in partitions \(5, not 2\); use another name"):
        await client.streams.create("orders", partitions=2, compact=True)
    with pytest.raises(StreamExists, match=r"\(5, not 6\); change it with"):
        await client.streams.create("orders", partitions=6, compact=True)


async def test_a_store_keeps_a_stream_that_loses_a_partition_as_it_is(pair: Any) -> None:
    _, client, _, _ = pair
    await client.streams.create("orders", partitions=3)
    stores = client.streams._stores
    found = await stores.describe("orders", "", timeout=5)
    less = structs.replace(found.order.definition, partitions=found.order.definition.partitions[1:])
    keyring = client._runtime.keyring
    orders = orders_to_change(less, keyring.for_cluster("orders"), found, keyring)
    with pytest.raises(StreamError, match="partitions can be added to a stream, but not removed"):
        await stores.ask_stream("orders", "", Change(orders), Described, timeout=5, writes=True)


async def test_deleting_a_stream_deletes_its_partitions_and_a_partition_is_not_deleted_alone(
    pair: Any,
) -> None:
    _, client, other, second = pair
    await client.streams.create("orders", partitions=4)
    with pytest.raises(StreamError, match="cannot be deleted alone; delete the stream 'orders'"):
        await client.streams.delete("orders/2")
    await other.streams.delete("orders")
    assert await client.streams.list() == []
    assert second.process.store.catalogue.streams == {}
    with pytest.raises(NoStream):
        await other.streams.append("orders/1", b"x")


async def test_of_two_clients_that_create_at_once_one_wins_and_nothing_is_left(pair: Any) -> None:
    _, client, other, _ = pair
    one, two = await asyncio.gather(
        client.streams.create("orders", partitions=4), other.streams.create("orders", partitions=4)
    )
    assert one.uuid == two.uuid
    assert len(await client.streams.list()) == 4
    await asyncio.gather(
        client.streams.change("orders", partitions=6), other.streams.change("orders", partitions=8)
    )
    infos = await client.streams.list()
    assert [info.partition for info in infos] == list(range(8))
    assert [info.failed for info in infos] == [""] * 8
    different = await asyncio.gather(
        client.streams.create("sales", partitions=2),
        other.streams.create("sales", partitions=3),
        return_exceptions=True,
    )
    assert [type(result) for result in different if isinstance(result, Exception)] == [StreamExists]
    names = [info.name for info in await client.streams.list() if info.name.startswith("sales")]
    assert len(names) in (2, 3)


async def test_a_partition_that_its_stream_does_not_name_is_shown_and_can_be_deleted(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, _, _ = pair
    await client.streams.create("orders", partitions=2)

    def killed(*_: object) -> None:
        raise StreamUnavailable("orders", "killed", may_have_run=True)

    async with cluster.client() as dying:
        monkeypatch.setattr("iris.streams.partitions.orders_to_change", killed)
        with pytest.raises(StreamUnavailable, match="killed"):  # before it changed partition 0
            await dying.streams.change("orders", partitions=3)
    monkeypatch.undo()
    (stray,) = [info for info in await client.streams.list() if info.failed]
    assert (stray.name, stray.partition) == ("orders/2", 2)
    assert stray.failed.startswith("it is not used")
    await client.streams.change("orders", partitions=3)
    await client.streams.delete("orders/2", uuid=stray.uuid)
    assert [info.failed for info in await client.streams.list()] == ["", "", ""]


async def test_reading_goes_on_without_a_store_that_is_away_and_says_which_partition_is_missing(
    pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, client, other, second = pair
    name = await created(client, second)
    for number in range(6):
        await client.streams.append(name, b"%d" % number, partition=number % 2)
    await second.stop()
    read = []
    async with other.streams.read(name, follow=False, patience=0.2) as reader:
        read += [(await anext(reader)).payload for _ in range(3)]
        with pytest.raises(
            StreamUnavailable, match=r"1 partition could not be read, .* partition 1: "
        ):
            await anext(reader)
        assert list(reader.missing) == [1]
    assert read == [b"0", b"2", b"4"]
    assert f"Partition 1 of stream {name} cannot be read now" in caplog.text
    async with other.streams.read(name, patience=0.2) as reader:
        assert [(await anext(reader)).payload for _ in range(3)] == read
        waiting = asyncio.ensure_future(anext(reader))
        while not reader.missing:  # noqa: ASYNC110 - it follows meanwhile
            await asyncio.sleep(0.01)
        await client.streams.append(name, b"6", partition=0)
        assert (await waiting).payload == b"6"
    infos = await other.streams.partitions(name, timeout=0.4)
    assert (infos[1].store, infos[1].partition) == ("", 1)
    assert infos[1].failed.startswith("its store is away")
    assert "iris stream create" not in infos[1].failed
    with pytest.raises(StreamError, match="the change did not reach partition 1; repeat it when"):
        await client.streams.change(name, max_messages=9, timeout=0.5)
    with pytest.raises(
        StreamError, match=f"iris stream delete {name}/1 --uuid {infos[1].uuid} --yes"
    ):
        await client.streams.delete(name, timeout=0.5)
    await second.start()
    assert [info.failed for info in await client.streams.list()] == [
        "partition 0 of its stream was not found: its store is away, or the stream was deleted"
    ]
    await client.streams.delete(f"{name}/1", uuid=infos[1].uuid)
    assert await client.streams.list() == []
    with pytest.raises(
        NoStream, match=f"its store is away, or .* `iris stream info {name}`"
    ) as gone:
        await client.streams.describe(f"{name}/1")
    assert "iris stream create" not in gone.value.detail


async def test_appends_without_a_key_go_to_the_stores_that_answer(pair: Any) -> None:
    _, client, _, second = pair
    name = await created(client, second)
    for partition in (0, 1):
        await client.streams.append(name, b"first", partition=partition)
    await second.stop()
    stuck = asyncio.create_task(client.streams.append(name, b"waits", partition=1))
    target = client.streams._targets.known[name, ""]
    while not target.appender(1).away:  # noqa: ASYNC110 - one call finds no store
        await asyncio.sleep(0.01)
    offsets = [await client.streams.append(name, b"%d" % n, timeout=2.0) for n in range(4)]
    assert {offset.partition for offset in offsets} == {0}
    key = next(f"k{n}" for n in range(99) if target.layout.of_key(f"k{n}".encode()) == 1)
    with pytest.raises(StreamError) as refused:
        await client.streams.append(name, b"x", key=key, timeout=0.2)
    assert not refused.value.may_have_run  # it was not sent
    await second.start()
    assert (await stuck).partition == 1
    assert (await client.streams.append(name, b"x", key=key)).partition == 1
    while (await client.streams.append(name, b"more")).partition == 0:
        pass


async def test_partitions_are_only_of_streams_that_hold_what_is_appended(pair: Any) -> None:
    _, client, _, _ = pair
    for options in ({"topic": "a.>"}, {"cluster": "a"}):
        with pytest.raises(ConfigError, match="only a stream that holds what is appended"):
            await client.streams.create("orders", partitions=2, **options)
    await client.streams.create("topics", topic="a.>")
    with pytest.raises(ConfigError, match="only a stream that holds what is appended"):
        await client.streams.change("topics", partitions=2)
    for count in (0, 257, True, 1.5):
        with pytest.raises(ConfigError, match="partitions must be"):
            await client.streams.create("orders", partitions=count)
    with pytest.raises(ConfigError, match="is the name of partition 3 of a stream 'orders'"):
        await client.streams.create("orders/3")
    with pytest.raises(InvalidName):
        await client.streams.create("x" * 249, partitions=2)
    assert [info.name for info in await client.streams.list()] == ["topics"]


async def test_an_older_stream_that_is_named_like_a_partition_stays_what_it_is(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other, _ = pair
    with monkeypatch.context() as patch:
        patch.setattr("iris.streams.managing.check_unreserved", lambda name: None)
        plain = await client.streams.create("orders/1")
    await client.streams.create("orders", partitions=2)
    assert (await other.streams.describe("orders/1")).uuid == plain.uuid
    await other.streams.append("orders/1", b"plain")
    assert [m.payload for m in await whole(other, "orders/1")] == [b"plain"]
    assert await whole(other) == []
    offset = await other.streams.append("orders", b"one", partition=1)
    assert (offset, offset.partition) == (0, 1)
    assert [m.payload for m in await whole(client)] == [b"one"]


async def test_a_key_that_is_rotated_while_partitions_are_added_opens_all_of_them(
    pair: Any,
) -> None:
    cluster, client, _, _ = pair
    old = cluster.keyring.for_cluster("orders")[0]
    new = ClusterKey(bytes(range(32)))
    await client.streams.create("orders", partitions=2)
    offsets = [await client.streams.append("orders", b"old", key=f"k{n}") for n in range(6)]
    both = Keyring.single(old).add("orders", new)
    async with cluster.client(keyring=both) as rotating:
        await rotating.streams.change("orders", partitions=4)
        promoted = both.promote("orders", new.key_id)
        async with cluster.client(keyring=promoted) as last:
            await last.streams.share_keys()
            # As long as the old key is there, keys stay where they are.
            here = [await last.streams.append("orders", b"new", key=f"k{n}") for n in range(6)]
            there = [await rotating.streams.append("orders", b"new", key=f"k{n}") for n in range(6)]
            assert [o.partition for o in here] == [o.partition for o in there]
            assert all(
                now.partition in (before.partition, 2, 3)
                for before, now in zip(offsets, here, strict=True)
            )
            assert len(await whole(last)) == 18
            only = Keyring.single(new)
            async with cluster.client(keyring=only) as without:
                assert len(await without.streams.partitions("orders")) == 4
                # Its own key is the only one that chooses now, and it reads what is sealed with it.
                await without.streams.append("orders", b"newest", key="k0")
            await rotating.streams.change("orders", partitions=5)
            async with cluster.client(keyring=Keyring.single(old)) as behind:
                assert len(await behind.streams.partitions("orders")) == 5


async def test_partitions_that_were_added_under_an_unknown_key_are_not_overlooked(
    pair: Any,
) -> None:
    cluster, client, _, _ = pair
    await client.streams.create("orders", partitions=2)
    async with two_keys(cluster) as (_, new, rotating, last):
        await rotating.streams.share_keys()
        await last.streams.change("orders", partitions=3)
        with pytest.raises(StreamError, match=f"under key {new.key_id.hex()[:8]}, which is not"):
            await whole(client)
        with pytest.raises(StreamError, match="add that key"):
            await client.streams.partitions("orders")


async def test_callers_open_other_channels_when_a_stream_gets_its_first_partitions(
    pair: Any,
) -> None:
    cluster, client, other, second = pair
    made = await client.streams.create("orders")
    await other.streams.append("orders", b"0")
    process = cluster.store if made.store != second.id else second.process
    handlers = process.store.calls.handlers
    genuine = handlers[Knock]
    knocks: list[str] = []

    def knocked(incoming: Any, call: Knock) -> None:
        knocks.append(incoming.name)
        genuine(incoming, call)

    handlers[Knock] = knocked
    await other.streams.append("orders", b"1")
    assert not knocks
    await client.streams.change("orders", partitions=2)
    knocks.clear()
    await other.streams.append("orders", b"2")
    assert made.uuid in knocks


async def test_a_stream_that_cannot_be_created_leaves_no_partitions(pair: Any) -> None:
    _, client, _, second = pair
    handlers = second.process.store.calls.handlers
    genuine = handlers[Create]
    calls = []

    def refuse(incoming: Any, call: Create) -> None:
        calls.append(call)
        incoming.refuse("full", "this store has 500 streams")

    handlers[Create] = refuse
    with pytest.raises(StreamUnavailable, match="500 streams"):
        await client.streams.create("orders", partitions=4)
    handlers[Create] = genuine
    assert calls
    assert await client.streams.list() == []


async def test_a_new_store_gets_nothing_by_itself_and_balance_says_what_would_move(
    tmp_path: Path,
) -> None:
    async with stored(tmp_path / "first") as (cluster, client, other):
        await client.streams.create("plain")
        await client.streams.create("orders", partitions=4)
        assert await other.streams.balance() == []
        second = Store(cluster, tmp_path / "second")
        await second.start()
        first = public_id(cluster.store.store.key.public_key).hex()
        assert {info.store for info in await other.streams.partitions("orders")} == {first}
        found = await other.streams.balance()
        assert [(move.store, move.to_store, move.to_host, move.movable) for move in found] == [
            (first, second.id, "second", False)
        ] * 2
        assert await other.streams.balance("orders") == found
        assert await other.streams.balance("plain") == []
        with pytest.raises(StreamError, match="on the disk of the store") as refused:
            await client.streams.move(found[0].name, to="second")
        assert "iris stream handover orders NEW" in refused.value.detail
        await second.stop()
