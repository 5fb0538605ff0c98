"""A service publishes to each person under a key of their own, and proves and releases these keys as it goes."""

from __future__ import annotations

import pytest
from integration.kit import named, port_of
from support.waiting import until

import iris
from iris import Keyring
from iris.core import outbound
from iris.crypto.keys import ClusterKey
from iris.testing import LocalCluster
from iris.wire import frames

BASE, PLAIN = ClusterKey(bytes(range(32))), ClusterKey(bytes(range(1, 33)))
SERVICE = Keyring({"default": (PLAIN,), "topic:users.*": (BASE,)})


def person(name: str) -> Keyring:
    return Keyring({f"topic:users.{name}": (BASE.for_topic(f"users.{name}"),)})


async def test_a_person_gets_what_is_theirs_and_nothing_else() -> None:
    got: list[tuple[str, bytes]] = []

    def note(message: iris.Message) -> None:
        got.append((message.name, message.payload))

    async with (
        LocalCluster() as cluster, named(cluster, "service", keyring=SERVICE) as service,
        named(cluster, "alice", keyring=person("alice")) as alice, named(cluster, "all", keyring=SERVICE) as other,
        alice.subscribe("users.alice.>", note), other.subscribe("users.bob", note),
    ):  # fmt: skip
        await service.publish("users.alice.inbox", b"1")
        await service.publish("users.bob", b"2")
        await alice.publish("users.alice.read", b"3")
        await until(lambda: len(got) == 3)
        with pytest.raises(iris.KeyringError, match="no key for topic"):
            await alice.publish("users.bob", b"4")
        with pytest.raises(iris.KeyringError, match="subscribe to one name"):
            async with other.subscribe("users.*", note):
                pass
    assert sorted(got) == [
        ("users.alice.inbox", b"1"),
        ("users.alice.read", b"3"),
        ("users.bob", b"2"),
    ]


async def test_a_session_proves_keys_as_it_publishes_and_releases_those_used_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbound, "MAX_PUBLISHED_KEYS", 16)
    async with (
        LocalCluster() as cluster,
        named(cluster, "service", keyring=SERVICE) as service,
        named(cluster, "watcher", keyring=SERVICE) as watcher,
    ):
        got: list[bytes] = []
        gaps: list[iris.Loss] = []
        async with watcher.subscribe(
            "users.n7", lambda message: got.append(message.payload), on_loss=gaps.append
        ):
            session = port_of(cluster, "service").session
            for turn in range(3):
                for number in range(40):
                    await service.publish(f"users.n{number}", b"%d" % turn)
                # what is in use stays proven, whoever publishes beside it
                await service.publish("users.n7", b"again")
            await until(lambda: len(got) == 6)
            assert got == [b"0", b"again", b"1", b"again", b"2", b"again"]
            assert not gaps
            assert len(session.proven) <= 16
            assert session.proofs == len(session.proven)
            live = [route for route in session.routes if route is not None]
            assert {route.key_id for route in live} <= session.proven


async def test_a_key_in_use_is_not_released_by_the_library_and_the_relay_refuses_it() -> None:
    async with (
        LocalCluster() as cluster, named(cluster, "service", keyring=SERVICE) as service,
        service.subscribe("users.alice", lambda message: None),
    ):  # fmt: skip
        port = port_of(cluster, "service")
        attachment = service._attachment
        assert attachment is not None
        assert attachment.session is not None
        key = BASE.for_topic("users.alice")
        assert key.key_id in port.session.proven
        attachment.session.control(frames.Release(key.key_id))
        attachment.touch()
        await until(lambda: port not in cluster.relay.hub.ports)


async def test_the_aliases_under_a_released_key_end_with_it() -> None:
    async with LocalCluster() as cluster, named(cluster, "service", keyring=SERVICE) as service:
        await service.publish("users.alice", b"1")
        session = port_of(cluster, "service").session
        key_id = BASE.for_topic("users.alice").key_id

        def aliases() -> int:
            return sum(route is not None and route.key_id == key_id for route in session.routes)

        await until(lambda: aliases() == 1)
        attachment = service._attachment
        assert attachment is not None
        assert attachment.session is not None
        attachment.session.control(frames.Release(key_id))
        attachment.touch()
        await until(lambda: key_id not in session.proven)
        assert aliases() == 0
