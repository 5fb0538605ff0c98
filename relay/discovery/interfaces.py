"""This host's addresses, and when a change of them is used.

Neither zeroconf nor Python reports when an interface appears or disappears, so the addresses are polled. A scan
takes 0.5 to 1 ms with two interfaces, and more with more of them, so it runs in a thread.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

import ifaddr

_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40
_IFF_MULTICAST: Final = 0x1000
_IF_INET6: Final = Path("/proc/self/net/if_inet6")  # with ProcSubset=pid, systemd hides /proc/net
# tentative (duplicate detection is running, and it cannot be bound yet), or a duplicate
_UNUSABLE_V6: Final = 0x40 | 0x08


_SYS: Final = Path("/sys/class/net")
_PROC: Final = Path("/proc/self/net")
_ARPHRD_ETHER: Final = 1
_UP, _REJECT = 0x1, 0x200  # flags of a route


class Rank(IntEnum):
    """What an interface leads to, nearest to the LAN first. A host can have more interfaces than are used."""

    DEFAULT_ROUTE = 0
    PHYSICAL = 1
    VIRTUAL = 2
    """A VLAN, a bond, or what the system does not describe."""
    INNER = 3
    """A bridge, an end of a veth pair, or a tunnel: to containers or machines within this host, or another network."""


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """One address of one interface of this host."""

    interface: str
    index: int
    ip: str
    """Numeric IP without scope."""

    prefix: int
    """Prefix length of the subnet, in bits."""

    up: bool = True
    """Whether the interface is up and has a carrier. Addresses of others are listed, but not used."""

    multicast: bool = True
    rank: Rank = Rank.VIRTUAL

    def __str__(self) -> str:
        return f"{self.interface} {self.ip}" + ("" if self.up else " (down)")

    @property
    def parsed(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.ip)


def scan() -> frozenset[Address]:
    """Return all addresses of this host that can be bound. Call it in a thread, because it does system calls.

    Raises:
        OSError: the system cannot list them.
        ValueError: the system lists something that is not an address.
    """
    unusable = _unusable_v6()
    routed = default_routes()
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            adapters = list(ifaddr.get_adapters())
        except AssertionError as error:  # an address without a netmask
            raise ValueError(str(error)) from error
        for adapter in adapters:
            if adapter.index is None:  # it was removed during the scan
                continue
            flags = _flags(probe, adapter.name)
            rank = Rank.DEFAULT_ROUTE if adapter.name in routed else rank_of(adapter.name)
            for each in adapter.ips:
                ip = each.ip if isinstance(each.ip, str) else each.ip[0].partition("%")[0]
                parsed = ipaddress.ip_address(ip)
                if (parsed.packed, adapter.index) in unusable:
                    continue
                found.add(
                    Address(
                        adapter.name,
                        adapter.index,
                        str(parsed),
                        each.network_prefix,
                        up=flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING,
                        # loopback lacks the flag, but supports multicast
                        multicast=bool(flags & _IFF_MULTICAST) or parsed.is_loopback,
                        rank=rank,
                    )
                )
    return frozenset(found)


def preferred(addresses: Iterable[Address]) -> list[Address]:
    """Return addresses in the order in which they are used: those that lead to the LAN first, link-local ones after
    the others of a rank."""
    return sorted(addresses, key=lambda a: (a.rank, a.parsed.is_link_local, a))


def rank_of(name: str, sys: Path = _SYS) -> Rank:
    """Return the rank of an interface that is not on a default route, from what sysfs says of it."""
    place = sys / name
    if (place / "device").exists():  # a network card, also a virtual machine's
        return Rank.PHYSICAL
    try:
        kind = int((place / "type").read_text())
        described = (place / "uevent").read_text()
    except (OSError, ValueError):  # removed during the scan, or no sysfs
        return Rank.VIRTUAL
    # Of the Ethernet devices made by software, a veth and a TAP device say nothing of their kind.
    if kind != _ARPHRD_ETHER or "DEVTYPE=" not in described or "DEVTYPE=bridge" in described:
        return Rank.INNER
    return Rank.INNER if "DEVTYPE=vxlan" in described else Rank.VIRTUAL


def default_routes(proc: Path = _PROC) -> set[str]:
    """Return the names of the interfaces on default routes of IPv4 and IPv6; none if the system cannot list them."""
    found = set()
    for name, family in (("route", 4), ("ipv6_route", 6)):
        try:
            lines = (proc / name).read_text().splitlines()
        except OSError:  # no such family, or not Linux
            continue
        for row in map(str.split, lines):
            if family == 4 and row[1] == row[7] == "0" * 8 and int(row[3], 16) & _UP:
                found.add(row[0])
            elif family == 6 and row[:2] == ["0" * 32, "00"] and not int(row[8], 16) & _REJECT:
                found.add(row[9])
    return found


def _flags(probe: socket.socket, name: str) -> int:
    """Return the interface's flags; all of them if the system cannot report them."""
    request = struct.pack("16sH14x", name.encode()[:15], 0)
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
    except FileNotFoundError:
        return 0
    except OSError as error:
        if error.errno == 19:  # ENODEV: it was removed during the scan
            return 0
        return _IFF_UP | _IFF_RUNNING | _IFF_MULTICAST
    flags: int = struct.unpack_from("16sH", answer)[1]
    return flags


def _unusable_v6() -> set[tuple[bytes, int]]:
    """Return (packed address, interface index) of IPv6 addresses that cannot be bound (Linux)."""
    try:
        lines = _IF_INET6.read_text("ascii").splitlines()
    except OSError:  # no IPv6, or not Linux
        return set()
    rows = [line.split() for line in lines]
    return {
        (bytes.fromhex(row[0]), int(row[1], 16)) for row in rows if int(row[4], 16) & _UNUSABLE_V6
    }


class Damper:
    """Accepts a change of an address after two scans in a row have shown it.

    So an interface that flaps changes nothing, and does not hide a new one.
    """

    __slots__ = ("_doubted", "settled")

    settled: frozenset[Address] | None
    """The accepted addresses; None before the first scan, which is accepted at once."""

    def __init__(self) -> None:
        self.settled = None
        self._doubted: frozenset[Address] = frozenset()

    @property
    def unsettled(self) -> bool:
        """Whether one scan showed a change that the next one must confirm."""
        return bool(self._doubted)

    def look(self, seen: frozenset[Address]) -> bool:
        """Add the result of a scan; return whether `settled` changed."""
        if self.settled is None:
            self.settled = seen
            return True
        differs = seen ^ self.settled
        sure = differs & self._doubted
        self._doubted = differs - sure
        self.settled ^= sure
        return bool(sure)
