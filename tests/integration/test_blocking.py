"""The same calls for threads: every verb once, through a relay in the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import iris
from iris import blocking


@pytest.fixture
def client() -> Iterator[blocking.Client]:
    with blocking.connect(
        embedded=True, keyring=iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    ) as it:
        yield it


@pytest.fixture
def got() -> list[object]:
    return []


@pytest.fixture
def served(client: blocking.Client, got: list[object]) -> Iterator[blocking.Client]:
    service = iris.Service("db")

    @service.on_request
    def request(payload: bytes) -> bytes:
        if payload == b"fail":
            raise ValueError("no")
        return payload.upper()

    @service.on_push
    def push(payload: bytes) -> None:
        got.append(("push", payload))

    @service.on_broadcast
    def broadcast(payload: bytes) -> None:
        got.append(("broadcast", payload))

    @service.on_survey
    def survey(payload: bytes) -> str:
        return "here"

    @service.on_tunnel
    async def tunnel(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message + b"!")

    with client.serve(service):
        yield client


def test_request_and_its_errors(served: blocking.Client) -> None:
    assert served.request("db", b"x", timeout=5) == b"X"
    with pytest.raises(iris.RemoteError, match="ValueError: no"):
        served.request("db", b"fail", timeout=5)
    with pytest.raises(iris.NoMembers):
        served.request("nobody", b"", timeout=5)


def test_push_broadcast_and_flush(served: blocking.Client, got: list[object]) -> None:
    served.push("db", b"p")
    served.broadcast("db", b"b")
    served.flush()
    served.request("db", b"", timeout=5)
    assert sorted(map(str, got)) == sorted(map(str, [("push", b"p"), ("broadcast", b"b")]))


def test_losses_are_watched_in_a_block(served: blocking.Client) -> None:
    with served.watch_losses() as losses:
        served.push("db", b"p")
        served.push("nobody", b"q")
        served.flush()
        assert [(lost.name, type(lost.error)) for lost in losses] == [("nobody", iris.NoMembers)]
    served.push("nobody", b"r")
    served.flush()
    assert len(losses) == 1


def test_request_many_returns_outcomes_in_the_order_of_the_payloads(
    served: blocking.Client,
) -> None:
    outcomes = served.request_many("db", [b"a", b"b", b"c"], timeout=5)
    assert [outcome.number for outcome in outcomes] == [0, 1, 2]
    assert [outcome.result() for outcome in outcomes] == [
        served.request("db", payload, timeout=5) for payload in (b"a", b"b", b"c")
    ]


def test_survey_collects_the_answers(served: blocking.Client) -> None:
    assert served.survey("db", b"", timeout=5, type=str) == ["here"]


def test_publish_offer_and_subscribe(client: blocking.Client) -> None:
    with client.subscribe("t.*") as messages:
        client.publish("t.a", b"1")
        assert client.offer("t.b", b"2")
        first, second = next(messages), next(messages)
        assert (first.payload, second.payload) == (b"1", b"2")
    with pytest.raises(StopIteration):
        next(messages)


def test_a_publisher_waits_for_a_subscriber_that_asks_for_it() -> None:
    body = b" " * 100_000
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    config = iris.ClientConfig(stall_s=60.0)
    with (
        blocking.connect(embedded=True, keyring=keyring, config=config) as client,
        client.subscribe("t", when_full="wait") as messages,
    ):
        sent = 0
        while client.offer("t", b"%d" % sent + body, when_full="wait"):
            sent += 1
            client.flush()
        publishing = threading.Thread(
            target=lambda: client.publish("t", b"%d" % sent + body, when_full="wait")
        )
        publishing.start()
        numbers = [int(next(messages).payload) for _ in range(sent + 1)]
        publishing.join()
    assert numbers == list(range(sent + 1))


def test_an_iterator_kept_beyond_its_client_ends_quietly() -> None:
    with blocking.connect(
        embedded=True, keyring=iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    ) as it:
        with it.subscribe("t") as messages:
            it.publish("t", b"1")
            assert next(messages).payload == b"1"
        watch = it.watch_members("db")
        next(watch)
    del messages, watch


def test_tunnel(served: blocking.Client) -> None:
    with served.tunnel("db", timeout=5) as tunnel:
        tunnel.send(b"x" * 100_000)
        assert tunnel.recv() == b"x" * 100_000 + b"!"
        tunnel.send("y")
        tunnel.finish()
        assert list(tunnel) == [b"y!"]
        tunnel.close()


def test_members_wait_watch_and_status(served: blocking.Client) -> None:
    assert len(served.members("db")) == 1
    assert len(served.wait_for_members("db", 1, timeout=5)) == 1
    assert len(next(served.watch_members("db"))) == 1
    assert list(served.status()["clusters"]) == ["db"]


def test_reload_keys(served: blocking.Client) -> None:
    served.reload_keys(iris.Keyring.single(iris.ClusterKey(b"l" * 32)))
    assert served.request("db", b"x", timeout=5) == b"X"


def test_any_thread_may_call(served: blocking.Client) -> None:
    replies: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda n=n: replies.extend(
                served.request("db", b"%d" % n, timeout=5) for _ in range(50)
            )
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(replies) == sorted(b"%d" % n for n in range(4) for _ in range(50))


def test_a_handler_that_calls_its_own_client_gets_an_error_instead_of_waiting_for_itself(
    client: blocking.Client,
) -> None:
    service = iris.Service("self")
    service.on_request(lambda payload: client.request("self", payload, timeout=5))
    with client.serve(service), pytest.raises(iris.RemoteError, match="coroutine function"):
        client.request("self", b"", timeout=5)


def test_a_closed_client_says_so() -> None:
    client = blocking.connect(
        embedded=True, keyring=iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    )
    client.close()
    client.close()
    with pytest.raises(iris.Closed):
        client.request("db", b"", timeout=1)


def test_a_client_that_cannot_connect_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(iris.RelayUnavailable):
        blocking.connect(
            "/nonexistent/relay.sock", keyring=iris.Keyring.single(iris.ClusterKey(b"k" * 32))
        )
    assert threading.active_count() == before


def test_the_blocking_client_has_the_verbs_of_the_client() -> None:
    def names(client: object) -> set[str]:
        return {name for name in dir(client) if not name.startswith("_")}

    missing = names(iris.Client) - names(blocking.Client)
    assert missing == {
        "keyring", "offer_broadcast", "on_loss", "open", "open_tunnel", "received_messages", "sent_messages",
    }  # fmt: skip


def test_one_message_at_a_time_within_a_time_that_takes_and_ends_nothing(
    served: blocking.Client,
) -> None:
    with served.subscribe("t.*", group="readers") as messages:
        for number in range(3):
            for _ in range(2):
                with pytest.raises(iris.RequestTimeout) as late:
                    messages.next(timeout=0.001)
                assert str(late.value) == "t.*: nothing arrived within 0.001 s"
            served.publish("t.x", b"%d" % number)
            assert messages.next(timeout=60).payload == b"%d" % number
        served.publish("t.x", b"last")
        assert messages.next().payload == b"last"
        with pytest.raises(iris.ConfigError, match="timeout must be above 0 s"):
            messages.next(timeout=0)
    with pytest.raises(StopIteration):
        messages.next(timeout=60)
    assert served.losses == []


def test_a_thread_waits_for_its_turn_no_longer_than_for_its_message(
    served: blocking.Client,
) -> None:
    got: list[bytes] = []
    with served.subscribe("t") as messages:
        waiting = threading.Thread(target=lambda: got.append(messages.next().payload))
        waiting.start()
        while not messages._turn.locked():
            pass
        with pytest.raises(iris.RequestTimeout):
            messages.next(timeout=0.01)
        served.publish("t", b"one")
        waiting.join(60)
        assert got == [b"one"]


def test_members_and_messages_of_a_tunnel_come_one_at_a_time(served: blocking.Client) -> None:
    members = served.watch_members("db")
    assert len(members.next(timeout=60)) == 1
    with pytest.raises(iris.RequestTimeout, match=r"^db: nothing arrived within"):
        members.next(timeout=0.001)
    with served.serve(iris.Service("other")), served.tunnel("db", timeout=5) as tunnel:
        with pytest.raises(iris.RequestTimeout, match=r"^db: nothing arrived within"):
            tunnel.next(timeout=0.001)
        tunnel.send(b"a")
        assert tunnel.next(timeout=60) == b"a!"
        tunnel.send(b"b")
        assert next(tunnel) == b"b!"
        tunnel.finish()
        with pytest.raises(StopIteration):
            tunnel.next(timeout=60)
