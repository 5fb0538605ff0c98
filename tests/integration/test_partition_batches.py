"""Batches over several partitions: staged in all of them, and completed by whoever commits again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from integration.stores import whole

import iris
from iris.core.bundle import encode_bundle
from iris.errors import StagedMissing, StreamError
from iris.streams import StagedAttempt, committing
from iris.streams.stores import Stores
from iris.wire.streams import Commit

ROWS = [f"r{number}" for number in range(60)]


async def stage(
    client: iris.Client, messages: Iterable[str], *, batch: int = 1, keyed: bool = False
) -> StagedAttempt:
    """Stage messages, one record each if they have no key, so that they are in all partitions."""
    async with client.streams.stage("orders", writer="etl", batch=batch) as staging:
        for message in messages:
            if keyed:
                await staging.append(message, key=message)
            else:
                await staging.add_bundle(encode_bundle([message.encode()], None, False), 1)
        return await staging.finish()


async def payloads(client: iris.Client) -> list[Any]:
    return sorted(_text(message.payload) for message in await whole(client))


def _text(payload: Any) -> str:
    return payload.decode() if isinstance(payload, bytes) else payload


async def test_a_batch_is_in_all_partitions_and_keys_are_where_they_belong(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4)
    attempts = [
        await stage(client, ROWS[:30], keyed=True),
        await stage(other, ROWS[30:]),
    ]
    assert {part.partition for part in attempts[1].parts or ()} == {0, 1, 2, 3}
    assert await whole(client) == []
    done = await client.streams.commit("orders", writer="etl", batch=1, attempts=attempts)
    assert not done.replayed
    assert await payloads(other) == sorted(ROWS)
    found = {_text(message.payload): message for message in await whole(client)}
    for key in ROWS[:30]:
        offset = await client.streams.append("orders", "later", key=key)
        assert offset.partition == found[key].partition
    again = await other.streams.commit("orders", writer="etl", batch=1, attempts=attempts)
    assert again.replayed
    assert again.first == done.first


class Killed(Exception):
    """Stands for the end of the process that commits."""


@pytest.mark.parametrize("commits", [0, 1, 3, 4])
async def test_a_commit_that_was_interrupted_is_completed_with_its_own_attempts(
    pair: Any, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """The client is gone after so many partitions have committed. The job runs again, with other rows in other
    partitions, of which there are more now.
    """
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4)
    first = await stage(client, ROWS)
    ask = Stores.ask_stream
    done = 0

    async def ask_until(stores: Stores, name: str, uuid: str, call: Any, *rest: Any, **more: Any) -> Any:  # fmt: skip
        nonlocal done
        if isinstance(call, Commit):
            if done == commits:
                raise Killed
            done += 1
        return await ask(stores, name, uuid, call, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Stores, "ask_stream", ask_until)
        try:
            await client.streams.commit("orders", writer="etl", batch=1, attempts=[first])
        except Killed:
            assert commits < 4
    seen = await payloads(other)
    assert bool(seen) == bool(commits)

    await client.streams.change("orders", partitions=6)
    second = await stage(other, [f"s{number}" for number in range(40)])
    found = await other.streams.commit("orders", writer="etl", batch=1, attempts=[second])
    assert found.replayed
    assert await payloads(client) == sorted(ROWS)
    for number in range(6):  # nothing is left of either attempt
        left = await other.streams.discard("orders", writer="etl", batch=1, partition=number)
        assert left == 0
    more = await stage(other, ["t"], batch=2)
    await other.streams.commit("orders", writer="etl", batch=2, attempts=[more])
    assert Counter(await payloads(client)) == Counter([*ROWS, "t"])


async def test_the_next_batch_completes_one_that_was_interrupted(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4)
    first = await stage(client, ROWS)

    async def gone(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(committing, "_commit_others", gone)
        with pytest.raises(Killed):
            await client.streams.commit("orders", writer="etl", batch=1, attempts=[first])
    assert await payloads(other) == []

    # Nobody else commits a part of it, and what was planned is not committed without the others.
    with pytest.raises(StagedMissing, match="batch 1 of writer 'etl' was interrupted"):
        await other.streams.commit("orders", writer="etl", batch=2, attempts=[], partition=0)
    second = await stage(other, ["next"], batch=2)
    done = await other.streams.commit("orders", writer="etl", batch=2, attempts=[second])
    assert not done.replayed
    assert Counter(await payloads(client)) == Counter([*ROWS, "next"])


async def test_a_batch_that_is_discarded_is_planned_no_more(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=2)
    first = await stage(client, ROWS)

    async def gone(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(committing, "_commit_others", gone)
        with pytest.raises(Killed):
            await client.streams.commit("orders", writer="etl", batch=1, attempts=[first])
    assert await other.streams.discard("orders", writer="etl", batch=1, attempts=[first]) == 0
    assert await other.streams.discard("orders", writer="etl", batch=1) == len(ROWS)
    second = await stage(other, ["again"])
    done = await other.streams.commit("orders", writer="etl", batch=1, attempts=[second])
    assert not done.replayed
    assert await payloads(client) == ["again"]


async def test_a_batch_that_a_partition_would_refuse_is_refused_whole(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, _, _ = pair
    await client.streams.create("orders", partitions=2)
    first = await stage(client, ROWS)
    monkeypatch.setattr(committing, "COMMIT_BYTES", 500)
    with pytest.raises(StreamError, match="bytes in partition 0; at most 500 are allowed"):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[first])
    monkeypatch.undo()
    second = await stage(client, ["less"])
    await client.streams.commit("orders", writer="etl", batch=1, attempts=[second])
    assert await payloads(client) == ["less"]


async def test_a_batch_of_one_partition_is_committed_alone(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=2)
    async with client.streams.stage("orders", writer="etl", batch=1, partition=1) as staging:
        await staging.append_many(["one", "two"])
        attempt = await staging.finish()
    assert attempt.parts is None
    done = await other.streams.commit(
        "orders", writer="etl", batch=1, attempts=[attempt], partition=1
    )
    assert (done.first, done.end) == (0, 2)
    assert {message.partition for message in await whole(client)} == {1}
