"""Gateways on loopback: sites find each other under the keys that they pinned, and nobody else gets anywhere."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
from adversity import misbehaving
from adversity.kit import Wire
from support.gateways import (
    RELAY,
    Impostor,
    Stranger,
    World,
    address,
    free_address,
    gateways,
    hub,
    joined,
    name_of,
    port,
    refused,
)
from support.links import hub as links
from support.relays import KEY
from support.waiting import PATIENCE_S, eventually

import iris
from iris import keyfiles
from iris.crypto.certificates import gateway_leaf, network_authority, relay_leaf, site_authority
from iris.crypto.keys import ClusterKey
from iris.errors import ConfigError, KeyringError
from iris.remote import mutual_context
from iris.wire import frames, link_frames
from iris.wire.frames import Serving
from iris.wire.kinds import Kind
from relay.net.addresses import show
from relay.net.gateways import NOT_PINNED, OTHER_NAME
from relay.net.tls import LINK_ALPN, WAN_ALPN

pytestmark = pytest.mark.timeout(60)

MISNAMED = "foreign certificate under the key pinned as us"


# -- meeting -----------------------------------------------------------------------------------------------------


async def test_a_gateway_that_is_dialled_and_one_that_dials_meet(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu), site_cost=("eu=10",))
    await eventually(lambda: joined((eu, us)))
    assert [wan.site for wan in eu.router.wans.values()] == ["us"]
    (connection,) = gateways(us)["connections"]
    assert connection["site"] == "eu"
    assert connection["peer"] == eu.router.relay_id.hex()
    assert address(eu) == f"tls://{connection['address']}"
    assert connection["dialled"]
    assert connection["pin"] == world.key("eu").fingerprint
    for name in ("in_frames", "out_frames", "in_bytes", "out_bytes"):
        assert connection[name] > 0
    (peer,) = gateways(us)["peers"]
    assert (peer["site"], peer["cost_ms"], peer["linked"]) == ("eu", 10, 1)
    (there,) = peer["addresses"]
    assert (there["linked"], there["error"]) == (True, "")
    (peer,) = gateways(eu)["peers"]
    assert (peer["linked"], peer["addresses"]) == (1, [])
    assert gateways(eu)["refused"] == gateways(us)["refused"] == {}
    assert not eu.router.links


async def test_other_sites_do_not_learn_where_relays_link_with_their_own_network(
    world: World,
) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    assert eu.router.hello(0).addresses
    for relay in (eu, us):
        (wan,) = relay.router.wans.values()
        assert wan.hello.addresses == []


async def test_what_stands_between_the_sites_sees_a_connection_in_use_and_the_kernel_its_window(
    world: World,
) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    with socket.create_server(("127.0.0.1", 0)) as plain:
        usual = plain.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    for ours in (port(eu, us), port(us, eu)):
        assert ours is not None
        used = ours._transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        # Not ours of a link, which would be a bound of the throughput over long round trips.
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= usual


async def test_gateways_that_dial_each_other_at_once_keep_one_connection(world: World) -> None:
    for _ in range(10):
        there, here = free_address(), free_address()
        eu, us = await asyncio.gather(
            world.start("eu", world.peer("us", there), listen=here),
            world.start("us", world.peer("eu", here), listen=there),
        )
        await eventually(lambda eu=eu, us=us: joined((eu, us)))  # type: ignore[misc]
        await world.stop(eu)
        await world.stop(us)


async def test_every_gateway_of_a_site_meets_every_gateway_of_another(world: World) -> None:
    one, two = [await world.start("eu", world.peer("us")) for _ in range(2)]
    both = world.peer("eu", one, two)
    others = [await world.start("us", both) for _ in range(2)]
    pairs = [(eu, us) for eu in (one, two) for us in others]
    await eventually(lambda: joined(*pairs))
    (peer,) = gateways(others[0])["peers"]
    assert peer["linked"] == 2
    assert len({there["peer"] for there in peer["addresses"]}) == 2


async def test_two_addresses_of_one_gateway_keep_one_connection_and_outlive_each_other(
    world: World,
) -> None:
    eu = await world.start("eu", world.peer("us"), gateway=("tls://127.0.0.1:0", "tls://[::1]:0"))
    all_of_it = [f"tls://{show(*pair)}" for pair in hub(eu).addresses]
    us = await world.start("us", world.peer("eu", *all_of_it))
    await eventually(lambda: joined((eu, us)))
    (peer,) = gateways(us)["peers"]
    await eventually(lambda: all(a["linked"] for a in gateways(us)["peers"][0]["addresses"]))
    assert (peer["linked"], len(peer["addresses"])) == (1, 2)
    assert gateways(us)["refused"] == gateways(eu)["refused"] == {}
    for _ in range(3):
        broken = port(us, eu)
        assert broken is not None
        broken.abort("cut by the test")
        await eventually(lambda broken=broken: broken not in hub(us).ports and joined((eu, us)))  # type: ignore[misc]


async def test_names_are_looked_up_at_each_dial_and_one_that_does_not_resolve_holds_nobody_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def resolve(name: str, number: int) -> list[str]:
        asked.append(name)
        if name == "gw.eu.example":
            return ["127.0.0.2", "127.0.0.1"] if asked.count(name) > 1 else ["127.0.0.2"]
        raise OSError("no such name")

    monkeypatch.setattr("relay.net.gateways.resolve", resolve)
    eu = await world.start("eu", world.peer("us"))
    number = hub(eu).addresses[0][1]
    entry = world.peer("eu", f"tls://nobody.invalid:{number}", f"tls://gw.eu.example:{number}")
    us = await world.start("us", entry)
    await eventually(lambda: joined((eu, us)))
    assert asked.count("gw.eu.example") >= 2
    nobody, somebody = gateways(us)["peers"][0]["addresses"]
    assert "no such name" in nobody["error"]
    assert somebody["linked"]


async def test_gateways_meet_over_ipv6(world: World) -> None:
    eu = await world.start("eu", world.peer("us"), listen="tls://[::1]:0")
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    assert address(eu).startswith("tls://[::1]:")


async def test_a_request_crosses_from_site_to_site(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    async with (
        iris.connect(str(us.config.socket_path), keyring=keyring) as member,
        iris.connect(str(eu.config.socket_path), keyring=keyring) as caller,
        member.serve(service),
    ):
        await eventually(lambda: eu.router.status()["sites"][0]["clusters"])  # type: ignore[index]  # JSON
        payload = os.urandom(300_000)
        assert await caller.request("echo", payload, timeout=PATIENCE_S) == payload


@pytest.mark.parametrize("kind", [Kind.PUBLISH, Kind.REQUEST, Kind.TUNNEL_DATA])
async def test_a_session_cannot_cut_two_sites_apart_with_flags(kind: int, world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    up = port(eu, us), port(us, eu)
    async with (
        misbehaving.vault(eu.config.socket_path, us.config.socket_path) as vault,
        misbehaving.wanting(us.config.socket_path),
    ):
        await eventually(lambda: eu.router.status()["sites"][0]["topics"])  # type: ignore[index]  # JSON
        assert "flags 0x01" in await misbehaving.say_more(eu.config.socket_path, kind)
        await vault.check()
        assert (port(eu, us), port(us, eu)) == up
    assert hub(eu).protocol_errors == hub(us).protocol_errors == 0
    assert eu.router.accounts.balance() == us.router.accounts.balance() == 0


async def test_a_site_that_answers_under_another_key_ends_that_call_alone(world: World) -> None:
    """First a member, which its own relay ends. Then a lying site, whose answer is dropped."""
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    up = port(eu, us)
    async with misbehaving.vault(eu.config.socket_path, us.config.socket_path) as vault:
        async with misbehaving.liar(us.config.socket_path) as offence:
            await vault.ask_a_liar()
            assert "REPLY for echo" in await offence
        wan = us.router.wans[eu.router.relay_id]
        assert "misdirected answer" not in eu.router.accounts.dropped
        strange = frames.Declare(
            900, Kind.REPLY, "echo", misbehaving.STRANGE_KEY.key_id, RELAY, True, [], 0, 2, "eu"
        )
        async with misbehaving.silent(us.config.socket_path) as asked:
            lying = asyncio.create_task(vault.ask_a_liar())
            await asked.data(Kind.REQUEST)
            wan.control(strange)
            ((hop, _),) = (
                (h.hop, h)
                for s in us.router.sessions.values()
                for h in s.in_flight.values()
                if h.route.name == "echo"
            )
            wan.port.control(misbehaving.data_frame(Kind.REPLY, bytes(40), alias=900, hop=hop))
            wan.port.flush()
            await lying
        assert eu.router.accounts.dropped["misdirected answer"] == 1
        await vault.check()
        assert port(eu, us) is up
    assert hub(eu).protocol_errors == hub(us).protocol_errors == 0
    assert eu.router.accounts.balance() == us.router.accounts.balance() == 0


# -- losing and finding again --------------------------------------------------------------------------------------


async def test_a_gateway_that_comes_back_at_its_address_is_met_again(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    ours, listening = port(us, eu), address(eu)
    await world.stop(eu)
    await eventually(lambda: not us.router.wans and not hub(us).ports)
    assert ours is not None
    assert "(BYE)" in ours.reason or "closed the connection" in ours.reason
    again = await world.start("eu", world.peer("us"), listen=listening)
    assert again.router.relay_id != eu.router.relay_id
    await eventually(lambda: joined((again, us)))


async def test_a_gateway_that_dialled_and_was_lost_is_waited_for(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    await world.stop(us, drain_s=1)
    await eventually(lambda: not eu.router.wans and not hub(eu).ports)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))


# -- keys and names ------------------------------------------------------------------------------------------------


async def test_a_gateway_under_another_key_than_the_pinned_one_is_not_met(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    wrong = world.key("ap").fingerprint
    us = await world.start("us", world.peer("eu", eu, pin=wrong))
    await eventually(lambda: hub(us).refusals.get("foreign certificate"))
    assert not us.router.wans
    assert not eu.router.wans
    (there,) = gateways(us)["peers"][0]["addresses"]
    assert (there["linked"], there["error"]) == (False, "foreign certificate")
    assert there["failures"] > 0


async def test_a_gateway_whose_own_key_is_not_the_pinned_one_is_refused(world: World) -> None:
    eu = await world.start("eu", world.peer("us", pin=world.key("ap").fingerprint))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: hub(us).refusals.get(NOT_PINNED))
    await eventually(lambda: hub(eu).refusals.get("unknown site"))
    assert not us.router.wans
    assert not eu.router.wans
    assert (set(hub(us).refusals), set(hub(eu).refusals)) == ({NOT_PINNED}, {"unknown site"})
    (there,) = gateways(us)["peers"][0]["addresses"]
    assert there["error"] == NOT_PINNED


async def test_a_site_pinned_under_a_name_that_it_does_not_go_by_is_not_met(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("usa", eu, pin=world.key("eu").fingerprint))
    await eventually(lambda: hub(us).refusals.get("foreign certificate"))
    theirs = await world.start("usa", world.peer("eu", eu), site_key=world.key_file("us"))
    await eventually(lambda: hub(eu).refusals.get(MISNAMED))
    await eventually(lambda: set(hub(theirs).refusals) == {OTHER_NAME})
    for relay in (eu, us, theirs):
        assert not relay.router.wans


async def test_while_a_site_changes_its_key_its_old_and_new_gateways_are_met(world: World) -> None:
    new = keyfiles.create_site_key(world.directory / "new.toml")
    eu = await world.start("eu", world.peer("us"), world.peer("us", pin=new.fingerprint))
    old = await world.start("us", world.peer("eu", eu))
    renewed = await world.start("us", world.peer("eu", eu), site_key=world.directory / "new.toml")
    await eventually(lambda: joined((eu, old), (eu, renewed)))
    pins = {connection["pin"] for connection in gateways(eu)["connections"]}
    assert pins == {world.key("us").fingerprint, new.fingerprint}


async def test_a_relay_of_the_network_is_not_accepted_as_a_gateway_nor_a_gateway_as_a_relay_of_it(
    world: World,
) -> None:
    eu = await world.start("eu", world.peer("us"))
    network = world.network("eu")
    leaf = relay_leaf(network, RELAY, os.urandom(32))
    dialling = mutual_context(
        ssl.PROTOCOL_TLS_CLIENT, alpn=WAN_ALPN, leaf=leaf, trusted=site_authority(world.key("eu").public_key, "eu")
    )  # fmt: skip
    await refused(eu, MISNAMED, Stranger(eu, dialling, name_of(world.key("us"))))
    own = gateway_leaf(world.key("eu"), "eu", RELAY, os.urandom(32))
    dialling = mutual_context(
        ssl.PROTOCOL_TLS_CLIENT, alpn=LINK_ALPN, leaf=own, trusted=network_authority(network)
    )
    stranger = Stranger(eu, dialling, network.fingerprint.hex())
    stranger.port = links(eu).port
    with pytest.raises((ssl.SSLError, OSError, EOFError)):
        async with stranger:
            await stranger.receive(link_frames.LinkHello)
    await eventually(lambda: links(eu).refusals == {"foreign certificate": 1})
    assert not eu.router.links


async def test_a_gateway_does_not_start_without_a_key_or_with_one_that_is_another_sites(
    world: World, tmp_path: Path
) -> None:
    with pytest.raises(KeyringError, match=r"absent\.toml"):
        world.relay("eu", world.peer("us"), site_key=tmp_path / "absent.toml")
    public = tmp_path / "public.toml"
    public.write_text(world.key_file("eu").read_text())
    with pytest.raises(KeyringError, match="open to other users"):
        world.relay("eu", world.peer("us"), site_key=public)
    with pytest.raises(ConfigError, match=r"^peer_site: us has the fingerprint of this site's own"):
        world.relay("eu", world.peer("us", pin=world.key("eu").fingerprint))
    with pytest.raises(ConfigError, match=r"^gateway: a gateway needs the network keys"):
        world.relay("eu", world.peer("us"), network_keys=())
    eu = await world.start("eu", world.peer("us"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"^gateway: .* at tls"):
        await world.start("eu", world.peer("us"), gateway=("tls://127.0.0.1:0", address(eu)))
    with pytest.raises(ConfigError, match=r"^gateway: 'localhost' is not an IP address"):
        await world.start("eu", world.peer("us"), listen="tls://localhost:0")
    assert set(os.listdir("/proc/self/fd")) == before


# -- stopping ------------------------------------------------------------------------------------------------------


async def test_a_gateway_that_stops_leaves_no_task_and_no_socket(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    world = World(tmp_path)
    eu = await world.start("eu", world.peer("us"))
    nowhere = ("tls://127.0.0.1:1", "tls://nobody.invalid:7440")
    us = await world.start("us", world.peer("eu", eu, *nowhere))
    await eventually(lambda: port(eu, us))
    async with Stranger(eu), Impostor(world, eu):
        for relay in (us, eu):
            await relay.stop(drain_s=0)
            await relay.stop(drain_s=0)
    assert not hub(eu).ports
    assert not hub(us).ports
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await eventually(lambda: len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1)


async def test_a_gateway_that_stops_says_goodbye(world: World) -> None:
    eu = await world.start("eu", world.peer("us"))
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    gone = port(eu, us)
    await world.stop(us, drain_s=1)
    await eventually(lambda: not eu.router.wans)
    assert gone is not None
    assert "(BYE)" in gone.reason


# -- what sessions can do to them --------------------------------------------------------------------------------


async def test_thousands_of_joins_under_made_up_keys_do_not_cut_sites_apart(world: World) -> None:
    eu = await world.start("eu", world.peer("us"), max_members=65_536)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    keys = [ClusterKey(os.urandom(32)) for _ in range(64)]
    kinds = {int(Kind.REQUEST): Serving(1, 1)}
    joins = [frames.Join(number, f"c{number}", [key.key_id for key in keys], kinds) for number in range(4097)]  # fmt: skip
    before = port(eu, us)
    async with Wire(eu.config.socket_path) as first, Wire(eu.config.socket_path) as second:
        errors: list[str] = []
        await first.greet()
        await second.greet()
        for wire, share in ((first, joins[:2049]), (second, joins[2049:])):
            await wire.send(*(wire.proof(key) for key in keys))
            for at in range(0, len(share), 256):
                await wire.send(*share[at : at + 256])
                errors += [(await wire.expect(frames.Ack)).error for _ in share[at : at + 256]]
        taken = errors.count("")
        assert taken == 512  # a quarter of what the relay's sessions have together, each
        assert "16384 members" in errors[-1]
        (wan,) = us.router.wans.values()
        await eventually(lambda: len(wan.site_route.clusters) == 64 * taken)
        # Other users' members are announced and can be called.
        async with (
            iris.connect(eu.config.socket_path, keyring=iris.Keyring.single(KEY)) as member,
            iris.connect(us.config.socket_path, keyring=iris.Keyring.single(KEY)) as caller,
        ):
            service = iris.Service("echo")
            service.on_request(lambda payload: payload)
            async with member.serve(service):
                await eventually(lambda: ("echo", KEY.key_id) in wan.site_route.clusters)
                assert await caller.request("echo", b"text", timeout=PATIENCE_S) == b"text"
    assert port(eu, us) is before
    assert wan.site_route.dropped_entries == 0
    for relay in (eu, us):
        assert hub(relay).protocol_errors == 0
        assert relay.router.accounts.balance() == 0
