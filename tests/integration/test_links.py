"""Relays on loopback: they link, stay linked by exactly one connection, and part without a trace."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from adversity import foul
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually, wait_until

import iris
from iris import keyfiles
from iris.crypto.keyring import dump_network_keys
from iris.crypto.keys import ClusterKey, NetworkKey
from iris.wire.frames import Kind
from relay.config import RelayConfig
from relay.daemon import Relay
from relay.discovery import Sighting
from relay.net.addresses import show
from relay.net.linkport import PORTION_BYTES, LinkPort
from relay.net.links import LinkHub
from relay.net.sessions import SessionHub
from relay.stopping import DRAIN_QUIET_POLLS

pytestmark = pytest.mark.timeout(60)

NETWORK = NetworkKey(bytes(range(32)))
OTHER = NetworkKey(bytes(range(1, 33)))


class Site:
    """Relays of one test, each with a socket directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.relays: list[Relay] = []
        self.started = 0

    async def start(
        self, *join: Relay | str, keys: tuple[NetworkKey, ...] = (NETWORK,), **settings: Any
    ) -> Relay:
        """Start a relay that links on 127.0.0.1 and knows the relays in `join`."""
        directory = self.directory / str(self.started)
        self.started += 1
        directory.mkdir(0o700)
        given = {
            "port": 0, "bind": ("127.0.0.1",), "mdns": False, "drain_timeout_s": 1.0, "network_keys": keys, **settings,
        }  # fmt: skip
        joins = tuple(j if isinstance(j, str) else address(j) for j in join)
        relay = Relay(RelayConfig(socket_path=directory / "relay.sock", join=joins, **given))
        await relay.start()
        self.relays.append(relay)
        return relay

    async def stop(self, relay: Relay, *, drain_s: float = 0) -> None:
        self.relays.remove(relay)
        await relay.stop(drain_s=drain_s)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    for relay in site.relays:
        await relay.stop(drain_s=0)


def hub(relay: Relay) -> LinkHub:
    assert relay.links is not None
    return relay.links


def address(relay: Relay) -> str:
    return show(*hub(relay).addresses[0])


def seen(relay: Relay, source: str = "test", *, named: bool = False) -> Sighting:
    relay_id = relay.router.relay_id if named else None
    return Sighting(tuple(hub(relay).addresses), relay_id, hub(relay).fingerprints, source)


def link(one: Relay, other: Relay) -> LinkPort | None:
    """Return the connection of `one` to `other`, if there is a link."""
    found = one.router.links.get(other.router.relay_id)
    assert found is None or isinstance(found.port, LinkPort)
    return None if found is None else found.port


def ends(port: LinkPort) -> tuple[Any, Any]:
    transport = port._transport
    return transport.get_extra_info("sockname"), transport.get_extra_info("peername")


def linked(*relays: Relay) -> bool:
    """Whether each has one link to each other, both ends of one connection, and no connection besides."""
    for one in relays:
        if len(hub(one).ports) != len(relays) - 1:
            return False
        for other in relays:
            if one is not other:
                ours, theirs = link(one, other), link(other, one)
                if ours is None or theirs is None or ends(ours) != ends(theirs)[::-1]:
                    return False
    return True


# -- linking -----------------------------------------------------------------------------------------------------


async def test_two_relays_link_when_one_is_told_of_the_other(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    ours, theirs = link(one, two), link(two, one)
    assert ours is not None
    assert theirs is not None
    assert (ours.dialled, theirs.dialled) == (False, True)
    (status,) = two.router.status()["links"]  # type: ignore[misc]  # JSON
    assert status["peer"] == one.router.relay_id.hex()
    assert status["address"] == address(one)
    assert status["dialled"]
    assert status["in_frames"] > 0
    assert two.router.status()["links_refused"] == {}


async def test_a_relay_that_is_told_of_one_gets_to_know_the_others(site: Site) -> None:
    seed = await site.start()
    first = await site.start(seed)
    await eventually(lambda: linked(seed, first))
    second = await site.start(seed)
    await eventually(lambda: linked(seed, first, second))


async def test_relays_serve_and_link_over_ipv6(site: Site) -> None:
    one = await site.start(bind=("::1",))
    two = await site.start(one, bind=("::1",))
    await eventually(lambda: linked(one, two))
    assert address(one).startswith("[::1]:")


async def test_a_relay_that_is_told_of_itself_does_not_mind(site: Site) -> None:
    one = await site.start()
    hub(one).sighted(seen(one))
    await eventually(lambda: "ourselves" in str(hub(one).status()["dialling"]))
    await eventually(lambda: not hub(one).ports)
    assert hub(one).refusals == {}
    two = await site.start(one)
    await eventually(lambda: linked(one, two))


async def test_relays_that_dial_each_other_at_once_end_with_one_link(site: Site) -> None:
    for _ in range(10):
        one, two = await site.start(), await site.start()
        hub(one).sighted(seen(two))
        hub(two).sighted(seen(one))
        await eventually(lambda one=one, two=two: linked(one, two))  # type: ignore[misc]
        await site.stop(one)
        await site.stop(two)


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_sees_whom_in_whatever_order_there_is_one_link_per_pair(
    seed: int, site: Site
) -> None:
    rng = random.Random(seed)
    relays = [await site.start() for _ in range(4)]
    pairs = [(one, other) for one in relays for other in relays if one is not other]
    known = rng.sample(pairs, rng.randint(6, len(pairs))) + rng.sample(pairs, 4)
    for number, (one, other) in enumerate(known):
        hub(one).sighted(seen(other, f"source {number}", named=rng.random() < 0.3))
        for _ in range(rng.choice((0, 0, 1, 20))):
            await asyncio.sleep(0)
    await eventually(lambda: linked(*relays))


async def test_a_name_that_is_seen_in_several_places_is_dialled_as_one(site: Site) -> None:
    one, two = await site.start(), await site.start()
    dead = ("127.0.0.1", 1)
    several = Sighting((dead, *hub(two).addresses), two.router.relay_id, (), "test")
    hub(one).sighted(several)
    await eventually(lambda: linked(one, two))


# -- losing and finding again --------------------------------------------------------------------------------------


async def test_a_relay_that_comes_back_at_its_address_is_linked_again(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    port = hub(one).port
    await site.stop(one)
    await eventually(lambda: not two.router.links)
    again = await site.start(port=port)
    assert again.router.relay_id != one.router.relay_id
    await eventually(lambda: linked(again, two))


async def test_a_link_that_breaks_is_dialled_again(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    for _ in range(3):
        await eventually(lambda: linked(one, two))
        broken = link(two, one)
        assert broken is not None
        broken.abort("cut by the test")
        await eventually(lambda broken=broken: broken not in hub(two).ports)  # type: ignore[misc]


async def test_what_is_gone_is_not_dialled_and_its_link_stays(site: Site) -> None:
    one, two = await site.start(), await site.start()
    hub(one).sighted(seen(two, named=True))
    await eventually(lambda: linked(one, two))
    sight = seen(two, named=True)
    gone = Sighting(sight.addresses, sight.relay_id, sight.networks, sight.source, gone=True)
    hub(one).sighted(gone)
    assert linked(one, two)
    before = hub(one).status()["dialling"]["dials"]  # type: ignore[index]  # JSON
    broken = link(one, two)
    assert broken is not None
    broken.abort("cut by the test")
    await eventually(lambda: not hub(one).ports and not hub(two).ports)
    assert hub(one).status()["dialling"] == {
        "targets": 0, "dials": before, "evicted": 0, "ignored": 0, "held_back": 0, "unlinked": [],
    }  # fmt: skip


# -- networks ------------------------------------------------------------------------------------------------------


async def test_relays_of_two_networks_do_not_link_and_say_why(site: Site) -> None:
    one = await site.start()
    two = await site.start(one, keys=(OTHER,))
    await eventually(lambda: hub(one).refusals.get("wrong network"))
    await eventually(lambda: hub(two).refusals.get("wrong network"))
    assert not one.router.links
    assert not two.router.links


async def test_relays_of_one_network_that_name_their_site_differently_say_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    one = await site.start(site="eu")
    unnamed = await site.start(one)
    await eventually(lambda: unnamed.router.site == "eu")
    assert "links.two_site_names" not in caplog.text
    await site.start(one, site="us")
    await eventually(lambda: "links.two_site_names" in caplog.text)
    said = [r.fields for r in caplog.records if r.message == "links.two_site_names"]
    assert {said[0]["its_site"], said[0]["ours"]} == {"us", "eu"}


async def test_a_relay_of_an_old_and_a_new_network_links_with_both(site: Site) -> None:
    old, new = await site.start(keys=(OTHER,)), await site.start(keys=(NETWORK,))
    both = await site.start(old, new, keys=(OTHER, NETWORK))
    await eventually(lambda: len(both.router.links) == 2)
    into = await site.start(both, keys=(NETWORK,))
    await eventually(lambda: link(into, both))


async def test_a_network_key_is_replaced_while_the_relays_stay_linked(site: Site) -> None:
    one = await site.start(keys=(OTHER,))
    two = await site.start(one, keys=(OTHER,))
    await eventually(lambda: linked(one, two))
    under_old = link(two, one)
    for relay in (one, two):
        relay.reload_keys((OTHER, NETWORK))
    assert linked(one, two)
    one.reload_keys((NETWORK,))
    await eventually(lambda: linked(one, two) and link(two, one) is not under_old)
    renewed = link(two, one)
    assert renewed is not None
    assert renewed.fingerprint == NETWORK.fingerprint
    two.reload_keys((NETWORK,))
    assert link(two, one) is renewed
    assert linked(one, two)


# -- messages ------------------------------------------------------------------------------------------------------


def echo() -> iris.Service:
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    return service


async def test_requests_of_any_size_cross_a_link_and_come_back(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    async with (
        client(one.config.socket_path) as member,
        client(two.config.socket_path) as caller,
        member.serve(echo()),
    ):
        payloads = [os.urandom(size) for size in (0, 100, 70_000, 300_000, 1 << 20)] * 3
        answers = await asyncio.gather(
            *(caller.request("echo", payload, timeout=PATIENCE_S) for payload in payloads)
        )
        assert answers == payloads
        for relay in (one, two):
            assert relay.router.held_messages == 0
            assert relay.router.accounts.balance() == 0


async def test_what_is_published_across_a_link_keeps_its_order_whatever_its_size(
    site: Site,
) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    rng = random.Random(5)
    got: list[tuple[int, int]] = []

    def hear(message: iris.Message) -> None:
        got.append((int.from_bytes(message.payload[:4], "big"), len(message.payload)))

    async with (
        client(one.config.socket_path) as there,
        client(two.config.socket_path) as here,
        there.subscribe("news.>", hear),
    ):
        await eventually(lambda: two.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON
        sent = []
        for number in range(300):
            payload = number.to_bytes(4, "big") + bytes(rng.choice((0, 1000, 90_000, 400_000)))
            sent.append((number, len(payload)))
            await here.publish("news.a", payload)
        await eventually(lambda: len(got) == len(sent))
        assert got == sent
        assert not there.losses


async def test_the_first_words_on_very_many_topics_arrive_in_their_order(site: Site) -> None:
    """Each topic is made known before its message: the other relay hears such a burst in portions, and loses nothing."""
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    numbers: list[int] = []
    waits: list[LinkPort] = []
    port = link(two, one)
    assert port is not None
    wait = port._wait

    def counted() -> None:
        waits.append(port)
        wait()

    port._wait = counted  # type: ignore[method-assign]

    async def hear(message: iris.Message) -> None:
        numbers.append(int(message.payload))

    async with (
        client(two.config.socket_path) as there,
        client(one.config.socket_path) as here,
        there.subscribe("news.>", hear),
    ):
        await eventually(lambda: one.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON
        for number in range(1000):
            await here.publish(f"news.{number}", str(number).encode())
        await eventually(lambda: len(numbers) == 1000)
        assert numbers == list(range(1000))
        assert waits
        assert port._waiting is None
        assert port._portion_bytes == PORTION_BYTES
    for relay in (one, two):
        assert relay.router.accounts.balance() == 0


@pytest.mark.parametrize("side", [0, 1], ids=["heard", "hears"])
async def test_a_link_that_is_cut_while_a_burst_is_heard_comes_back(site: Site, side: int) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    numbers: set[int] = set()
    hearing = link(two, one)
    assert hearing is not None

    async def hear(message: iris.Message) -> None:
        numbers.add(int(message.payload))

    async with (
        client(two.config.socket_path) as there,
        client(one.config.socket_path) as here,
        there.subscribe("news.>", hear),
    ):
        await eventually(lambda: one.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON

        async def publish() -> None:
            for number in range(1000):
                await here.publish(f"news.{number}", str(number).encode())

        publishing = asyncio.create_task(publish())
        async with asyncio.timeout(PATIENCE_S):
            while not hearing._later:  # noqa: ASYNC110 - it lasts for milliseconds
                await asyncio.sleep(0)
        cut = link(*((one, two), (two, one))[side])
        assert cut is not None
        cut.abort("cut by the test")
        await publishing
        await eventually(lambda: hearing not in hub(two).ports and linked(one, two))
        assert not hearing._later
        assert hearing._waiting is None

        async def again() -> bool:
            await here.publish("news.0", b"1000")
            await asyncio.sleep(0.01)
            return 1000 in numbers

        async with asyncio.timeout(PATIENCE_S):
            while not await again():
                pass
    for relay in (one, two):
        assert relay.router.accounts.balance() == 0


async def test_a_message_that_the_other_relay_would_not_take_does_not_end_the_link(
    site: Site,
) -> None:
    small = await site.start(message_limit_bytes=64 << 10)
    large = await site.start(small)
    await eventually(lambda: linked(small, large))
    before = link(large, small)
    async with (
        client(small.config.socket_path) as member,
        client(large.config.socket_path) as caller,
        member.serve(echo()),
    ):
        assert await caller.request("echo", bytes(60_000), timeout=PATIENCE_S) == bytes(60_000)
        for size in (71_000, 500_000):
            with pytest.raises(iris.RequestError):
                await caller.request("echo", bytes(size), timeout=PATIENCE_S)
        assert await caller.request("echo", b"still", timeout=PATIENCE_S) == b"still"
    assert link(large, small) is before


# -- the end -------------------------------------------------------------------------------------------------------


async def test_a_relay_that_stops_leaves_no_task_and_no_socket(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    site = Site(tmp_path)
    one = await site.start()
    two = await site.start(one, "127.0.0.1:1", "nobody.invalid:7430")
    await eventually(lambda: link(one, two) and link(two, one))
    for relay in (two, one):
        await relay.stop(drain_s=0)
        await relay.stop(drain_s=0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not one.links.ports  # type: ignore[union-attr]
    await eventually(lambda: len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1)


async def test_a_relay_that_stops_says_goodbye_so_nobody_waits_for_it(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    gone = link(one, two)
    assert gone is not None
    await site.stop(two, drain_s=1)
    await eventually(lambda: not one.router.links)
    assert gone.reason == "the other relay said goodbye"


async def test_a_relay_that_stops_waits_for_answers_from_other_hosts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    begun, answer = asyncio.Event(), asyncio.Event()
    service = iris.Service("slow")

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        begun.set()
        await answer.wait()
        return payload + b", late"

    looks: list[bool] = []
    idle: Callable[[SessionHub], bool] = vars(SessionHub)["idle"].fget

    def looked(hub: SessionHub) -> bool:
        looks.append(idle(hub))
        return looks[-1]

    async with (
        client(two.config.socket_path) as member,
        client(one.config.socket_path) as caller,
        member.serve(service),
    ):
        await eventually(lambda: one.router.mesh.copies[two.router.relay_id].members)
        asked = asyncio.create_task(caller.request("slow", b"yes", timeout=PATIENCE_S))
        await eventually(begun.is_set)
        monkeypatch.setattr(SessionHub, "idle", property(looked))
        stopping = asyncio.create_task(site.stop(one, drain_s=5))
        await eventually(lambda: len(looks) > 2 * DRAIN_QUIET_POLLS)
        assert not stopping.done()
        assert not any(looks)
        answer.set()
        assert await asked == b"yes, late"
        await stopping
    assert one.router.accounts.balance() == 0


async def test_connections_that_are_accepted_while_a_relay_stops_are_closed(
    site: Site,
) -> None:
    one = await site.start()
    hubs = (one.hub, hub(one))
    strangers = []
    for family, place in (
        (socket.AF_UNIX, str(one.config.socket_path)),
        (socket.AF_INET, hub(one).addresses[0]),
    ):
        stranger = socket.socket(family)
        stranger.settimeout(PATIENCE_S)
        stranger.connect(place)
        strangers.append(stranger)
    # Called, not awaited: both are in the middle of it.
    for h in hubs:
        h._acceptor._accept(h._acceptor._listeners[0])
    assert all(h._accepting for h in hubs)
    await site.stop(one)
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""
    assert not any(h._accepting for h in hubs)
    assert one.hub.attaching == 0


async def test_the_usual_port_is_left_to_who_has_it_and_a_chosen_one_is_insisted_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await site.start()
    monkeypatch.setattr("relay.net.addresses.DEFAULT_PORT", hub(first).port)
    monkeypatch.setattr("relay.daemon.DEFAULT_PORT", hub(first).port)
    second = await site.start(port=None)
    assert hub(second).port not in (0, hub(first).port)
    (said,) = (r for r in caplog.records if r.message == "links.another_port")
    assert said.fields == {"port": hub(second).port, "taken": hub(first).port}  # type: ignore[attr-defined]
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(iris.ConfigError, match=f"port: no links at {hub(first).port}"):
        await site.start(port=hub(first).port)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_relay_that_finds_nobody_says_what_it_tried_and_what_to_type(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relay.daemon.NOTHING_FOUND_S", 0.05)
    alone = await site.start("127.0.0.1:1")
    await eventually(lambda: "discovery.nothing_found" in caplog.text)
    found = alone.router.status()["discovery"]["nothing_found"]  # type: ignore[index]  # JSON
    assert found == {"tried": ["join 127.0.0.1:1"], "try": "iris relay --join HOST:PORT"}


# -- the process ---------------------------------------------------------------------------------------------------


class Host:
    """A relay as a process that holds a network key, with links on 127.0.0.1."""

    def __init__(
        self, directory: Path, *arguments: str, keys: tuple[NetworkKey, ...] = (NETWORK,)
    ) -> None:
        directory.mkdir(0o700)
        self.keys = directory / "keys" / keyfiles.NETWORK_FILE
        self.keys.parent.mkdir(0o700)
        self.hold(*keys)
        here = ("--bind", "127.0.0.1", "--no-mdns", *arguments)
        settings = {"IRIS_CONFIG": str(self.keys.parent)}
        self.daemon = Daemon(directory, *here, settings=settings, dev=False)

    def hold(self, *keys: NetworkKey) -> None:
        """Write the file of network keys."""
        self.keys.write_text(dump_network_keys(keys))
        self.keys.chmod(0o600)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.daemon.lines() if line["event"] == name]

    @property
    def address(self) -> str:
        return str(self.events("links.listening")[-1]["addresses"][0])


def test_relays_as_processes_link_rotate_their_key_by_a_signal_and_stop(tmp_path: Path) -> None:
    one = Host(tmp_path / "one", "--port", "0", keys=(OTHER,))
    with one.daemon:
        two = Host(tmp_path / "two", "--port", "0", "--join", one.address, keys=(OTHER,))
        with two.daemon:
            wait_until(lambda: one.events("link.up") and two.events("link.up"))
            for host in (one, two):
                host.hold(OTHER, NETWORK)
                host.daemon.process.send_signal(signal.SIGHUP)
                wait_until(lambda host=host: host.events("links.keys"))  # type: ignore[misc]
            assert not one.events("link.down")
            one.hold(NETWORK)
            one.daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(two.events("link.up")) == 2)
            (down,) = one.events("link.down")
            assert down["reason"] == "its network key was removed"
            two.keys.write_text("no key")
            two.daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: two.events("links.keys_unreadable"))
            for host in (two, one):
                assert host.daemon.stop() == 0
                assert host.events("relay.stopped")
                assert "Traceback" not in host.daemon.log.read_text()
        last = one.events("link.down")[-1]
        assert last["reason"] == "the other relay said goodbye"


def test_a_running_relay_joins_what_its_changed_settings_name(tmp_path: Path) -> None:
    one = Host(tmp_path / "one", "--port", "0")
    settings = tmp_path / "relay.toml"
    settings.write_text("")
    with one.daemon:
        two = Host(tmp_path / "two", "--port", "0", "--config", str(settings))
        with two.daemon:
            settings.write_text(f'join = ["{one.address}"]')
            two.daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: one.events("link.up") and two.events("link.up"))
            settings.write_text("")
            two.daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(two.events("relay.settings_read")) == 2)
            assert not two.events("link.down")
            assert [host.daemon.stop() for host in (two, one)] == [0, 0]


def test_a_relay_whose_names_do_not_resolve_serves_at_once(tmp_path: Path) -> None:
    """The name server is asked elsewhere: what waits for it is not the socket."""
    host = Host(tmp_path / "one", "--port", "0", "--join", "nobody.invalid:7430")
    with host.daemon:

        async def use() -> None:
            keyring = iris.Keyring.single(ClusterKey(bytes(32)))
            async with iris.connect(host.daemon.socket, keyring=keyring) as one:
                status = await one.status()
                assert status["links"] == []
                assert status["discovery"]["join"]["joins"][0]["join"] == "nobody.invalid:7430"

        asyncio.run(use())
        assert host.daemon.stop() == 0


def test_a_development_relay_has_no_links(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert not daemon.said("links.listening")

        async def use() -> None:
            async with client(daemon.socket) as one:
                assert "links_listening" not in await one.status()

        asyncio.run(use())


# -- what sessions of one relay do to the others' ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.PUBLISH, Kind.REQUEST, Kind.TUNNEL_DATA])
async def test_a_session_cannot_cut_a_link_with_flags(kind: int, site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    up = link(one, two), link(two, one)
    async with (
        foul.vault(one.config.socket_path, two.config.socket_path) as vault,
        foul.wanting(two.config.socket_path),
    ):
        there = one.router.links[two.router.relay_id]
        await eventually(lambda: any(topic == foul.PLACE for topic, _, _ in there.topics))
        assert "flags 0x01" in await foul.say_more(one.config.socket_path, kind)
        await vault.check()
        assert (link(one, two), link(two, one)) == up
    assert hub(one).protocol_errors == hub(two).protocol_errors == 0
    assert one.router.accounts.balance() == two.router.accounts.balance() == 0


async def test_an_answer_under_another_key_ends_the_answerer_at_its_own_relay(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    up = link(one, two), link(two, one)
    for path in (one.config.socket_path, two.config.socket_path):
        async with (
            foul.vault(one.config.socket_path, two.config.socket_path) as vault,
            foul.liar(path) as told,
        ):
            await vault.ask_a_liar()
            assert "REPLY of echo under key" in await told
    assert (link(one, two), link(two, one)) == up
    assert one.router.accounts.balance() == two.router.accounts.balance() == 0
