"""This host's addresses, and when a change of them is used.

Neither zeroconf nor Python reports when an interface appears or disappears, so the addresses are polled. A scan
takes 0.5 to 1 ms with two interfaces, and more with more of them, so it runs in a thread.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
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
                    )
                )
    return frozenset(found)


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
