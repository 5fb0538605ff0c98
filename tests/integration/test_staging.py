"""Batches that appear whole: staged by several clients, committed by one, once, over restarts of store and relay."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from integration.stores import whole

import iris
from iris.core.bundle import encode_bundle
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import (
    Closed,
    ConfigError,
    LocalProtocolError,
    MessageTooLarge,
    NoStream,
    StagedMissing,
    StreamError,
    StreamUnavailable,
)
from iris.streams import CommitInfo, StagedAttempt
from iris.wire.streams import NewRecord, Settled, Stage, Staged
from relay.store import staged_rows
from relay.store.errors import LogWriteFailed
from relay.store.records import Record
from relay.store.stream import Stream


async def payloads(client: iris.Client) -> list[Any]:
    return [message.payload for message in await whole(client)]


async def attempt(client: iris.Client, batch: int, *messages: object) -> StagedAttempt:
    async with client.streams.stage("orders", writer="etl", batch=batch) as staging:
        await staging.append_many(messages)
        return await staging.finish()


def only(setting: Any) -> Stream:
    (stream,) = setting[0].store.store.streams.values()
    return stream


# -- what is promised ----------------------------------------------------------------------------------------


async def test_what_two_clients_stage_is_seen_at_once_and_in_order_when_it_is_committed(
    setting: Any,
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    assert await client.streams.append("orders", b"before") == 0
    reader = other.streams.read("orders", 1)
    seeing = asyncio.create_task(anext(reader.batches()))
    first, second = await asyncio.gather(
        attempt(client, 1, *(b"one %d" % n for n in range(500))),
        attempt(other, 1, *(b"two %d" % n for n in range(500))),
    )
    assert await payloads(other) == [b"before"]
    assert not seeing.done()
    assert await client.streams.commit("orders", writer="etl", batch=1, attempts=[second, first]) == (
        CommitInfo(1, 1001, False)
    )  # fmt: skip
    expected = [b"two %d" % n for n in range(500)] + [b"one %d" % n for n in range(500)]
    assert (await payloads(other))[1:] == expected
    batch = await asyncio.wait_for(seeing, 5.0)
    assert [message.payload for message in batch] == expected[: len(batch)]
    await reader.close()
    assert await client.streams.append("orders", b"after") == 1001


async def test_a_commit_again_returns_the_same_and_one_that_is_late_says_so(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    for batch in (1, 2):
        done = await attempt(client, batch, b"%d" % batch)
        for committer, replayed in ((client, False), (other, True)):
            assert await committer.streams.commit(
                "orders", writer="etl", batch=batch, attempts=[done]
            ) == CommitInfo(batch - 1, batch, replayed)
    late = await attempt(client, 1, b"late")
    assert await client.streams.commit("orders", writer="etl", batch=1, attempts=[late]) == (
        CommitInfo(None, None, True)
    )
    assert await payloads(other) == [b"1", b"2"]


async def test_what_is_not_staged_cannot_be_committed_and_is_named(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"x")
    gone = StagedAttempt("ab" * 16, 3)
    with pytest.raises(StagedMissing, match=f"batch 1 of writer 'etl', attempt {gone.attempt}"):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[done, gone])
    longer = StagedAttempt(done.attempt, 2)
    with pytest.raises(StagedMissing, match="record 1 of 2 is missing"):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[longer])
    assert await payloads(client) == []
    await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert await payloads(client) == [b"x"]


async def test_what_is_discarded_cannot_be_committed(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    one, two = await attempt(client, 1, b"x"), await attempt(client, 1, b"y")
    discard = client.streams.discard
    assert await discard("orders", writer="etl", batch=1, attempts=[one]) == 1
    with pytest.raises(StagedMissing):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[one, two])
    assert await discard("orders", writer="etl", batch=1) == 1
    assert await discard("orders", writer="etl", batch=1) == 0


async def test_a_commit_comes_behind_what_was_appended_before_it(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"batch")
    appending = asyncio.create_task(client.streams.append("orders", b"first"))
    await asyncio.sleep(0)
    info = await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert (await appending, info.first) in ((0, 1), (1, 0))
    assert len(await payloads(client)) == 2


# -- what is staged ------------------------------------------------------------------------------------------


async def test_messages_arrive_with_all_that_they_were_staged_with(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", compact=True)
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        await staging.append(b"plain")
        await staging.append({"packed": 1})
        await staging.append(b"headers", headers={"a": "b"})
        await staging.append(b"keyed", key="AA")
        await staging.append_many([b"m%d" % n for n in range(3)])
        await staging.add_bundle(encode_bundle([b"x", b"y"], None, False), 2)
        await staging.append(b"gone", ttl=0.001)
        await staging.append(b"", key="BB", tombstone=True)
        done = await staging.finish()
        assert await staging.finish() == done
    appended = await other.streams.append("orders", b"appended", key="AA")
    assert appended == 0
    done = pickle.loads(pickle.dumps(done))
    info = await other.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert (info.first, info.end) == (1, 12)
    found = await whole(other)
    assert [m.payload for m in found if m.payload != b"appended"] == [
        b"plain", b"\x81\xa6packed\x01", b"headers", b"keyed", b"m0", b"m1", b"m2", b"x", b"y", b"",
    ]  # fmt: skip
    by = {m.payload: m for m in found}
    assert by[b"headers"].headers == {"a": "b"}
    assert by[b"\x81\xa6packed\x01"].value == {"packed": 1}
    assert by[b""].tombstone
    items = only(setting).log.read(0, 1 << 20, now_us=0).items
    hashes = {item.key_hash for item in items if isinstance(item, Record)}  # some are compacted
    assert len(hashes) == 3, "no key, and two: the same as of appends"


async def test_an_attempt_of_many_calls_is_whole_and_in_order(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    messages = [b"%06d" % n + bytes(1000) for n in range(10_000)]
    done = await attempt(client, 1, *messages)
    assert done.records > 100
    info = await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert (info.first, info.end) == (0, 10_000)
    assert await payloads(other) == messages


async def test_an_attempt_of_nothing_and_a_batch_of_nothing_are_legal(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        empty = await staging.finish()
    assert empty.records == 0
    for batch, attempts in ((1, [empty]), (2, [])):
        assert await client.streams.commit("orders", writer="etl", batch=batch, attempts=attempts) == (
            CommitInfo(0, 0, False)
        )  # fmt: skip


async def test_an_attempt_that_is_over_takes_nothing_more(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        await staging.append(b"x")
        await staging.finish()
        with pytest.raises(Closed, match="finished"):
            await staging.append(b"y")
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        await staging.append(b"x")
    with pytest.raises(Closed):
        await staging.finish()


async def test_what_cannot_be_is_refused_before_anything_is_sent(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    streams = client.streams
    for options in ({"writer": "", "batch": 1}, {"writer": "é" * 128, "batch": 1}, {"writer": "w", "batch": -1}):  # fmt: skip
        with pytest.raises(ConfigError):
            streams.stage("orders", **options)
        with pytest.raises(ConfigError):
            await streams.commit("orders", attempts=[], **options)
    one = StagedAttempt("00" * 16, 1)
    for wrong in ([one, one], [StagedAttempt("no", 1)], [StagedAttempt("00", 1)]):
        with pytest.raises(StreamError):
            await streams.commit("orders", writer="w", batch=1, attempts=wrong)
    many = [StagedAttempt(f"{n:032x}", 1_000_000) for n in range(60_000)]
    with pytest.raises(MessageTooLarge, match="60000 attempts"):
        await streams.commit("orders", writer="w", batch=1, attempts=many)
    async with streams.stage("orders", writer="w", batch=1) as staging:
        with pytest.raises(LocalProtocolError):
            await staging.add_bundle(encode_bundle([b"x", b"y"], None, False), 3)
        with pytest.raises(MessageTooLarge):
            await staging.append(bytes(2 << 20))


# -- who may -------------------------------------------------------------------------------------------------


async def test_who_holds_no_key_of_the_stream_stages_and_commits_nothing(setting: Any) -> None:
    cluster, client, _ = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"x")
    stranger = Keyring.single(ClusterKey(bytes(range(32))))
    async with cluster.client(keyring=stranger) as foreign:
        with pytest.raises(NoStream):
            await attempt(foreign, 1, b"y")
        for call in (
            foreign.streams.commit("orders", writer="etl", batch=1, attempts=[done]),
            foreign.streams.discard("orders", writer="etl", batch=1),
        ):
            with pytest.raises(NoStream):
                await call
    assert (await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])).end == 1


async def test_a_paused_stream_and_dead_letters_take_no_batches(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"x")
    await client.streams.pause("orders")
    with pytest.raises(StreamError, match="paused"):
        await attempt(client, 1, b"y")
    with pytest.raises(StreamError, match="paused"):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    await client.streams.resume("orders")
    assert (await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])).end == 1
    await client.streams.append("orders", b"bad")
    async with client.streams.consumer("orders", "c", max_deliver=1) as work:
        work.nack(await anext(work))
        await work.flush()
        with pytest.raises(StreamError, match="dead letters"):
            await client.streams.commit("orders.dead", writer="etl", batch=1, attempts=[])


async def test_a_staged_record_that_expects_an_offset_is_refused(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    new = NewRecord(0, b"\0" * 12 + b"\1" + bytes(11), b"x", expect=0)
    call = Stage("etl", 1, bytes(16), bytes(16), [new])
    with pytest.raises(StreamError, match="expect"):
        await client.streams._stores.ask_stream("orders", "", call, Staged, timeout=5.0)


# -- bounds --------------------------------------------------------------------------------------------------


async def test_over_a_bound_staging_fails_with_the_reason_and_room_can_be_made(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    monkeypatch.setattr(staged_rows, "STAGED_BYTES", 100_000)
    with pytest.raises(StreamUnavailable, match="at most 100000 bytes"):
        await attempt(client, 1, *[bytes(10_000)] * 50)
    await client.streams.discard("orders", writer="etl", batch=1)
    done = await attempt(client, 1, b"x")
    assert (await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])).end == 1


async def test_limits_of_the_stream_hold_after_a_commit(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", max_messages=3)
    parts = [await attempt(client, 1, b"%d" % n) for n in range(5)]
    await client.streams.commit("orders", writer="etl", batch=1, attempts=parts)
    assert await payloads(other) == [b"2", b"3", b"4"]


async def test_what_expires_is_reported_once_in_the_log(
    setting: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, _ = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"x")
    store = cluster.store.store
    store.now_us += 2 * staged_rows.EXPIRE_US
    store.tend()
    logged = [record for record in caplog.records if record.message == "store.staged_expired"]
    assert [record.fields for record in logged] == [{"stream": "orders", "records": 1}]  # type: ignore[attr-defined]  # ours
    with pytest.raises(StagedMissing):
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])


# -- restarts and failures -----------------------------------------------------------------------------------


async def test_what_is_staged_outlives_the_store_and_is_committed_by_another(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"a", b"b")
    assert await payloads(other) == []
    await cluster.stop_store()
    committing = asyncio.create_task(
        other.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    )
    await asyncio.sleep(0)
    await cluster.start_store()
    assert await committing == CommitInfo(0, 2, False)
    await cluster.stop_store()
    await cluster.start_store()
    assert await client.streams.commit("orders", writer="etl", batch=1, attempts=[done]) == (
        CommitInfo(0, 2, True)
    )
    assert await payloads(client) == [b"a", b"b"]


@pytest.mark.parametrize("what", ["store", "relay"])
async def test_staging_goes_on_over_a_restart(setting: Any, what: str) -> None:
    cluster, client, other = setting
    await client.streams.create("orders")
    messages = [b"%06d" % n + bytes(2000) for n in range(6000)]
    staging = asyncio.create_task(attempt(client, 1, *messages))
    for _ in range(3):
        before = only(setting).log.staging.rows.bytes
        while not staging.done() and only(setting).log.staging.rows.bytes == before:  # noqa: ASYNC110 - it grows by itself
            await asyncio.sleep(0)
        if what == "store":
            await cluster.stop_store()
            await cluster.start_store()
        else:
            await cluster.stop_relay()
            cluster.store.up.clear()
            await cluster.start_relay()
            await cluster.store.up.wait()
    done = await staging
    await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert await payloads(other) == messages


async def test_a_disk_that_refuses_fails_staging_and_committing_and_nothing_is_there_twice(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    done = await attempt(client, 1, b"x")
    database = only(setting).log._database

    def refuse(*_: object, **__: object) -> None:
        database.failed = "no space left"
        raise LogWriteFailed("here", "no space left")

    monkeypatch.setattr(database, "write", refuse)
    # It is not opened again until we say so.
    only(setting).reopen_us = 1 << 62
    with pytest.raises(StreamUnavailable, match="no space") as failed:
        await attempt(client, 1, b"y")
    assert failed.value.may_have_run
    with pytest.raises(StreamUnavailable, match="no space") as failed:
        await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert failed.value.may_have_run
    monkeypatch.undo()
    only(setting).reopen_us = 0
    setting[0].store.store.tend()
    assert await client.streams.commit("orders", writer="etl", batch=1, attempts=[done]) == (
        CommitInfo(0, 1, False)
    )
    assert await payloads(other) == [b"x"]


async def test_a_staging_whose_log_is_opened_again_is_sent_once_more(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    take = Stream.stage
    failed = []

    def stage(stream: Stream, *arguments: Any) -> None:
        take(stream, *arguments)
        if not failed:  # another write fails before this one is due
            failed.append(True)
            assert stream.log is not None
            stream.log._database.failed = "no space left"
            stream.reopen(setting[0].store.store.now_us)

    monkeypatch.setattr(Stream, "stage", stage)
    done = await attempt(client, 1, b"x")
    await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert await payloads(other) == [b"x"]


async def test_an_append_that_is_cancelled_while_it_waits_for_room_stages_nothing(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    monkeypatch.setattr("iris.streams.staging.WINDOW_BYTES", 0)
    messages = [b"%d" % n + bytes(40_000) for n in range(20)]
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        kept = []
        for message in messages:
            appending = asyncio.create_task(staging.append(message))
            await asyncio.sleep(0)
            if appending.done() or len(kept) < 10:
                await appending
                kept.append(message)
            else:
                appending.cancel()
                await asyncio.gather(appending, return_exceptions=True)
        done = await staging.finish()
    assert 10 <= len(kept) < 20
    await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])
    assert await payloads(other) == kept


async def test_a_staging_that_is_cancelled_while_it_waits_leaves_nobody_waiting(
    setting: Any,
) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    async with client.streams.stage("orders", writer="etl", batch=1) as staging:
        await staging.append(bytes(1000))
        finishing = asyncio.create_task(staging.finish())
        await asyncio.sleep(0)
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        done = await staging.finish()
    assert (await client.streams.commit("orders", writer="etl", batch=1, attempts=[done])).end == 1
    call = Stage("etl", 2, bytes(16), bytes(16), [NewRecord(0, b"\0" * 12 + b"\1" + bytes(11), b"x")])  # fmt: skip
    with pytest.raises(StreamUnavailable, match="Staged"):
        await client.streams._stores.ask_stream("orders", "", call, Settled, timeout=5.0)
