"""Gateways on loopback, their visible state, and connections of strangers and impostors to them."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from iris import keyfiles
from iris.crypto.certificates import gateway_leaf, site_authority
from iris.crypto.keys import NetworkKey, SiteKey, public_id
from iris.remote import mutual_context
from iris.wire import link_frames
from iris.wire.frames import Control
from relay.config import RelayConfig
from relay.daemon import Relay
from relay.net.addresses import show
from relay.net.gateways import GatewayHub, GatewayPort
from relay.net.tls import WAN_ALPN
from support import links
from support.connection import Connection
from support.waiting import eventually

RELAY = b"\x42" * 16


class World(links.Relays):
    """Several sites, each with a network key and a site key, and their relays."""

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
        """Return the setting `peer_sites` for another site."""
        listed = ",".join(one if isinstance(one, str) else address(one) for one in addresses)
        return f"{site}={listed}#{pin or self.key(site).fingerprint}"

    async def start(self, site: str, *peers: str, listen: str = "", **settings: Any) -> Relay:
        """Start a gateway of a site that listens on 127.0.0.1, or at `listen`."""
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


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.end()


def hub(relay: Relay) -> GatewayHub:
    assert relay.gateways is not None
    return relay.gateways


def address(relay: Relay) -> str:
    return f"tls://{show(*hub(relay).addresses[0])}"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tls://127.0.0.1:{probe.getsockname()[1]}"


def port(one: Relay, other: Relay) -> GatewayPort | None:
    """Return the connection of `one` to `other` if it is up."""
    found = one.router.wans.get(other.router.relay_id)
    if found is None:
        return None
    assert isinstance(found.port, GatewayPort)
    return found.port


def joined(*pairs: tuple[Relay, Relay]) -> bool:
    """Return whether each pair shares exactly one connection, and no relay has another one."""
    counts: dict[int, int] = {}
    for one, other in pairs:
        ours, theirs = port(one, other), port(other, one)
        if ours is None or theirs is None:
            return False
        if links.ends(ours) != links.ends(theirs)[::-1]:
            return False
        for relay in (one, other):
            counts[id(relay)] = counts.get(id(relay), 0) + 1
    relays = {id(relay): relay for pair in pairs for relay in pair}
    return all(len(hub(relays[key]).ports) == count for key, count in counts.items())


def gateways(relay: Relay) -> Any:
    """Return the gateways in the relay's status, as JSON."""
    return relay.router.status()["gateways"]


def name_of(key: SiteKey) -> str:
    """Return the server name with which a dialler claims to belong to a site."""
    return public_id(key.public_key).hex()


class Stranger(Connection):
    """A connection to a gateway without a key of any site."""

    def __init__(
        self, relay: Relay, context: ssl.SSLContext | None = None, name: str = "", host: str = "127.0.0.1"
    ) -> None:  # fmt: skip
        super().__init__(hub(relay).addresses[0][1], context, name, host)


class Impostor(Stranger):
    """A holder of a site key whose TLS handshake succeeds."""

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

    def hello(self, **changes: object) -> link_frames.LinkHello:
        said: dict[str, object] = {
            "version": 1, "minor": 0, "relay_id": self.relay_id, "dial_us": 5, "mono_us": 5, "message_limit": 1 << 20, "site": self.site,
        }  # fmt: skip
        return link_frames.LinkHello(**{**said, **changes})  # type: ignore[arg-type]  # as given

    async def meet(self) -> Self:
        await self.say(self.hello())
        await eventually(lambda: self.relay_id in self.relay.router.wans)
        return self


async def refused(relay: Relay, reason: str, stranger: Stranger, *said: Control | bytes) -> None:
    """Let a stranger connect and send: assert that it is disconnected, and counted once as `reason`."""
    before = dict(hub(relay).refusals)
    try:
        async with stranger:
            await stranger.say(*said)
            await stranger.gone()
    except (ssl.SSLError, ConnectionError):
        pass  # the gateway may refuse during TLS or after it
    await eventually(lambda: not hub(relay).ports)
    assert hub(relay).refusals == {**before, reason: before.get(reason, 0) + 1}
    assert not relay.router.wans


async def still_meets(world: World, eu: Relay) -> None:
    """Assert that a gateway of site us can still connect, and that the strangers left no state."""
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    assert gateways(eu)["half_open"] == 0


@pytest.fixture
async def eu(world: World) -> Relay:
    return await world.start("eu", world.peer("us"), world.peer("ap"))
