"""Relays on loopback: they link, stay linked by exactly one connection, and part without a trace."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from adversity import misbehaving
from support.commands import command
from support.links import NETWORK, OTHER, Host, Site, address, hub, link, linked, seen
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually, wait_until

import iris
from iris.crypto.keys import ClusterKey
from iris.wire.kinds import Kind
from relay.daemon import wall_us
from relay.discovery import Sighting
from relay.net.sessions import SessionHub
from relay.stopping import DRAIN_QUIET_POLLS

pytestmark = pytest.mark.timeout(60)


# -- linking -----------------------------------------------------------------------------------------------------


async def test_two_relays_link_when_one_is_given_the_address_of_the_other(site: Site) -> None:
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


async def test_a_relay_that_is_given_one_address_gets_to_know_the_others(site: Site) -> None:
    seed = await site.start()
    first = await site.start(seed)
    await eventually(lambda: linked(seed, first))
    second = await site.start(seed)
    await eventually(lambda: linked(seed, first, second))


async def test_linked_relays_know_by_how_much_their_clocks_differ(site: Site) -> None:
    one = await site.start()
    two = await site.start(one, wall=lambda: wall_us() + 90_000_000)

    def offsets() -> list[int | None]:
        return [relay.router.status()["links"][0]["clock_offset_us"] for relay in (one, two)]  # type: ignore[index]  # JSON

    await eventually(lambda: linked(one, two))
    await eventually(lambda: None not in offsets())
    ahead, behind = offsets()
    assert ahead is not None
    assert behind is not None
    assert 80_000_000 < ahead < 100_000_000
    assert -100_000_000 < behind < -80_000_000
    check = await asyncio.create_subprocess_exec(
        *command("check", "--relay", str(one.config.socket_path)), stdout=asyncio.subprocess.PIPE
    )
    shown, _ = await check.communicate()
    assert check.returncode == 2
    assert b"which is ahead by 90.0 s" in shown


async def test_relays_serve_and_link_over_ipv6(site: Site) -> None:
    one = await site.start(bind=("::1",))
    two = await site.start(one, bind=("::1",))
    await eventually(lambda: linked(one, two))
    assert address(one).startswith("[::1]:")


async def test_a_relay_that_is_given_its_own_address_ignores_it(site: Site) -> None:
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


async def test_a_relay_that_said_goodbye_is_not_dialled_and_its_link_stays(site: Site) -> None:
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
    assert "(BYE)" in gone.reason


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
    for family, where in (
        (socket.AF_UNIX, str(one.config.socket_path)),
        (socket.AF_INET, hub(one).addresses[0]),
    ):
        stranger = socket.socket(family)
        stranger.settimeout(PATIENCE_S)
        stranger.connect(where)
        strangers.append(stranger)
    # Called, not awaited: both are in the middle of it.
    for h in hubs:
        h._acceptor._accept(h._acceptor._listeners[0])
    assert all(h._acceptor.attaching for h in hubs)
    await site.stop(one)
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""
    assert not any(h._acceptor.attaching for h in hubs)
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
    with pytest.raises(iris.ConfigError, match=f"port: .*{hub(first).port}"):
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
        assert "(BYE)" in last["reason"]


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
        misbehaving.vault(one.config.socket_path, two.config.socket_path) as vault,
        misbehaving.wanting(two.config.socket_path),
    ):
        there = one.router.links[two.router.relay_id]
        await eventually(lambda: any(topic == misbehaving.TARGET for topic, _, _ in there.topics))
        assert "flags 0x01" in await misbehaving.say_more(one.config.socket_path, kind)
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
            misbehaving.vault(one.config.socket_path, two.config.socket_path) as vault,
            misbehaving.liar(path) as offence,
        ):
            await vault.ask_a_liar()
            assert "REPLY for echo under key" in await offence
    assert (link(one, two), link(two, one)) == up
    assert one.router.accounts.balance() == two.router.accounts.balance() == 0
