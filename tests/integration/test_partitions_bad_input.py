"""Streams with several partitions: two clients at once, other definitions, keys that rotate, a store that is away."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from integration.stores import created, two_keys, whole

from iris.core.bundle import encode_bundle
from iris.errors import StreamError, StreamExists, StreamUnavailable
from iris.wire.streams import Appended
from relay.store.session import IncomingCall


@pytest.mark.parametrize("counts", [(4, 4), (2, 3), (5, 1), (1, 3)])
async def test_of_two_clients_that_create_at_once_with_these_numbers_one_wins(
    pair: Any, counts: tuple[int, int]
) -> None:
    """The other one gets the same stream, or is refused; no partition of it is left."""
    _, client, other, _ = pair
    results = await asyncio.gather(
        *(
            who.streams.create("orders", partitions=count)
            for who, count in zip((client, other), counts, strict=True)
        ),
        return_exceptions=True,
    )
    refused = [result for result in results if isinstance(result, BaseException)]
    (made, *same) = [result for result in results if not isinstance(result, BaseException)]
    assert [type(error) for error in refused] == ([] if counts[0] == counts[1] else [StreamExists])
    assert {info.uuid for info in same} <= {made.uuid}
    infos = await client.streams.list()
    assert [info.partition for info in infos] == list(range(made.partitions))
    assert {info.failed for info in infos} == {""}
    for number in range(made.partitions):
        for who in (client, other):
            assert (await who.streams.append("orders", b"x", partition=number)) in (0, 1)
    assert len(await whole(other)) == 2 * made.partitions


@pytest.mark.parametrize(
    ("there", "wanted", "text"),
    [
        ({"partitions": 3}, {"partitions": 2}, r"differs in partitions \(3, not 2\); use another name"),
        ({"partitions": 2}, {"partitions": 3}, r"differs in partitions \(2, not 3\); change it with"),
        ({"partitions": 2}, {}, r"differs in partitions \(2, not 1\); use another name"),
        ({}, {"partitions": 2}, r"differs in partitions \(1, not 2\); change it with"),
        ({"partitions": 2, "max_age": 60}, {"partitions": 2}, "differs in max_age; change it with"),
        ({"partitions": 2}, {"partitions": 2, "compact": True}, "differs in compact; change it with"),
        ({"topic": "a.>"}, {"partitions": 2}, r"differs in topic and partitions \(1, not 2\); use another name"),
    ],
)  # fmt: skip
async def test_a_definition_that_differs_is_refused_and_leaves_no_partitions(
    pair: Any, there: dict[str, Any], wanted: dict[str, Any], text: str
) -> None:
    _, client, other, _ = pair
    made = await client.streams.create("orders", **there)
    before = await client.streams.list()
    with pytest.raises(StreamExists, match=text):
        await other.streams.create("orders", **wanted)
    assert [(info.uuid, info.partitions) for info in await client.streams.list()] == [
        (info.uuid, info.partitions) for info in before
    ]
    assert (await other.streams.describe("orders")).uuid == made.uuid


async def test_a_key_that_is_shared_while_another_client_adds_partitions_is_in_all_of_them(
    pair: Any,
) -> None:
    """The other client does not have the new key yet, so the partitions that it adds lack it at first."""
    cluster, client, _, _ = pair
    await client.streams.create("orders", partitions=2)
    await client.streams.append("orders", b"old", key="k")
    async with two_keys(cluster, promoted=True) as (_, _, rotating, last):
        changed, added = await asyncio.gather(
            rotating.streams.share_keys(), client.streams.change("orders", partitions=6)
        )
        assert changed
        assert added.partitions == 6
        await rotating.streams.share_keys()
        assert await rotating.streams.share_keys() == []
        for number in range(6):
            await rotating.streams.append("orders", b"new", partition=number)
        infos = await last.streams.partitions("orders")
        assert [(info.partition, info.failed) for info in infos] == [(n, "") for n in range(6)]
        seen = {message.partition for message in await whole(last) if message.payload == b"new"}
        assert seen == set(range(6))
        assert [message.payload for message in await whole(rotating)].count(b"old") == 1


async def test_after_a_rotation_all_partitions_are_sealed_with_the_new_key(pair: Any) -> None:
    """The old key is the keyring's default, which is also the key of a cluster with the name of a partition."""
    cluster, client, _, _ = pair
    await client.streams.create("orders", partitions=3)
    async with two_keys(cluster, promoted=True) as (_, _, rotating, last):
        await rotating.streams.share_keys()
        for number in range(3):
            await rotating.streams.append("orders", b"append", partition=number)
        async with rotating.streams.stage("orders", writer="etl", batch=1) as staging:
            for number in range(3):
                await staging.add_bundle(
                    encode_bundle([b"stage"], None, False), 1, partition=number
                )
            attempt = await staging.finish()
        await rotating.streams.commit("orders", writer="etl", batch=1, attempts=[attempt])
        found = Counter((message.partition, message.payload) for message in await whole(last))
        assert found == Counter((n, what) for n in range(3) for what in (b"append", b"stage"))


async def test_who_lacks_a_key_of_one_partition_is_told_which_one(pair: Any) -> None:
    cluster, client, _, _ = pair
    await client.streams.create("orders", partitions=2)
    async with two_keys(cluster) as (old, _, rotating, last):
        await rotating.streams.share_keys()
        await client.streams.change("orders", partitions=3)  # under the old key alone
        with pytest.raises(StreamError, match=f"under key {old.key_id.hex()[:8]}, which is not"):
            await whole(last)
        with pytest.raises(StreamError, match="add that key"):
            await last.streams.append("orders", b"x", key="k")
        await rotating.streams.share_keys()
        await last.streams.append("orders", b"x", key="k")
        assert len(await last.streams.partitions("orders")) == 3


async def test_an_append_with_a_key_waits_for_its_partition_and_says_whether_it_may_be_stored(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the store received and did not answer may be stored. It is stored once, however often it is sent."""
    _, client, other, second = pair
    name = await created(client, second)
    for partition in (0, 1):
        await client.streams.append(name, b"first", partition=partition)
    layout = client.streams._targets.known[name, ""].layout
    here, there = (
        next(f"k{n}" for n in range(99) if layout.of_key(b"k%d" % n) == partition)
        for partition in (0, 1)
    )
    received = asyncio.Event()
    answer = IncomingCall.answer

    def unanswered(incoming: IncomingCall, what: Any) -> None:
        if isinstance(what, Appended):
            received.set()
        else:
            answer(incoming, what)

    with monkeypatch.context() as patch:
        patch.setattr(IncomingCall, "answer", unanswered)
        call = client.streams.append(name, b"in flight", key=there, timeout=0.5)
        sent = asyncio.create_task(call)
        await received.wait()
        await second.stop()
    with pytest.raises(StreamUnavailable) as unsure:
        await sent
    assert unsure.value.may_have_run
    with pytest.raises(StreamUnavailable) as refused:
        await other.streams.append(name, b"not sent", key=there, timeout=0.3)
    assert not refused.value.may_have_run
    assert (await client.streams.append(name, b"here", key=here)).partition == 0
    waiting = asyncio.create_task(client.streams.append(name, b"waits", key=there))
    await second.start()
    assert (await waiting).partition == 1
    found = [message.payload for message in await whole(other, name, partition=1)]
    assert found == [b"first", b"in flight", b"waits"]


async def test_without_the_store_of_partition_0_only_those_who_know_the_stream_go_on(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, other, second = pair
    monkeypatch.setattr("iris.streams.interleaving.RETRY_S", 0.05)
    for number in range(20):
        name = f"clicks{number}"
        await client.streams.create(name, partitions=2)
        infos = await client.streams.partitions(name)
        if [info.store == second.id for info in infos] == [True, False]:
            break
    for partition in (0, 1):
        await client.streams.append(name, b"%d" % partition, partition=partition)
    async with other.streams.read(name, patience=0.3) as reader:
        assert {(await anext(reader)).payload for _ in range(2)} == {b"0", b"1"}
        await second.stop()
        assert (await client.streams.append(name, b"more", partition=1)).partition == 1
        assert (await anext(reader)).payload == b"more"
        async with cluster.client() as stranger:
            with pytest.raises(StreamError):
                await whole(stranger, name, patience=0.3)
            with pytest.raises(StreamError) as refused:
                await stranger.streams.append(name, b"x", key="k", timeout=0.3)
            assert not refused.value.may_have_run
        await second.start()
        await client.streams.append(name, b"back", partition=0)
        assert (await anext(reader)).payload == b"back"
