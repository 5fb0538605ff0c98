"""Finds other relays and reports them as sightings.

A sighting says where a relay may be listening. It is a hint from an unauthenticated network: the TLS handshake of a
link decides whether a relay of this network answers there. Discovery does not know links; the daemon passes
sightings to the dialler.

    zeroconf.py     multicast DNS on the LAN
    sightings.py    the relays that adverts on the LAN name
    adverts.py      the content of an advert, and the order of its addresses (sans-IO)
    seeds.py        addresses and names given by the operator (`--join`)
    interfaces.py   this host's addresses, and when a change of them is used
    feed.py         the queue between a discovery and its reader
    zeroconflog.py  the zeroconf library's warnings as log events
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

DEFAULT_PORT: Final = 7430
"""Default TCP port of links, for accepting and dialling."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A relay may accept links at any of `addresses`, or does not any more (`gone`)."""

    addresses: tuple[tuple[str, int], ...]
    """(numeric IP, port) pairs, best first; a link-local IP has its scope ("fe80::1%eth0"). If `gone`, the
    addresses to stop using."""

    relay_id: bytes | None = None
    """None if unknown, as for a seed."""

    networks: tuple[bytes, ...] = ()
    """16-byte fingerprints of the networks that the advert names; () if unknown."""

    source: str = ""
    """"mdns", "join 10.0.0.7:7430", "dns:relays.example:7430" or "peer"."""

    gone: bool = False
    """Whether to stop dialling it. A link that is up stays."""


class Discovery(Protocol):
    """One way to find relays, such as multicast DNS."""

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield what is found, from now until `close`, to a single reader.

        The search starts with this call, in the running loop, and continues if the reader is cancelled; only
        `close` ends it. A sighting replaces earlier ones of its source and relay (or address), so a slow
        reader misses none that is still valid. If an internal error ends the search, it is raised.
        """
        ...

    async def close(self) -> None:
        """Stop searching and say goodbye, within a second. Idempotent; if cancelled, skip the rest of the goodbye."""
        ...

    def status(self) -> dict[str, object]:
        """Return the state, ready for JSON. `tried` is a list of texts for people: where it searched."""
        ...
