"""How relays find each other: sources of sightings, and nothing else.

A sighting says where a relay may be listening. It is a hint from an unauthenticated network: whether a
relay of our network answers there is decided by the link's TLS handshake. Sources know nothing of links;
the daemon hands what they say to whoever dials.

    zeroconf.py     multicast DNS on the LAN
    seeds.py        addresses and names that the operator gave (`--join`)
    adverts.py      what an advert says, and which of its addresses to try first (sans-IO)
    interfaces.py   this host's addresses, and when a change of them counts
    feed.py         sightings on their way to their reader
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

DEFAULT_PORT: Final = 7430
"""TCP port on which relays accept links, and dial, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A relay may listen at any of `addresses`, or no longer does (`gone`)."""

    addresses: tuple[tuple[str, int], ...]
    """Numeric IP (a link-local one with its scope: "fe80::1%eth0") and port, best first. Of a sighting
    that is `gone`: the addresses that no longer count."""

    relay_id: bytes | None = None
    """None: unknown, as for a seed."""

    networks: tuple[bytes, ...] = ()
    """16-byte fingerprints that the advert names; () if unknown."""

    source: str = ""
    """"mdns", "join 10.0.0.7:7430", "dns:relays.example:7430" or "peer"."""

    gone: bool = False
    """Stop dialling it. A live link stays."""


class Discovery(Protocol):
    """One way to find relays."""

    def sightings(self) -> AsyncIterator[Sighting]:
        """Yield what is found, from now until `close`; for one reader.

        Searching begins with the call, in the running loop, and goes on when the reader is cancelled:
        only `close` ends it. A sighting replaces the earlier ones of its source and relay (or address), so a
        reader that lags misses none that still holds. Raises what ended the search, if it was a fault.
        """
        ...

    async def close(self) -> None:
        """Stop searching and say goodbye, within a second. Again is harmless; a cancelled one skips
        what is left of the goodbye."""
        ...

    def status(self) -> dict[str, object]:
        """Return JSON-able facts. `tried` is a list of texts: where it searched, for people to read."""
        ...
