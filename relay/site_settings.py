"""Reads the settings of gateways: `peer_site`, `site_cost`, `export` and `import`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iris.crypto.keys import parse_fingerprint
from iris.errors import ConfigError, InvalidName, KeyringError
from iris.wire.names import check_filter, check_site
from relay.address_settings import tls_address, whole
from relay.discovery.seeds import parse_join

MAX_SITES = 64
MAX_PINS = 8
"""Most keys that are pinned for one site. Two are needed while a site changes its key."""
MAX_GATEWAYS = 16
"""Most gateway addresses of one site."""
MAX_COST_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class PeerSite:
    """Another site, parsed from `peer_site`."""

    site: str
    addresses: tuple[tuple[str, int], ...]
    """Host (a name, or numeric without brackets) and port of each of its gateways to dial."""
    pins: tuple[bytes, ...]
    """Its pinned public keys, 32 bytes each."""


def peer_sites(texts: Sequence[str]) -> dict[str, PeerSite]:
    """Return the other sites by name, with the entries of one site combined.

    Raises:
        ConfigError: an entry is malformed, a limit is exceeded, or two sites have the same key.
    """
    found: dict[str, PeerSite] = {}
    for text in texts:
        more = _parse_peer_site(text)
        known = found.get(more.site, PeerSite(more.site, (), ()))
        found[more.site] = PeerSite(
            more.site,
            tuple(dict.fromkeys(known.addresses + more.addresses)),
            tuple(dict.fromkeys(known.pins + more.pins)),
        )
    if len(found) > MAX_SITES:
        raise ConfigError(f"peer_site: {len(found)} sites are over the limit of {MAX_SITES}")
    owners: dict[bytes, str] = {}
    for peer in found.values():
        if len(peer.addresses) > MAX_GATEWAYS or len(peer.pins) > MAX_PINS:
            raise ConfigError(
                f"peer_site: {peer.site} has {len(peer.addresses)} addresses and {len(peer.pins)} fingerprints; the limits are {MAX_GATEWAYS} and {MAX_PINS}"
            )
        for pin in peer.pins:
            owner = owners.setdefault(pin, peer.site)
            if owner != peer.site:
                raise ConfigError(
                    f"peer_site: {owner} and {peer.site} have the same fingerprint; each site needs a key of its own"
                )
    return found


def _parse_peer_site(text: str) -> PeerSite:
    """Return one entry SITE=[tls://HOST:PORT[,tls://HOST:PORT...]]#FINGERPRINT; raises ConfigError."""
    site, equals, rest = text.partition("=")
    listed, sharp, pin = rest.partition("#")
    if not equals or not sharp:
        raise ConfigError(f"peer_site: {text!r} is not SITE=tls://HOST:PORT#FINGERPRINT")
    check_site_name("peer_site", site)
    addresses: list[tuple[str, int]] = []
    for address in listed.split(",") if listed.strip() else ():
        host, port = tls_address("peer_site", address.strip())
        try:
            parse_join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except ConfigError as err:
            raise ConfigError(
                f"peer_site: {address!r} lacks a host or a port from 1 to 65535; write tls://HOST:PORT"
            ) from err
        addresses.append((host, port))
    try:
        return PeerSite(site, tuple(addresses), (parse_fingerprint(pin.strip()),))
    except KeyringError as err:
        raise ConfigError(f"peer_site: {site}: {err}") from err


def site_costs(texts: Sequence[str]) -> dict[str, int]:
    """Return the costs given for other sites: site -> ms; raises ConfigError."""
    costs: dict[str, int] = {}
    for text in texts:
        site, _, cost = text.partition("=")
        check_site_name("site_cost", site.strip())
        cost_ms = whole(cost.strip())
        if cost_ms is None or not 0 <= cost_ms <= MAX_COST_MS:
            raise ConfigError(
                f"site_cost: {text!r} is not SITE=MS, a whole number of ms from 0 to {MAX_COST_MS}"
            )
        if site.strip() in costs:
            raise ConfigError(f"site_cost: {site.strip()} is given twice; keep one")
        costs[site.strip()] = cost_ms
    return costs


def parse_pattern(setting: str, text: str) -> tuple[bool, str]:
    """Return (denies, name or filter) of a pattern of `export` or `import`; raises ConfigError."""
    denies = text.startswith("!")
    try:
        return denies, check_filter(text.removeprefix("!"))
    except InvalidName as err:
        raise ConfigError(f"{setting}: {err}") from err


def check_site_name(setting: str, name: str) -> None:
    """Raise ConfigError unless `name` is one that a site can have."""
    try:
        check_site(name)
    except InvalidName as err:
        raise ConfigError(f"{setting}: {err}") from err
