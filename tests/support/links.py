"""Linked relays on loopback in this process, and a relay in another process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from iris import keyfiles
from iris.crypto.keyring import dump_network_keys
from iris.crypto.keys import NetworkKey
from relay.config import RelayConfig
from relay.daemon import Relay, wall_us
from relay.discovery import Sighting
from relay.net.addresses import show
from relay.net.gateways import GatewayPort
from relay.net.linkport import LinkPort
from relay.net.links import LinkHub
from support.relays import Daemon

NETWORK = NetworkKey(bytes(range(32)))
OTHER = NetworkKey(bytes(range(1, 33)))


async def start(
    directory: Path, *join: Relay | str, keys: tuple[NetworkKey, ...] = (NETWORK,), wall: Callable[[], int] = wall_us,
    **settings: Any,
) -> Relay:  # fmt: skip
    """Start a relay that links on 127.0.0.1 and knows the relays in `join`. `wall` is its wall clock in µs."""
    os.mkdir(directory, 0o700)
    given = {
        "port": 0, "bind": ("127.0.0.1",), "mdns": False, "drain_timeout_s": 1.0, "network_keys": keys, **settings,
    }  # fmt: skip
    joins = tuple(j if isinstance(j, str) else address(j) for j in join)
    relay = Relay(RelayConfig(socket_path=directory / "relay.sock", join=joins, **given), wall=wall)
    await relay.start()
    return relay


class Relays:
    """The relays of one test, each with its own socket directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.relays: list[Relay] = []
        self.started = 0

    async def stop(self, relay: Relay, *, drain_s: float = 0) -> None:
        self.relays.remove(relay)
        await relay.stop(drain_s=drain_s)

    async def end(self) -> None:
        """Stop the relays that still run."""
        for relay in self.relays:
            await relay.stop(drain_s=0)


class Site(Relays):
    """The relays of one site, which link to each other."""

    async def start(
        self, *join: Relay | str, keys: tuple[NetworkKey, ...] = (NETWORK,), **settings: Any
    ) -> Relay:
        self.started += 1
        relay = await start(self.directory / str(self.started), *join, keys=keys, **settings)
        self.relays.append(relay)
        return relay


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    await site.end()


def hub(relay: Relay) -> LinkHub:
    assert relay.links is not None
    return relay.links


def address(relay: Relay) -> str:
    return show(*hub(relay).addresses[0])


def seen(relay: Relay, source: str = "test", *, named: bool = False) -> Sighting:
    relay_id = relay.router.relay_id if named else None
    return Sighting(tuple(hub(relay).addresses), relay_id, hub(relay).fingerprints, source)


def link(one: Relay, other: Relay) -> LinkPort | None:
    """Return the port of `one` for its link to `other`, if there is a link."""
    found = one.router.links.get(other.router.relay_id)
    assert found is None or isinstance(found.port, LinkPort)
    return None if found is None else found.port


def ends(port: LinkPort | GatewayPort) -> tuple[Any, Any]:
    transport = port._transport
    return transport.get_extra_info("sockname"), transport.get_extra_info("peername")


def linked(*relays: Relay) -> bool:
    """Return whether each pair of relays shares exactly one link, and no relay has another connection."""
    for one in relays:
        if len(hub(one).ports) != len(relays) - 1:
            return False
        for other in relays:
            if one is not other:
                ours, theirs = link(one, other), link(other, one)
                if ours is None or theirs is None or ends(ours) != ends(theirs)[::-1]:
                    return False
    return True


class Host:
    """A relay in another process that holds a network key, with links on 127.0.0.1."""

    def __init__(
        self, directory: Path, *arguments: str, keys: tuple[NetworkKey, ...] = (NETWORK,), before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`before` runs in the process of the relay first."""
        directory.mkdir(0o700)
        self.keys = directory / "keys" / keyfiles.NETWORK_FILE
        self.keys.parent.mkdir(0o700)
        self.hold(*keys)
        here = ("--bind", "127.0.0.1", "--no-mdns", *arguments)
        settings = {"IRIS_CONFIG": str(self.keys.parent)}
        self.daemon = Daemon(directory, *here, settings=settings, dev=False, before=before)

    def hold(self, *keys: NetworkKey) -> None:
        """Write the file of network keys."""
        self.keys.write_text(dump_network_keys(keys))
        self.keys.chmod(0o600)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.daemon.lines() if line["event"] == name]

    @property
    def address(self) -> str:
        return str(self.events("links.listening")[-1]["addresses"][0])
