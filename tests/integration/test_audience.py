"""Who hears a topic: known when `subscribe` and `serve` return, at other relays too, and told to publishers who ask."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, echo_service, named
from support.waiting import until
from typer.testing import CliRunner

import iris
from iris import Keyring, cli, keyfiles
from iris.config import ClientConfig
from iris.crypto.keys import ClusterKey, NetworkKey
from iris.errors import ConfigError, RequestTimeout
from iris.logs import event_of
from iris.testing import LocalCluster
from relay.config import RelayConfig
from relay.core import settling
from relay.core.replica import Stage
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)

NETWORK = NetworkKey(bytes(range(32)))
KEYRING = Keyring.single(ClusterKey(bytes(range(1, 33))))


def client(relay: Relay, **settings: Any) -> iris.Client:
    config = ClientConfig(relay=relay.config.socket_path, **settings)
    return iris.connect(keyring=KEYRING, config=config)


@pytest.fixture
async def relays(tmp_path: Path) -> AsyncIterator[tuple[Relay, Relay]]:
    """Two relays with a link."""
    made: list[Relay] = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir(0o700)
        joins = tuple(f"127.0.0.1:{relay.links.port}" for relay in made if relay.links is not None)
        relay = Relay(
            RelayConfig(
                socket_path=directory / "relay.sock", join=joins, port=0, bind=("127.0.0.1",), mdns=False,
                drain_timeout_s=1.0, network_keys=(NETWORK,),
            )
        )  # fmt: skip
        await relay.start()
        made.append(relay)
    await until(lambda: all(relay.router.links for relay in made))
    yield made[0], made[1]
    for relay in made:
        await relay.stop(drain_s=0)


async def test_what_another_relay_publishes_after_subscribe_returned_is_received(
    relays: tuple[Relay, Relay],
) -> None:
    async with client(relays[0]) as publisher, client(relays[1]) as party:
        for number in range(20):
            async with party.subscribe(f"t{number}.>") as messages:
                await publisher.publish(f"t{number}.a", b"first")
                async with asyncio.timeout(10.0):
                    assert (await anext(aiter(messages))).payload == b"first"


async def test_a_callback_too_receives_the_first_message(relays: tuple[Relay, Relay]) -> None:
    got = Collector()
    async with client(relays[0]) as publisher, client(relays[1]) as party:
        subscription = party.subscribe("t", got)
        assert await subscription.ready() is subscription
        await publisher.publish("t", b"first")
        await until(lambda: got.payloads == [b"first"])


async def test_whoever_calls_at_another_relay_after_serve_was_entered_finds_the_member(
    relays: tuple[Relay, Relay],
) -> None:
    async with client(relays[0]) as caller, client(relays[1]) as member:
        for number in range(20):
            async with member.serve(echo_service(f"echo{number}")):
                assert await caller.request(f"echo{number}", b"1", timeout=10.0) == b"1"


async def test_a_relay_that_does_not_answer_is_waited_for_a_second_and_no_longer(
    relays: tuple[Relay, Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "SETTLE_US", 50_000)
    near, far = relays
    async with client(near) as party:
        (link,) = far.router.links.values()
        link.replica.stage = Stage.RESYNC  # it would answer when the snapshot has come
        async with asyncio.timeout(10.0):
            async with party.subscribe("t"):
                pass
        link.replica.stage = Stage.LIVE


async def test_a_publisher_learns_how_many_subscribe(relays: tuple[Relay, Relay]) -> None:
    async with client(relays[0]) as publisher, client(relays[1]) as far:
        assert await publisher.publish("t.a", b"") is None
        assert await publisher.publish("t.a", b"", count=True) == 0
        async with far.subscribe("t.>"), far.subscribe("t.a"), publisher.subscribe("*.a"):
            assert await publisher.publish("t.a", b"", count=True) == 3
            assert await publisher.publish("t.b", b"", count=True) == 1
            assert (await publisher.audience("t.a")).subscribers == 3
            async with client(relays[1]) as another, another.subscribe("t.>"):
                await until_count(publisher, "t.a", 4)
            await until_count(publisher, "t.a", 3)
        await until_count(publisher, "t.a", 0)


async def until_count(publisher: iris.Client, topic: str, count: int) -> None:
    """Return when a publisher is told of so many: those who leave are not waited for by anybody."""
    async with asyncio.timeout(10.0):
        while (await publisher.audience(topic)).subscribers != count:  # noqa: ASYNC110 - a relay tells it to whoever asks
            await asyncio.sleep(0.005)


async def test_a_publisher_waits_for_subscribers(relays: tuple[Relay, Relay]) -> None:
    async with client(relays[0]) as publisher, client(relays[1]) as far:
        with pytest.raises(RequestTimeout, match="0 of 2 subscribers"):
            await publisher.wait_for_subscribers("t", 2, timeout=0.05)
        waiting = asyncio.create_task(publisher.wait_for_subscribers("t", 2, timeout=20.0))
        async with far.subscribe("t"):
            assert await publisher.wait_for_subscribers("t", 1, timeout=20.0) == 1
            assert not waiting.done()
            async with publisher.subscribe("t"):
                assert await waiting == 2


async def test_a_publisher_learns_who_was_too_slow_for_it(relays: tuple[Relay, Relay]) -> None:
    near, far = relays
    async with client(near) as publisher, client(far, label="reports") as slow:
        async with slow.subscribe("t.>", Collector()):
            (port,) = far.hub.ports
            port._limit_bytes = 100_000
            transport: Any = port._transport
            transport.pause_writing = None  # nothing of it is read: the process is stopped
            port.pause_writing()
            for _ in range(200):
                await publisher.publish("t.a", bytes(10_000))
                await publisher.flush()
            await until(lambda: far.router.accounts.dropped["slow receiver"])
            audience = await publisher.audience("t.a")
            assert audience.dropped == far.router.accounts.dropped["slow receiver"]
            (who,) = audience.slow
            assert (who.label, who.pid, who.link) == ("reports", os.getpid(), False)
            assert who.dropped == audience.dropped
            assert 0 <= who.last_s <= who.since_s < 60
            assert (await publisher.audience("t.b")).slow == []
            port.resume_writing()


async def test_the_command_says_that_nobody_subscribes(
    relays: tuple[Relay, Relay], tmp_path: Path
) -> None:
    keyfiles.save_keyring(tmp_path / "keyring.toml", KEYRING)
    args = ["publish", "t", "hello", "--json", "--relay", str(relays[0].config.socket_path)]
    env = {"IRIS_CONFIG": str(tmp_path)}
    alone = await asyncio.to_thread(CliRunner().invoke, cli.app, args, env=env)
    assert (alone.exit_code, "nobody subscribes to t" in alone.stderr) == (0, True)
    assert json.loads(alone.stdout) == {"sent": 1, "lost": 0, "subscribers": 0}
    async with client(relays[1]) as far, far.subscribe("t"):
        received = await asyncio.to_thread(CliRunner().invoke, cli.app, args, env=env)
        assert (received.exit_code, received.stderr) == (0, "")
        assert json.loads(received.stdout)["subscribers"] == 1


OTHER = ClusterKey(bytes(range(2, 34)))
OURS, THEIRS = (
    key.key_id[:4].hex() for key in (ClusterKey(bytes(range(1, 33))), OTHER)
)  # fmt: skip


def stranger(relay: Relay) -> iris.Client:
    """Return a client that holds another key."""
    return iris.connect(
        keyring=Keyring.single(OTHER), config=ClientConfig(relay=relay.config.socket_path)
    )


async def test_a_publisher_learns_that_only_holders_of_another_key_subscribe(
    relays: tuple[Relay, Relay], caplog: pytest.LogCaptureFixture
) -> None:
    losses: list[iris.Loss] = []
    async with client(relays[0]) as publisher, stranger(relays[1]) as far, far.subscribe("t.*"):
        publisher.on_loss = losses.append
        assert await publisher.publish("t.a", b"", count=True) == 0
        assert await publisher.publish("t.a", b"", count=True) == 0
        (record,) = [each for each in caplog.records if event_of(each) == "client.other_keys"]
        assert (
            f"Nobody subscribes to t.a under the key {OURS}, but under other keys ({THEIRS}: 1)"
            in record.getMessage()
        )
        audience = await publisher.audience("t.a")
        assert (audience.subscribers, audience.key, audience.others) == (0, OURS, {THEIRS: 1})
        with pytest.raises(
            RequestTimeout, match=f"0 of 1 subscriber .*; 1 under {THEIRS}; compare"
        ):
            await publisher.wait_for_subscribers("t.a", 1, timeout=0.5)
        async with publisher.subscribe("t.a"):
            assert await publisher.publish("t.a", b"", count=True) == 1
        assert not losses


async def test_the_commands_publish_and_status_name_subscribers_under_other_keys(
    relays: tuple[Relay, Relay], tmp_path: Path
) -> None:
    keyfiles.save_keyring(tmp_path / "keyring.toml", KEYRING)
    socket = ["--relay", str(relays[0].config.socket_path)]
    env = {"IRIS_CONFIG": str(tmp_path), "COLUMNS": "200"}

    async def command(*args: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, cli.app, [*args, *socket], env=env)

    async with client(relays[0]) as publisher, stranger(relays[1]) as far, far.subscribe("t"):
        published = await command("publish", "t", "hello", "--json")
        assert (published.exit_code, published.stderr) == (
            0, f"iris: nobody subscribes to t under your key {OURS}; 1 under {THEIRS}; compare `iris key show`\n",
        )  # fmt: skip
        await publisher.publish("t", b"", count=True)
        line = f"topic t: no subscribers under the key {OURS} of its publisher; 1 under {THEIRS}; compare `iris key show`"
        assert line in (await command("status")).stdout
        (shown,) = json.loads((await command("status", "--json")).stdout)["other_keys"]
        assert shown == {"topic": "t", "key": OURS, "others": {THEIRS: 1}}
    assert "no subscribers under the key" not in (await command("status")).stdout


async def test_the_command_says_that_no_member_serves_broadcasts(
    relays: tuple[Relay, Relay], tmp_path: Path
) -> None:
    keyfiles.save_keyring(tmp_path / "keyring.toml", KEYRING)
    args = ["broadcast", "caches", "hello", "--json", "--relay", str(relays[0].config.socket_path)]
    env = {"IRIS_CONFIG": str(tmp_path)}
    mute = iris.Service("caches")
    mute.on_request(lambda payload: payload)
    async with client(relays[1]) as far, far.serve(mute):
        alone = await asyncio.to_thread(CliRunner().invoke, cli.app, args, env=env)
        assert (alone.exit_code, alone.stderr) == (
            3, "iris: no member of caches serves broadcasts\n",
        )  # fmt: skip
        assert json.loads(alone.stdout) == {"sent": 1, "lost": 1, "members": 0}
        hears = iris.Service("caches")
        hears.on_broadcast(lambda payload: None)
        async with far.serve(hears):
            received = await asyncio.to_thread(CliRunner().invoke, cli.app, args, env=env)
            assert (received.exit_code, received.stderr) == (0, "")
            assert json.loads(received.stdout)["members"] == 1


async def test_coroutine_handlers_run_at_once_and_each_publisher_and_topic_in_order() -> None:
    running: dict[tuple[bytes, str], int] = {}
    most = [0]
    seen: dict[tuple[bytes, str], list[int]] = {}

    async def handle(message: iris.Message) -> None:
        lane = message.source, message.name
        assert not running.get(lane), "two of one publisher and topic at once"
        running[lane] = 1
        most[0] = max(most[0], sum(running.values()))
        await asyncio.sleep(0)
        seen.setdefault(lane, []).append(int(message.payload))
        running[lane] = 0

    async with LocalCluster() as cluster:
        async with cluster.client() as one, cluster.client() as two, cluster.client() as party:
            async with party.subscribe("t.*", handle, concurrency=3):
                for number in range(50):
                    for publisher in (one, two):
                        for topic in ("t.a", "t.b"):
                            await publisher.publish(topic, b"%d" % number)
                    await asyncio.sleep(0)
                await until(lambda: sum(map(len, seen.values())) == 200)
    assert len(seen) == 4
    assert all(numbers == list(range(50)) for numbers in seen.values())
    assert most[0] == 3


async def test_one_message_that_takes_long_holds_up_its_own_publisher_and_topic_alone() -> None:
    go_on = asyncio.Event()
    seen: list[bytes] = []

    async def handle(message: iris.Message) -> None:
        if message.payload == b"slow":
            await go_on.wait()
        seen.append(message.payload)

    service = iris.Service("s")
    service.on_publish("t.*", concurrency=2)(handle)
    async with LocalCluster() as cluster, cluster.client() as one, cluster.client() as party:
        async with party.serve(service):
            await one.publish("t.a", b"slow")
            await one.flush()
            await one.publish("t.a", b"behind")
            await one.publish("t.b", b"beside")
            await until(lambda: seen == [b"beside"])
            go_on.set()
            await until(lambda: seen == [b"beside", b"slow", b"behind"])


async def test_a_full_queue_of_lanes_drops_what_it_was_told_to_and_reports_it() -> None:
    go_on = asyncio.Event()
    seen: list[bytes] = []

    async def handle(message: iris.Message) -> None:
        await go_on.wait()
        seen.append(message.payload[:1])

    for when_full, kept in (("drop-new", [b"0", b"1"]), ("drop-old", [b"0", b"4"])):
        seen.clear()
        go_on.clear()
        async with LocalCluster() as cluster, cluster.client() as one, named(cluster, "s") as party:
            subscription = party.subscribe(
                "t", handle, when_full=when_full, limit_bytes=3000, concurrency=2  # type: ignore[arg-type]
            )  # fmt: skip
            await subscription.ready()
            for number in range(5):
                await one.publish("t", b"%d" % number + bytes(1000))
                await one.flush()
            await cluster.settle()
            go_on.set()
            await until(lambda own=subscription: len(seen) + own.lost_messages == 5)  # type: ignore[misc]
            assert seen[0] == kept[0]
            assert seen[-1] == kept[-1]
            await subscription.close()


async def test_a_subscription_that_ends_reports_what_its_lanes_held() -> None:
    begun = asyncio.Event()

    async def handle(message: iris.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with LocalCluster() as cluster, cluster.client() as one:
        async with named(cluster, "s", drain_timeout_s=0.05) as party:
            subscription = await party.subscribe("t.*", handle, concurrency=2).ready()
            for number in range(6):
                await one.publish(f"t.{number % 3}", b"%d" % number)
                await one.flush()
            await begun.wait()
            await cluster.settle()
        # Two were at the handler, the others never were.
        assert subscription.lost_messages == 4


@pytest.mark.parametrize("concurrency", [0, 65_537])
async def test_a_concurrency_that_cannot_be_is_refused(concurrency: int) -> None:
    async def handle(message: iris.Message) -> None:
        """Not called."""

    async with LocalCluster() as cluster, cluster.client() as party:
        with pytest.raises(ConfigError, match="concurrency"):
            party.subscribe("t", handle, concurrency=concurrency)
        with pytest.raises(ConfigError, match="coroutine"):
            party.subscribe("t", Collector(), concurrency=2)
