"""Sites for tests: each is a switch with gateways; a router between them has proxies that delay,
lose, stall and cut.

    eu: a, b ── switch eu ──┐            ┌── switch us ── us: c, d
                             └─ router ──┘
                                  └───── switch ap ── ap: e, f

Every gateway of a site dials every gateway of the sites named after it, each through its own proxy on the router.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hosts.kit import PATIENCE_S, Network, Program, Relay, wait_until
from support import warm
from support.commands import command
from support.namespaces import Host, Lan, listener
from support.proxy import FaultProxy

GATEWAY_PORT = 7440


class Site:
    """One site: its network, its key and its relays, which are gateways on `hosts` and others on `plain` hosts."""

    def __init__(self, federation: Federation, name: str, gateways: int, plain: int) -> None:
        self.federation = federation
        self.name = name
        lan = federation.lan
        self.network = Network(lan, federation.directory, name)
        self.key_file = self.network.directory / "site.toml"
        self.fingerprint = make_site_key(self.key_file)
        self.router = federation.router.plug(name)
        hosts = [lan.host(f"{name}{number}") for number in range(1, gateways + plain + 1)]
        for host in hosts:
            nic = host.plug(name)
            host.inside(partial(_route, host, self.router.ipv4, nic.name))
        self.hosts, self.plain = hosts[:gateways], hosts[gateways:]
        self.relays: list[Relay] = []
        """The relays, gateways first."""

    def arguments(self) -> list[str]:
        """Return the arguments of its gateways, without the sites that they dial."""
        return [
            "--site", self.name, "--site-key", str(self.key_file), "--gateway", f"tls://0.0.0.0:{GATEWAY_PORT}",
        ]  # fmt: skip

    def cut(self) -> None:
        """Disconnect the whole site from the others; its own network still works."""
        self.router.cut()

    def heal(self) -> None:
        """Connect the site again."""
        self.router.heal()

    @property
    def received_bytes(self) -> int:
        """Bytes that the site has received over the router's cable."""
        return self.router.traffic().sent_bytes


class Federation:
    """Sites and the router between them. A context manager that ends the proxies; relays end with their
    `Lan`.
    """

    def __init__(
        self, lan: Lan, directory: Path, names: Sequence[str] = ("eu", "us", "ap"), *, gateways: int = 2, plain: int = 0, delay_s: float = 0.0,
        arguments: Callable[[str], Sequence[str]] = lambda host: (),
    ) -> None:  # fmt: skip
        """`delay_s`: in each direction. `arguments`: further arguments for the gateway of a host."""
        self.lan = lan
        self.directory = directory
        self.router = lan.host("router")
        self.router.inside(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        self.sites = {name: Site(self, name, gateways, plain) for name in names}
        self.proxies: dict[tuple[str, str], FaultProxy] = {}
        """(host that dials, host that is dialled) -> proxy between them."""
        self._stack = contextlib.ExitStack()
        self._delay_s = delay_s
        self._arguments = arguments
        for one, other in itertools.pairwise(self.sites.values()):
            other.network.share_keyring(one.network)

    def __enter__(self) -> Self:
        try:
            dials = self._lay()
            for site in self.sites.values():
                self._start(site, dials)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._stack.close()

    def _lay(self) -> dict[str, list[str]]:
        """Start the proxies; return the arguments for other sites of each gateway, by its host's name."""
        dials: dict[str, list[str]] = {
            host.name: [] for site in self.sites.values() for host in site.hosts
        }
        for one, other in itertools.combinations(self.sites.values(), 2):
            for host in one.hosts:
                addresses = []
                for target in other.hosts:
                    proxy = self._proxy(host, one, target)
                    addresses.append(f"tls://{one.router.ipv4}:{proxy.port}")
                named = f"{other.name}={','.join(addresses)}#{other.fingerprint}"
                dials[host.name] += ["--peer-site", named]
            for host in other.hosts:
                dials[host.name] += ["--peer-site", f"{one.name}=#{one.fingerprint}"]
        return dials

    def _proxy(self, host: Host, site: Site, target: Host) -> FaultProxy:
        address = (target.nics["eth0"].ipv4, GATEWAY_PORT)

        def dial() -> tuple[socket.socket, tuple[Any, ...]]:
            return self.router.inside(
                lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            ), address

        made = FaultProxy(listener(self.router, family=socket.AF_INET), dial)
        made.delay_s = self._delay_s
        self.proxies[host.name, target.name] = self._stack.enter_context(made)
        return made

    def _start(self, site: Site, dials: dict[str, list[str]]) -> None:
        for host in (*site.hosts, *site.plain):
            arguments = tuple(self._arguments(host.name))
            if host in site.hosts:
                arguments += (*site.arguments(), *dials[host.name])
            relay = Relay(site.network, host, arguments, host.name)
            site.network.relays[host.name] = relay
            site.relays.append(relay)
            relay.launch()
        for relay in site.relays:
            relay.serves()

    # -- waiting -----------------------------------------------------------------------------------------------

    def joined(self) -> None:
        """Return when every site is meshed and every gateway has a connection to every gateway of each other site."""
        for site in self.sites.values():
            site.network.meshed()
        for site in self.sites.values():
            others = {name: len(s.hosts) for name, s in self.sites.items() if s is not site}
            for relay in site.relays[: len(site.hosts)]:
                wait_until(
                    lambda relay=relay, others=others: own_ways(relay) == others,
                    f"{relay.name} reaches {others}",
                )  # type: ignore[misc]  # bound at once

    def relays(self) -> Iterator[Relay]:
        """Iterate over all relays."""
        for site in self.sites.values():
            yield from site.relays

    def program(self, site: str, number: int = 0, name: str = "") -> Program:
        """Start a program at a relay of a site."""
        relay = self.sites[site].relays[number]
        return relay.program(name or f"{relay.name}-program")

    def between(self, one: str, other: str) -> list[FaultProxy]:
        """Return the proxies between two sites."""
        names = ({h.name for h in self.sites[one].hosts}, {h.name for h in self.sites[other].hosts})
        return [
            proxy
            for (a, b), proxy in self.proxies.items()
            if (a in names[0] and b in names[1]) or (a in names[1] and b in names[0])
        ]

    def stall(self, one: str, other: str) -> None:
        """Let nothing pass between two sites, without closing a connection."""
        for proxy in self.between(one, other):
            proxy.stall()

    def flow(self, one: str, other: str) -> None:
        """Let bytes pass between two sites again."""
        for proxy in self.between(one, other):
            proxy.flow()

    def cut(self, one: str, other: str) -> None:
        """Reset every connection between two sites."""
        for proxy in self.between(one, other):
            proxy.cut()

    def settled(self) -> None:
        """Check that no relay holds anything and every account balances."""
        for relay in self.relays():
            relay.settled()


def own_ways(relay: Relay) -> dict[str, int]:
    """Return the number of a gateway's own WAN connections, by site."""
    return {
        site["site"]: sum(way["own"] for way in site["ways"])
        for site in relay.status()["sites"]
        if any(way["own"] for way in site["ways"])
    }


def make_site_key(path: Path) -> str:
    """Create a site key, as an operator does, and return its fingerprint."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(path.parent)}
    done = warm.run(command("federation", "key", str(path)), env=environ, timeout=PATIENCE_S)
    done.check_returncode()
    return done.stdout.decode().split()[-1]


def _route(host: Host, router: str, nic: str) -> None:
    command = [
        shutil.which("ip") or "ip",
        "route",
        "replace",
        "10.77.0.0/16",
        "via",
        router,
        "dev",
        nic,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
