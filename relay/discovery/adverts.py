"""The content of an advert, and the order in which to dial its addresses. Sans-IO.

The TXT record has `v` (protocol version), `id` (the relay id in hex), `site`, and `net0`, `net1`, ...: the
fingerprints of the networks whose keys the relay holds, in hex, separated by commas. An entry has at most seven
of them, because its limit is 255 bytes. Unknown keys are ignored; of a repeated key the first one is used.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from iris.crypto.keys import RELAY_ID_BYTES
from iris.wire.kinds import PROTOCOL_VERSION
from relay.discovery.interfaces import Address, preferred

SERVICE_TYPE: Final = "_iris-relay._tcp.local."
FINGERPRINT_BYTES: Final = 16
MAX_NETWORKS: Final = 32
"""Most networks in one advert: five entries, so that advert and addresses fit into one packet."""

MAX_SITE_BYTES: Final = 63
MAX_ADDRESSES: Final = 32
"""Most addresses of one advert that are sent, or read."""
MAX_DIALLED: Final = 8
"""Most addresses of one advert that are dialled."""

_MAX_TXT_BYTES: Final = 4096
_NETWORKS_PER_ENTRY: Final = 7
_HEX_ID: Final = re.compile(rb"[0-9a-fA-F]{%d}" % (2 * RELAY_ID_BYTES))
_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * RELAY_ID_BYTES}}})\.{re.escape(SERVICE_TYPE)}")


class BadAdvert(ValueError):
    """An advert is not valid; `reason`, one of a fixed set of words, is the key under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Advert:
    """The content of a relay's TXT record."""

    relay_id: bytes
    networks: tuple[bytes, ...]
    site: str = ""


def instance_name(relay_id: bytes) -> str:
    """Return the name under which a relay is advertised, unique to each start of a relay."""
    return f"{relay_id.hex()}.{SERVICE_TYPE}"


def relay_id_in(name: str) -> bytes:
    """Return the relay id in an instance name.

    Raises:
        BadAdvert: it is not the name of a relay.
    """
    match = _NAME.fullmatch(name.lower())
    if match is None:
        raise BadAdvert("bad_name")
    return bytes.fromhex(match[1])


def encode_txt(advert: Advert) -> bytes:
    """Return the TXT record's data.

    Raises:
        ValueError: there are no networks or over 32, or the site name has over 63 bytes of UTF-8.
    """
    if not 1 <= len(advert.networks) <= MAX_NETWORKS:
        raise ValueError(
            f"{len(advert.networks)} networks cannot be advertised; the limits are 1 and {MAX_NETWORKS}"
        )
    if any(len(network) != FINGERPRINT_BYTES for network in advert.networks):
        raise ValueError(f"a network's fingerprint must have {FINGERPRINT_BYTES} bytes")
    site = advert.site.encode()
    if len(site) > MAX_SITE_BYTES:
        raise ValueError(f"the site's name has {len(site)} bytes; the limit is {MAX_SITE_BYTES}")
    entries = [b"v=%d" % PROTOCOL_VERSION, b"id=" + advert.relay_id.hex().encode()]
    if site:
        entries.append(b"site=" + site)
    names = [network.hex().encode() for network in advert.networks]
    for number, first in enumerate(range(0, len(names), _NETWORKS_PER_ENTRY)):
        shown = b",".join(names[first : first + _NETWORKS_PER_ENTRY])
        entries.append(b"net%d=%b" % (number, shown))
    return b"".join(bytes((len(entry),)) + entry for entry in entries)


def decode_txt(text: bytes) -> Advert:
    """Return the advert in a TXT record's data.

    Raises:
        BadAdvert: the data is malformed, or of another version of the protocol.
    """
    fields = _fields(text)
    version = fields.get(b"v", b"")
    if not version.isdigit() or len(version) > 9:
        raise BadAdvert("bad_version")
    if int(version) != PROTOCOL_VERSION:
        raise BadAdvert("other_version")
    relay_id = _identifier(fields.get(b"id", b""), "bad_id")
    try:
        site = fields.get(b"site", b"").decode()
    except UnicodeDecodeError as error:
        raise BadAdvert("bad_site") from error
    if len(fields.get(b"site", b"")) > MAX_SITE_BYTES or not (site.isprintable() or not site):
        raise BadAdvert("bad_site")
    networks: dict[bytes, None] = {}
    for number in range(MAX_NETWORKS):
        entry = fields.get(b"net%d" % number)
        if entry is None:
            break
        for each in entry.split(b","):
            networks[_identifier(each, "bad_network")] = None
    if not networks:
        raise BadAdvert("no_network")
    if len(networks) > MAX_NETWORKS:
        raise BadAdvert("many_networks")
    return Advert(relay_id, tuple(networks), site)


def _fields(text: bytes) -> dict[bytes, bytes]:
    if len(text) > _MAX_TXT_BYTES:
        raise BadAdvert("long_txt")
    fields: dict[bytes, bytes] = {}
    at = 0
    while at < len(text):
        end = at + 1 + text[at]
        if end > len(text):
            raise BadAdvert("cut_txt")
        key, _, value = text[at + 1 : end].partition(b"=")
        fields.setdefault(key.lower(), value)
        at = end
    return fields


def _identifier(shown: bytes, reason: str) -> bytes:
    if not _HEX_ID.fullmatch(shown):
        raise BadAdvert(reason)
    return bytes.fromhex(shown.decode())


def announced(local: Iterable[Address]) -> tuple[str, ...]:
    """Return this host's addresses for an advert: those of interfaces that are up, at most 32.

    Those that lead to the LAN are kept first, and link-local ones come last. Loopback addresses are included only if
    there are no others.
    """
    live = [address for address in preferred(local) if address.up]
    real = [address for address in live if not address.parsed.is_loopback]
    kept = list({address.ip: address for address in real or live}.values())[:MAX_ADDRESSES]
    return tuple(a.ip for a in sorted(kept, key=lambda address: address.parsed.is_link_local))


def best_first(
    advertised: Iterable[str], port: int, local: frozenset[Address]
) -> tuple[tuple[str, int], ...]:
    """Return the (address, port) pairs of an advert to dial from this host, best first, at most `MAX_DIALLED`.

    Addresses in a subnet of this host come first, then link-local ones. Addresses behind a router are left out: adverts
    stay within a LAN, and anybody there can send them, so they must not make this relay dial other networks.

    An address that this host has, too, comes last, because container bridges have the same one on every host. If this
    host has all of them, the relay is on this host. A link-local IPv6 address needs the scope of the interface on which
    it was received ("%2") and is left out without it, as are addresses that cannot be connected to.
    """
    own = {address.parsed for address in local}
    subnets = [
        ipaddress.ip_network((address.ip, address.prefix), strict=False)
        for address in local
        if address.up and not (address.parsed.version == 6 and address.parsed.is_link_local)
    ]
    names = {str(address.index): address.interface for address in local}
    kept: dict[str, tuple[bool, int, int, bytes]] = {}
    for text in list(advertised)[:MAX_ADDRESSES]:
        bare, _, scope = text.partition("%")
        ip = ipaddress.ip_address(bare)
        if ip.is_multicast or ip.is_unspecified or (ip.version == 6 and ip.ipv4_mapped):
            continue
        if ip.version == 6 and ip.is_link_local:
            if not scope:
                continue
            bare = f"{ip}%{names.get(scope, scope)}"
            distance = 1
        elif any(ip in subnet for subnet in subnets if subnet.version == ip.version):
            distance = int(ip.is_link_local)
        else:
            continue
        kept[bare] = (ip in own, distance, ip.version, ip.packed)
    return tuple((text, port) for text in sorted(kept, key=kept.__getitem__)[:MAX_DIALLED])
