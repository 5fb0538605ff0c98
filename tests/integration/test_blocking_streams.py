"""Durable streams for threads: a real relay with a store, and the blocking client alone."""

from __future__ import annotations

import concurrent.futures
import inspect
import threading
from collections.abc import Iterator

import pytest
from support.relays import KEY, Daemon

import iris
from iris import blocking, streams
from iris.streams import blocking as blocking_streams

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("relay")
    with Daemon(directory, "--data", str(directory / "data")) as daemon:
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture
def client(relay: Daemon) -> Iterator[blocking.Client]:
    with blocking.connect(relay.socket, keyring=iris.Keyring.single(KEY)) as client:
        yield client


def test_what_is_appended_is_read_from_any_offset(client: blocking.Client) -> None:
    info = client.streams.create("orders")
    assert info.name == "orders"
    assert client.streams.append("orders", {"id": 1}, key="1") == 0
    assert client.streams.append_many("orders", [b"two", b"three"]) == [1, 2]
    with client.streams.read("orders", follow=False) as reader:
        assert [message.value for message in reader] == [{"id": 1}, b"two", b"three"]
        assert reader.offset == reader.high_water == 3
        assert reader.gaps == []
    with client.streams.read("orders", 1, follow=False) as reader:
        first = next(reader)
        assert (first.offset, reader.offset) == (1, 2)
        assert [len(batch) for batch in reader.batches()] in ([], [1])
    assert client.streams.find("orders", "new") == 3
    assert client.streams.fetch("orders", 0).end == 3
    assert [stream.name for stream in client.streams.list()] == ["orders"]
    with pytest.raises(iris.NoStream, match="nothing"):
        client.streams.describe("nothing")
    client.streams.delete("orders")


def test_workers_in_threads_share_a_consumer_and_settle_each_message(
    client: blocking.Client,
) -> None:
    client.streams.create("work")
    client.streams.append_many("work", [b"%d" % number for number in range(200)])
    done: list[bytes] = []
    finished = threading.Event()
    lock = threading.Lock()

    def work(worker: blocking_streams.Consumer) -> None:
        for batch in worker.batches():
            worker.ack(*batch)
            worker.flush()
            with lock:
                done.extend(message.payload for message in batch)
                if len(done) >= 200:
                    finished.set()

    workers = [client.streams.consumer("work", "team", shared=True, prefetch=10) for _ in range(2)]
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    assert finished.wait(60)
    for worker, thread in zip(workers, threads, strict=True):
        worker.close()  # ends the iteration of the thread
        worker.close()
        thread.join(60)
        assert not thread.is_alive()
    assert {int(payload) for payload in done} == set(range(200))
    client.streams.delete("work")


def test_a_message_that_failed_comes_again_and_then_is_a_dead_letter(
    client: blocking.Client,
) -> None:
    client.streams.create("jobs")
    client.streams.append("jobs", b"bad")
    with client.streams.consumer("jobs", "one", max_deliver=2) as worker:
        for _ in range(2):
            worker.nack(next(worker), reason="no")
            worker.flush()
        with client.streams.read("jobs.dead") as dead:
            assert next(dead).payload == b"bad"
    assert [consumer.name for consumer in client.streams.consumers("jobs")] == ["one"]
    client.streams.delete_consumer("jobs", "one")
    client.streams.delete("jobs")


def test_a_worker_that_is_stopped_finishes_the_message_in_hand(client: blocking.Client) -> None:
    client.streams.create("printing")
    client.streams.append_many("printing", [1, 2, 3])
    worker = client.streams.consumer("printing", "printer", shared=True)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with worker:
            for message in worker:
                begun.set()
                assert go_on.wait(30)
                worker.ack(message)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(30)
    worker.stop()
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    with client.streams.consumer("printing", "printer", shared=True) as other:
        assert [(m.value, m.deliveries) for m in (next(other), next(other))] == [(2, 1), (3, 1)]
    client.streams.delete("printing")


def test_a_batch_is_staged_and_committed_once(client: blocking.Client) -> None:
    client.streams.create("rows")
    with client.streams.stage("rows", writer="etl", batch=1) as staging:
        staging.append(b"a")
        staging.append_many([b"b", b"c"])
        attempt = staging.finish()
    for replayed in (False, True):
        info = client.streams.commit("rows", writer="etl", batch=1, attempts=[attempt])
        assert (info.first, info.end, info.replayed) == (0, 3, replayed)
    client.streams.delete("rows")


def test_an_endless_read_in_a_thread_ends_with_the_client(relay: Daemon) -> None:
    client = blocking.connect(relay.socket, keyring=iris.Keyring.single(KEY))
    client.streams.create("endless")
    ended: list[BaseException] = []
    started = threading.Event()

    def follow() -> None:
        try:
            with client.streams.read("endless") as reader:
                started.set()
                for _ in reader:
                    pass
        except BaseException as err:
            ended.append(err)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert started.wait(30)
    client.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(ended) == 1
    assert isinstance(ended[0], iris.Closed)


@pytest.mark.parametrize(
    ("ours", "original", "left_out"),
    [
        (blocking_streams.Streams, streams.Streams, {"end", "finish"}),
        (blocking_streams.Reader, streams.Reader, set()),
        (blocking_streams.Consumer, streams.Consumer, set()),
        (blocking_streams.Mirror, streams.Mirror, set()),
        (blocking_streams.Staging, streams.Staging, {"add_bundle", "layout"}),
    ],
)
def test_the_blocking_objects_have_the_methods_and_parameters_of_the_others(
    ours: type, original: type, left_out: set[str]
) -> None:
    def names(cls: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}

    assert names(original) - names(ours) == left_out
    for name in names(ours) & names(original):
        if inspect.isfunction(getattr(ours, name)):
            mine, other = (inspect.signature(getattr(cls, name)) for cls in (ours, original))
            assert mine.parameters.keys() == other.parameters.keys(), name


def test_a_thread_cannot_settle_a_message_of_another_stream(client: blocking.Client) -> None:
    for name in ("settled", "others"):
        client.streams.create(name)
        client.streams.append(name, b"1")
    with (
        client.streams.consumer("settled", "work", shared=True) as work,
        client.streams.consumer("others", "work", shared=True) as other,
    ):
        message = next(work)
        next(other)
        for settle in (other.ack, other.ack_through, other.nack, other.touch):
            with pytest.raises(
                ValueError, match=r"is of stream 'settled' .* reads stream 'others'"
            ):
                settle(message)
        other.flush()
        work.ack(message)
        work.flush()
    assert [info.lag for info in client.streams.consumers("others")] == [1]


def test_a_message_settles_itself_from_any_thread(client: blocking.Client) -> None:
    client.streams.create("own")
    client.streams.append_many("own", [b"1", b"2", b"3"])
    with client.streams.consumer("own", "work", shared=True, max_deliver=1) as work:
        done, failed, long = (next(work) for _ in range(3))
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            for settle in (done.ack, lambda: failed.nack(0.0, "no stock"), long.touch, long.ack):
                thread.submit(settle).result(10)
        work.flush()
        assert [info.lag for info in client.streams.consumers("own")] == [0]
        (letter,) = client.streams.dead_letters("own", "work")
        assert letter.dead is not None
        assert (letter.dead.offset, letter.dead.reason) == (1, "no stock")
    with pytest.raises(iris.Closed, match="consumer 'work'"):
        done.touch()


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("consumer", [False, True])
def test_one_message_or_batch_at_a_time_within_a_time_that_takes_and_ends_nothing(
    client: blocking.Client, consumer: bool, batches: bool
) -> None:
    client.streams.create("log")
    messages: blocking_streams.Reader | blocking_streams.Consumer
    messages = (
        client.streams.consumer("log", "worker")
        if consumer
        else client.streams.read("log", "first", follow=True)
    )
    of = "log/worker" if consumer else "log"
    with messages:
        items = messages.batches() if batches else messages
        for number in range(3):
            for _ in range(2):
                with pytest.raises(iris.RequestTimeout) as late:
                    items.next(timeout=0.001)
                assert str(late.value) == f"{of}: nothing arrived within 0.001 s"
            client.streams.append("log", b"%d" % number)
            item = items.next(timeout=60)
            got = item if isinstance(item, list) else [item]
            assert [message.payload for message in got] == [b"%d" % number]
            if isinstance(messages, blocking_streams.Consumer):
                messages.ack(*got)
        client.streams.append("log", b"last")
        item = items.next()
        assert (item[0] if isinstance(item, list) else item).payload == b"last"
        messages.close()
        with pytest.raises(StopIteration):
            items.next(timeout=60)
    with client.streams.read("log", "first", follow=False) as reader:
        ended = reader.batches() if batches else reader
        while True:
            try:
                ended.next(timeout=60)
            except StopIteration:
                break
    client.streams.delete("log")
