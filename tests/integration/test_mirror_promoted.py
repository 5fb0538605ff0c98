"""A copy that is promoted goes on as a stream; and what the command does of all this."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from integration.mirrors import come_to, copy_all, fetched, log_of, whole
from support.commands import Shell, dev_relay, short_directory
from support.waiting import PATIENCE_S, wait_until

from iris.errors import StreamError, StreamExists


async def test_a_promoted_copy_goes_on_as_a_stream(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>", compact=True)
    await client.publish("orders.eu", b"0")
    await client.flush()
    await cluster.settle()
    await client.streams.append("orders", b"1", key="AA")
    async with other.streams.mirror("orders", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await come_to(client, "copy", 2)
        reader = other.streams.read("copy")
        work = other.streams.consumer("copy", "work")
        assert [(await anext(reader)).offset for _ in range(2)] == [0, 1]
        for _ in range(2):
            work.ack(await anext(work))
        await client.streams.delete("orders")
        promoted = await client.streams.promote("copy")
        assert (promoted.mirror, promoted.topic, promoted.lag, promoted.end) == (
            "", "orders.>", None, 2,
        )  # fmt: skip
        with contextlib.suppress(StreamError):
            await asyncio.wait_for(running, PATIENCE_S)
    again = await client.streams.promote("copy")
    assert (again.uuid, again.key_ids) == (promoted.uuid, promoted.key_ids)
    assert await client.streams.append("copy", b"2", key="AA") == 2
    await client.publish("orders.us", b"3")
    await client.flush()
    await cluster.settle()
    for held in (reader, work):
        found = [await asyncio.wait_for(anext(held), PATIENCE_S) for _ in range(2)]
        assert [(m.offset, m.payload) for m in found] == [(2, b"2"), (3, b"3")]
        await held.close()
    items = await fetched(client, "copy")
    assert items[1].key_hash == items[2].key_hash != b""
    await client.streams.change("copy", compact=True)
    log = await log_of(cluster, client, "copy")
    assert log.compact(cluster.store.store.now_us)
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"0", b"2", b"3"]


async def test_a_promoted_copy_is_one_after_a_restart_and_takes_no_copies(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await client.streams.append("orders", b"0")
    await copy_all(client, "orders", "copy")
    await client.streams.promote("copy")
    await cluster.stop_store()
    await cluster.start_store()
    await other.publish("orders", b"1")
    await other.flush()
    await cluster.settle()
    found, gaps = await whole(client, "copy")
    assert [m.payload for m in found] == [b"0", b"1"]
    assert [gap.cause for gap in gaps] == ["the store was not running"]
    with pytest.raises(StreamExists, match="promoted"):
        await copy_all(client, "orders", "copy")


async def test_a_running_mirror_ends_when_its_copy_is_promoted(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await client.streams.append("log", b"0")
        await come_to(client, "copy", 1)
        await client.streams.promote("copy")
        await client.streams.append("log", b"1")
        with pytest.raises(StreamError, match="promoted"):
            await asyncio.wait_for(running, PATIENCE_S)
    assert await client.streams.append("copy", b"own") == 1


async def test_a_copy_that_is_promoted_without_recording_takes_appends_alone(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("bills", cluster="billing")
    await copy_all(client, "bills", "copy")
    info = await client.streams.promote("copy", record=False)
    assert (info.topic, info.cluster) == ("", "")
    await client.streams.delete("bills")
    assert len(await client.members("billing")) == 0
    assert await client.streams.append("copy", b"x") == 0
    assert await client.streams.append_many("copy", [b"y"]) == [1]


async def test_a_promoted_copy_of_a_cluster_takes_its_pushes(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("bills", cluster="billing")
    await copy_all(client, "bills", "copy")
    await client.streams.delete("bills")
    assert (await client.streams.promote("copy")).cluster == "billing"
    await other.push("billing", b"one")
    await other.broadcast("billing", b"two")
    await other.flush()
    await cluster.settle()
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"one", b"two"]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """A shell beside a relay with a store."""
    with short_directory("iris-mirror-") as root, dev_relay(root, "--data", str(root / "data")):
        shell = Shell(root)
        wait_until(lambda: _made(shell))
        yield shell
        shell.finish()


def _made(shell: Shell) -> bool:
    with contextlib.suppress(AssertionError):
        shell("stream", "create", "log")
        return True
    return False


def facts(shell: Shell, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shell("stream", "info", name, "--json"))
    return found


@pytest.mark.timeout(120)
def test_the_command_copies_follows_and_promotes(shell: Shell) -> None:
    for text in ("one", "two"):
        shell("stream", "append", "log", text)
    assert shell("stream", "mirror", "log", "copy") == b""
    assert shell("stream", "read", "copy") == b"one\ntwo\n"
    source = facts(shell, "log")["uuid"]
    info = facts(shell, "copy")
    assert (info["mirror"], info["source"], info["lag"], info["end"]) == (source, "log", 0, 2)
    said = dict(line.split("\t") for line in shell("stream", "info", "copy").decode().splitlines())
    assert (said["records"], said["source"], said["lag"]) == ("copy of log", "log", "0")
    assert b"copy of log" in shell("stream", "list")

    for number in (signal.SIGINT, signal.SIGTERM):
        process = shell.start("stream", "mirror", "log", "copy", "--follow", "-v")
        ends = facts(shell, "log")["end"] + 1
        shell("stream", "append", "log", "more")
        figures = f"copy: copied 1, end {ends}, lag 0".encode()
        assert process.stderr is not None
        # The store has it before the mirror has heard so.
        while figures not in (said := process.stderr.readline()):
            assert said, "it ended without saying so"
        assert facts(shell, "copy")["end"] == ends
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (0, b"")
        assert figures in err

    assert b"promoted" in shell("stream", "append", "copy", "no", code=1)
    assert b"not a copy" in shell("stream", "promote", "log", code=1)
    assert shell("stream", "promote", "copy") == b"4\n"
    assert shell("stream", "append", "copy", "own") == b"4\n"
    assert b"promoted" in shell("stream", "mirror", "log", "copy", code=1)
    assert b"nothing" in shell("stream", "mirror", "nothing", "copy2", code=3)
    assert "lag" not in shell("stream", "info", "copy").decode().split()


@pytest.mark.timeout(120)
def test_the_command_hands_a_stream_over_and_lets_a_copy_take_the_place_of_a_lost_one(
    shell: Shell,
) -> None:
    old = shell("stream", "create", "bills").decode().strip()
    shell("stream", "append", "bills", "one")
    new = shell("stream", "handover", "bills", "bills-2", "--durability", "disk").decode().strip()
    assert (facts(shell, "bills")["uuid"], facts(shell, "bills")["replaces"]) == (new, old)
    assert shell("stream", "append", "bills", "two") == b"1\n"
    kept = shell("stream", "info", "bills", "--uuid", old).decode()
    assert f"superseded-by\t{new} from offset 1 on\n" in kept
    assert f"replaces\t{old} from offset 1 on\n" in shell("stream", "info", "bills").decode()
    assert shell("stream", "read", "bills", "--uuid", old) == b"one\n"
    assert b"superseded" in shell("stream", "append", "bills", "no", "--uuid", old, code=1)
    # The source answers, so a copy does not take its place by force.
    shell("stream", "mirror", "bills", "bills-3")
    said = shell("stream", "promote", "bills-3", "--as", "bills", "--force", code=1)
    assert b"has it and answers" in said
    shell("stream", "delete", "bills", "--uuid", new, "--yes")
    said = shell("stream", "promote", "bills-3", "--as", "bills", code=1)
    assert b"lost for good, use force" in said
    assert shell("stream", "promote", "bills-3", "--as", "bills", "--force") == b"2\n"
    out, err = shell.printed("stream", "read", "bills")
    assert (out, b"its copy ended here" in err) == (b"one\ntwo\n", True)
