"""Without `shared`, one worker of a consumer is active, and others stand by in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from support.links import Host
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually, wait_until

import iris
from iris import blocking
from iris.errors import NotActive, TooManyWorkers
from iris.streams import Consumer, StreamMessage
from iris.testing import LocalCluster
from relay.store import line

pytestmark = pytest.mark.timeout(120)
PROGRAM = Path(__file__).parents[1] / "support" / "active_worker.py"


class Replica:
    """`support/active_worker.py` in another process."""

    def __init__(self, socket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        """Return what it says next."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    def settle(self) -> None:
        """Let it settle the message that it has."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


async def take(consumer: Consumer, count: int = 1) -> list[StreamMessage]:
    async with asyncio.timeout(PATIENCE_S):
        return [await anext(consumer) for _ in range(count)]


async def state(there: iris.Client, name: str = "orders", partition: int | None = None) -> Any:
    (found,) = await there.streams.consumers(name, partition=partition)
    return found


async def stands_by(there: iris.Client, count: int = 1) -> None:
    """Wait until so many workers of the only consumer of "orders" stand by."""
    async with asyncio.timeout(PATIENCE_S):
        while (await state(there)).standing != count:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.02)


async def settled(there: iris.Client) -> None:
    """Wait until the only consumer of "orders" has settled everything."""
    async with asyncio.timeout(PATIENCE_S):
        while (await state(there)).lag:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.02)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as there:
        await there.streams.create("orders")
        yield cluster


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as daemon:
        yield daemon


async def test_two_replicas_under_a_supervisor_do_not_displace_each_other(
    cluster: LocalCluster,
) -> None:
    starts: list[str] = []
    done: list[int] = []

    async def supervised(name: str) -> None:
        async with cluster.client() as there:
            while True:
                starts.append(name)
                with contextlib.suppress(iris.StreamError):
                    async with there.streams.consumer("orders", "ledger", prefetch=1) as work:
                        async for message in work:
                            message.ack()
                            await work.flush()
                            done.append(message.offset)

    async with asyncio.TaskGroup() as group, cluster.client() as there:
        replicas = [group.create_task(supervised(name)) for name in ("one", "two")]
        for number in range(20):
            await there.streams.append("orders", b"%d" % number)
            await asyncio.sleep(0.02)
        await eventually(lambda: len(done) >= 20)
        assert (await state(there)).standing == 1
        for replica in replicas:
            replica.cancel()
    assert sorted(starts) == ["one", "two"]
    assert done == list(range(20))


async def test_workers_are_active_in_the_order_in_which_they_came(cluster: LocalCluster) -> None:
    async with contextlib.AsyncExitStack() as stack, cluster.client() as there:
        await there.streams.append_many("orders", [b"1", b"2"])
        workers = []
        for number in range(4):
            one = await stack.enter_async_context(cluster.client())
            worker = one.streams.consumer("orders", "ledger")
            waiting = asyncio.create_task(anext(worker))
            workers.append((worker, waiting))
            await eventually(lambda w=worker, n=number: w.active == (n == 0))  # type: ignore[misc]  # defaults
            await stands_by(there, number)
        found = await state(there)
        assert (len(found.active), len(found.standing_by), found.standing) == (1, 3, 3)
        assert f", pid {os.getpid()} on " in found.active[0]
        for number, (worker, waiting) in enumerate(workers):
            async with asyncio.timeout(PATIENCE_S):
                message = await waiting
            assert (message.offset, message.deliveries) == (0, 1)
            assert worker.active
            assert not any(other.active for other, _ in workers[number + 1 :])
            await worker.close()
        assert (await state(there)).lag == 2


async def test_a_worker_that_closes_hands_over_at_once_and_nothing_counts_as_delivered(
    cluster: LocalCluster,
) -> None:
    said: list[bool] = []
    async with cluster.client() as one, cluster.client() as two:
        await one.streams.append_many("orders", [b"1", b"2", b"3"])
        async with one.streams.consumer("orders", "ledger", max_deliver=5) as old:
            done, *_ = await take(old, 2)  # the third one waits in the worker
            done.ack()
            await old.flush()
            new = two.streams.consumer("orders", "ledger", max_deliver=5, on_active=said.append)
            waiting = asyncio.create_task(anext(new))
            await stands_by(one)
            assert (old.active, new.active) == (True, False)
        async with asyncio.timeout(line.LEASE_US / 2e6):  # no lease had to end
            first = await waiting
        (second,) = await take(new)
        assert [(each.offset, each.deliveries) for each in (first, second)] == [(1, 1), (2, 1)]
        assert (new.active, said) == (True, [True])
        await new.close()


async def test_what_a_loop_had_begun_with_counts_as_delivered_if_it_raised(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as there:
        await there.streams.append_many("orders", [b"poison", b"2"])

        async def fail(deliveries: int) -> None:
            async with there.streams.consumer("orders", "ledger", max_deliver=2) as work:
                async for message in work:
                    assert (message.offset, message.deliveries) == (0, deliveries)
                    raise ZeroDivisionError

        for turn in range(2):
            with pytest.raises(ZeroDivisionError):
                await fail(turn + 1)
        async with there.streams.consumer("orders", "ledger", max_deliver=2) as work:
            (message,) = await take(work)
            assert (message.offset, message.deliveries) == (1, 1)
        (letter,) = await there.streams.dead_letters("orders", "ledger")
        assert letter.payload == b"poison"


async def test_a_worker_that_was_replaced_learns_it_by_its_next_settlement(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "iris")
    said: list[bool] = []
    async with cluster.client() as one, cluster.client() as two:
        await one.streams.append_many("orders", [b"1", b"2", b"3"])
        old = one.streams.consumer("orders", "ledger", on_active=said.append)
        late, _ = await take(old, 2)
        new = two.streams.consumer("orders", "ledger")
        waiting = asyncio.create_task(anext(new))
        await stands_by(one)
        info = await one.streams.handover_consumer("orders", "ledger")
        assert (len(info.active), info.standing) == (1, 1)
        async with asyncio.timeout(PATIENCE_S):
            first = await waiting
        assert first.offset == 0
        await eventually(lambda: not old.active)
        assert said == [True, False]
        late.ack()
        with pytest.raises(NotActive, match="another worker of consumer 'ledger' is active"):
            await old.flush()
        late.nack()
        with pytest.raises(NotActive):
            await old.flush()
        late.touch()
        with pytest.raises(NotActive):
            await anext(old)
        assert (await state(one)).lag == 3
        standing = asyncio.create_task(anext(old))  # it goes on, and stands by
        await stands_by(one)
        new.ack(first, *await take(new, 2))
        await new.flush()
        assert not standing.done()
        await new.close()
        await one.streams.append("orders", b"4")
        async with asyncio.timeout(PATIENCE_S):
            assert (await standing).offset == 3
        assert said == [True, False, True]
        await old.close()
    events = [record.event for record in caplog.records if record.event.startswith("consumer.")]  # type: ignore[attr-defined]  # iris.logs adds it
    assert events.count("consumer.replaced") == 1
    assert {"consumer.active", "consumer.standing_by"} <= set(events)


async def test_there_is_nobody_to_hand_over_to(cluster: LocalCluster) -> None:
    async with (
        cluster.client() as there,
        there.streams.consumer("orders", "ledger") as work,
    ):
        await there.streams.append("orders", b"1")
        await take(work)
        with pytest.raises(iris.StreamError, match="no worker of consumer 'ledger' stands by"):
            await there.streams.handover_consumer("orders", "ledger")
        with pytest.raises(iris.StreamError, match="the stream has no consumer 'other'"):
            await there.streams.handover_consumer("orders", "other")


async def test_one_worker_too_many_is_refused_by_name(cluster: LocalCluster) -> None:
    async with cluster.client() as there:
        workers = [there.streams.consumer("orders", "ledger") for _ in range(line.MAX_OF_LEASE + 1)]
        waiting = [asyncio.create_task(anext(worker)) for worker in workers[:-1]]
        await eventually(lambda: any(worker.active for worker in workers))
        await stands_by(there, line.MAX_OF_LEASE - 1)
        with pytest.raises(TooManyWorkers, match=f"{line.MAX_OF_LEASE} workers of this client"):
            await anext(workers[-1])
        for task in waiting:
            task.cancel()
        for worker in workers:
            await worker.close()


async def keeps_its_place(one: Any, two: Any, happens: Callable[[], Awaitable[None]]) -> None:
    """A worker of `one` that has begun with a message stays active while something `happens`; one of `two` waits."""
    await one.streams.append_many("orders", [b"1", b"2"])
    async with (
        one.streams.consumer("orders", "ledger", prefetch=1) as work,
        two.streams.consumer("orders", "ledger", prefetch=1) as other,
    ):
        (first,) = await take(work)
        standing = asyncio.create_task(anext(other))
        await stands_by(two)
        await happens()
        first.ack()
        (second,) = await take(work)
        assert (second.offset, work.active, other.active) == (1, True, False)
        second.ack()
        await work.flush()
        assert not standing.done()
        standing.cancel()


async def test_a_client_that_connects_again_keeps_its_place(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "RETURN_US", 3_000_000)  # so that a slow machine is in time
    store = cluster.store.store
    async with cluster.client() as one, cluster.client() as two:

        async def connects_again() -> None:
            lease = store.calls.leases._leases[one.streams._stores.attendance.lease]
            for _ in range(3):
                cluster.cut(one)
                until_us = store.clock.awake_us + line.LEASE_US
                await eventually(lambda end=until_us: lease.until_us > end)  # type: ignore[misc]  # a default

        await keeps_its_place(one, two, connects_again)


async def test_a_client_that_is_lost_is_replaced(cluster: LocalCluster) -> None:
    async with cluster.client() as one, cluster.client() as two:
        await one.streams.append_many("orders", [b"1", b"2"])
        work = one.streams.consumer("orders", "ledger", patience=60.0)
        other = two.streams.consumer("orders", "ledger")
        (first, _) = await take(work, 2)
        standing = asyncio.create_task(anext(other))
        await stands_by(two)
        cluster.lose(one)
        async with asyncio.timeout(PATIENCE_S):
            assert (await standing).offset == 0
        cluster.restore(one)
        first.ack()
        with pytest.raises(NotActive):
            await work.flush()
        assert not work.active
        await work.close()
        await other.close()


async def test_the_worker_that_was_active_is_again_after_a_restart_of_the_store(
    cluster: LocalCluster,
) -> None:
    async def restarts() -> None:
        await cluster.stop_store()
        await cluster.start_store()

    async with cluster.client() as one, cluster.client() as two:
        await keeps_its_place(one, two, restarts)


async def test_each_partition_has_one_active_worker(tmp_path: Path) -> None:
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client() as one,
        cluster.client() as two,
    ):
        await one.streams.create("orders", partitions=3)
        for partition in range(3):
            await one.streams.append_many("orders", [b"1", b"2"], partition=partition)
        async with (
            two.streams.consumer("orders", "ledger", partition=1) as single,
            one.streams.consumer("orders", "ledger") as work,
        ):
            (own,) = await take(single)
            got = await take(work, 4)
            assert {message.partition for message in got} == {0, 2}
            assert work.active
            await eventually(lambda: work._workers[1]._place == 1)
            states = [await state(one, partition=number) for number in range(3)]
            assert [each.standing for each in states] == [0, 1, 0]
            assert len({each.active[0] for each in states}) == 1 or states[1].active
            whole = await state(one)
            assert whole.standing == 1
            own.ack()
            for message in got:
                message.ack()
            await single.close()
            (last,) = await take(work)
            assert (last.partition, last.offset) == (1, 1)
            last.ack()
            await work.flush()
        assert (await state(one)).lag == 0


async def test_a_client_renews_with_one_call_for_all_of_its_workers_at_a_store(
    tmp_path: Path,
) -> None:
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as one:
        await one.streams.create("orders", partitions=6)
        async with one.streams.consumer("orders", "ledger") as work:
            for partition in range(6):
                await one.streams.append("orders", b"1", partition=partition)
            await take(work, 6)
            attendance = one.streams._stores.attendance
            await eventually(lambda: len(attendance._kept) == 6 and len(attendance._loops) == 1)
            via = next(iter(attendance._loops))
            leaving = next(each for each in work._workers.values() if each.id == via)
            await leaving.close()  # the one by way of which the others are renewed
            await eventually(lambda: len(attendance._kept) == 5 and len(attendance._loops) == 1)
        assert not attendance._kept
        await eventually(lambda: not attendance._loops)


async def test_a_worker_that_was_dropped_without_being_closed_gives_its_place_back(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as one, cluster.client() as two:
        await one.streams.append("orders", b"1")
        async with one.streams.consumer("orders", "other") as kept:  # which renews the lease on
            await take(kept)
            dropped: Consumer | None = one.streams.consumer("orders", "ledger")
            await take(dropped)
            other = two.streams.consumer("orders", "ledger")
            standing = asyncio.create_task(anext(other))
            dropped = None
            await eventually(lambda: gc.collect() >= 0 and standing.done())
            assert (await standing).offset == 0
            await other.close()


async def test_a_killed_replica_is_replaced(daemon: Daemon) -> None:
    async with client(daemon.socket) as there:
        await there.streams.create("orders")
        await there.streams.append("orders", b"1")
        with Replica(daemon.socket) as first:
            assert {await first.line(), await first.line()} == {"active", "1"}
            with Replica(daemon.socket) as second:
                await stands_by(there)
                first.send(signal.SIGKILL)
                assert {await second.line(), await second.line()} == {"active", "1"}
                second.settle()
                await settled(there)


async def test_a_replica_that_was_stopped_is_replaced_and_its_late_ack_is_refused(
    daemon: Daemon,
) -> None:
    async with client(daemon.socket) as there:
        await there.streams.create("orders")
        await there.streams.append("orders", b"1")
        with Replica(daemon.socket) as first:
            assert {await first.line(), await first.line()} == {"active", "1"}
            with Replica(daemon.socket) as second:
                await stands_by(there)
                first.send(signal.SIGSTOP)
                assert {await second.line(), await second.line()} == {"active", "1"}
                first.send(signal.SIGCONT)
                assert await first.line() == "inactive"  # although it asks for nothing
                first.settle()
                assert "NotActive: stream orders: another worker of consumer" in await first.line()
                assert (await state(there)).lag == 1
                second.settle()
                await settled(there)


async def test_a_replica_whose_relay_is_cut_off_is_replaced(tmp_path: Path) -> None:
    one = Host(tmp_path / "one", "--port", "0", "--data", str(tmp_path / "data"))
    with one.daemon:
        two = Host(tmp_path / "two", "--port", "0", "--join", one.address)
        with two.daemon:
            wait_until(lambda: one.events("link.up") and two.events("link.up"))
            async with client(one.daemon.socket) as there:
                await there.streams.create("orders")
                await there.streams.append("orders", b"1")
                with Replica(two.daemon.socket) as far:
                    assert {await far.line(), await far.line()} == {"active", "1"}
                    with Replica(one.daemon.socket) as near:
                        await stands_by(there)
                        two.daemon.process.send_signal(signal.SIGSTOP)  # as a host that was cut off
                        assert {await near.line(), await near.line()} == {"active", "1"}
                        two.daemon.process.send_signal(signal.SIGCONT)
                        near.settle()
                        await settled(there)


def test_threads_have_one_active_worker_too(daemon: Daemon) -> None:
    keyring = iris.Keyring.single(KEY)
    said: list[bool] = []
    with blocking.connect(daemon.socket, keyring=keyring) as one, blocking.connect(daemon.socket, keyring=keyring) as two:  # fmt: skip
        one.streams.create("orders")
        one.streams.append_many("orders", [b"1", b"2"])
        old = one.streams.consumer("orders", "ledger")
        first = next(old)
        new = two.streams.consumer("orders", "ledger", on_active=said.append)
        wait_until(lambda: old.active)

        got: list[StreamMessage] = []
        thread = threading.Thread(target=lambda: got.append(next(new)))
        thread.start()
        wait_until(lambda: one.streams.consumers("orders")[0].standing == 1)
        assert one.streams.handover_consumer("orders", "ledger").standing == 1
        thread.join(PATIENCE_S)
        assert [(message.offset, new.active) for message in got] == [(0, True)]
        first.ack()
        with pytest.raises(NotActive):
            old.flush()
        assert said == [True]
        with new:
            got[0].ack()
        assert [message.deliveries for message in (next(old),)] == [1]
        old.close()
