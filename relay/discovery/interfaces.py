"""This host's addresses, and when a change of them counts.

Neither zeroconf nor Python tells when an interface comes or goes, so they are polled. One look takes
0.5 to 1 ms with two interfaces and grows with them, so it belongs into a thread.
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
_IF_INET6: Final = Path("/proc/net/if_inet6")
# tentative (duplicate detection runs: it cannot be bound yet), or a duplicate
_UNUSABLE_V6: Final = 0x40 | 0x08


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """One address of one interface of this host."""

    interface: str
    index: int
    ip: str
    """Numeric, without scope."""

    prefix: int
    """Bits of the subnet."""

    up: bool = True
    """The interface is up and has a carrier: a dead one is listed, and costs nothing."""

    multicast: bool = True

    def __str__(self) -> str:
        return f"{self.interface} {self.ip}" + ("" if self.up else " (down)")

    @property
    def parsed(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.ip)


def scan() -> frozenset[Address]:
    """Return all addresses of this host that can be bound. It does system calls: call it in a thread.

    Raises:
        OSError: the system would not list them.
        ValueError: it lists something that is no address.
    """
    unusable = _unusable_v6()
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            adapters = list(ifaddr.get_adapters())
        except AssertionError as error:  # an address without a netmask
            raise ValueError(str(error)) from error
        for adapter in adapters:
            if adapter.index is None:  # it went while we looked
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
                        # loopback lacks the flag, and has multicast all the same
                        multicast=bool(flags & _IFF_MULTICAST) or parsed.is_loopback,
                    )
                )
    return frozenset(found)


def _flags(probe: socket.socket, name: str) -> int:
    """Return the interface's flags; as if all were set where the system has no such call."""
    request = struct.pack("16sH14x", name.encode()[:15], 0)
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
    except FileNotFoundError:
        return 0
    except OSError as error:
        if error.errno == 19:  # ENODEV: it went while we looked
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
    """Lets a change through once it was seen in two looks running, each address for itself.

    So an interface that flaps moves nothing, and does not hide that another one came.
    """

    __slots__ = ("_doubted", "settled")

    settled: frozenset[Address] | None
    """What counts; None before the first look, which counts at once."""

    def __init__(self) -> None:
        self.settled = None
        self._doubted: frozenset[Address] = frozenset()

    @property
    def unsettled(self) -> bool:
        """A change was seen once: look again soon."""
        return bool(self._doubted)

    def look(self, seen: frozenset[Address]) -> bool:
        """Take what was seen; True if `settled` changed."""
        if self.settled is None:
            self.settled = seen
            return True
        differs = seen ^ self.settled
        sure = differs & self._doubted
        self._doubted = differs - sure
        self.settled ^= sure
        return bool(sure)
