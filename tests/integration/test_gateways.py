"""Gateways on loopback: sites find each other under the keys that they pinned, and nobody else gets anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest
from adversity import foul
from adversity.kit import Wire
from support.connection import Connection
from support.relays import KEY
from support.waiting import PATIENCE_S, eventually

import iris
from iris import keyfiles
from iris.crypto.certificates import gateway_leaf, network_authority, relay_leaf, site_authority
from iris.crypto.keys import ClusterKey, NetworkKey, SiteKey, public_id
from iris.errors import ConfigError, KeyringError
from iris.remote import mutual_context
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import Control, Kind, Serving
from relay.config import RelayConfig
from relay.daemon import Relay
from relay.net.addresses import show
from relay.net.gateways import MAX_CONNECTIONS, NOT_PINNED, OTHER_NAME, GatewayHub, GatewayPort
from relay.net.links import LinkHub
from relay.net.tls import LINK_ALPN, SESSION_ALPN, WAN_ALPN

pytestmark = pytest.mark.timeout(60)

RELAY = b"\x42" * 16
MISNAMED = "foreign certificate under the key pinned as us"


class World:
    """Sites, each with a network and a site key, and their relays."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.relays: list[Relay] = []
        self.started = 0

    def key(self, site: str) -> SiteKey:
        path = self.key_file(site)
        return keyfiles.load_site_key(path)

    def key_file(self, site: str) -> Path:
        path = self.directory / f"{site}.toml"
        if not path.exists():
            keyfiles.create_site_key(path)
        return path

    def network(self, site: str) -> NetworkKey:
        return NetworkKey(site.encode().ljust(32))

    def peer(self, site: str, *addresses: Relay | str, pin: str | None = None) -> str:
        """Return what the settings say of another site."""
        listed = ",".join(one if isinstance(one, str) else address(one) for one in addresses)
        return f"{site}={listed}#{pin or self.key(site).fingerprint}"

    async def start(self, site: str, *peers: str, listen: str = "", **settings: Any) -> Relay:
        """Start a gateway of a site that listens on 127.0.0.1, or where it is told."""
        relay = self.relay(site, *peers, listen=listen, **settings)
        await relay.start()
        self.relays.append(relay)
        return relay

    def relay(self, site: str, *peers: str, listen: str = "", **settings: Any) -> Relay:
        directory = self.directory / str(self.started)
        self.started += 1
        directory.mkdir(0o700)
        given: dict[str, Any] = {
            "port": 0,
            "bind": ("127.0.0.1",),
            "mdns": False,
            "drain_timeout_s": 1.0,
            "network_keys": (self.network(site),),
            "site": site,
            "site_key": self.key_file(site),
            "gateway": (listen or "tls://127.0.0.1:0",),
            "peer_site": peers,
            **settings,
        }
        return Relay(RelayConfig(socket_path=directory / "relay.sock", **given))

    async def stop(self, relay: Relay, *, drain_s: float = 0) -> None:
        self.relays.remove(relay)
        await relay.stop(drain_s=drain_s)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    for relay in world.relays:
        await relay.stop(drain_s=0)


def hub(relay: Relay) -> GatewayHub:
    assert relay.gateways is not None
    return relay.gateways


def links(relay: Relay) -> LinkHub:
    assert relay.links is not None
    return relay.links


def address(relay: Relay) -> str:
    return f"tls://{show(*hub(relay).addresses[0])}"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tls://127.0.0.1:{probe.getsockname()[1]}"


def port(one: Relay, other: Relay) -> GatewayPort | None:
    """Return the connection of `one` to `other`, if there is one that is up."""
    found = one.router.wans.get(other.router.relay_id)
    if found is None:
        return None
    assert isinstance(found.port, GatewayPort)
    return found.port


def joined(*pairs: tuple[Relay, Relay]) -> bool:
    """Whether each pair has one connection, both ends of one, and no relay has any besides."""
    counts: dict[int, int] = {}
    for one, other in pairs:
        ours, theirs = port(one, other), port(other, one)
        if ours is None or theirs is None:
            return False
        ends = [
            (p._transport.get_extra_info("sockname"), p._transport.get_extra_info("peername"))
            for p in (ours, theirs)
        ]
        if ends[0] != ends[1][::-1]:
            return False
        for relay in (one, other):
            counts[id(relay)] = counts.get(id(relay), 0) + 1
    relays = {id(relay): relay for pair in pairs for relay in pair}
    return all(len(hub(relays[key]).ports) == count for key, count in counts.items())


def gateways(relay: Relay) -> Any:
    """Return what the relay says of its gateways, as JSON."""
    return relay.router.status()["gateways"]


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
    all_of_it = [f"tls://{show(*place)}" for place in hub(eu).addresses]
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
        foul.vault(eu.config.socket_path, us.config.socket_path) as vault,
        foul.wanting(us.config.socket_path),
    ):
        await eventually(lambda: eu.router.status()["sites"][0]["topics"])  # type: ignore[index]  # JSON
        assert "flags 0x01" in await foul.say_more(eu.config.socket_path, kind)
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
    async with foul.vault(eu.config.socket_path, us.config.socket_path) as vault:
        async with foul.liar(us.config.socket_path) as told:
            await vault.ask_a_liar()
            assert "REPLY of echo under key" in await told
        wan = us.router.wans[eu.router.relay_id]
        assert "misdirected answer" not in eu.router.accounts.dropped
        strange = frames.Declare(
            900, Kind.REPLY, "echo", foul.STRANGE_KEY.key_id, RELAY, True, [], 0, 2, "eu"
        )
        async with foul.silent(us.config.socket_path) as asked:
            lying = asyncio.create_task(vault.ask_a_liar())
            await asked.data(Kind.REQUEST)
            wan.control(strange)
            ((hop, _),) = (
                (h.hop, h)
                for s in us.router.sessions.values()
                for h in s.handed.values()
                if h.route.name == "echo"
            )
            wan.port.control(foul.data_frame(Kind.REPLY, bytes(40), alias=900, hop=hop))
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
    ours, place = port(us, eu), address(eu)
    await world.stop(eu)
    await eventually(lambda: not us.router.wans and not hub(us).ports)
    assert ours is not None
    assert ours.reason in ("the other relay said goodbye", "the other side closed the connection")
    again = await world.start("eu", world.peer("us"), listen=place)
    assert again.router.relay_id != eu.router.relay_id
    await eventually(lambda: joined((again, us)))


async def test_a_gateway_that_dialled_and_is_gone_is_waited_for(world: World) -> None:
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


async def test_a_relay_of_the_network_is_no_gateway_and_a_gateway_no_relay_of_it(
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
            await stranger.hear(frames.LinkHello)
    await eventually(lambda: links(eu).refusals == {"foreign certificate": 1})
    assert not eu.router.links


async def test_a_gateway_does_not_start_without_a_key_or_with_one_that_is_another_sites(
    world: World, tmp_path: Path
) -> None:
    with pytest.raises(KeyringError, match=r"absent\.toml"):
        world.relay("eu", world.peer("us"), site_key=tmp_path / "absent.toml")
    public = tmp_path / "public.toml"
    public.write_text(world.key_file("eu").read_text())
    with pytest.raises(KeyringError, match="open to others"):
        world.relay("eu", world.peer("us"), site_key=public)
    with pytest.raises(ConfigError, match=r"^peer_site: us has the fingerprint of this site's own"):
        world.relay("eu", world.peer("us", pin=world.key("eu").fingerprint))
    with pytest.raises(ConfigError, match=r"^gateway: a gateway needs the network keys"):
        world.relay("eu", world.peer("us"), network_keys=())
    eu = await world.start("eu", world.peer("us"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"^gateway: no gateways at tls"):
        await world.start("eu", world.peer("us"), gateway=("tls://127.0.0.1:0", address(eu)))
    with pytest.raises(ConfigError, match=r"^gateway: 'localhost' is not an IP address"):
        await world.start("eu", world.peer("us"), listen="tls://localhost:0")
    assert set(os.listdir("/proc/self/fd")) == before


# -- strangers -----------------------------------------------------------------------------------------------------


def name_of(key: SiteKey) -> str:
    """Return the server name by which a dialler says that it is of a site."""
    return public_id(key.public_key).hex()


class Stranger(Connection):
    """Something that connects to a gateway."""

    def __init__(
        self, relay: Relay, context: ssl.SSLContext | None = None, name: str = "", host: str = "127.0.0.1"
    ) -> None:  # fmt: skip
        super().__init__(hub(relay).addresses[0][1], context, name, host)


class Impostor(Stranger):
    """A holder of a site's key that gets as far as TLS."""

    def __init__(
        self, world: World, relay: Relay, site: str = "us", relay_id: bytes = RELAY, alpn: str = WAN_ALPN
    ) -> None:  # fmt: skip
        key = world.key(site)
        leaf = gateway_leaf(key, site, relay_id, os.urandom(32))
        trusted = site_authority(world.key(relay.config.site).public_key, relay.config.site)
        context = mutual_context(ssl.PROTOCOL_TLS_CLIENT, alpn=alpn, leaf=leaf, trusted=trusted)
        super().__init__(relay, context, name_of(key))
        self.relay = relay
        self.site = site
        self.relay_id = relay_id

    def hello(self, **changes: object) -> frames.LinkHello:
        said: dict[str, object] = {
            "version": 1, "minor": 0, "relay_id": self.relay_id, "dial_us": 5, "mono_us": 5, "message_limit": 1 << 20, "site": self.site,
        }  # fmt: skip
        return frames.LinkHello(**{**said, **changes})  # type: ignore[arg-type]  # as given

    async def meet(self) -> Self:
        await self.say(self.hello())
        await eventually(lambda: self.relay_id in self.relay.router.wans)
        return self


async def refused(relay: Relay, reason: str, stranger: Stranger, *said: Control | bytes) -> None:
    """Let a stranger try: it is cut, and counted as `reason` once."""
    before = dict(hub(relay).refusals)
    try:
        async with stranger:
            await stranger.say(*said)
            await stranger.gone()
    except (ssl.SSLError, ConnectionError):
        pass  # in TLS, or after it: that is the gateway's to choose
    await eventually(lambda: not hub(relay).ports)
    assert hub(relay).refusals == {**before, reason: before.get(reason, 0) + 1}
    assert not relay.router.wans


async def still_meets(world: World, eu: Relay) -> None:
    """A gateway of us is met all the same, and nothing of the strangers is left."""
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    assert gateways(eu)["half_open"] == 0


def blind() -> ssl.SSLContext:
    """Return a context that trusts anybody and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([WAN_ALPN])
    return context


@pytest.fixture
async def eu(world: World) -> Relay:
    return await world.start("eu", world.peer("us"), world.peer("ap"))


async def test_who_names_no_site_that_is_pinned_is_refused_before_it_sees_a_certificate(
    world: World, eu: Relay
) -> None:
    for name in ("gw.eu.example", "f" * 32, name_of(world.key("eu")), name_of(SiteKey(bytes(32)))):
        stranger = Impostor(world, eu)
        stranger.name = name
        await refused(eu, "unknown site", stranger)
    assert hub(eu).refusals == {"unknown site": 4}
    await still_meets(world, eu)


async def test_who_shows_no_certificate_or_speaks_another_protocol_is_refused(
    world: World, eu: Relay
) -> None:
    await refused(eu, "no certificate", Stranger(eu, blind(), name_of(world.key("us"))))
    for alpn in (LINK_ALPN, SESSION_ALPN, "iris-wan/2"):
        await refused(eu, "protocol version", Impostor(world, eu, alpn=alpn))
    old = blind()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    await refused(eu, "TLS version", Stranger(eu, old, name_of(world.key("us"))))
    await still_meets(world, eu)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
        encode_control(frames.Hello(1, 0)),
        encode_control(frames.LinkHello(1, 0, RELAY, 5, 5, 1 << 20, site="us")),
        bytes(1000),
        b"\xff" * 1000,
    ],
)
async def test_what_is_not_tls_is_refused(said: bytes, world: World, eu: Relay) -> None:
    await refused(eu, "not TLS", Stranger(eu), said)
    await still_meets(world, eu)


async def test_a_handshake_that_goes_on_and_on_is_cut(world: World, eu: Relay) -> None:
    record = b"\x16\x03\x01" + struct.pack(">H", 16_384)
    hello = b"\x01" + (130_000).to_bytes(3, "big")
    said = record + hello + bytes(16_380) + (record + bytes(16_384)) * 4
    await refused(eu, "too long a handshake", Stranger(eu), said)
    await still_meets(world, eu)


async def test_who_says_nothing_or_half_of_something_is_cut(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.HELLO_S", 0.3)
    hello = encode_control(Impostor(world, eu).hello())
    async with Stranger(eu) as silent, Stranger(eu) as begun, Impostor(world, eu) as shaken:
        await begun.say(b"\x16\x03\x01\x02\x00\x01\x00")
        await shaken.say(hello[:20])
        for stranger in (silent, begun, shaken):
            await stranger.gone()
    assert hub(eu).refusals == {"timeout": 3}
    monkeypatch.undo()
    await still_meets(world, eu)


async def test_a_gateway_that_is_dialled_and_says_nothing_is_given_up_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.hub.HELLO_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        place = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        us = await world.start("us", world.peer("eu", place))
        await eventually(lambda: hub(us).refusals.get("timeout", 0) >= 2)
        (there,) = gateways(us)["peers"][0]["addresses"]
        assert "no answer" in there["error"]
        await world.stop(us)


async def test_of_too_many_half_open_connections_the_oldest_of_the_busiest_host_is_dropped(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who floods crowds out itself: a gateway that is slow because it is far away gets through."""
    monkeypatch.setattr("relay.net.hub.MAX_HALF_OPEN", 8)
    monkeypatch.setattr(
        "relay.net.hub.HELLO_S", 60.0
    )  # nobody is dropped for the time that this takes
    loop = asyncio.get_running_loop()
    async with Stranger(eu, host="127.0.0.3") as slow, Stranger(eu, host="127.0.0.4") as slower:
        await eventually(lambda: len(hub(eu).ports) == 2)
        flood = []
        for number in range(1, 41):
            knocking = socket.socket()
            knocking.setblocking(False)
            knocking.bind(("127.0.0.2", 0))
            await loop.sock_connect(knocking, ("127.0.0.1", hub(eu).addresses[0][1]))
            flood.append(knocking)
            await eventually(
                lambda number=number: (
                    len(hub(eu).ports) - 2 + hub(eu).refusals.get("too many half-open", 0) >= number
                )
            )
            assert gateways(eu)["half_open"] <= 8
        assert hub(eu).refusals == {"too many half-open": 34}
        hosts = {p.address.rpartition(":")[0] for p in hub(eu).ports}
        assert hosts == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
        us = await world.start("us", world.peer("eu", eu))
        await eventually(lambda: us.router.wans)
        for stranger in (slow, slower):
            await stranger.say(b"GET /")
            await stranger.gone()
        assert hub(eu).refusals["not TLS"] == 2
        for one in flood:
            one.close()


async def test_a_flood_of_connections_that_come_and_go_leaves_nothing(
    world: World, eu: Relay
) -> None:
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    ours = port(eu, us)
    loop = asyncio.get_running_loop()

    async def knock(number: int) -> None:
        with socket.socket() as stranger:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, ("127.0.0.1", hub(eu).addresses[0][1]))
            if number % 3:
                await loop.sock_sendall(stranger, os.urandom(1 + number % 700))
            if number % 2:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    for start in range(0, 600, 50):
        await asyncio.gather(*(knock(number) for number in range(start, start + 50)))
    await eventually(lambda: hub(eu).ports == {ours} and not hub(eu)._accepting)
    assert gateways(eu)["half_open"] == 0
    assert joined((eu, us))


def client_hello(context: ssl.SSLContext, name: str) -> bytes:
    """Return how a dialler begins."""
    sent = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them changed, cut or repeated."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
        if not data:
            data += b"\x16"
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
async def test_handshakes_that_begin_damaged_cost_their_connection_alone(
    seed: int, world: World, eu: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    garbled: list[object] = []
    # What `ssl` says of server names that are no text; the daemon counts them.
    monkeypatch.setattr("sys.unraisablehook", garbled.append)
    rng = random.Random(seed)
    impostor = Impostor(world, eu)
    assert impostor.context is not None
    whole = client_hello(impostor.context, impostor.name)
    for _ in range(100):
        async with Stranger(eu) as stranger:
            await stranger.say(damaged(whole, rng))
            if rng.random() < 0.5:
                await stranger.say(rng.randbytes(rng.randrange(1, 3000)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await stranger.gone()
    await eventually(lambda: not hub(eu).ports)
    assert not [record for record in caplog.records if record.exc_info]
    assert sum(hub(eu).refusals.values()) == 100
    await still_meets(world, eu)


# -- impostors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "told", "hello"),
    [
        ("another site's name", "gateway of us", {"site": "ap"}),
        ("another site's name", "gateway of us", {"site": ""}),
        ("another relay's id", "another relay", {"relay_id": b"\x43" * 16}),
        ("protocol version", "version 2", {"version": 2}),
        ("protocol error", "both sides dialled, or neither", {"dial_us": 0}),
    ],
)
async def test_a_hello_that_does_not_hold_is_refused_and_told(
    reason: str, told: str, hello: dict[str, object], world: World, eu: Relay
) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.say(impostor.hello(**hello))
        assert told in (await impostor.hear(frames.Error)).detail
        await impostor.gone()
    assert hub(eu).refusals == {reason: 1}
    await still_meets(world, eu)


async def test_a_gateway_that_is_dialled_and_says_another_sites_name_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    eu = await world.start("eu", world.peer("us"))
    hello = GatewayPort._hello

    def lie(self: GatewayPort) -> frames.LinkHello:
        said = hello(self)
        return frames.LinkHello(**{name: getattr(said, name) for name in said.__struct_fields__} | {"site": "ap"}) if said.site == "eu" else said  # fmt: skip

    monkeypatch.setattr(GatewayPort, "_hello", lie)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: hub(us).refusals.get("another site's name"))
    assert not us.router.wans


async def test_a_site_cannot_have_a_relay_id_of_another_site_or_of_ours(
    world: World, eu: Relay
) -> None:
    us = await world.start("us", world.peer("eu", eu))
    mate = await world.start("eu", world.peer("us"), join=(f"127.0.0.1:{links(eu).port}",))
    await eventually(lambda: joined((eu, us)) and mate.router.relay_id in eu.router.links)
    for taken in (us.router.relay_id, mate.router.relay_id):
        async with Impostor(world, eu, "ap", taken) as impostor:
            await impostor.say(impostor.hello())
            assert "relay id" in (await impostor.hear(frames.Error)).detail
            await impostor.gone()
    assert hub(eu).refusals == {"another site's relay id": 2}
    assert joined((eu, us))


async def test_a_gateway_that_has_our_own_id_is_nobody_to_meet(world: World, eu: Relay) -> None:
    async with Impostor(world, eu, relay_id=eu.router.relay_id) as impostor:
        await impostor.say(impostor.hello())
        await impostor.gone()
    assert not eu.router.wans
    assert hub(eu).refusals == {}


async def test_one_site_has_so_many_connections_and_no_more(
    world: World, eu: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_CONNECTIONS >= 16
    monkeypatch.setattr("relay.net.gateways.MAX_CONNECTIONS", 2)
    one, two, three = (Impostor(world, eu, relay_id=bytes([n]) * 16) for n in (1, 2, 3))
    async with one, two, three:
        await one.meet()
        await two.meet()
        await three.say(three.hello())
        assert "2 connections" in (await three.hear(frames.Error)).detail
        again = Impostor(world, eu, relay_id=one.relay_id)
        async with again:
            await again.say(again.hello(dial_us=6))  # takes the place of its older one
            await again.hear(frames.LinkHello)
            await one.gone()
            await eventually(lambda: len(hub(eu).up) == 2)
        async with Impostor(world, eu, "ap") as other:
            await other.meet()
    assert hub(eu).refusals == {"too many gateways": 1}
    assert hub(eu).replaced == 1


@pytest.mark.parametrize(
    "said",
    [
        frames.Beat(1),
        frames.Hello(1, 0),
        b"\x03\0\0\0\x27\0\0",  # COMPRESSED, of earlier versions
        b"\x01\0\0\0\x20",
        (1 << 20).to_bytes(4, "little") + bytes(100),
        b"\xff\xff\xff\xff" + bytes(100),
        bytes(100),
    ],
)
async def test_the_first_frame_is_hello_and_short(
    said: Control | bytes, world: World, eu: Relay
) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.say(said)
        assert (await impostor.hear(frames.Error)).detail
        await impostor.gone()
    assert hub(eu).refusals == {"protocol error": 1}
    await still_meets(world, eu)


@pytest.mark.parametrize("seed", range(3))
async def test_greetings_that_are_damaged_cost_their_connection_alone(
    seed: int, world: World, eu: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        async with Impostor(world, eu) as impostor:
            await impostor.say(damaged(encode_control(impostor.hello(label="x" * 64)), rng))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await impostor.gone()
    await eventually(lambda: not hub(eu).ports and not eu.router.wans)
    assert not [record for record in caplog.records if record.exc_info]
    await still_meets(world, eu)


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff" + bytes(100), bytes(100), b"\x09\0\0\0" + b"\xfe" * 9])  # fmt: skip
async def test_a_gateway_that_breaks_the_protocol_loses_its_connection_and_nobody_elses(
    said: bytes, world: World, eu: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    async with Impostor(world, eu, "ap") as impostor:
        await impostor.meet()
        await eventually(lambda: len(eu.router.wans) == 2)
        await impostor.say(said)
        await impostor.gone()
    await eventually(lambda: joined((eu, us)))
    assert hub(eu).protocol_errors == 1
    assert "gateway.protocol_error" in caplog.text
    assert "gateway.up" in caplog.text
    assert "link.up" not in caplog.text


async def test_a_gateway_that_falls_silent_is_given_up(world: World, eu: Relay) -> None:
    async with Impostor(world, eu) as impostor:
        await impostor.meet()
        await eventually(lambda: eu.router.wans)
        await impostor.gone()
    assert not eu.router.wans


# -- earlier versions ------------------------------------------------------------------------------------------------


async def test_a_gateway_that_offers_compression_is_joined_and_nothing_is_compressed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    eu = await world.start("eu", world.peer("us"), site_compression=True)
    (warned,) = [record for record in caplog.records if record.message == "settings.no_effect"]
    assert warned.fields["setting"] == "site_compression"  # type: ignore[attr-defined]
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    async with iris.connect(str(eu.config.socket_path), keyring=keyring) as client:
        for number in range(200):
            client.subscribe(f"numbers.{number}", lambda m: None)
        await client.flush()
        async with Impostor(world, eu) as older:
            await older.say(older.hello(compression=True))
            assert not (await older.hear(frames.LinkHello)).compression
            assert len((await older.hear(frames.Interest)).site_topics) == 200
            assert hub(eu).protocol_errors == 0


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
    assert gone.reason == "the other relay said goodbye"


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
        await eventually(lambda: len(wan.way.clusters) == 64 * taken)
        # Other users' members are announced and can be called.
        async with (
            iris.connect(eu.config.socket_path, keyring=iris.Keyring.single(KEY)) as member,
            iris.connect(us.config.socket_path, keyring=iris.Keyring.single(KEY)) as caller,
        ):
            service = iris.Service("echo")
            service.on_request(lambda payload: payload)
            async with member.serve(service):
                await eventually(lambda: ("echo", KEY.key_id) in wan.way.clusters)
                assert await caller.request("echo", b"text", timeout=PATIENCE_S) == b"text"
    assert port(eu, us) is before
    assert wan.way.untaken == 0
    for relay in (eu, us):
        assert hub(relay).protocol_errors == 0
        assert relay.router.accounts.balance() == 0
